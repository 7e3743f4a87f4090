"""`accel migrate --verify`: comparison of the first steps of a script before and after its conversion, on one process and on two."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from accel_cli.errors import UsageError
from accel_cli.migrate.files import STDIN, migrate_file
from accel_cli.migrate.scratch_copy import find_root
from accel_cli.migrate.step_records import StepRecord
from accel_cli.migrate.verification_runs import Run, RunOptions, RunResult, Trial, run_trial

__all__ = [
    "ComparisonResult",
    "ConvertedScript",
    "Part",
    "compare_ranks",
    "find_difference_on_two",
    "find_first_difference",
    "read_versions",
    "verify",
]

_LOSS_TOLERANCE = 1e-3
_GRADIENT_TOLERANCE = 1e-3
_HALF_TOLERANCE = 3e-2
"""The tolerance of losses and gradients in 16 bits, whose sums round by a few thousandths."""
_UPDATE_TOLERANCE = 5e-2
"""Adam divides by the size of the gradients, so that rounding of those near zero changes weights, and not the function."""
_ROUNDING = 1e-5
"""Losses of the first step that differ more than this, with equal weights, differ for another reason than rounding."""
_HALF = re.compile(r"\bautocast\b|\bmixed_precision\b|\bbfloat16\b|\bfloat16\b|\.half\(\)")
_RANKS = re.compile(r"\binit_process_group\b|[\"'](?:LOCAL_)?RANK[\"']")
_GPU = re.compile(r"NVIDIA|CUDA|_cuda_")
_NO_SPLIT = re.compile(r"split_batches needs|split_batches=True")


@dataclass(frozen=True)
class ConvertedScript:
    """A script and its conversion."""

    script: Path
    before: Mapping[Path, str]
    """The texts of the scripts before the conversion, by path."""
    after: Mapping[Path, str]
    options: RunOptions
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
class Part:
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
    run = Run("before", before, on_cpu=on_cpu, has_rank=False)
    first = run_trial(trial, run)
    if not first.steps and _RANKS.search(before[trial.script]):
        report("run before the conversion, 1 process, with the variables of torchrun")
        run = replace(run, name="before-torchrun", has_rank=True)
        first = run_trial(trial, run)
    if first.error or not first.steps:
        raise UsageError(_describe_failure(converted.script, first))
    report(f"run after the conversion, 1 process, {_name_device(on_cpu=on_cpu)}")
    one = run_trial(trial, Run("after", after, reference=run.name, on_cpu=on_cpu))
    part = find_first_difference(first, one)
    seed = (
        ""
        if first.ranks[0].end and first.ranks[0].end.is_seeded
        else " The script sets no seed of torch: every run began with 0."
    )
    if part.step:
        sentence = f"not equal on one process from step {part.step}: {part.reason}{seed}"
        rows = _build_rows(first, one, None)
        return ComparisonResult(rows, (sentence, "the run on two processes is left out"), is_equal=False)
    sentences = [
        f"equal on one process: {_count_steps(len(one.steps), converted.options.max_steps)}, largest difference 0.{seed}"
    ]
    half = any(_HALF.search(each) for each in after.values())
    two, is_split, reference = _run_on_two(trial, after, converted.devices, one, report)
    part = find_difference_on_two(reference, two, is_half=half) if is_split else compare_ranks(two)
    sentences.append(_describe_two(reference, two, part, is_split=is_split, on_cpu=converted.devices < 2))  # noqa: PLR2004
    return ComparisonResult(_build_rows(first, one, two), tuple(sentences), is_equal=not part.step)


def _run_on_two(
    trial: Trial,
    after: Mapping[Path, str],
    devices: int,
    one: RunResult,
    report: Callable[[str], None],
) -> tuple[RunResult, bool, RunResult]:
    """Run the converted script on two processes; return the records, if batches were divided, and the run to compare with."""
    on_cpu = devices < 2  # noqa: PLR2004 - a GPU for each process
    run = Run("two", after, world_size=2, reference="after", is_split=True, on_cpu=on_cpu)
    reference = one
    if devices == 1:
        report("run after the conversion, 1 process, cpu, since two processes need two GPUs")
        reference = run_trial(trial, Run("after-cpu", after))
        run = replace(run, reference="after-cpu")
    report(
        f"run after the conversion, 2 processes, {_name_device(on_cpu=on_cpu)}, each batch divided over them"
    )
    two = run_trial(trial, run)
    if not (two.error and _NO_SPLIT.search(two.error)):
        return two, True, reference
    report(
        f"run after the conversion, 2 processes, batches as in the script, since they cannot be divided ({two.error})"
    )
    return run_trial(trial, replace(run, name="two-whole", reference="", is_split=False)), False, reference


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


def find_first_difference(before: RunResult, after: RunResult) -> Part:
    """Return the first step at which the runs before and after the conversion part, on one process."""
    for index, (old, new) in enumerate(zip(before.steps, after.steps, strict=False)):
        if old.digest == new.digest and repr(old.loss) == repr(new.loss):
            continue
        return Part(index + 1, _explain_on_one(before.steps[: index + 1], after.steps[: index + 1]))
    if after.error or len(after.steps) != len(before.steps):
        return Part(
            len(after.steps) + 1,
            f"after the conversion, the script ended after {_count_steps(len(after.steps))}"
            f"{f': {after.error}' if after.error else f', and before it after {len(before.steps)}'}.",
        )
    return Part()


def _explain_on_one(before: Sequence[StepRecord], after: Sequence[StepRecord]) -> str:
    old, new = before[-1], after[-1]
    has_drawn = len(before) > 1 and before[-2].random != after[-2].random
    if repr(old.loss) != repr(new.loss):
        text = f"the loss is {_format(old.loss)} before the conversion and {_format(new.loss)} after it"
    elif old.rates != new.rates:
        return f"the learning rate is {_format_rates(old)} before the conversion and {_format_rates(new)} after it."
    elif new.difference is None:
        return "the optimizer has other parameters after the conversion."
    else:
        return "the losses are equal, and the gradients or the step of the optimizer differ."
    if has_drawn or (len(before) == 1 and old.random != new.random):
        return f"{text}. The random number generators differ, so that other numbers were drawn: of batches, shuffling or layers."
    return f"{text}: the model gets other batches, or computes something else."


def compare_ranks(two: RunResult) -> Part:
    """Return the first step after which the weights of the two processes differ."""
    if two.error:
        return Part(
            len(two.steps) + 1, f"the script ended after {_count_steps(len(two.steps))}: {two.error}."
        )
    for step in range(len(two.steps)):
        if len({rank.steps[step].digest for rank in two.ranks}) > 1:
            return Part(
                step + 1,
                "the weights of the two processes differ after it. Gradients are averaged only for models that are prepared, and for "
                "losses that their forward computes.",
            )
    return Part()


def find_difference_on_two(one: RunResult, two: RunResult, *, is_half: bool = False) -> Part:
    """Return the first step at which two processes part from one that trains on the same batches, beyond rounding."""
    part = compare_ranks(two)
    tolerance = _HALF_TOLERANCE if is_half else _GRADIENT_TOLERANCE
    for step, old in enumerate(one.steps[: len(two.steps)]):
        if part.step == step + 1:
            break
        if _differs(old, [rank.steps[step] for rank in two.ranks], tolerance):
            return Part(step + 1, _explain_on_two(one, two, step))
    if not part.step and len(two.steps) != len(one.steps):
        return Part(
            min(len(two.steps), len(one.steps)) + 1,
            f"the script makes {_count_steps(len(one.steps))} on one process, and {len(two.steps)} on two.",
        )
    return part


def _differs(old: StepRecord, ranks: Sequence[StepRecord], tolerance: float) -> bool:
    difference = ranks[0].difference
    if difference is None or any(
        _is_apart(a, b, 1e-6) for a, b in zip(old.rates, ranks[0].rates, strict=False)
    ):
        return True
    loss = _average_loss(ranks)
    if (loss is None) != (old.loss is None):
        return True
    is_loss_apart = loss is not None and old.loss is not None and _is_apart(old.loss, loss, tolerance)
    return is_loss_apart or not (
        difference.gradients <= tolerance and difference.update <= max(tolerance, _UPDATE_TOLERANCE)
    )


def _is_apart(first: float, second: float, tolerance: float) -> bool:
    return not abs(first - second) <= tolerance * max(abs(first), abs(second), 1e-6)


def _average_loss(ranks: Sequence[StepRecord]) -> float | None:
    losses = [one.loss for one in ranks if one.loss is not None]
    return sum(losses) / len(losses) if losses else None


def _explain_on_two(one: RunResult, two: RunResult, step: int) -> str:
    """Return the known reasons for which two processes part from one at a step."""
    old, new = one.steps[step], two.steps[step]
    loss = _average_loss([rank.steps[step] for rank in two.ranks])
    head = f"the loss is {_format(old.loss)} on one process, and {_format(loss)} is the mean of two"
    if new.difference is None:
        return "the optimizer has other parameters on two processes."
    if any(_is_apart(a, b, 1e-6) for a, b in zip(old.rates, new.rates, strict=False)):
        return (
            f"the learning rate is {_format_rates(old)} on one process, and {_format_rates(new)} on two. The schedule depends on the "
            "number of processes: prepare the scheduler, or count the batches before prepare."
        )
    reasons = list(_find_reasons(one, two, step))
    if (
        not reasons
        and step == 0
        and old.loss is not None
        and loss is not None
        and _is_apart(old.loss, loss, _ROUNDING)
    ):
        reasons = [
            (
                "The loss of a batch is not the mean of the losses of its halves, as for means over different numbers of samples or tokens, "
                "and for losses that compare samples with each other."
            )
        ]
    if not reasons:
        reasons = [
            "No known reason was found: the gradients of the two processes are not averaged to those of one."
        ]
    return " ".join([f"{head}.", *reasons])


def _find_reasons(one: RunResult, two: RunResult, step: int) -> Iterator[str]:
    end = one.ranks[0].end
    layers = end.layers if end else ()
    norms = [name for name in layers if "Norm" in name]
    dropouts = [name for name in layers if "Norm" not in name]
    if norms:
        yield (
            f"{' and '.join(norms)} layers normalize the half of the batch that each process gets. Use SyncBatchNorm on GPUs, or batches "
            "that are large enough on each process."
        )
    steps = [record for rank in (one.ranks[0], *two.ranks) for record in rank.steps[: step + 1]]
    if any(record.is_drawn for record in steps):
        source = f" ({', '.join(dropouts)})" if dropouts else ""
        yield f"Random numbers are drawn in the step{source}: each process draws them for its own half of the batch."
    if any(record.is_drawn_by_data for record in steps):
        yield "The data set draws random numbers: each process draws them for its own samples."
    elif any(record.workers for record in one.steps[: step + 1]):
        yield "Workers load the batches: if the data set draws random numbers there, each process draws its own."
    odd = [record.samples for record in one.steps[: step + 1] if record.samples % 2]
    if odd:
        yield f"A batch of {odd[-1]} samples cannot be divided into equal halves: samples are repeated to fill it."


# Words


def _describe_two(reference: RunResult, two: RunResult, part: Part, *, is_split: bool, on_cpu: bool) -> str:
    where = "2 processes on the CPU, over gloo" if on_cpu else "2 processes on GPUs"
    if part.step and two.error and part.step > len(two.steps):
        return f"not run on two processes ({where}): {part.reason}"
    if part.step:
        return f"not equal on two processes from step {part.step} ({where}): {part.reason}"
    steps = _count_steps(len(two.steps))
    if not is_split:
        return (
            f"equal weights on both of two processes ({where}): {steps}. The batches of the script cannot be divided, so that each "
            "process trains on batches of its size, and the losses are not compared with those of one process."
        )
    largest = max((one.difference.weights for one in two.steps if one.difference), default=0.0)
    text = f"equal on two processes up to rounding ({where}, each batch divided over them): {steps}, largest difference {largest:.2g}."
    if not any(one.samples for one in reference.steps):
        text += " No loader of torch gave batches: both processes computed the same ones."
    return text


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


def _format_difference(record: StepRecord | None) -> str:
    return f"{record.difference.weights:.2g}" if record and record.difference else "-"


def _format(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.6f}"


def _format_rates(record: StepRecord) -> str:
    return ", ".join(f"{rate:.6g}" for rate in dict.fromkeys(record.rates))


def _count_steps(number: int, wanted: int = 0) -> str:
    text = "1 step" if number == 1 else f"{number} steps"
    return f"{text}, all of the script" if number < wanted else text
