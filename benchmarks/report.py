"""Format measurements as Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.bench import Run

__all__ = [
    "NONE",
    "Blocks",
    "Table",
    "format_beside",
    "format_median",
    "format_number",
    "format_ratio",
    "format_table",
    "merge_blocks",
    "merge_numbers",
]

NONE = "–"  # noqa: RUF001 - an empty cell
_RESOLUTION = 0.05


@dataclass(frozen=True)
class Table:
    """Section with a heading, a description of the measurement, and a table."""

    title: str
    text: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def to_markdown(self) -> str:
        """Format the section."""
        return f"## {self.title}\n\n{self.text}\n\n{format_table(self.header, self.rows)}\n"


@dataclass(frozen=True)
class Blocks:
    """Times of bare code and of the same code with a library, measured in alternating blocks."""

    bare: list[float]
    library: list[float]

    @property
    def added(self) -> list[float]:
        """Return the time that the library adds, by block."""
        return [library - bare for bare, library in zip(self.bare, self.library, strict=True)]

    @property
    def ratio(self) -> str:
        """Return the median of the time with the library divided by that of the bare code, by block."""
        ratios = (library / bare for bare, library in zip(self.bare, self.library, strict=True))
        return f"{median(ratios):.2f}"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table; the first column is aligned to the left, numbers to the right."""
    lines = [header, ("---", *["---:"] * (len(header) - 1)), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def merge_blocks(runs: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, Blocks]]:
    """Merge the JSON outputs of scripts into the blocks of each measurement and library.

    A script prints `{measurement: {"bare": [...], "library": [...]}}`.
    """
    outputs = {library: [json.loads(run.output) for run in results] for library, results in runs.items()}
    return {
        measurement: {
            library: Blocks(
                bare=[time for output in printed for time in output[measurement]["bare"]],
                library=[time for output in printed for time in output[measurement]["library"]],
            )
            for library, printed in outputs.items()
        }
        for measurement in next(iter(outputs.values()))[0]
    }


def merge_numbers(runs: Sequence[Run]) -> dict[str, list[float]]:
    """Merge the JSON outputs of runs of a script, each `{measurement: [...]}`."""
    merged: dict[str, list[float]] = {}
    for run in runs:
        for measurement, numbers in json.loads(run.output).items():
            merged.setdefault(measurement, []).extend(numbers)
    return merged


def format_number(value: float) -> str:
    """Format a number with three significant digits."""
    size = abs(value)
    return f"{value:.{3 if size < 1 else 2 if size < 10 else 1 if size < 100 else 0}f}"  # noqa: PLR2004


def format_median(values: Sequence[float]) -> str:
    """Format the median."""
    return format_number(median(values))


def format_beside(other: Sequence[float], accel: Sequence[float]) -> str:
    """Format the median of another program, in bold if accel needs more."""
    text = format_median(other)
    return text if _is_more(other, accel) else f"**{text}**"


def format_ratio(other: Sequence[float], accel: Sequence[float]) -> str:
    """Format a median divided by that of accel, in bold if accel needs more."""
    text = f"{median(other) / median(accel):.2f}"
    return text if _is_more(other, accel) else f"**{text}**"


def _is_more(other: Sequence[float], accel: Sequence[float]) -> bool:
    return median(other) > median(accel) * (1 - _RESOLUTION)
