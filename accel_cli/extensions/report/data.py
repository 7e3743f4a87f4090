"""Data of a report: facts, metrics, step times, memory and events of a run, from its folder or a jsonl tracker's file.

A file that is missing, incomplete or corrupt leads to a note, never to an exception.
"""

from __future__ import annotations

import json
import math
import time
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from accel_cli import console
from accel_cli.planning.plan import join_for_bash
from accel_cli.runs.goodput import measure_goodput
from accel_cli.runs.heartbeats import Beat
from accel_cli.runs.run_dir import RunFolder, RunStatus, format_ranks
from accel_cli.runs.run_files import MAX_LINES_SIZE, LineReader, read_json
from accel_cli.runs.snapshot import read_configuration
from accel_cli.runs.speed import RankSpeed, describe_throughput

__all__ = [
    "Curve",
    "Event",
    "MetricLog",
    "RankTimes",
    "RunData",
    "format_seconds",
    "format_time",
    "read_run",
    "read_tracker_file",
]

EVENT_NAMES = {"save": "checkpoint saved", "load": "checkpoint loaded", "progress": "stall over"}
"""Names of kinds of events, where they differ."""
_MAX_METRICS = 200
"""The number of metrics that are shown; a script that builds names from step numbers logs more."""
_MAX_EVENTS = 10_000
"""The number of events of a file that are kept."""
_MAX_STARTS = 10
"""The number of starts in the file of a tracker that are shown."""
_MAX_CONFIGURATION = 12
"""The values of a configuration that are among the facts; all are below them."""
_MAX_TEXT = 500
"""The characters of a logged text that are shown."""
_MAX_INTERVAL_S = 1e8
"""A longer interval between two steps is that of a corrupt heartbeat."""
_THINNED_LINES = 2048
"""A metrics.jsonl with so many lines may have been thinned by the run."""
_TOLERANCE_S = 1.0
"""The last lines of a tracker's file may be newer than the times that a killed run recorded."""
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass
class Curve:
    """Points in the order of x; NaN is a gap, or a metric that was not a number."""

    x: array[float] = field(default_factory=lambda: array("d"))
    y: array[float] = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.x)

    @property
    def following(self) -> float:
        """The x of a point that is added without a step: 1 after the last, from 0."""
        return self.x[-1] + 1 if len(self) else 0.0

    def add(self, x: float, y: float) -> None:
        """Append a point."""
        self.x.append(x)
        self.y.append(y)

    def sort(self) -> None:
        """Sort the points by x; points with the same x keep their order."""
        if any(first > second for first, second in pairwise(self.x)):
            points = sorted(zip(self.x, self.y, strict=True), key=lambda point: point[0])
            self.x, self.y = (array("d", values) for values in zip(*points, strict=True))

    def cut(self, x: float) -> None:
        """Remove the points from `x` on."""
        count = bisect_left(self.x, x)
        del self.x[count:], self.y[count:]


class MetricLog:
    """Metrics by name, from lines `{"step": ..., "values": {...}}`."""

    def __init__(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.texts: dict[str, str] = {}
        """The newest value of each metric that is a text."""
        self.with_steps: set[str] = set()
        """The metrics that were logged with a step."""
        self.num_omitted = 0
        """The number of values that belong to more than `_MAX_METRICS` metrics."""

    def add(self, line: Mapping[str, Any]) -> None:
        """Add the values of a line."""
        step = _to_number(line.get("step"))
        step = step if step is not None and math.isfinite(step) else None
        for name, value in _flatten(line.get("values")):
            known = self.texts if isinstance(value, str) and value not in _NON_FINITE else self.curves
            number = _to_number(value)
            if name not in known and len(known) >= _MAX_METRICS:
                self.num_omitted += 1
            elif number is not None:
                curve = self.curves.setdefault(name, Curve())
                curve.add(curve.following if step is None else step, number)
                if step is not None:
                    self.with_steps.add(name)
            elif value is not None:
                self.texts[name] = str(value)[:_MAX_TEXT]

    def append(self, later: MetricLog) -> None:
        """Add the log of a later attempt: it replaces the values from its first step on, or follows them without steps."""
        for name, curve in later.curves.items():
            curve.sort()
            earlier = self.curves.setdefault(name, Curve())
            if name in later.with_steps:
                earlier.cut(curve.x[0])
                shift = 0.0
            else:
                shift = earlier.following
            earlier.x.extend(x + shift for x in curve.x)
            earlier.y.extend(curve.y)
        self.with_steps |= later.with_steps
        self.texts.update(later.texts)
        self.num_omitted += later.num_omitted


@dataclass
class RankTimes:
    """Step time and own time of a rank, in seconds a step, and throughput of all ranks per second, by seconds since 1970."""

    step: Curve = field(default_factory=Curve)
    own: Curve = field(default_factory=Curve)
    samples: Curve = field(default_factory=Curve)
    tokens: Curve = field(default_factory=Curve)
    speed: RankSpeed | None = None
    """The speed over the last attempt."""
    num_steps: float = 0
    """The number of steps that the points are means of."""

    @property
    def curves(self) -> tuple[Curve, ...]:
        """All curves."""
        return self.step, self.own, self.samples, self.tokens

    def add(self, beat: Beat) -> None:
        """Add the history of an attempt."""
        self.speed = RankSpeed.measure(beat, 0) or self.speed
        for number, (begin, end) in enumerate(pairwise(beat.history)):
            if end.steps <= begin.steps:  # of a corrupt heartbeat
                continue
            means = end.average_since(begin)
            if not (0 < means.time < _MAX_INTERVAL_S and means.own < _MAX_INTERVAL_S):
                continue
            self.num_steps += end.steps - begin.steps
            time_ = beat.to_epoch(end.time)
            if number == 0 and len(self.step):
                for curve in self.curves:
                    curve.add(time_, math.nan)
            values = (means.time, means.own, means.samples / means.time, means.tokens / means.time)
            for curve, value in zip(self.curves, values, strict=True):
                curve.add(time_, value)


@dataclass(frozen=True)
class Event:
    """An event of a run: when, and a sentence; `details` are lines of a stall report or traceback."""

    time: float
    kind: str
    text: str
    details: str = ""
    seconds: float = 0.0
    """How long a stall had lasted when it was recorded."""


@dataclass
class RunData:
    """A run of a report."""

    name: str
    started: float = math.nan
    """Seconds since 1970."""
    is_running: bool = False
    facts: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    """The profile by dotted key, or the configuration that a tracker recorded."""
    description: str = ""
    metrics: MetricLog = field(default_factory=MetricLog)
    times: dict[int, RankTimes] = field(default_factory=dict)
    rss: dict[int, Curve] = field(default_factory=dict)
    """Bytes by rank; x is in seconds since 1970, as in all curves but those of metrics."""
    gpu: dict[int, Curve] = field(default_factory=dict)
    cpu_use: dict[int, Curve] = field(default_factory=dict)
    """CPUs by rank."""
    gpu_use: dict[int, Curve] = field(default_factory=dict)
    """Percent by rank."""
    events: list[Event] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def failure(self) -> Event | None:
        """The first failure."""
        return next((event for event in self.events if event.kind == "failure"), None)


def read_run(run: RunFolder) -> RunData:
    """Read the folder of a run."""
    status = run.read_status()
    record = status.record
    ended = time.time() if status.is_running else status.ended
    data = RunData(run.path.name, is_running=status.is_running)
    if not record:
        data.notes.append("run.json is missing or unreadable: the facts of the run are unknown.")
    if data.is_running:
        data.notes.append(f"The run is in progress; these are its files at {format_time(time.time())}.")
    attempts = run.attempts
    _read_events(run, attempts, data)
    _read_metrics(run, attempts, ended, data)
    _read_times(run, attempts, data)
    _read_memory(run, data)
    data.description = _read_description(run, attempts, data.notes)
    data.started = _find_start(record, data)
    data.facts = _collect_facts(run, attempts, status, ended)
    speeds = {rank: times.speed for rank, times in data.times.items() if times.speed}
    if throughput := describe_throughput(speeds, record.get("world_size")):
        data.facts["throughput"] = throughput
    is_kept = status.is_running or record.get("exit_code") == 0
    if ended and (goodput := measure_goodput(run, data.started, ended, is_kept=is_kept)):
        data.facts["goodput"] = goodput.format()
    configuration = _format_configuration(
        read_configuration(run.list_ranks(attempts[-1]) if attempts else {})
    )
    data.facts |= {f"config: {name}": value for name, value in [*configuration.items()][:_MAX_CONFIGURATION]}
    data.settings = dict(_format_values(record.get("profile"))) | configuration
    return data


def read_tracker_file(file: Path) -> list[RunData]:
    """Read the file of a jsonl tracker: one run for each start of the tracker, which records the configuration."""
    notes: list[str] = []
    runs: list[RunData] = []
    last: list[float] = []
    for line in _read_lines(file, notes):
        if not runs or "config" in line:
            runs.append(RunData(file.stem, settings=_format_configuration(line.get("config"))))
            last.append(math.nan)
        time_ = _to_time(line)
        if time_ is not None:
            last[-1] = time_
            if math.isnan(runs[-1].started):
                runs[-1].started = time_
        runs[-1].metrics.add(line)
    if not runs:
        runs, last = [RunData(file.stem, notes=["The file has no lines."])], [math.nan]
    for number, (run, end) in enumerate(zip(runs, last, strict=True), start=1):
        run.name = file.stem if len(runs) == 1 else f"{file.stem}, start {number}"
        run.facts = {
            "file": str(file),
            "started": format_time(run.started),
            "duration": format_seconds(end - run.started),
        }
        for curve in run.metrics.curves.values():
            curve.sort()
        _note_omitted(run)
    if len(runs) > _MAX_STARTS:
        notes.append(
            f"The file has {len(runs)} starts of the tracker; the report shows the last {_MAX_STARTS}."
        )
    runs[-1].notes += notes
    return runs[-_MAX_STARTS:]


# Files of the run folder -----------------------------------------------------------------


def _read_lines(file: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file with one JSON object a line; note if lines are unreadable."""
    lines = LineReader(file)
    try:
        yield from lines
    except FileNotFoundError:
        return
    except OSError as error:
        notes.append(f"{_name_file(file)} cannot be read: {error.strerror or error}.")
    if lines.num_invalid:
        notes.append(f"{_name_file(file)} has {lines.num_invalid} unreadable lines, which are left out.")
    if lines.is_truncated:
        limit = console.format_size(MAX_LINES_SIZE)
        notes.append(
            f"{_name_file(file)} is larger than {limit}: the lines after the first {limit} are left out."
        )


def _read_newest_lines(file: Path, notes: list[str]) -> Iterable[dict[str, Any]]:
    """Return the last objects of a file, as `_read_lines`; note if there are more."""
    newest: deque[dict[str, Any]] = deque(maxlen=_MAX_EVENTS)
    count = 0
    for line in _read_lines(file, notes):
        newest.append(line)
        count += 1
    if count > _MAX_EVENTS:
        notes.append(f"{_name_file(file)} has {count} events; the report has the last {_MAX_EVENTS}.")
    return newest


def _name_file(file: Path) -> str:
    """Return the path of a file below its run folder, or its name."""
    parts = file.parts[-3:]
    return "/".join(parts) if parts[0].startswith("attempt_") else file.name


def _read_metrics(run: RunFolder, attempts: Sequence[int], ended: float | None, data: RunData) -> None:
    """Read the metrics of all attempts: from the file of the jsonl tracker if there is one, else from the run folder."""
    logs: dict[int, MetricLog] = {}
    starts: dict[Path, list[tuple[float, int]]] = defaultdict(list)
    has_many, last = False, -math.inf
    for attempt in attempts:
        log = logs[attempt] = MetricLog()
        for folder in run.list_ranks(attempt).values():
            count = 0
            for line in _read_lines(folder.metrics, data.notes):
                count += 1
                last = max(last, _to_time(line) or last)
                if isinstance(line.get("jsonl"), str):
                    starts[Path(line["jsonl"])].append((_to_time(line) or 0.0, attempt))
                log.add(line)
            has_many |= count >= _THINNED_LINES
            # Of a thinned file, the last lines may be missing.
            beat = Beat.read(folder.beat)
            last = max(last, beat.to_epoch(beat.time) if beat else last)
    # The end of a killed run is unknown, and later runs may append to the file of its tracker.
    end = last + _TOLERANCE_S if ended is None else max(ended, last)
    for file, entries in starts.items():
        complete = _read_tracked(file, sorted(entries), end, data.notes)
        logs.update({attempt: log for attempt, log in complete.items() if log.curves or log.texts})
    if has_many and not starts:
        data.notes.append(
            "A run keeps at most 4096 calls of accelerator.log, so its metrics may be thinned. The tracker jsonl keeps all of "
            "them."
        )
    for log in logs.values():
        data.metrics.append(log)
    _note_omitted(data)


def _read_tracked(
    file: Path, starts: Sequence[tuple[float, int]], end: float, notes: list[str]
) -> dict[int, MetricLog]:
    """Read the lines of a tracker's file that the attempts wrote, by attempt; other runs may append to the same file."""
    if not file.is_file():
        notes.append(
            f"The file of the jsonl tracker, {file}, does not exist: its metrics are those of the run folder."
        )
    logs: dict[int, MetricLog] = defaultdict(MetricLog)
    # A tracker records its file before it writes to it.
    times = [start for start, _ in starts]
    for line in _read_lines(file, notes):
        time_ = _to_time(line)
        if time_ is None or not times[0] <= time_ <= end:
            continue
        logs[starts[bisect_right(times, time_) - 1][1]].add(line)
    return logs


def _note_omitted(data: RunData) -> None:
    if data.metrics.num_omitted:
        data.notes.append(f"The run logged more than {_MAX_METRICS} metrics; the others are left out.")


def _read_times(run: RunFolder, attempts: Sequence[int], data: RunData) -> None:
    for attempt in attempts:
        for rank, folder in run.list_ranks(attempt).items():
            beat = Beat.read(folder.beat)
            if beat is not None and beat.history:
                data.times.setdefault(rank, RankTimes()).add(beat)


def _read_memory(run: RunFolder, data: RunData) -> None:
    attempt = None
    for line in _read_lines(run.path / "memory.jsonl", data.notes):
        time_ = _to_time(line)
        if time_ is None:
            continue
        is_new = attempt is not None and line.get("attempt") != attempt
        attempt = line.get("attempt")
        kinds = {"rss": data.rss, "gpu": data.gpu, "cpu": data.cpu_use, "gpu_use": data.gpu_use}
        for kind, curves in kinds.items():
            sizes = line.get(kind)
            for rank, size in sizes.items() if isinstance(sizes, dict) else ():
                number = _to_number(size)
                if rank.isdecimal() and number is not None:
                    curve = curves.setdefault(int(rank), Curve())
                    if is_new and len(curve):
                        curve.add(time_, math.nan)
                    curve.add(time_, number)


def _read_description(run: RunFolder, attempts: Sequence[int], notes: list[str]) -> str:
    """Return the newest text of `Accelerator.describe()`."""
    for attempt in reversed(attempts):
        for folder in run.list_ranks(attempt).values():
            file = folder.description
            try:
                return str(read_json(file)["text"])
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError):
                notes.append(f"{_name_file(file)} is unreadable.")
    return ""


def _read_events(run: RunFolder, attempts: Sequence[int], data: RunData) -> None:
    """Read the events and checkpoints, the oldest first."""
    for line in _read_newest_lines(run.path / "events.jsonl", data.notes):
        time_ = _to_time(line)
        if time_ is not None:
            seconds = _to_number(line.get("seconds")) or 0.0
            kind = str(line.get("event"))
            details = line.get("frames") or line.get("text") or ""
            text = "\n".join(map(str, details)) if isinstance(details, list) else str(details)
            data.events.append(Event(time_, kind, _format_event(kind, line), text, seconds))
    for attempt in attempts:
        for folder in run.list_ranks(attempt).values():
            for line in _read_newest_lines(folder.checkpoints, data.notes):
                time_ = _to_time(line)
                if time_ is not None:
                    kind = "load" if line.get("kind") == "load" else "save"
                    duration = format_seconds(_to_number(line.get("seconds")))
                    data.events.append(Event(time_, kind, f"{line.get('path')}, in {duration}"))
    data.events.sort(key=lambda event: event.time)


def _format_event(kind: str, line: Mapping[str, Any]) -> str:
    """Return a sentence about an event."""
    seconds = format_seconds(_to_number(line.get("seconds")))
    ranks = line.get("ranks")
    local = format_ranks(ranks) if isinstance(ranks, list) and ranks and _are_ranks(ranks) else "no rank"
    sentences = {
        "start": f"attempt {line.get('attempt')}: world size {line.get('world_size')}, {local} on this host",
        "restart": f"attempt {line.get('attempt')}: {line.get('reason')}",
        "stall": f"no progress for {seconds}",
        "progress": f"progress resumed after {seconds}",
        "failure": f"rank {line.get('rank')} on {line.get('host')}: {line.get('cause')}",
        "end": f"exit code {line.get('exit_code')}",
    }
    others = {key: value for key, value in line.items() if key not in {"time", "event"}}
    return sentences.get(kind) or json.dumps(others)


def _are_ranks(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int) for value in values)


# Facts -------------------------------------------------------------------------------------


def _find_start(record: Mapping[str, Any], data: RunData) -> float:
    """Return when the run started; without its record, the time of the first data."""
    started = _to_number(record.get("started"))
    if started is not None and math.isfinite(started):
        return started
    curves = [*data.rss.values(), *data.gpu.values(), *(times.step for times in data.times.values())]
    times = [curve.x[0] for curve in curves if len(curve)] + [event.time for event in data.events[:1]]
    return min(times, default=math.nan)


def _collect_facts(
    run: RunFolder, attempts: Sequence[int], status: RunStatus, ended: float | None
) -> dict[str, str]:
    """Return the facts of a run that the report shows, by title."""
    record = status.record
    started = _to_number(record.get("started"))
    duration = None if started is None or ended is None else ended - started
    arguments, versions = record.get("arguments"), record.get("versions")
    ranks = sorted({rank for attempt in attempts for rank in run.list_ranks(attempt)})
    facts = {
        "run": run.path.name,
        "script": record.get("target"),
        "arguments": join_for_bash(map(str, arguments)) if isinstance(arguments, list) else None,
        "git commit": _shorten_commit(record.get("git_commit")),
        "host": record.get("host"),
        "started": None if started is None else format_time(started),
        "duration": None if duration is None else format_seconds(duration),
        "state": status.state if record else None,
        "launcher": record.get("launcher"),
        "device": record.get("device"),
        "nodes": record.get("nnodes"),
        "processes per node": record.get("nproc_per_node"),
        "world size": record.get("world_size"),
        "ranks in this folder": format_ranks(ranks).partition(" ")[2] if ranks else "none",
        "attempts": len(attempts),
        **(versions if isinstance(versions, dict) else {}),
    }
    return {title: str(value) for title, value in facts.items() if value is not None and value != ""}


def _shorten_commit(text: Any) -> str | None:
    """Return a commit with 12 digits, as git itself shortens it, and its branch."""
    if not isinstance(text, str):
        return None
    commit, space, branch = text.partition(" ")
    return f"{commit[:12]}{space}{branch}"


def format_time(seconds: float) -> str:
    """Return a time in seconds since 1970 as local time with its zone."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "unknown"


def format_seconds(seconds: float | None) -> str:
    """Return a duration, with two digits below a second."""
    if seconds is None or not 0 <= seconds < _MAX_INTERVAL_S:
        return "an unknown time"
    return f"{seconds:.2g} s" if 0 < seconds < 1 else console.format_duration(seconds)


def _to_number(value: Any) -> float | None:
    """Convert a number of JSON, or the text of a non-finite one; return None for other values."""
    if isinstance(value, str):
        return _NON_FINITE.get(value)
    try:
        return float(value) if isinstance(value, (int, float)) else None
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _to_time(line: Mapping[str, Any]) -> float | None:
    """Return the time of a line in seconds since 1970."""
    number = _to_number(line.get("time"))
    return number if number is not None and math.isfinite(number) else None


def _flatten(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings with their names joined by `/`."""
    if isinstance(values, dict):
        for name, value in values.items():
            if isinstance(value, dict):
                yield from _flatten(value, f"{prefix}{name}/")
            else:
                yield f"{prefix}{name}", value


def _format_configuration(values: Any) -> dict[str, str]:
    """Return the configuration of a tracker by name; a script may have stored it without masking its secrets."""
    # Numbers stay: max_tokens is not a secret.
    return {
        name: console.mask_secrets(name.rpartition("/")[2], value)
        if isinstance(value, str)
        else console.mask_secrets("", json.dumps(value))
        for name, value in _flatten(values)
    }


def _format_values(values: Any) -> Iterator[tuple[str, str]]:
    for name, value in _flatten(values):
        yield name, value if isinstance(value, str) else json.dumps(value)
