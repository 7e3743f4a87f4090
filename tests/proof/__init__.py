"""Measure what the documentation claims, and write `docs/proof.md`; `make proof` runs all parts.

A part is a module of this package with the names of `Part`. Its results are one record, `docs/proof/NAME.json`, so that the
page can be written again without a measurement, and each part measured alone: `make proof PARTS=faults`.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from benchmarks.bench import read_cpu_model

__all__ = ["RECORDS", "ROOT", "Options", "Part", "format_table", "read_record", "write_record"]

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "docs" / "proof"


@dataclass(frozen=True)
class Options:
    """How much is measured.

    Attributes:
        seconds: Time for a part that repeats itself until the time is over (kills, soak); a part that does not ignores it.
        scripts: A folder with repositories of public scripts, or None for those of installed packages only.
        folder: An empty folder for the files of the part.
    """

    seconds: float
    scripts: Path | None
    folder: Path


class Part(Protocol):
    """A module that measures one claim."""

    TITLE: str
    """The heading of its section."""

    def run(self, options: Options) -> dict[str, Any]:
        """Measure, and return results that JSON can hold."""

    def render(self, results: Mapping[str, Any]) -> str:
        """Return the section below its heading, in Markdown: the method in two sentences, then a table, then what failed."""

    def headline(self, results: Mapping[str, Any]) -> tuple[str, str]:
        """Return the number of the README and what it counts (`"118 of 120"`, `"injected faults named ..."`)."""


def read_record(name: str) -> dict[str, Any] | None:
    """Return the record of a part with its `date`, `machine` and `results`, or None if it never ran."""
    path = RECORDS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def write_record(name: str, results: Mapping[str, Any]) -> None:
    """Write the results of a part with the date and the machine."""
    record = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": describe_machine(), "results": results}
    RECORDS.mkdir(exist_ok=True)
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    (RECORDS / f"{name}.json").write_text(text, encoding="utf-8")


def describe_machine() -> str:
    """Return the CPUs of this machine, and the versions of Python and torch."""
    import torch

    return f"{os.cpu_count()} CPUs ({read_cpu_model()}), Python {platform.python_version()}, torch {torch.__version__}"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; columns of numbers are aligned to the right."""
    numbers = [all(row[column][:1] in "0123456789+-" for row in rows) for column in range(len(header))]
    rule = ["---:" if is_number else "---" for is_number in numbers]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *rows))
