"""Load a checkpoint: everything is checked before anything changes.

Over a network, each byte is read once, in few large requests, and verified where it is read. A rank requests what it needs and
nothing else: full chunks, or of a large chunk the blocks that contain its rows. Neighbors in a file become one request.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from accel_runtime.checkpoint.serialization import deserialize, serialize
from accel_runtime.checkpoint.state_items import ModelItem, OptimizerItem, StateItem
from accel_runtime.checkpoint.training_state import read_model_parallel_size
from accel_runtime.environment.cgroup import read_available_memory
from accel_runtime.export.save_model import add_aliases
from accel_runtime.foundation.module_names import match_names
from accel_runtime.foundation.tensor_bytes import tensor_bytes
from accel_runtime.foundation.torch_internals import local_tensor
from accel_runtime.storage.errors import (
    AllGatherObjects,
    CheckpointError,
    DamageError,
    NodePartError,
    check_same_directory,
    describe_error,
    errors_on_all_ranks,
    format_names,
    format_problems,
)
from accel_runtime.storage.manifest import (
    BLOCK_BYTES,
    Checkpoint,
    Chunk,
    Manifest,
    TensorEntry,
    parse_number,
    rank_tensor_name,
)
from accel_runtime.storage.schema import FieldError, read_value
from accel_runtime.storage.state_tree import KEY, list_tensor_names
from accel_runtime.storage.store import Snapshot, Store, find_previous_checkpoint, parallel_map, split_key
from accel_runtime.storage.verification import find_damage, select_rank_files

__all__ = ["LoadOperation", "TensorRead", "fit_manifest", "read_tensors"]


_LOG = logging.getLogger("accel_runtime.checkpoint")
_MEMORY_SHARE = 0.8
"""Share of the available memory that copies of live tensors may take."""
_SHOWN = 10
"""Number of reasons listed in a message."""
_INTERNAL = frozenset({"accumulation", "replicas", "step_counts"})
"""Items that no object of the script has."""
_SCALER = "scaler"
"""The item of the loss scale, which only fp16 has."""
_STALE, _STALE_S = 20, 0.05
"""How often, and after how many seconds, a rank looks again for what rank 0 has opened: its node may have an old listing."""


class LoadOperation:
    """One collective load; every rank calls the methods in the order of their definition.

    `copies` is the number of model-parallel ranks, `local_world_size` that of the ranks of this node; without `strict`, what
    does not fit is left out. `node_ranks` are the ranks that read the same part as this one, and verify it together; without
    them, each rank verifies a part alone.
    """

    def __init__(  # noqa: PLR0913 - the last four are named
        self,
        all_gather: AllGatherObjects,
        rank: int,
        world_size: int,
        store: Store,
        *,
        strict: bool,
        copies: int = 1,
        local_world_size: int = 1,
        node_ranks: Sequence[int] = (),
    ) -> None:
        self._node_ranks, self._is_on_nodes = node_ranks or (rank,), False
        self._store, self._copies, self._local_world_size = store, copies, local_world_size
        self._all_gather, self._rank, self._world_size, self._strict = all_gather, rank, world_size, strict
        self._stack = ExitStack()
        self._snapshot: Snapshot
        self._verified = False

    def open(
        self, choose: Callable[[], str], directory: str | None = None, *, verify: bool = False
    ) -> Checkpoint:
        """Return the checkpoint that rank 0 chooses, open on every rank and protected from removal until `close`.

        With `verify`, every byte is compared with its checksum, before hooks of the script rely on it. All ranks read the
        same save: if another process replaces or removes the checkpoint meanwhile, rank 0 chooses again.
        """
        self._choose, self._directory = choose, directory
        stale, previous = 0, None
        while True:
            with errors_on_all_ranks(self._all_gather) as step:
                step.share((directory, self._open_first() if self._rank == 0 else None))
            key, save = step.values[0][1]
            directories = [each for each, _ in step.values]
            # A node may see for a moment what was there before, and only a change makes a difference later.
            stale = stale + 1 if (key, save) == previous else 0
            previous = key, save
            with errors_on_all_ranks(self._all_gather) as step:
                check_same_directory("load_state", directories)
                step.share(self._open_same(key, save, fails=stale == _STALE))
            if all(step.values):
                checkpoint = self._snapshot.checkpoint
                if not verify or self._verify(self._snapshot, checkpoint.manifest.items):
                    self._verified = verify
                    return checkpoint
            elif stale:
                time.sleep(_STALE_S)
            self.close()

    def open_node_part(self, key: str, save: str, *, verify: bool = False) -> Checkpoint:
        """Return this node's part of a checkpoint, under the key that this rank passes; all ranks read the same save.

        Raises:
            NodePartError: A rank cannot open its part, or the part is of another save.
            DamageError: A part is damaged, which is found here with `verify`.
        """
        self._is_on_nodes = True
        with errors_on_all_ranks(self._all_gather) as step:
            try:
                found = self._open_snapshot(key).manifest.save
                step.share(None if found == save else f"{key} was replaced")
            except CheckpointError as error:
                step.share(str(error))
        raise_node_part_error(step.values)
        self._verified = verify and self._verify(self._snapshot, self._snapshot.checkpoint.manifest.items)
        return self._snapshot.checkpoint

    def directory(self) -> Path:
        """Return the directory for load hooks of the script."""
        return self._snapshot.directory()

    def _open_first(self) -> tuple[str, str]:
        """Open the chosen checkpoint; return its key and save."""
        while True:
            key = self._choose()
            try:
                checkpoint = self._open_snapshot(key)
            except CheckpointError as error:
                if self._choose() == key:  # else it was removed meanwhile
                    previous = self._suggest_previous(key, parse_number(split_key(key)[1]))
                    raise CheckpointError(f"{error}\n{previous}") from error
            else:
                return checkpoint.key, checkpoint.manifest.save

    def _open_snapshot(self, key: str) -> Checkpoint:
        self._snapshot = self._stack.enter_context(self._store.open(key))
        return self._snapshot.checkpoint

    def _open_same(self, key: str, save: str, *, fails: bool) -> bool:
        """Open the checkpoint that rank 0 has opened; return False if another one is in its place, or raise if `fails`."""
        if self._rank == 0:
            return True
        try:
            opened = self._open_snapshot(key).manifest.save
        except CheckpointError:
            if fails:
                raise
            return False
        if opened != save and fails:
            raise CheckpointError(f"{key} was replaced while it was opened. Load it again.")
        return opened == save

    def close(self) -> None:
        """Release the checkpoint."""
        self._stack.close()

    def load(self, items: Sequence[StateItem]) -> Checkpoint:
        """Restore items from the open checkpoint and return it; without `strict`, warn about what was left out."""
        prepared = None
        while prepared is None:
            prepared = self._prepare(items)
            if prepared is None:
                self.close()
                self.open(self._choose, self._directory)
        checkpoint, reader, saved_items, left_out = prepared
        try:
            with errors_on_all_ranks(self._all_gather):
                trees = reader.read()
            with errors_on_all_ranks(self._all_gather):
                reader.apply()
                for item in saved_items:
                    item.moved = reader.moved
                    item.restore(trees[item.name])
                absent = (
                    [item for item in items if item not in saved_items] if checkpoint.manifest.origin else []
                )
                for item in absent:
                    item.reset()
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}\nThe training state is now inconsistent ({checkpoint.key} was loaded partially). Load another "
                "checkpoint or restart."
            ) from error
        if self._rank == 0 and (fresh := [item.name for item in absent if item.name not in _INTERNAL]):
            _LOG.warning(
                "%s was imported from %s, which does not have %s: these start from the beginning",
                checkpoint.key,
                checkpoint.manifest.origin,
                ", ".join(fresh),
            )
        if self._rank == 0 and left_out:
            _LOG.warning("%s was loaded without what does not fit: %s", checkpoint.key, "; ".join(left_out))
        if self._rank == 0 and (untracked := self._snapshot.list_untracked()):
            names = ", ".join(untracked[:_SHOWN])
            _LOG.warning("%s: not part of the checkpoint, and not read: %s", checkpoint.key, names)
        return checkpoint

    def _prepare(self, items: Sequence[StateItem]) -> _Prepared | None:
        """Check and verify everything before anything changes; return None if the checkpoint was replaced meanwhile.

        What comes over a network is read only once: it is verified while it is read, into memory of its own if that suffices.
        """
        snapshot, checkpoint = self._snapshot, self._snapshot.checkpoint
        with errors_on_all_ranks(self._all_gather) as step:
            if checkpoint.manifest.origin:
                checkpoint = replace(checkpoint, manifest=fit_manifest(checkpoint.manifest, items))
            manifest = checkpoint.manifest
            # With strict=False, what belongs to another class is left out as a whole.
            saved_items = [
                item
                for item in items
                if item.name in manifest.items and (self._strict or not _has_other_class(item, manifest))
            ]
            reader = StateReader(
                snapshot,
                saved_items,
                self._rank,
                self._world_size,
                self._copies,
                self._local_world_size,
                checkpoint.manifest,
            )
            lack = find_missing_rank(checkpoint, saved_items, self._rank, moved=reader.moved)
            left_out = [] if lack else self._check_fit(checkpoint, reader, items)
            lack = lack or reader.find_missing_tensor()
            step.share((lack, not lack and snapshot.is_remote and reader.fits_memory()))
        raise_node_part_error([lack for lack, _ in step.values])
        if all(fits for _, fits in step.values):
            is_current = self._stage(reader, snapshot)
        else:
            names = [item.name for item in saved_items]
            is_current = self._verified or snapshot.is_remote or self._verify(snapshot, names)
        return _Prepared(checkpoint, reader, saved_items, left_out) if is_current else None

    def _check_fit(
        self, checkpoint: Checkpoint, reader: StateReader, items: Sequence[StateItem]
    ) -> list[str]:
        """Return what does not fit; raise it if `strict`."""
        manifest, names = checkpoint.manifest, {item.name for item in items}
        common = [item for item in items if item.name in manifest.items]
        reader.check()
        mismatches = [
            f"{_add_class(name, manifest.class_names.get(name))}: it is in the checkpoint and not prepared here"
            for name in manifest.items
            if name not in names | {_SCALER}
        ]
        mismatches += [
            f"{_add_class(item.name, item.class_name)}: it is prepared here and not in the checkpoint"
            for item in items
            if item not in common and item.name != _SCALER and not (manifest.origin and item.is_optional)
        ]
        others = [item for item in common if _has_other_class(item, manifest)]
        mismatches += [
            f"{item.name} is {manifest.class_names[item.name]} in the checkpoint and {item.class_name} here"
            for item in others
        ]
        fitting = [item for item in common if item not in others]
        mismatches += [sentence for item in fitting for sentence in reader.find_mismatches(item)]
        if mismatches and self._strict:
            more = [f"... and {len(mismatches) - _SHOWN} more"] if len(mismatches) > _SHOWN else []
            listed = "\n".join(f"  {sentence}" for sentence in [*mismatches[:_SHOWN], *more])
            raise CheckpointError(
                f"{checkpoint.key} does not fit this run, and nothing was loaded. Pass strict=False to leave out:\n{listed}"
            )
        return mismatches + _find_other_format(manifest, names)

    def _stage(self, reader: StateReader, snapshot: Snapshot) -> bool:
        """Read all items, and leave live tensors unchanged; raise damage, or return False if the checkpoint was replaced."""
        with errors_on_all_ranks(self._all_gather) as step:
            problem = None
            try:
                reader.read(stage=True)
            except (CheckpointError, OSError) as error:
                problem = describe_error(error)
            step.share((problem, problem is not None and not snapshot.is_current()))
        if any(replaced for _, replaced in step.values):
            return False
        if text := format_problems([each for each, _ in step.values]):
            previous = self._suggest_previous(snapshot.checkpoint.key, snapshot.checkpoint.number)
            raise DamageError([text, previous])
        return True

    def _verify(self, snapshot: Snapshot, names: Sequence[str]) -> bool:
        """Compare items with their checksums; raise damage, or return False if the checkpoint was replaced meanwhile."""
        checkpoint = snapshot.checkpoint
        is_node_part = self._is_on_nodes or checkpoint.manifest.is_node_part
        ranks = self._node_ranks if is_node_part else range(self._world_size)
        chunks = select_rank_files(checkpoint.manifest, names, ranks.index(self._rank), len(ranks))
        with errors_on_all_ranks(self._all_gather) as step:
            damage = find_damage(snapshot, chunks)
            step.share((damage, bool(damage) and not snapshot.is_current()))
        damage = [sentence for sentences, _ in step.values for sentence in sentences]
        if self._is_on_nodes and damage:
            raise DamageError(damage[:_SHOWN])
        if any(replaced for _, replaced in step.values):
            return False
        if damage:
            previous = self._suggest_previous(checkpoint.key, checkpoint.number)
            raise DamageError([*damage[:_SHOWN], previous])
        return True

    def _suggest_previous(self, key: str, number: int | None) -> str:
        previous = find_previous_checkpoint(self._store, split_key(key)[0], number)
        if previous is None:
            return "Nothing was loaded."
        step = previous.manifest.step
        return f"Nothing was loaded. The checkpoint before it is {previous.key}, of step {step}."


def _has_other_class(item: StateItem, manifest: Manifest) -> bool:
    return item.has_other_class(manifest.class_names.get(item.name, ""))


def _add_class(name: str, class_name: str | None) -> str:
    return f"{name} ({class_name})" if class_name else name


class _Prepared(NamedTuple):
    """A checkpoint that was checked and verified."""

    checkpoint: Checkpoint
    """The checkpoint, with a manifest that fits the run."""
    reader: StateReader
    saved_items: Sequence[StateItem]
    """The items that the checkpoint has."""
    left_out: list[str]
    """Reasons for items that do not fit."""


def _find_other_format(manifest: Manifest, names: Collection[str]) -> list[str]:
    """Return a sentence if only the checkpoint, or only this run, scales losses: weights are the same in each number format."""
    if (_SCALER in manifest.items) == (_SCALER in names):
        return []
    if _SCALER in names:
        return (
            []
            if manifest.origin
            else [f"{_SCALER}: the checkpoint has no loss scale, and one starts from the beginning"]
        )
    return [f"{_SCALER}: this run scales no loss"]


class StateReader:
    """Reads the states of items that a checkpoint has for one rank: `read`, and `apply` once all ranks have read.

    `copies` is the number of model-parallel ranks, `local_world_size` that of the ranks of this node, and `manifest` replaces that
    of the checkpoint if it was fitted to the run.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the last three have defaults
        self,
        snapshot: Snapshot,
        items: Sequence[StateItem],
        rank: int,
        world_size: int,
        copies: int = 1,
        local_world_size: int = 1,
        manifest: Manifest | None = None,
    ) -> None:
        self._snapshot, self._items, self._local_world_size = snapshot, items, local_world_size
        self._key, self._manifest = snapshot.checkpoint.key, manifest or snapshot.checkpoint.manifest
        self._rank, self._world_size = rank, world_size
        self._partial = {item.name: item for item in items if item.is_partial}
        saved_copies = (
            read_model_parallel_size(self._encoded("accumulation", next(iter(self._manifest.ranks), 0)))
            if "accumulation" in self._manifest.items
            else copies
        )
        self.moved = self._manifest.world_size != world_size or saved_copies != copies
        """True if another world size or another number of model-parallel ranks saved the checkpoint."""
        self._ranks: dict[str, int] = {}
        self._targets: dict[str, torch.Tensor] | None = None
        self._live: set[str] = set()
        self._trees: dict[str, Any] | None = None
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Live memory, and what was read for it."""

    def find_mismatches(self, item: StateItem) -> list[str]:
        """Return a sentence for each reason that the state of an item does not fit."""
        try:
            return item.find_mismatches(
                self._encoded(item.name, self._rank), self._entries(item.name, self._rank)
            )
        except (TypeError, KeyError, AttributeError, ValueError, IndexError) as error:
            raise CheckpointError(f"{self._key}: the state of {item.name} is invalid: {error}") from error

    def check(self) -> None:
        """Raise `CheckpointError` if a state cannot be deserialized; empty tensors replace the real ones."""
        _ = self._metadata
        for item in self._items:
            all_ranks = range(self._manifest.world_size if item.merge_needs_all_ranks else 1)
            for rank in all_ranks if self._differs(item) else [self._rank]:
                entries = self._entries(item.name, rank)
                empty = {
                    name: torch.empty(0, dtype=getattr(torch, entry.dtype)) for name, entry in entries.items()
                }
                try:
                    read_value(item.schema, deserialize(self._encoded(item.name, rank), empty))
                except (FieldError, CheckpointError) as error:
                    raise CheckpointError(
                        f"{self._key}: the state of {item.name} is damaged: {error}"
                    ) from error

    def _plan(self) -> None:
        """Find the live tensors of the items; their other tensors are read into new ones."""
        if self._targets is not None:
            return
        self._targets = {}
        # If the state of the first rank is used for all, it is read into the live tensors too.
        self._ranks = {
            item.name: 0 if self._differs(item) else self._rank
            for item in self._items
            if not (self.moved and item.merge_needs_all_ranks)
        }
        for item in (item for item in self._items if item.name in self._ranks):
            rank = self._ranks[item.name]
            entries, names = self._entries(item.name, rank), self._tensor_names(item.name, rank)
            live = item.targets(self._encoded(item.name, rank), entries)
            self._live |= {names[name] for name in live}
            for name, entry in entries.items():
                self._targets[names[name]] = live[name] if name in live else _empty_like(entry)

    def find_missing_tensor(self) -> str | None:
        """Return a sentence if this part does not have every element that this rank reads of a tensor; None if it has."""
        if not self._manifest.is_node_part:
            return None
        self._plan()
        assert self._targets is not None
        _, reads = self._plan_reads(self._targets)
        return find_unread(self._snapshot.checkpoint, self._targets, reads, self._rank)

    def fits_memory(self) -> bool:
        """Return whether the host has memory for a copy of the live tensors of each rank of this node."""
        self._plan()
        assert self._targets is not None
        available = read_available_memory()
        size = sum(local_tensor(self._targets[name]).nbytes for name in self._live)
        return available is None or size * self._local_world_size <= _MEMORY_SHARE * available

    def read(self, *, stage: bool = False) -> dict[str, Any]:
        """Return the states by item, with tensors read into the live ones that items name; the first call reads.

        With `stage`, live tensors are unchanged until `apply`.
        """
        if self._trees is not None:
            return self._trees
        self._plan()
        assert self._targets is not None
        targets = self._targets
        self._fetch(targets, stage=self._live if stage else frozenset())
        trees = {name: self._deserialize(name, rank, targets) for name, rank in self._ranks.items()}
        for item in self._items:
            if item.name not in trees:
                trees[item.name] = item.merge_ranks(
                    self._read_all_ranks(item.name), self._rank, self._world_size
                )
        self._trees = trees
        return trees

    def apply(self) -> None:
        """Copy what was staged into the live tensors."""
        while self._staged:
            target, memory = self._staged.pop()
            target.copy_(memory)

    def _read_all_ranks(self, item: str) -> list[Any]:
        """Return the state of every saved rank; equal tensors are shared."""
        tensors: dict[str, torch.Tensor] = {}
        for rank in range(self._manifest.world_size):
            names = self._tensor_names(item, rank)
            entries = {names[name]: entry for name, entry in self._entries(item, rank).items()}
            targets = {name: _empty_like(entry) for name, entry in entries.items() if name not in tensors}
            self._fetch(targets)
            tensors |= targets
        return [self._deserialize(item, rank, tensors) for rank in range(self._manifest.world_size)]

    def _deserialize(self, item: str, rank: int, tensors: Mapping[str, torch.Tensor]) -> Any:
        by_name = {name: tensors[stored] for name, stored in self._tensor_names(item, rank).items()}
        return deserialize(self._encoded(item, rank), by_name)

    @cached_property
    def _metadata(self) -> Metadata:
        """The layout of the tensors for DCP; `CheckpointError` names a tensor of an unknown or wrong dtype."""
        tensors, storage = {}, dict[MetadataIndex, Chunk]()
        for name, entry in self._manifest.tensors.items():
            dtype = getattr(torch, entry.dtype, None)
            if not isinstance(dtype, torch.dtype):
                raise CheckpointError(
                    f"{self._key}: {name} is of dtype {entry.dtype!r}, which torch {torch.__version__} does not have"
                )
            if not self._manifest.is_node_part and entry.bytes != math.prod(entry.shape) * dtype.itemsize:
                raise CheckpointError(
                    f"{self._key}: {name} is {entry.dtype} of shape {list(entry.shape)}, and its parts have "
                    f"{entry.bytes} bytes"
                )
            chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks]
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(entry.shape), chunks)
            storage |= {MetadataIndex(name, c.offsets, number): c for number, c in enumerate(entry.chunks)}
        return Metadata(tensors, storage_data=storage)  # type: ignore[arg-type]

    def _fetch(self, targets: dict[str, torch.Tensor], stage: Collection[str] = frozenset()) -> None:
        """Read tensors by their names in the manifest, as DCP plans it for sharded ones; stage some of them."""
        planner, reads = self._plan_reads(targets)
        files: dict[str, list[TensorRead]] = {}
        for item in reads:
            chunk: Chunk = self._metadata.storage_data[item.storage_index]
            name = item.storage_index.fqn
            dtype = getattr(torch, self._manifest.tensors[name].dtype)
            target = planner.resolve_tensor(item).detach()
            if name in stage:
                memory = torch.empty(target.shape, dtype=dtype)
                self._staged.append((target, memory))
                target = memory
            files.setdefault(chunk.file, []).append(TensorRead(name, chunk, dtype, item, target))
        if self._snapshot.is_remote:
            read_tensors(self._snapshot, [read for reads in files.values() for read in reads])
            return

        def read_file(name: str) -> None:
            for read in files[name]:
                _read_region(self._snapshot, read.chunk, read.dtype, read.item, read.target)

        parallel_map(read_file, files)

    def _plan_reads(self, targets: Mapping[str, torch.Tensor]) -> tuple[DefaultLoadPlanner, list[ReadItem]]:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(targets), self._metadata, is_coordinator=True)
        return planner, planner.finish_plan(planner.create_local_plan()).items

    def _differs(self, item: StateItem) -> bool:
        """Return whether the saved states may differ between ranks and the ranks have changed."""
        return self.moved and (item.merge_needs_all_ranks or self._manifest.is_rank_specific(item.name))

    def _encoded(self, item: str, rank: int) -> Any:
        own = self._manifest.values_by_rank.get(item)
        encoded = self._manifest.values[item] if own is None else own[rank] if rank < len(own) else own[0]
        if item not in self._partial:
            return encoded
        try:
            return self._partial[item].select_part(encoded)
        except (TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{self._key}: the state of {item} is invalid: {error}") from error

    def _entries(self, item: str, rank: int) -> dict[str, TensorEntry]:
        return {
            name: self._manifest.tensors[stored] for name, stored in self._tensor_names(item, rank).items()
        }

    def _tensor_names(self, item: str, rank: int) -> dict[str, str]:
        """Return the names in the manifest of the tensors of an item on a rank, by their names in the tree."""
        # Not what other ranks hold.
        needed = list_tensor_names(self._encoded(item, rank)) if item in self._partial else None
        rank = rank if rank < self._manifest.world_size else 0
        names = {}
        for stored in self._manifest.tensors_of(item):
            name, _, owner = stored.rpartition("#") if "#" in stored else (stored, "", "")
            if needed is not None and name not in needed:
                continue
            if not owner or stored == rank_tensor_name(name, rank):
                names[name] = stored
        return names


def _empty_like(entry: TensorEntry) -> torch.Tensor:
    return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))


def _read_region(
    snapshot: Snapshot, chunk: Chunk, dtype: torch.dtype, item: ReadItem, target: torch.Tensor
) -> None:
    """Read a region of a chunk: contiguous rows from the file, then the requested columns of them."""
    sizes, offsets, lengths = chunk.sizes, tuple(item.storage_offsets), tuple(item.lengths)
    row = math.prod(sizes[1:]) * dtype.itemsize
    start, rows = (chunk.start + offsets[0] * row, lengths[0]) if sizes else (chunk.start, 1)
    whole_rows = lengths[1:] == sizes[1:]
    direct = target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous()
    if whole_rows and direct:
        _read_exactly(snapshot, chunk.file, start, tensor_bytes(target))
        return
    buffer = torch.empty((rows, *sizes[1:]) if sizes else (), dtype=dtype)
    _read_exactly(snapshot, chunk.file, start, tensor_bytes(buffer))
    for dimension in range(1, len(sizes)):
        buffer = buffer.narrow(dimension, offsets[dimension], lengths[dimension])
    target.copy_(buffer)


def _read_exactly(snapshot: Snapshot, name: str, start: int, buffer: memoryview) -> None:
    if snapshot.get_range(name, start, buffer) < len(buffer):
        raise CheckpointError(f"{snapshot.checkpoint.locate(name)} was truncated while it was read")


def find_missing_rank(
    checkpoint: Checkpoint, items: Sequence[StateItem], rank: int, *, moved: bool
) -> str | None:
    """Return a sentence if a part does not have the states of ranks that a rank needs; None if it has, or is no part.

    `moved` is whether other ranks have saved it, so that states that differ between ranks are merged, or taken from rank 0.
    """
    manifest = checkpoint.manifest
    for item in items if manifest.is_node_part else ():
        if not manifest.is_rank_specific(item.name):
            continue
        needed = {0 if moved else rank}
        if moved and item.merge_needs_all_ranks:
            needed = set(range(manifest.world_size))
        if missing := sorted(needed - set(manifest.ranks)):
            listed = format_names([str(each) for each in missing], limit=_SHOWN)
            return f"{checkpoint.key} does not have the state of {item.name} of rank {listed}"
    return None


def find_unread(
    checkpoint: Checkpoint, targets: Mapping[str, torch.Tensor], reads: Iterable[ReadItem], rank: int
) -> str | None:
    """Return a sentence if the planned reads do not fill a tensor of a rank; None if they do."""
    filled: Counter[str] = Counter()
    for item in reads:
        filled[item.storage_index.fqn] += math.prod(item.lengths)
    for name, target in targets.items():
        if filled[name] < local_tensor(target).numel():
            return f"{checkpoint.key} does not have the shard of {name} of rank {rank}"
    return None


def raise_node_part_error(reasons: Sequence[str | None]) -> None:
    """Raise `NodePartError` if a rank cannot use its part, given the reasons of all ranks."""
    if failed := [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]:
        raise NodePartError("; ".join(failed[:_SHOWN]))


_RUN_BYTES = 1 << 25
"""Largest request for several chunks, which needs memory of its own."""


@dataclass(frozen=True)
class TensorRead:
    """A region of a chunk, and the tensor that it is read into."""

    name: str
    """Name of the tensor, for errors."""
    chunk: Chunk
    dtype: torch.dtype
    """Number format of the chunk."""
    item: ReadItem
    """The region."""
    target: torch.Tensor
    """Tensor of the region's sizes, on any device and of any dtype."""

    @property
    def bounds(self) -> tuple[int, int]:
        """Return the bytes of the chunk to read: all, or the blocks that contain the rows of the region."""
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
        region = tuple(self.item.storage_offsets), tuple(self.item.lengths)
        is_full = region == ((0,) * len(self.chunk.sizes), tuple(self.chunk.sizes))
        target = self.target
        is_plain = target.device.type == "cpu" and target.dtype == self.dtype and target.is_contiguous()
        return is_full and is_plain


def read_tensors(snapshot: Snapshot, reads: Iterable[TensorRead]) -> None:
    """Read regions into their targets, in a few threads.

    Raises:
        CheckpointError: If bytes do not have their checksum, or a file ends before.
        OSError: If the store fails.
    """
    runs: list[list[TensorRead]] = []
    for read in sorted(reads, key=lambda read: (read.chunk.file, read.chunk.start + read.bounds[0])):
        if runs and _may_merge(runs[-1], read):
            runs[-1].append(read)
        else:
            runs.append([read])
    parallel_map(lambda run: _read_run(snapshot, run), runs)


def _may_merge(run: Sequence[TensorRead], read: TensorRead) -> bool:
    """Return whether a region continues the bytes of a run, which stays small enough."""
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
        _copy_region(read, memory[first - start : last - start])


def _fill(snapshot: Snapshot, file: str, start: int, data: memoryview) -> None:
    if snapshot.get_range(file, start, data) < len(data):
        raise CheckpointError(f"{snapshot.checkpoint.locate(file)} was truncated while it was read")


def _verify(snapshot: Snapshot, read: TensorRead, data: memoryview) -> None:
    """Raise `CheckpointError` if the bytes of a region do not have their checksums."""
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


def _copy_region(read: TensorRead, data: torch.Tensor) -> None:
    """Copy a region out of the bytes of its chunk, or of the blocks that contain it."""
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


def fit_manifest(manifest: Manifest, items: Sequence[StateItem]) -> Manifest:
    """Return the manifest with the names of the run, and with options of optimizers that the other program does not save."""
    values, names = dict(manifest.values), dict[str, str]()
    for item in items:
        if isinstance(item, ModelItem) and item.name in values:
            state = item.tree()
            found = match_names(values[item.name], state)
            renamed = {found[name]: node for name, node in values[item.name].items()}
            names |= {f"{item.name}.{name}": f"{item.name}.{own}" for name, own in found.items()}
            values[item.name] = add_aliases(renamed, state)
    for item in items:
        if isinstance(item, OptimizerItem) and item.name in values:
            values[item.name] = _fit_optimizer(values[item.name], item.tree()["groups"], names)
    return replace(manifest, values=values)


def _fit_optimizer(saved: Any, live: Sequence[Any], names: Mapping[str, str]) -> Any:
    """Return the state of an optimizer with the names of the run.

    Frozen parameters, which other programs leave out, are added to the group that they are in here.
    """
    if "format" in saved:
        saved = _name_parameters(saved, live)
        if "format" in saved:
            return saved
    groups = [
        group | {"params": [names.get(name, name) for name in group["params"]]} for group in saved["groups"]
    ]
    if saved.get("by_parameter"):
        groups = _regroup(groups, live)
    trained = {name for group in groups for name in group["params"]}
    if len(groups) == len(live):
        known = set(names.values())
        for group, own in zip(groups, live, strict=True):
            group["params"] += [name for name in own["params"] if name not in trained and name in known]
    groups = [
        _encode_options(own) | group for group, own in zip(groups, live, strict=len(groups) == len(live))
    ] + groups[len(live) :]
    state = {names.get(name, name): each for name, each in saved["state"].items()}
    return {**saved, "groups": groups, "state": state}


def _regroup(saved: Sequence[Any], live: Sequence[Any]) -> list[Any]:
    """Return the groups of the run for options that are saved by parameter; the saved ones if the options differ in one."""
    group_of = {name: index for index, group in enumerate(saved) for name in group["params"]}
    groups = []
    for own in live:
        params = [name for name in own["params"] if name in group_of]
        indices = {group_of.pop(name) for name in params}
        if len(indices) > 1:
            return list(saved)
        groups.append({**(saved[indices.pop()] if indices else {}), "params": params})
    return list(saved) if group_of else groups


def _name_parameters(saved: Any, live: Sequence[Any]) -> Any:
    """Return a state in torch's format, by index, by the names of the run, if the groups have as many parameters."""
    groups, state = saved["state_dict"]["param_groups"], saved["state_dict"]["state"]
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in live]:
        return saved
    indices = [index for group in groups for index in group["params"]]
    order = dict(zip(indices, [name for group in live for name in group["params"]], strict=True))
    # A dict with numbers as keys.
    pairs = state["items"] if KEY in state else state.items()
    return {
        "groups": [{**group, "params": [order[index] for index in group["params"]]} for group in groups],
        "state": {order[index]: each for index, each in pairs},
        "other": {},
        "extra": {},
    }


def _encode_options(group: Any) -> Any:
    """Return the options of a group of parameters of the run as JSON."""
    options = {
        key: value for key, value in group.items() if key != "params" and not isinstance(value, torch.Tensor)
    }
    return serialize(options, "optimizer")[0]
