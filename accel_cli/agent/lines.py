"""Whole lines out of the bytes of one rank, so that those of several can share a screen."""

from __future__ import annotations

import time

__all__ = ["Lines"]

_PATIENCE_S = 1.0
"""How long the beginning of a line waits for its rest, and how far apart the first states of a progress bar are shown."""
_LONGEST_PAUSE_S = 60.0
"""How far apart they are shown in the end: the time between two of them doubles."""
_COLOURS = (36, 33, 35, 32, 34, 31)
_LONGEST = 65536


class Lines:
    """Takes the bytes of a rank as they come, and gives lines that begin with the rank.

    Args:
        rank: The rank.
        coloured: If its number is coloured.
        bars: If a progress bar is shown while it moves; only its last state is shown otherwise.
    """

    def __init__(self, rank: int, *, coloured: bool, bars: bool = True) -> None:
        name = f"[{rank}]"
        self._prefix = (
            f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{name}\x1b[0m " if coloured else f"{name} "
        ).encode()
        self._begun = b""
        self._since = 0.0
        self._bars = bars
        self._next_bar = 0.0
        self._pause = _PATIENCE_S

    @property
    def waiting(self) -> bool:
        """Whether the beginning of a line is held back."""
        return bool(self._begun)

    def feed(self, data: bytes) -> bytes:
        """The lines that are whole now."""
        *whole, begun = (self._begun + data).split(b"\n")
        if whole or not self._begun:
            self._since = time.monotonic()
        self._begun = begun
        shown = b"".join(self._line(line) for line in whole)
        if len(begun) > _LONGEST:
            return shown + self.rest(end=True)
        return shown + (self._redrawn() if b"\r" in begun else b"")

    def rest(self, *, end: bool = False) -> bytes:
        """The beginning of a line, such as a question, that has waited long enough for its rest."""
        if not self._begun or (b"\r" in self._begun and not end):
            return b""
        if not end and time.monotonic() - self._since < _PATIENCE_S:
            return b""
        begun, self._begun = self._begun, b""
        return self._line(begun)

    def _redrawn(self) -> bytes:
        """The newest whole state of a progress bar, now and then; the states between are in the log."""
        *states, newest = self._begun.split(b"\r")
        now = time.monotonic()
        state = next((state for state in reversed(states) if state.strip()), b"")
        if not state or not self._bars or now < self._next_bar:
            # What a bar drew over is never shown: only its newest states are kept.
            self._begun = b"\r".join([state, newest])
            return b""
        # Still a bar's: without its carriage return it would be the beginning of a line that waits for its rest.
        self._next_bar, self._begun = now + self._pause, b"\r" + newest
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)
        return self._line(state)

    def _line(self, line: bytes) -> bytes:
        """A line with its prefix; of what was drawn over itself, the last state."""
        states = [state for state in line.split(b"\r") if state.strip()]
        return self._prefix + (states[-1] if states else b"") + b"\n"
