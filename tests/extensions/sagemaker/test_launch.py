"""`accel launch` of a SageMaker job, with an AWS on loopback; `test_run.py` has the real command."""

import json
import os
from pathlib import Path

import pytest
from support.processes.commands import call_accel

from accel_cli.extensions.sagemaker.service import SageMakerJobs
from accel_cli.launchers.job_service import PollIntervals

BUCKET = "sagemaker-us-east-1-123456789012"
PROFILE = """
schema_version: 1
launcher:
  kind: sagemaker
  instance_type: ml.m5.large
  pytorch_version: "2.9"
"""
pytestmark = pytest.mark.usefixtures("small_bundle")


@pytest.fixture
def launch(aws, cwd, script, monkeypatch, capfd):
    """Call `accel launch train.py` in a folder with a profile, with an account with a role."""
    script("pass")
    (cwd / "accel.yaml").write_text(PROFILE)
    aws.role()
    monkeypatch.setattr(SageMakerJobs, "intervals", PollIntervals(0.01, (0.01, 0.01), 0.01))
    return lambda *words: call_accel(capfd, "launch", "--job-name", "mine", *words, "train.py")


def test_the_printed_commands_contain_the_options_of_the_launch(aws, cwd, launch, capfd):
    (cwd / "accel.yaml").unlink()
    options = [
        "launcher.kind=sagemaker",
        "launcher.pytorch_version='2.9'",
        "launcher.instance_type=ml.m5.large",
        "launcher.region=eu-west-1",
    ]
    result = launch("--detach", *(word for option in options for word in ("--set", option)))
    assert result.stdout == "mine\n", result.stderr
    options = "--launcher sagemaker --set launcher.region=eu-west-1"
    assert (
        f"Follow it with accel jobs logs mine -f {options} or stop it with accel jobs stop mine"
        in result.stderr
    )
    status = call_accel(capfd, "jobs", "status", "mine", *options.split())
    assert status.stdout.startswith("id\tmine\n")


def test_a_dry_run_shows_the_upload_and_changes_nothing(aws, launch):
    result = launch("--dry-run")
    assert result.returncode == 0, result.stderr
    assert f"bundle: s3://{BUCKET}/accel/mine/bundle/" in result.stdout
    assert "nothing was sent or changed" in result.stdout
    assert aws.client("s3").list_buckets()["Buckets"] == []


def test_offline_prints_the_request_on_stdout(launch, monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    result = launch("--offline", "--set", "launcher.region=eu-west-1")
    request = json.loads(result.stdout)
    assert request["TrainingJobName"] == "mine"
    assert (
        request["OutputDataConfig"]["S3OutputPath"] == "s3://sagemaker-eu-west-1-<account>/accel/mine/output"
    )
    assert result.stderr == ""


@pytest.mark.parametrize("options", [("--set", "launcher.region="), ("--set", "launcher.role=trainr")])
def test_an_error_is_one_message_with_exit_code_2(aws, launch, monkeypatch, options):
    monkeypatch.delenv("AWS_DEFAULT_REGION" if "region" in options[1] else "none", raising=False)
    result = launch(*options)
    assert (result.returncode, result.stdout) == (2, "")
    assert len([line for line in result.stderr.splitlines() if line.startswith("accel: error: ")]) == 1
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("outcome", "code", "words"),
    [
        (("Completed", {"weights.txt": "w"}), 0, ["results are in ", "100 billable seconds on each of 2 instances"]),
        (("Completed", {}), 0, ["accel: Job mine left nothing in "]),
        (("Failed", {}), 1, ["boom on rank 1", "accel jobs download mine fetches what it left"]),
    ],
)  # fmt: skip
def test_a_job_is_followed_to_its_end_and_its_model_is_downloaded(aws, launch, outcome, code, words):
    status, model = outcome
    reason = {"FailureReason": "ValueError: boom on rank 1"} if code else {}
    lines = {"algo-1": ["one", "two"], "algo-2": ["three"]}
    aws.play(
        status,
        states=[("InProgress", "Training")],
        lines=lines,
        model=model,
        TrainingTimeInSeconds=100,
        BillableTimeInSeconds=100,
        **reason,
    )
    result = launch("--set", "launcher.instance_count=2")
    assert result.returncode == code, result.stderr
    assert {"algo-1 | one", "algo-1 | two", "algo-2 | three"} < set(result.stdout.splitlines())
    assert all(text in result.stderr for text in words), result.stderr
    assert [path.name for path in Path().glob("mine/*.txt")] == list(model)
