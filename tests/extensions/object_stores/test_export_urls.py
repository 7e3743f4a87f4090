"""Exports to URLs, for a client of an object store that keeps objects in a folder."""

from __future__ import annotations

import errno

import pytest
import torch
from support.object_stores.folder_client import Bucket
from support.runs.file_system import Fault

from accel_runtime import Accelerator
from accel_runtime.extensions.object_stores import remote
from accel_runtime.storage.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("on_the_cpu")

URL = "s3://bucket/model"


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    return use_bucket(monkeypatch, tmp_path)


def use_bucket(monkeypatch, folder, fault=None):
    bucket = Bucket(folder, fault)
    monkeypatch.setattr(remote, "share_client", lambda: bucket)
    return bucket


def build_model(value):
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 10))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    return Accelerator().prepare(model)


def list_names(bucket):
    return [each.key.removeprefix(f"{URL}/") for each in bucket.list(f"{URL}/")]


def find_values(model):
    return {value for parameter in model.parameters() for value in parameter.flatten().tolist()}


@pytest.mark.parametrize("size", ["10GB", "4KB"], ids=["one file", "several files"])
def test_a_model_is_saved_and_loaded_by_its_url(bucket, size):
    accelerator, target = Accelerator(), build_model(0.0)
    accelerator.save_model(build_model(3.0), URL, max_shard_size=size)
    assert list_names(bucket)[0].startswith("model")
    accelerator.load_model(target, URL)
    assert find_values(target) == {3.0}


def test_an_export_of_another_number_of_files_leaves_none_of_the_earlier_one(bucket):
    accelerator = Accelerator()
    for value, size in ((1.0, "4KB"), (2.0, "10GB"), (3.0, "4KB"), (4.0, "4KB")):
        accelerator.save_model(build_model(value), URL, max_shard_size=size)
        names, target = list_names(bucket), build_model(0.0)
        assert ("model.safetensors" in names) == (size == "10GB") == (len(names) == 1)
        accelerator.load_model(target, URL)
        assert find_values(target) == {value}


def test_an_export_that_fails_at_any_call_is_that_of_one_model_or_absent(tmp_path, monkeypatch):
    accelerator = Accelerator()
    for call in range(1, 30):
        folder = tmp_path / str(call)
        use_bucket(monkeypatch, folder)
        accelerator.save_model(build_model(1.0), URL, max_shard_size="4KB")
        failing = use_bucket(monkeypatch, folder, Fault(call, errno.EIO))
        try:
            accelerator.save_model(build_model(2.0), URL, max_shard_size="4KB")
        except CheckpointError as error:
            assert f"Cannot write the model to {URL}" in str(error)
        use_bucket(monkeypatch, folder)
        target = build_model(0.0)
        try:
            accelerator.load_model(target, URL)
        except CheckpointError as error:
            assert "No weights found" in str(error)
            assert find_values(target) == {0.0}
        else:
            assert find_values(target) in ({1.0}, {2.0})
        if len(failing.calls) < call:
            break
    assert call > 5


def test_missing_weights_are_an_error_that_names_the_url(bucket):
    with pytest.raises(CheckpointError, match=f"No weights found in {URL}: neither model.safetensors nor"):
        Accelerator().load_model(build_model(0.0), URL)
