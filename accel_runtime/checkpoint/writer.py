"""The writing half of the seam to torch.distributed.checkpoint: it plans who holds which part, this writes the parts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future
from typing_extensions import override

from accel_runtime.checkpoint import datafile
from accel_runtime.checkpoint.files import Disk
from accel_runtime.checkpoint.layout import file_name
from accel_runtime.checkpoint.manifest import Chunk, File, Stored, item_of
from accel_runtime.checkpoint.spread import spread

__all__ = ["Planner", "Writer", "stored"]

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
                files[file_name(item, given[item], counts[item])] = parts
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
