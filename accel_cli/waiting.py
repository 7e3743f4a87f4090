"""What a person sees while machines come: who is here, who is missing, and how long it is worth waiting."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from typing_extensions import Self

from accel_cli import console

__all__ = ["Waiting", "line"]

_PIPED_S = 10.0
"""Seconds between two lines where nobody watches a terminal."""


def line(arrived: Sequence[str], wanted: tuple[int, int], left: float, missing: Sequence[str] = ()) -> str:
    """One line: the machines that are here, how many are not, and the seconds left.

    Args:
        arrived: Names of the machines that are here.
        wanted: The fewest and the most machines.
        left: Seconds until waiting ends.
        missing: What is known of those that are not here.
    """
    low, high = wanted
    count = str(high) if low == high else f"{low} to {high}"
    lacking = low - len(arrived)
    here = f"{len(arrived)} of {count} machines here ({', '.join(arrived) or 'none'})"
    if lacking <= 0:
        return f"{here}; starting{'' if low == high else ' in a moment, unless more come'}"
    who = f": {', '.join(missing)}" if missing else ""
    return f"waiting: {here}, {lacking} missing{who}; {max(0, round(left))} s left"


class Waiting:
    """Says a line again and again while something lasts: in place on a terminal, else every ten seconds.

    Args:
        said: What is said now.
        quiet: Seconds before anything is said: machines that are started together meet within them.
    """

    def __init__(self, said: Callable[[], str], *, quiet: float = 2.0) -> None:
        self._said = said
        self._quiet = quiet
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="waiting", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        if self._over.wait(self._quiet):
            return
        if sys.stderr.isatty():
            self._in_place()
        else:
            self._line_by_line()

    def _in_place(self) -> None:
        while not self._over.wait(0.5):
            sys.stderr.write(f"\r\x1b[Kaccel: {self._said()}")
            sys.stderr.flush()
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()

    def _line_by_line(self) -> None:
        last, spoken = "", 0.0
        while not self._over.wait(0.5):
            said = self._said()
            # Without the seconds left: who is here is news at once.
            news = said.rpartition(";")[0]
            if news != last or time.monotonic() - spoken > _PIPED_S:
                console.note(said)
                last, spoken = news, time.monotonic()
