"""Files with credentials are not sent: by their names, and by the tokens in them. Ordinary files are."""

import base64
import functools
import json
import random
import string
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_cli.errors import UsageError
from accel_cli.launchers import secret_files
from accel_cli.launchers.secret_files import (
    SECRET_NAMES,
    FoundToken,
    find_rows,
    find_tokens,
    is_secret_file,
    is_secret_name,
)
from accel_cli.launchers.source_files import check_selected, describe_selection, select_files

DATA = Path(__file__).parents[2] / "data"


def read_names(file):
    """Return the names in a list: one a line, below headings."""
    lines = (DATA / file).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("# ")]


def test_only_its_row_of_the_table_keeps_back_an_example():
    assert [row.pattern for row in SECRET_NAMES if row.pattern != row.pattern.lower()] == []
    assert [row.pattern for row in SECRET_NAMES if set(find_rows(row.example)) != {row}] == []
    assert [
        row.pattern
        for row in SECRET_NAMES
        if is_secret_name(f"some/folder/{row.example}") == bool(row.content)
    ] == []


def test_a_name_without_its_row_is_sent(monkeypatch):
    for name in ("_compile_table", "_find_by_folder", "_find_by_name"):
        function = getattr(secret_files, name).__wrapped__
        monkeypatch.setattr(secret_files, name, functools.cache(function))  # of another table
    monkeypatch.setattr(
        secret_files, "SECRET_NAMES", [row for row in SECRET_NAMES if row.pattern not in {"*.pem", ".aws/"}]
    )
    assert not is_secret_name("server.pem")
    assert not is_secret_name(".aws/config")
    assert is_secret_name(".kube/config")


def test_names_of_credentials_are_kept_back():
    names = read_names("secret_names.txt")
    assert len(names) > 500
    assert [
        name for name in names if not (is_secret_name(name) and is_secret_name(f"some/folder/{name}"))
    ] == []


def test_ordinary_names_are_sent():
    names = read_names("ordinary_names.txt")
    assert len(names) > 300
    assert [name for name in names if is_secret_name(name) or is_secret_name(f"some/folder/{name}")] == []


def test_variables_of_an_environment_are_kept_back_in_each_language():
    names = [".env", ".env.local", ".env-ci", ".envrc", ".netrc", ".netrc-work"]
    spelled = [f"{name}{ending}" for name in names for ending in secret_files._CODE_NAMES]
    assert [name for name in spelled if not is_secret_name(name)] == []


ACCOUNT = '{"type": "service_account", "private_key_id": "0a1b", "private_key": "short"}'
CONTENTS = {
    "my-project-0a1b2c3d4e5f.json": ACCOUNT,
    "trainer-ml-research-428711-9f3c2ab71de0.json": ACCOUNT,
    "keys/vision-prod-b64c0d5e9a12.json": ACCOUNT,
    "trainer-sa.json": ACCOUNT,
    "clouds.yaml": "clouds:\n  dev:\n    auth:\n      username: me\n",
    "clouds.yml": '{"clouds": {"dev": {"auth_url": "https://host"}}}',
    "session.json": '[{"name": "sessionid", "value": "1"}]',
    "sessions.json": '{"access_token": "1"}',
    "session.txt": "1BVts" + "Ab3_" * 80,
    "deployment-config.json": '{"type": "sftp", "host": "h", "username": "me", "password": "x"}',
    "kaggle-me.json": '{"username": "me", "key": "' + "0a" * 16 + '"}',
    "kaggle2.json": "KGAT_0a1b",
    "aegis-export.json": '{"version": 1, "header": {"slots": null}, "db": {"entries": []}}',
}


def test_a_name_that_ordinary_files_have_too_is_decided_by_the_text(tmp_path):
    assert {row for name in CONTENTS for row in find_rows(name)} == {
        row for row in SECRET_NAMES if row.content
    }
    (tmp_path / "keys").mkdir()
    for name in CONTENTS:
        (tmp_path / name).write_text(
            '{"lr": 0.1, "epochs": 3, "keys": ["nose", "eye"], "tokenizer": "bpe", "max_tokens": 5}'
        )
    names = sorted(CONTENTS)
    assert [file.name for file in select_files(tmp_path).files] == names
    for name, text in CONTENTS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / f"{name}.bak").write_text(text)
    copies = sorted(f"{name}.bak" for name in names)
    assert sorted(select_files(tmp_path).secrets) == sorted(names + copies)
    assert sorted(select_files(tmp_path, ["**"]).secrets) == sorted(names + copies)
    named = select_files(tmp_path, names)
    assert ([file.name for file in named.files], sorted(named.secrets)) == (names, copies)


def test_a_file_whose_text_cannot_be_read_is_kept_back(tmp_path):
    for name, data in {"clouds.yaml.gz": b"\x1f\0", "clouds.yaml.asc": b"-----BEGIN"}.items():
        (tmp_path / name).write_bytes(data)
        assert is_secret_file(tmp_path, name), name


COPIES = [
    "{}~", "#{}#", ".{}.swp", "{}.bak", "{}.old", "{}.1", "{}.2026-01-01", "{}-backup", "{} (2)", "{} copy", "Copy of {}", "old_{}",
    "{}.gpg", "{}.asc", "{}.age", "{}.enc", "{}.zip", "{}.tar.gz", "{}.tar.gz.gpg", "{}.7z", "{}.zst", "{}.bak.gpg",
]  # fmt: skip


@given(st.sampled_from(SECRET_NAMES), st.lists(st.sampled_from(COPIES), min_size=1, max_size=2))
def test_a_copy_or_an_archive_of_a_file_with_credentials_is_kept_back(row, copies):
    folder, slash, name = row.example.rpartition("/")
    for copy in copies:
        name = copy.format(name)
    assert row in set(find_rows(f"{folder}{slash}{name}"))


def test_a_pattern_that_names_a_secret_sends_it(tmp_path):
    names = {"api_key.txt", "conf/terraform.tfvars", ".huggingface/token", "tokens.txt"}
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert set(select_files(tmp_path).secrets) == names - {"tokens.txt"}
    assert not select_files(tmp_path, ["api_key.txt", "*.tfvars", ".huggingface/**"]).secrets
    assert set(select_files(tmp_path, ["**", "*.txt", "conf/*"]).secrets) == names - {"tokens.txt"}


def make(alphabet, length, seed=0):
    """Return random characters, so that no token stands in this file."""
    return "".join(random.Random(seed).choices(alphabet, k=length))


WORD, HEX = string.ascii_letters + string.digits, "0123456789abcdef"
KEY = "-----BEGIN {}PRIVATE KEY-----{}" + make(WORD, 64)
PART = base64.urlsafe_b64encode(json.dumps({"alg": "HS256", "sub": "4711"}).encode()).decode().rstrip("=")
TOKENS = {
    "AWS Access Key": ["AKIA" + make(string.ascii_uppercase, 16), f'aws_secret_access_key = "{make(WORD, 40)}"'],
    "Anthropic Key": ["sk-ant-api03-" + make(WORD, 93) + "AA"],
    "Azure Storage Account access key": ["AccountKey=" + make(WORD, 86) + "=="],
    "Basic Auth Credentials": [f"postgres://me:{make(WORD, 12)}@db.internal/x"],
    "age Key": ["AGE-SECRET-KEY-1" + make(string.ascii_uppercase + string.digits, 58)],
    "Databricks Token": ["dapi" + make(HEX, 32)],
    "GitHub Fine-Grained Token": ["github_pat_" + make(WORD, 82)],
    "GitHub Token": [f"gh{kind}_" + make(WORD, 36) for kind in "pousr"],
    "GitLab Token": ["glpat-" + make(WORD, 20)],
    "Google API Key": ["AIza" + make(WORD, 35)],
    "Groq Key": ["gsk_" + make(WORD, 52)],
    "Hugging Face Token": ["hf_" + make(string.ascii_letters, 34), "api_org_" + make(string.ascii_letters, 34)],
    "JSON Web Token": [f"{PART}.{PART}.{make(WORD, 43)}"],
    "NPM tokens": ["//registry.npmjs.org/:_authToken=npm_" + make(WORD, 30)],
    "NVIDIA Key": ["nvapi-" + make(WORD, 64)],
    "npm Token": ["npm_" + make(WORD, 36)],
    "OpenAI Token": [
        "sk-proj-" + make(WORD, 60) + "-" + make(WORD, 13) + "T3BlbkFJ" + make(WORD, 74), "sk-" + make(WORD, 20) + "T3BlbkFJ" + make(WORD, 20)],
    "Private Key": [
        KEY.format("", "\n"), KEY.format("RSA ", "\nProc-Type: 4,ENCRYPTED\n\n"), KEY.format("OPENSSH ", "\\n"),
        KEY.format("EC ", '\\n" +\n  "'),
    ],
    "PyPI Token": ["pypi-AgEIcHlwaS5vcmc" + make(WORD, 80)],
    "Replicate Token": ["r8_" + make(WORD, 37)],
    "SendGrid API Key": ["SG." + make(WORD, 22) + "." + make(WORD, 43)],
    "Slack Token": ["xoxb-123456-" + make(HEX, 24), "https://hooks.slack.com/services/T1/B2/" + make(WORD, 24)],
    "Stripe Access Key": ["sk_live_" + make(WORD, 24)],
    "Vault Token": ["hvs." + make(WORD, 95)],
    "W&B Key": ["WANDB_API_KEY=" + make(HEX, 40), "wandb_v1_" + make(WORD, 60)],
}  # fmt: skip
FRAMES = ["{}", "token: {}\n", '{{"key": "{}"}}', "x\n" * 9 + "key = '{}'  # mine\n"]


@pytest.mark.parametrize("frame", FRAMES)
def test_a_token_of_each_kind_is_found_with_its_line(tmp_path, frame):
    samples = [(kind, text) for kind, texts in TOKENS.items() for text in texts]
    for number, (_, text) in enumerate(samples):
        (tmp_path / f"{number:03}.txt").write_text(frame.format(text))
    found = find_tokens(tmp_path, [f"{number:03}.txt" for number in range(len(samples))]).found
    line = frame.split("{}")[0].count("\n") + 1
    assert found == tuple(
        FoundToken(f"{number:03}.txt", line, kind, is_code=False) for number, (kind, _) in enumerate(samples)
    )


TOKEN = TOKENS["GitHub Token"][0]


def test_a_file_with_a_token_is_not_sent_and_is_listed_with_the_reason(tmp_path):
    (tmp_path / "notes.txt").write_text(f"token:\n{TOKEN}")
    (tmp_path / "train.py").write_text("import torch\n")
    selection = select_files(tmp_path)
    reason = "not sent, since they may hold secrets: notes.txt (line 2: GitHub Token)"
    assert [file.name for file in selection.files] == ["train.py"]
    assert reason in [*describe_selection(selection)][-1]
    assert selection.notes[0].startswith(reason)
    assert TOKEN not in str(selection)
    with pytest.raises(UsageError, match=r"notes.txt is needed, but is not sent: it may hold secrets"):
        check_selected(selection, "notes.txt")
    assert [file.name for file in select_files(tmp_path, ["*.txt"]).files] == ["train.py"]
    assert [file.name for file in select_files(tmp_path, ["notes.txt"]).files] == ["notes.txt", "train.py"]


@pytest.mark.parametrize("name", ["train.py", "pkg/a.pyx", "run.sh", "job.sbatch", "kernel.cu", "script"])
def test_source_code_with_a_token_is_refused_unless_it_is_named(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n\ntoken = '{TOKEN}'\n")
    with pytest.raises(UsageError) as error:
        select_files(tmp_path)
    assert f"1 file(s) of source code contain a token or a password: {name}:3 (GitHub Token)." in str(
        error.value
    )
    assert TOKEN not in str(error.value)
    with pytest.raises(UsageError):
        select_files(tmp_path, ["**"])
    assert [file.name for file in select_files(tmp_path, [name]).files] == [name]
    assert select_files(tmp_path, [], [name]).files == ()


ORDINARY = [
    "https://user:password@host/", "https://me:short@host/", "https://{user}:{password}@host", "http://$USER:$PASSWORD@host",
    "postgres://postgres:my-password@localhost", "AKIAIOSFODNN7EXAMPLE", "hf_" + "x" * 34, "ghp_" + "0" * 36,
    "if '-----BEGIN PRIVATE KEY-----' in text:", "-----BEGIN RSA PRIVATE KEY-----\n...\n", "hf_transfer_download_of_a_model",
    "-----BEGIN CERTIFICATE-----\n" + make(WORD, 64), "sha256:" + make(HEX, 64), make(WORD + "+/", 4000),
    f"commit {make(HEX, 40)}", "arn:aws:sagemaker:us-east-1:123456789012:labeling-job/name-of-a-job-that-is-long-enough",
    "x" + make(WORD, 3) + "AKIA" + make(string.ascii_uppercase, 16), "WANDB_API_KEY=$WANDB_API_KEY", 'os.environ["HF_TOKEN"]',
    json.dumps({"cells": [{"outputs": [{"image/png": base64.b64encode(random.Random(1).randbytes(90_000)).decode()}]}]}),
    json.dumps({"model": {"vocab": {make(WORD, 8, seed): seed for seed in range(3000)}}}), "token " * 9,
]  # fmt: skip


def test_ordinary_text_has_no_token(tmp_path):
    names = [f"{number}.py" for number in range(len(ORDINARY))]
    for name, text in zip(names, ORDINARY, strict=True):
        (tmp_path / name).write_text(text)
    assert find_tokens(tmp_path, names).found == ()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1"])
def test_text_of_every_encoding_is_searched(tmp_path, encoding):
    (tmp_path / "a").write_bytes(f"Schlüssel {TOKEN}".encode(encoding))
    assert [token.kind for token in find_tokens(tmp_path, ["a"]).found] == ["GitHub Token"]


def test_binary_large_and_special_files_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(secret_files, "_MAX_FILE_BYTES", 1000)
    (tmp_path / "binary").write_bytes(b"\0" + TOKEN.encode())
    (tmp_path / "large").write_text(" " * 1000 + TOKEN)
    (tmp_path / "link").symlink_to("/dev/zero")
    secret_files.os.mkfifo(tmp_path / "pipe")
    names = ["binary", "large", "link", "pipe", "gone"]
    assert find_tokens(tmp_path, names) == secret_files.TokenSearch((), 0, len(TOKEN) + 1)


def test_files_beyond_the_limit_are_reported_and_the_smallest_are_searched_first(tmp_path, monkeypatch):
    monkeypatch.setattr(secret_files, "_MAX_BYTES", 100)
    (tmp_path / "a_large.txt").write_text("x" * 90)
    (tmp_path / "z_small.txt").write_text(TOKEN)
    selection = select_files(tmp_path)
    assert selection.secrets == ("z_small.txt",)
    assert selection.notes[0] == "1 file was not searched for tokens, after 40 B"


def test_nothing_is_sent_to_verify_a_token(tmp_path, monkeypatch):
    import socket

    def refuse(*_):
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    (tmp_path / "a.txt").write_text("\n".join(text for texts in TOKENS.values() for text in texts))
    assert len(find_tokens(tmp_path, ["a.txt"]).found) == 1


def test_the_names_do_not_import_the_detectors():
    import subprocess

    code = "import sys, accel_cli.launchers.source_files as s; assert 'detect_secrets' not in sys.modules and 'requests' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
