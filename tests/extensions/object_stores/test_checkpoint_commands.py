"""`accel checkpoint` on URLs, for a client of an object store that keeps objects in a folder."""

from __future__ import annotations

import json
import os

import pytest
import torch
from support.object_stores.folder_client import Bucket
from support.processes.commands import call_accel

from accel_cli.commands import checkpoint_operations
from accel_runtime import Accelerator, ProjectConfiguration
from accel_runtime.extensions.object_stores import client_process
from accel_runtime.extensions.object_stores.store import ObjectStore
from accel_runtime.storage.any_store import AnyStore, open_store
from accel_runtime.storage.file_store import FileStore

URL = "s3://bucket/run"


@pytest.fixture
def bucket(cwd, monkeypatch):
    """Return a bucket with two checkpoints of a project, which the commands use."""
    bucket = Bucket(cwd / ".bucket")
    store = AnyStore(FileStore(), lambda _: ObjectStore(bucket, piece_bytes=1 << 10))
    monkeypatch.setattr(checkpoint_operations, "_STORE", store)
    project = ProjectConfiguration(project_dir=URL, automatic_checkpoint_naming=True)
    accelerator, model = Accelerator(project_config=project), torch.nn.Linear(20, 30)
    accelerator._checkpoints._store = store
    accelerator.prepare(model)
    for value in (1.0, 2.0):
        torch.nn.init.constant_(model.weight, value)
        assert accelerator.save_state().startswith(f"{URL}/checkpoints/checkpoint_")
    return bucket


def damage_newest(bucket):
    key = next(
        each.key
        for each in bucket.list(f"{URL}/checkpoints/checkpoint_1/")
        if "model.safetensors" in each.key
    )
    bucket.put(key, bytes(len(bucket.get(key)[0])))


def test_a_project_a_folder_of_checkpoints_and_a_checkpoint_are_listed(capfd, bucket):
    names = [f"{URL}/checkpoints/checkpoint_{number}" for number in range(2)]
    for location, expected in ((URL, names), (f"{URL}/checkpoints/", names), (names[1], names[1:])):
        result = call_accel(capfd, "checkpoint", "list", "--json", location)
        listed = json.loads(result.stdout)["checkpoints"]
        assert [each["path"] for each in listed] == expected
        assert {each["problem"] for each in listed} == {""}
    result = call_accel(capfd, "checkpoint", "list", "s3://bucket/nothing")
    assert (result.returncode, result.stderr) == (0, "accel: no checkpoints found in s3://bucket/nothing\n")


def test_a_damaged_checkpoint_is_found_and_an_earlier_one_named(capfd, bucket):
    assert call_accel(capfd, "checkpoint", "verify", URL).returncode == 0
    damage_newest(bucket)
    result = call_accel(capfd, "checkpoint", "verify", URL)
    assert result.returncode == 1
    assert "checkpoint_1/model.safetensors is damaged: model/" in result.stderr
    assert f"the newest undamaged checkpoint before it is {URL}/checkpoints/checkpoint_0" in result.stderr


def test_a_checkpoint_is_shown_exported_and_copied_both_ways(capfd, bucket, cwd):
    from safetensors.torch import load_file

    assert "model" in call_accel(capfd, "checkpoint", "show", URL).stdout
    assert call_accel(capfd, "checkpoint", "export", URL, "-o", "model.safetensors").returncode == 0
    assert set(load_file("model.safetensors")["weight"].flatten().tolist()) == {2.0}
    assert call_accel(capfd, "checkpoint", "copy", URL, "local").returncode == 0
    assert call_accel(capfd, "checkpoint", "copy", "local", "s3://bucket/copied").returncode == 0
    for location in ("local", "s3://bucket/copied"):
        result = call_accel(capfd, "checkpoint", "verify", "--json", location)
        assert json.loads(result.stdout)["complete"]
    result = call_accel(capfd, "checkpoint", "copy", "local", "s3://bucket/copied")
    assert result.returncode == 2
    assert "s3://bucket/copied exists. Remove it" in result.stderr


def test_a_damaged_checkpoint_is_not_copied(capfd, bucket, cwd):
    damage_newest(bucket)
    result = call_accel(capfd, "checkpoint", "copy", f"{URL}/checkpoints/checkpoint_1", "local")
    assert result.returncode == 1
    assert "model.safetensors is damaged: the file does not have its checksum" in result.stderr
    assert not [path for path in cwd.iterdir() if "local" in path.name]


def test_old_checkpoints_are_removed_with_all_their_objects(capfd, bucket):
    result = call_accel(capfd, "checkpoint", "prune", URL, "--keep", "1", "--yes")
    assert result.returncode == 0
    assert bucket.list(f"{URL}/checkpoints/checkpoint_0/") == []
    assert call_accel(capfd, "checkpoint", "verify", URL).returncode == 0


def test_a_running_save_is_named_and_kept_by_prune(capfd, bucket):
    key = f"{URL}/checkpoints/checkpoint_2"
    draft = checkpoint_operations._STORE.begin(key, "c3", new=True)
    draft.put("model.safetensors", [memoryview(b"1")], 1)
    explanation = "was left by a crash, or belongs to a running save: prune and later saves remove it an hour after its last write"
    assert f"{key} {explanation}" in call_accel(capfd, "checkpoint", "list", URL).stderr
    result = call_accel(capfd, "checkpoint", "prune", URL, "--keep", "2", "--yes")
    assert f"{key} was kept: it {explanation}" in result.stderr
    assert bucket.list(f"{key}/parts/c3/")


def test_prune_removes_what_a_crash_left_an_hour_ago_also_under_the_greatest_number(capfd, bucket):
    key = f"{URL}/checkpoints/checkpoint_2"
    bucket.seconds = -7200
    draft = checkpoint_operations._STORE.begin(key, "c3", new=True)
    draft.put("model.safetensors", [memoryview(b"1")], 1)
    bucket.seconds = 0
    assert f"{key} was left by a crash" in call_accel(capfd, "checkpoint", "list", URL).stderr
    result = call_accel(capfd, "checkpoint", "prune", URL, "--keep", "2", "--yes")
    assert (result.returncode, "was kept" in result.stderr) == (0, False)
    assert not [each for each in bucket.list(f"{URL}/") if "checkpoint_2" in each.key]
    assert "crash" not in call_accel(capfd, "checkpoint", "list", URL).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["export", URL, "-o", "s3://bucket/model.safetensors"],
            "files of other formats are on disk. Give a path.",
        ),
        (["export", URL, "-o", "s3://bucket/model", "--format", "hf"], "files of other formats are on disk."),
        (["import", "s3://bucket/dcp", "-o", "local"], "files of other formats are on disk. Give a path."),
        (["verify", "s3://bucket/nothing"], "No checkpoint found in 's3://bucket/nothing'."),
        (["list", "s3://"], "Invalid location 's3://': expected s3://BUCKET/PATH."),
    ],
)
def test_a_url_that_a_command_cannot_use_is_an_error_of_one_line(capfd, bucket, arguments, message):
    result = call_accel(capfd, "checkpoint", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_client_that_is_not_installed_is_an_error_and_no_damaged_checkpoint(capfd, cwd, monkeypatch):
    monkeypatch.setattr(client_process, "explain_missing_client", lambda: "obstore is missing. Install it.")
    monkeypatch.setattr(checkpoint_operations, "_STORE", open_store(retry_s=0.125))
    for command in ("list", "verify", "show"):
        result = call_accel(capfd, "checkpoint", command, URL)
        assert (result.returncode, result.stdout) == (2, "")
        assert "obstore is missing. Install it." in result.stderr


def test_the_variables_of_the_profile_are_set_unless_the_environment_has_them(cwd, monkeypatch):
    (cwd / "accel.yaml").write_text(
        "schema_version: 1\nenv:\n  AWS_REGION: eu-central-1\n  AWS_ENDPOINT_URL: http://127.0.0.1:9\n"
    )
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    checkpoint_operations._set_profile_variables()
    assert os.environ.pop("AWS_REGION") == "eu-central-1"
    assert os.environ["AWS_ENDPOINT_URL"] == "http://127.0.0.1:1"
