"""The commands of the SageMaker page work with an AWS on loopback and the documented permissions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.processes import commands
from support.sources import docs_reader as docs

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "sagemaker.md"
ACTIONS = {
    "s3:HeadBucket": "s3:ListBucket",
    "s3:HeadObject": "s3:GetObject",
    "s3:ListObjectsV2": "s3:ListBucket",
    "s3:CreateMultipartUpload": "s3:PutObject",
    "s3:UploadPart": "s3:PutObject",
    "s3:CompleteMultipartUpload": "s3:PutObject",
    "s3:DeleteObjects": "s3:DeleteObject",
    "s3:ListBuckets": "s3:ListAllMyBuckets",
}
"""The permission of a call, if it has another name."""
FREE = {"sts:GetCallerIdentity"}
"""Calls that need no permission."""


@pytest.mark.full
def test_the_sagemaker_page_shows_the_real_output(aws, tmp_path, monkeypatch):
    here = Path(__file__).relative_to(ROOT).as_posix()
    # The command line of AWS is not among the packages of the tests: boto3 sends the same requests below.
    elsewhere = {
        command: why
        for command, why in docs.ELSEWHERE.items()
        if why.covered != here or command.startswith("aws ")
    }
    aws.role()
    aws.run = True
    commands.preload("aws.preloaded")

    class Reader(docs.Reader):
        @staticmethod
        def _compare(shown, output, message):
            # On loopback the hosts have addresses for names.
            plain = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in output]
            docs.Reader._compare(tuple(line.replace("algo-1", "127.1") for line in shown), plain, message)

    reader = Reader(tmp_path, elsewhere, aws.env)
    monkeypatch.chdir(reader.folder)
    for block in docs.blocks(PAGE):
        if block.title:
            reader.file(block)
        elif block.language == "console":
            reader.console(block)
    iam, name = aws.client("iam"), "accel-training"
    trust, policy = ((reader.folder / f"{file}.json").read_text() for file in ("trust", "policy"))
    iam.create_role(RoleName=name, AssumeRolePolicyDocument=trust)
    iam.put_role_policy(RoleName=name, PolicyName=name, PolicyDocument=policy)
    assert (reader.folder / "first-try" / "model.pt").is_file()
    called = {ACTIONS.get(call, call) for call in aws.calls()} - FREE
    named = set(re.findall(r"`(\w+:\w+)`", PAGE.read_text(encoding="utf-8")))
    assert (
        {"iam:GetRole", "logs:GetLogEvents", "s3:PutObject", "sagemaker:CreateTrainingJob"} < called <= named
    )
