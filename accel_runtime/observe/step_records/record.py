"""The record of a rank: the format of its file, its reader, and the choice of the steps that it has. Standard library only.

`steps.jsonl` in the folder of a rank has one JSON object a line, in the order in which they were written:

- `{"kind": "run", "version": 3, ...}`: `RunHead`, once;
- `{"kind": "model", ...}`: `ModelHead`, before the first step that has its parameters;
- `{"kind": "optimizer", ...}`: `OptimizerHead`, before its first step;
- `{"kind": "step", ...}`: `StepRecord`, for each chosen step of an optimizer of torch;
- `{"kind": "end", "reason": ""}`: the record is complete, or why it ends before the run does; missing if the process was ended from outside,
  or still runs.

A tensor is named by its digest, 128 bits of xxh3 over its dtype, shape and bytes. `values` of a step has, by digest, the `Summary` of each
tensor of floating-point numbers: equal tensors have one. Its sketch has 16 sums of all elements with signs that depend on their
positions only: it is linear, and the sum of the squares of the difference of two sketches is on average the squared norm of the
difference of the tensors (Alon, Matias and Szegedy 1996; Charikar, Chen and Farach-Colton 2002).
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "FILE",
    "SKETCH_SIZE",
    "TENSORS_FILE",
    "VERSION",
    "Batch",
    "Entry",
    "ForwardPass",
    "ModelHead",
    "OptimizerHead",
    "RankRecord",
    "RunHead",
    "Selection",
    "StepRecord",
    "Summary",
    "compare_sketches",
    "encode",
    "read_record",
]

VERSION = 3
FILE = "steps.jsonl"
TENSORS_FILE = "step-{}.safetensors"
"""The file with the tensors of a step, in the folder of the rank; the key of a tensor is its stage and name, as `read/0.weight`."""
SKETCH_SIZE = 16
"""Sums of a sketch: an estimate of a norm from 16 of them is below a tenth of it once in ten million tensors."""

Entry = tuple[str, str]
"""A name and a digest."""


@dataclass(frozen=True)
class Selection:
    """The steps that are recorded, and what is recorded of them beside the rest."""

    every: int = 1
    first: int = 1
    last: int | None = None
    modules: bool = False
    """If true, the outputs of modules are recorded."""
    tensors: bool = False
    """If true, the tensors of the recorded steps are kept in files."""

    @classmethod
    def parse(cls, text: str) -> Selection:
        """Read `all`, `every:N` or `steps:A-B`, with `modules` and `tensors`, separated by commas.

        Raises:
            ValueError: The text is something else.
        """
        values: dict[str, Any] = {}
        for part in text.split(","):
            word, _, value = part.strip().partition(":")
            first, dash, last = value.partition("-")
            last = last if dash else first
            if word in {"modules", "tensors"} and not value:
                values[word] = True
            elif word == "every" and value.isdecimal() and int(value):
                values["every"] = int(value)
            elif word == "steps" and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last):
                values |= {"first": int(first), "last": int(last)}
            elif part.strip() != "all":
                raise ValueError(
                    f"Invalid steps to record {text!r}: expected all, every:N or steps:A-B, and modules or tensors, separated by "
                    "commas. An example is steps:1-20,modules."
                )
        return cls(**values)

    def has_step(self, step: int) -> bool:
        """Return whether a step is recorded; the first one has number 1."""
        return (
            step >= self.first
            and (self.last is None or step <= self.last)
            and (step - self.first) % self.every == 0
        )

    def is_over(self, step: int) -> bool:
        """Return whether no step from this one on is recorded."""
        return self.last is not None and step > self.last


@dataclass(frozen=True)
class Summary:
    """Numbers that describe a tensor."""

    dtype: str
    shape: tuple[int, ...]
    norm: float
    """The Euclidean norm of its finite elements, in float64."""
    largest: float
    """The largest absolute value of a finite element."""
    zeros: float
    """The share of elements that are zero."""
    non_finite: float
    """The share of elements that are infinite or no numbers."""
    sketch: tuple[float, ...]

    def pack(self) -> list[Any]:
        """Return the values as JSON has them."""
        sketch = base64.b64encode(struct.pack(f"<{len(self.sketch)}d", *self.sketch)).decode("ascii")
        return [
            self.dtype,
            list(self.shape),
            self.norm,
            self.largest,
            self.zeros,
            self.non_finite,
            sketch,
        ]

    @classmethod
    def unpack(cls, values: list[Any]) -> Summary:
        """Return the summary of packed values."""
        dtype, shape, norm, largest, zeros, non_finite, packed = values
        data = base64.b64decode(packed)
        sketch = struct.unpack(f"<{len(data) // 8}d", data)
        return cls(dtype, tuple(shape), norm, largest, zeros, non_finite, sketch)


def compare_sketches(first: Iterable[float], second: Iterable[float]) -> float:
    """Return an estimate of the norm of the difference of two tensors."""
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(first, second, strict=True)))


@dataclass(frozen=True)
class Batch:
    """One identity of each sample that a rank used for a pass."""

    source: str
    """The line of the script that iterates over the loader, as `train.py:12`; `model` for inputs of a module."""
    name: str
    """`index` for indices in the dataset; otherwise the position of a tensor or list, such as `.1` or `.input_ids`.

    It ends with `[]` for a list of tensors, each of which is a sample, and with `()` for a tensor that has no samples, such as a number.
    """
    rows: tuple[str, ...]
    """Indices, or hashes of the values of each sample."""


@dataclass(frozen=True)
class ForwardPass:
    """A forward pass, and the backward pass that followed it."""

    batches: tuple[Batch, ...] = ()
    """The batches of loaders since the pass before."""
    random: Mapping[str, str] = field(default_factory=dict)
    """Digests of the states of the random number generators, when the forward pass began, by generator."""
    drawn_by_data: tuple[str, ...] = ()
    """The generators whose states changed from the pass before to the last batch."""
    drawn: tuple[str, ...] = ()
    """Those whose states changed from the last batch, or without one from the forward pass, to the backward pass."""
    inputs: tuple[Batch, ...] = ()
    """The inputs of the model."""
    elements: int = 1
    """Elements of the largest tensor among them."""
    mode: str = ""
    """Autocast, and the modules that are not in training mode."""
    modules: tuple[Entry, ...] | None = None
    """The outputs of modules in the order in which they were computed; None if they were not recorded."""
    losses: tuple[tuple[str, float | None], ...] = ()
    """Digest and value of what the backward pass began with."""
    buffers: tuple[Entry, ...] = ()
    """Buffers after the forward pass."""
    left: tuple[Entry, ...] = ()
    """Gradients before the first backward pass of a step that are not zero."""
    gradients: tuple[Entry, ...] | None = None
    """Gradients as this rank accumulates them, before any exchange, in the order of the backward pass; None if they were not recorded."""
    after_backward: tuple[Entry, ...] | None = None
    """Gradients after the backward pass, of all micro-batches up to this one; None without one."""


@dataclass(frozen=True)
class StepRecord:
    """One step of an optimizer."""

    step: int
    optimizer: int
    """The number of the optimizer, from 0."""
    before: tuple[Entry, ...] | None
    """Parameters and buffers before the first forward pass; None without one."""
    passes: tuple[ForwardPass, ...]
    before_clipping: tuple[Entry, ...] | None
    """Gradients when a function of torch begins to clip them, in the first call; None without a call."""
    clipped_after: int
    """The number of passes before that call: more may follow if the script then leaves out its step."""
    clipping: str
    """`norm` or `value`, and the limit of the first call."""
    read: tuple[Entry, ...]
    """Gradients as the optimizer reads them."""
    norm: float
    """The norm of these gradients as one vector, of what this rank has of them."""
    options: Mapping[str, Any]
    """Options of the parameter groups, without the learning rates, that are numbers, texts or truth values."""
    rates: tuple[float, ...]
    """The learning rate of each parameter group."""
    state: tuple[Entry, ...]
    """The state of the optimizer after the step."""
    parameters: tuple[Entry, ...]
    """Its parameters after the step."""
    random: Mapping[str, str]
    """The states of the generators after the step."""
    values: Mapping[str, Summary]
    skipped: tuple[str, ...] = ()
    """Tensors that could not be read, as those of subclasses and nested ones: of them nothing is known."""


@dataclass(frozen=True)
class RunHead:
    """A rank of a run."""

    version: int
    rank: int
    world_size: int
    host: str
    selection: Mapping[str, Any]
    settings: Mapping[str, str]
    """Versions, the device, and options of torch on which numbers depend."""


@dataclass(frozen=True)
class ModelHead:
    """A module that the script calls, with parameters."""

    model: int
    name: str
    """Its class, inside of the classes that wrap it."""
    text: str
    """The module, as it prints itself."""
    is_local: bool
    """True if each rank has whole parameters, whose gradients it computes alone before an exchange."""


@dataclass(frozen=True)
class OptimizerHead:
    """An optimizer."""

    optimizer: int
    name: str
    parameters: tuple[tuple[str, ...], ...]
    """The names of the parameters of each group, in their order."""


@dataclass(frozen=True)
class RankRecord:
    """All that is recorded of a rank."""

    head: RunHead
    models: tuple[ModelHead, ...]
    optimizers: tuple[OptimizerHead, ...]
    steps: Mapping[int, StepRecord]
    end: str | None = None
    """Why the record ends before the run does; empty if it is complete, None if the process was ended from outside, or still runs."""
    path: Path | None = None
    """The folder of the rank."""

    @property
    def selection(self) -> Selection:
        """The steps that are recorded."""
        return Selection(**self.head.selection)


def encode(kind: str, value: Any) -> str:
    """Return a line of the file."""
    data = {"kind": kind, **(value if isinstance(value, dict) else vars(value))}
    if isinstance(value, StepRecord):
        data["values"] = {digest: summary.pack() for digest, summary in value.values.items()}
    # Without `asdict`, whose copies take longer than the rest.
    return f"{json.dumps(data, separators=(',', ':'), default=vars)}\n"


def read_record(path: Path) -> RankRecord | None:
    """Read the record of a rank; None if the file has not even its first line.

    Raises:
        ValueError: Another version of accel has written it, or it is damaged.
    """
    head: RunHead | None = None
    models, optimizers, end = [], [], None
    steps: dict[int, StepRecord] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):  # a process that was ended may leave a part of a line
                break
            try:
                value = json.loads(line)
                kind = value.pop("kind")
                if kind == "run":
                    if value["version"] != VERSION:
                        raise ValueError(
                            f"Cannot read {path}: its version is {value['version']}, and this is {VERSION}. Record the run again."
                        )
                    head = RunHead(**value)
                elif kind == "model":
                    models.append(ModelHead(**value))
                elif kind == "optimizer":
                    optimizers.append(
                        OptimizerHead(**{**value, "parameters": tuple(map(tuple, value["parameters"]))})
                    )
                elif kind == "step":
                    steps[value["step"]] = _parse_step(value)
                elif kind == "end":
                    end = str(value["reason"])
            except (
                AttributeError,
                KeyError,
                TypeError,
                UnicodeDecodeError,
                json.JSONDecodeError,
                struct.error,
            ) as error:
                raise ValueError(
                    f"Cannot read {path}: line {number} is no record. Record the run again."
                ) from error
    return RankRecord(head, tuple(models), tuple(optimizers), steps, end, path.parent) if head else None


def _parse_step(value: dict[str, Any]) -> StepRecord:
    lists = {
        name: _parse_entries(value[name])
        for name in ("before", "before_clipping", "read", "state", "parameters")
    }
    return StepRecord(
        **{
            **value,
            **lists,
            "passes": tuple(map(_parse_pass, value["passes"])),
            "rates": tuple(value["rates"]),
            "skipped": tuple(value["skipped"]),
            "values": {digest: Summary.unpack(packed) for digest, packed in value["values"].items()},
        }
    )


def _parse_pass(value: dict[str, Any]) -> ForwardPass:
    batches = {
        name: tuple(Batch(**{**batch, "rows": tuple(batch["rows"])}) for batch in value[name])
        for name in ("batches", "inputs")
    }
    entries = {
        name: _parse_entries(value[name])
        for name in ("modules", "losses", "buffers", "left", "gradients", "after_backward")
    }
    drawn = {name: tuple(value[name]) for name in ("drawn", "drawn_by_data")}
    return ForwardPass(**{**value, **batches, **entries, **drawn})


def _parse_entries(entries: Iterable[Any] | None) -> Any:
    return None if entries is None else tuple(map(tuple, entries))
