"""The reading half of the seam to torch.distributed.checkpoint: boxes of tensors, out of the parts that cover them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future
from typing_extensions import override

from accel_runtime.checkpoint import datafile
from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.folder import Found
from accel_runtime.checkpoint.manifest import Chunk, Stored
from accel_runtime.checkpoint.spread import spread

__all__ = ["Reader", "dtype_of"]


def dtype_of(name: str, told: Stored) -> torch.dtype:
    """The dtype of a tensor in a manifest, whose bytes are as many as that takes.

    Raises:
        CheckpointError: This torch has no such dtype, or there are not as many bytes.
    """
    dtype = getattr(torch, told.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"{name} is of dtype {told.dtype[:60]!r}, which torch {torch.__version__} does not have"
        )
    if told.bytes != math.prod(told.shape) * dtype.itemsize:
        raise CheckpointError(
            f"{name} is {told.dtype} of shape {list(told.shape)}, and its parts have {told.bytes} bytes"
        )
    return dtype


class Reader(StorageReader):
    """Reads parts of tensors; they have been verified before.

    Args:
        found: The checkpoint.
    """

    def __init__(self, found: Found) -> None:
        self._found = found

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        return

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        told, places = {}, {}
        for name, tensor in self._found.manifest.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks]
            properties = TensorProperties(dtype=dtype_of(name, tensor))
            told[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
            for index, chunk in enumerate(tensor.chunks):
                places[MetadataIndex(name, chunk.offsets, index)] = chunk
        return Metadata(told, storage_data=places)  # type: ignore[arg-type]

    @override
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._places: Mapping[MetadataIndex, Chunk] = metadata.storage_data

    @override
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        files: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            files.setdefault(self._places[item.storage_index].file, []).append(item)
        spread(lambda file: self._read_file(planner, *file), files.items())
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def _read_file(self, planner: LoadPlanner, name: str, items: Sequence[ReadItem]) -> None:
        with (self._found.path / name).open("rb", buffering=0) as opened:
            for item in items:
                chunk = self._places[item.storage_index]
                fqn = item.storage_index.fqn
                dtype = dtype_of(fqn, self._found.manifest.tensors[fqn])
                target = planner.resolve_tensor(item).detach()
                _read(opened.fileno(), chunk, dtype, item, target)
                planner.commit_tensor(item, target)


def _read(file: int, chunk: Chunk, dtype: torch.dtype, item: ReadItem, target: torch.Tensor) -> None:
    """Read a box out of a chunk: its rows are neighbours in the file, and of those rows the wanted columns are kept."""
    sizes, begin, lengths = chunk.sizes, tuple(item.storage_offsets), tuple(item.lengths)
    row = math.prod(sizes[1:]) * dtype.itemsize
    start, rows = (chunk.start + begin[0] * row, lengths[0]) if sizes else (chunk.start, 1)
    whole_rows = lengths[1:] == sizes[1:]
    plain = target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous()
    if whole_rows and plain:
        _fill(file, start, datafile.bytes_of(target))
        return
    room = torch.empty((rows, *sizes[1:]) if sizes else (), dtype=dtype)
    _fill(file, start, datafile.bytes_of(room))
    for dimension in range(1, len(sizes)):
        room = room.narrow(dimension, begin[dimension], lengths[dimension])
    target.copy_(room)


def _fill(file: int, start: int, room: memoryview) -> None:
    while room:
        count = os.preadv(file, [room], start)
        if not count:
            raise CheckpointError("a file became shorter while it was read")
        room, start = room[count:], start + count
