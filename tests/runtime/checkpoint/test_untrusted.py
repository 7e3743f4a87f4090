"""Nothing in a checkpoint runs, whatever was planted in it, and no name in it leads out of it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from failing_disk import Run, same

from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.manifest import NAME, hash_bytes


class Payload:
    """Unpickled, it makes a directory that the test looks for."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


@pytest.fixture
def trace(memory):
    """Where the payload would leave its trace; it must not be there in the end."""
    path = memory / "executed"
    yield path
    assert not path.exists()


@pytest.fixture
def project(memory):
    run = Run(memory / "project")
    run.put(3)
    run.acc.save_state()
    run.put(9)
    return run


@pytest.fixture
def newest(project):
    return project.acc.checkpoints.newest().path


def forge(path, change):
    """Change a manifest and give it the right checksum, as somebody does who means harm."""
    body = json.loads((path / NAME).read_text())["checkpoint"]
    change(body)
    text = json.dumps(body, separators=(",", ":"))
    (path / NAME).write_text(f'{{"checksum":"{hash_bytes(text.encode())}",\n"checkpoint":{text}}}\n')


def refused(run, path):
    before = run.live()
    with pytest.raises(CheckpointError) as raised:
        run.acc.load_state(path)
    assert same(run.live(), before)
    return str(raised.value)


def test_the_payload_would_run(memory):
    pickle.loads(pickle.dumps(Payload(memory / "it does")))  # noqa: S301 - to see that it would
    assert (memory / "it does").is_dir()


def test_pickles_beside_the_files_are_not_read_and_told(project, newest, trace, caplog):
    for name in (
        "optimizer.bin",
        "custom_checkpoint_0.pkl",
        "random_states_0.pkl",
        "pytorch_model.bin",
        "x.pt",
    ):
        (newest / name).write_bytes(pickle.dumps(Payload(trace)))
    torch.save(Payload(trace), newest / "scheduler.bin")
    project.acc.load_state(newest)
    assert project.step() == 3
    assert (
        "not read: custom_checkpoint_0.pkl, optimizer.bin, pytorch_model.bin, random_states_0.pkl"
        in caplog.text
    )


def test_pickles_in_place_of_any_file_are_refused(project, newest, trace):
    harm = pickle.dumps(Payload(trace))
    for path in sorted(newest.iterdir()):
        data = path.read_bytes()
        for put in (harm, harm.ljust(len(data), b"\0")[: max(len(data), len(harm))]):
            path.write_bytes(put)
            assert path.name in refused(project, newest)
        path.write_bytes(data)


def test_pickles_as_the_bytes_of_files_with_the_right_checksums_are_only_numbers(project, newest, trace):
    harm = pickle.dumps(Payload(trace))
    path = newest / "model.safetensors"
    data = bytearray(path.read_bytes())
    start = len(data) - len(harm) // 8 * 8 - 8
    data[start : start + len(harm)] = harm
    path.write_bytes(data)

    def resum(body):
        for stored in body["tensors"].values():
            for chunk in stored["chunks"]:
                if chunk["file"] == path.name:
                    chunk["checksum"] = hash_bytes(
                        bytes(data[chunk["start"] : chunk["start"] + chunk["bytes"]])
                    )

    forge(newest, resum)
    project.acc.load_state(newest)


def test_pickles_in_a_header_with_the_right_checksum_are_not_read(project, newest, trace):
    path = newest / "model.safetensors"
    data = bytearray(path.read_bytes())
    harm = pickle.dumps(Payload(trace))
    data[8 : 8 + len(harm)] = harm
    path.write_bytes(data)

    def resum(body):
        file = body["files"][path.name]
        file["header_checksum"] = hash_bytes(bytes(data[: file["header"]]))

    forge(newest, resum)
    project.acc.load_state(newest)
    assert project.step() == 3


ODD = [
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


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_odd_words_in_a_state_are_refused_before_anything_changes(project, newest, odd):
    forge(newest, lambda body: body["values"]["registered"].update(odd=odd))
    assert "the state of registered" in refused(project, newest)


@pytest.mark.parametrize("dtype", ["load", "os", "__name__", "nn", "float33", "", "compile", "Tensor"])
def test_a_dtype_that_is_none_is_refused(project, newest, dtype):
    forge(newest, lambda body: body["tensors"]["model/0.weight"].update(dtype=dtype))
    assert "model/0.weight" in refused(project, newest)


def test_a_dtype_of_another_width_is_refused(project, newest):
    forge(newest, lambda body: body["tensors"]["model/0.weight"].update(dtype="float64"))
    assert "model/0.weight is float64 of shape [8, 8], and its parts have 256 bytes" in refused(
        project, newest
    )


NAMES = [
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


@pytest.mark.parametrize("name", NAMES)
def test_names_that_lead_out_of_a_checkpoint_are_refused(project, newest, name):
    forge(newest, lambda body: body["files"].update({name: body["files"]["model.safetensors"]}))
    assert "is not the name of a file inside a checkpoint" in refused(project, newest)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_in_files_that_lead_out_are_refused(project, newest, name):
    forge(newest, lambda body: body["tensors"]["model/0.weight"]["chunks"][0].update(file=name))
    assert "tensor model/0.weight" in refused(project, newest)


def test_a_manifest_does_not_decide_what_is_deleted(memory):
    run = Run(memory, total_limit=1)
    (memory / "precious").write_text("of the user")
    run.put(1)
    path = Path(run.acc.save_state())
    forge(path, lambda body: body["files"].update({"../../precious": body["files"]["model.safetensors"]}))
    run.put(2)
    run.acc.save_state()
    run.put(3)
    run.acc.save_state()
    assert (memory / "precious").read_text() == "of the user"
    # It is none that could be loaded, so it is not counted, and stays for somebody to look at.
    assert path.is_dir()
    assert [found.number for found in run.acc.checkpoints.list()] == [2]


def weight(**change):
    return lambda body: body["tensors"]["model/0.weight"].update(change)


def chunk(**change):
    return lambda body: body["tensors"]["model/0.weight"]["chunks"][0].update(change)


def halves(*boxes):
    """Cut the chunk of an 8 x 8 tensor of float32 into these: offsets, sizes, and where they begin."""

    def change(body):
        whole = body["tensors"]["model/0.weight"]["chunks"][0]
        body["tensors"]["model/0.weight"]["chunks"] = [
            whole | {"offsets": o, "sizes": s, "start": whole["start"] + at, "bytes": 4 * s[0] * s[1]}
            for o, s, at in boxes
        ]

    return change


LIES = {
    "elements that are not there": weight(shape=[10**8, 10**7]),
    "a huge shape with huge parts": lambda body: (
        weight(shape=[10**15])(body),
        chunk(sizes=[10**15], offsets=[0])(body),
    ),
    "more bytes than the file": chunk(bytes=10**15),
    "a start beyond the end": chunk(start=10**9),
    "a negative start": chunk(start=-8),
    "a part beyond the tensor": chunk(offsets=[8, 0]),
    "a part that is too small": chunk(sizes=[4, 8], bytes=128),
    "a part of other dimensions": chunk(sizes=[64], offsets=[0]),
    "no parts": weight(chunks=[]),
    "a shape of text": weight(shape=["8", "8"]),
    "a negative shape": weight(shape=[-8, -8]),
    "parts that overlap": halves(([0, 0], [5, 8], 0), ([3, 0], [5, 8], 96)),
    "parts that overlap and leave a hole": halves(([0, 0], [4, 8], 0), ([0, 0], [4, 8], 128)),
    "corners that overlap": halves(([0, 0], [8, 4], 0), ([0, 2], [8, 4], 128)),
    "another width": chunk(bytes=64 * 3),
    "a file that is a list": lambda body: body["files"].update({"model.safetensors": []}),
    "a part without its checksum": lambda body: body["tensors"]["model/0.weight"]["chunks"][0].pop(
        "checksum"
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_what_cannot_be_true_is_refused_before_memory_is_taken(project, newest, name):
    forge(newest, LIES[name])
    message = refused(project, newest)
    assert f"{newest / NAME} cannot be used: " in message or "and its parts have" in message


def test_parts_that_make_up_a_tensor_are_taken(project, newest):
    forge(newest, halves(([4, 0], [4, 8], 128), ([0, 0], [4, 8], 0)))
    for stored in ("checksum",):

        def resum(body, key=stored):
            for part in body["tensors"]["model/0.weight"]["chunks"]:
                data = (newest / part["file"]).read_bytes()[part["start"] : part["start"] + part["bytes"]]
                part[key] = hash_bytes(data)

        forge(newest, resum)
    project.acc.load_state(newest)
    assert project.step() == 3


def test_states_that_are_not_of_their_kind_are_refused(project, newest):
    whole = (newest / NAME).read_bytes()
    for item in ("model", "optimizer", "random", "scheduler", "window", "counters"):
        for wrong in (None, 1, "text", [], {"$": "tuple", "items": []}):
            forge(newest, lambda body, item=item, wrong=wrong: body["values"].update({item: wrong}))
            with pytest.raises(CheckpointError) as raised:
                project.acc.load_state(newest)
            assert str(newest) in str(raised.value), (item, wrong)
            (newest / NAME).write_bytes(whole)
            project.put(9)


def test_nested_beyond_reason_is_refused(project, newest):
    deep = "[" * 100_000 + "]" * 100_000
    body = json.loads((newest / NAME).read_text())["checkpoint"]
    body["values"]["registered"]["odd"] = "HERE"
    text = json.dumps(body, separators=(",", ":")).replace('"HERE"', deep)
    (newest / NAME).write_text(f'{{"checksum":"{hash_bytes(text.encode())}",\n"checkpoint":{text}}}\n')
    assert "is damaged" in refused(project, newest)


def test_a_link_out_of_the_checkpoint_is_none_of_its_files(project, newest, memory):
    secret = memory / "secret"
    shutil.copy(newest / "model.safetensors", secret)
    secret.write_bytes(secret.read_bytes()[:-1] + b"\1")
    (newest / "model.safetensors").unlink()
    (newest / "model.safetensors").symlink_to(secret)
    assert "is damaged" in refused(project, newest)
