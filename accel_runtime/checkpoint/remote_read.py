"""Read the tensors of a checkpoint over a network: each byte once, in few large requests, verified where it is read.

A rank requests what it needs and nothing else: full chunks, or of a large chunk the blocks that contain its rows. Neighbors in
a file become one request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch.distributed.checkpoint.planner import ReadItem

from accel_runtime.foundation.tensor_bytes import tensor_bytes
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.manifest import BLOCK_BYTES, Chunk
from accel_runtime.storage.store import Snapshot, parallel_map

__all__ = ["TensorRead", "read_tensors"]

_RUN_BYTES = 1 << 25
"""Largest request for several chunks, which needs memory of its own."""


@dataclass(frozen=True)
class TensorRead:
    """A box of a chunk, and the tensor that it is read into."""

    name: str
    """Name of the tensor, for errors."""
    chunk: Chunk
    dtype: torch.dtype
    """Number format of the chunk."""
    item: ReadItem
    """The box."""
    target: torch.Tensor
    """Tensor of the box's sizes, on any device and of any dtype."""

    @property
    def bounds(self) -> tuple[int, int]:
        """Return the bytes of the chunk to read: all, or the blocks that contain the rows of the box."""
        chunk = self.chunk
        if not chunk.blocks:
            return 0, chunk.bytes
        row = math.prod(chunk.sizes[1:]) * self.dtype.itemsize
        first = self.item.storage_offsets[0] * row
        last = first + self.item.lengths[0] * row
        return first // BLOCK_BYTES * BLOCK_BYTES, min(chunk.bytes, -(-last // BLOCK_BYTES) * BLOCK_BYTES)

    @property
    def takes_all(self) -> bool:
        """Return whether the target has the memory of the bytes to read."""
        box = tuple(self.item.storage_offsets), tuple(self.item.lengths)
        is_full = box == ((0,) * len(self.chunk.sizes), tuple(self.chunk.sizes))
        target = self.target
        is_plain = target.device.type == "cpu" and target.dtype == self.dtype and target.is_contiguous()
        return is_full and is_plain


def read_tensors(snapshot: Snapshot, reads: Iterable[TensorRead]) -> None:
    """Read boxes into their targets, in a few threads.

    Raises:
        CheckpointError: If bytes do not have their checksum, or a file ends before.
        OSError: If the store fails.
    """
    runs: list[list[TensorRead]] = []
    for read in sorted(reads, key=lambda read: (read.chunk.file, read.chunk.start + read.bounds[0])):
        if runs and _may_join(runs[-1], read):
            runs[-1].append(read)
        else:
            runs.append([read])
    parallel_map(lambda run: _read_run(snapshot, run), runs)


def _may_join(run: Sequence[TensorRead], read: TensorRead) -> bool:
    """Return whether a box continues the bytes of a run, which stays small enough."""
    (start, _), end = _locate(run[0]), max(_locate(each)[1] for each in run[-2:])
    first, last = _locate(read)
    return read.chunk.file == run[0].chunk.file and first <= end and last - start <= _RUN_BYTES


def _locate(read: TensorRead) -> tuple[int, int]:
    """Return the bytes of the file to read."""
    first, last = read.bounds
    return read.chunk.start + first, read.chunk.start + last


def _read_run(snapshot: Snapshot, run: Sequence[TensorRead]) -> None:
    start, end = _locate(run[0])[0], max(_locate(read)[1] for read in run)
    file = run[0].chunk.file
    if len(run) == 1 and run[0].takes_all:
        data = tensor_bytes(run[0].target)
        _fill(snapshot, file, start, data)
        _verify(snapshot, run[0], data)
        return
    memory = torch.empty(end - start, dtype=torch.uint8)
    data = tensor_bytes(memory)
    _fill(snapshot, file, start, data)
    for read in run:
        first, last = _locate(read)
        _verify(snapshot, read, data[first - start : last - start])
        _copy_box(read, memory[first - start : last - start])


def _fill(snapshot: Snapshot, file: str, start: int, data: memoryview) -> None:
    if snapshot.get_range(file, start, data) < len(data):
        raise CheckpointError(f"{snapshot.checkpoint.locate(file)} was truncated while it was read")


def _verify(snapshot: Snapshot, read: TensorRead, data: memoryview) -> None:
    """Raise `CheckpointError` if the bytes of a box do not have their checksums."""
    chunk, (first, last) = read.chunk, read.bounds
    if (first, last) == (0, chunk.bytes):
        is_equal = xxhash.xxh3_64_hexdigest(data) == chunk.checksum
    else:
        is_equal = all(
            xxhash.xxh3_64_hexdigest(data[at - first : at - first + BLOCK_BYTES])
            == chunk.blocks[at // BLOCK_BYTES]
            for at in range(first, last, BLOCK_BYTES)
        )
    if not is_equal:
        location = snapshot.checkpoint.locate(chunk.file)
        raise CheckpointError(f"{location} is damaged: {read.name} does not have its checksum")


def _copy_box(read: TensorRead, data: torch.Tensor) -> None:
    """Copy a box out of the bytes of its chunk, or of the blocks that contain it."""
    sizes, dtype = read.chunk.sizes, read.dtype
    offsets, lengths = tuple(read.item.storage_offsets), tuple(read.item.lengths)
    if not sizes:
        read.target.copy_(_view(data, dtype).view(()))
        return
    row = math.prod(sizes[1:]) * dtype.itemsize
    begin = offsets[0] * row - read.bounds[0]
    rows = _view(data[begin : begin + lengths[0] * row], dtype).view(lengths[0], *sizes[1:])
    for dimension in range(1, len(sizes)):
        rows = rows.narrow(dimension, offsets[dimension], lengths[dimension])
    read.target.copy_(rows)


def _view(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Memory of several chunks need not be aligned.
    is_aligned = data.storage_offset() % dtype.itemsize == 0
    return (data if is_aligned else data.clone()).view(dtype)
