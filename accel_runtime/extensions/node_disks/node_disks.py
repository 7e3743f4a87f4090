"""Checkpoints on the disks of the nodes: which ranks share a disk, and the parts that they write, find and keep.

Every node has an ordinary checkpoint directory with all that its ranks have, under the same number and the same name of the
save. It is complete if every node has it. docs/design/node-disks.md has the reasons.
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from accel_runtime.checkpoint.node_saves import Candidate, NodeSaves
from accel_runtime.checkpoint.save import SaveOperation, SaveTarget, WriteReport
from accel_runtime.collectives.handshake import ObjectGroup
from accel_runtime.environment.locations import normalize_location
from accel_runtime.environment.text import print_note
from accel_runtime.storage.errors import (
    AbsentError,
    AllGatherObjects,
    CheckpointError,
    errors_on_all_ranks,
    format_names,
)
from accel_runtime.storage.manifest import (
    Checkpoint,
    FileEntry,
    Manifest,
    TensorEntry,
    hash_bytes,
    parse_number,
)
from accel_runtime.storage.schema import read_value
from accel_runtime.storage.store import Store, list_numbered, next_number, numbered_key, split_key

__all__ = ["NodeDisks", "NodeSave", "locate_project"]

_LOG = logging.getLogger("accel_runtime.checkpoint")
_KEPT = 2
"""Number of checkpoints that stay on the nodes: a save that fails on some of them leaves the one before it on all."""
_MARKER = ".ranks-"
"""Start of the names of files by which ranks find those that share their disk."""
_MARKER_S = 3600
"""Age in seconds after which the marker of a crashed run is removed."""


def locate_project(node_dir: str | os.PathLike[str], project_dir: str | os.PathLike[str]) -> Path:
    """Return the directory of a project on the disk of a node, with its name and a digest of its location."""
    location = normalize_location(project_dir)
    name = location.rpartition("/")[2] or "project"
    return Path(node_dir).absolute() / f"{name}-{hash_bytes(os.fsencode(location))[:8]}"


@dataclass(frozen=True)
class Listing:
    """Checkpoints that a rank finds before a load; sent to all ranks."""

    parts: Mapping[int, str]
    """Names of the saves of complete parts on the disk of its node, by number."""
    damaged: Mapping[int, str]
    """Why other parts cannot be used, by number."""
    stored: Mapping[int, str]
    """Keys of the complete checkpoints in the store, by number, from the first rank."""
    damaged_in_store: Mapping[int, str]
    """Why others in the store cannot be used, by number, from the first rank."""


class NodeDisks(NodeSaves):
    """The checkpoints of a project on the disks of the nodes, on one rank.

    Args:
        store: The store of directories.
        node_dir: Directory on the disk of each node.
        project_dir: Directory of the project.
        store_every: A save of so many goes to the store.
        rank: This rank.
    """

    def __init__(
        self,
        store: Store,
        node_dir: str | os.PathLike[str],
        project_dir: str | os.PathLike[str],
        store_every: int,
        rank: int,
    ) -> None:
        self._store, self.directory = store, locate_project(node_dir, project_dir)
        self._parent, self._store_every, self._rank = os.fspath(self.directory), store_every, rank
        self._ranks: tuple[int, ...] = ()
        self._token = ""
        self._next = 0
        self._since_store = 0
        self._complete: list[int] = []
        """Numbers of the checkpoints that are known to be on all nodes, the newest last."""

    @property
    @override
    def operation(self) -> type[NodeSave]:
        return NodeSave

    @property
    @override
    def ranks(self) -> tuple[int, ...]:
        return self._ranks

    @property
    @override
    def takes_next(self) -> bool:
        """Return whether the next save belongs on the disks of the nodes, by the number of those since the last to the store."""
        return self._since_store + 1 < self._store_every

    @override
    def connect(self, all_gather: AllGatherObjects, count_stored: Callable[[], int]) -> int:
        """Find the ranks that see each other's files, whatever the launcher calls a node; see the base class."""
        if self._ranks:
            return self._next
        marker = self.directory / f"{_MARKER}{uuid.uuid4().hex}"
        try:
            with errors_on_all_ranks(all_gather) as step:
                self.directory.mkdir(parents=True, exist_ok=True)
                marker.touch()
                number = next_number(self._store, self._parent)
                step.share((marker.name, number if self._rank else max(number, count_stored())))
            names, numbers = zip(*step.values, strict=True)
            with errors_on_all_ranks(all_gather) as step:
                seen = {rank for rank, name in enumerate(names) if (self.directory / name).exists()}
                step.share(tuple(sorted(seen)))
        finally:
            with suppress(OSError):
                marker.unlink()
        nodes: Sequence[tuple[int, ...]] = step.values
        if uneven := [rank for rank, node in enumerate(nodes) if any(nodes[each] != node for each in node)]:
            raise CheckpointError(
                f"node_dir cannot be used: ranks {format_names([str(rank) for rank in uneven])} see different files in "
                f"{self.directory}. Use a directory on the disk of each node."
            )
        self._ranks, self._token = nodes[self._rank], names[0]
        self._next = max(self._next, *numbers)
        return self._next

    @override
    def choose_target(self, iteration: int, output_dir: str | None) -> SaveTarget:
        number = max(self._next, iteration)
        self._next = number + 1
        # Every node begins its part before the ranks exchange anything, so all derive the name of the save.
        save = hash_bytes(f"{self._token} {number}".encode())[:12]
        return SaveTarget(lambda: numbered_key(self._parent, number), output_dir, numbered=True, save=save)

    @override
    def record_save(self, key: str, *, on_nodes: bool) -> None:
        self._since_store = self._since_store + 1 if on_nodes else 0
        if on_nodes:
            self._complete.append(parse_number(split_key(key)[1]) or 0)
            if self._rank == self._ranks[0]:
                self._prune()

    def _prune(self) -> None:
        """Remove leftovers of crashes, and what is older than the newest checkpoints that all nodes have."""
        try:
            self._store.remove_leftovers(self._parent, self._next)
            kept = self._complete[-_KEPT:]
            if len(kept) < _KEPT:  # at the first save of a run, which has not loaded any
                complete = [each.number or 0 for each in list_numbered(self._store, self._parent)[0]]
                kept = [*[number for number in complete if number < kept[0]][-1:], *kept]
            for key in self._store.list(self._parent):
                number = parse_number(split_key(key)[1])
                if number is not None and number not in kept:
                    self._store.delete(key)
            for marker in self.directory.glob(f"{_MARKER}*"):
                if time.time() - marker.stat().st_mtime > _MARKER_S:
                    marker.unlink()
        except (OSError, CheckpointError) as error:
            _LOG.warning("old checkpoints in %s could not be removed: %s", self.directory, error)

    # Loading -----------------------------------------------------------------------------

    @override
    def find_candidates(
        self,
        all_gather: AllGatherObjects,
        list_stored: Callable[[], tuple[list[Checkpoint], dict[int, CheckpointError]]],
        accepts: Callable[[Checkpoint], bool],
    ) -> list[Candidate]:
        with errors_on_all_ranks(all_gather) as step:
            parts, errors = list_numbered(self._store, self._parent)
            stored, stored_errors = ([], {}) if self._rank else list_stored()
            step.share(
                Listing(
                    {each.number or 0: each.manifest.save for each in parts if accepts(each)},
                    _describe_errors(errors),
                    {each.number or 0: each.key for each in stored if accepts(each)},
                    _describe_errors(stored_errors),
                )
            )
        listings: Sequence[Listing] = step.values
        on_nodes = {
            number: save
            for number, save in listings[0].parts.items()
            if all(each.parts.get(number) == save for each in listings)
        }
        in_store = listings[0].stored
        self._complete = sorted(on_nodes)
        found = [
            Candidate(number, numbered_key(self._parent, number), on_nodes[number])
            if number in on_nodes
            else Candidate(number, in_store[number])
            for number in sorted({*on_nodes, *in_store}, reverse=True)
        ]
        if self._rank == 0:
            _report_incomplete(listings, found[0].number if found else -1)
        return found

    @override
    def record_load(self, loaded: Candidate, candidates: Sequence[Candidate]) -> None:
        self._complete = [number for number in self._complete if number <= loaded.number]
        stored = [each.number for each in candidates if not each.save and each.number <= loaded.number]
        self._since_store = loaded.number - max(stored, default=-1)


def _describe_errors(errors: Mapping[int, CheckpointError]) -> dict[int, str]:
    """Return the errors of damaged checkpoints; a first save that is not complete is not one."""
    return {number: str(error) for number, error in errors.items() if not isinstance(error, AbsentError)}


def _report_incomplete(listings: Sequence[Listing], newest: int) -> None:
    """Print which newer checkpoints are damaged, or on the disks of some nodes only."""
    for number, reason in listings[0].damaged_in_store.items():
        if number > newest:
            print_note(f"checkpoint_{number} in the project directory is not used: {reason}")
    numbers = {number for each in listings for number in (*each.parts, *each.damaged) if number > newest}
    for number in sorted(numbers, reverse=True):
        damaged = next((each.damaged[number] for each in listings if number in each.damaged), None)
        missing = [str(rank) for rank, each in enumerate(listings) if number not in each.parts]
        reason = damaged or (
            f"missing on the node of rank {format_names(missing)}" if missing else "of different saves"
        )
        print_note(f"checkpoint_{number} on the disks of the nodes is not used: {reason}")


# Saving ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankReport:
    """Entries of the files of a rank in its node's part; passed on in a file, since other nodes do not need them."""

    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)


class NodeSave(SaveOperation):
    """A save whose parts the ranks of each node write to its disk.

    It has the exchanges of a save to the store, and sends less: entries of files stay on their node.
    """

    _max_small = -1  # a rank writes all tensors of its own

    @override
    def finish(self, group: ObjectGroup) -> Manifest | None:
        """Write all files and commit the part of this node; return its manifest on the first rank of the node.

        If a node fails before the commits, no node commits; if it fails in its commit, all nodes remove what they have committed.
        """
        self._group, manifest = group, None
        with self._step() as step:
            written = self._write()
            self._report_path(group.rank).write_text(
                json.dumps(asdict(RankReport(written.tensors, written.files, written.values)))
            )
            step.share(self._list_hook_files())
        with self._abort_on_error():
            _check_same_hook_files(step.values)
        try:
            with self._step():
                if group.rank == self._first:
                    manifest = self._commit({rank: self._take_report(rank) for rank in self._ranks})
        except CheckpointError:
            # Another node does not have its part. If a rank was lost instead, a load finds out which nodes have theirs.
            if manifest is not None:
                with suppress(OSError):
                    self._store.delete(self._attach().address.key)
            raise
        self._attach().close()
        return manifest

    @override
    def _names_not_of_hooks(self) -> frozenset[str]:
        return super()._names_not_of_hooks() | {self._report_path(rank).name for rank in self._ranks}

    def _report_path(self, rank: int) -> Path:
        return self._attach().directory() / f".rank-{rank}.json"

    def _take_report(self, rank: int) -> WriteReport:
        """Return what a rank of this node has written, and remove the file."""
        path = self._report_path(rank)
        report: RankReport = read_value(RankReport, json.loads(path.read_text()))
        path.unlink()
        return WriteReport(report.tensors, report.files, report.values, {})

    def _list_hook_files(self) -> tuple[str, ...] | None:
        """Return the files of hooks in the part of this node, on its first rank."""
        is_first = self._has_hooks and self._group.rank == self._first
        return tuple(sorted(self._files.keys() - self.plan.file_names)) if is_first else None


def _check_same_hook_files(names: Sequence[tuple[str, ...] | None]) -> None:
    """Raise `CheckpointError` if hooks have written files into the parts of some nodes only: load hooks of others need them."""
    lists = {rank: files for rank, files in enumerate(names) if files is not None}
    for rank, files in lists.items():
        for other, present in lists.items():
            if lost := sorted(set(files) - set(present)):
                raise CheckpointError(
                    f"Cannot save on the disks of the nodes: a save hook wrote {format_names(lost)} on the node of rank {rank}, "
                    f"and not on that of rank {other}. Write it on one rank of each node (if "
                    "accelerator.is_local_main_process), or leave out node_dir."
                )
