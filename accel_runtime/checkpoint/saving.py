"""Writing a checkpoint: agreed on by all ranks, planned by DCP, whole before it has its name."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

import accel_runtime
from accel_runtime.checkpoint import placing
from accel_runtime.checkpoint.agreed import State, agreed
from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.files import Disk, about, write_text
from accel_runtime.checkpoint.items import Item
from accel_runtime.checkpoint.live import is_sharded
from accel_runtime.checkpoint.manifest import NAME, UNFINISHED, File, Manifest
from accel_runtime.checkpoint.sizes import shown
from accel_runtime.checkpoint.staging import Staging
from accel_runtime.checkpoint.together import Share, same, together
from accel_runtime.checkpoint.writer import Planner, Writer, stored
from accel_runtime.env import variable

__all__ = ["Place", "Saving"]

_T = TypeVar("_T")
_ATTEMPTS = 100
"""Names that are tried before a save gives up."""


@dataclass(frozen=True)
class Place:
    """Where a checkpoint goes, as all ranks know it."""

    target: Path
    """Its name."""
    scratch: Path
    """Where it is written."""
    save: str
    """A name that no other save has."""


class Saving:
    """One save.

    Args:
        share: Exchanges objects between the ranks.
        rank: This rank.
        world_size: How many there are.
        disk: Does it.
        run: What the run is called.
        shared: Whether all ranks see the same files. Where they do not, those that see what the first one sees write
            everything: what is equal on all ranks is there, and what the others have for themselves is sent.
    """

    def __init__(  # noqa: PLR0913 - the last two have defaults
        self,
        share: Share,
        rank: int,
        world_size: int,
        disk: Disk,
        *,
        run: Mapping[str, str] | None = None,
        shared: bool = True,
    ) -> None:
        self._run, self._shared = dict(run or {}), shared
        self._share, self._rank, self._world_size, self._disk = share, rank, world_size, disk
        self._planner = Planner()
        self._lock: int | None = None
        self._apart, self._sees = False, True

    def begin(self, choose: Callable[[], Path], given: str | None = None, *, numbered: bool = False) -> Place:
        """Make the directory to write into.

        Args:
            choose: Gives the checkpoint's name; asked on the first rank.
            given: What the script said; the same on all ranks.
            numbered: Whether `choose` gives another name where the first is taken.

        Raises:
            CheckpointError: It cannot be made, or a rank does not see it.
        """

        def make() -> Place | None:
            if self._rank:
                return None
            self._place, self._lock = _begun(choose, self._disk, numbered=numbered)
            return self._place

        told = self._all(lambda: (given, make()))
        place, said = told[0][1], [one for one, _ in told]
        assert place is not None
        self._place = place

        def see() -> bool:
            same("save_state", said)
            sees = self._disk.sees(place.scratch)
            if self._shared and not sees:
                raise CheckpointError(
                    f"{place.scratch} was made by rank 0 and is not there on this machine: a checkpoint goes into a "
                    "directory that all machines share; where they share none, shared_files: false in the profile, or "
                    f"{variable('shared_files')}=0, has the first machine write all of it"
                )
            return sees

        seen = self._all(see)
        self._apart, self._sees = not all(seen), seen[self._rank]
        return place

    def run_hooks(self, call: Callable[[], None]) -> None:
        """Call what the script wants to do in the directory first.

        Raises:
            CheckpointError: It failed on some rank.
        """
        self._all(call if self._sees else lambda: self._call_elsewhere(call))
        if self._apart:
            self._all(lambda: None if self._sees else self._nothing_left())

    def _call_elsewhere(self, call: Callable[[], None]) -> None:
        """On a machine that is not the checkpoint's; the directory is there for hooks that look into it."""
        self._disk.make(self._place.scratch)
        call()

    def _nothing_left(self) -> None:
        scratch = self._place.scratch
        left = next(scratch.iterdir(), None) if self._disk.sees(scratch) else None
        if left:
            raise CheckpointError(
                f"a hook has written {left.name} on a machine that does not see the checkpoint: only what the first "
                "machine writes is kept, so write there (accelerator.is_main_process)"
            )

    @property
    def progress(self) -> str:
        """How much of its part this rank has written."""
        return f"{shown(self._writer.written)} of {shown(self._writer.planned)}"

    def take(
        self, items: Sequence[Item], step: int, hosted: Callable[[Any], Any] = lambda state: state
    ) -> None:
        """Take the state of the run, and plan who writes what of it.

        Args:
            items: What the run consists of.
            step: How many optimizer steps it has made.
            hosted: Makes a state what files take, as `Backend.hosted`.

        Raises:
            CheckpointError: Something cannot be saved.
        """
        try:
            self._state = agreed(
                items, self._share, self._rank, self._world_size, hosted, handed_over=not self._sees
            )
        except BaseException:  # whatever it is, nothing is left
            self._give_up()
            raise
        self._about = {item.name: item.about for item in items if item.about}
        self._step = step
        self._writer = Writer(self._place.scratch, self._place.save, self._disk)
        self._plan(self._state)

    def stage(self, staging: Staging) -> None:
        """Copy what this rank writes, so that the script may go on."""
        planner = self._planner

        def copy() -> None:
            live = {item.index: planner.resolve_data(item) for item in self._mine.items}
            planner.staged = staging.copies(live)

        self._all(copy)

    def finish(self, share: Share) -> Manifest | None:
        """Write everything, and give the checkpoint its name.

        Args:
            share: Exchanges objects between the ranks; that of the thread this runs in.

        Returns:
            The manifest, on the first rank.

        Raises:
            CheckpointError: It cannot be written; what was there before is as it was, and nothing of this is left.
        """
        self._share = share
        written = self._all(self._write)
        manifest = self._all(lambda: None if self._rank else self._commit(written))[0]
        if not self._sees:
            placing.discard(self._place.scratch, self._disk)
        self._unlock()
        return manifest if self._rank == 0 else None

    def _plan(self, state: State) -> None:
        planner, writer = self._planner, self._writer

        def own() -> SavePlan:
            planner.set_up_planner(self._to_write(state), is_coordinator=self._rank == 0)
            return planner.create_local_plan()

        plans = self._all(own)

        def divide() -> None:
            divided, self._metadata = planner.create_global_plan(plans)
            self._mine = planner.finish_plan(writer.prepare_global_plan(divided)[self._rank])
            if self._rank == 0:
                self._check_room()

        self._all(divide)

    def _to_write(self, state: State) -> dict[str, torch.Tensor]:
        if self._sees:
            return state.tensors
        sharded = next((name for name, tensor in state.tensors.items() if is_sharded(tensor)), None)
        if sharded:
            raise CheckpointError(
                f"{sharded} is sharded, and this machine does not see the checkpoint's directory: with shared_files off, "
                "only what is whole on the first machine can be saved; use a directory that all machines share"
            )
        return {}

    def _check_room(self) -> None:
        told = self._metadata.state_dict_metadata.values()
        tensors = [one for one in told if isinstance(one, TensorStorageMetadata)]
        needed = sum(one.size.numel() * one.properties.dtype.itemsize for one in tensors)
        room = self._disk.room(self._place.scratch)
        if needed > room:
            raise CheckpointError(
                f"{self._place.target.parent} has room for {shown(room)}, and this checkpoint takes {shown(needed)}"
            )

    def _write(self) -> tuple[list[Any], dict[str, File]]:
        results = self._writer.write_data(self._mine, self._planner).value()
        self._planner.staged = {}
        return results, self._writer.files

    def _commit(self, written: list[tuple[list[Any], dict[str, File]]]) -> Manifest:
        place, metadata = self._place, self._metadata
        self._writer.finish(metadata, [results for results, _ in written])
        files = {name: file for _, own in written for name, file in own.items()}
        manifest = Manifest(
            save=place.save,
            saved_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            world_size=self._world_size,
            step=self._step,
            versions={"accel": accel_runtime.__version__, "torch": str(torch.__version__)},
            values=self._state.values,
            own=self._state.own,
            tensors=stored(metadata),
            files=files | _of_hooks(place.scratch, files, self._disk),
            about=self._about,
            run=self._run,
        )
        write_text(place.scratch / NAME, manifest.text(), self._disk)
        placing.commit(place.scratch, place.target, self._disk)
        return manifest

    def _all(self, act: Callable[[], _T]) -> list[_T]:
        """`together`; where it fails nothing remains of what was written."""
        try:
            return together(self._share, act)
        except BaseException:  # whatever it is, nothing is left
            self._give_up()
            raise

    def _give_up(self) -> None:
        if hasattr(self, "_place") and (self._rank == 0 or not self._sees):
            placing.discard(self._place.scratch, self._disk)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            # It is the operating system's to forget, and a save that is whole does not fail by it.
            with suppress(OSError):
                self._disk.unlock(self._lock)
            self._lock = None


def _begun(choose: Callable[[], Path], disk: Disk, *, numbered: bool) -> tuple[Place, int | None]:
    """Return the directory to write into and the lock on it, under the first name that no other process takes."""
    for attempt in range(_ATTEMPTS):
        target, save = _plain(choose()), uuid.uuid4().hex[:12]
        try:
            scratch, lock = placing.begin(target, save, disk, new=numbered)
        except placing.TakenError:
            if attempt == _ATTEMPTS - 1:
                raise
            # Two processes that have both given way should not meet again.
            time.sleep(random.uniform(0, 0.01))  # noqa: S311 - no secret
        else:
            return Place(target, scratch, save), lock
    raise AssertionError


def _plain(target: Path) -> Path:
    """Where a link leads, so that it stays and what it leads to is replaced."""
    target = target.absolute()
    return target.resolve() if target.is_symlink() or ".." in target.parts else target


def _of_hooks(scratch: Path, known: dict[str, File], disk: Disk) -> dict[str, File]:
    """What hooks of the script have written there; it becomes part of the checkpoint."""
    found = {}
    for path in sorted(scratch.rglob("*")):
        name = path.relative_to(scratch).as_posix()
        if path.is_symlink():
            raise CheckpointError(
                f"{path} is a link that a hook has made: a checkpoint holds its files itself"
            )
        if path.is_file() and name not in known and name not in {NAME, UNFINISHED}:
            found[name] = _synced(path, disk)
    return found


def _synced(path: Path, disk: Disk) -> File:
    whole = xxhash.xxh3_64()
    with path.open("rb") as opened, about(path):
        while data := opened.read(1 << 22):
            whole.update(data)
        disk.sync(opened.fileno())
        return File(opened.tell(), whole.hexdigest())
