"""Places of a file that are left to its author; without libcst, which shell scripts do not need."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Finding", "UnsafeError"]


@dataclass(frozen=True, order=True)
class Finding:
    """A place of a file that is not converted, or behaves differently: the reason, and the code to write."""

    line: int
    text: str


class UnsafeError(Exception):
    """The script cannot be converted as a whole."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.finding = Finding(line, text)
