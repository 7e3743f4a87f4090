"""The comparison of two recorded runs: the first difference in causal order, and if the order of sums explains it.

There is one order for all causes: that in which a step computes. What is recorded of two runs is walked through in this order, and the first
number that differs is the one that no other recorded number explains.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, Literal

from accel_cli.extensions.numerics.bounds import Bound, build_bound, measure_difference
from accel_cli.extensions.numerics.tensors import TensorFile, compare_values
from accel_runtime.environment.settings import variable_name
from accel_runtime.observe.step_records.record import (
    TENSORS_FILE,
    Batch,
    Entry,
    ForwardPass,
    RankRecord,
    StepRecord,
    Summary,
    compare_sketches,
)

__all__ = [
    "STAGES",
    "Comparison",
    "Difference",
    "Point",
    "Run",
    "SettingDifference",
    "compare",
    "format_place",
]

STAGES = {
    "before": "a parameter or buffer before the step",
    "batch": "the samples of the batch",
    "random": "the state of a random number generator before the forward pass",
    "inputs": "the inputs of the model",
    "mode": "the mode of modules, or autocast",
    "modules": "the output of a module",
    "loss": "the loss",
    "buffers": "a buffer after the forward pass",
    "left": "a gradient that is left from before the step",
    "gradients": "the gradient of a rank, before any exchange",
    "after_backward": "the gradient after the backward pass, with the exchange in it",
    "before_clipping": "the gradient before it is clipped",
    "clipping": "the limit by which gradients are clipped",
    "read": "the gradient that the optimizer reads",
    "options": "an option of the optimizer",
    "rates": "the learning rate",
    "state": "the state of the optimizer after the step",
    "parameters": "a parameter after the step",
    "steps": "the number of steps",
}
"""The stages of a step in the order in which it computes them."""
_COMPUTED = (
    "modules",
    "loss",
    "buffers",
    "gradients",
    "after_backward",
    "before_clipping",
    "read",
    "state",
    "parameters",
)
_ARITHMETIC = frozenset(_COMPUTED)
"""Stages of numbers that also depend on how they are computed."""
_DRAWN = frozenset({"inputs", "modules", "loss", "buffers"})
"""Stages of a forward pass whose numbers may depend on random numbers."""
_OF_PASSES = (
    "batch",
    "random",
    "inputs",
    "mode",
    "modules",
    "loss",
    "buffers",
    "left",
    "gradients",
    "after_backward",
)
_UPDATES = ("options", "rates", "state", "parameters")
_ORDERED = frozenset({"modules", "gradients"})
"""Stages whose tensors were computed in the order in which they are recorded; of others, the largest difference is named first."""
_WHOLE = frozenset({"modules", "buffers", "gradients"})
"""Stages of which each rank has whole tensors, also of a sharded model."""
_COMPILED = "OptimizedModule"
_GRADIENTS = frozenset({"left", "gradients", "after_backward", "before_clipping", "read"})
_PRECISION = frozenset(
    {
        "float32_matmul_precision",
        "cudnn.allow_tf32",
        "default dtype",
        variable_name("mixed_precision"),
        "NVIDIA_TF32_OVERRIDE",
    }
)
"""Settings on which the size of a rounding error depends; others change the order of sums only."""
_MODEL, _WRAPPER, _ORDER, _CLASS, _PARAMETERS = (
    "the model",
    "the wrapper of the model",
    "the order of parameters",
    "the optimizer's class",
    "the parameters of the optimizer",
)
_IMPLEMENTATIONS = (", foreach", ", fused", ", capturable", ", differentiable")
"""Options of optimizers by which the same numbers are computed in another way: settings."""
_ARGUMENTS = re.compile(r"^\s*(?:\((?P<name>[^)]*)\): )?(?P<text>\w+\(.*\))$")
_ANY_SIZE = 2.0
"""No norm of a difference is larger, relative to the larger of two norms."""
_SAME_RATIO = 1e-3
_MAX_SHOWN = 6


@dataclass(frozen=True)
class Run:
    """The records of a run."""

    name: str
    ranks: Mapping[int, RankRecord]
    remark: str = ""
    """How the run ended, if not well, or which of its attempts this is."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return next(iter(self.ranks.values())).head.world_size

    @property
    def first(self) -> RankRecord:
        """The record of the lowest rank."""
        return self.ranks[min(self.ranks)]

    @property
    def steps(self) -> list[int]:
        """The steps that all ranks have recorded."""
        return sorted(set.intersection(*(set(one.steps) for one in self.ranks.values())))

    @property
    def is_complete(self) -> bool:
        """Return whether the records of all ranks are here and have all steps that were chosen."""
        return (
            len(self.ranks) == self.world_size
            and not self.remark
            and all(one.end == "" for one in self.ranks.values())
        )


@dataclass(frozen=True)
class Difference:
    """A number that differs between the runs."""

    step: int
    rank: int | None
    """The rank; None for a number of all ranks."""
    stage: str
    name: str
    """The parameter, module, generator or option; empty if the stage has one number."""
    detail: str
    size: float | None = None
    """The norm of the difference relative to the tensor; None if it is no matter of size."""
    bound: float | None = None
    """The size that the order of sums explains."""
    is_structural: bool = False
    """True if a run has a tensor, a pass or a value that the other one does not have, which no number explains."""
    micro_batch: int | None = None
    """The number of the forward pass in the step, from 1; None if it has only one."""

    @property
    def is_explained(self) -> bool:
        """Return whether the order of sums explains it."""
        return self.size is not None and self.bound is not None and self.size <= self.bound


@dataclass(frozen=True)
class SettingDifference:
    """A setting that differs, on which numbers may depend."""

    name: str
    first: str
    second: str


@dataclass(frozen=True)
class Point:
    """A step in the plots."""

    step: int
    losses: tuple[float | None, float | None]
    sizes: Mapping[str, float]
    """The largest relative difference of each stage."""
    bound: float


@dataclass
class Comparison:
    """What a comparison has found."""

    runs: tuple[Run, Run]
    steps: list[int]
    settings: list[SettingDifference] = field(default_factory=list)
    first: Difference | None = None
    """The first difference in bits."""
    beyond: Difference | None = None
    """The first difference that the order of sums does not explain."""
    random: list[Difference] = field(default_factory=list)
    """The first difference of each random number generator that the run uses."""
    is_reproducible: bool = False
    """True if both runs compute the same bits from the same numbers, as far as their settings show."""
    explanation: str = ""
    """The bound of the first step that differs, with its numbers."""
    points: list[Point] = field(default_factory=list)
    layers: dict[str, list[tuple[str, float]]] = field(default_factory=dict)
    """The relative difference of each tensor of the first step that differs, by stage."""
    notes: list[str] = field(default_factory=list)

    @property
    def is_partial(self) -> bool:
        """Return whether some recorded numbers cannot be compared, as the notes say."""
        return (
            self.runs[0].world_size != self.runs[1].world_size
            or _hold_other_parts(self)
            or not all(run.is_complete for run in self.runs)
            or self.has_skipped
        )

    @property
    def has_skipped(self) -> bool:
        """Return whether a rank could not read a tensor."""
        ranks = [one for run in self.runs for one in run.ranks.values()]
        return any(one.steps[step].skipped for one in ranks for step in self.steps)

    @property
    def verdict(self) -> Literal["equal", "rounding", "different"]:
        """The result: equal bit by bit, equal up to the order of sums, or different."""
        if self.first is None:
            return "equal"
        return "rounding" if self.beyond is None else "different"

    @property
    def cause(self) -> Difference | SettingDifference | None:
        """The first thing that differs in causal order and can explain the numbers that differ; None without any."""
        effect = self.effect
        if effect is None:
            return None
        for setting in self.settings:
            if _can_explain(setting, effect):
                return setting
        drawn = (one for one in self.random if self._may_be_drawn(one, effect))
        return next(drawn, effect)

    @property
    def effect(self) -> Difference | None:
        """The first number that differs; if the bits of a run need not be reproducible, the first that rounding does not explain."""
        if self.is_reproducible or self.beyond is None:
            return self.first
        return self.beyond

    def _may_be_drawn(self, random: Difference, effect: Difference) -> bool:
        """Return whether a number may differ since a generator does, from which that part of the pass draws."""
        if effect.is_structural or random.rank != effect.rank or random.step > effect.step:
            return False
        number = (effect.micro_batch or 1) - 1
        for run in self.runs:
            one = run.ranks[random.rank or 0].steps[effect.step].passes[number]
            # The state that is recorded for a step is the one after its batches were loaded.
            if effect.stage == "batch" and random.step < effect.step and random.name in one.drawn_by_data:
                return True
            if effect.stage in _DRAWN and random.name in one.drawn:
                return True
        return False


def _can_explain(setting: SettingDifference, effect: Difference) -> bool:
    if setting.name == "world size" or effect.stage not in {*_ARITHMETIC, "options"}:
        return False
    if setting.name == _PARAMETERS:
        return effect.stage in {"read", "options", "state", "parameters"}
    if setting.name == _WRAPPER and _COMPILED in setting.first + setting.second:
        return True
    if setting.name == _CLASS:
        return effect.stage in {"state", "parameters"}
    if setting.name == _ORDER:
        return effect.stage in {"read", "state", "parameters"}
    return effect.stage in _ARITHMETIC and (setting.name in {*_PRECISION, _MODEL} or effect.is_explained)


def compare(first: Run, second: Run) -> Comparison:
    """Compare two runs.

    Raises:
        ValueError: They have no recorded step in common.
    """
    steps = sorted(set(first.steps) & set(second.steps))
    if not steps:
        raise ValueError(
            f"Cannot compare {first.name} and {second.name}: no step is recorded in both. Record the same steps of both, such as "
            "--record-numerics all."
        )
    if first.world_size == second.world_size and first.ranks.keys().isdisjoint(second.ranks):
        raise ValueError(
            f"Cannot compare {first.name} and {second.name}: no rank has a record of both here. Copy the folders of the same ranks."
        )
    found = Comparison((first, second), steps)
    found.settings = list(_compare_settings(first, second))
    names = {one.name for one in found.settings if one.name not in {_MODEL, _ORDER, _CLASS, _PARAMETERS}}
    devices = {run.first.head.settings.get("device") for run in found.runs}
    is_deterministic = all(
        run.first.head.settings.get("deterministic algorithms") == "True" for run in found.runs
    )
    found.is_reproducible = not names and (devices == {"cpu"} or is_deterministic)
    _Walk(found).run()
    found.notes += _list_notes(found)
    return found


# Settings


def _compare_settings(first: Run, second: Run) -> Iterator[SettingDifference]:
    if first.world_size != second.world_size:
        yield SettingDifference("world size", str(first.world_size), str(second.world_size))
    one, other = first.first, second.first
    for name in sorted(one.head.settings.keys() | other.head.settings.keys()):
        values = one.head.settings.get(name, "not set"), other.head.settings.get(name, "not set")
        if values[0] != values[1]:
            yield SettingDifference(name, *values)
    options = [next(iter(each.steps.values())).options for each in (one, other)]
    for name in sorted(options[0].keys() & options[1].keys()):
        if name.endswith(_IMPLEMENTATIONS) and options[0][name] != options[1][name]:
            yield SettingDifference(f"optimizer: {name}", str(options[0][name]), str(options[1][name]))
    yield from _compare_models(one, other)
    for optimizer, match in zip(one.optimizers, other.optimizers, strict=False):
        if optimizer.name != match.name:
            yield SettingDifference(_CLASS, optimizer.name, match.name)
        orders = [[name for group in each.parameters for name in group] for each in (optimizer, match)]
        only = [sorted({*orders[i]} - {*orders[1 - i]}) for i in (0, 1)]
        if any(only) and not {*orders[0]}.isdisjoint(orders[1]):
            yield SettingDifference(
                _PARAMETERS, *(f"also {_join(each)}" if each else "fewer" for each in only)
            )
        elif orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]):
            index = next(i for i, pair in enumerate(zip(*orders, strict=True)) if pair[0] != pair[1])
            yield SettingDifference(
                _ORDER, f"{orders[0][index]} at {index}", f"{orders[1][index]} at {index}"
            )


def _compare_models(one: RankRecord, other: RankRecord) -> Iterator[SettingDifference]:
    for model, like in zip(one.models, other.models, strict=False):
        lines = _list_arguments(model.text), _list_arguments(like.text)
        for line, second_line in zip_longest(*lines, fillvalue="nothing"):
            if line != second_line:
                yield SettingDifference(_MODEL, line, second_line)
                break
        wrappers = [name.rpartition(" of ")[0] or "none" for name in (model.name, like.name)]
        if wrappers[0] != wrappers[1]:
            yield SettingDifference(_WRAPPER, *wrappers)


def _list_arguments(text: str) -> list[str]:
    """Return the lines of a module that have arguments, such as `dropout: Dropout(p=0.1)`: names of classes of scripts differ."""
    found = (_ARGUMENTS.match(line) for line in text.splitlines())
    return [f"{line['name'] or ''}: {line['text']}" for line in found if line]


def _match_names(one: RankRecord, other: RankRecord) -> dict[str, str]:
    """Return the names in the first record for parameters of the second one, by their order in the optimizers, if none is the same."""
    names: dict[str, str] = {}
    for optimizer, match in zip(one.optimizers, other.optimizers, strict=False):
        orders = [[name for group in each.parameters for name in group] for each in (optimizer, match)]
        if {*orders[0]}.isdisjoint(orders[1]) and len(orders[0]) == len(orders[1]):
            names |= dict(zip(orders[1], orders[0], strict=True))
    return names


# Steps


class _Walk:
    """Walk through the steps of two runs in causal order."""

    def __init__(self, found: Comparison) -> None:
        self._found = found
        self._first, self._second = found.runs
        self._is_aligned = self._first.world_size == self._second.world_size
        self._used = [_find_used_generators(run) for run in found.runs]
        self._has_parts = _hold_other_parts(found)
        self._names = _match_names(self._first.first, self._second.first)
        self._before = 0.0
        self._last_parameters: Mapping[str, Summary] = {}

    def run(self) -> None:
        """Fill the comparison."""
        found = self._found
        for step in found.steps:
            bound = self._build_bound(step)
            differences = list(self._compare_step(step, bound))
            self._add(step, differences, bound)
        counts = [max(run.steps) for run in found.runs]
        shorter, longer = sorted(found.runs, key=lambda run: max(run.steps))
        # A step that the shorter run would have recorded.
        missing = [
            step
            for step in longer.steps
            if step > max(shorter.steps) and shorter.first.selection.has_step(step)
        ]
        if missing and shorter.is_complete:
            detail = f"the last recorded step is {counts[0]} in the first run, {counts[1]} in the second"
            difference = Difference(missing[0], None, "steps", "", detail)
            found.first = found.first or difference
            found.beyond = found.beyond or difference

    def _build_bound(self, step: int) -> Bound:
        record = self._first.first.steps[step]
        world_size = max(self._first.world_size, self._second.world_size)
        settings = [dict(run.first.head.settings) for run in self._found.runs]
        parameters = _list_summaries(record.parameters, record)
        before = self._last_parameters or _list_summaries(record.before or (), record)
        changes = [
            compare_sketches(summary.sketch, before[name].sketch) / summary.norm
            for name, summary in parameters.items()
            if name in before and summary.norm
        ]
        self._last_parameters = parameters
        return build_bound(record, world_size, settings, self._before, max(changes, default=0.0))

    def _add(self, step: int, differences: Sequence[Difference], bound: Bound) -> None:
        found = self._found
        sizes: dict[str, float] = {}
        is_first_step = found.first is None
        for one in differences:
            if one.stage == "random":
                if all((one.rank, one.name) != (other.rank, other.name) for other in found.random):
                    found.random.append(one)
                continue
            if found.first is None:
                found.first, found.explanation = one, bound.explain()
            if found.beyond is None and not one.is_explained:
                found.beyond, found.explanation = one, bound.explain()
            size = 1.0 if one.size is None else one.size
            sizes[one.stage] = max(sizes.get(one.stage, 0.0), size)
            if is_first_step and one.size is not None:
                found.layers.setdefault(one.stage, []).append((one.name, one.size))
        changed = [one.size for one in differences if one.stage == "parameters" and one.size is not None]
        self._before = max(changed, default=0.0)
        losses = tuple(_average_loss(run, step) for run in found.runs)
        found.points.append(Point(step, (losses[0], losses[1]), sizes, bound.computed))

    def _compare_step(self, step: int, bound: Bound) -> Iterator[Difference]:
        compare_all = self._compare_aligned if self._is_aligned else self._compare_sizes
        yield from compare_all(step, bound)

    # Runs of one world size

    def _compare_aligned(self, step: int, bound: Bound) -> Iterator[Difference]:
        ranks = sorted(self._first.ranks.keys() & self._second.ranks.keys())
        pairs = [
            _Pair(
                step,
                rank,
                self._first.ranks[rank].steps[step],
                self._second.ranks[rank].steps[step],
                bound,
                self._has_parts,
                self._find_tensors(step, rank, rank),
                self._names,
            )
            for rank in ranks
        ]
        for pair in pairs:
            yield from self._compare_starts(pair, pair.rank)
        counts = {len(record.passes) for pair in pairs for record in (pair.first, pair.second)}
        # A script that leaves out its step clips after the passes that both runs have, and goes on with more of them.
        clips = {record.clipped_after for pair in pairs for record in (pair.first, pair.second)}
        clipped = clips.pop() if len(clips) == 1 else max(counts)
        for number in range(max(counts)):
            if number == clipped:
                yield from self._compare_clipping(pairs)
            for difference in self._compare_passes(number, pairs):
                yield difference if counts == {1} else replace(difference, micro_batch=number + 1)
        if clipped >= max(counts):
            yield from self._compare_clipping(pairs)
        for pair in pairs:
            yield from pair.compare("read", bound.computed)
        updates = [list(pair.compare_updates()) for pair in pairs]
        for stage in _UPDATES:
            yield from (one for of_rank in updates for one in of_rank if one.stage == stage)

    def _compare_clipping(self, pairs: Sequence[_Pair]) -> Iterator[Difference]:
        for pair in pairs:
            yield from pair.compare("before_clipping", pair.bound.computed)
        for pair in pairs:
            yield from pair.compare_clipping()

    def _find_tensors(self, step: int, rank: int, other: int) -> tuple[TensorFile, TensorFile] | None:
        records = self._first.ranks[rank], self._second.ranks[other]
        first, second = (
            TensorFile(one.path / TENSORS_FILE.format(step)) if one.path and one.selection.tensors else None
            for one in records
        )
        return None if first is None or second is None else (first, second)

    def _compare_starts(self, pair: _Pair, rank: int | None) -> Iterator[Difference]:
        """Compare what a step begins with, but for what the step before has left: that is compared there."""
        starts = []
        left = []
        for run, record in ((self._first, pair.first), (self._second, pair.second)):
            before = None if rank is None else run.ranks[rank].steps.get(pair.step - 1)
            passed = {} if before is None else {**dict(before.parameters), **dict(_list_buffers(before))}
            starts.append(record.before)
            left.append({name for name, digest in record.before or () if passed.get(name) == digest})
        if None not in starts:
            unchanged = left[0] & left[1]
            entries = [[one for one in each or () if one[0] not in unchanged] for each in starts]
            yield from pair.compare("before", pair.bound.rounding, entries)

    def _compare_passes(self, number: int, pairs: Sequence[_Pair]) -> Iterator[Difference]:
        passes: list[tuple[_Pair, ForwardPass, ForwardPass]] = []
        for pair in pairs:
            lengths = len(pair.first.passes), len(pair.second.passes)
            if number < min(lengths):
                passes.append((pair, pair.first.passes[number], pair.second.passes[number]))
            elif number == min(lengths):
                detail = f"{lengths[0]} forward passes in the step of the first run, {lengths[1]} in that of the second"
                yield pair.differ("batch", "", detail, is_structural=True)
        for stage in _OF_PASSES:
            for pair, first, second in passes:
                yield from self._compare_stage(stage, number, pair, first, second)

    def _compare_stage(
        self, stage: str, number: int, pair: _Pair, first: ForwardPass, second: ForwardPass
    ) -> Iterator[Difference]:
        if stage in {"batch", "inputs"}:
            name = "batches" if stage == "batch" else stage
            if difference := _compare_batches(getattr(first, name), getattr(second, name)):
                yield pair.differ(stage, *difference)
        elif stage == "random":
            for name in sorted(first.random.keys() & second.random.keys()):
                if first.random[name] != second.random[name] and any(name in used for used in self._used):
                    yield pair.differ(stage, name, "the states differ")
        elif stage == "mode":
            if first.mode != second.mode:
                yield pair.differ(stage, "", f"{first.mode or 'none'} and {second.mode or 'none'}")
        elif stage == "loss":
            yield from pair.compare_losses(first, second)
        else:
            yield from pair.compare(
                stage,
                pair.bound.computed,
                (getattr(first, stage), getattr(second, stage)),
                None if stage == "left" else number,
            )

    # Runs of two world sizes

    def _compare_sizes(self, step: int, bound: Bound) -> Iterator[Difference]:
        """Compare what does not depend on the number of ranks: all samples, averages over ranks, and what the first rank holds."""
        runs = self._found.runs
        records = [run.first.steps[step] for run in runs]
        files = self._find_tensors(step, min(runs[0].ranks), min(runs[1].ranks))
        pair = _Pair(step, None, records[0], records[1], bound, self._has_parts, files, self._names)
        yield from self._compare_starts(pair, min(runs[0].ranks))
        has_all = all(len(run.ranks) == run.world_size for run in runs)
        if has_all and (detail := _compare_samples(*(_count_samples(run, step) for run in runs))):
            yield pair.differ("batch", "", detail)
        one, other = (_average_loss(run, step) if has_all else None for run in runs)
        if one is not None and other is not None and one != other:
            size = abs(one - other) / max(abs(one), abs(other))
            detail = f"{one:.9g} and {other:.9g} on average"
            yield replace(pair.differ("loss", "", detail), size=size, bound=bound.computed)
        for stage in ("gradients", "after_backward"):
            averages = [_average_gradients(run, step, stage) for run in runs]
            if has_all and all(averages) and not (self._has_parts and stage == "after_backward"):
                yield from _compare_averages(averages, step, stage, bound)
        yield from pair.compare("before_clipping", bound.computed)
        yield from pair.compare_clipping()
        yield from pair.compare("read", bound.computed)
        yield from pair.compare_updates()


def _is_sharded(run: Run) -> bool:
    return not all(model.is_local for model in run.first.models)


def _hold_other_parts(found: Comparison) -> bool:
    """Return whether the ranks of two runs hold other parts of parameters."""
    first, second = found.runs
    if not (_is_sharded(first) or _is_sharded(second)):
        return False
    layouts = (variable_name("parallel"), variable_name("fully_shard"), "world size")
    return _is_sharded(first) != _is_sharded(second) or any(
        one.name.startswith(layouts) for one in found.settings
    )


# Comparisons of one stage


@dataclass(frozen=True)
class _Pair:
    """The records of a step of both runs, of one rank or of the first ones."""

    step: int
    rank: int | None
    first: StepRecord
    second: StepRecord
    bound: Bound
    has_parts: bool = False
    """True if the ranks of the runs hold other parts of parameters."""
    files: tuple[TensorFile, TensorFile] | None = None
    """The files with the tensors of the step, if both records may have one."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The names that the first run has for parameters of the second one, if it has none of the same name."""

    def differ(self, stage: str, name: str, detail: str, *, is_structural: bool = False) -> Difference:
        """Return a difference that is no matter of size."""
        return Difference(self.step, self.rank, stage, name, detail, is_structural=is_structural)

    def compare(
        self, stage: str, limit: float, entries: Any = None, number: int | None = None
    ) -> Iterator[Difference]:
        """Compare the tensors of a stage by name, or by position if no names are equal.

        Args:
            stage: The stage.
            limit: The relative difference that the order of sums explains.
            entries: The tensors of both; by default those that the records have under the name of the stage.
            number: The number of the forward pass in the step; None if the stage has only one.
        """
        first, second = entries or (getattr(self.first, stage), getattr(self.second, stage))
        if first is None or second is None or (self.has_parts and stage not in _WHOLE):
            return
        if self.has_parts and stage == "gradients":
            shapes = [
                {name: record.values[digest].shape for name, digest in each if digest in record.values}
                for record, each in ((self.first, first), (self.second, second))
            ]
            same = {name for name, shape in shapes[0].items() if shapes[1].get(name) == shape}
            first, second = ([one for one in each if one[0] in same] for each in (first, second))
        second = [(self._find_counterpart(name), digest) for name, digest in second]
        names = {name for name, _ in first}, {name for name, _ in second}
        if stage == "modules":  # those of another structure have no counterpart
            first, second = (
                [one for one in entries if one[0] in names[0] & names[1]] for entries in (first, second)
            )
        elif names[0].isdisjoint(names[1]) and len(first) == len(second) and stage not in _ORDERED:
            second = [(name, digest) for (name, _), (_, digest) in zip(first, second, strict=True)]
        remaining: dict[str, list[str]] = {}
        for name, digest in second:
            remaining.setdefault(name, []).append(digest)
        found = []
        for name, digest in first:
            others = remaining.get(name)
            if not others:
                found.append(self.differ(stage, name, "only the first run has it", is_structural=True))
            elif digest != (other := others.pop(0)):
                difference = self._compare_tensors(stage, name, (digest, other), limit)
                found.append(self._read_exactly(difference, (digest, other), number))
        found += [
            self.differ(stage, name, "only the second run has it", is_structural=True)
            for name, others in remaining.items()
            if others
        ]
        if stage not in _ORDERED:
            found.sort(key=lambda one: math.inf if one.size is None else one.size, reverse=True)
        yield from found

    def _find_counterpart(self, name: str) -> str:
        """Return the name that the first run has for a parameter of the second one, or for a part of its state."""
        if name in self.names:
            return self.names[name]
        parameter, dot, key = name.rpartition(".")
        return f"{self.names[parameter]}{dot}{key}" if parameter in self.names else name

    def _compare_tensors(self, stage: str, name: str, digests: tuple[str, str], limit: float) -> Difference:
        one, other = self.first.values.get(digests[0]), self.second.values.get(digests[1])
        if one is None or other is None:
            return self.differ(stage, name, "the values differ")
        relative = measure_difference(one, other)
        if relative is None:
            texts = [
                f"{each.dtype}{list(each.shape)}"
                + (f", {each.non_finite:.2%} not finite" if each.non_finite else "")
                for each in (one, other)
            ]
            return self.differ(stage, name, f"{texts[0]} and {texts[1]}")
        if self._is_noise(stage, name, one, other):
            limit = _ANY_SIZE
        detail = f"norms {one.norm:.7g} and {other.norm:.7g}"
        if ratio := _find_ratio(one.sketch, other.sketch):
            detail += f": the second is {ratio:.4g} times the first"
        return replace(self.differ(stage, name, detail), size=relative, bound=limit)

    def _read_exactly(
        self, difference: Difference, digests: tuple[str, str], number: int | None
    ) -> Difference:
        """Return a difference with the size of that of the tensors themselves, if both records have kept them."""
        if self.files is None or difference.size is None:
            return difference
        key = f"{difference.stage}{'' if number is None else f'.{number}'}/{difference.name}"
        values = [file.read(key, digest) for file, digest in zip(self.files, digests, strict=True)]
        if values[0] is None or values[1] is None or values[0].shape != values[1].shape or not values[0].size:
            return difference
        size, text = compare_values(values[0], values[1])
        return replace(difference, size=size, detail=f"{difference.detail}; {text}")

    def _is_noise(self, stage: str, name: str, one: Summary, other: Summary) -> bool:
        """Return whether a gradient, or what the optimizer computes from it, may be rounding only."""
        if stage in _GRADIENTS:
            return self.bound.is_noise(one) and self.bound.is_noise(other)
        if stage not in {"state", "parameters"}:
            return False
        parameter = name if stage == "parameters" else name.rpartition(".")[0]
        return parameter in self._noise

    @cached_property
    def _noise(self) -> set[str]:
        """The parameters whose gradients may be rounding only."""
        return {
            name
            for name, digest in self.first.read
            if digest in self.first.values and self.bound.is_noise(self.first.values[digest])
        }

    def compare_losses(self, first: ForwardPass, second: ForwardPass) -> Iterator[Difference]:
        """Compare the losses of a pass."""
        if len(first.losses) != len(second.losses):
            counts = f"{len(first.losses)} and {len(second.losses)} values"
            yield self.differ("loss", "", counts, is_structural=True)
            return
        for (digest, value), (other_digest, other) in zip(first.losses, second.losses, strict=True):
            if digest == other_digest:
                continue
            if value is None or other is None:
                yield self.differ("loss", "", "the values differ")
                continue
            difference = self.differ("loss", "", f"{value:.9g} and {other:.9g}")
            largest = max(abs(value), abs(other))
            if math.isfinite(value) and math.isfinite(other):
                size = abs(value - other) / largest if largest else 0.0
                difference = replace(difference, size=size, bound=self.bound.computed)
            yield difference

    def compare_clipping(self) -> Iterator[Difference]:
        """Compare the function that clips, and its limit."""
        one, other = self.first.clipping, self.second.clipping
        if one != other:
            yield self.differ("clipping", "", f"{one or 'none'} and {other or 'none'}")

    def compare_updates(self) -> Iterator[Difference]:
        """Compare the options of the optimizer, and its results."""
        one, other = self.first, self.second
        for name in [*one.options, *(name for name in other.options if name not in one.options)]:
            values = one.options.get(name, "not set"), other.options.get(name, "not set")
            if values[0] != values[1] and not name.endswith(_IMPLEMENTATIONS):
                yield self.differ("options", name, f"{values[0]} and {values[1]}")
        if one.rates != other.rates:
            rates = [", ".join(f"{rate:.9g}" for rate in each.rates) for each in (one, other)]
            yield self.differ("rates", "", f"{rates[0]} and {rates[1]}")
        yield from self.compare("state", 2 * self.bound.computed)
        yield from self.compare("parameters", self.bound.parameters)


def _find_ratio(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the factor between two tensors, if one is a multiple of the other and not nearly equal."""
    square = sum(a * a for a in first)
    size = sum(b * b for b in second) ** 0.5
    if not square or not size or len(first) < 2:  # noqa: PLR2004 - one number is always a multiple
        return None
    ratio = sum(a * b for a, b in zip(first, second, strict=True)) / square
    rest = compare_sketches([ratio * a for a in first], second)
    return ratio if rest < _SAME_RATIO * size and abs(ratio - 1) > 10 * _SAME_RATIO else None


def _compare_batches(first: Sequence[Batch], second: Sequence[Batch]) -> tuple[str, str] | None:
    """Return the name and the description of the first column that differs, by its position: sources are lines of scripts."""
    if not first or not second:
        return None
    for one, other in zip(first, second, strict=False):
        if one.name == other.name and one.rows != other.rows:
            return one.name, _describe_rows(one, other)
    if len(first) != len(second) and [one.name for one in first if one.name != "index"] != [
        one.name for one in second if one.name != "index"
    ]:
        return "", f"{len(first)} and {len(second)} columns"
    return None


def _describe_rows(one: Batch, other: Batch) -> str:
    where = f" ({one.source})" if one.source != "model" else ""
    if Counter(one.rows) == Counter(other.rows):
        return f"the same {len(one.rows)} samples in another order{where}"
    if len(one.rows) != len(other.rows):
        return f"{len(one.rows)} and {len(other.rows)} samples{where}"
    if one.name == "index":
        return f"samples {_join(one.rows)} and {_join(other.rows)}{where}"
    count = sum(a != b for a, b in zip(one.rows, other.rows, strict=True))
    return f"{count} of {len(one.rows)} samples have other values{where}"


def _join(rows: Sequence[str]) -> str:
    return ", ".join(rows[:_MAX_SHOWN]) + (", ..." if len(rows) > _MAX_SHOWN else "")


# Numbers of all ranks


def _list_passes(run: Run, step: int) -> list[list[ForwardPass]]:
    return [list(record.steps[step].passes) for record in run.ranks.values()]


def _count_samples(run: Run, step: int) -> dict[str, Counter[str]]:
    """Return the samples that all ranks have used for a step, by column."""
    counts: dict[str, Counter[str]] = {}
    for passes in _list_passes(run, step):
        for one in passes:
            for batch in one.batches or one.inputs:
                counts.setdefault(batch.name, Counter()).update(batch.rows)
    return counts


def _compare_samples(first: Mapping[str, Counter[str]], second: Mapping[str, Counter[str]]) -> str:
    # Ranks divide a list of samples, or each tensor of a list: one of both is a partition.
    divided = {
        name[:-2] for name, counts in first.items() if name.endswith("[]") and counts == second.get(name)
    }
    for name, counts in first.items():
        if name.endswith(("[]", "()")) or name.rpartition(".")[0] in divided:
            continue
        if name in second and counts != second[name]:
            totals = counts.total(), second[name].total()
            if totals[0] != totals[1]:
                return f"{totals[0]} and {totals[1]} samples on all ranks"
            only = list((counts - second[name]).elements()), list((second[name] - counts).elements())
            shown = f": {_join(only[0])} and {_join(only[1])}" if name == "index" else ""
            return f"{len(only[0])} of {totals[0]} samples of all ranks are others{shown}"
    return ""


def _count_rows(one: ForwardPass) -> int:
    return max((len(batch.rows) for batch in one.batches or one.inputs), default=1)


def _average_loss(run: Run, step: int) -> float | None:
    """Return the average of the losses of all ranks and micro-batches, weighted by their samples."""
    total, weight = 0.0, 0
    for passes in _list_passes(run, step):
        for one in passes:
            values = [value for _, value in one.losses]
            if not values or None in values:
                return None
            total += sum(value for value in values if value is not None) * _count_rows(one)
            weight += _count_rows(one)
    return total / weight if weight else None


def _average_gradients(run: Run, step: int, stage: str) -> dict[str, tuple[Summary, tuple[float, ...]]]:
    """Return the averages over ranks of the sketches of gradients, with the summary of one of them; empty if one rank has none."""
    sums: dict[str, tuple[Summary, list[float]]] = {}
    if len({_count_rows(one) for passes in _list_passes(run, step) for one in passes}) > 1:
        return {}  # the record does not have the weights with which the script averages
    for record in (rank.steps[step] for rank in run.ranks.values()):
        # Gradients accumulate: those of the last pass are of all.
        entries = getattr(record.passes[-1], stage) if record.passes else None
        if entries is None:
            return {}
        for name, digest in entries:
            if digest in record.values:
                summary = record.values[digest]
                _, sketch = sums.setdefault(name, (summary, [0.0] * len(summary.sketch)))
                sketch[:] = [a + b / len(run.ranks) for a, b in zip(sketch, summary.sketch, strict=True)]
    return {name: (summary, tuple(sketch)) for name, (summary, sketch) in sums.items()}


def _compare_averages(
    averages: Sequence[Mapping[str, tuple[Summary, tuple[float, ...]]]], step: int, stage: str, bound: Bound
) -> Iterator[Difference]:
    first, second = averages
    for name, (summary, sketch) in first.items():
        if name not in second or sketch == second[name][1]:
            continue
        other = second[name][1]
        norms = [sum(value * value for value in each) ** 0.5 for each in (sketch, other)]
        size = compare_sketches(sketch, other) / max(norms) if max(norms) else 0.0
        # The sketch of a small tensor is exact but for the rounding of float64.
        if size < 1e-14:  # noqa: PLR2004
            continue
        limit = _ANY_SIZE if bound.is_noise(summary) else bound.computed
        ratio = _find_ratio(sketch, other)
        detail = "averages over the ranks" + (f": the second is {ratio:.4g} times the first" if ratio else "")
        yield Difference(step, None, stage, name, detail, size, limit)


def _list_buffers(step: StepRecord) -> Sequence[Entry]:
    return step.passes[-1].buffers if step.passes else ()


def _list_summaries(entries: Iterable[Entry], record: StepRecord) -> dict[str, Summary]:
    return {name: record.values[digest] for name, digest in entries if digest in record.values}


def _find_used_generators(run: Run) -> set[str]:
    """Return the generators from which the script has drawn while it was recorded: others have had no effect."""
    used: set[str] = set()
    for record in run.ranks.values():
        states: dict[str, set[str]] = {}
        for step in record.steps.values():
            for random in (*(one.random for one in step.passes), step.random):
                for name, state in random.items():
                    states.setdefault(name, set()).add(state)
        used |= {name for name, values in states.items() if len(values) > 1}
    return used


# Notes


def _list_notes(found: Comparison) -> Iterator[str]:
    """Yield what limits the result, and what else the records show."""
    first, second = found.runs
    for run in found.runs:
        yield from _list_gaps(run, found.steps)
        if (step := _find_split(run)) is not None:
            yield f"{run.name}: ranks hold different parameters after step {step[0]}, first {step[1]}"
    if _hold_other_parts(found):
        yield (
            "The ranks hold other parts of parameters: these, their exchanged gradients and the state of the optimizer are not compared"
        )
    if first.world_size != second.world_size:
        yield (
            "The world sizes differ: samples are compared over all ranks, losses and gradients as averages, the rest of rank 0; "
            "random states, inputs and outputs of modules are not compared"
        )
    if found.effect is not None:
        yield from _list_limits(found, found.effect)


def _list_gaps(run: Run, steps: Iterable[int]) -> Iterator[str]:
    """Yield what the record of a run does not have."""
    if missing := run.world_size - len(run.ranks):
        yield f"{run.name}: the records of {missing} of {run.world_size} ranks are not on this machine, or have no step"
    if run.remark:
        yield f"{run.name}: {run.remark}"
    for rank, one in run.ranks.items():
        if one.end:
            yield f"{run.name}: rank {rank} is recorded in part: {one.end}"
        elif one.end is None and not run.remark:
            yield (
                f"{run.name}: the record of rank {rank} has no end, after step {max(one.steps)}: the process was ended from outside, "
                "or still runs. Its number of steps is not compared"
            )
    if skipped := _list_skipped(run, steps):
        yield f"{run.name}: not recorded, and not compared: {_join(skipped)}"
    if missing_gradients := _list_missing_gradients(run, steps):
        yield (
            f"{run.name}: gradients before the exchange are not recorded, since each rank holds a part of a parameter: "
            f"{_join(missing_gradients)}"
        )


def _list_skipped(run: Run, steps: Iterable[int]) -> list[str]:
    names = (name for one in run.ranks.values() for step in steps for name in one.steps[step].skipped)
    return list(dict.fromkeys(names))


def _list_missing_gradients(run: Run, steps: Iterable[int]) -> list[str]:
    """Return the parameters of a sharded model whose gradients of one rank are not recorded, though the optimizer reads one."""
    missing: dict[str, None] = {}
    if _is_sharded(run):
        for record in (run.first.steps[step] for step in steps):
            recorded = {name for one in record.passes for name, _ in one.gradients or ()}
            missing |= dict.fromkeys(name for name, _ in record.read if name not in recorded)
    return list(missing)


def _list_limits(found: Comparison, effect: Difference) -> Iterator[str]:
    """Yield what the record cannot show about a difference."""
    before = [step for step in found.steps if step < effect.step]
    if effect.stage == "before" and before and before[-1] != effect.step - 1:
        yield (
            f"The cause is in the steps {before[-1]} to {effect.step - 1}, some of which are not recorded. Record them: "
            f"--record-numerics steps:{before[-1]}-{effect.step}"
        )
    elif effect.stage == "before" and before:
        yield (
            f"Step {before[-1]} has left it equal: the script has changed it between the steps, as an average of weights, a load or a "
            "forward pass in training mode does"
        )
    if effect.stage in {"loss", "gradients"} and not _has_modules(found, effect.step):
        yield (
            "The records have no outputs of modules: the difference arose in the forward pass, in a module that is not known. "
            f"Record them: --record-numerics steps:{effect.step},modules"
        )
    if effect.stage == "modules":
        yield _describe_module(found, effect)
    first, beyond = found.first, found.beyond
    if first is not None and beyond is not None and first is not beyond and first.size is not None:
        if effect is first:
            yield (
                f"The first difference is no larger than the order of sums explains ({first.size:.1e}). The first larger one is at "
                f"{format_place(beyond)}"
            )
        elif beyond.size is not None:
            yield (
                f"Differences that the order of sums explains begin at {format_place(first)} ({first.size:.1e}). The record cannot "
                "exclude that the larger one has grown from them"
            )
    others = {one.name: one.step for one in found.random if one is not found.cause}
    if others and not any(one is found.cause for one in found.random):
        listing = ", ".join(f"{name} from step {step} on" for name, step in others.items())
        yield (
            f"The states of random number generators differ ({listing}); they do not explain the first difference of another number"
        )


def _describe_module(found: Comparison, effect: Difference) -> str:
    """Return between which outputs a difference of modules arose."""
    passes = found.runs[0].ranks[effect.rank or 0].steps[effect.step].passes
    names = [name for name, _ in passes[(effect.micro_batch or 1) - 1].modules or ()]
    before = names[: names.index(effect.name)][-1:] if effect.name in names else []
    where = f"between the output of {before[0]}, which is equal, and that of" if before else "in or before"
    others = ", or of parameters, which are not compared" if _hold_other_parts(found) else ""
    return f"The difference arose {where} {effect.name}: of this module, or of functions that the script calls there{others}"


def _has_modules(found: Comparison, step: int) -> bool:
    return (
        all(one.modules is not None for run in found.runs for one in run.first.steps[step].passes)
        if step in found.steps
        else True
    )


def _find_split(run: Run) -> tuple[int, str] | None:
    """Return the first step after which ranks that should hold the same parameters do not, and the parameter."""
    if len(run.ranks) < 2 or _is_sharded(run):  # noqa: PLR2004
        return None
    for step in run.steps:
        entries = [record.steps[step].parameters for record in run.ranks.values()]
        for one in entries[1:]:
            for (name, digest), (other_name, other) in zip(entries[0], one, strict=False):
                if name == other_name and digest != other:
                    return step, name
    return None


def format_place(difference: Difference) -> str:
    """Return where a difference is, as in `step 3, rank 1: the output of a module (layers.2)`."""
    parts = [f"step {difference.step}"]
    if difference.micro_batch is not None:
        parts.append(f"micro-batch {difference.micro_batch}")
    if difference.rank is not None:
        parts.append(f"rank {difference.rank}")
    name = f" ({difference.name})" if difference.name else ""
    return f"{', '.join(parts)}: {STAGES[difference.stage]}{name}"
