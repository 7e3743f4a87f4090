"""Snapshot of a run: state, progress, memory and foreseen end, and the last logged metrics, read from its folder."""

from __future__ import annotations

import math
import re
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from accel_cli.runs.heartbeats import Beat, Totals
from accel_cli.runs.run_dir import RankFolder, RunFolder, RunStatus
from accel_cli.runs.run_files import read_json, read_last_objects, read_pid
from accel_cli.runs.speed import MIN_SAMPLES, MIN_STEPS, PARTS, RankSpeed, Throughput, find_slowest
from accel_cli.runs.usage import read_gpu_usage, read_rss
from accel_runtime.storage.file_system import is_process_running

__all__ = [
    "RANK_FIELDS",
    "RUN_FIELDS",
    "Goal",
    "MetricSeries",
    "RankSnapshot",
    "RunSnapshot",
    "compute_run_eta",
    "find_goal",
    "is_resume",
    "read_configuration",
    "read_snapshot",
]

_TAIL = 1 << 17
"""Bytes at the end of a file of lines that are read: the file may have thousands of lines, and is read twice a second."""
_SERIES = 64
"""The most values of a metric that are kept."""
_SPEED_S = 2.0
"""The least seconds before the last measured step that times are averaged over, beside `MIN_STEPS` steps."""
_STALL_S = 10.0
"""The shortest time without progress that is shown as a stall."""
_NON_FINITE = frozenset({"NaN", "Infinity", "-Infinity"})
_EPOCHS = re.compile(r"(num|n|max|total)?_?(train|training)?_?epochs")
_STEPS = re.compile(
    r"(num|n|max|total)_?(train|training)?_?(steps|iters|iterations)|(train|training)_steps|iterations"
)
_MAX_GOAL = 1e12
"""Larger numbers stand for a run without an end."""
_RESUME = re.compile(r"--?resume|--?(start|initial)[-_]epoch")
RUN_FIELDS: Mapping[str, str] = MappingProxyType({
    "run": "id of the run",
    "script": "the script as it was typed",
    "state": "`running`, `exit code N`, or why neither is known",
    "running": "true while it runs on this machine",
    "exit_code": "exit code of the launch, at its end",
    "time": "of the snapshot, or of the end of the run, in seconds since 1970",
    "started": "start, in seconds since 1970",
    "elapsed_s": "run time in seconds",
    "eta_s": "seconds until the end of the run",
    "attempt": "number of the attempt, from 0, which is the number of restarts",
    "restart_reason": "reason of the last restart",
    "failure": "first failure",
    "world_size": "number of ranks on all nodes",
    "slowest_rank": "the marked rank",
    "samples_per_s": "samples of all ranks per second, over the last steps",
    "tokens_per_s": "tokens of all ranks per second",
    "flops_per_s": "floating-point operations of all ranks per second",
    "mfu": "model FLOP/s utilization, from 0 to 1",
    "ranks": "list of the ranks on this node, below",
    "metrics": "logged metrics by name: `value` (number or text), `step` and `recent`, the last values",
})  # fmt: skip
"""The fields of a run as JSON data."""
RANK_FIELDS: Mapping[str, str] = MappingProxyType({
    "rank": "rank",
    "pid": "process id",
    "state": "`starting` (no step and no Accelerator yet), `running`, `ended`, `failed` or `killed`",
    "steps": "optimizer steps of this attempt",
    "batches": "batches of this attempt",
    "collectives": "collectives of accel in this attempt",
    "steps_per_s": "steps per second, over the last steps",
    "steps_per_s_mean": "steps per second, over the attempt",
    "own_time_s": "own time per step, in seconds",
    "data_time_s": "time of a step in which the script waits for a batch: its workers are too slow, or the copy to the device",
    "forward_time_s": "time from a batch to the backward pass; without batches that are seen, from the last step on",
    "backward_time_s": "time of the backward pass, until the gradients of this rank are complete",
    "update_time_s": "time from the backward pass to the end of the optimizer step, such as clipping and offload",
    "rest_time_s": "time from the end of a step to the next batch, such as logging",
    "wait_time_s": "rest of the backward pass, in which DDP waits for the gradients of other ranks, and all collectives",
    "last_step_age_s": "seconds since the last step",
    "last_progress_age_s": "seconds since the last step, batch or collective",
    "epoch": "number of the epoch, from 0",
    "epoch_batches": "batches of the epoch until now",
    "epoch_length": "batches of the epoch, if its loader has a length",
    "eta_s": "seconds until the end of the epoch",
    "location": "location, as in the column",
    "rss_bytes": "resident memory of the process",
    "gpu_memory_bytes": "GPU memory of the process",
    "gpu_utilization_percent": "utilization of its GPU",
})  # fmt: skip
"""The fields of a rank as JSON data."""


@dataclass(frozen=True)
class RankSnapshot:
    """State of one rank."""

    rank: int
    beat: Beat | None
    """The heartbeat; None before the rank creates an Accelerator, or makes an optimizer step."""
    now: float = 0.0
    """The time of the snapshot, on the clock of the heartbeat."""
    pid: int | None = None
    is_running: bool = True
    """True if the process of the rank exists."""
    memory: int | None = None
    """Resident memory of the process, in bytes."""
    gpu_memory: int | None = None
    """GPU memory of the process, in bytes."""
    gpu_percent: int | None = None
    """Utilisation of its GPU."""
    first: RankSnapshot | None = None
    """The first replica of its process, if it is another one: that has the heartbeat and the memory of the process."""

    @property
    def state(self) -> str:
        """The state: `starting` before its first step or Accelerator, `running`, `ended`, `failed` or `killed`."""
        if self.first:
            return self.first.state
        beat = self.beat
        if beat and beat.ended is not None:
            return "failed" if beat.has_failed else "ended"
        if not self.is_running:
            return "killed" if beat else "ended"
        return "running" if beat else "starting"

    @property
    def location(self) -> str:
        """The location relative to the newest collective, or the state if the rank has none."""
        if self.state == "starting":
            return "no step yet"
        if self.first:
            return f"see rank {self.first.rank}"
        return self.beat.location if self.beat and self.state == "running" else self.state

    @property
    def step_age(self) -> float | None:
        """Seconds since the last optimizer step; None before the first."""
        return max(0.0, self.now - self.beat.step_time) if self.beat and self.beat.step_time else None

    @property
    def progress_age(self) -> float | None:
        """Seconds since the last step, batch or collective."""
        return max(0.0, self.now - self.beat.time) if self.beat else None

    @property
    def rate(self) -> float | None:
        """Steps per second over the last steps; it decreases while no step is made."""
        beat = self.beat
        if beat is None or beat.rate_now is None:
            return None
        seconds = self.now - beat.recent[0]
        is_running = self.state == "running" and seconds > 0
        return min(beat.rate_now, len(beat.recent) / seconds) if is_running else beat.rate_now

    @cached_property
    def speed(self) -> RankSpeed | None:
        """The speed over the last steps, which decreases while no step is made; None before enough steps.

        The first steps, in which libraries initialize and compile, count only until there are enough others.
        """
        beat = self.beat
        if beat is None or beat.totals.steps < MIN_STEPS or len(beat.history) < MIN_SAMPLES:
            return None
        end, history = beat.totals, beat.history
        num_before = min(
            bisect_right(history, end.steps - MIN_STEPS, key=lambda entry: entry.steps),
            bisect_right(history, end.time - _SPEED_S, key=lambda entry: entry.time),
        )
        return RankSpeed.measure(beat, max(0, num_before - 1), self.rate)

    @property
    def means(self) -> Totals | None:
        """Times, samples and tokens per step, over the last steps; None before enough steps."""
        return self.speed.means if self.speed else None

    @property
    def parts(self) -> Totals | None:
        """The parts of a step over the last steps; None if none was seen."""
        means = self.means
        return means if means and (means.data or means.forward or means.backward) else None

    @property
    def own_time(self) -> float | None:
        """Seconds of own time per step, over the last steps; None before enough steps."""
        return means.own if (means := self.means) and means.own else None

    @property
    def eta(self) -> float | None:
        """Seconds until the end of the epoch; None if they are unknown. They increase while no batch is returned."""
        return self.beat.compute_eta(self.now) if self.beat and self.state == "running" else None

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON data, with the fields of `RANK_FIELDS`."""
        beat, parts = self.beat, self.parts
        return {
            "rank": self.rank,
            "pid": self.pid,
            "state": self.state,
            "steps": beat.steps if beat else 0,
            "batches": beat.batches if beat else 0,
            "collectives": beat.collectives if beat else 0,
            "steps_per_s": self.rate,
            "steps_per_s_mean": beat.rate_mean if beat else None,
            "own_time_s": self.own_time,
            **{f"{name}_time_s": getattr(parts, name) if parts else None for name in (*PARTS, "wait")},
            "last_step_age_s": self.step_age,
            "last_progress_age_s": self.progress_age,
            "epoch": beat.epoch if beat else None,
            "epoch_batches": beat.epoch_batches if beat else None,
            "epoch_length": beat.epoch_length if beat else None,
            "eta_s": self.eta,
            "location": self.location,
            "rss_bytes": self.memory,
            "gpu_memory_bytes": self.gpu_memory,
            "gpu_utilization_percent": self.gpu_percent,
        }


@dataclass
class MetricSeries:
    """Last values of a metric."""

    name: str
    value: float | str = ""
    step: int | None = None
    recent: list[float] = field(default_factory=list)
    """The last numbers, the oldest first."""

    def add(self, value: float | str, step: int | None) -> None:
        """Append a value."""
        self.value, self.step = value, step
        if isinstance(value, float):
            self.recent = [*self.recent[1 - _SERIES :], value]

    def to_json(self) -> dict[str, Any]:
        """Return the values as JSON data; numbers that JSON does not have are text, and null among the last ones."""
        is_number = isinstance(self.value, str) or math.isfinite(self.value)
        return {
            "value": self.value if is_number else str(self.value),
            "step": self.step,
            "recent": [value if math.isfinite(value) else None for value in self.recent],
        }


@dataclass(frozen=True)
class RunSnapshot:
    """State of a run at one time."""

    run: str
    """The id of the run."""
    script: str
    state: str
    """`running`, `exit code N`, or why neither is known."""
    is_running: bool
    time: float
    """The time of the snapshot, or of the end of the run, in seconds since 1970."""
    started: float | None
    exit_code: int | None
    attempt: int | None
    """The number of the attempt, from 0; None before the first."""
    world_size: int | None
    ranks: tuple[RankSnapshot, ...]
    """The ranks on this node, in order."""
    metrics: tuple[MetricSeries, ...] = ()
    restart_reason: str = ""
    failure: str = ""
    """The first failure, if the run has failed."""
    goal: Goal | None = None
    """The number of epochs or steps after which the run ends, if its arguments or configuration have it."""
    is_resumed: bool = False
    """True if the run continues an earlier one, whose steps are unknown, or has restarted."""
    is_elsewhere: bool = False
    """True if the launcher is on another node and has not recorded its end, so that nothing is known of it now."""
    nodes: int | None = None
    """The number of nodes; None before the first attempt."""

    @property
    def elapsed(self) -> float | None:
        """Seconds since the start, up to the end if the run has ended."""
        return None if self.started is None else max(0.0, self.time - self.started)

    @property
    def idle_time(self) -> float | None:
        """Seconds in which no rank has made progress, if the run has stalled as far as its former speed shows."""
        ages, limit = self._progress_ages
        return min(ages.values()) if ages and min(ages.values()) > limit else None

    @property
    def stalled(self) -> tuple[int, ...]:
        """The ranks that have made no progress for as long as a run has to that has stalled."""
        ages, limit = self._progress_ages
        return tuple(rank for rank, age in ages.items() if age > limit)

    @property
    def _progress_ages(self) -> tuple[dict[int, float], float]:
        """Seconds since the last progress by running rank, and the age from which a rank has stalled; no ages before a step."""
        running = [(rank, rank.beat) for rank in self.ranks if rank.beat and rank.state == "running"]
        rates = [rate for _, beat in running if (rate := beat.rate_mean)]
        if not self.is_running or not rates:
            return {}, math.inf
        ages = {rank.rank: age for rank, _ in running if (age := rank.progress_age) is not None}
        return ages, max(_STALL_S, 10 / min(rates))

    @property
    def eta(self) -> float | None:
        """Seconds until the end of the run, for the rank that is behind the others; None if they are unknown."""
        if self.goal is None or not self.is_running:
            return None
        etas = [
            compute_run_eta(self.goal, rank.beat, rank.now, is_resumed=self.is_resumed)
            for rank in self.ranks
            if rank.beat and rank.state == "running"
        ]
        return max((eta for eta in etas if eta is not None), default=None)

    @property
    def fraction(self) -> float | None:
        """The part of the run that is done, from 0 to 1, for the rank that is behind the others; None if it is unknown."""
        goal = self.goal
        beats = [rank.beat for rank in self.ranks if rank.beat]
        parts = [compute_fraction(goal, beat, is_resumed=self.is_resumed) for beat in beats] if goal else []
        return min((part for part in parts if part is not None), default=None)

    @cached_property
    def own_times(self) -> dict[int, float]:
        """Seconds of own time per step, by rank."""
        times = {rank.rank: rank.own_time for rank in self.ranks}
        return {rank: time for rank, time in times.items() if time is not None}

    @cached_property
    def throughput(self) -> Throughput:
        """The throughput of all ranks over the last steps."""
        return Throughput.combine([rank.speed for rank in self.ranks if rank.speed], self.world_size)

    @property
    def slowest(self) -> int | None:
        """The rank with the largest own time per step, if it is clearly slower than most; None if no rank is."""
        rates = [rank.rate for rank in self.ranks if rank.rate]
        return find_slowest(self.own_times, 1 / max(rates) if rates else 0.0)

    def to_json(self) -> dict[str, Any]:
        """Return the snapshot as JSON data, with the fields of `RUN_FIELDS`."""
        return {
            "run": self.run,
            "script": self.script,
            "state": self.state,
            "running": self.is_running,
            "exit_code": self.exit_code,
            "time": self.time,
            "started": self.started,
            "elapsed_s": self.elapsed,
            "eta_s": self.eta,
            "attempt": self.attempt,
            "restart_reason": self.restart_reason or None,
            "failure": self.failure or None,
            "world_size": self.world_size,
            "slowest_rank": self.slowest,
            **self.throughput.to_json(),
            "ranks": [rank.to_json() for rank in self.ranks],
            "metrics": {series.name: series.to_json() for series in self.metrics},
        }


def read_snapshot(run: RunFolder) -> RunSnapshot:
    """Read the folder of a run, and the memory of its processes."""
    status, attempts = run.read_status(), run.attempts
    record = status.record
    folders = run.list_ranks(attempts[-1]) if attempts else {}
    beats = {rank: Beat.read(folder.beat) for rank, folder in folders.items()}
    now = time.time() if status.is_running or status.is_elsewhere else _find_end(status, beats.values())
    events = list(read_last_objects(run.path / "events.jsonl"))
    failures = [event for event in events if event.get("event") == "failure"]
    restarts = [event for event in events if event.get("event") == "restart"]
    last_memory = {} if status.is_running else _read_last_memory(run)
    ranks = _read_ranks(folders, beats, now, status, last_memory)
    world_size, nodes = record.get("world_size"), record.get("nodes")
    exit_code = record.get("exit_code")
    arguments, profile = record.get("arguments"), record.get("profile")
    texts = [str(argument) for argument in arguments] if isinstance(arguments, list) else []
    resumes = isinstance(profile, dict) and bool(profile.get("resume"))
    return RunSnapshot(
        run=run.path.name,
        script=str(record.get("target", "")),
        state=status.state,
        is_running=status.is_running,
        is_elsewhere=status.is_elsewhere,
        time=now,
        started=_to_number(record.get("started")),
        exit_code=exit_code if isinstance(exit_code, int) else None,
        attempt=attempts[-1] if attempts else None,
        world_size=world_size if isinstance(world_size, int) else len(ranks) or None,
        nodes=nodes if isinstance(nodes, int) else None,
        ranks=ranks,
        metrics=_read_metrics(run, attempts),
        goal=find_goal(texts, read_configuration(folders)),
        is_resumed=resumes or is_resume(texts) or len(attempts) > 1,
        restart_reason=str(restarts[-1].get("reason", "")) if restarts else "",
        failure=f"rank {failures[-1].get('rank')}: {failures[-1].get('cause')}"
        if failures and not status.is_running
        else "",
    )


def read_configuration(folders: Mapping[int, RankFolder]) -> dict[str, Any]:
    """Return the configuration that a script has given to its trackers; empty without one."""
    for folder in folders.values():
        with suppress(OSError, ValueError):
            return read_json(folder.configuration)
    return {}


def _find_end(status: RunStatus, beats: Iterable[Beat | None]) -> float:
    """Return the end of a run in seconds since 1970; if it was not recorded, that of its last progress."""
    if status.ended is not None:
        return status.ended
    times = [beat.to_epoch(beat.time if beat.ended is None else beat.ended) for beat in beats if beat]
    return max(times, default=_to_number(status.record.get("started")) or time.time())


def _read_ranks(
    folders: Mapping[int, RankFolder],
    beats: Mapping[int, Beat | None],
    now: float,
    status: RunStatus,
    last_memory: Mapping[int, tuple[int | None, int | None]],
) -> tuple[RankSnapshot, ...]:
    is_running = status.is_running
    pids = {rank: _read_pid(folder, beats[rank]) for rank, folder in folders.items()}
    gpus = read_gpu_usage({pid for pid in pids.values() if pid}) if is_running else {}
    monotonic = time.monotonic()
    ranks: list[RankSnapshot] = []
    processes: dict[int, RankSnapshot] = {}
    for rank, beat in beats.items():
        pid = pids[rank]
        # Replicas of xla are threads: the heartbeat and the memory of their process are shown once.
        if beat is None and pid in processes and folders[rank].thread.exists():
            ranks.append(RankSnapshot(rank, None, pid=pid, first=processes[pid]))
            continue
        clock = beat.started + now - beat.started_epoch if beat else 0.0
        memory, gpu = last_memory.get(rank, (None, None))
        gpu_memory, percent = gpus.get(pid or 0, (gpu, None))
        ranks.append(
            RankSnapshot(
                rank,
                beat,
                now=monotonic if is_running else clock,
                pid=pid,
                is_running=status.is_elsewhere or (is_running and (pid is None or is_process_running(pid))),
                memory=(read_rss(pid) or None) if is_running and pid else memory,
                gpu_memory=gpu_memory,
                gpu_percent=percent,
            )
        )
        if pid:
            processes[pid] = ranks[-1]
    return tuple(ranks)


def _read_pid(folder: RankFolder, beat: Beat | None) -> int | None:
    pid = read_pid(folder.pid)
    return beat.pid if pid is None and beat else pid


def _read_last_memory(run: RunFolder) -> dict[int, tuple[int | None, int | None]]:
    """Return the memory and GPU memory of each rank at the last sample of a run."""
    samples = list(read_last_objects(run.path / "memory.jsonl"))
    sample = samples[-1] if samples else {}
    rss, gpu = (sizes if isinstance(sizes := sample.get(kind), dict) else {} for kind in ("rss", "gpu"))
    return {int(rank): (size, gpu.get(rank)) for rank, size in rss.items() if rank.isdecimal()}


def _read_metrics(run: RunFolder, attempts: Sequence[int]) -> tuple[MetricSeries, ...]:
    """Read the last metrics of the newest attempt that has logged any."""
    for attempt in reversed(attempts):
        for folder in run.list_ranks(attempt).values():
            series: dict[str, MetricSeries] = {}
            for line in read_last_objects(folder.metrics):
                values, step = line.get("values"), line.get("step")
                for name, value in values.items() if isinstance(values, dict) else ():
                    number = _to_number(value)
                    entry = series.setdefault(name, MetricSeries(name))
                    entry.add(
                        str(value) if number is None else number, step if isinstance(step, int) else None
                    )
            if series:
                return tuple(series.values())
    return ()


def _to_number(value: Any) -> float | None:
    """Convert a number of JSON, or the text of one that JSON does not have; return None for other values."""
    if isinstance(value, bool) or (isinstance(value, str) and value not in _NON_FINITE):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except TypeError:
        return None


@dataclass(frozen=True)
class Goal:
    """The number of epochs or optimizer steps after which a run ends."""

    number: float
    counts_steps: bool
    source: str
    """The option or the key that has it, as in `--epochs 20`."""


def find_goal(arguments: Sequence[str], configuration: Mapping[str, Any]) -> Goal | None:
    """Return the goal of a run: of steps rather than of epochs, of the command line rather than of the configuration."""
    goals: list[Goal] = []
    for name, value, source in [*_list_options(arguments), *_list_keys(configuration)]:
        key = re.split(r"[./]", name)[-1].replace("-", "_").lower()
        kind = _STEPS if _STEPS.fullmatch(key) else _EPOCHS if _EPOCHS.fullmatch(key) else None
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            continue
        if kind is not None and 0 < number < _MAX_GOAL:
            goals.append(Goal(number, kind is _STEPS, source))
    return next((goal for goal in goals if goal.counts_steps), goals[0] if goals else None)


def _list_options(arguments: Sequence[str]) -> Iterator[tuple[str, Any, str]]:
    """Yield name, value and text of the options `--epochs 20`, `--epochs=20` and `train.epochs=20`."""
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if equals:
            yield name.lstrip("-+"), value, argument
        elif argument.startswith("-") and index + 1 < len(arguments):
            yield argument.lstrip("-"), arguments[index + 1], f"{argument} {arguments[index + 1]}"


def _list_keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _list_keys(value, f"{prefix}{name}.")
        elif not isinstance(value, bool):
            yield f"{prefix}{name}", value, f"{prefix}{name}: {value}"


def compute_run_eta(goal: Goal, beat: Beat, now: float, *, is_resumed: bool) -> float | None:
    """Return the seconds until the end of a run, at its mean speed; None if they are unknown.

    Of a run that is resumed, the steps before are unknown, and the speed is that of the current epoch.

    Args:
        goal: The end of the run.
        beat: The heartbeat of a rank.
        now: The time, on the clock of the heartbeat.
        is_resumed: True if the run continues another one, or has restarted.
    """
    elapsed = now - beat.started
    if goal.counts_steps:
        if is_resumed or beat.steps <= 0:
            return None
        return elapsed * max(0.0, goal.number - beat.steps) / beat.steps
    if not beat.epoch_length:
        return None
    part = beat.epoch_batches / beat.epoch_length
    remaining = max(0.0, goal.number - beat.epoch - part)
    if beat.epoch >= 1 and not is_resumed:  # the time of evaluations and checkpoints too
        return elapsed * remaining / (beat.epoch + part)
    returned = beat.epoch_batches - beat.epoch_first
    if returned <= 0:
        return None
    return remaining * beat.epoch_length * max(0.0, now - beat.epoch_started) / returned


def compute_fraction(goal: Goal, beat: Beat, *, is_resumed: bool) -> float | None:
    """Return the part of a run that is done, from 0 to 1; None if it is unknown, as of steps in a run that is resumed.

    Args:
        goal: The end of the run.
        beat: The heartbeat of a rank.
        is_resumed: True if the run continues another one, or has restarted.
    """
    if goal.counts_steps:
        return None if is_resumed else min(1.0, beat.steps / goal.number)
    if not beat.epoch_length:
        return None
    return min(1.0, (beat.epoch + beat.epoch_batches / beat.epoch_length) / goal.number)


def is_resume(arguments: Sequence[str]) -> bool:
    """Return True if the command line of a script seems to continue an earlier run."""
    return any(_RESUME.match(argument) for argument in arguments)
