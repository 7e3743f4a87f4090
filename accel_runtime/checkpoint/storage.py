"""Storage for torch.distributed.checkpoint: DCP plans the parts of each rank, this module writes and reads them."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import FileIO
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

from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.filesystem import FileSystem, parallel_map, read_exactly
from accel_runtime.checkpoint.manifest import Checkpoint, Chunk, FileEntry, TensorEntry, item_of_tensor
from accel_runtime.checkpoint.safetensors_file import (
    TensorPart,
    copy_to_host,
    shard_file_name,
    tensor_bytes,
    write_safetensors,
)

__all__ = ["ShardReader", "ShardSavePlanner", "ShardWriter", "dtype_from_name", "tensor_entries"]

_FILE_BYTES = 1 << 28
"""Smallest file that is worth splitting, so that threads share the work and files stay few."""
_FILES = 16
"""Approximate largest number of files for each rank."""


class ShardSavePlanner(DefaultSavePlanner):
    """Save planner of DCP for a flat dict of tensors, which may be replaced by copies after planning."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
        self.staged: dict[MetadataIndex, torch.Tensor] = {}
        """Copies that replace the tensors of the plan."""

    @override
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        staged = self.staged.get(write_item.index)
        if staged is not None:
            return staged
        tensor: torch.Tensor = self.lookup_object(write_item.index)
        return tensor.detach()


@dataclass
class _FilePlan:
    """A file that is being planned."""

    indices: list[int]
    bytes: int
    names: set[str]


class ShardWriter(StorageWriter):
    """Writes the parts of this rank into safetensors files, one or several for each item."""

    def __init__(self, folder: Path, save: str, disk: FileSystem) -> None:
        self.folder, self._save, self._disk = folder, save, disk
        self.files: dict[str, FileEntry] = {}
        """Files that this rank has written."""
        self.planned = 0
        """Bytes that this rank has to write."""

    @property
    def written(self) -> int:
        """Bytes in complete files."""
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
        """Name the files: `model.safetensors`, or `model-00001-of-00003.safetensors` if there are several."""
        rank_files = [_split_into_files(plan.items) for plan in plans]
        counts = Counter(item for files in rank_files for item, _ in files)
        numbers: Counter[str] = Counter()
        named_plans = []
        for plan, files in zip(plans, rank_files, strict=True):
            names = {}
            for item, indices in files:
                numbers[item] += 1
                names[shard_file_name(item, numbers[item], counts[item])] = indices
            named_plans.append(replace(plan, storage_data=names))
        return named_plans

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        files: dict[str, list[int]] = plan.storage_data
        self.planned = sum(item.tensor_storage_size() or 0 for item in plan.items)
        results = parallel_map(lambda file: self._write(plan.items, planner, *file), files.items())
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for written in results for result in written])
        return done

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Set `metadata.storage_data` to the chunks by index."""
        metadata.storage_data = {
            result.index: result.storage_data for rank_results in results for result in rank_results
        }

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def _write(
        self, items: Sequence[WriteItem], planner: SavePlanner, name: str, indices: list[int]
    ) -> list[WriteResult]:
        selected = [items[index] for index in indices]
        parts = [_build_part(item, planner) for item in selected]
        written = write_safetensors(
            self.folder / name, parts, {"format": "pt", "save": self._save}, self._disk
        )
        self.files[name] = written.file
        return [
            WriteResult(
                item.index,
                part.bytes,
                Chunk(name, start, part.bytes, checksum, part.offsets or (0,) * len(part.shape), part.shape),
            )
            for item, part, (start, checksum) in zip(selected, parts, written.locations, strict=True)
        ]


def tensor_entries(metadata: Metadata) -> dict[str, TensorEntry]:
    """Return the tensors of the manifest from the metadata that `ShardWriter.finish` completed."""
    chunks: dict[str, list[Chunk]] = {name: [] for name in metadata.state_dict_metadata}
    for index, chunk in metadata.storage_data.items():
        chunks[index.fqn].append(chunk)
    entries = {}
    for name, tensor_metadata in metadata.state_dict_metadata.items():
        assert isinstance(tensor_metadata, TensorStorageMetadata)
        dtype = str(tensor_metadata.properties.dtype).removeprefix("torch.")
        entries[name] = TensorEntry(
            dtype, tuple(tensor_metadata.size), tuple(sorted(chunks[name], key=lambda chunk: chunk.offsets))
        )
    return entries


def _build_part(item: WriteItem, planner: SavePlanner) -> TensorPart:
    data = item.tensor_data
    assert data is not None
    sizes, dtype = tuple(data.chunk.sizes), data.properties.dtype

    def read() -> list[memoryview]:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        return [copy_to_host(tensor)]

    return TensorPart(
        item.index.fqn.split("/", 1)[1],
        str(dtype).removeprefix("torch."),
        sizes,
        math.prod(sizes) * dtype.itemsize,
        read,
        None if sizes == tuple(data.size) else tuple(data.chunk.offsets),
    )


def _split_into_files(items: Sequence[WriteItem]) -> list[tuple[str, list[int]]]:
    """Distribute the parts of a rank over files; return item name and part indices of each file."""
    sizes = [item.tensor_storage_size() or 0 for item in items]
    limit = max(_FILE_BYTES, sum(sizes) // _FILES)
    bins: list[tuple[str, list[int]]] = []
    open_files: dict[str, _FilePlan] = {}
    for index, (item, size) in enumerate(zip(items, sizes, strict=True)):
        kind, name = item_of_tensor(item.index.fqn), item.index.fqn
        file = open_files.get(kind)
        # The name in the file is that of the tensor, so a file has at most one part of a tensor.
        if file is None or (file.indices and file.bytes + size > limit) or name in file.names:
            file = open_files[kind] = _FilePlan([], 0, set())
            bins.append((kind, file.indices))
        file.indices.append(index)
        file.names.add(name)
        file.bytes += size
    return bins


def dtype_from_name(name: str, entry: TensorEntry) -> torch.dtype:
    """Return the torch dtype of a tensor in a manifest; raise `CheckpointError` if its size does not fit."""
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"{name} is of dtype {entry.dtype[:60]!r}, which torch {torch.__version__} does not have"
        )
    if entry.bytes != math.prod(entry.shape) * dtype.itemsize:
        raise CheckpointError(
            f"{name} is {entry.dtype} of shape {list(entry.shape)}, and its parts have {entry.bytes} bytes"
        )
    return dtype


class ShardReader(StorageReader):
    """Reads parts of tensors from a verified checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        return

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors, storage = {}, {}
        for name, tensor in self._checkpoint.manifest.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks]
            properties = TensorProperties(dtype=dtype_from_name(name, tensor))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
            for index, chunk in enumerate(tensor.chunks):
                storage[MetadataIndex(name, chunk.offsets, index)] = chunk
        return Metadata(tensors, storage_data=storage)  # type: ignore[arg-type]

    @override
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._chunks: Mapping[MetadataIndex, Chunk] = metadata.storage_data

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
            files.setdefault(self._chunks[item.storage_index].file, []).append(item)
        parallel_map(lambda file: self._read_file(planner, *file), files.items())
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def _read_file(self, planner: LoadPlanner, name: str, items: Sequence[ReadItem]) -> None:
        with (self._checkpoint.path / name).open("rb", buffering=0) as file:
            for item in items:
                chunk = self._chunks[item.storage_index]
                fqn = item.storage_index.fqn
                dtype = dtype_from_name(fqn, self._checkpoint.manifest.tensors[fqn])
                target = planner.resolve_tensor(item).detach()
                _read_box(file, chunk, dtype, item, target)
                planner.commit_tensor(item, target)


def _read_box(file: FileIO, chunk: Chunk, dtype: torch.dtype, item: ReadItem, target: torch.Tensor) -> None:
    """Read a box of a chunk: contiguous rows from the file, then the requested columns of them."""
    sizes, offsets, lengths = chunk.sizes, tuple(item.storage_offsets), tuple(item.lengths)
    row = math.prod(sizes[1:]) * dtype.itemsize
    start, rows = (chunk.start + offsets[0] * row, lengths[0]) if sizes else (chunk.start, 1)
    whole_rows = lengths[1:] == sizes[1:]
    direct = target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous()
    if whole_rows and direct:
        read_exactly(file, tensor_bytes(target), start)
        return
    buffer = torch.empty((rows, *sizes[1:]) if sizes else (), dtype=dtype)
    read_exactly(file, tensor_bytes(buffer), start)
    for dimension in range(1, len(sizes)):
        buffer = buffer.narrow(dimension, offsets[dimension], lengths[dimension])
    target.copy_(buffer)
