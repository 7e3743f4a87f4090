"""The recorded runs of `accel diff`: finding and reading them, and recording scripts for a comparison."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from accel_cli import console
from accel_cli.errors import UsageError
from accel_cli.extensions.numerics.comparison import Run
from accel_cli.runs import run_dir
from accel_runtime.observe.step_records.record import FILE, RankRecord, read_record

__all__ = ["Variant", "check_script", "is_script", "list_variants", "read_run", "record_script"]

_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "nproc": ("--nproc-per-node", "{}"),
    "precision": ("--mixed-precision", "{}"),
    "compile": ("--set", "compile.backend={}"),
    "strategy": ("--set", "parallel.dp_shard={}"),
}
"""What can be varied, by name, with the options of accel launch for a value; any other name is a key of the profile."""
_STRATEGIES = {"ddp": "1", "fully_shard": "auto"}


@dataclass(frozen=True)
class Variant:
    """A launch of a script."""

    name: str
    script: str
    options: tuple[str, ...]


def is_script(name: str) -> bool:
    """Return whether an argument is a script, not a run."""
    return name.endswith(".py")


def read_run(home: Path, name: str) -> Run:
    """Read the records of a run.

    Args:
        home: The folder of all runs.
        name: The id of a run, the beginning of one, the name of its script, or the path of its folder.

    Raises:
        UsageError: There is no such run, or it is not recorded.
    """
    if os.sep in name or Path(name, "run.json").is_file():
        folder = Path(name).expanduser()
        if not folder.is_dir():
            raise UsageError(
                f"Cannot read {name!r}: no such folder. Pass a run folder, or a run of accel runs."
            )
        run = run_dir.RunFolder(folder.resolve())
    else:
        run = run_dir.find_run(home, name)
    return _read(run, run.path.name)


def _read(run: run_dir.RunFolder, name: str) -> Run:
    records: dict[int, RankRecord] = {}
    has_record = False
    for attempt in reversed(run.attempts):
        for rank, folder in run.list_ranks(attempt).items():
            file = folder.path / FILE
            try:
                record = read_record(file) if file.is_file() else None
            except ValueError as error:
                raise UsageError(str(error)) from None
            has_record |= record is not None
            if record is not None and record.steps:
                records[rank] = record
        if records:
            return Run(name, records, _describe_end(run, attempt))
    if has_record:
        raise UsageError(
            f"Cannot compare {name}: no optimizer of torch has stepped in what was recorded of it. Record steps that it has, such as "
            "--record-numerics all."
        )
    raise UsageError(
        f"Cannot compare {name}: it has no recorded step, since it was launched without a record, or has not imported torch. Launch it "
        "again with accel launch --record-numerics all."
    )


def _describe_end(run: run_dir.RunFolder, attempt: int) -> str:
    remarks = [f"this is attempt {attempt}, the last that has steps"] if len(run.attempts) > 1 else []
    if code := run.record.get("exit_code"):
        remarks.append(f"the run ended with exit code {code}, so that its number of steps is not compared")
    return "; ".join(remarks)


def check_script(name: str) -> None:
    """Raise UsageError if there is no such script."""
    if not Path(name).is_file():
        raise UsageError(f"Cannot run {name!r}: no such file. Pass a script, or a run of accel runs.")


def list_variants(script: str, vary: str) -> list[Variant]:
    """Return the launches of a script with two values of an option, as in `nproc=1,2`."""
    key, equals, text = vary.partition("=")
    values = [value.strip() for value in text.split(",")]
    if not equals or len(values) != 2 or not all(values) or not key:  # noqa: PLR2004 - two runs
        raise UsageError(
            f"Invalid --vary {vary!r}: expected a name and two values. Examples are nproc=1,2 and precision=no,bf16."
        )
    if key == "strategy" and not set(values) <= _STRATEGIES.keys():
        raise UsageError(
            f"Invalid --vary {vary!r}: expected {' or '.join(_STRATEGIES)}. An example is strategy=ddp,fully_shard."
        )
    options = _OPTIONS.get(key, ("--set", f"{key}={{}}"))
    names = [_STRATEGIES.get(value, value) if key == "strategy" else value for value in values]
    return [
        Variant(f"{key}={value}", script, tuple(option.format(name) for option in options))
        for value, name in zip(values, names, strict=True)
    ]


def record_script(variant: Variant, options: Sequence[str], arguments: Sequence[str], home: Path) -> Run:
    """Launch a script with a record, and return that.

    Args:
        variant: The launch.
        options: Options of accel launch for all launches.
        arguments: Arguments of the script.
        home: The folder of all runs.

    Raises:
        UsageError: The launch fails: nothing is compared, which is not the result that the runs differ.
    """
    before = {run.path for run in run_dir.find_recent_runs(home)}
    command = [
        sys.executable,
        "-m",
        "accel_cli",
        "launch",
        *options,
        *variant.options,
        variant.script,
        *arguments,
    ]
    console.note(f"recording {variant.name}")
    # The standard output of this command is the result.
    code = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode
    if code:
        raise UsageError(
            f"Cannot compare: {variant.name} ended with code {code}. Run it alone: {shlex.join(command)}"
        )
    stem = Path(variant.script).stem
    for run in run_dir.find_recent_runs(home):
        if run.path not in before and run.stem == stem:
            return _read(run, variant.name)
    raise UsageError(
        f"Cannot compare: {variant.name} has left no run in {home}. Launch it with --record-numerics, and compare the runs."
    )
