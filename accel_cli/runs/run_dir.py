"""The run folder and its logs: layout, search, following, selection of ranks, and the file with the failure reason."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import stat
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from accel_cli import control
from accel_cli.errors import UsageError
from accel_cli.planning.plan import KEEP_DAYS, KEEP_RUNS, name_target
from accel_cli.runs.heartbeats import Beat
from accel_cli.runs.run_files import MAX_PID, open_file, read_json, read_text
from accel_cli.worker import EXIT_FILE, STACK_REQUEST_FILE, STACKS_FILE, THREAD_FAILURES_FILE, THREAD_FILE
from accel_runtime.environment import settings as env
from accel_runtime.environment.text import encode_text
from accel_runtime.observe.collective_trace import TRACE_FILE, TRACE_REQUEST_FILE
from accel_runtime.storage.file_system import is_process_running

__all__ = [
    "REASON_SIZE",
    "RankFolder",
    "RunFolder",
    "RunStatus",
    "find_recent_runs",
    "find_run",
    "find_running_run",
    "fit_reason",
    "format_ranks",
    "get_log_home",
    "get_temporary_home",
    "is_run_folder",
    "read_log",
    "read_process_start",
    "write_reason",
    "write_run_file",
]


_RECORD = "run.json"
_MAX_STEM = 100
"""Characters of the script's name in the name of its run."""
_CLOCK_TOLERANCE_S = 3600
"""A run that started further in the future has the time of a wrong clock."""
_DAY_S = 24 * 3600
_MAX_CANDIDATES = 5
"""The most runs that an error about an ambiguous name shows."""
_FIELD_TYPES: dict[str, type | tuple[type, ...]] = {
    "pid": int,
    "pid_start": int,
    "host": str,
    "pid_namespace": str,
    "exit_code": int,
    "target": str,
    "arguments": list,
    "launcher": str,
    "world_size": int,
    "nodes": int,
}
_TIME_FIELDS = ("started", "ended")
_MAX_TIME_S = 1e11
"""Later times, and those that are not finite, are no dates."""
_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9_.-]+")
_RUN_NAME = re.compile(r"\d{8}-\d{6}-([A-Za-z0-9_.-]+?)-\d+(-[0-9a-f]{8})?")


def is_run_folder(path: Path) -> bool:
    """Return True for the folder of a run, by its name and its record."""
    return bool(_RUN_NAME.fullmatch(path.name)) and (path / _RECORD).is_file()


class RankFolder:
    """The files of one rank in one attempt: `<run>/attempt_<attempt>/rank_<rank>/`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.output = path / "output.log"
        """Standard output and error of the rank, in the order of the writes."""
        self.fault = path / "fault.log"
        """The Python stack of a crash, as faulthandler writes it; removed if there was no crash."""
        self.error = path / "error.json"
        """The failure that the rank recorded, in the format of torch's elastic agent."""
        self.exit = path / EXIT_FILE
        """Where the script ended with code 0."""
        self.pid = path / "pid"
        self.beat = path / env.BEAT
        """The heartbeat, as `accel_runtime` writes it."""
        self.metrics = path / env.METRICS
        """The logged values, as the main process writes them."""
        self.description = path / env.DESCRIPTION
        """The description of the run, as the main process writes it."""
        self.configuration = path / env.CONFIGURATION
        """The configuration of the trackers, as the main process writes it."""
        self.checkpoints = path / env.CHECKPOINTS
        """The checkpoints that were saved and loaded, as the main process writes them."""
        self.thread = path / THREAD_FILE
        """The thread id, as faulthandler prints it; missing if the rank is a process."""
        self.thread_failures = path / THREAD_FAILURES_FILE
        """The exceptions that have ended threads; missing without any."""
        self.stacks = path / STACKS_FILE
        """The stacks, as faulthandler writes them at each request."""
        self.stack_request = path / STACK_REQUEST_FILE
        """The pipe in which the launcher requests the stacks; until the processes have ended."""
        self.trace = path / TRACE_FILE
        """Torch's record of the collectives, as the rank writes it at each request."""
        self.trace_request = path / TRACE_REQUEST_FILE
        """The pipe in which the launcher requests the record; until the processes have ended."""


@dataclass(frozen=True)
class RunStatus:
    """The record of a run, read once, and the conclusions from it."""

    record: Mapping[str, Any]
    is_running: bool
    """True if the launcher of the run, or the script that replaced it, is a process of this node."""
    is_elsewhere: bool
    """True for a run that may be in progress on another node, or in another container, that shares this folder."""
    ended: float | None
    """The end of the run in seconds since 1970; None if it is not known."""
    state: str
    """The state of the run, as text."""
    replaces_process: bool
    """True if the script replaced the process of `accel launch`, which then records no output and no exit code."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of one launch on this node."""

    path: Path

    @classmethod
    def create(
        cls,
        base: Path,
        target: str,
        record: Mapping[str, Any],
        *,
        keep_runs: int = KEEP_RUNS,
        keep_days: int = KEEP_DAYS,
    ) -> RunFolder:
        """Create the folder of a new run, and remove those of old runs."""
        # File names have at most 255 bytes.
        stem = _UNSAFE_CHARACTERS.sub("_", name_target(target))[:_MAX_STEM] or "run"
        path = base / f"{time.strftime('%Y%m%d-%H%M%S')}-{stem}-{os.getpid()}"
        if base == get_temporary_home():
            _create_temporary_home(base)
        try:
            path.mkdir(parents=True, mode=0o700)
        except FileExistsError:  # a container that shares the folder may have the same process id
            path = path.with_name(f"{path.name}-{uuid.uuid4().hex[:8]}")
            path.mkdir(mode=0o700)
        run = cls(path)
        pid = os.getpid()
        process = {
            "pid": pid,
            "pid_start": read_process_start(pid),
            "pid_namespace": _read_pid_namespace(),
            "host": socket.gethostname(),
        }
        try:
            run.update({"started": time.time(), **record, **process})
        except OSError:  # a full disk
            shutil.rmtree(path, ignore_errors=True)
            raise
        _remove_old_runs(base, keep_runs, keep_days)
        return run

    @property
    def record(self) -> dict[str, Any]:
        """The facts recorded about the run; empty if it was removed, or if no launch wrote the file.

        Fields that other programs have changed to another type are left out.
        """
        with suppress(OSError, ValueError):
            return _drop_invalid_fields(read_json(self.path / _RECORD))
        return {}

    def update(self, fields: Mapping[str, Any]) -> None:
        """Add fields to the record of the run, atomically."""
        file = self.path / _RECORD
        new = file.with_suffix(".new")
        new.write_text(json.dumps({**self.record, **fields}), encoding="utf-8")
        new.replace(file)

    @property
    def stem(self) -> str:
        """The name of the script without its folder and suffix, as far as the name of the run contains it."""
        match = _RUN_NAME.fullmatch(self.path.name)
        return match[1] if match else self.path.name

    def is_removable(self, oldest: float) -> bool:
        """Return True if a launch of this user created the folder, and its run has ended.

        A run that recorded no end is considered to have ended if no file of it was written for a day. If its launcher was
        started where its processes cannot be seen, none may be newer than `oldest`, in seconds since 1970.
        """
        run = self.read_status()
        if not run.record or not _RUN_NAME.fullmatch(self.path.name) or run.is_running:
            return False
        with suppress(OSError):
            status = self.path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                return False
            if "exit_code" in run.record:
                return True
            limit = time.time() - _DAY_S
            return self._find_newest_write() < (min(limit, oldest) if run.is_elsewhere else limit)
        return False

    def _find_newest_write(self) -> float:
        """Return when a file of the folder was last written, in seconds since 1970."""
        return max(path.lstat().st_mtime for path in [self.path, *self.path.rglob("*")])

    def read_status(self) -> RunStatus:
        """Read the record of the run once, and return it with the conclusions from it."""
        record = self.record
        replaces_process = bool(record.get("replaces_process"))
        beat = self._read_first_beat() if replaces_process else None
        beat_end = None if beat is None or beat.ended is None else beat.to_epoch(beat.ended)
        ended = record.get("ended", beat_end)
        has_ended = "exit_code" in record or beat_end is not None
        is_here = _is_on_this_node(record)
        is_running = is_here and "exit_code" not in record and _is_launcher_running(record)
        is_elsewhere = not is_here and not has_ended
        if is_running:
            state = "running"
        elif is_elsewhere:
            host = record.get("host")
            place = "in another container" if host == socket.gethostname() else f"on {host}"
            state = f"not ended, {place}"
        elif "exit_code" in record:
            state = f"exit code {record['exit_code']}"
        else:
            state = _describe_last_beat(beat) if replaces_process else "launcher was killed"
        return RunStatus(record, is_running, is_elsewhere, ended, state, replaces_process)

    def _read_first_beat(self) -> Beat | None:
        """Read the heartbeat of the first rank in the first attempt; None if it wrote none."""
        return Beat.read(self.get_rank(0, 0).beat)

    @property
    def attempts(self) -> list[int]:
        """The numbers of the attempts, in order."""
        return sorted(_list_numbers(self.path, "attempt"))

    def get_attempt(self, attempt: int) -> Path:
        """Return the folder of an attempt, existing or not."""
        return self.path / f"attempt_{attempt}"

    def get_rank(self, attempt: int, rank: int) -> RankFolder:
        """Return the folder of a rank, existing or not."""
        return RankFolder(self.get_attempt(attempt) / f"rank_{rank}")

    def get_host(self, attempt: int) -> RankFolder:
        """Return the folder of the process that starts the replicas of this node."""
        return RankFolder(self.get_attempt(attempt) / "host")

    def list_ranks(self, attempt: int) -> dict[int, RankFolder]:
        """Return the folders of the ranks of an attempt on this node, by rank."""
        return {
            rank: self.get_rank(attempt, rank)
            for rank in sorted(_list_numbers(self.get_attempt(attempt), "rank"))
        }


def _is_on_this_node(record: Mapping[str, Any]) -> bool:
    """Return True if the processes of a run are visible here."""
    # Containers may have the name of their host, but process ids of their own.
    has_same_host = record.get("host") in {None, socket.gethostname()}
    return has_same_host and record.get("pid_namespace") in {None, _read_pid_namespace()}


def _is_launcher_running(record: Mapping[str, Any]) -> bool:
    pid = record.get("pid", 0)
    if not 0 < pid <= MAX_PID:
        return False
    # After a long time, another process may have the id.
    has_same_start = record.get("pid_start") in {None, read_process_start(pid)}
    return has_same_start and is_process_running(pid)


def _describe_last_beat(beat: Beat | None) -> str:
    """Return how a script ended that replaced its launcher, as far as its heartbeat shows."""
    if beat is None:
        return "unknown"
    if beat.ended is None:
        return "killed or crashed"
    return "failed" if beat.has_failed else "ended"


def _drop_invalid_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record without the fields that have another type than a launch writes, and without impossible times."""
    return {name: value for name, value in record.items() if _is_valid_field(name, value)}


def _is_valid_field(name: str, value: Any) -> bool:
    if name in _TIME_FIELDS and not (isinstance(value, (int, float)) and abs(value) < _MAX_TIME_S):
        return False
    return isinstance(value, _FIELD_TYPES.get(name, object))


def _list_numbers(folder: Path, prefix: str) -> Iterator[int]:
    """Yield the numbers of the subfolders `<prefix>_<number>`; others, such as copies, are left out."""
    for path in folder.glob(f"{prefix}_*"):
        number = path.name.partition("_")[2]
        if number.isdecimal():
            yield int(number)


def get_log_home(environ: Mapping[str, str], log_dir: str | None = None) -> Path:
    """Return the folder of all runs: `log_dir`, in `ACCEL_HOME`, or the platform's folder for program state.

    If the last one cannot be written, as in a container with any user id, it is `get_temporary_home()`.
    """
    # Absolute, since ranks may change their working directory.
    if log_dir:
        return Path(log_dir).expanduser().absolute()
    if base := environ.get(env.HOME):
        return Path(base).expanduser().absolute() / "runs"
    import platformdirs  # noqa: PLC0415 - may be missing in the container of a job, which passes log_dir

    try:
        home = platformdirs.user_state_path("accel") / "runs"
    except RuntimeError:  # no home
        return get_temporary_home()
    # Relative without a home: `~` stays as it is.
    return home if home.is_absolute() and _is_writable(home) else get_temporary_home()


def get_temporary_home() -> Path:
    """Return the folder of the runs of a user without a home directory that can be written."""
    return Path(tempfile.gettempdir(), f"accel-{os.getuid()}", "runs")


def _is_writable(folder: Path) -> bool:
    """Return True if a folder, or the first of its parents that exists, can be written."""
    return next(os.access(path, os.W_OK | os.X_OK) for path in (folder, *folder.parents) if path.exists())


def _create_temporary_home(home: Path) -> None:
    """Create the temporary folder, in a directory in which other users may create one of its name before.

    Raises:
        OSError: It is not a folder of this user that only this user may enter.
    """
    with suppress(FileExistsError):
        home.parent.mkdir(mode=0o700)
    status = home.parent.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "not a folder that only this user may enter", str(home.parent))


def read_process_start(pid: int) -> int | None:
    """Return the time at which a process started, in clock ticks since the boot; None without /proc."""
    # The fields before it include the name of the program, which may contain anything.
    fields = read_text(Path("/proc", str(pid), "stat")).rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 else None  # noqa: PLR2004 - field 22 of proc(5)


def _read_pid_namespace() -> str | None:
    """Return the name of the namespace of process ids, which differs between containers; None without /proc."""
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - it names no path
    except OSError:
        return None


def _remove_old_runs(base: Path, keep_runs: int, keep_days: int) -> None:
    """Remove the folders of runs that have ended, beyond a number of newer runs or of days."""
    oldest = time.time() - keep_days * _DAY_S
    for index, run in enumerate(find_recent_runs(base)):
        status = run.read_status()
        is_old = index >= keep_runs or (status.ended or status.record.get("started", oldest)) < oldest
        if is_old and run.is_removable(oldest):
            shutil.rmtree(run.path, ignore_errors=True)


def find_recent_runs(base: Path) -> list[RunFolder]:
    """Find the runs in a folder, the newest first; runs dated by a wrong clock come last."""
    runs = [RunFolder(path.parent) for path in base.glob(f"*/{_RECORD}")]
    starts = [(run.record.get("started"), run) for run in runs]
    dated = [(start, run) for start, run in starts if isinstance(start, (int, float))]
    latest = time.time() + _CLOCK_TOLERANCE_S
    return [run for _, run in sorted(dated, key=lambda entry: (entry[0] <= latest, entry[0]), reverse=True)]


def find_run(base: Path, name: str | None = None, *, has_logs: bool = False) -> RunFolder:
    """Find a run by its id, a unique beginning of it, or the name of its script: the newest of several.

    Without a name, find the newest that started processes or may still do so; with `has_logs`, one that keeps their output,
    if there is one.

    Raises:
        UsageError: No run, or more than one, has this name.
    """
    runs = find_recent_runs(base)
    if not runs:
        raise UsageError(
            f"No runs found in {base}. Launch a script with accel launch, or use --log-dir if runs were written to another "
            "folder."
        )
    if name is None:
        statuses = [(run, run.read_status()) for run in runs]
        started = [
            (run, status)
            for run, status in statuses
            if run.attempts or status.is_running or status.is_elsewhere
        ]
        logged = [entry for entry in started if has_logs and not entry[1].replaces_process]
        return next(run for run, _ in logged or started or statuses)
    return _get_only(_match_runs(runs, name), name, base)


def find_running_run(base: Path, name: str | None = None) -> RunFolder:
    """Find a run in progress on this node by its name, as `find_run` does; without a name, the newest.

    Raises:
        UsageError: No run in progress, or more than one, has this name.
    """
    runs = find_recent_runs(base)
    running = [run for run in runs if run.read_status().is_running]
    if name is None:
        if not running:
            raise UsageError(f"No run of accel launch is in progress on this machine (searched {base}).")
        return running[0]
    exact = [run for run in runs if run.path.name == name]
    run = _get_only(exact or _match_runs(running, name) or _match_runs(runs, name), name, base)
    if run not in running:
        names = ", ".join(other.path.name for other in running[:_MAX_CANDIDATES]) or "none"
        state = run.read_status().state
        raise UsageError(f"Run {run.path.name!r} is not in progress here: {state}. Running: {names}.")
    return run


def _match_runs(runs: Sequence[RunFolder], name: str) -> list[RunFolder]:
    """Return the run with this id, or those whose ids begin with it, or the newest of a script with this name."""
    stem = name_target(name)
    matches = [run for run in runs if run.path.name == name]
    matches = matches or [run for run in runs if name and run.path.name.startswith(name)]
    return matches or [run for run in runs if run.stem == stem][:1]


def _get_only(matches: Sequence[RunFolder], name: str, base: Path) -> RunFolder:
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise UsageError(
            f"Run {name!r} not found in {base}. List the runs with accel runs, and submitted jobs with accel jobs list."
        )
    names = ", ".join(run.path.name for run in matches[:_MAX_CANDIDATES])
    more = f" and {len(matches) - _MAX_CANDIDATES} more" if len(matches) > _MAX_CANDIDATES else ""
    raise UsageError(f"Run {name!r} is ambiguous: it matches {names}{more}. Give the id of one run.")


_POLL_S = 0.1
_CHUNK = 1 << 16


def read_log(
    run: RunFolder, attempt: int | None = None, rank: int | None = None, *, follow: bool = False
) -> Iterator[bytes]:
    """Yield the log of a rank, by default of the last attempt and the lowest rank.

    With `follow`, yield it as it grows, also in later attempts, until the run has ended.
    """
    file: Path | None = None
    newest: Path | None
    position = 0
    while True:
        # Before reading: output up to the end of the run is read after it.
        is_last = not (follow and run.read_status().is_running)
        # An attempt that is starting has no file yet.
        with suppress(FileNotFoundError), open_file(file) if file else nullcontext() as log:
            if log:
                log.seek(position)
                yield from iter(partial(log.read, _CHUNK), b"")
                position = log.tell()
        try:
            newest = _find_log(run, attempt, rank)
        except UsageError:
            if is_last:
                raise
            newest = file
        if newest != file:
            file, position = newest, 0
        elif is_last:
            return
        else:
            time.sleep(_POLL_S)


def _find_log(run: RunFolder, attempt: int | None, rank: int | None) -> Path:
    name, attempts = run.path.name, run.attempts
    status = run.read_status()
    if status.replaces_process:
        raise UsageError(
            f"Run {name} has no log: with the launcher {status.record['launcher']}, its output went to the terminal. Launch with "
            "--set launcher.kind=torchrun to keep it, or choose another run of accel runs."
        )
    if not attempts:
        raise UsageError(f"Run {name} has no logs: it started no processes ({status.state}).")
    attempt = attempts[-1] if attempt is None else attempt
    if attempt not in attempts:
        raise UsageError(f"Run {name} has no attempt {attempt}. Its last attempt is {attempts[-1]}.")
    ranks = run.list_ranks(attempt)
    rank = min(ranks, default=0) if rank is None else rank
    if rank not in ranks:
        local = format_ranks(ranks).capitalize() if ranks else "No rank"
        raise UsageError(
            f"Attempt {attempt} of run {name} has no log of rank {rank}. {local} ran on this machine."
        )
    return ranks[rank].output


def format_ranks(ranks: Iterable[int]) -> str:
    """Return `rank 2`, `ranks 0 and 1`, `ranks 0, 2 and 3`, `ranks 0 to 7`."""
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 2 and last - first == len(numbers) - 1:  # noqa: PLR2004 - a range has three or more
        return f"ranks {first} to {last}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {last}"


REASON_SIZE = 1024
"""The bytes that SageMaker reads of the file."""


def write_reason(file: str | None, text: str) -> None:
    """Write the reason of a failure to a file, unless it has one: the first reason stays; None writes nothing."""
    if file == control.REPLY:
        control.reply(reason=encode_text(text)[:REASON_SIZE].decode(errors="ignore"))
        return
    # A full disk must not hide the failure itself.
    with suppress(OSError):
        # Kubernetes creates the file for the message of a container, and leaves it empty.
        if file and not (Path(file).exists() and Path(file).stat().st_size):
            data = encode_text(text)[:REASON_SIZE]
            # Drop a character that was cut in two.
            Path(file).write_bytes(data.decode(errors="ignore").encode("utf-8"))


def write_run_file(file: str | None, run: RunFolder) -> None:
    """Write the folder of a run to a file, for the program that has started the launch; None writes nothing."""
    with suppress(OSError):
        if file:
            Path(file).write_bytes(os.fsencode(run.path))


def fit_reason(head: str, lines: list[str]) -> str:
    """Join a head and the last lines, up to `REASON_SIZE` bytes."""
    text = "\n".join([head, *lines])
    return text if len(encode_text(text)) <= REASON_SIZE or not lines else fit_reason(head, lines[1:])
