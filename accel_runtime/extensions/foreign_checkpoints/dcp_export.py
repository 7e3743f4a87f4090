"""Write models and optimizers of a checkpoint as a folder of torch.distributed.checkpoint (DCP), in bounded memory.

torch's own planner and writer write the folder, as they do for many ranks: each part of the plan is a file.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from typing_extensions import override

from accel_runtime.checkpoint.serialization import deserialize
from accel_runtime.environment.settings import format_size
from accel_runtime.foundation.tensor_bytes import tensor_bytes
from accel_runtime.storage.errors import CheckpointError, RequestError
from accel_runtime.storage.file_system import FileSystem, create_folder_atomically, require_new_folder
from accel_runtime.storage.manifest import Chunk, Manifest, TensorEntry, rank_tensor_name
from accel_runtime.storage.state_tree import KEY, get_children, list_tensor_names
from accel_runtime.storage.store import Snapshot
from accel_runtime.storage.tensor_file import read_chunk
from accel_runtime.storage.verification import BLOCK, Progress

__all__ = ["DcpRequest", "DcpResult", "Layout", "write_dcp_folder"]

Layout = Literal["nested", "flattened", "torchtitan"]
_FILE_BYTES = 1 << 28
"""Size at which a file is full: the writer of torch may keep the tensors of a file in memory."""
_PIECE_BYTES = 1 << 26
"""Most bytes of a chunk that are written as one, unless a row is larger: a rank that reads a part of it reads all."""

_Keys = tuple[str | int, ...]


@dataclass(frozen=True)
class DcpRequest:
    """Form of the folder."""

    layout: Layout = "nested"
    """`nested` or `flattened` optimizers, as torch's `get_optimizer_state_dict` returns them; `torchtitan` has flattened ones and
    the weights of the model at the top level."""
    rank: int = 0
    """Rank whose states are written if they differ between ranks."""


@dataclass(frozen=True)
class DcpResult:
    """What was written."""

    tensors: int
    bytes: int
    others: list[str]
    """Items and values that the format does not have."""


@dataclass(frozen=True)
class _Stored:
    """A tensor in the checkpoint."""

    name: str
    entry: TensorEntry


@dataclass
class _StateDict:
    """Values by their keys in a state dict."""

    values: dict[_Keys, Any] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)


def write_dcp_folder(
    snapshot: Snapshot, folder: Path, request: DcpRequest, progress: Progress = lambda _: None
) -> DcpResult:
    """Write a folder, complete or not at all; every byte that is read is verified. `progress` receives byte counts."""
    state = _StateReader(snapshot, request).read()
    tensors = {keys: value for keys, value in state.values.items() if isinstance(value, _Stored)}
    if not tensors:
        raise RequestError(f"{snapshot.checkpoint.key} has no tensors of models and optimizers.")
    size = sum(stored.entry.bytes for stored in tensors.values())
    _check_target(folder, size)
    planner = _StoredPlanner(snapshot, state.values, progress)
    with create_folder_atomically(folder) as scratch:
        writer = FileSystemWriter(scratch, per_thread_copy_ahead=0)
        writer.set_up_storage_writer(True)
        plans, metadata = planner.create_global_plan(planner.create_plans())
        plans = writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in plans])
        writer.finish(metadata, [writer.write_data(plan, planner).wait() for plan in plans])
    return DcpResult(len(tensors), size, state.others)


def _check_target(folder: Path, size: int) -> None:
    require_new_folder(folder)
    free = FileSystem().free_space(folder.parent)
    if size > free:
        raise CheckpointError(
            f"Not enough space in {folder.parent}: {format_size(size)} are needed, {format_size(free)} are free. Free space, or "
            "choose another directory."
        )


# State dict ------------------------------------------------------------------------------


class _StateReader:
    """Builds the state dict of a checkpoint, as a rank had it."""

    def __init__(self, snapshot: Snapshot, request: DcpRequest) -> None:
        self._snapshot, self._request = snapshot, request
        self._manifest: Manifest = snapshot.checkpoint.manifest
        if not 0 <= request.rank < self._manifest.world_size:
            raise RequestError(
                f"{snapshot.checkpoint.key} has no rank {request.rank}: {self._manifest.world_size} process(es) wrote it. Ranks "
                "count from 0."
            )
        self._state = _StateDict()

    def read(self) -> _StateDict:
        """Return the values by their keys."""
        for item in self._manifest.items:
            if item.startswith("model"):
                self._add_model(item)
            elif item.startswith("optimizer"):
                self._add_optimizer(item)
            elif item not in {"accumulation", "replicas", "step_counts"}:
                self._state.others.append(item)
        return self._state

    def _add_model(self, item: str) -> None:
        is_top = self._request.layout == "torchtitan"
        for name, node in self._encoded(item).items():
            self._add((name,) if is_top else (item, name), node)

    def _add_optimizer(self, item: str) -> None:
        encoded, layout = self._encoded(item), self._request.layout
        if encoded.get("format") == "torch":
            if layout != "nested":
                raise RequestError(
                    f"Cannot write {item} in the layout {layout}: it has no names of parameters. Use nested."
                )
            self._add((item,), encoded["state_dict"])
            return
        prefix = _find_prefix([name for group in encoded["groups"] for name in group["params"]])
        # Parameters that are in no model have no name in torch's format.
        others = [
            *encoded.get("parameters", {}),
            *(f"{item}.{key}" for key in (*_list_keys(encoded["other"]), *encoded["extra"])),
        ]
        self._state.others += others
        if layout == "nested":
            self._add_nested(item, encoded, prefix)
        else:
            self._add_flattened(item, encoded, prefix)

    def _add_nested(self, item: str, encoded: Any, prefix: str) -> None:
        for name, state in encoded["state"].items():
            self._add((item, "state", name.removeprefix(prefix)), state)
        for index, group in enumerate(encoded["groups"]):
            names = [name.removeprefix(prefix) for name in group["params"]]
            self._add((item, "param_groups", index), {**group, "params": names})

    def _add_flattened(self, item: str, encoded: Any, prefix: str) -> None:
        for name, state in encoded["state"].items():
            for key, node in state.items():
                self._set((item, f"state.{name.removeprefix(prefix)}.{key}"), self._resolve(node))
        for group in encoded["groups"]:
            for name in group["params"]:
                for key, node in group.items():
                    if key != "params":
                        self._set(
                            (item, f"param_groups.{name.removeprefix(prefix)}.{key}"), self._resolve(node)
                        )

    def _add(self, keys: _Keys, node: Any) -> None:
        """Add a node and those below it, as torch flattens a state dict: lists only if they have tensors or dicts in them."""
        children = get_children(node)
        is_list = children is not None and (isinstance(node, list) or node.get(KEY) == "tuple")
        is_dict = (
            children is not None
            and not isinstance(node, list)
            and node.get(KEY) in {None, "dict", "OrderedDict"}
        )
        pairs = list(children or ())
        if is_dict or (is_list and any(_is_container_or_tensor(child) for _, child in pairs)):
            for key, child in pairs:
                self._add((*keys, deserialize(key, {})), child)
        else:
            self._set(keys, self._resolve(node))

    def _set(self, keys: _Keys, value: Any) -> None:
        if keys in self._state.values:
            raise RequestError(
                f"Cannot write the layout {self._request.layout}: two models have a {_flat_name(keys)}. Use the layout nested."
            )
        self._state.values[keys] = value

    def _resolve(self, node: Any) -> Any:
        """Return the tensor or value of a node; tensors inside of other values are read."""
        if isinstance(node, dict) and node.get(KEY) == "tensor":
            return self._find(node["name"])
        tensors = {name: _read_tensor(self._snapshot, self._find(name)) for name in list_tensor_names(node)}
        return deserialize(node, tensors)

    def _find(self, name: str) -> _Stored:
        of_rank = rank_tensor_name(name, self._request.rank)
        stored = of_rank if of_rank in self._manifest.tensors else name
        return _Stored(stored, self._manifest.tensors[stored])

    def _encoded(self, item: str) -> Any:
        by_rank = self._manifest.values_by_rank.get(item)
        return self._manifest.values[item] if by_rank is None else by_rank[self._request.rank]


def _list_keys(node: Any) -> list[str]:
    """Return the keys of a serialized dict."""
    return [str(deserialize(key, {})) for key, _ in get_children(node) or ()]


def _is_container_or_tensor(node: Any) -> bool:
    return isinstance(node, dict) and node.get(KEY) in {None, "dict", "OrderedDict", "tensor"}


def _find_prefix(names: Iterable[str]) -> str:
    """Return the name of the model of all parameters, with a dot; empty if they are in several."""
    prefixes = {name.partition(".")[0] for name in names if not name.startswith("optimizer")}
    return f"{prefixes.pop()}." if len(prefixes) == 1 else ""


def _flat_name(keys: _Keys) -> str:
    return ".".join(map(str, keys))


# Plan ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """Rows of a chunk, which are written as one."""

    chunk: int
    """Index in the tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


class _StoredPlanner(DefaultSavePlanner):
    """A planner whose tensors are in a checkpoint: each is read when the writer asks for its pieces, in their order."""

    def __init__(self, snapshot: Snapshot, values: Mapping[_Keys, Any], progress: Progress) -> None:
        super().__init__()
        self._snapshot, self._progress = snapshot, progress
        self._values = {_flat_name(keys): value for keys, value in values.items()}
        self._keys = {_flat_name(keys): keys for keys in values}
        self._readers: dict[tuple[str, int], Iterator[torch.Tensor]] = {}
        self._chunk_of: dict[tuple[str, tuple[int, ...]], int] = {}
        self._remaining: Counter[tuple[str, int]] = Counter()

    def create_plans(self) -> list[SavePlan]:
        """Return a plan for each file."""
        plans: list[list[WriteItem]] = [[]]
        filled = 0
        for name, value in self._values.items():
            for item, size in self._create_items(name, value):
                if plans[-1] and filled + size > _FILE_BYTES:
                    plans.append([])
                    filled = 0
                plans[-1].append(item)
                filled += size
        return [
            SavePlan(items, planner_data={item.index.fqn: self._keys[item.index.fqn] for item in items})
            for items in plans
        ]

    def _create_items(self, name: str, value: Any) -> Iterator[tuple[WriteItem, int]]:
        """Yield the parts of a value, with their bytes."""
        if not isinstance(value, _Stored):
            yield WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO), 0
            return
        dtype = _find_dtype(value)
        for piece in _split_chunks(value.entry, dtype.itemsize):
            self._chunk_of[name, piece.offsets] = piece.chunk
            self._remaining[name, piece.chunk] += 1
            bounds = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
            data = TensorWriteData(bounds, TensorProperties(dtype=dtype), torch.Size(value.entry.shape))
            index = MetadataIndex(name, bounds.offsets)
            yield WriteItem(index, WriteItemType.SHARD, tensor_data=data), piece.count * dtype.itemsize

    @override
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name = write_item.index.fqn
        value = self._values[name]
        if not isinstance(value, _Stored):
            data = io.BytesIO()
            torch.save(value, data)
            return data
        assert write_item.index.offset is not None
        key = name, self._chunk_of[name, tuple(write_item.index.offset)]
        if key not in self._readers:
            self._readers[key] = _read_pieces(self._snapshot, value, key[1], self._progress)
        piece = next(self._readers[key])
        self._remaining[key] -= 1
        if not self._remaining[key]:
            del self._readers[key]  # it refers to the piece
        assert write_item.tensor_data is not None
        assert piece.shape == write_item.tensor_data.chunk.sizes
        return piece


def _find_dtype(stored: _Stored) -> torch.dtype:
    dtype = getattr(torch, stored.entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise RequestError(
            f"Cannot write {stored.name}: torch {torch.__version__} has no {stored.entry.dtype}."
        )
    return dtype


def _split_chunks(entry: TensorEntry, itemsize: int) -> Iterator[_Piece]:
    """Yield the pieces of a tensor by rows of its chunks; one empty piece of a tensor without elements."""
    filled = [(number, chunk) for number, chunk in enumerate(entry.chunks) if chunk.bytes]
    if not filled:
        yield _Piece(0, (0,) * len(entry.shape), entry.shape)
    for number, chunk in filled:
        for start, count in _split_rows(chunk, itemsize):
            if not chunk.sizes:
                yield _Piece(number, (), ())
            else:
                offsets = (chunk.offsets[0] + start, *chunk.offsets[1:])
                yield _Piece(number, offsets, (count, *chunk.sizes[1:]))


def _split_rows(chunk: Chunk, itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield start and count of the rows of each piece of a chunk."""
    if not chunk.sizes:
        yield 0, 1
        return
    rows = max(1, _PIECE_BYTES // max(1, math.prod(chunk.sizes[1:]) * itemsize))
    for start in range(0, chunk.sizes[0], rows):
        yield start, min(rows, chunk.sizes[0] - start)


def _read_pieces(
    snapshot: Snapshot, stored: _Stored, number: int, progress: Progress
) -> Iterator[torch.Tensor]:
    """Yield the pieces of a chunk in order; the last one after the checksum of the chunk was verified."""
    dtype = _find_dtype(stored)
    if not stored.entry.bytes:
        yield torch.empty(stored.entry.shape, dtype=dtype)
        return
    chunk = stored.entry.chunks[number]
    blocks = read_chunk(snapshot, stored.name, chunk, min(BLOCK, chunk.bytes), progress)
    rest, ended = memoryview(b""), 0
    for _, count in _split_rows(chunk, dtype.itemsize):
        piece = torch.empty((count, *chunk.sizes[1:]) if chunk.sizes else (), dtype=dtype)
        target = tensor_bytes(piece)
        while target:
            rest = rest or next(blocks)
            length = min(len(rest), len(target))
            target[:length] = rest[:length]
            target, rest, ended = target[length:], rest[length:], ended + length
        if ended == chunk.bytes:
            for _ in blocks:
                pass
        yield piece


def _read_tensor(snapshot: Snapshot, stored: _Stored) -> torch.Tensor:
    """Return a small tensor."""
    tensor = torch.empty(stored.entry.shape, dtype=_find_dtype(stored))
    for number, chunk in enumerate(stored.entry.chunks):
        region = tensor
        for dimension, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            region = region.narrow(dimension, offset, size)
        if chunk.bytes:
            region.copy_(
                torch.cat(
                    [p.reshape(-1) for p in _read_pieces(snapshot, stored, number, lambda _: None)]
                ).view(chunk.sizes)
            )
    return tensor
