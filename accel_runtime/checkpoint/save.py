"""Save a checkpoint: all ranks agree on every step, DCP plans the writes, and rank 0 commits the draft."""

from __future__ import annotations

import json
import logging
import math
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.checkpoint.manager import StagingBuffers
from accel_runtime.checkpoint.serialization import serialize
from accel_runtime.checkpoint.state_items import StateItem, is_sharded
from accel_runtime.collectives.stalls import MissingRanks
from accel_runtime.environment.settings import __version__, format_size, variable_name
from accel_runtime.foundation.tensor_bytes import copy_to_host, hash_tensor
from accel_runtime.parallel.strategy import Strategy
from accel_runtime.storage.errors import (
    AllGatherObjects,
    CheckpointError,
    CollectiveStep,
    check_same_directory,
    errors_on_all_ranks,
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
from accel_runtime.storage.tensor_file import TensorPart, shard_file_name, write_safetensors

__all__ = [
    "SaveOperation",
    "save_without_missing_ranks",
    "write_without_missing_ranks",
]

_LOG = logging.getLogger("accel_runtime.checkpoint")
_ATTEMPTS = 100
"""Number of names that a save tries."""
_SMALL = 1 << 16
"""Largest rank-specific tensor, in bytes, that rank 0 writes for its rank: fewer files for little data."""
_FILE_BYTES = 1 << 28
"""Smallest file that is worth splitting, so that threads share the work and files stay few."""
_FILES = 16
"""Approximate largest number of files for each rank."""


@dataclass
class RankState:
    """State of a run, as far as one rank writes it."""

    values: dict[str, Any] = field(default_factory=dict)
    """JSON of the items that are equal on all ranks."""
    values_by_rank: dict[str, list[Any]] = field(default_factory=dict)
    """JSON of the other items, one for each rank."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that this rank may write; DCP chooses the rank if several may."""


class SaveOperation:
    """One collective save; every rank calls the methods in the order of their definition.

    Without `shared`, ranks of nodes that do not see the draft write nothing: replicated values are written by
    the other ranks, rank-specific values are sent to rank 0.
    """

    def __init__(  # noqa: PLR0913 - the last two have defaults
        self,
        all_gather: AllGatherObjects,
        rank: int,
        world_size: int,
        store: Store,
        *,
        run: Mapping[str, str] | None = None,
        shared: bool = True,
    ) -> None:
        self._run, self._shared = dict(run or {}), shared
        self._all_gather, self._rank, self._world_size, self._store = all_gather, rank, world_size, store
        self._planner = ShardSavePlanner()
        self._files: dict[str, FileEntry] = {}
        self._planned = 0
        self._draft: Draft | None = None
        self._is_shared_by_all = True

    def begin(
        self, choose: Callable[[], str], directory: str | None = None, *, numbered: bool = False
    ) -> DraftAddress:
        """Begin a draft under the key that rank 0 chooses; if `numbered`, try further keys."""
        with self._step() as step:
            if self._rank == 0:
                self._draft = _begin_free_draft(choose, self._store, numbered=numbered)
            step.share((directory, self._draft.address if self._draft is not None else None))
        address: DraftAddress = step.values[0][1]
        directories = [each for each, _ in step.values]
        with self._step() as step:
            check_same_directory("save_state", directories)
            if self._rank != 0:
                self._draft = self._store.join(address)
            step.share(self._opened.is_shared)
            if self._shared and not self._opened.is_shared:
                raise CheckpointError(
                    f"This node does not see {address.location}, which rank 0 created: a checkpoint needs a directory that "
                    "all nodes share. Use such a directory, or set shared_files: false in the profile or "
                    f"{variable_name('shared_files')}=0, and the first node writes everything."
                )
        self._is_shared_by_all = all(step.values)
        return address

    @property
    def _opened(self) -> Draft:
        """Return the draft of this rank, after `begin`."""
        assert self._draft is not None
        return self._draft

    def run_hooks(self, call: Callable[[Path], None]) -> None:
        """Call the save hooks of the script with a directory; files that they write become part of the checkpoint."""
        with self._step():
            call(self._opened.directory())
        if self._is_shared_by_all:
            return
        with self._step():
            if not self._opened.is_shared:
                self._opened.put_hook_files(())  # raises if there are any

    @property
    def progress(self) -> str:
        """Bytes that this rank has written, and those it has to write."""
        written = sum(file.bytes for file in list(self._files.values()))
        return f"{format_size(written)} of {format_size(self._planned)}"

    def collect(
        self, items: Sequence[StateItem], step: int, to_host: Callable[[Any], Any] = lambda state: state
    ) -> None:
        """Collect the state of all items, made ready for files by `to_host`, and plan which rank writes what."""
        try:
            self._state = self._collect_state(items, to_host)
        except BaseException:
            self._abort()
            raise
        self._class_names = {item.name: item.class_name for item in items if item.class_name}
        self._num_steps = step
        with self._step() as plan_step:
            tensors = self._state.tensors
            sharded = next((name for name, tensor in tensors.items() if is_sharded(tensor)), None)
            if sharded and not self._opened.is_shared:
                raise CheckpointError(
                    f"Cannot save {sharded}: it is sharded, and this node does not see the checkpoint's directory. With "
                    "shared_files off only replicated models can be saved; use a directory that all nodes share."
                )
            self._planner.set_up_planner(
                tensors if self._opened.is_shared else {}, is_coordinator=self._rank == 0
            )
            plan_step.share(self._planner.create_local_plan())
        with self._step():
            plans, self._metadata = self._planner.create_global_plan(list(plan_step.values))
            named_plans = _name_files(plans)
            self._file_names = {name for plan in named_plans for name in plan.storage_data}
            self._local_plan = self._planner.finish_plan(named_plans[self._rank])
            self._planned = sum(item.tensor_storage_size() or 0 for item in self._local_plan.items)
            if self._rank == 0:
                self._check_free_space()

    def _collect_state(self, items: Sequence[StateItem], to_host: Callable[[Any], Any]) -> RankState:
        """Serialize all items, and separate what differs between ranks."""
        state = RankState()
        with errors_on_all_ranks(self._all_gather) as step:
            for item in items:
                state.values[item.name], tensors = serialize(to_host(item.tree()), item.name)
                state.tensors |= tensors
            if self._world_size > 1:
                of_items = {n: hash_bytes(json.dumps(value).encode()) for n, value in state.values.items()}
                # A sharded tensor has no hash: every rank writes its shard.
                of_tensors = {n: None if is_sharded(t) else hash_tensor(t) for n, t in state.tensors.items()}
                step.share((of_items, of_tensors))
        if self._world_size == 1:
            return state
        item_hashes, tensor_hashes = zip(*step.values, strict=True)
        common = set.intersection(*map(set, item_hashes))
        if partial := [
            f"{name} on rank {rank}"
            for rank, names in enumerate(item_hashes)
            for name in names
            if name not in common
        ]:
            raise CheckpointError(
                f"Not all ranks have the same state to save: {', '.join(partial)}. Prepare and register the same objects on "
                "every rank."
            )
        return self._separate_ranks(state, _find_differing(item_hashes), _find_differing(tensor_hashes))

    def _separate_ranks(self, state: RankState, items: set[str], tensors: set[str]) -> RankState:
        """Return the state with the items and tensors that differ between ranks once for each rank.

        Rank 0 writes tensors of other ranks that are small, or that a rank cannot write itself.
        """
        result = RankState({name: value for name, value in state.values.items() if name not in items})
        sent = {}
        for name, tensor in state.tensors.items():
            if name not in tensors:
                result.tensors[name] = tensor
            elif tensor.nbytes > _SMALL and self._opened.is_shared:
                result.tensors[rank_tensor_name(name, self._rank)] = tensor
            else:
                sent[name] = tensor.cpu()
        if items or tensors:
            gathered = self._all_gather(({name: state.values[name] for name in items}, sent))
            result.values_by_rank = {name: [values[name] for values, _ in gathered] for name in sorted(items)}
            for number, (_, received) in enumerate(gathered if self._rank == 0 else ()):
                result.tensors |= {
                    rank_tensor_name(name, number): tensor for name, tensor in received.items()
                }
        return result

    def stage(self, staging: StagingBuffers) -> None:
        """Copy what this rank writes, so that training can continue during the write."""
        with self._step():
            live = {item.index: self._planner.resolve_data(item) for item in self._local_plan.items}
            self._planner.staged = staging.copy_tensors(live)

    def finish(self, all_gather: AllGatherObjects) -> Manifest | None:
        """Put all files and commit the checkpoint; return the manifest on rank 0.

        `all_gather` is used from here on: a save in the background has a process group of its own. If the save fails, an
        earlier checkpoint of the same name is unchanged and nothing of this one remains.
        """
        self._all_gather = all_gather
        with self._step() as step:
            files: Mapping[str, list[int]] = self._local_plan.storage_data
            chunks = parallel_map(lambda file: self._put_file(*file), files.items())
            self._planner.staged = {}
            if self._opened.is_shared:
                self._files |= self._opened.put_hook_files(self._file_names)
            step.share(([chunk for written in chunks for chunk in written], self._files))
        written, manifest = step.values, None
        with self._step():
            if self._rank == 0:
                manifest = self._commit(written)
        self._opened.close()
        return manifest

    def _put_file(self, name: str, indices: Sequence[int]) -> list[tuple[str, Chunk]]:
        """Put one file of this rank; return its chunks by the names of their tensors."""
        items = [self._local_plan.items[index] for index in indices]
        parts = [_build_part(item, self._planner) for item in items]
        metadata = {"format": "pt", "save": self._opened.address.save}
        written = write_safetensors(partial(self._opened.put, name), parts, metadata)
        self._files[name] = written.file
        return [
            (
                item.index.fqn,
                Chunk(name, start, part.bytes, checksum, part.offsets or (0,) * len(part.shape), part.shape),
            )
            for item, part, (start, checksum) in zip(items, parts, written.locations, strict=True)
        ]

    def _check_free_space(self) -> None:
        tensors = [
            entry
            for entry in self._metadata.state_dict_metadata.values()
            if isinstance(entry, TensorStorageMetadata)
        ]
        needed = sum(tensor.size.numel() * tensor.properties.dtype.itemsize for tensor in tensors)
        free = self._opened.free_space()
        if needed > free:
            raise CheckpointError(
                f"Not enough space in {split_key(self._opened.address.key)[0]}: the checkpoint needs {format_size(needed)}, and "
                f"{format_size(free)} are free. Free space, or choose another directory."
            )

    def _commit(
        self, written: Sequence[tuple[Sequence[tuple[str, Chunk]], Mapping[str, FileEntry]]]
    ) -> Manifest:
        draft = self._opened
        manifest = Manifest(
            save=draft.address.save,
            saved_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            world_size=self._world_size,
            step=self._num_steps,
            versions={"accel": __version__, "torch": str(torch.__version__)},
            values=self._state.values,
            values_by_rank=self._state.values_by_rank,
            tensors=_build_entries(self._metadata, [chunk for chunks, _ in written for chunk in chunks]),
            files={name: file for _, rank_files in written for name, file in rank_files.items()},
            class_names=self._class_names,
            run=self._run,
        )
        draft.commit(manifest)
        return manifest

    @contextmanager
    def _step(self) -> Iterator[CollectiveStep]:
        """Run a step on all ranks; if it fails on any, raise on all and remove what was written."""
        try:
            with errors_on_all_ranks(self._all_gather) as step:
                yield step
        except BaseException:
            self._abort()
            raise

    def _abort(self) -> None:
        if self._draft is not None:
            self._draft.discard()
            self._draft.close()


def _begin_free_draft(choose: Callable[[], str], store: Store, *, numbered: bool) -> Draft:
    """Return the draft of a save, under the first chosen key that no other process takes."""
    for attempt in range(_ATTEMPTS):
        try:
            return store.begin(choose(), uuid.uuid4().hex[:12], new=numbered)
        except KeyExistsError:
            if attempt == _ATTEMPTS - 1:
                raise
            # Two processes that have both given way should not collide again.
            time.sleep(random.uniform(0, 0.01))  # noqa: S311 - no secret
    raise AssertionError


def _find_differing(hashes: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names whose hash is missing on a rank or differs between ranks."""
    names = set().union(*hashes)
    return {
        name for name in names if any(name not in own or own[name] != hashes[0].get(name) for own in hashes)
    }


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


def _name_files(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Add the files of each rank to its plan: `model.safetensors`, or `model-00001-of-00003.safetensors` and so on."""
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


def _split_into_files(items: Sequence[WriteItem]) -> list[tuple[str, list[int]]]:
    """Distribute the parts of a rank over files; return item name and part indices of each file."""
    sizes = [item.tensor_storage_size() or 0 for item in items]
    limit = max(_FILE_BYTES, sum(sizes) // _FILES)
    files: list[tuple[str, list[int]]] = []
    open_files: dict[str, tuple[list[int], set[str]]] = {}
    filled: Counter[str] = Counter()
    for index, (item, size) in enumerate(zip(items, sizes, strict=True)):
        kind, name = item_of_tensor(item.index.fqn), item.index.fqn
        indices, names = open_files.get(kind, ([], set()))
        # The name in the file is that of the tensor, so a file has at most one part of a tensor.
        if not indices or filled[kind] + size > limit or name in names:
            indices, names = open_files[kind] = [], set()
            filled[kind] = 0
            files.append((kind, indices))
        indices.append(index)
        names.add(name)
        filled[kind] += size
    return files


def _build_part(item: WriteItem, planner: ShardSavePlanner) -> TensorPart:
    data = item.tensor_data
    assert data is not None
    sizes, dtype = tuple(data.chunk.sizes), data.properties.dtype
    return TensorPart(
        item.index.fqn.split("/", 1)[1],
        str(dtype).removeprefix("torch."),
        sizes,
        math.prod(sizes) * dtype.itemsize,
        lambda: [copy_to_host(planner.resolve_data(item))],
        None if sizes == tuple(data.size) else tuple(data.chunk.offsets),
    )


def _build_entries(metadata: Metadata, chunks: Sequence[tuple[str, Chunk]]) -> dict[str, TensorEntry]:
    """Return the tensors of the manifest."""
    by_name: dict[str, list[Chunk]] = {}
    for name, chunk in sorted(chunks, key=lambda named: named[1].offsets):
        by_name.setdefault(name, []).append(chunk)
    entries = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        entries[name] = TensorEntry(dtype, tuple(tensor.size), tuple(by_name[name]))
    return entries


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
