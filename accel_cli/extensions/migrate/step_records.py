"""The steps of a run of `accel migrate --verify`, from the records of its ranks, and the differences of two runs.

Each process writes the record of its steps in the format of `observe/step_records`, into a folder of its rank in that of the results.
`END` beside it has how the run ended, and what the script does that is no part of a step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from accel_runtime.observe.step_records.record import (
    FILE,
    Batch,
    Entry,
    RankRecord,
    StepRecord,
    Summary,
    compare_sketches,
    read_record,
)

__all__ = [
    "INDEX",
    "Column",
    "Difference",
    "RunConfig",
    "RunEnd",
    "Step",
    "compare_steps",
    "read_end",
    "read_steps",
    "write_end",
]

INDEX = "index"
"""The name of the column with the indices of a batch in its dataset."""
END = "end.json"


@dataclass(frozen=True)
class RunConfig:
    """What a process of a run records, and where."""

    rank: int
    world_size: int
    max_steps: int
    results: str
    """The folder of the results, with one of each rank."""
    tree: str
    """The folder of the copy, beside links to the files and folders that are beside the user's folder."""
    copy: str
    """The copy of the user's folder, in which the script runs."""
    original: str
    """The user's folder, in which nothing is written."""
    is_split: bool
    """True if each batch of the script is divided over the processes."""
    changes: tuple[str, ...] = ()
    """Names of the changes of the script's computation under which it runs, to test if they explain a difference."""

    @property
    def folder(self) -> Path:
        """The folder of this rank."""
        return find_folder(Path(self.results), self.rank)


@dataclass(frozen=True)
class Difference:
    """The differences of one step from the same step of another run, over the parameters of its optimizer."""

    weights: float
    """The norm of the differences of weights, divided by that of the weights."""
    update: float
    """The same, divided by the norm of the change since the start."""
    gradients: float
    """The norm of the differences of gradients, divided by that of the gradients."""


@dataclass(frozen=True)
class Column:
    """One identity of each sample that a process consumed for a step, from one source."""

    kind: Literal["loader", "model"]
    """`loader`: a batch of a DataLoader; `model`: the inputs of a model that the script calls, while gradients are on."""
    source: str
    """The line of the script that iterates over the loader, as `train.py:12`; empty for inputs."""
    name: str
    """The name of `Batch`."""
    rows: tuple[str, ...]
    """Indices, or hashes of the values of each sample: a row of the tensor, along its first dimension."""


@dataclass(frozen=True)
class Step:
    """What is compared of one step of an optimizer."""

    loss: float | None
    """The sum of the losses of the backward passes since the step before; None without one."""
    weights: tuple[str, ...]
    """The digests of the weights after the step."""
    gradients_norm: float
    random: Mapping[str, str]
    """Digests of the states of the random number generators after the step, by generator."""
    rates: tuple[float, ...]
    """The learning rate of each parameter group."""
    samples: tuple[Column, ...]
    """The samples that were consumed since the step before: batches of torch's loaders that a backward pass followed, and inputs."""
    is_drawn: bool
    """True if random numbers were drawn between the last batch and the backward pass."""
    difference: Difference | None = None
    """The difference from another run; None without one, or if its parameters have other shapes."""


@dataclass(frozen=True)
class RunEnd:
    """How a run ended, and what the script does that is no part of a step."""

    steps: int
    error: str = ""
    """The exception that ended the script, with its line; empty without one."""
    layers: tuple[str, ...] = ()
    """The classes of layers in training mode whose results depend on the batch or on random numbers."""
    is_seeded: bool = False
    """True if the script sets a seed of torch."""
    has_distributed_order: bool = False
    """True if a `DistributedSampler` has shuffled, whose order is not that of a shuffling DataLoader."""
    is_drawn_by_data: bool = False
    """True if random numbers were drawn while samples of a dataset with indices were read, in the process of the script."""
    workers: int = 0
    """The largest number of worker processes of a loader."""


def find_folder(results: Path, rank: int) -> Path:
    """Return the folder of a rank."""
    return results / str(rank)


def write_end(folder: Path, end: RunEnd) -> None:
    """Write the end of a rank, which is there as a whole or not at all."""
    part = folder / f"{END}.part"
    part.write_text(json.dumps(asdict(end)), encoding="utf-8")
    part.replace(folder / END)


def read_end(results: Path, rank: int) -> RunEnd | None:
    """Return the end of a rank; None if it was ended from outside, or runs."""
    path = find_folder(results, rank) / END
    if not path.exists():
        return None
    value = json.loads(path.read_text(encoding="utf-8"))
    return RunEnd(**{**value, "layers": tuple(value["layers"])})


def read_steps(results: Path, rank: int, reference: Path | None) -> tuple[tuple[Step, ...], str]:
    """Return the steps of a rank, and why its record ends before the run does; empty if it does not.

    Args:
        results: The folder of the run.
        rank: The rank.
        reference: The folder of the run that the steps are compared with, by its first rank.
    """
    record = _read(results, rank)
    other = None if reference is None else _read(reference, 0)
    if record is None:
        return (), ""
    steps: list[Step] = []
    before: StepRecord | None = None
    for number, step in sorted(record.steps.items()):
        difference = compare_steps(step, number, other) if other else None
        steps.append(_build_step(step, before, difference))
        before = step
    return tuple(steps), record.end or ""


def _read(results: Path, rank: int) -> RankRecord | None:
    path = find_folder(results, rank) / FILE
    return read_record(path) if path.exists() else None


def _build_step(step: StepRecord, before: StepRecord | None, difference: Difference | None) -> Step:
    losses = [value for one in step.passes for _, value in one.losses if value is not None]
    batches = [batch for one in step.passes for batch in one.batches]
    inputs = [batch for one in step.passes for batch in one.inputs]
    # Without a batch, it is not known when the inputs were drawn.
    is_drawn = not batches and before is not None and before.random != step.random
    return Step(
        loss=sum(losses) if losses else None,
        weights=tuple(digest for _, digest in step.parameters),
        gradients_norm=step.norm,
        random=step.random,
        rates=step.rates,
        samples=(*_build_columns("loader", batches), *_build_columns("model", inputs)),
        is_drawn=is_drawn or any(one.drawn for one in step.passes),
        difference=difference,
    )


def _build_columns(kind: Literal["loader", "model"], batches: Iterable[Batch]) -> list[Column]:
    """Return the columns that have samples."""
    source = "" if kind == "model" else None
    return [
        Column(kind, one.source if source is None else source, one.name, one.rows)
        for one in batches
        if not one.name.endswith("()")
    ]


def compare_steps(step: StepRecord, number: int, other: RankRecord) -> Difference | None:
    """Return the difference of a step from that of another run; None without one, or if its parameters have other shapes."""
    reference = other.steps.get(number)
    if reference is None:
        return None
    tensors = _list_summaries(step, step.parameters), _list_summaries(reference, reference.parameters)
    shapes = [[one.shape for one in each.values()] for each in tensors]
    if shapes[0] != shapes[1]:
        return None
    first = min(one for one, record in other.steps.items() if record.optimizer == reference.optimizer)
    start = _list_summaries(other.steps[first], other.steps[first].before or ())
    weights = _measure(zip(*(each.values() for each in tensors), strict=True))
    changes = [
        (one, start[name])
        for name, one in tensors[1].items()
        if name in start and one.shape == start[name].shape
    ]
    gradients = _list_summaries(step, step.read), _list_summaries(reference, reference.read)
    if gradients[0].keys() != gradients[1].keys() and len(gradients[0]) == len(gradients[1]):
        gradients = dict(zip(gradients[1], gradients[0].values(), strict=True)), gradients[1]
    pairs = [(gradients[0].get(name), gradients[1].get(name)) for name in {**gradients[0], **gradients[1]}]
    return Difference(
        _divide(weights, math.hypot(*(one.norm for one in tensors[1].values()))),
        _divide(weights, _measure(changes)),
        _divide(_measure(pairs), reference.norm),
    )


def _list_summaries(step: StepRecord, entries: Iterable[Entry]) -> dict[str, Summary]:
    return {name: step.values[digest] for name, digest in entries if digest in step.values}


def _measure(pairs: Iterable[tuple[Summary | None, Summary | None]]) -> float:
    """Return an estimate of the norm of the differences of tensors, of which None are zeros."""
    sizes = []
    for one, other in pairs:
        if one is not None and other is not None:
            is_lost = one.non_finite != other.non_finite
            sizes.append(math.inf if is_lost else compare_sketches(one.sketch, other.sketch))
        elif (only := one or other) is not None:
            sizes.append(only.norm)
    return math.hypot(*sizes)


def _divide(difference: float, size: float) -> float:
    return 0.0 if difference == 0 else difference / size if size else math.inf
