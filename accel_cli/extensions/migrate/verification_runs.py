"""Runs of a script for `accel migrate --verify`: in copies of the user's folder, on one process or two, each ended after some steps."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from accel_cli.extensions.migrate.scratch_copy import copy_folder, link_siblings
from accel_cli.extensions.migrate.step_records import RunConfig, RunEnd, Step, read_end, read_steps
from accel_cli.planning.machine import check_has_files
from accel_cli.planning.network import bind_free_port, find_loopback_address
from accel_runtime.environment.settings import PREFIX
from accel_runtime.observe.step_records.record import FILE

__all__ = ["RankResult", "RunResult", "Trial", "VerifyOptions", "VerifyRun", "run_trial"]

_PROBE = Path(__file__).with_name("probe.py")
_POLL_S = 0.05
_GRACE_S = 10.0
"""The time that the other processes get for their records after one has failed."""
_DISTRIBUTED = {
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}
_VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_SETTINGS: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "MPLBACKEND": "Agg",
    "WANDB_MODE": "disabled",
}
"""Variables with which two runs compute the same numbers, open no window and upload nothing."""


@dataclass(frozen=True)
class VerifyOptions:
    """What all runs of a script have in common."""

    arguments: tuple[str, ...]
    environ: Mapping[str, str]
    max_steps: int
    timeout_s: float
    """The time that a step may take, the first one with the start of the script."""


@dataclass(frozen=True)
class Trial:
    """A script in the folder of the user, and the folder of its runs."""

    root: Path
    """The user's folder."""
    script: Path
    """The path of the script in it."""
    scratch: Path
    options: VerifyOptions


@dataclass(frozen=True)
class VerifyRun:
    """One run of a trial."""

    name: str
    """The name of its folder."""
    texts: Mapping[Path, str]
    """The text of each script that differs from the user's file, by its path in the folder."""
    world_size: int = 1
    reference: str = ""
    """The name of the run to compare with."""
    is_split: bool = False
    changes: tuple[str, ...] = ()
    """See `counter_runs`."""
    on_cpu: bool = True
    has_rank: bool = True
    """False for a script that is started without a launcher."""


@dataclass(frozen=True)
class RankResult:
    """The records of a process."""

    steps: tuple[Step, ...]
    end: RunEnd | None
    last_line: str
    """The last line that the process wrote to stderr."""


@dataclass(frozen=True)
class RunResult:
    """The records of all processes of a run."""

    ranks: tuple[RankResult, ...]
    error: str = ""
    """The reason why it did not reach its steps or the end of the script; empty if it did."""

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps of the first rank, as many as all ranks have made."""
        return self.ranks[0].steps[: min(len(rank.steps) for rank in self.ranks)]

    @property
    def end(self) -> RunEnd:
        """The end of the first rank."""
        return self.ranks[0].end or RunEnd(len(self.steps))


def run_trial(trial: Trial, run: VerifyRun) -> RunResult:
    """Run the script in a new copy of the user's folder, and return the records; no process is left."""
    check_has_files("run the script")
    folder = trial.scratch / run.name
    tree, results = folder / "tree", folder / "results"
    copy = tree / (trial.root.name or "root")
    for one in (folder, tree, results):
        one.mkdir()
    copy_folder(trial.root, copy)
    link_siblings(trial.root, copy)
    for path, text in run.texts.items():
        (copy / path).unlink()
        (copy / path).write_text(text, encoding="utf-8", newline="")
    try:
        with _start_processes(trial, run, copy, results) as processes:
            is_late = _wait(processes, results, trial.options.timeout_s)
        reference = trial.scratch / run.reference / "results" if run.reference else None
        ranks = tuple(_read_rank(results, rank, reference) for rank in range(run.world_size))
        error = _find_error(ranks, processes)
        if is_late and not error:
            error = f"no step in {trial.options.timeout_s:g} s. Pass a longer time, as --timeout {2 * trial.options.timeout_s:g}"
        return RunResult(ranks, error.replace(str(copy), str(trial.root)))
    finally:
        shutil.rmtree(tree, ignore_errors=True)


@contextmanager
def _start_processes(
    trial: Trial, run: VerifyRun, copy: Path, results: Path
) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
    """Start the processes of a run; end them and those that they have started."""
    processes: list[subprocess.Popen[bytes]] = []
    address = find_loopback_address()
    with bind_free_port(0, 0) as bound:
        port = bound.getsockname()[1]
    try:
        for rank in range(run.world_size):
            config = RunConfig(
                rank=rank,
                world_size=run.world_size,
                max_steps=trial.options.max_steps,
                results=str(results),
                tree=str(copy.parent),
                copy=str(copy),
                original=str(trial.root),
                is_split=run.is_split,
                changes=run.changes,
            )
            place = (str(port), address, str(rank), str(run.world_size))
            with (results / f"{rank}.out").open("wb") as out, (results / f"{rank}.err").open("wb") as err:
                processes.append(
                    subprocess.Popen(
                        [
                            sys.executable,
                            str(_PROBE),
                            json.dumps(asdict(config)),
                            str(copy / trial.script),
                            *trial.options.arguments,
                        ],
                        cwd=copy,
                        env=_build_environment(trial.options.environ, run, place),
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                        start_new_session=True,
                    )
                )
        yield processes
    finally:
        for process in processes:
            # The group of the process, with the workers of its loaders.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _build_environment(
    environ: Mapping[str, str], run: VerifyRun, place: tuple[str, str, str, str]
) -> dict[str, str]:
    """Return the variables of a process; those of a launch that the command itself may run in are left out."""
    kept = {
        name: value
        for name, value in environ.items()
        if name not in _DISTRIBUTED and not name.startswith((PREFIX, "TORCHELASTIC_"))
    }
    kept |= _SETTINGS
    if run.on_cpu:
        kept |= dict.fromkeys(_VISIBLE_DEVICES, "")
    port, address, rank, world_size = place
    kept |= {"MASTER_ADDR": address, "MASTER_PORT": port}
    if run.has_rank:
        kept |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    return kept


def _wait(processes: Sequence[subprocess.Popen[bytes]], results: Path, timeout_s: float) -> bool:
    """Wait until all processes have ended, or one has failed; return True if a step takes too long."""
    size, deadline = -1, 0.0
    failed_at: float | None = None
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        written = sum(path.stat().st_size for path in results.glob(f"*/{FILE}"))
        if written != size:
            size, deadline = written, now + timeout_s
        if failed_at is None and _has_failed(processes, results):
            failed_at = now
        if failed_at is not None and now > failed_at + _GRACE_S:
            return False
        if now > deadline:
            return True
        time.sleep(_POLL_S)
    return False


def _has_failed(processes: Sequence[subprocess.Popen[bytes]], results: Path) -> bool:
    """Return whether a process has ended with an error, so that the others may wait for it."""
    ends = [read_end(results, rank) for rank, process in enumerate(processes) if process.poll() is not None]
    return any(end is None or end.error for end in ends)


def _read_rank(results: Path, rank: int, reference: Path | None) -> RankResult:
    steps, reason = read_steps(results, rank, reference if rank == 0 else None)
    end = read_end(results, rank)
    if reason and end is not None and not end.error:
        end = replace(end, error=f"the record of its steps ends: {reason}")
    lines = (results / f"{rank}.err").read_text(encoding="utf-8", errors="replace").split("\n")
    written = [line.strip() for line in lines if line.strip()]
    return RankResult(steps, end, written[-1][:500] if written else "")


def _find_error(ranks: Sequence[RankResult], processes: Sequence[subprocess.Popen[bytes]]) -> str:
    """Return the error of the rank that failed first, as far as that is known; empty without one."""
    for rank, result in enumerate(ranks):
        if result.end is not None and result.end.error:
            # A connection that another rank has closed is not the cause.
            others = [one.end for one in ranks[rank + 1 :] if one.end is not None and one.end.error]
            errors = [result.end.error, *(one.error for one in others)]
            own = [one for one in errors if not re.search(r"[Cc]onnection|gloo|NCCL", one)]
            error = (own or errors)[0]
            return result.last_line if error.startswith("exit code") and result.last_line else error
    for result, process in zip(ranks, processes, strict=True):
        if result.end is None and process.returncode not in {0, -signal.SIGKILL}:
            number = process.returncode
            how = f"signal {-number}" if number < 0 else f"exit code {number}"
            return f"the process ended with {how}{f': {result.last_line}' if result.last_line else ''}"
    return ""
