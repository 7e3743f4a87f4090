"""`accel migrate --verify`: comparison of the first steps of a script before and after its conversion, on one process and on two."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import repeat
from pathlib import Path

from accel_cli.errors import UsageError
from accel_cli.extensions.migrate.counter_runs import DATA_DRAWS, DRAWS, NORMS, ORDER, PADDING, SUM
from accel_cli.extensions.migrate.files import STDIN, migrate_file
from accel_cli.extensions.migrate.scratch_copy import find_root
from accel_cli.extensions.migrate.step_records import INDEX, Step
from accel_cli.extensions.migrate.verification_runs import (
    RunResult,
    Trial,
    VerifyOptions,
    VerifyRun,
    run_trial,
)

__all__ = [
    "ComparisonResult",
    "ConvertedScript",
    "Divergence",
    "Pair",
    "SampleComparison",
    "compare_on_two",
    "compare_ranks",
    "compare_samples",
    "find_difference_on_two",
    "find_first_difference",
    "read_versions",
    "verify",
]

_GRADIENT_TOLERANCE = 1e-3
_HALF_TOLERANCE = 3e-2
"""The tolerance of losses and gradients in 16 bits, whose sums round by a few thousandths."""
_UPDATE_TOLERANCE = 5e-2
"""Adam divides by the size of the gradients, so that rounding of those near zero changes weights, and not the function."""
_SUM_TOLERANCE = 0.05
"""The gradients of a sum over samples are N times those of N processes, up to this."""
_HALF = re.compile(r"\bautocast\b|\bmixed_precision\b|\bbfloat16\b|\bfloat16\b|\.half\(\)")
_RANKS = re.compile(r"\binit_process_group\b|[\"'](?:LOCAL_)?RANK[\"']")
_GPU = re.compile(r"NVIDIA|CUDA|_cuda_")
_PREPARE = "Prepare the loader, or let each process compute its part of the samples."
_DIVIDED, _REPEATED, _PADDED, _OTHER, _UNKNOWN = "divided", "repeated", "padded", "other", "unknown"
_STATES: Mapping[str, str] = {
    _REPEATED: "both processes consumed the same samples in step {step} ({source}), so that two do the work of one twice. "
    + _PREPARE,
    _PADDED: "In step {step}, samples are repeated to fill the batches of both processes ({source}).",
    _OTHER: "In step {step}, the samples of both processes together are not those of one ({source}).",
}
"""Sentences about steps whose samples are not a partition; the first one that applies is written."""
_OTHER_ORDER = (
    " DistributedSampler shuffles by its own seed, and the converted script like a DataLoader: the run before the conversion has the order "
    "of the latter here."
)
_CHANGES: Mapping[str, str] = {
    NORMS: "with BatchNorm that uses running statistics",
    DRAWS: "without random numbers in the step",
    DATA_DRAWS: "with random numbers of the data set that depend on the sample",
    PADDING: "without padding",
    SUM: "with losses multiplied by 2",
}
_SUM_REASON = (
    "The loss is half as large on two processes, as for a sum over the samples, or a division by a constant batch size or by the number of "
    "processes; gradients are averaged. Divide by the number of samples that the process has. A constant batch size may stay, if it is "
    "that of one process."
)


@dataclass(frozen=True)
class ConvertedScript:
    """A script and its conversion."""

    script: Path
    before: Mapping[Path, str]
    """The texts of the scripts before the conversion, by path."""
    after: Mapping[Path, str]
    options: VerifyOptions
    devices: int
    """The number of GPUs of this machine."""


@dataclass(frozen=True)
class ComparisonResult:
    """The result of a comparison."""

    rows: tuple[tuple[str, ...], ...]
    """The table: step, losses before, after and on two processes, and largest differences of weights after and on two processes."""
    sentences: tuple[str, ...]
    is_equal: bool


@dataclass(frozen=True)
class Divergence:
    """The first step at which two runs part, counted from 1, and the reason; step 0 if they are equal."""

    step: int = 0
    reason: str = ""


def read_versions(paths: Sequence[Path]) -> tuple[dict[Path, tuple[str, str]], str]:
    """Return the texts of scripts before and after their conversion, and the places left as words; empty without one.

    A script that is converted already is compared with `train.py.orig`, which `--write` keeps.

    Raises:
        UsageError: A path is not a Python script, or nothing is converted.
    """
    versions: dict[Path, tuple[str, str]] = {}
    left = 0
    for path in paths:
        if path == STDIN or path.suffix != ".py" or not path.is_file():
            raise UsageError(
                f"Cannot verify {path}: expected the path of a Python script that trains, with the suffix .py."
            )
        file = migrate_file(path, path.parent)
        left += len(file.findings)
        original = path.with_name(f"{path.name}.orig")
        before = file.before
        if not file.is_changed and original.is_file():
            before = original.read_bytes().decode("utf-8", errors="replace")
        versions[path] = (before, file.after)
    if all(before == after for before, after in versions.values()):
        names = " and ".join(map(str, paths))
        raise UsageError(
            f"Cannot verify {names}: nothing is converted, and the script before a conversion is not found as {names}.orig. "
            f"See accel migrate {names}."
        )
    return versions, "" if not left else "1 place is" if left == 1 else f"{left} places are"


def verify(converted: ConvertedScript, report: Callable[[str], None]) -> ComparisonResult:
    """Run a script before and after its conversion, and compare the steps.

    Args:
        converted: The script.
        report: Called with a line before each run.

    Raises:
        UsageError: The script cannot be run as it is before the conversion.
    """
    root = find_root(converted.script, Path.cwd())
    arguments = tuple(_resolve_argument(one, root) for one in converted.options.arguments)
    with ExitStack() as stack:
        # A hidden folder, which is not copied if the script is in the folder of temporary files itself.
        scratch = stack.enter_context(
            tempfile.TemporaryDirectory(prefix=".accel-verify-", ignore_cleanup_errors=True)
        )
        trial = Trial(
            root=root,
            script=converted.script.resolve().relative_to(root),
            scratch=Path(scratch).resolve(),
            options=replace(converted.options, arguments=arguments),
        )
        return _compare_runs(converted, trial, report)


def _resolve_argument(argument: str, root: Path) -> str:
    """Return an argument of the script with an absolute path if it names a file outside of the folder that is copied."""
    option, equals, value = argument.rpartition("=")
    path = Path(value)
    if not value or path.is_absolute() or not path.exists():
        return argument
    is_copied = Path.cwd().resolve() == root and path.resolve().is_relative_to(root)
    return argument if is_copied else f"{option}{equals}{path.absolute()}"


def _compare_runs(
    converted: ConvertedScript, trial: Trial, report: Callable[[str], None]
) -> ComparisonResult:
    before, after = (
        {path.resolve().relative_to(trial.root): text for path, text in texts.items()}
        for texts in (converted.before, converted.after)
    )
    on_cpu = converted.devices == 0
    report(f"run before the conversion, 1 process, {_name_device(on_cpu=on_cpu)}")
    run = VerifyRun("before", before, on_cpu=on_cpu, has_rank=False)
    first = run_trial(trial, run)
    if not first.steps and _RANKS.search(before[trial.script]):
        report("run before the conversion, 1 process, with the variables of torchrun")
        run = replace(run, name="before-torchrun", has_rank=True)
        first = run_trial(trial, run)
    if first.error or not first.steps:
        raise UsageError(_describe_failure(converted.script, first))
    order = ""
    if first.end.has_distributed_order:
        report("run before the conversion, 1 process, with the order of a DataLoader that shuffles")
        ordered = replace(run, name="before-ordered", changes=(ORDER,))
        result = run_trial(trial, ordered)
        if not result.error:
            run, first, order = ordered, result, _OTHER_ORDER
    report(f"run after the conversion, 1 process, {_name_device(on_cpu=on_cpu)}")
    one_run = VerifyRun("after", after, reference=run.name, on_cpu=on_cpu)
    one = run_trial(trial, one_run)
    part = find_first_difference(first, one)
    if 0 < part.step <= len(one.steps) and one.end.workers:
        part = replace(part, reason=part.reason + _test_workers(trial, run, one_run, report))
    seed = "" if first.end.is_seeded else " The script sets no seed of torch: every run began with 0."
    if part.step:
        sentences = [f"not equal on one process from step {part.step}: {part.reason}{order}{seed}"]
    else:
        steps = _count_steps(len(one.steps), converted.options.max_steps)
        sentences = [f"equal on one process: {steps}, largest difference 0.{order}{seed}"]
    if one.error or not one.steps:
        sentences.append("the run on two processes is left out")
        return ComparisonResult(_build_rows(first, one, None), tuple(sentences), is_equal=False)
    pair = _run_on_two(trial, after, converted.devices, one, report)
    verdict = compare_on_two(pair)
    sentences += verdict.sentences
    return ComparisonResult(
        _build_rows(first, one, pair.two), tuple(sentences), is_equal=verdict.is_equal and not part.step
    )


def _test_workers(trial: Trial, before: VerifyRun, after: VerifyRun, report: Callable[[str], None]) -> str:
    """Return that random numbers of workers cause a difference on one process, if it is gone without them; otherwise nothing."""
    report(f"run before and after the conversion, 1 process, {_CHANGES[DATA_DRAWS]}, to find the cause")
    old, new = (
        run_trial(
            trial, replace(run, name=f"{run.name}-draws", reference="", changes=(*run.changes, DATA_DRAWS))
        )
        for run in (before, after)
    )
    if old.error or new.error or find_first_difference(old, new).step:
        return ""
    return (
        f" {_start_sentence(_CHANGES[DATA_DRAWS])}, they are equal: workers draw other numbers after the conversion, since prepared "
        "loaders seed them for each batch."
    )


@dataclass(frozen=True)
class Pair:
    """The run on two processes, and the one on one process that it is compared with."""

    one_run: VerifyRun
    two_run: VerifyRun
    one: RunResult
    two: RunResult
    """The results of both."""
    run: Callable[[VerifyRun], RunResult]
    """Runs the script once more."""
    report: Callable[[str], None]
    failure: str = ""
    """The reason why two processes do not run with divided batches; empty if they do."""

    @property
    def where(self) -> str:
        """The devices of the two processes."""
        return "2 processes on the CPU, over gloo" if self.two_run.on_cpu else "2 processes on GPUs"

    @property
    def is_half(self) -> bool:
        """True if the script may compute in 16 bits."""
        return any(_HALF.search(text) for text in self.two_run.texts.values())


def _run_on_two(
    trial: Trial,
    after: Mapping[Path, str],
    devices: int,
    one: RunResult,
    report: Callable[[str], None],
) -> Pair:
    """Run the converted script on two processes, with divided batches if that is possible."""
    execute = partial(run_trial, trial)
    on_cpu = devices < 2  # noqa: PLR2004 - a GPU for each process
    one_run = VerifyRun("after", after, on_cpu=devices == 0)
    if devices == 1:
        report("run after the conversion, 1 process, cpu, since two processes need two GPUs")
        one_run = VerifyRun("after-cpu", after)
        one = run_trial(trial, one_run)
    run = VerifyRun("two", after, world_size=2, reference=one_run.name, is_split=True, on_cpu=on_cpu)
    report(f"run after the conversion, 2 processes, {_name_device(on_cpu=on_cpu)}, batches of half the size")
    two = run_trial(trial, run)
    failure = two.error
    if not failure or "--timeout" in failure:
        return Pair(one_run, run, one, two, execute, report)
    report(f"run after the conversion, 2 processes, batches as in the script, since halves fail ({failure})")
    run = replace(run, name="two-whole", reference="", is_split=False)
    whole = run_trial(trial, run)
    # A script that fails either way fails for another reason.
    return Pair(one_run, run, one, whole, execute, report, failure)


def compare_on_two(pair: Pair) -> ComparisonResult:
    """Return the sentences about two processes, without the table."""
    one, two, where = pair.one, pair.two, pair.where
    if two.error:
        why = f"the script ended after {_count_steps(len(two.steps))}: {two.error}."
        return ComparisonResult((), (f"not run on two processes ({where}): {why}",), is_equal=False)
    ranks = compare_ranks(two)
    samples = compare_samples(one, two)
    is_whole = bool(pair.failure)
    if not samples.is_divided and not samples.is_repeated:
        whole = compare_samples(one, two, batches_per_step=2)
        is_whole |= whole.is_divided
        samples = whole if whole.is_divided else samples
    if samples.is_repeated:
        text = f"not divided over two processes ({where}): {samples.reason}"
        return ComparisonResult((), (text,), is_equal=False)
    if is_whole:
        return _describe_whole_batches(pair, samples, ranks)
    part = find_difference_on_two(one, two, is_half=pair.is_half)
    if part.step:
        # Other samples are the cause.
        causes = () if _OTHER in samples.states[: part.step] else _test_causes(pair, samples, part)
        reasons = (part.reason, samples.reason, *causes)
        text = (
            f"not equal on two processes from step {part.step} ({where}): {' '.join(filter(None, reasons))}"
        )
        return ComparisonResult((), (text,), is_equal=False)
    if {_PADDED, _OTHER} & set(samples.states):
        text = f"not equal on two processes ({where}), although losses and weights are: {samples.reason}"
        return ComparisonResult((), (text,), is_equal=False)
    largest = max((one.difference.weights for one in two.steps if one.difference), default=0.0)
    text = f"equal on two processes up to rounding ({where}): {_count_steps(len(two.steps))}, largest difference {largest:.2g}."
    return ComparisonResult((), (f"{text} {samples.reason}", *_list_omissions(one, samples)), is_equal=True)


def _describe_whole_batches(pair: Pair, samples: SampleComparison, ranks: Divergence) -> ComparisonResult:
    """Compare two processes which each have batches of the size of one."""
    steps = _count_steps(len(pair.two.steps))
    if ranks.step:
        text = f"not equal on two processes from step {ranks.step} ({pair.where}): {ranks.reason}"
        return ComparisonResult((), (text,), is_equal=False)
    why = f" With halves, the script fails: {pair.failure.rstrip('.')}." if pair.failure else ""
    text = f"equal weights on both of two processes ({pair.where}): {steps}. {samples.reason}{why}"
    omitted = "not compared: losses, gradients and weights of two processes with those of one, since both have batches of its size"
    return ComparisonResult((), (text, omitted), is_equal=samples.is_divided)


def _list_omissions(one: RunResult, samples: SampleComparison) -> Iterator[str]:
    omitted = [] if samples.is_divided else ["the samples of each process"]
    if any(step.loss is None for step in one.steps):
        omitted.append("losses of steps without a backward pass from one number")
    if omitted:
        yield f"not compared: {', '.join(omitted)}"


def _test_causes(pair: Pair, samples: SampleComparison, part: Divergence) -> Iterator[str]:
    """Yield the causes of a difference that is gone in runs without them; a sentence if none is found."""
    if part.step > min(len(pair.one.steps), len(pair.two.steps)) or compare_ranks(pair.two).step == part.step:
        return
    old, new = (run.steps[part.step - 1] for run in (pair.one, pair.two))
    if _have_other_rates(old, new):
        return
    causes = _list_causes(pair, samples, part)
    is_sum = not _is_apart(old.gradients_norm, new.gradients_norm * len(pair.two.ranks), _SUM_TOLERANCE)
    tests = [causes] if causes else []
    tests += [{**causes, SUM: _SUM_REASON}] if causes or is_sum else []

    @cache
    def is_equal_with(changes: frozenset[str]) -> bool:
        return _is_equal_with(pair, [change for change in _CHANGES if change in changes])

    found = next((tested for tested in tests if is_equal_with(frozenset(tested))), None)
    if found is None:
        yield "The cause was not found."
        return
    for change in tuple(found):
        others = {one: reason for one, reason in found.items() if one != change}
        if others and is_equal_with(frozenset(others)):
            found = others
    yield f"{_start_sentence(_describe_changes(found))}, they are equal."
    yield from found.values()


def _is_equal_with(pair: Pair, changes: Collection[str]) -> bool:
    """Run one process and two with changes, and return if they are equal then."""
    pair.report(
        f"run after the conversion, 1 process and 2 processes, {_describe_changes(changes)}, to find the cause"
    )
    name = "-".join(changes)
    one_run = replace(pair.one_run, name=f"one-{name}", changes=tuple(one for one in changes if one != SUM))
    two_run = replace(pair.two_run, name=f"two-{name}", changes=tuple(changes), reference=one_run.name)
    one, two = pair.run(one_run), pair.run(two_run)
    return not (one.error or two.error or find_difference_on_two(one, two, is_half=pair.is_half).step)


def _describe_changes(changes: Collection[str]) -> str:
    return " and ".join(_CHANGES[change] for change in changes)


def _list_causes(pair: Pair, samples: SampleComparison, part: Divergence) -> dict[str, str]:
    """Return what may cause a difference, from the records: changes that remove it, with the sentences that explain it."""
    causes = {}
    layers = pair.one.end.layers
    norms = " and ".join(name for name in layers if "Norm" in name)
    dropouts = ", ".join(name for name in layers if "Norm" not in name)
    if norms:
        causes[NORMS] = (
            f"{norms} layers normalize the half of the batch that each process gets. Use SyncBatchNorm on GPUs, or batches that are "
            "large enough on each process."
        )
    steps = [record for rank in (*pair.one.ranks, *pair.two.ranks) for record in rank.steps[: part.step]]
    if any(record.is_drawn for record in steps):
        source = f" ({dropouts})" if dropouts else ""
        causes[DRAWS] = (
            f"Random numbers are drawn in the step{source}: each process draws them for its own half of the batch."
        )
    if any(run.end.is_drawn_by_data or run.end.workers for run in (pair.one, pair.two)):
        causes[DATA_DRAWS] = "The data set draws random numbers: each process draws them for its own samples."
    if samples.is_padded:
        causes[PADDING] = "Pass even_batches=False in DataLoaderConfiguration to leave the padding out."
    return causes


def _name_device(*, on_cpu: bool) -> str:
    return "cpu" if on_cpu else "gpu"


def _describe_failure(script: Path, result: RunResult) -> str:
    error = (
        result.error
        or "it has no step of an optimizer of torch in the process of the script, which are compared"
    )
    pass_arguments = f"Pass its arguments after --, as in accel migrate --verify {script} -- --data DIR"
    if "ModuleNotFoundError" in error:
        cure = "Install the package in this environment"
    elif _GPU.search(error):
        cure = "Run the command on a machine with a GPU"
    elif "--timeout" in error:
        cure = ""
    else:
        cure = pass_arguments
    text = f"before the conversion, the script ended after {_count_steps(len(result.steps))}: {error.rstrip('.')}"
    return f"Cannot verify {script}: {text}. {cure}".removesuffix(". ")


# Comparison


def find_first_difference(before: RunResult, after: RunResult) -> Divergence:
    """Return the first step at which the runs before and after the conversion part, on one process."""
    for index, (old, new) in enumerate(zip(before.steps, after.steps, strict=False)):
        if old.weights == new.weights and repr(old.loss) == repr(new.loss):
            continue
        return Divergence(index + 1, _explain_on_one(before.steps[: index + 1], after.steps[: index + 1]))
    if after.error or len(after.steps) != len(before.steps):
        return Divergence(
            len(after.steps) + 1,
            f"after the conversion, the script ended after {_count_steps(len(after.steps))}"
            f"{f': {after.error}' if after.error else f', and before it after {len(before.steps)}'}.",
        )
    return Divergence()


def _explain_on_one(before: Sequence[Step], after: Sequence[Step]) -> str:
    old, new = before[-1], after[-1]
    has_drawn = len(before) > 1 and _have_other_states(before[-2], after[-2])
    if repr(old.loss) != repr(new.loss):
        text = f"the loss is {_format(old.loss)} before the conversion and {_format(new.loss)} after it"
    elif old.rates != new.rates:
        return f"the learning rate is {_format_rates(old)} before the conversion and {_format_rates(new)} after it."
    elif new.difference is None:
        return "the optimizer has other parameters after the conversion."
    else:
        return "the losses are equal, and the gradients or the step of the optimizer differ."
    if has_drawn or (len(before) == 1 and _have_other_states(old, new)):
        return f"{text}. The random number generators differ, so that other numbers were drawn: of batches, shuffling or layers."
    old_inputs, new_inputs = (sorted(_list_inputs(record)) for record in (old, new))
    if not old_inputs or not new_inputs:
        return f"{text}: the model gets other batches, or computes something else."
    is_same = old_inputs == new_inputs
    return f"{text}. The inputs of the model are {'the same, and it computes something else' if is_same else 'others'}."


def _have_other_states(old: Step, new: Step) -> bool:
    """Return whether the states of generators differ; the conversion imports numpy, which not every script does."""
    return any(old.random[name] != new.random[name] for name in old.random.keys() & new.random.keys())


def _list_inputs(record: Step) -> Iterator[str]:
    for column in record.samples:
        if column.kind == "model":
            yield from column.rows


def compare_ranks(two: RunResult) -> Divergence:
    """Return the first step after which the weights of the two processes differ."""
    if two.error:
        return Divergence(
            len(two.steps) + 1, f"the script ended after {_count_steps(len(two.steps))}: {two.error}."
        )
    for step in range(len(two.steps)):
        if len({rank.steps[step].weights for rank in two.ranks}) > 1:
            return Divergence(
                step + 1,
                "the weights of the two processes differ after it. Gradients are averaged only for models that are prepared, and for "
                "losses that their forward computes.",
            )
    return Divergence()


def find_difference_on_two(one: RunResult, two: RunResult, *, is_half: bool = False) -> Divergence:
    """Return the first step at which two processes part from one that trains on the same batches, beyond rounding."""
    part = compare_ranks(two)
    tolerance = _HALF_TOLERANCE if is_half else _GRADIENT_TOLERANCE
    for step, old in enumerate(one.steps[: len(two.steps)]):
        if part.step == step + 1:
            break
        if _differs(old, [rank.steps[step] for rank in two.ranks], tolerance):
            return Divergence(step + 1, _explain_on_two(one, two, step))
    if not part.step and len(two.steps) != len(one.steps):
        return Divergence(
            min(len(two.steps), len(one.steps)) + 1,
            f"the script makes {_count_steps(len(one.steps))} on one process, and {len(two.steps)} on two.",
        )
    return part


def _differs(old: Step, ranks: Sequence[Step], tolerance: float) -> bool:
    difference = ranks[0].difference
    if difference is None or _have_other_rates(old, ranks[0]):
        return True
    loss = _average_loss(ranks)
    if (loss is None) != (old.loss is None):
        return True
    is_loss_apart = loss is not None and old.loss is not None and _is_apart(old.loss, loss, tolerance)
    return is_loss_apart or not (
        difference.gradients <= tolerance and difference.update <= max(tolerance, _UPDATE_TOLERANCE)
    )


def _have_other_rates(old: Step, new: Step) -> bool:
    return len(old.rates) != len(new.rates) or any(map(_is_apart, old.rates, new.rates, repeat(1e-6)))


def _is_apart(first: float, second: float, tolerance: float) -> bool:
    return not abs(first - second) <= tolerance * max(abs(first), abs(second), 1e-6)


def _average_loss(ranks: Sequence[Step]) -> float | None:
    losses = [one.loss for one in ranks if one.loss is not None]
    return sum(losses) / len(losses) if losses else None


def _explain_on_two(one: RunResult, two: RunResult, step: int) -> str:
    """Return the values that differ between two processes and one at a step."""
    old, new = one.steps[step], two.steps[step]
    loss = _average_loss([rank.steps[step] for rank in two.ranks])
    if new.difference is None:
        return "the optimizer has other parameters on two processes."
    if _have_other_rates(old, new):
        return (
            f"the learning rate is {_format_rates(old)} on one process, and {_format_rates(new)} on two. If a schedule sets it, prepare the "
            "scheduler, and count its batches before prepare."
        )
    gradients = f"the gradients differ by {new.difference.gradients:.2g} of their norm"
    if old.loss is None or loss is None:
        return f"{gradients}."
    return f"the loss is {_format(old.loss)} on one process, and {_format(loss)} is the mean of two; {gradients}."


# Samples


@dataclass(frozen=True)
class SampleComparison:
    """The samples of two processes in each step, compared with those of one."""

    states: tuple[str, ...] = ()
    """The state of each step; see `_DIVIDED` and the others."""
    reason: str = ""
    """A sentence about the first step that is not divided, or about all."""

    @property
    def is_divided(self) -> bool:
        """True if the samples of the processes are a partition of those of one, in each step in which they are known."""
        return _DIVIDED in self.states and set(self.states) <= {_DIVIDED, _UNKNOWN}

    @property
    def is_repeated(self) -> bool:
        """True if the processes consumed the same samples in a step."""
        return _REPEATED in self.states

    @property
    def is_padded(self) -> bool:
        """True if the processes consumed samples of a step more than once."""
        return _PADDED in self.states


def compare_samples(one: RunResult, two: RunResult, batches_per_step: int = 1) -> SampleComparison:
    """Compare what two processes consumed in each step with what one did.

    Args:
        one: The run on one process.
        two: The run on several processes.
        batches_per_step: The number of steps of one process whose samples those of one step of several are compared with.
    """
    states: list[str] = []
    reasons: dict[str, tuple[int, str]] = {}
    sources: set[str] = set()
    for step in range(min(len(two.steps), len(one.steps) // batches_per_step)):
        batch = [
            _collect(record) for record in one.steps[step * batches_per_step : (step + 1) * batches_per_step]
        ]
        ranks = [_collect(rank.steps[step]) for rank in two.ranks]
        losses = [rank.steps[step].loss for rank in two.ranks]
        state, source = _compare_step(batch, ranks, have_equal_losses=len(set(losses)) == 1)
        states.append(state)
        reasons.setdefault(state, (step + 1, source))
        if state == _DIVIDED:
            sources.add(source)
    if (
        states
        and set(states) == {_UNKNOWN}
        and all(
            rank.steps[step].loss is not None and rank.steps[step].loss == two.steps[step].loss
            for rank in two.ranks
            for step in range(len(two.steps))
        )
    ):
        reason = (
            f"both compute the same loss in each step, bit for bit, so that they compute the same. {_PREPARE}"
        )
        return SampleComparison((_REPEATED,), reason)
    for state, text in _STATES.items():
        if state in reasons:
            step, source = reasons[state]
            return SampleComparison(tuple(states), text.format(step=step, source=source))
    if _DIVIDED in reasons:
        size = "each step" if batches_per_step == 1 else f"{batches_per_step} steps"
        return SampleComparison(
            tuple(states),
            f"Together they consumed the samples of {size} of one process, each sample once ({' and '.join(sorted(sources))}).",
        )
    return SampleComparison(
        tuple(states),
        "The samples of each process are not known, and their losses differ, so that they computed different ones.",
    )


_Samples = dict[tuple[str, str], dict[str, Counter[str]]]
"""The samples of a step: of each source, those of each column."""


def _collect(record: Step) -> _Samples:
    found: _Samples = {}
    for column in record.samples:
        columns = found.setdefault((column.kind, column.source), {})
        columns.setdefault(column.name, Counter()).update(column.rows)
    return found


def _compare_step(
    batch: Sequence[_Samples], ranks: Sequence[_Samples], *, have_equal_losses: bool
) -> tuple[str, str]:
    """Return how the samples of a step are divided over the ranks, and the source that shows it."""
    sources = dict.fromkeys(source for one in batch for source in one)
    states = {
        source: _compare_source(
            [one.get(source, {}) for one in batch], [one.get(source, {}) for one in ranks]
        )
        for source in sources
    }
    loaders = {
        f"the loader at {name.partition('#')[0]}": state
        for (kind, name), state in states.items()
        if kind == "loader"
    }
    inputs = {state for (kind, _), state in states.items() if kind == "model"}
    for source, state in loaders.items():
        if state == _REPEATED and (_DIVIDED not in inputs or _REPEATED in inputs):
            return state, source
    is_same = inputs <= {_REPEATED, _UNKNOWN} and _REPEATED in inputs and have_equal_losses
    if is_same:
        return _REPEATED, "the inputs of the model"
    for wanted in (_PADDED, _OTHER, _DIVIDED):
        for source, state in loaders.items():
            if state == wanted:
                return state, source
    return (_DIVIDED, "the inputs of the model") if _DIVIDED in inputs else (_UNKNOWN, "")


def _compare_source(
    batch: Sequence[dict[str, Counter[str]]], ranks: Sequence[dict[str, Counter[str]]]
) -> str:
    """Return how the samples of one source are divided over the ranks."""
    names = set.intersection(*(set(one) for one in (*batch, *ranks)))
    states = {
        name: _compare_column([one[name] for one in batch], [one[name] for one in ranks]) for name in names
    }
    by_index = states.pop(INDEX, None)
    values = set(states.values())
    if _DIVIDED in {by_index, *values}:
        return _DIVIDED
    if _PADDED in {by_index, *values}:
        return _PADDED
    # Equal indices are other samples if each process has a dataset of its own.
    if ((by_index in {_REPEATED, None}) and _REPEATED in values) or (by_index == _REPEATED and not values):
        return _REPEATED
    return _OTHER if by_index == _OTHER else _UNKNOWN


def _compare_column(batch: Sequence[Counter[str]], ranks: Sequence[Counter[str]]) -> str:
    expected, consumed = sum(batch, Counter[str]()), sum(ranks, Counter[str]())
    if consumed == expected:
        return _DIVIDED
    if all(rank == ranks[0] for rank in ranks) and ranks[0] <= expected:
        return _REPEATED
    return _PADDED if consumed > expected else _OTHER


# Words


def _build_rows(before: RunResult, one: RunResult, two: RunResult | None) -> tuple[tuple[str, ...], ...]:
    rows = []
    for index, record in enumerate(before.steps):
        after = one.steps[index] if index < len(one.steps) else None
        ranks = [rank.steps[index] for rank in two.ranks] if two and index < len(two.steps) else []
        rows.append(
            (
                str(index + 1),
                _format(record.loss),
                _format(after.loss) if after else "-",
                _format(_average_loss(ranks)),
                _format_difference(after),
                _format_difference(ranks[0] if ranks else None),
            )
        )
    return tuple(rows)


def _start_sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"


def _format_difference(record: Step | None) -> str:
    return f"{record.difference.weights:.2g}" if record and record.difference else "-"


def _format(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.6f}"


def _format_rates(record: Step) -> str:
    return ", ".join(f"{rate:.6g}" for rate in dict.fromkeys(record.rates))


def _count_steps(number: int, wanted: int = 0) -> str:
    text = "1 step" if number == 1 else f"{number} steps"
    return f"{text}, all of the script" if number < wanted else text
