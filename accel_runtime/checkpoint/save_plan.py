"""Plan which rank writes which tensor into which file: every rank computes the same plan, from digests and counts.

docs/design/saving.md has the reasons.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from accel_runtime.checkpoint.state_items import is_sharded
from accel_runtime.parallel.dtensor import region_of
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.manifest import TensorEntry, hash_bytes, item_of_tensor
from accel_runtime.storage.schema import FieldError
from accel_runtime.storage.tensor_file import shard_file_name

__all__ = [
    "FileSet",
    "HeldTensor",
    "ItemDigest",
    "PlannedFile",
    "ShardSet",
    "StateDigest",
    "TensorHashes",
    "TensorShard",
    "check_same_items",
    "describe_layout",
    "find_held",
    "find_rank_specific",
    "group_shards",
    "merge_tensors",
    "plan_files",
    "split_parts",
    "split_replicated_parts",
]


_MIN_FILE_BYTES = 1 << 20
"""Smallest file that is worth splitting, so that ranks share the work."""
_FILE_BYTES = 1 << 28
"""Smallest file that is worth splitting on one rank, so that threads share the work and files stay few."""
_FILES = 16
"""Approximate largest number of files for each rank."""


@dataclass(frozen=True)
class TensorShard:
    """A tensor, or the shard of one, that a rank can write."""

    name: str
    """Name of the tensor in the manifest."""
    dtype: str
    """Name of the torch dtype."""
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    offsets: tuple[int, ...]
    """Offset in the full tensor, by dimension."""
    sizes: tuple[int, ...]
    """Size of the part, by dimension."""
    bytes: int
    """Size of the part."""

    @classmethod
    def from_tensor(cls, name: str, tensor: torch.Tensor) -> TensorShard:
        """Return the part of a tensor that this rank has."""
        try:
            offsets, sizes = region_of(tensor, name)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        dtype, nbytes = str(tensor.dtype).removeprefix("torch."), math.prod(sizes) * tensor.dtype.itemsize
        return cls(name, dtype, tuple(tensor.shape), offsets, sizes, nbytes)

    @property
    def is_full(self) -> bool:
        """Return whether this is the full tensor."""
        return self.sizes == self.shape

    @property
    def full_bytes(self) -> int:
        """Size of the full tensor."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize


@dataclass(frozen=True)
class PlannedFile:
    """A file with parts of one item."""

    item: str
    parts: tuple[TensorShard, ...]
    name: str = ""
    """Name in the checkpoint; empty until the files of all ranks are counted."""

    @property
    def bytes(self) -> int:
        """Size of all parts."""
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True)
class ShardSet:
    """Shards of this rank of one kind; ranks with an equal set are replicas of each other, and one of them writes."""

    kind: str
    """Digest of the mesh and the placements of these tensors."""
    parts: str
    """Digest of their names, offsets and sizes."""
    num_files: tuple[tuple[str, int], ...]
    """Number of files of each item."""


@dataclass(frozen=True)
class FileSet:
    """Files that some ranks can write, each of them all."""

    holders: tuple[int, ...]
    """These ranks."""
    num_files: Mapping[str, int]
    """Number of files of each item."""
    files: tuple[PlannedFile, ...] = ()
    """The files; empty on a rank that holds none of them."""

    @classmethod
    def from_files(cls, holders: Sequence[int], files: Sequence[PlannedFile]) -> FileSet:
        """Return the set of files that this rank knows."""
        return cls(tuple(holders), _count_files(files), tuple(files))


def describe_layout(name: str, tensor: torch.Tensor) -> str:
    """Return what is equal on all ranks that have a tensor: its name, dtype and shape, and how it is sharded."""
    return f"{name} {tensor.dtype} {tuple(tensor.shape)} {_describe_sharding(tensor)}"


def _describe_sharding(tensor: Any) -> str:
    return f"{tuple(tensor.device_mesh.shape)} {tensor.placements}" if is_sharded(tensor) else ""


def group_shards(tensors: Mapping[str, torch.Tensor]) -> dict[ShardSet, tuple[PlannedFile, ...]]:
    """Return the shards of this rank by their kind, split into files. Empty shards are left out."""
    kinds: dict[str, list[TensorShard]] = {}
    for name, tensor in tensors.items():
        if is_sharded(tensor):
            part = TensorShard.from_tensor(name, tensor)
            # An empty tensor is written by the rank with its first shard.
            if part.bytes or not (tensor.numel() or any(part.offsets)):
                kinds.setdefault(_describe_sharding(tensor), []).append(part)
    groups = {}
    for kind, parts in kinds.items():
        files = split_parts(parts)
        regions = repr([(part.name, part.offsets, part.sizes) for part in parts])
        counts = tuple(_count_files(files).items())
        groups[ShardSet(hash_bytes(kind.encode()), hash_bytes(regions.encode()), counts)] = files
    return groups


def split_replicated_parts(parts: Sequence[TensorShard], num_ranks: int) -> tuple[PlannedFile, ...]:
    """Split tensors that any of the ranks can write into files, a few for each rank."""
    share = sum(part.bytes for part in parts) // num_ranks
    limit = _FILE_BYTES if num_ranks == 1 else max(_MIN_FILE_BYTES, min(_FILE_BYTES, share // 2))
    return _split(parts, max(limit, share // _FILES))


def split_parts(parts: Sequence[TensorShard]) -> tuple[PlannedFile, ...]:
    """Split the parts that one rank writes, or one of its replicas, into files."""
    return _split(parts, max(_FILE_BYTES, sum(part.bytes for part in parts) // _FILES))


def _split(parts: Sequence[TensorShard], limit: int) -> tuple[PlannedFile, ...]:
    files: list[tuple[str, list[TensorShard]]] = []
    open_files: dict[str, list[TensorShard]] = {}
    filled: Counter[str] = Counter()
    for part in parts:
        item = item_of_tensor(part.name)
        opened = open_files.get(item)
        if opened is None or filled[item] + part.bytes > limit:
            opened = open_files[item] = []
            filled[item] = 0
            files.append((item, opened))
        opened.append(part)
        filled[item] += part.bytes
    return tuple(PlannedFile(item, tuple(content)) for item, content in files)


def _count_files(files: Iterable[PlannedFile]) -> Counter[str]:
    return Counter(file.item for file in files)


def plan_files(sets: Sequence[FileSet], rank: int) -> tuple[list[list[PlannedFile]], frozenset[str]]:
    """Return the files of each set that this rank writes, and the names of the files of all ranks.

    The sets are in the same order on all ranks, and so are the files of an item in a set.
    """
    counts: Counter[str] = Counter()
    for each in sets:
        counts.update(each.num_files)
    used: Counter[str] = Counter()
    own = []
    for each in sets:
        numbers = Counter(used)
        named = []
        for file in each.files:
            numbers[file.item] += 1
            name = shard_file_name(file.item, numbers[file.item], counts[file.item])
            named.append(PlannedFile(file.item, file.parts, name))
        own.append([file for writer, file in _assign_writers(named, each.holders) if writer == rank])
        used.update(each.num_files)
    names = (
        shard_file_name(item, number, count)
        for item, count in counts.items()
        for number in range(1, count + 1)
    )
    return own, frozenset(names)


def _assign_writers(
    files: Sequence[PlannedFile], holders: Sequence[int]
) -> Iterator[tuple[int, PlannedFile]]:
    """Yield the writer of each file: the largest file first, by the rank that has the least to write."""
    loads = [(0, rank) for rank in holders]
    for file in sorted(files, key=lambda file: -file.bytes):
        load, rank = heapq.heappop(loads)
        yield rank, file
        heapq.heappush(loads, (load + file.bytes, rank))


def merge_tensors(
    names: Sequence[str],
    written: Sequence[Mapping[str, TensorEntry]],
    part: Mapping[str, TensorEntry] | None = None,
) -> dict[str, TensorEntry]:
    """Return the tensors with the chunks of all ranks; raise `CheckpointError` if they do not cover a tensor exactly.

    `part` has the sharded tensors of which a node writes a part, without chunks; these need not be covered.
    """
    found: dict[str, list[TensorEntry]] = {name: [entry] for name, entry in (part or {}).items()}
    for tensors in written:
        for name, entry in tensors.items():
            found.setdefault(name, []).append(entry)
    merged = {}
    for name in names:
        if name not in found:
            raise CheckpointError(f"Cannot save {name}: no rank has written it. Report this error.")
        entries = found[name]
        chunks = sorted(
            (chunk for entry in entries for chunk in entry.chunks), key=lambda chunk: chunk.offsets
        )
        merged[name] = replace(entries[0], chunks=tuple(chunks))
        try:
            merged[name].check()
            merged[name].check_coverage(is_node_part=part is not None and name in part)
        except FieldError as error:
            raise CheckpointError(f"Cannot save {name}: its chunks {error}. Report this error.") from error
    return merged


@dataclass(frozen=True)
class ItemDigest:
    """Digests of an item of the state, equal on two ranks if the item is."""

    values: str
    """Of its JSON."""
    layout: str
    """Of the names, dtypes, shapes and placements of its tensors."""
    tensors: str
    """Of the layout and the bytes of its tensors, except those of shards."""


@dataclass(frozen=True)
class StateDigest:
    """The state of a rank, as far as the others need it for the plan."""

    items: Mapping[str, ItemDigest]
    """Items by name; empty on one process, which compares nothing."""
    shards: tuple[ShardSet, ...]
    """Shards by kind."""
    weights: str | None
    """Digest of the weights that `ReplicaCheck` compares; None if it does not."""


@dataclass(frozen=True)
class TensorHashes:
    """Tensors of the items that differ between ranks, sent in a further exchange if there are any."""

    sees_draft: bool
    """True if this node sees the draft, so that this rank can write into it."""
    hashes: tuple[int | None, ...]
    """Hash of each tensor, in the order of the names; None for shards."""
    parts: tuple[TensorShard, ...] | None
    """The tensors, possibly none; None if all ranks have the same ones."""
    weights: str
    """Hashes of all weights, if their digests differ; else empty."""


def check_same_items(digests: Sequence[StateDigest]) -> None:
    """Raise `CheckpointError` if not all ranks have the same items."""
    common = set.intersection(*(set(digest.items) for digest in digests))
    if missing := [
        f"{name} on rank {rank}"
        for rank, digest in enumerate(digests)
        for name in digest.items
        if name not in common
    ]:
        raise CheckpointError(
            f"Not all ranks have the same state to save: {', '.join(missing)}. Prepare and register the same objects on every "
            "rank."
        )


@dataclass(frozen=True)
class HeldTensor:
    """A tensor that some ranks hold."""

    part: TensorShard
    """The tensor, or the shard of it that the first of these ranks has."""
    ranks: tuple[int, ...]
    """These ranks."""
    is_sharded: bool
    """True if each of them has a shard, and writes it."""


def find_held(
    own: Sequence[TensorShard], details: Sequence[TensorHashes], items: Collection[str]
) -> dict[str, HeldTensor]:
    """Return the tensors of partial items that not all ranks have, by name."""
    found: dict[str, list[tuple[int, TensorShard, int | None]]] = {}
    for rank, each in enumerate(details):
        for part, value in _pair_hashes(own, each):
            if item_of_tensor(part.name) in items:
                found.setdefault(part.name, []).append((rank, part, value))
    held = {}
    for name, holders in sorted(found.items()):
        ranks = tuple(rank for rank, _, _ in holders)
        hashes = {value for _, _, value in holders}
        if len(ranks) == len(details):
            continue
        if len(hashes) > 1:
            raise CheckpointError(
                f"Cannot save {name}: ranks {', '.join(map(str, ranks))} hold it with different values. Make them equal, or "
                "register values that differ as separate objects."
            )
        held[name] = HeldTensor(holders[0][1], ranks, None in hashes)
    return held


def _pair_hashes(
    own: Sequence[TensorShard], details: TensorHashes
) -> Iterator[tuple[TensorShard, int | None]]:
    """Return the tensors of a rank with their hashes; `own` are those of this rank."""
    return zip(own if details.parts is None else details.parts, details.hashes, strict=True)


def find_rank_specific(
    own: Sequence[TensorShard], details: Sequence[TensorHashes], held: Collection[str]
) -> dict[int, list[TensorShard]]:
    """Return the tensors of each rank that differ between ranks, or that some ranks do not have, without those of `find_held`."""
    ranks = [{part.name: (part, value) for part, value in _pair_hashes(own, each)} for each in details]
    first = ranks[0]
    differing = {
        name
        for name in set().union(*ranks).difference(held)
        if any(name not in tensors or tensors[name][1] != first[name][1] for tensors in ranks)
    }
    for rank, tensors in enumerate(ranks):
        if sharded := [name for name in sorted(differing & tensors.keys()) if tensors[name][1] is None]:
            raise CheckpointError(
                f"Cannot save {sharded[0]}: it is sharded on rank {rank}, and not on all ranks. Use the same objects on every "
                "rank."
            )
    return {
        rank: [part for name, (part, _) in tensors.items() if name in differing]
        for rank, tensors in enumerate(ranks)
    }
