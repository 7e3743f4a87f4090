"""Save a checkpoint: all ranks agree on every step, DCP plans the writes, and one rename publishes the directory."""

from __future__ import annotations

import json
import logging
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

import accel_runtime
from accel_runtime.backends.base import Backend
from accel_runtime.checkpoint.directory import (
    TargetExistsError,
    commit_directory,
    create_scratch,
    discard_scratch,
)
from accel_runtime.checkpoint.errors import (
    AllGatherObjects,
    CheckpointError,
    CollectiveStep,
    check_same_directory,
    errors_on_all_ranks,
)
from accel_runtime.checkpoint.filesystem import FileSystem, add_path_to_error, format_size, write_text
from accel_runtime.checkpoint.manager import StagingBuffers
from accel_runtime.checkpoint.manifest import (
    NAME,
    UNFINISHED,
    FileEntry,
    Manifest,
    hash_bytes,
    hash_file,
    rank_tensor_name,
)
from accel_runtime.checkpoint.serialization import hash_tensor, serialize
from accel_runtime.checkpoint.state_items import StateItem, is_sharded
from accel_runtime.checkpoint.storage import ShardSavePlanner, ShardWriter, tensor_entries
from accel_runtime.collectives.stalls import MissingRanks
from accel_runtime.env import variable_name

__all__ = [
    "SaveOperation",
    "save_without_missing_ranks",
    "write_without_missing_ranks",
]

_ATTEMPTS = 100
"""Number of names that a save tries."""
_SMALL = 1 << 16
"""Largest rank-specific tensor, in bytes, that rank 0 writes for its rank: fewer files for little data."""


@dataclass(frozen=True)
class SaveTarget:
    """Paths of a checkpoint that is being saved, equal on all ranks."""

    target: Path
    """Final directory."""
    scratch: Path
    """Directory that is written and then renamed."""
    save: str
    """Unique name of the save."""


class SaveOperation:
    """One collective save; every rank calls the methods in the order of their definition.

    Without `shared`, ranks of nodes that do not see the directory write nothing: replicated values are written by
    the other ranks, rank-specific values are sent to rank 0.
    """

    def __init__(  # noqa: PLR0913 - the last two have defaults
        self,
        share: AllGatherObjects,
        rank: int,
        world_size: int,
        disk: FileSystem,
        *,
        run: Mapping[str, str] | None = None,
        shared: bool = True,
    ) -> None:
        self._run, self._shared = dict(run or {}), shared
        self._share, self._rank, self._world_size, self._disk = share, rank, world_size, disk
        self._planner = ShardSavePlanner()
        self._lock: int | None = None
        self._directory_seen_by_all, self._sees_directory = True, True

    def begin(
        self, choose: Callable[[], Path], directory: str | None = None, *, numbered: bool = False
    ) -> SaveTarget:
        """Create the scratch directory of the name that rank 0 chooses; if `numbered`, try further names."""
        with self._step() as step:
            if self._rank == 0:
                self._paths, self._lock = _create_free_scratch(choose, self._disk, numbered=numbered)
            step.value = directory, self._paths if self._rank == 0 else None
        paths: SaveTarget = step.values[0][1]
        self._paths = paths
        directories = [each for each, _ in step.values]
        with self._step() as step:
            check_same_directory("save_state", directories)
            step.value = self._sees_directory = self._disk.sees(paths.scratch)
            if self._shared and not self._sees_directory:
                raise CheckpointError(
                    f"This node does not see {paths.scratch}, which rank 0 created: a checkpoint needs a directory that "
                    "all nodes share. Use such a directory, or set shared_files: false in the profile or "
                    f"{variable_name('shared_files')}=0, and the first node writes everything."
                )
        self._directory_seen_by_all = all(step.values)
        return paths

    def run_hooks(self, call: Callable[[], None]) -> None:
        """Call the save hooks of the script; files that they write become part of the checkpoint."""
        scratch = self._paths.scratch
        with self._step():
            if not self._sees_directory:
                self._disk.make(scratch)  # for hooks that look into it
            call()
        if self._directory_seen_by_all:
            return
        with self._step():
            made = not self._sees_directory and self._disk.sees(scratch)
            if made and (lost := next(scratch.iterdir(), None)):
                raise CheckpointError(
                    f"A save hook wrote {lost.name} on a node that does not see the checkpoint: only files of the first "
                    "node are kept. Write them there (if accelerator.is_main_process)."
                )

    @property
    def progress(self) -> str:
        """Bytes that this rank has written, and those it has to write."""
        return f"{format_size(self._writer.written)} of {format_size(self._writer.planned)}"

    def take(
        self, items: Sequence[StateItem], step: int, hosted: Callable[[Any], Any] = lambda state: state
    ) -> None:
        """Collect the state of all items, made ready for files by `hosted`, and plan which rank writes what."""
        try:
            self._state = _collect_state(
                items, self._share, self._rank, self._world_size, hosted, send_all=not self._sees_directory
            )
        except BaseException:
            self._abort()
            raise
        self._classes = {item.name: item.class_name for item in items if item.class_name}
        self._steps = step
        self._writer = ShardWriter(self._paths.scratch, self._paths.save, self._disk)
        self._plan()

    def stage(self, staging: StagingBuffers) -> None:
        """Copy what this rank writes, so that training can continue during the write."""
        with self._step():
            live = {item.index: self._planner.resolve_data(item) for item in self._local_plan.items}
            self._planner.staged = staging.copy_tensors(live)

    def finish(self, share: AllGatherObjects) -> Manifest | None:
        """Write all files and publish the checkpoint; return the manifest on rank 0.

        `share` is used from here on: a save in the background has a process group of its own. If the save fails, an
        earlier checkpoint of the same name is unchanged and nothing of this one remains.
        """
        self._share = share
        with self._step() as step:
            results = self._writer.write_data(self._local_plan, self._planner).value()
            self._planner.staged = {}
            step.value = results, self._writer.files
        written, manifest = step.values, None
        with self._step():
            if self._rank == 0:
                manifest = self._commit(written)
        if not self._sees_directory:
            discard_scratch(self._paths.scratch, self._disk)
        self._unlock()
        return manifest

    def _plan(self) -> None:
        planner, writer = self._planner, self._writer
        with self._step() as step:
            planner.set_up_planner(self._tensors_to_write(), is_coordinator=self._rank == 0)
            step.value = planner.create_local_plan()
        plans: list[SavePlan] = list(step.values)
        with self._step():
            plans, self._metadata = planner.create_global_plan(plans)
            self._local_plan = planner.finish_plan(writer.prepare_global_plan(plans)[self._rank])
            if self._rank == 0:
                self._check_free_space()

    def _tensors_to_write(self) -> dict[str, torch.Tensor]:
        tensors = self._state.tensors
        if self._sees_directory:
            return tensors
        if sharded := next((name for name, tensor in tensors.items() if is_sharded(tensor)), None):
            raise CheckpointError(
                f"Cannot save {sharded}: it is sharded, and this node does not see the checkpoint's directory. With "
                "shared_files off only replicated models can be saved; use a directory that all nodes share."
            )
        return {}

    def _check_free_space(self) -> None:
        tensors = [
            entry
            for entry in self._metadata.state_dict_metadata.values()
            if isinstance(entry, TensorStorageMetadata)
        ]
        needed = sum(tensor.size.numel() * tensor.properties.dtype.itemsize for tensor in tensors)
        free = self._disk.free_space(self._paths.scratch)
        if needed > free:
            raise CheckpointError(
                f"Not enough space in {self._paths.target.parent}: the checkpoint needs {format_size(needed)}, and "
                f"{format_size(free)} are free."
            )

    def _commit(self, written: Sequence[tuple[list[Any], dict[str, FileEntry]]]) -> Manifest:
        paths, metadata = self._paths, self._metadata
        self._writer.finish(metadata, [results for results, _ in written])
        files = {name: file for _, rank_files in written for name, file in rank_files.items()}
        manifest = Manifest(
            save=paths.save,
            saved_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            world_size=self._world_size,
            step=self._steps,
            versions={"accel": accel_runtime.__version__, "torch": str(torch.__version__)},
            values=self._state.values,
            own=self._state.own,
            tensors=tensor_entries(metadata),
            files=files | _sync_hook_files(paths.scratch, files, self._disk),
            about=self._classes,
            run=self._run,
        )
        write_text(paths.scratch / NAME, manifest.text(), self._disk)
        commit_directory(paths.scratch, paths.target, self._disk)
        return manifest

    @contextmanager
    def _step(self) -> Iterator[CollectiveStep]:
        """Run a step on all ranks; if it fails on any, raise on all and remove what was written."""
        try:
            with errors_on_all_ranks(self._share) as step:
                yield step
        except BaseException:
            self._abort()
            raise

    def _abort(self) -> None:
        if hasattr(self, "_paths") and (self._rank == 0 or not self._sees_directory):
            discard_scratch(self._paths.scratch, self._disk)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            # The operating system drops the lock in any case: a complete save must not fail by it.
            with suppress(OSError):
                self._disk.unlock(self._lock)
            self._lock = None


def _create_free_scratch(
    choose: Callable[[], Path], disk: FileSystem, *, numbered: bool
) -> tuple[SaveTarget, int | None]:
    """Return the paths and the lock of a save, under the first chosen name that no other process takes."""
    for attempt in range(_ATTEMPTS):
        target, save = choose().absolute(), uuid.uuid4().hex[:12]
        if target.is_symlink() or ".." in target.parts:
            # Replace the directory that a link leads to, not the link.
            target = target.resolve()
        try:
            scratch, lock = create_scratch(target, save, disk, new=numbered)
        except TargetExistsError:
            if attempt == _ATTEMPTS - 1:
                raise
            # Two processes that have both given way should not collide again.
            time.sleep(random.uniform(0, 0.01))  # noqa: S311 - no secret
        else:
            return SaveTarget(target, scratch, save), lock
    raise AssertionError


def _sync_hook_files(scratch: Path, known: dict[str, FileEntry], disk: FileSystem) -> dict[str, FileEntry]:
    """Sync and hash the files that hooks of the script have written."""
    entries = {}
    for path in sorted(scratch.rglob("*")):
        name = path.relative_to(scratch).as_posix()
        if path.is_symlink():
            raise CheckpointError(
                f"Cannot save {path}: it is a link that a hook has made, and a checkpoint contains its files. Copy the "
                "file instead."
            )
        if path.is_file() and name not in known and name not in {NAME, UNFINISHED}:
            with path.open("rb") as file, add_path_to_error(path):
                checksum = hash_file(file)
                disk.sync(file.fileno())
                entries[name] = FileEntry(file.tell(), checksum)
    return entries


@dataclass
class RankState:
    """State of a run, as far as one rank writes it."""

    values: dict[str, Any] = field(default_factory=dict)
    """JSON of the items that are equal on all ranks."""
    own: dict[str, list[Any]] = field(default_factory=dict)
    """JSON of the other items, one for each rank."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that this rank may write; DCP chooses the rank if several may."""


def _collect_state(  # noqa: PLR0913 - one call
    items: Sequence[StateItem],
    share: AllGatherObjects,
    rank: int,
    world_size: int,
    hosted: Callable[[Any], Any],
    *,
    send_all: bool,
) -> RankState:
    """Serialize all items; what differs between ranks is kept for each, written by rank 0 if small or `send_all`."""
    texts: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    with errors_on_all_ranks(share) as step:
        for item in items:
            texts[item.name], item_tensors = serialize(hosted(item.tree()), item.name)
            tensors.update(item_tensors)
        step.value = _fingerprint(texts, tensors) if world_size > 1 else ({}, {})
    if world_size == 1:
        return RankState(texts, {}, tensors)
    _check_same_items([hashes for hashes, _ in step.values])
    differing_items = _find_differing([hashes for hashes, _ in step.values])
    differing_tensors = _find_differing([hashes for _, hashes in step.values])
    state = RankState({name: text for name, text in texts.items() if name not in differing_items})
    specific = {name: tensor for name, tensor in tensors.items() if name in differing_tensors}
    large = {name: tensor for name, tensor in specific.items() if tensor.nbytes > _SMALL and not send_all}
    if differing_items or differing_tensors:
        small = {name: tensor.cpu() for name, tensor in specific.items() if name not in large}
        gathered = share(({name: texts[name] for name in differing_items}, small))
        state.own = {name: [sent[name] for sent, _ in gathered] for name in sorted(differing_items)}
        for number, (_, sent) in enumerate(gathered if rank == 0 else ()):
            state.tensors |= {rank_tensor_name(name, number): tensor for name, tensor in sent.items()}
    state.tensors |= {name: tensor for name, tensor in tensors.items() if name not in differing_tensors}
    state.tensors |= {rank_tensor_name(name, rank): tensor for name, tensor in large.items()}
    return state


def _fingerprint(
    texts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, str], dict[str, int | None]]:
    """Return the hashes of JSON and tensors by name; None for a sharded tensor."""
    return {name: hash_bytes(json.dumps(text).encode()) for name, text in texts.items()}, {
        name: None if is_sharded(tensor) else hash_tensor(tensor) for name, tensor in tensors.items()
    }


def _check_same_items(hashes: Sequence[Mapping[str, str]]) -> None:
    common = set.intersection(*map(set, hashes))
    partial = {name: rank for rank, names in enumerate(hashes) for name in names if name not in common}
    if partial:
        listed = ", ".join(f"{name} on rank {rank}" for name, rank in partial.items())
        raise CheckpointError(
            f"Not all ranks have the same state to save: {listed}. Prepare and register the same objects on every rank."
        )


def _find_differing(hashes: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names whose hash is missing on a rank or differs between ranks."""
    names = set().union(*hashes)
    return {
        name for name in names if any(name not in own or own[name] != hashes[0].get(name) for own in hashes)
    }


_LOG = logging.getLogger("accel_runtime.checkpoint")


def save_without_missing_ranks(
    absence: MissingRanks, backend: Backend, save: Callable[[], str], *, own_data: bool
) -> str:
    """Save the state of the ranks that call `save_state` if others do not; warn about what is missing."""
    text = write_without_missing_ranks("save_state", absence, backend, save, sharded=backend.shards_models)
    if absence.is_leader and absence.missing:
        _LOG.warning(_describe_missing(absence, backend.topology.world_size, own_data=own_data))
    return text


def write_without_missing_ranks(
    operation: str, absence: MissingRanks, backend: Backend, write: Callable[[], str], *, sharded: bool
) -> str:
    """Let the first of the ranks that make a call write; return or raise its outcome on each of them."""
    if sharded:
        raise CheckpointError(_describe_refusal(operation, absence, backend.topology.world_size))
    if not absence.is_leader:
        saved, text = json.loads(backend.read_outcome(absence))
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
        backend.publish_outcome(absence, json.dumps([saved, text]))
    return text


def _describe_missing(absence: MissingRanks, world_size: int, *, own_data: bool) -> str:
    offsets = (
        " Offsets of loaders with rank-specific data are missing too: these loaders start from the beginning."
        if own_data
        else ""
    )
    return (
        f"save_state() at {absence.site} was called by rank {absence.rank} and not by all {world_size} processes "
        f"({_list_missing(absence)}). The checkpoint holds what rank {absence.rank} has. Missing are the random states of "
        f"other processes, which are derived again when it is loaded, and their gradients if an accumulation cycle is "
        f"open.{offsets} Call save_state() on every process, outside of `if accelerator.is_main_process`, to save all."
    )


def _describe_refusal(operation: str, absence: MissingRanks, world_size: int) -> str:
    return (
        f"{operation}() at {absence.site} cannot save sharded models: it was not called by all {world_size} processes, and "
        f"each has a shard of every model ({_list_missing(absence) or 'some are missing'}). Call {operation}() on every "
        "process, outside of `if accelerator.is_main_process`."
    )


def _list_missing(absence: MissingRanks) -> str:
    return "; ".join(f"rank {rank} {text}" for rank, text in absence.missing.items())
