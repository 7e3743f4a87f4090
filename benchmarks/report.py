"""Markdown tables of measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["NONE", "Table", "comparison_row", "format_spread", "number", "ratio"]

NONE = "–"  # noqa: RUF001 - a dash that says there is nothing here
_UNCERTAIN = 0.05


@dataclass(frozen=True)
class Table:
    """One subject: a heading, what was done, and the numbers."""

    title: str
    text: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def markdown(self) -> str:
        """The subject as a section; first column left, numbers right."""
        lines = [self.header, ("---", *["---:"] * (len(self.header) - 1)), *self.rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"## {self.title}\n\n{self.text}\n\n{table}\n"


def number(value: float) -> str:
    """Format a number with three significant digits."""
    size = abs(value)
    return f"{value:.{3 if size < 1 else 2 if size < 10 else 1 if size < 100 else 0}f}"  # noqa: PLR2004


def format_spread(values: Sequence[float]) -> str:
    """Format the median, and the minimum in brackets."""
    return f"{number(median(values))} ({number(min(values))})"


def ratio(other: Sequence[float], ours: Sequence[float]) -> str:
    """Return the other's median divided by accel's; bold if accel needs more."""
    value = median(other) / median(ours)
    return f"{value:.2f}" if value > 1 - _UNCERTAIN else f"**{value:.2f}**"


def comparison_row(
    label: str, columns: Sequence[Sequence[float]], ours: Sequence[Sequence[float]]
) -> tuple[str, ...]:
    """Return a row: the spread of each column, then its ratio to accel's; none for accel's own row."""
    pairs = zip(columns, ours, strict=True)
    return (
        label,
        *map(format_spread, columns),
        *(NONE if other is own else ratio(other, own) for other, own in pairs),
    )
