"""Places of a file that are left to its author; without libcst, which shell scripts do not need."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Finding", "MissingModelError", "Parts", "UnsafeError"]


@dataclass(frozen=True, order=True)
class Finding:
    """A place of a file that is not converted, or behaves differently: the reason, and the code to write."""

    line: int
    text: str


@dataclass(frozen=True)
class Parts:
    """The lines of a training in a file that does not have all of it: the others may be in other files. 0: not in this one."""

    finding: Finding
    """The finding of the file alone."""
    model: int = 0
    optimizer: int = 0
    backward: int = 0
    steps: bool = False
    """Whether the file steps an optimizer."""
    sources: frozenset[str] = frozenset()
    """The names whose calls create the optimizers that are stepped."""


class UnsafeError(Exception):
    """The script cannot be converted as a whole."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.finding = Finding(line, text)


class MissingModelError(UnsafeError):
    """A backward pass has no model of the script."""
