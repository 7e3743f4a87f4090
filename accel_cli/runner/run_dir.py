"""The run folder and its logs: layout, search, following, selection of ranks, and the file with the failure reason."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_cli.errors import UsageError
from accel_cli.runner.worker import STACKS_FILE, THREAD_FILE
from accel_runtime import env
from accel_runtime.checkpoint.filesystem import is_process_running

__all__ = [
    "KEPT_RUNS",
    "REASON_SIZE",
    "RankFolder",
    "RunFolder",
    "find_recent_runs",
    "find_run",
    "fit_reason",
    "format_ranks",
    "get_log_home",
    "read_log",
    "read_text",
    "write_reason",
]


KEPT_RUNS = 10
"""The number of runs that are kept; a new run removes the oldest ones."""
_RECORD = "run.json"
_MAX_STEM = 100
"""Characters of the script's name in the name of its run."""
_CLOCK_TOLERANCE_S = 3600
"""A run that started further in the future has the time of a wrong clock."""
_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9_.-]+")
_RUN_NAME = re.compile(r"\d{8}-\d{6}-[A-Za-z0-9_.-]+-\d+(-[0-9a-f]{8})?")


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
        self.pid = path / "pid"
        self.beat = path / env.BEAT
        """The heartbeat, as `accel_runtime` writes it."""
        self.thread = path / THREAD_FILE
        """The thread id, as faulthandler prints it; missing if the rank is a process."""
        self.stacks = path / STACKS_FILE
        """The stacks, as faulthandler writes them at each request."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of one launch on this node."""

    path: Path

    @classmethod
    def create(cls, base: Path, target: str, record: Mapping[str, Any]) -> RunFolder:
        """Create the folder of a new run, and remove the oldest ones."""
        # File names have at most 255 bytes.
        stem = _UNSAFE_CHARACTERS.sub("_", Path(target).stem)[:_MAX_STEM] or "run"
        path = base / f"{time.strftime('%Y%m%d-%H%M%S')}-{stem}-{os.getpid()}"
        try:
            path.mkdir(parents=True, mode=0o700)
        except FileExistsError:  # a container that shares the folder may have the same process id
            path = path.with_name(f"{path.name}-{uuid.uuid4().hex[:8]}")
            path.mkdir(mode=0o700)
        run = cls(path)
        run.update({**record, "pid": os.getpid(), "host": socket.gethostname(), "started": time.time()})
        for old in find_recent_runs(base)[KEPT_RUNS:]:
            if old.is_removable:
                shutil.rmtree(old.path, ignore_errors=True)
        return run

    @property
    def record(self) -> dict[str, Any]:
        """The facts recorded about the run; empty if it was removed, or if no launch wrote the file."""
        file = self.path / _RECORD
        with suppress(OSError, ValueError):
            # Opening a named pipe would block.
            if stat.S_ISREG(file.stat().st_mode):
                record = json.loads(file.read_text(encoding="utf-8"))
                return record if isinstance(record, dict) else {}
        return {}

    def update(self, fields: Mapping[str, Any]) -> None:
        """Add fields to the record of the run, atomically."""
        file = self.path / _RECORD
        new = file.with_suffix(".new")
        new.write_text(json.dumps({**self.record, **fields}), encoding="utf-8")
        new.replace(file)

    @property
    def is_removable(self) -> bool:
        """Return True if a launch of this user created the folder, and its run has ended."""
        if self.is_running or self.is_elsewhere or not _RUN_NAME.fullmatch(self.path.name):
            return False
        with suppress(OSError):
            status = self.path.lstat()
            return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        return False

    @property
    def is_running(self) -> bool:
        """Return True if the launcher of the run is a process of this node."""
        record = self.record
        is_here = not self.is_elsewhere and "exit_code" not in record
        return is_here and "pid" in record and is_process_running(record["pid"])

    @property
    def is_elsewhere(self) -> bool:
        """Return True for a run in progress whose launcher is on another node that shares this folder."""
        record = self.record
        return "exit_code" not in record and record.get("host") not in {None, socket.gethostname()}

    @property
    def state(self) -> str:
        """The state of the run, as text."""
        if self.is_running:
            return "running"
        if self.is_elsewhere:
            return f"not ended, on {self.record['host']}"
        code = self.record.get("exit_code")
        return "launcher was killed" if code is None else f"exit code {code}"

    @property
    def attempts(self) -> list[int]:
        """The numbers of the attempts, in order."""
        return sorted(int(path.name.partition("_")[2]) for path in self.path.glob("attempt_*"))

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
        folders = self.get_attempt(attempt).glob("rank_*")
        return dict(sorted((int(path.name.partition("_")[2]), RankFolder(path)) for path in folders))


def read_text(file: Path) -> str:
    """Read a text file; return an empty text if that fails."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def get_log_home(environ: Mapping[str, str], log_dir: str | None = None) -> Path:
    """Return the folder of all runs: `log_dir`, in `ACCEL_HOME`, or the platform's folder for program state."""
    # Absolute, since ranks may change their working directory.
    if log_dir:
        return Path(log_dir).expanduser().absolute()
    if base := environ.get(env.HOME):
        return Path(base).expanduser().absolute() / "runs"
    import platformdirs  # noqa: PLC0415 - may be missing in the container of a job, which passes log_dir

    return platformdirs.user_state_path("accel") / "runs"


def find_recent_runs(base: Path) -> list[RunFolder]:
    """Find the runs in a folder, the newest first; runs dated by a wrong clock come last."""
    runs = [RunFolder(path.parent) for path in base.glob(f"*/{_RECORD}")]
    starts = [(run.record.get("started"), run) for run in runs]
    dated = [(start, run) for start, run in starts if isinstance(start, (int, float))]
    latest = time.time() + _CLOCK_TOLERANCE_S
    return [run for _, run in sorted(dated, key=lambda entry: (entry[0] <= latest, entry[0]), reverse=True)]


def find_run(base: Path, name: str | None = None) -> RunFolder:
    """Find a run by its name; without a name, the newest that started processes or may still do so."""
    runs = find_recent_runs(base)
    if not runs:
        raise UsageError(
            f"no runs found in {base}: the launchers torchrun and xla keep their runs. Use --log-dir if they were written to "
            "another folder."
        )
    if name is None:
        return next((run for run in runs if run.attempts or run.is_running or run.is_elsewhere), runs[0])
    match = next((run for run in runs if run.path.name == name), None)
    if match is None:
        raise UsageError(f"run {name!r} not found in {base}. List the runs with accel logs --list.")
    return match


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
        is_last = not (follow and run.is_running)
        # Opening a named pipe would block; an attempt that is starting has no file yet.
        if file and file.is_file():
            with file.open("rb") as log:
                log.seek(position)
                yield from iter(lambda: log.read(_CHUNK), b"")
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
    if not attempts:
        raise UsageError(f"run {name} has no logs: it started no processes.")
    attempt = attempts[-1] if attempt is None else attempt
    if attempt not in attempts:
        raise UsageError(f"run {name} has no attempt {attempt}; the last is {attempts[-1]}")
    ranks = run.list_ranks(attempt)
    rank = min(ranks, default=0) if rank is None else rank
    if rank not in ranks:
        local = f"{format_ranks(ranks)} ran on this machine" if ranks else "no rank ran on this machine"
        raise UsageError(f"attempt {attempt} of run {name} has no log of rank {rank}; {local}")
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
    """Write the reason of a failure to a file, unless it exists: the first reason stays; None writes nothing."""
    # A full disk must not hide the failure itself.
    with suppress(OSError):
        if file and not Path(file).exists():
            data = _encode(text)[:REASON_SIZE]
            # Drop a character that was cut in two.
            Path(file).write_bytes(data.decode(errors="ignore").encode())


def fit_reason(head: str, lines: list[str]) -> str:
    """Join a head and the last lines, up to `REASON_SIZE` bytes."""
    text = "\n".join([head, *lines])
    return text if len(_encode(text)) <= REASON_SIZE or not lines else fit_reason(head, lines[1:])


def _encode(text: str) -> bytes:
    return text.encode(errors="backslashreplace")
