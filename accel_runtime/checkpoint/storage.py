"""The seam to torch.distributed.checkpoint: it plans who holds which part of a tensor, this writes and reads the parts."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
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
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future
from typing_extensions import override

from accel_runtime.checkpoint import datafile
from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.files import Disk
from accel_runtime.checkpoint.folder import Found
from accel_runtime.checkpoint.manifest import Chunk, File, Stored, item_of
from accel_runtime.checkpoint.spread import spread

__all__ = ["Planner", "Reader", "Writer", "dtype_of", "own_share"]

_FILE_BYTES = 1 << 28
"""Files are not cut smaller than this, so that two threads have about the same to do and there are few files."""
_FILES = 16
"""About so many files a rank writes at most."""


class Planner(DefaultSavePlanner):
    """DCP's planner over a flat dict of tensors, which may have been copied since the plan was made."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
        self.staged: dict[MetadataIndex, torch.Tensor] = {}
        """Copies, in place of the tensors the plan is about."""

    @override
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        staged = self.staged.get(write_item.index)
        if staged is not None:
            return staged
        found: torch.Tensor = self.lookup_object(write_item.index)
        return found.detach()


@dataclass
class _Filling:
    """A file that is being planned."""

    places: list[int]
    bytes: int
    names: set[str]


@dataclass(frozen=True)
class _Share:
    """The files of one rank: by name, the places of its parts in its plan."""

    files: dict[str, list[int]]


class Writer(StorageWriter):
    """Writes this rank's parts into safetensors files, one or several an item.

    Args:
        folder: Where.
        save: The name of the save, for the files' headers.
        disk: Does it.
    """

    def __init__(self, folder: Path, save: str, disk: Disk) -> None:
        self.folder, self._save, self._disk = folder, save, disk
        self.files: dict[str, File] = {}
        """What this rank has written."""
        self.planned = 0
        """How many bytes it is to write."""

    @property
    def written(self) -> int:
        """How many bytes are in files that are finished."""
        return sum(file.bytes for file in list(self.files.values()))

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.files = {}

    @override
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        return

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the files: `model.safetensors`, or where there are several `model-00001-of-00003.safetensors`."""
        bins = [_bins(plan.items) for plan in plans]
        counts: dict[str, int] = {}
        for rank in bins:
            for item, _ in rank:
                counts[item] = counts.get(item, 0) + 1
        given: dict[str, int] = {}
        shares = []
        for rank in bins:
            files = {}
            for item, parts in rank:
                given[item] = given.get(item, 0) + 1
                files[_file_name(item, given[item], counts[item])] = parts
            shares.append(_Share(files))
        return [replace(plan, storage_data=share) for plan, share in zip(plans, shares, strict=True)]

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        share: _Share = plan.storage_data
        self.planned = sum(item.tensor_storage_size() or 0 for item in plan.items)
        results = spread(lambda file: self._write(plan.items, planner, *file), share.files.items())
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for some in results for result in some])
        return done

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Fill in where everything is: `metadata.storage_data` becomes a dict of chunks."""
        metadata.storage_data = {result.index: result.storage_data for some in results for result in some}

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def _write(
        self, items: Sequence[WriteItem], planner: SavePlanner, name: str, places: list[int]
    ) -> list[WriteResult]:
        wanted = [items[place] for place in places]
        parts = [_part(item, planner) for item in wanted]
        written = datafile.write(self.folder / name, parts, {"format": "pt", "save": self._save}, self._disk)
        self.files[name] = written.file
        return [
            WriteResult(item.index, part.bytes, _chunk(part, name, place))
            for item, part, place in zip(wanted, parts, written.places, strict=True)
        ]


def stored(metadata: Metadata) -> dict[str, Stored]:
    """Tensors as the manifest has them, out of what `Writer.finish` left."""
    chunks: dict[str, list[Chunk]] = {name: [] for name in metadata.state_dict_metadata}
    for index, chunk in metadata.storage_data.items():
        chunks[index.fqn].append(chunk)
    found = {}
    for name, told in metadata.state_dict_metadata.items():
        assert isinstance(told, TensorStorageMetadata)
        dtype = str(told.properties.dtype).removeprefix("torch.")
        found[name] = Stored(
            dtype, tuple(told.size), tuple(sorted(chunks[name], key=lambda chunk: chunk.offsets))
        )
    return found


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


def own_share(found: Found, items: Iterable[str], rank: int, world_size: int) -> list[tuple[str, Chunk]]:
    """Of the parts of files that make up these items those this rank verifies, by what they are."""
    chunks = found.manifest.parts(items)
    loads = [0] * world_size
    mine = []
    for name, chunk in sorted(chunks, key=lambda one: (-one[1].bytes, one[0], one[1].file, one[1].start)):
        least = loads.index(min(loads))
        loads[least] += chunk.bytes
        if least == rank:
            mine.append((name, chunk))
    return mine


def _part(item: WriteItem, planner: SavePlanner) -> datafile.Part:
    data = item.tensor_data
    assert data is not None
    name = item.index.fqn.split("/", 1)[1]
    whole = tuple(data.chunk.sizes) == tuple(data.size)
    offsets = None if whole else tuple(data.chunk.offsets)

    def read() -> torch.Tensor:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        return tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()

    return datafile.Part(name, data.properties.dtype, tuple(data.chunk.sizes), offsets, read)


def _chunk(part: datafile.Part, file: str, place: tuple[int, str]) -> Chunk:
    offsets = part.offsets or (0,) * len(part.shape)
    return Chunk(file, place[0], part.bytes, place[1], offsets, part.shape)


def _bins(items: Sequence[WriteItem]) -> list[tuple[str, list[int]]]:
    """A rank's parts divided into files: the name of the item, and which parts."""
    sizes = [item.tensor_storage_size() or 0 for item in items]
    most = max(_FILE_BYTES, sum(sizes) // _FILES)
    bins: list[tuple[str, list[int]]] = []
    filling: dict[str, _Filling] = {}
    for place, (item, size) in enumerate(zip(items, sizes, strict=True)):
        kind, name = item_of(item.index.fqn), item.index.fqn
        file = filling.get(kind)
        # A file has one part of a tensor at most, as its name is that of the tensor.
        if file is None or (file.places and file.bytes + size > most) or name in file.names:
            file = filling[kind] = _Filling([], 0, set())
            bins.append((kind, file.places))
        file.places.append(place)
        file.names.add(name)
        file.bytes += size
    return bins


def _file_name(item: str, number: int, count: int) -> str:
    return f"{item}.safetensors" if count == 1 else f"{item}-{number:05}-of-{count:05}.safetensors"
