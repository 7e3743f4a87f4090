"""Reading a checkpoint: everything is checked before anything changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from accel_runtime.checkpoint import folder
from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.files import Disk
from accel_runtime.checkpoint.folder import Found
from accel_runtime.checkpoint.items import Item
from accel_runtime.checkpoint.states import States
from accel_runtime.checkpoint.together import Share, own, same, together
from accel_runtime.checkpoint.verifying import damage, own_share

__all__ = ["Loading"]

_T = TypeVar("_T")
_LOG = logging.getLogger("accel_runtime.checkpoint")
_SHOWN = 10
"""So many reasons stand in a message."""


class Loading:
    """One load.

    Args:
        share: Exchanges objects between the ranks.
        rank: This rank.
        world_size: How many there are.
        strict: False leaves out what does not fit, and says so.
        copies: How many ranks have the same part of every batch.
    """

    def __init__(self, share: Share, rank: int, world_size: int, *, strict: bool, copies: int = 1) -> None:
        self._copies = copies
        self._share, self._rank, self._world_size, self._strict = share, rank, world_size, strict
        self._disk = Disk()
        self._lock: int | None = None
        self._verified = False

    def open(self, choose: Callable[[], Path], given: str | None = None) -> Found:
        """The checkpoint that the first rank chooses, seen by all; nobody removes it before `close`.

        Args:
            choose: Gives its directory.
            given: What the script said; the same on all ranks.

        Raises:
            CheckpointError: There is none, or it is damaged.
        """

        def chosen() -> tuple[Path, str]:
            path = choose()
            try:
                found = folder.find(path)
            except CheckpointError as error:
                raise CheckpointError(f"{error}\n{_offer(path)}") from error
            return found.path, found.manifest.save

        told = self._all(lambda: (given, chosen() if self._rank == 0 else (Path(), "")))
        (_, (path, save)), said = told[0], [one for one, _ in told]

        def seen() -> Found:
            same("load_state", said)
            self._hold(path)
            found = folder.read(path)
            if found.manifest.save != save:
                raise CheckpointError(f"{path} was replaced while it was opened: load it again")
            return found

        return self._own(seen)

    def close(self) -> None:
        """Let others remove it again."""
        if self._lock is not None:
            self._disk.unlock(self._lock)
            self._lock = None

    def verify(self, found: Found) -> None:
        """Compare every byte with its checksum, before anything that may rely on it.

        Raises:
            CheckpointError: It is damaged.
        """
        self._verify(found, found.manifest.items)
        self._verified = True

    def run_hooks(self, call: Callable[[], None]) -> None:
        """Call what the script wants to do first.

        Raises:
            CheckpointError: It failed on some rank.
        """
        self._own(call)

    def load(self, found: Found, items: Sequence[Item]) -> list[str]:
        """Restore items.

        Args:
            found: The checkpoint.
            items: What the run consists of.

        Returns:
            What was left out, a sentence each; only where not strict.

        Raises:
            CheckpointError: Something does not fit or is damaged; nothing was changed. If nevertheless something fails
                after that, the message says that the state is neither the old nor the new.
        """
        states = States(found, self._rank, self._world_size, self._copies)
        left_out = self._own(lambda: self._fit(found, states, items))
        wanted = [item for item in items if item.name in found.manifest.items]
        if not self._verified:
            self._verify(found, [item.name for item in wanted])
        try:
            trees = self._own(lambda: states.read(wanted))
            self._own(lambda: _restore(wanted, trees, moved=states.moved))
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}\nWhat this run has now is neither what it had nor all of {found.path}: load a checkpoint, or "
                "start it anew"
            ) from error
        if self._rank == 0:
            self._tell(found, left_out)
        return left_out

    def _fit(self, found: Found, states: States, items: Sequence[Item]) -> list[str]:
        """What does not fit."""
        manifest, here = found.manifest, {item.name for item in items}
        both = [item for item in items if item.name in manifest.items]
        states.check(both)
        wrong = [
            f"{_called(name, manifest.about.get(name))}: it is in the checkpoint, and nothing of the kind here"
            for name in manifest.items
            if name not in here
        ]
        wrong += [
            f"{_called(item.name, item.about)}: it is here, and not in the checkpoint"
            for item in items
            if item not in both
        ]
        wrong += [sentence for item in both for sentence in states.wrong(item)]
        if wrong and self._strict:
            more = [f"... and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
            told = "\n".join(f"  {sentence}" for sentence in [*wrong[:_SHOWN], *more])
            raise CheckpointError(
                f"{found.path} does not fit this run, and nothing was loaded; strict=False leaves out:\n{told}"
            )
        return wrong

    def _verify(self, found: Found, names: Sequence[str]) -> None:
        chunks = own_share(found, names, self._rank, self._world_size)
        wrong = [sentence for some in self._all(lambda: damage(found, chunks)) for sentence in some]
        if wrong:
            raise CheckpointError("\n".join([*wrong[:_SHOWN], _offer(found.path)]))

    def _tell(self, found: Found, left_out: Sequence[str]) -> None:
        if left_out:
            _LOG.warning("%s was loaded as far as it fits: %s", found.path, "; ".join(left_out))
        if unknown := folder.strangers(found):
            names = ", ".join(str(path.relative_to(found.path)) for path in unknown[:_SHOWN])
            _LOG.warning("%s: not part of the checkpoint, and not read: %s", found.path, names)

    def _hold(self, path: Path) -> None:
        with suppress(OSError):
            self._lock = self._disk.lock(path, shared=True)

    def _all(self, act: Callable[[], _T]) -> list[_T]:
        return together(self._share, act)

    def _own(self, act: Callable[[], _T]) -> _T:
        """This rank's result of what all do."""
        return own(self._share, act)


def _restore(items: Sequence[Item], trees: Mapping[str, Any], *, moved: bool) -> None:
    for item in items:
        item.moved = moved
        item.restore(trees[item.name])


def _called(name: str, about: str | None) -> str:
    return f"{name} ({about})" if about else name


def _offer(path: Path) -> str:
    """What to do about a damaged checkpoint."""
    before = folder.whole_before(path)
    if before is None:
        return "Nothing was loaded."
    return f"Nothing was loaded. The checkpoint before it is {before.path}, of step {before.manifest.step}."
