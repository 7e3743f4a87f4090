"""The log of a rank, as it is or as it grows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from accel_cli.errors import UsageError
from accel_cli.ranks import in_words
from accel_cli.runs import RankFolder, RunFolder

__all__ = ["Wanted"]

_PERIOD_S = 0.1
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Wanted:
    """Which log: None is the last attempt, and the lowest rank."""

    run: RunFolder
    attempt: int | None
    rank: int | None

    def once(self) -> Iterator[bytes]:
        """What is there.

        Raises:
            UsageError: The attempt or the rank is not in the run.
        """
        yield from _from(self._folder().output, 0)

    def follow(self) -> Iterator[bytes]:
        """What is there and what comes, also from later attempts, until the run has ended.

        Raises:
            UsageError: The attempt or the rank is not in the run.
        """
        while self.run.running and not self._there():
            time.sleep(_PERIOD_S)
        file, position = self._folder().output, 0
        while True:
            # Asked first: what is written until then is read after it.
            last = not self.run.running
            for data in _from(file, position):
                position += len(data)
                yield data
            if file != (newest := self._folder().output):
                file, position = newest, 0
            elif last:
                return
            else:
                time.sleep(_PERIOD_S)

    def _there(self) -> bool:
        try:
            return self._folder().output.exists()
        except UsageError:
            return False

    def _folder(self) -> RankFolder:
        name, attempts = self.run.path.name, self.run.attempts
        if not attempts:
            raise UsageError(f"no process of the run {name} was started")
        attempt = attempts[-1] if self.attempt is None else self.attempt
        if attempt not in attempts:
            raise UsageError(f"the run {name} has no attempt {attempt}; its last is {attempts[-1]}")
        ranks = self.run.ranks(attempt)
        rank = min(ranks, default=0) if self.rank is None else self.rank
        if rank not in ranks:
            here = f"{in_words(ranks)} ran on this machine" if ranks else "no rank ran on this machine"
            raise UsageError(f"attempt {attempt} of the run {name} has no log of rank {rank}; {here}")
        return ranks[rank]


def _from(file: Path, position: int) -> Iterator[bytes]:
    # Opening a named pipe would wait for a writer.
    if not file.is_file():  # also an attempt that is only about to start
        return
    with file.open("rb") as log:
        log.seek(position)
        yield from iter(lambda: log.read(_CHUNK), b"")
