"""Files of others are read in memory bounded by their size: archives, pickles, headers and indexes that claim more are refused."""

from __future__ import annotations

import io
import json
import os
import zipfile

import pytest
import torch

from accel_runtime.export.load_model import find_weights, read_headers
from accel_runtime.export.objects import read_pickle
from accel_runtime.storage.directory import read_manifest
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.manifest import NAME
from accel_runtime.storage.schema import MAX_BYTES


def repack(source, target, method, change=lambda name, data: data):  # noqa: ARG005
    """Copy an archive with another compression."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", method) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, change(entry.filename, old.read(entry)))


@pytest.fixture
def saved(tmp_path):
    torch.save({"weight": torch.zeros(1 << 20), "values": [1, 2.5]}, tmp_path / "saved.bin")
    return tmp_path / "saved.bin"


def test_a_compressed_archive_is_refused(saved, tmp_path):
    repack(saved, tmp_path / "bomb.bin", zipfile.ZIP_DEFLATED)
    assert (tmp_path / "bomb.bin").stat().st_size < 100_000
    with pytest.raises(
        CheckpointError, match=r"bomb.bin cannot be read: its entries are compressed\. Save it again"
    ):
        read_pickle(tmp_path / "bomb.bin")
    with (tmp_path / "bomb.bin").open("rb") as file, pytest.raises(CheckpointError, match="compressed"):
        read_pickle(file)


def test_an_archive_that_stores_its_entries_is_read(saved, tmp_path):
    repack(saved, tmp_path / "stored.bin", zipfile.ZIP_STORED)
    assert read_pickle(tmp_path / "stored.bin")["values"] == [1, 2.5]
    stream = io.BytesIO(b"before" + saved.read_bytes())
    stream.seek(6)
    assert read_pickle(stream)["values"] == [1, 2.5]


def claim_more(data):
    at = data.index(b"PK\1\2")
    return data[: at + 20] + (1 << 31).to_bytes(4, "little") * 2 + data[at + 28 :]


FORGERIES = {
    "an entry that claims 2 GiB": claim_more,
    "bytes after the directory": lambda data: data + b"x" * 30,
    "no directory": lambda data: data[:-22],
    "the first bytes only": lambda data: data[:10],
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_directory_of_an_archive_is_refused(saved, name):
    saved.write_bytes(FORGERIES[name](saved.read_bytes()))
    with pytest.raises(CheckpointError, match=r"saved.bin cannot be read: "):
        read_pickle(saved)


def test_a_pickle_that_repeats_lists_in_lists_is_refused(tmp_path):
    item = [1] * 10
    for _ in range(40):
        item = [item] * 10
    torch.save({"state": item}, tmp_path / "laughs.bin")
    with pytest.raises(CheckpointError, match="with repetitions"):
        read_pickle(tmp_path / "laughs.bin")


def test_a_container_that_is_used_twice_stays_one(tmp_path):
    shared = {"a": [1]}
    torch.save([shared, shared], tmp_path / "shared.bin")
    first, second = read_pickle(tmp_path / "shared.bin")
    assert first is second


def write_header(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HEADERS = {
    "a list": [],
    "a number": 1,
    "an entry that is a list": {"a": []},
    "an unknown dtype": {"a": ENTRY | {"dtype": ["F32"]}},
    "a shape of text": {"a": ENTRY | {"shape": ["2"]}},
    "an infinite shape": b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,8]}}',
    "a shape of nan": b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}',
    "a huge shape": {"a": ENTRY | {"shape": [2**62, 2**62]}},
    "three offsets": {"a": ENTRY | {"data_offsets": [0, 4, 8]}},
    "offsets in the wrong order": {"a": ENTRY | {"data_offsets": [8, 0]}},
    "offsets beyond the file": {"a": ENTRY | {"data_offsets": [8, 16]}},
    "tensors in the same bytes": {"a": ENTRY, "b": ENTRY},
    "metadata of numbers": {"__metadata__": {"a": 1}, "a": ENTRY},
    "nested lists": b"[" * 100_000,
    "a repeated name": b'{"a":1,"a":1}',
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_forged_header_of_weights_is_refused(tmp_path, name):
    write_header(tmp_path / "model.safetensors", HEADERS[name], bytes(8))
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read: "):
        read_headers(tmp_path / "model.safetensors")


@pytest.mark.parametrize("length", [2**63, 2**40, 0])
def test_a_header_that_claims_another_length_is_refused(tmp_path, length):
    write_header(tmp_path / "model.safetensors", {"a": ENTRY}, bytes(8), length)
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read"):
        read_headers(tmp_path / "model.safetensors")


INDEXES = [
    b"\xff",
    b"[" * 100_000,
    b'{"weight_map": []}',
    b'{"weight_map": {"a": 1}}',
    b'{"weight_map": {"a": "../model.safetensors"}}',
    b'{"weight_map": {"a": "/etc/passwd"}}',
    b'{"weight_map": {"a": ""}}',
    b'{"weight_map": {"a": "."}}',
    b'{"weight_map": {"a": "a\\u0000"}}',
    b'{"weight_map": {"a": "\\ud800"}}',
    b'{"weight_map": {}, "metadata": 1}',
    b'{"weight_map": {"a": "x"}, "weight_map": {}}',
]


@pytest.mark.parametrize("text", INDEXES, ids=lambda text: repr(text[:40]))
def test_a_forged_index_of_weights_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(
        CheckpointError, match=r"model.safetensors.index.json is not an index of weights|is damaged"
    ):
        find_weights(tmp_path)


def test_a_manifest_that_is_too_large_is_refused_before_it_is_read(tmp_path):
    (tmp_path / NAME).touch()
    os.truncate(tmp_path / NAME, MAX_BYTES + 1)
    with pytest.raises(CheckpointError, match="can have"):
        read_manifest(tmp_path)
