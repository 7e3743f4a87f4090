"""Loads over a network: each rank reads what it needs, once, and nothing changes before it is verified."""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.object_store import PIECE_BYTES, Bucket
from support.runs.file_system import Run
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from accel_runtime.checkpoint import load
from accel_runtime.checkpoint.load import TensorRead, read_tensors
from accel_runtime.extensions.object_stores.store import ObjectStore
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


class CountingBucket(Bucket):
    """Counts the bytes that are read of each object, and calls a function at the first read."""

    def __init__(self, folder):
        super().__init__(folder)
        self.bytes, self.at_first_read = {}, None

    def read_ranges(self, requests):
        if self.at_first_read is not None:
            call, self.at_first_read = self.at_first_read, None
            call()
        for request in requests:
            self.bytes[request.key] = self.bytes.get(request.key, 0) + len(request.buffer)
        super().read_ranges(requests)


@pytest.fixture
def run(memory):
    """Return a run with two checkpoints in a bucket, and the bucket."""
    run, bucket = Run(Path("/runs/1")), CountingBucket(memory)
    run.acc._checkpoints._store = ObjectStore(bucket, piece_bytes=PIECE_BYTES)
    for step in (1, 2):
        run.set_step(step)
        run.acc.save_state()
    run.set_step(5)
    return run, bucket


def find_part(bucket, number, name):
    """Return the key of a part of a checkpoint."""
    (key,) = (
        each.key
        for each in bucket.list(f"/runs/1/checkpoints/checkpoint_{number}/parts/")
        if each.key.endswith(name)
    )
    return key


def damage(bucket, number, name="model.safetensors"):
    key = find_part(bucket, number, name)
    data = bytearray(bucket.get(key)[0])
    data[-1] ^= 1
    bucket.put(key, bytes(data))


def test_a_load_reads_each_tensor_once(run):
    run, bucket = run
    run.acc.load_state()
    assert run.step() == 2
    for name in ("model.safetensors", "optimizer.safetensors"):
        key = find_part(bucket, 1, name)
        size = next(each.size for each in bucket.list(f"{key.rpartition('/')[0]}/") if each.key == key)
        assert 0 < bucket.bytes[key] < size  # without the header
    assert not Path("/runs").exists()


def test_damage_is_found_before_anything_changes_and_the_previous_checkpoint_is_named(run):
    run, bucket = run
    damage(bucket, 1)
    before = run.copy_state()
    with pytest.raises(CheckpointError) as raised:
        run.acc.load_state()
    assert "model.safetensors is damaged: model/" in str(raised.value)
    assert (
        "Nothing was loaded. The checkpoint before it is /runs/1/checkpoints/checkpoint_0, of step 1."
        in str(raised.value)
    )
    assert all(map(torch.equal, run.copy_state()[:-1], before[:-1]))
    run.acc.load_state("/runs/1/checkpoints/checkpoint_0")
    assert run.step() == 1


def test_without_memory_for_a_copy_damage_is_reported_as_a_partial_load(run, monkeypatch):
    run, bucket = run
    monkeypatch.setattr(load, "read_available_memory", lambda: 10)
    run.acc.load_state()
    assert run.step() == 2
    damage(bucket, 1)
    with pytest.raises(CheckpointError, match="training state is now inconsistent"):
        run.acc.load_state()


def test_a_checkpoint_that_is_removed_while_it_is_read_makes_the_load_start_again(run):
    run, bucket = run
    store = run.acc._checkpoints._store
    bucket.at_first_read = partial(store.delete, "/runs/1/checkpoints/checkpoint_1")
    assert run.acc.load_state().manifest.step == 1
    assert run.step() == 1
