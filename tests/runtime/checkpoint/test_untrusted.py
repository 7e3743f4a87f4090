"""Loading an untrusted checkpoint runs no code of it and accesses no file outside it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from support.runs.file_system import Run, rewrite_manifest, write_manifest

from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.manifest import NAME, hash_bytes


class DirectoryPayload:
    """An object that creates a directory when it is unpickled."""

    def __init__(self, payload_directory):
        self.directory = payload_directory

    def __reduce__(self):
        return os.mkdir, (str(self.directory),)


@pytest.fixture
def payload_directory(memory):
    """Return the directory that the payload would create; it must not exist after the test."""
    path = memory / "executed"
    yield path
    assert not path.exists()


@pytest.fixture(scope="module")
def pristine(module_memory):
    """Return a run with a checkpoint of step 3, which tests copy."""
    run = Run(module_memory / "project")
    assert run.save(3) is None
    return run


@pytest.fixture
def project(pristine):
    pristine.set_step(9)
    return pristine


@pytest.fixture
def newest(pristine, memory):
    """Return a copy of the checkpoint."""
    return Path(shutil.copytree(pristine.acc.checkpoints.newest().path, memory / "checkpoint_0"))


def test_the_payload_runs_if_it_is_unpickled(memory):
    pickle.loads(pickle.dumps(DirectoryPayload(memory / "it does")))  # noqa: S301 - the purpose of the test
    assert (memory / "it does").is_dir()


def test_untracked_pickles_in_a_checkpoint_are_logged_and_not_read(
    project, newest, payload_directory, caplog
):
    for name in (
        "optimizer.bin",
        "custom_checkpoint_0.pkl",
        "random_states_0.pkl",
        "pytorch_model.bin",
        "x.pt",
    ):
        (newest / name).write_bytes(pickle.dumps(DirectoryPayload(payload_directory)))
    torch.save(DirectoryPayload(payload_directory), newest / "scheduler.bin")
    project.acc.load_state(newest)
    assert project.step() == 3
    assert (
        "not read: custom_checkpoint_0.pkl, optimizer.bin, pytorch_model.bin, random_states_0.pkl"
        in caplog.text
    )


def test_a_pickle_in_place_of_any_file_is_rejected(project, newest, payload_directory):
    payload = pickle.dumps(DirectoryPayload(payload_directory))
    for path in sorted(newest.iterdir()):
        data = path.read_bytes()
        for content in (payload, payload.ljust(len(data), b"\0")[: max(len(data), len(payload))]):
            path.write_bytes(content)
            assert path.name in project.fail_to_load(newest)
        path.write_bytes(data)


def test_a_pickle_in_tensor_data_with_valid_checksums_is_loaded_as_numbers(
    project, newest, payload_directory
):
    payload = pickle.dumps(DirectoryPayload(payload_directory))
    path = newest / "model.safetensors"
    data = bytearray(path.read_bytes())
    start = len(data) - len(payload) // 8 * 8 - 8
    data[start : start + len(payload)] = payload
    path.write_bytes(data)

    def update_checksums(body):
        for stored in body["tensors"].values():
            for chunk in stored["chunks"]:
                if chunk["file"] == path.name:
                    chunk["checksum"] = hash_bytes(
                        bytes(data[chunk["start"] : chunk["start"] + chunk["bytes"]])
                    )

    rewrite_manifest(newest, update_checksums)
    project.acc.load_state(newest)


def test_a_pickle_in_a_header_with_a_valid_checksum_is_not_read(project, newest, payload_directory):
    path = newest / "model.safetensors"
    data = bytearray(path.read_bytes())
    payload = pickle.dumps(DirectoryPayload(payload_directory))
    data[8 : 8 + len(payload)] = payload
    path.write_bytes(data)

    def update_checksum(body):
        file = body["files"][path.name]
        file["header_checksum"] = hash_bytes(bytes(data[: file["header"]]))

    rewrite_manifest(newest, update_checksum)
    project.acc.load_state(newest)
    assert project.step() == 3


MALFORMED_STATES = [
    {"$": "pickle", "base64": "gASVAAAA"},
    {"$": "eval", "value": "__import__('os').mkdir('executed')"},
    {"$": "__class__"},
    {"$": None},
    {"$": ["tensor"]},
    {"$": "deque", "items": [], "maxlen": 2**64},
    {"$": "tensor"},
    {"$": "tensor", "name": "model/nothing"},
    {"$": "tensor", "name": ["model/0.weight"]},
    {"$": "dtype", "value": "load"},
    {"$": "dtype", "value": "os.system"},
    {"$": "dtype", "value": 7},
    {"$": "device", "value": "import os"},
    {"$": "numpy", "dtype": "O", "base64": "AAAAAAAAAAA="},
    {"$": "numpy", "dtype": "V8,O", "base64": "AAAAAAAAAAA="},
    {"$": "numpy", "dtype": "<f8", "base64": ""},
    {"$": "defaultdict", "items": [], "factory": "exec"},
    {"$": "defaultdict", "items": [], "factory": "__import__"},
    {"$": "dict", "items": [[[], 1]]},
    {"$": "dict", "items": 5},
    {"$": "deque", "items": [1], "maxlen": "x"},
    {"$": "complex", "value": "print(1)"},
    {"$": "size", "items": ["a"]},
    {"$": "ndarray", "tensor": 1},
    {"$": "bytes", "base64": 3},
]


@pytest.mark.parametrize("state", MALFORMED_STATES, ids=str)
def test_malformed_states_are_rejected_before_anything_changes(project, newest, state):
    rewrite_manifest(newest, lambda body: body["values"]["registered"].update(odd=state))
    assert "registered" in project.fail_to_load(newest)


@pytest.mark.parametrize("dtype", ["load", "os", "__name__", "nn", "float33", "", "compile", "Tensor"])
def test_an_invalid_dtype_is_rejected(project, newest, dtype):
    rewrite_manifest(newest, lambda body: body["tensors"]["model/0.weight"].update(dtype=dtype))
    assert "model/0.weight" in project.fail_to_load(newest)


def test_a_dtype_of_another_size_is_rejected(project, newest):
    rewrite_manifest(newest, lambda body: body["tensors"]["model/0.weight"].update(dtype="float64"))
    assert "['chunks'][0] is float64 of shape [8, 8], and has 256 bytes" in project.fail_to_load(newest)


ESCAPING_NAMES = [
    "../../secret",
    "/etc/passwd",
    "a/../../secret",
    "..",
    ".",
    "",
    "a//b",
    "./a",
    "a/",
    NAME,
    ".unfinished",
    "a\0b",
]


@pytest.mark.parametrize("name", ESCAPING_NAMES)
def test_file_names_outside_a_checkpoint_are_rejected(project, newest, name):
    rewrite_manifest(newest, lambda body: body["files"].update({name: body["files"]["model.safetensors"]}))
    assert "should be the name of a file inside a checkpoint" in project.fail_to_load(newest)


@pytest.mark.parametrize("name", ESCAPING_NAMES)
def test_tensors_in_files_outside_a_checkpoint_are_rejected(project, newest, name):
    rewrite_manifest(newest, lambda body: body["tensors"]["model/0.weight"]["chunks"][0].update(file=name))
    assert "tensors['model/0.weight']" in project.fail_to_load(newest)


def test_files_named_in_a_forged_manifest_are_not_deleted(memory):
    run = Run(memory, total_limit=1)
    (memory / "precious").write_text("of the user")
    run.set_step(1)
    path = Path(run.acc.save_state())
    rewrite_manifest(
        path, lambda body: body["files"].update({"../../precious": body["files"]["model.safetensors"]})
    )
    run.set_step(2)
    run.acc.save_state()
    run.set_step(3)
    run.acc.save_state()
    assert (memory / "precious").read_text() == "of the user"
    # It cannot be loaded, so it is not counted; it is kept so that the user can inspect it.
    assert path.is_dir()
    assert [checkpoint.number for checkpoint in run.acc.checkpoints.list()] == [2]


def change_weight(**fields):
    return lambda body: body["tensors"]["model/0.weight"].update(fields)


def change_chunk(**fields):
    return lambda body: body["tensors"]["model/0.weight"]["chunks"][0].update(fields)


def split_chunk(*regions):
    """Split the chunk of an 8 x 8 float32 tensor into these: offsets, sizes and start in bytes."""

    def change(body):
        chunk = body["tensors"]["model/0.weight"]["chunks"][0]
        body["tensors"]["model/0.weight"]["chunks"] = [
            chunk
            | {
                "offsets": offsets,
                "sizes": sizes,
                "start": chunk["start"] + start,
                "bytes": 4 * sizes[0] * sizes[1],
            }
            for offsets, sizes, start in regions
        ]

    return change


INVALID_TENSORS = {
    "elements that are not there": change_weight(shape=[10**8, 10**7]),
    "a huge shape with huge parts": lambda body: (
        change_weight(shape=[10**15])(body),
        change_chunk(sizes=[10**15], offsets=[0])(body),
    ),
    "more bytes than the file": change_chunk(bytes=10**15),
    "a start beyond the end": change_chunk(start=10**9),
    "a negative start": change_chunk(start=-8),
    "a part beyond the tensor": change_chunk(offsets=[8, 0]),
    "a part that is too small": change_chunk(sizes=[4, 8], bytes=128),
    "a part of other dimensions": change_chunk(sizes=[64], offsets=[0]),
    "no parts": change_weight(chunks=[]),
    "a shape of text": change_weight(shape=["8", "8"]),
    "a negative shape": change_weight(shape=[-8, -8]),
    "parts that overlap": split_chunk(([0, 0], [5, 8], 0), ([3, 0], [5, 8], 96)),
    "parts that overlap and leave a hole": split_chunk(([0, 0], [4, 8], 0), ([0, 0], [4, 8], 128)),
    "corners that overlap": split_chunk(([0, 0], [8, 4], 0), ([0, 2], [8, 4], 128)),
    "another width": change_chunk(bytes=64 * 3),
    "a file that is a list": lambda body: body["files"].update({"model.safetensors": []}),
    "a part without its checksum": lambda body: body["tensors"]["model/0.weight"]["chunks"][0].pop(
        "checksum"
    ),
}


@pytest.mark.parametrize("name", INVALID_TENSORS)
def test_invalid_tensor_entries_are_rejected_before_memory_is_allocated(project, newest, name):
    rewrite_manifest(newest, INVALID_TENSORS[name])
    assert f"{newest / NAME} cannot be used: " in project.fail_to_load(newest)


def test_chunks_that_cover_a_tensor_in_any_order_are_loaded(project, newest):
    rewrite_manifest(newest, split_chunk(([4, 0], [4, 8], 128), ([0, 0], [4, 8], 0)))

    def update_checksums(body):
        for part in body["tensors"]["model/0.weight"]["chunks"]:
            data = (newest / part["file"]).read_bytes()[part["start"] : part["start"] + part["bytes"]]
            part["checksum"] = hash_bytes(data)

    rewrite_manifest(newest, update_checksums)
    project.acc.load_state(newest)
    assert project.step() == 3


def test_states_of_a_wrong_type_are_rejected(project, newest):
    original = (newest / NAME).read_bytes()
    for item in ("model", "optimizer", "random", "scheduler", "accumulation", "step_counts"):
        for value in (None, 1, "text", [], {"$": "tuple", "items": []}):
            rewrite_manifest(
                newest, lambda body, item=item, value=value: body["values"].update({item: value})
            )
            with pytest.raises(CheckpointError) as raised:
                project.acc.load_state(newest)
            assert str(newest) in str(raised.value), (item, value)
            (newest / NAME).write_bytes(original)
            project.set_step(9)


def test_a_deeply_nested_state_is_rejected(project, newest):
    deep = "[" * 100_000 + "]" * 100_000
    body = json.loads((newest / NAME).read_text())["checkpoint"]
    body["values"]["registered"]["odd"] = "HERE"
    text = json.dumps(body, separators=(",", ":")).replace('"HERE"', deep)
    write_manifest(newest, text)
    assert "is damaged" in project.fail_to_load(newest)


def test_a_symlink_out_of_the_checkpoint_is_rejected(project, newest, memory):
    secret = memory / "secret"
    shutil.copy(newest / "model.safetensors", secret)
    secret.write_bytes(secret.read_bytes()[:-1] + b"\1")
    (newest / "model.safetensors").unlink()
    (newest / "model.safetensors").symlink_to(secret)
    assert "is damaged" in project.fail_to_load(newest)
