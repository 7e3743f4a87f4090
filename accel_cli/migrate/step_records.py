"""Records of optimizer steps: what a run writes for `accel migrate --verify`, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Difference", "RunConfig", "RunEnd", "StepRecord", "encode_record", "read_records"]


@dataclass(frozen=True)
class RunConfig:
    """What a process of a run records, and where."""

    rank: int
    world_size: int
    max_steps: int
    results: str
    """The folder of the records, one file for each rank."""
    reference: str
    """The folder of the run to compare with; empty for the first one."""
    tree: str
    """The folder of the copy, beside links to the files and folders that are beside the user's folder."""
    copy: str
    """The copy of the user's folder, in which the script runs."""
    original: str
    """The user's folder, in which nothing is written."""
    is_split: bool
    """True if each batch of the script is divided over the processes."""

    @property
    def records(self) -> Path:
        """The file of the records of this rank."""
        return Path(self.results, f"{self.rank}.jsonl")


@dataclass(frozen=True)
class Difference:
    """The differences of one step from the same step of another run, over the parameters of its optimizer."""

    weights: float
    """The largest absolute difference of a weight."""
    update: float
    """The norm of the differences of weights, divided by that of the change since the start."""
    gradients: float
    """The norm of the differences of gradients, divided by that of the gradients."""


@dataclass(frozen=True)
class StepRecord:
    """One step of an optimizer."""

    step: int
    loss: float | None
    """The sum of the losses of the backward passes since the step before; None without one."""
    digest: str
    """The checksum of the weights after the step."""
    random: str
    """The checksum of the states of the random number generators after the step."""
    rates: tuple[float, ...]
    """The learning rate of each parameter group."""
    samples: int
    """The number of samples in the batches that torch's loaders returned since the step before."""
    is_drawn: bool
    """True if random numbers were drawn between the last batch and the end of the step."""
    is_drawn_by_data: bool
    """True if random numbers were drawn while a batch was loaded, other than the first one of an epoch."""
    workers: int
    """The largest number of worker processes of a loader."""
    difference: Difference | None = None
    """None if there is no such step of the other run, or its parameters have other shapes."""


@dataclass(frozen=True)
class RunEnd:
    """How a run ended."""

    steps: int
    error: str = ""
    """The exception that ended the script, with its line; empty without one."""
    layers: tuple[str, ...] = ()
    """The classes of layers in training mode whose results depend on the batch or on random numbers."""
    is_seeded: bool = False
    """True if the script sets a seed of torch."""


def encode_record(record: StepRecord | RunEnd) -> str:
    """Return a record as a line."""
    return f"{json.dumps(asdict(record))}\n"


def read_records(path: Path) -> tuple[tuple[StepRecord, ...], RunEnd | None]:
    """Return the steps of a process, and its end; None if it was ended from outside."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    # A process that is ended may leave a part of a line.
    values = [json.loads(line) for line in lines if line.endswith("\n")]
    ends = [RunEnd(**_with_tuples(value, ("layers",))) for value in values if "step" not in value]
    steps = [_parse_step(value) for value in values if "step" in value]
    return tuple(steps), ends[0] if ends else None


def _parse_step(value: dict[str, Any]) -> StepRecord:
    difference = value.pop("difference")
    return StepRecord(
        **_with_tuples(value, ("rates",)), difference=Difference(**difference) if difference else None
    )


def _with_tuples(value: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {**value, **{name: tuple(value[name]) for name in names}}
