"""Measurements inside a script: blocks of the bare code and, in turn, of the same code with a library."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.measure import Run
from benchmarks.report import format_spread, number

__all__ = ["Blocks", "pooled"]


@dataclass(frozen=True)
class Blocks:
    """Times of the bare code and of the same code with a library, in alternating blocks."""

    bare: list[float]
    library: list[float]

    @property
    def added(self) -> list[float]:
        """Return the time that the library adds, by block."""
        return [with_ - bare for bare, with_ in zip(self.bare, self.library, strict=True)]

    @property
    def times(self) -> list[float]:
        """Return the time with the library divided by that of the bare code, by block."""
        return [with_ / bare for bare, with_ in zip(self.bare, self.library, strict=True)]

    def row(self, label: str) -> tuple[str, ...]:
        """Return the columns that tables have in common."""
        added, times = number(median(self.added)), f"{median(self.times):.2f}"
        return (label, format_spread(self.bare), format_spread(self.library), added, times)


def pooled(runs: dict[str, list[Run]]) -> dict[str, dict[str, Blocks]]:
    """For everything measured, the blocks of all interpreters of each library."""
    answers = {name: [json.loads(run.output) for run in found] for name, found in runs.items()}
    return {
        what: {name: _joined(answer[what] for answer in found) for name, found in answers.items()}
        for what in next(iter(answers.values()))[0]
    }


def _joined(answers: Iterable[dict[str, list[float]]]) -> Blocks:
    found: Sequence[dict[str, list[float]]] = list(answers)
    return Blocks(
        bare=[time for answer in found for time in answer["bare"]],
        library=[time for answer in found for time in answer["library"]],
    )
