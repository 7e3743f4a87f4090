"""Reads over a network: each byte that is needed once, and verified."""

from __future__ import annotations

import math
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from accel_runtime.checkpoint import load
from accel_runtime.checkpoint.load import TensorRead, read_tensors
from accel_runtime.storage import manifest, tensor_file
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.manifest import Checkpoint, Chunk
from accel_runtime.storage.store import Snapshot
from accel_runtime.storage.tensor_file import TensorPart, write_safetensors

BLOCK = 64


class MemorySnapshot(Snapshot):
    """Files in memory, and the ranges that were read of them."""

    is_remote = True

    def __init__(self, files):
        self.files, self.ranges = files, []
        self.checkpoint = Checkpoint("s3://bucket/mine", None)

    def get_range(self, name, start, buffer):
        data = self.files[name][start : start + len(buffer)]
        buffer[: len(data)] = data
        self.ranges.append((name, start, len(data)))
        return len(data)

    def is_current(self):
        return True

    def directory(self):
        raise NotImplementedError

    def close(self):
        pass


def use_small_blocks(stack):
    for module in (manifest, tensor_file, load):
        stack.enter_context(mock.patch.object(module, "BLOCK_BYTES", BLOCK))
    stack.enter_context(mock.patch.object(load, "_RUN_BYTES", 4 * BLOCK))


def write_file(tensors):
    """Return the bytes of a file, and the chunk of each tensor."""
    written = bytearray()

    def put(data, size):
        for piece in data:
            written.extend(piece)
        assert len(written) == size

    parts = [TensorPart.from_tensor(name, tensor) for name, tensor in tensors.items()]
    result = write_safetensors(put, parts, {})
    chunks = {}
    for part, done in zip(parts, result.parts, strict=True):
        offsets = (0,) * len(part.shape)
        chunks[part.name] = Chunk(
            "f", done.start, part.bytes, done.checksum, offsets, part.shape, done.blocks
        )
        chunks[part.name].check()
    return bytes(written), chunks


@st.composite
def regions(draw):
    """Return tensors, and a region of each."""
    tensors, chosen = {}, {}
    for number in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
        dtype = draw(st.sampled_from([torch.float32, torch.int64, torch.uint8]))
        tensors[f"t{number}"] = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
        offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
        chosen[f"t{number}"] = (
            offsets,
            tuple(draw(st.integers(1, size - at)) for size, at in zip(shape, offsets, strict=True)),
        )
    return tensors, chosen


def build_reads(tensors, chosen, chunks):
    reads = []
    for name, (offsets, lengths) in chosen.items():
        index = MetadataIndex(name)
        item = ReadItem(
            LoadItemType.TENSOR, index, torch.Size(offsets), index, torch.Size(offsets), torch.Size(lengths)
        )
        target = torch.zeros(lengths, dtype=tensors[name].dtype)
        reads.append(TensorRead(name, chunks[name], tensors[name].dtype, item, target))
    return reads


@settings(max_examples=60, deadline=None)
@given(regions())
def test_regions_are_read_as_they_were_written_each_byte_once_and_no_other_block(case):
    tensors, chosen = case
    with ExitStack() as stack:
        use_small_blocks(stack)
        data, chunks = write_file(tensors)
        snapshot, reads = MemorySnapshot({"f": data}), build_reads(tensors, chosen, chunks)
        read_tensors(snapshot, reads)
        needed = set()
        for read in reads:
            offsets, lengths = chosen[read.name]
            region = tuple(slice(at, at + size) for at, size in zip(offsets, lengths, strict=True))
            assert torch.equal(read.target, tensors[read.name][region])
            first, last = read.bounds
            needed |= set(range(read.chunk.start + first, read.chunk.start + last))
    requested = [byte for _, start, size in snapshot.ranges for byte in range(start, start + size)]
    assert sorted(requested) == sorted(needed)


@settings(max_examples=60, deadline=None)
@given(regions(), st.randoms(use_true_random=False))
def test_a_changed_byte_that_is_read_is_an_error_that_names_file_and_tensor(case, random):
    tensors, chosen = case
    with ExitStack() as stack:
        use_small_blocks(stack)
        data, chunks = write_file(tensors)
        reads = build_reads(tensors, chosen, chunks)
        damaged = random.choice(reads)
        first, last = damaged.bounds
        at = damaged.chunk.start + random.randrange(first, last)
        changed = bytearray(data)
        changed[at] ^= 1
        with pytest.raises(CheckpointError, match=f"s3://bucket/mine/f is damaged: {damaged.name} does not"):
            read_tensors(MemorySnapshot({"f": bytes(changed)}), reads)
        with pytest.raises(CheckpointError, match="truncated"):
            read_tensors(MemorySnapshot({"f": data[:at]}), reads)
