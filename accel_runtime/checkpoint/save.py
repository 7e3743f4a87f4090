"""Save a checkpoint in three exchanges between the ranks, usually four.

1. `SaveProposal`: the first rank that writes has begun the draft, and every rank sends digests of its state, from which all compute one plan.
2. `WriteReport`: every rank has written its files, and sends their entries to rank 0.
3. The outcome: rank 0 has committed the draft, or removed it, and sends why.

There is one more exchange if the script has save hooks (`StateDigest` after them), if tensors differ between ranks, as those of random states do, or nodes
need not see the draft (`TensorHashes`), and if the state is copied for a save in the background. A step that fails on one rank
raises the same error on all ranks at the end of its exchange. Before the first exchange, `Backend.wait_for_ranks` finds ranks that
do not call `save_state` (collectives/stalls.py); the ranks that do may then save without them. docs/design/saving.md has the reasons and the sizes.
"""

from __future__ import annotations

import json
import logging
import random
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from accel_runtime.backends.base import Backend
from accel_runtime.checkpoint.background import StagingBuffers
from accel_runtime.checkpoint.save_plan import (
    FileSet,
    HeldTensor,
    ItemDigest,
    PlannedFile,
    ShardSet,
    StateDigest,
    TensorHashes,
    TensorShard,
    check_same_items,
    describe_layout,
    find_held,
    find_rank_specific,
    group_shards,
    merge_tensors,
    plan_files,
    split_parts,
    split_replicated_parts,
)
from accel_runtime.checkpoint.serialization import serialize
from accel_runtime.checkpoint.state_items import StateItem, is_sharded
from accel_runtime.checks.replicas import ReplicaCheck, WeightDigests
from accel_runtime.collectives.handshake import ObjectGroup
from accel_runtime.collectives.stalls import MissingRanks
from accel_runtime.environment.settings import __version__, format_size, variable_name
from accel_runtime.foundation.tensor_bytes import copy_to_host, remember_hashes
from accel_runtime.foundation.torch_internals import local_tensor
from accel_runtime.parallel.strategy import Strategy
from accel_runtime.storage.errors import (
    CheckpointError,
    CollectiveStep,
    catch_error,
    check_same_directory,
    errors_on_all_ranks,
    format_problems,
    raise_problem,
)
from accel_runtime.storage.manifest import (
    Chunk,
    FileEntry,
    Manifest,
    TensorEntry,
    hash_bytes,
    item_of_tensor,
    rank_tensor_name,
)
from accel_runtime.storage.store import Draft, DraftAddress, KeyExistsError, Store, parallel_map, split_key
from accel_runtime.storage.tensor_file import TensorPart, write_safetensors

__all__ = ["SaveOperation", "SaveTarget", "save_without_missing_ranks", "write_without_missing_ranks"]


_ATTEMPTS = 100
"""Number of names that a save tries."""
_SMALL = 1 << 16
"""Largest rank-specific tensor, in bytes, that rank 0 writes for its rank: fewer files for little data."""


@dataclass(frozen=True)
class SaveTarget:
    """Name of the checkpoint."""

    choose: Callable[[], str]
    """Return the key; called on rank 0, and again if another process has taken the key."""
    directory: str | None = None
    """Directory that the script passed on this rank; must be equal on all ranks."""
    numbered: bool = False
    """True if further keys are tried if one is taken."""
    save: str = ""
    """Unique name of the save; empty if one rank begins it and gives it a name."""


@dataclass(frozen=True)
class SaveProposal:
    """Sent in the first exchange."""

    directory: str | None
    """`SaveTarget.directory`."""
    draft: DraftAddress | None
    """The draft that rank 0 has begun; None from the others."""
    free_bytes: int
    """Free space for the draft; 0 from the others."""
    state: StateDigest | None
    """None if this rank has save hooks: then all ranks send it in an exchange after the hooks."""


@dataclass(frozen=True)
class WriteReport:
    """Sent to rank 0 in the second exchange."""

    tensors: Mapping[str, TensorEntry]
    """Tensors by name, with their chunks in the files of this rank."""
    files: Mapping[str, FileEntry]
    """Files of this rank."""
    values: Mapping[str, Any]
    """JSON of the items that differ between ranks."""
    small: Mapping[str, torch.Tensor]
    """Rank-specific tensors that rank 0 writes, by name."""


@dataclass
class RankState:
    """The state of a run on this rank."""

    values: dict[str, Any] = field(default_factory=dict)
    """JSON of each item."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors by name."""
    hashes: dict[str, int | None] = field(default_factory=dict)
    """Hash of each tensor, None for shards; empty on one process."""
    shards: dict[ShardSet, tuple[PlannedFile, ...]] = field(default_factory=dict)
    """Files with the shards of each kind."""
    class_names: dict[str, str] = field(default_factory=dict)
    """Class name of each item that has one."""
    partial: dict[str, StateItem] = field(default_factory=dict)
    """Items of which ranks have different parts."""
    weights: WeightDigests | None = None
    """Hashes of the weights that `ReplicaCheck` compares."""

    def list_tensors(self, items: Collection[str]) -> list[str]:
        """Return the names of the tensors of items, in order."""
        return sorted(name for name in self.tensors if item_of_tensor(name) in items)

    def list_parts(self, names: Sequence[str]) -> tuple[TensorShard, ...]:
        """Return the parts of tensors that this rank has."""
        return tuple(TensorShard.from_tensor(name, self.tensors[name]) for name in names)


@dataclass(frozen=True)
class SavePlan:
    """Files that this rank writes, and the items that differ between ranks."""

    files: tuple[PlannedFile, ...]
    """Files of this rank."""
    small_files: tuple[PlannedFile, ...]
    """Files with small rank-specific tensors, which rank 0 writes after the second exchange; empty on the others."""
    file_names: frozenset[str]
    """Names of the files of all ranks."""
    tensors: tuple[str, ...]
    """Names of the tensors of the checkpoint."""
    bytes: int
    """Size of the tensors of the checkpoint."""
    differing_values: frozenset[str]
    """Items whose JSON differs between ranks."""
    joined_values: frozenset[str]
    """Items among `differing_values` that the checkpoint has as one: ranks have different parts."""


class SaveOperation:
    """One collective save: every rank calls `open`, then `stage` before a write in the background, and `finish`.

    Args:
        group: Exchanges objects between the ranks.
        store: The store of the checkpoint.
        run: Identity of the run, for the manifest.
        shared: All nodes must see the draft. If False, ranks of nodes that do not see it write nothing: replicated
            values are written by the other ranks, rank-specific values are sent to rank 0.
        replicas: Compares the weights of replicas; None compares nothing.
        to_host: Makes the state of an item ready for files.
        ranks: The ranks that write this checkpoint, of which the first commits; None means all. The ranks of a node write what
            they have, and `NodeSaves.operation` ends the save.
    """

    _max_small = _SMALL
    """Largest rank-specific tensor, in bytes, that the first rank writes."""

    def __init__(  # noqa: PLR0913 - the last five have defaults
        self,
        group: ObjectGroup,
        store: Store,
        *,
        run: Mapping[str, str] | None = None,
        shared: bool = True,
        replicas: ReplicaCheck | None = None,
        to_host: Callable[[Any], Any] = lambda state: state,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self._group, self._store, self._run, self._shared = group, store, dict(run or {}), shared
        self._ranks = tuple(range(group.size)) if ranks is None else tuple(ranks)
        self._first, self._is_node_part = self._ranks[0], len(self._ranks) < group.size
        self._replicas, self._to_host = replicas, to_host
        self._draft: Draft | None = None
        self._state = RankState()
        self._sources: dict[str, torch.Tensor] = {}
        """Data of the parts in the files of this rank, by name."""
        self._small: dict[str, torch.Tensor] = {}
        """Tensors of this rank that rank 0 writes, by name."""
        self._sharded: dict[str, TensorEntry] = {}
        """Sharded tensors of which this node has a part, without chunks."""
        self._files: dict[str, FileEntry] = {}
        """Files that this rank has written."""

    @property
    def progress(self) -> str:
        """Bytes that this rank has written, and those it has to write."""
        written = sum(file.bytes for file in list(self._files.values()))
        return f"{format_size(written)} of {format_size(sum(file.bytes for file in self.plan.files))}"

    def open(
        self,
        target: SaveTarget,
        list_items: Callable[[], Sequence[StateItem]],
        num_steps: int = 0,
        call_hooks: Callable[[Path], None] | None = None,
    ) -> DraftAddress:
        """Begin the draft, and plan which rank writes what; return the address of the draft.

        Args:
            target: The name of the checkpoint.
            list_items: Return the state; called after the hooks.
            num_steps: The number of optimizer steps.
            call_hooks: Call the save hooks of the script with a directory: files that they write become part of the checkpoint.
        """
        self._num_steps = num_steps
        with self._step() as step:
            # First the state: parts of it may be collective, and rank 0 may fail to begin.
            state = self._collect(list_items()) if call_hooks is None else None
            free_bytes = 0
            if self._group.rank == self._first:
                self._draft = _begin_free_draft(target, self._store)
                free_bytes = self._draft.free_space()
            address = None if self._draft is None else self._draft.address
            step.share(SaveProposal(target.directory, address, free_bytes, state))
        openings: Sequence[SaveProposal] = step.values
        self._address = openings[self._first].draft
        with self._abort_on_error():
            check_same_directory("save_state", [opening.directory for opening in openings])
            _check_same_number([opening.draft for opening in openings])
        digests = [opening.state for opening in openings]
        self._has_hooks = None in digests
        if self._has_hooks:
            with self._step() as step:
                draft = self._attach()
                if call_hooks is not None:
                    call_hooks(draft.directory())
                if not draft.is_shared:
                    draft.put_hook_files(())  # raises if there are any
                step.share(self._collect(list_items()))
            digests = list(step.values)
        self.plan = self._compare([digest for digest in digests if digest is not None])
        assert self._address is not None
        free_bytes = openings[self._first].free_bytes
        # The size of a part is not known: ranks do not exchange those of their shards.
        if not self._is_node_part and self.plan.bytes > free_bytes:
            with self._abort_on_error():
                raise CheckpointError(
                    f"Not enough space in {split_key(self._address.key)[0]}: the checkpoint needs "
                    f"{format_size(self.plan.bytes)}, and {format_size(free_bytes)} are free. Free space, or "
                    "choose another directory."
                )
        return self._address

    def _collect(self, items: Sequence[StateItem]) -> StateDigest:
        """Serialize all items; return the digests that the other ranks need."""
        state = self._state = RankState()
        for item in items:
            state.values[item.name], tensors = serialize(self._to_host(item.tree()), item.name)
            state.tensors |= tensors
        state.partial = {item.name: item for item in items if item.is_partial}
        state.class_names = {item.name: item.class_name for item in items if item.class_name}
        state.shards = group_shards(state.tensors)
        if self._group.size == 1:
            return StateDigest({}, tuple(state.shards), None)
        hash_once = remember_hashes()
        # A sharded tensor has no hash: every rank writes its shard.
        state.hashes = {n: None if is_sharded(t) else hash_once(t) for n, t in state.tensors.items()}
        state.weights = None if self._replicas is None else self._replicas.compute_digests(hash_once)
        digests = {}
        for name, values in state.values.items():
            names = state.list_tensors({name})
            layout = [describe_layout(each, state.tensors[each]) for each in names]
            hashes = [state.hashes[each] for each in names]
            digests[name] = ItemDigest(_digest(values), _digest(layout), _digest([layout, hashes]))
        weights = None if state.weights is None else _digest(state.weights.text)
        return StateDigest(digests, tuple(state.shards), weights)

    def _compare(self, digests: Sequence[StateDigest]) -> SavePlan:
        """Find what differs between ranks, in an exchange of details if something does, and return the plan."""
        with self._abort_on_error():
            check_same_items(digests)
        own = digests[self._group.rank].items

        def find_differing(read: Callable[[ItemDigest], str]) -> frozenset[str]:
            return frozenset(n for n in own if len({read(digest.items[n]) for digest in digests}) > 1)

        items, values = find_differing(lambda item: item.tensors), find_differing(lambda item: item.values)
        weights = {digest.weights for digest in digests}
        is_drifted = len(weights) > 1 and None not in weights
        holders = self._ranks
        differing: dict[int, list[TensorShard]] = {}
        held: dict[str, HeldTensor] = {}
        if self._group.size > 1 and (items or is_drifted or not self._shared):
            names = self._state.list_tensors(items)
            has_layouts = bool(find_differing(lambda item: item.layout))
            joined = values & self._state.partial.keys()
            details = self._exchange_details(names, joined, send_parts=has_layouts, send_weights=is_drifted)
            holders = tuple(rank for rank in self._ranks if details[rank].sees_draft)
            with self._abort_on_error():
                parts = self._state.list_parts(names)
                held = find_held(parts, details, self._state.partial)
                differing = find_rank_specific(parts, details, held)
                self._check_held(held, holders)
        return self._build_plan(digests, values, holders, differing, held)

    def _check_held(self, held: Mapping[str, HeldTensor], writers: Sequence[int]) -> None:
        """Raise `CheckpointError` if no holder of a tensor writes into this checkpoint."""
        if held and self._is_node_part:
            raise CheckpointError(
                f"Cannot save {next(iter(held))} on the disks of nodes: not all ranks hold it. Leave out node_dir."
            )
        for name, tensor in held.items():
            if not set(tensor.ranks) & set(writers):
                raise CheckpointError(
                    f"Cannot save {name}: its ranks ({', '.join(map(str, tensor.ranks))}) are on nodes without access to the "
                    "checkpoint's directory. Use a directory that all nodes share."
                )

    def _exchange_details(
        self, names: Sequence[str], joined: Collection[str], *, send_parts: bool, send_weights: bool
    ) -> Sequence[TensorHashes]:
        """Exchange the hashes of tensors of items that differ, and compare the weights if they do.

        The items that rank 0 joins from the parts of all ranks are checked before a file is written.
        """
        state = self._state
        with self._step() as step:
            for name in sorted(joined):
                state.partial[name].check_part(state.values[name])
            draft = self._attach()
            sharded = next((name for name, tensor in state.tensors.items() if is_sharded(tensor)), None)
            if sharded and not draft.is_shared:
                raise CheckpointError(
                    f"Cannot save {sharded}: it is sharded, and this node does not see the checkpoint's directory. With "
                    "shared_files off only replicated models can be saved; use a directory that all nodes share."
                )
            hashes = tuple(state.hashes[name] for name in names)
            parts = state.list_parts(names) if send_parts else None
            weights = state.weights.text if send_weights and state.weights else ""
            step.share(TensorHashes(draft.is_shared, hashes, parts, weights))
        if send_weights and self._replicas is not None and state.weights is not None:
            self._replicas.compare(state.weights, [details.weights for details in step.values])
        return step.values

    def _build_plan(
        self,
        digests: Sequence[StateDigest],
        differing_values: frozenset[str],
        holders: Sequence[int],
        rank_specific: Mapping[int, Sequence[TensorShard]],
        held: Mapping[str, HeldTensor],
    ) -> SavePlan:
        """Plan the files of this rank, and count those of all."""
        rank, tensors = self._group.rank, self._state.tensors
        differing = {part.name for parts in rank_specific.values() for part in parts}
        common = [name for name in tensors if name not in differing and name not in held]
        replicated = self._state.list_parts(sorted(n for n in common if not is_sharded(tensors[n])))
        rank_specific = {number: parts for number, parts in rank_specific.items() if number in self._ranks}
        sets = [FileSet.from_files(holders, split_replicated_parts(replicated, len(holders)))]
        replicas: dict[ShardSet, list[int]] = {}
        for number in self._ranks:
            for shards in digests[number].shards:
                replicas.setdefault(shards, []).append(number)
        for shards, ranks in replicas.items():
            sets.append(FileSet(tuple(ranks), dict(shards.num_files), self._state.shards.get(shards, ())))
        by_holders: dict[tuple[int, ...], list[TensorShard]] = {}
        for tensor in held.values():
            if not tensor.is_sharded:
                writers = tuple(number for number in tensor.ranks if number in holders)
                by_holders.setdefault(writers, []).append(tensor.part)
        for writers, full in by_holders.items():
            sets.append(FileSet.from_files(writers, split_replicated_parts(full, len(writers))))
        of_ranks, small = [], list[TensorShard]()
        for number, parts in rank_specific.items():
            named = [replace(part, name=rank_tensor_name(part.name, number)) for part in parts]
            large = [part for part in named if part.bytes > self._max_small and number in holders]
            sets.append(FileSet.from_files((number,), split_parts(large)))
            small += [part for part in named if part not in large]
            of_ranks += named
        sets.append(FileSet.from_files((self._first,), split_parts(small)))
        (*own, small_files), file_names = plan_files(sets, rank)
        files = tuple(file for files in own for file in files)
        self._sources = {
            part.name: local_tensor(tensors[_shared_name(part.name)]).detach()
            for file in files
            for part in file.parts
        }
        is_own = {rank_tensor_name(part.name, rank) for part in rank_specific.get(rank, ())}
        self._small = {
            part.name: tensors[_shared_name(part.name)].detach().cpu()
            for part in small
            if part.name in is_own
        }
        if self._is_node_part:
            sharded = [part for part in self._state.list_parts(common) if is_sharded(tensors[part.name])]
            self._sharded = {part.name: TensorEntry(part.dtype, part.shape, ()) for part in sharded}
        return SavePlan(
            files,
            tuple(small_files),
            file_names,
            (*common, *held, *(part.name for part in of_ranks)),
            sum(tensors[name].nbytes for name in common)
            + sum(part.bytes for part in of_ranks)
            + sum(tensor.part.full_bytes for tensor in held.values()),
            differing_values,
            differing_values & self._state.partial.keys(),
        )

    def stage(self, staging: StagingBuffers) -> None:
        """Copy what this rank writes, so that training can continue during the write."""
        with self._step():
            self._attach()
            self._small = {name: tensor.clone() for name, tensor in self._small.items()}
            self._sources = staging.copy_tensors(self._sources)
            self._state.tensors = {}

    def finish(self, group: ObjectGroup) -> Manifest | None:
        """Write all files and commit the checkpoint; return the manifest on rank 0.

        `group` is used from here on: a save in the background has a group of its own. If the save fails, an earlier checkpoint
        of the same name is unchanged and nothing of this one remains.
        """
        self._group, manifest = group, None
        with self._abort_on_error():
            with catch_error() as writing:
                writing.share(self._write())
            reports = group.gather((writing.problem, writing.value))
            problem = format_problems([each for each, _ in reports])
            with catch_error() as committing:
                if group.rank == 0 and problem is None:
                    manifest = self._commit({rank: written for rank, (_, written) in enumerate(reports)})
            if committing.error is not None:
                problem = format_problems([committing.problem, *[None] * (group.size - 1)])
            raise_problem(group.broadcast(problem), committing.error or writing.error)
        self._attach().close()
        return manifest

    def _write(self) -> WriteReport:
        """Write the files of this rank, and those of its hooks."""
        draft = self._attach()
        tensors = self._put_files(self.plan.files)
        self._sources = {}
        if self._has_hooks and draft.is_shared:
            self._files |= draft.put_hook_files(self._names_not_of_hooks())
        values = {name: self._state.values[name] for name in self.plan.differing_values}
        return WriteReport(tensors, self._files, values, self._small)

    def _names_not_of_hooks(self) -> frozenset[str]:
        """Return the names of files in the draft that hooks have not written."""
        return self.plan.file_names

    def _put_files(self, files: Sequence[PlannedFile]) -> dict[str, TensorEntry]:
        """Write files; return their tensors."""
        written = parallel_map(self._put_file, files, waits_for_network=self._attach().is_remote)
        return {name: entry for tensors in written for name, entry in tensors}

    def _put_file(self, file: PlannedFile) -> list[tuple[str, TensorEntry]]:
        parts = [
            TensorPart(
                part.name.split("/", 1)[1],
                part.dtype,
                part.sizes,
                part.bytes,
                partial(_read_source, self._sources, part.name),
                None if part.is_full else part.offsets,
            )
            for part in file.parts
        ]
        draft = self._attach()
        metadata = {"format": "pt", "save": draft.address.save}
        written = write_safetensors(partial(draft.put, file.name), parts, metadata)
        self._files[file.name] = written.file
        entries = []
        for part, result in zip(file.parts, written.parts, strict=True):
            chunk = Chunk(
                file.name, result.start, part.bytes, result.checksum, part.offsets, part.sizes, result.blocks
            )
            entries.append((part.name, TensorEntry(part.dtype, part.shape, (chunk,))))
        return entries

    def _commit(self, reports: Mapping[int, WriteReport]) -> Manifest:
        """Write the small tensors of all ranks, and commit the draft; on the first rank that writes it."""
        written = list(reports.values())
        joined = {
            name: self._state.partial[name].join_parts([each.values[name] for each in written])
            for name in sorted(self.plan.joined_values)
        }
        self._sources = {name: tensor for each in written for name, tensor in each.small.items()}
        small = self._put_files(self.plan.small_files)
        tensors = merge_tensors(
            self.plan.tensors, [*(each.tensors for each in written), small], self._sharded
        )
        differing = self.plan.differing_values
        manifest = Manifest(
            save=self._attach().address.save,
            saved_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            world_size=self._group.size,
            step=self._num_steps,
            versions={"accel": __version__, "torch": str(torch.__version__)},
            values={name: value for name, value in self._state.values.items() if name not in differing}
            | joined,
            values_by_rank={
                name: [
                    reports[rank].values[name] if rank in reports else None
                    for rank in range(self._group.size)
                ]
                for name in sorted(differing - joined.keys())
            },
            tensors=tensors,
            files={name: file for each in written for name, file in each.files.items()} | self._files,
            class_names=self._state.class_names,
            run=self._run,
            ranks=self._ranks if self._is_node_part else (),
        )
        self._attach().commit(manifest)
        return manifest

    def _attach(self) -> Draft:
        """Return the draft of this rank; open that of rank 0 at the first call."""
        if self._draft is None:
            assert self._address is not None
            self._draft = self._store.attach(self._address)
            if self._shared and not self._draft.is_shared:
                raise CheckpointError(
                    f"This node does not see {self._address.location}, which rank 0 created: a checkpoint needs a directory "
                    "that all nodes share. Use such a directory, or set shared_files: false in the profile or "
                    f"{variable_name('shared_files')}=0, and the first node writes everything."
                )
        return self._draft

    @contextmanager
    def _step(self) -> Iterator[CollectiveStep]:
        """Run a step on all ranks; if it fails on any, raise on all and remove what was written."""
        with self._abort_on_error(), errors_on_all_ranks(self._group.all_gather) as step:
            yield step

    @contextmanager
    def _abort_on_error(self) -> Iterator[None]:
        """Remove what was written if the block fails."""
        try:
            yield
        except BaseException:
            if self._draft is not None:
                self._draft.discard()
                self._draft.close()
            raise


def _begin_free_draft(target: SaveTarget, store: Store) -> Draft:
    """Return the draft of a save, under the first chosen key that no other process takes."""
    for attempt in range(_ATTEMPTS):
        try:
            return store.begin(target.choose(), target.save or uuid.uuid4().hex[:12], new=target.numbered)
        except KeyExistsError:
            if attempt == _ATTEMPTS - 1 or target.save:
                raise
            # Two processes that have both given way should not collide again.
            time.sleep(random.uniform(0, 0.01))  # noqa: S311 - no secret
    raise AssertionError


def _digest(values: Any) -> str:
    return hash_bytes(json.dumps(values).encode())


def _check_same_number(drafts: Sequence[DraftAddress | None]) -> None:
    """Raise `CheckpointError` if the drafts of several nodes do not have the same name."""
    names = {split_key(draft.key)[1]: rank for rank, draft in enumerate(drafts) if draft is not None}
    if len(names) > 1:
        listed = ", ".join(f"{name} on rank {rank}" for name, rank in names.items())
        raise CheckpointError(
            f"save_state() cannot number the checkpoint: the nodes have different numbers ({listed}). Assign "
            "ProjectConfiguration.iteration on every rank."
        )


def _shared_name(name: str) -> str:
    """Return the name of a tensor without its rank."""
    return name.partition("#")[0]


def _read_source(sources: Mapping[str, torch.Tensor], name: str) -> list[memoryview]:
    return [copy_to_host(sources[name])]


_LOG = logging.getLogger("accel_runtime.checkpoint")


def save_without_missing_ranks(
    absence: MissingRanks, strategy: Strategy, save: Callable[[], str], *, own_data: bool
) -> str:
    """Save the state of the ranks that call `save_state` if others do not; warn about what is missing."""
    backend = strategy.backend
    text = write_without_missing_ranks("save_state", absence, backend, save, sharded=strategy.shards_models)
    if absence.is_leader and absence.missing:
        offsets = (
            " Offsets of loaders with rank-specific data are missing too: these loaders start from the beginning."
            if own_data
            else ""
        )
        _LOG.warning(
            "save_state() at %s was called by rank %s and not by all %s processes (%s). The checkpoint holds what rank %s has. "
            "Missing are the random states of other processes, which are derived again when it is loaded, and their gradients "
            "if an accumulation cycle is open.%s Call save_state() on every process, outside of "
            "`if accelerator.is_main_process`, to save all.",
            absence.site,
            absence.rank,
            backend.topology.world_size,
            _list_missing(absence),
            absence.rank,
            offsets,
        )
    return text


def write_without_missing_ranks(
    operation: str, absence: MissingRanks, backend: Backend, write: Callable[[], str], *, sharded: bool
) -> str:
    """Let the first of the ranks that make a call write; return or raise its outcome on each of them."""
    if sharded:
        raise CheckpointError(
            f"{operation}() at {absence.site} cannot save sharded models: it was not called by all "
            f"{backend.topology.world_size} processes, and each has a shard of every model "
            f"({_list_missing(absence) or 'some are missing'}). Call {operation}() on every process, outside of "
            "`if accelerator.is_main_process`."
        )
    if not absence.is_leader:
        saved, text = json.loads(absence.monitor.read_outcome(absence))
        if not saved:
            raise CheckpointError(text)
        return str(text)
    saved, text = False, f"{operation}() was interrupted"
    try:
        text = write()
        saved = True
    except Exception as error:
        text = str(error)
        raise
    finally:
        absence.monitor.publish_outcome(absence, json.dumps([saved, text]))
    return text


def _list_missing(absence: MissingRanks) -> str:
    return "; ".join(f"rank {rank} {text}" for rank, text in absence.missing.items())
