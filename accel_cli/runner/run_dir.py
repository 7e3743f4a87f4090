"""What a run leaves on disk: a folder for each launch, and in it one for each rank of each attempt."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_cli.errors import UsageError
from accel_cli.runner.rank_filter import format_ranks
from accel_cli.runner.replica_folder import THREAD
from accel_cli.runner.worker import STACKS
from accel_runtime import env

__all__ = [
    "HOST_KEY",
    "KEPT",
    "REASON_FILE",
    "REASON_SIZE",
    "LogSelection",
    "RankFolder",
    "RunFolder",
    "find_named_run",
    "find_recent_run",
    "fit_reason",
    "get_log_home",
    "write_reason",
]


KEPT = 10
"""How many runs stay; the oldest go when a new one begins."""
_RECORD = "run.json"
_LONGEST_STEM = 100
"""Characters of a script's name in the name of its run."""
_AHEAD_S = 3600
"""Seconds that a run may have started in the future before its time is taken for that of a wrong clock."""
_UNFIT = re.compile(r"[^A-Za-z0-9_.-]+")
_NAME = re.compile(r"\d{8}-\d{6}-[A-Za-z0-9_.-]+-\d+(-[0-9a-f]{8})?")
"""The form of a run folder's name."""


@dataclass(frozen=True)
class RankFolder:
    """What one process of one attempt leaves: `<run>/attempt_<attempt>/rank_<rank>/`."""

    path: Path

    @property
    def output(self) -> Path:
        """Everything the process wrote to its standard output and error, in the order it was written."""
        return self.path / "output.log"

    @property
    def fault(self) -> Path:
        """The Python stack of a crash, as faulthandler writes it; gone where there was none."""
        return self.path / "fault.log"

    @property
    def error(self) -> Path:
        """The failure it recorded, as torch's elastic agent writes it (JSON)."""
        return self.path / "error.json"

    @property
    def pid(self) -> Path:
        """Its process id, as text."""
        return self.path / "pid"

    @property
    def beat(self) -> Path:
        """How far it is, as `accel_runtime` writes it: see `env.BEAT`."""
        return self.path / env.BEAT

    @property
    def thread(self) -> Path:
        """Which thread of its process it is, as faulthandler names it; absent where the process is its own."""
        return self.path / THREAD

    @property
    def stacks(self) -> Path:
        """What it was in whenever it was asked, as faulthandler writes it."""
        return self.path / STACKS


@dataclass(frozen=True)
class RunFolder:
    """The folder of one launch on this machine."""

    path: Path

    @classmethod
    def create(cls, base: Path, target: str, about: Mapping[str, Any]) -> RunFolder:
        """Make the folder of a new run, and let the oldest ones go.

        Raises:
            OSError: The folder cannot be written.
        """
        # A name of a file has 255 bytes at most.
        stem = _UNFIT.sub("_", Path(target).stem)[:_LONGEST_STEM] or "run"
        path = base / f"{time.strftime('%Y%m%d-%H%M%S')}-{stem}-{os.getpid()}"
        try:
            path.mkdir(parents=True, mode=0o700)
        except FileExistsError:  # of a container that shares this folder, and has the same process id
            path = path.with_name(f"{path.name}-{uuid.uuid4().hex[:8]}")
            path.mkdir(mode=0o700)
        run = cls(path)
        run.record({**about, "pid": os.getpid(), "host": socket.gethostname(), "started": time.time()})
        for old in find_recent_run(base)[KEPT:]:
            if old.is_own and not (old.running or old.is_elsewhere):
                shutil.rmtree(old.path, ignore_errors=True)
        return run

    @property
    def about(self) -> dict[str, Any]:
        """What was recorded about the run; empty if it was removed, or the file is not one that a launch wrote."""
        file = self.path / _RECORD
        with suppress(OSError, ValueError):
            # Whoever opens a named pipe waits for ever.
            if stat.S_ISREG(file.stat().st_mode):
                about = json.loads(file.read_text(encoding="utf-8"))
                return about if isinstance(about, dict) else {}
        return {}

    @property
    def is_own(self) -> bool:
        """Return True if a launch of this user made the folder, so that a later one may remove it."""
        with suppress(OSError):
            found = self.path.lstat()
            return (
                stat.S_ISDIR(found.st_mode)
                and found.st_uid == os.getuid()
                and bool(_NAME.fullmatch(self.path.name))
            )
        return False

    def record(self, about: Mapping[str, Any]) -> None:
        """Add to what is recorded about the run; the file is whole at every moment."""
        file = self.path / _RECORD
        fresh = file.with_suffix(".new")
        fresh.write_text(json.dumps({**self.about, **about}), encoding="utf-8")
        fresh.replace(file)

    @property
    def running(self) -> bool:
        """Whether its launcher still lives."""
        about = self.about
        return not self.is_elsewhere and "pid" in about and "exit_code" not in about and _exists(about["pid"])

    @property
    def is_elsewhere(self) -> bool:
        """Return True if the run has not ended, and its launcher is on another machine that shares this folder."""
        about = self.about
        return "exit_code" not in about and about.get("host") not in {None, socket.gethostname()}

    @property
    def state(self) -> str:
        """What became of it, in words."""
        if self.running:
            return "running"
        if self.is_elsewhere:
            return f"not ended, on {self.about['host']}"
        code = self.about.get("exit_code")
        return "launcher was killed" if code is None else f"exit code {code}"

    @property
    def attempts(self) -> list[int]:
        """The numbers of the attempts, in order."""
        return sorted(int(path.name.partition("_")[2]) for path in self.path.glob("attempt_*"))

    def rank(self, attempt: int, rank: int) -> RankFolder:
        """The folder of a process, whether it exists or not."""
        return RankFolder(self.attempt(attempt) / f"rank_{rank}")

    def host(self, attempt: int) -> RankFolder:
        """The folder of a process that starts the ranks of its machine itself, and is none of them."""
        return RankFolder(self.attempt(attempt) / "host")

    def attempt(self, attempt: int) -> Path:
        """The folder of an attempt."""
        return self.path / f"attempt_{attempt}"

    def ranks(self, attempt: int) -> dict[int, RankFolder]:
        """The processes of an attempt on this machine, by rank."""
        folders = self.attempt(attempt).glob("rank_*")
        found = {int(path.name.partition("_")[2]): RankFolder(path) for path in folders}
        return dict(sorted(found.items()))


def _exists(pid: int) -> bool:
    """Return True if a process of this id runs; there may be no /proc to look into."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def get_log_home(environ: Mapping[str, str], log_dir: str | None = None) -> Path:
    """Where runs are kept: `log_dir`, or `ACCEL_HOME`, or where this platform keeps a program's state."""
    # Absolute, since the processes may change their folder.
    if log_dir:
        return Path(log_dir).expanduser().absolute()
    if base := environ.get(env.HOME):
        return Path(base).expanduser().absolute() / "runs"
    import platformdirs  # noqa: PLC0415 - a container of a job may lack it, and says where

    return platformdirs.user_state_path("accel") / "runs"


def find_recent_run(base: Path) -> list[RunFolder]:
    """The runs in a folder, the newest first; last those that a clock far ahead has dated."""
    found = [RunFolder(path.parent) for path in base.glob(f"*/{_RECORD}")]
    begun = [(run.about.get("started"), run) for run in found]
    known = [(started, run) for started, run in begun if isinstance(started, (int, float))]
    latest = time.time() + _AHEAD_S
    return [run for _, run in sorted(known, key=lambda entry: (entry[0] <= latest, entry[0]), reverse=True)]


def find_named_run(base: Path, name: str | None = None) -> RunFolder:
    """The run of that name; without one the last that started processes, or may still do so.

    Raises:
        UsageError: There is none.
    """
    found = find_recent_run(base)
    if not found:
        raise UsageError(
            f"no run is kept in {base}; runs with the launchers torchrun and xla are, and --log-dir names another folder"
        )
    if name is None:
        return next((run for run in found if run.attempts or run.running or run.is_elsewhere), found[0])
    chosen = next((run for run in found if run.path.name == name), None)
    if chosen is None:
        raise UsageError(f"there is no run {name!r} in {base}; accel logs --list has those that are kept")
    return chosen


_PERIOD_S = 0.1
_CHUNK = 1 << 16


@dataclass(frozen=True)
class LogSelection:
    """Which log: None is the last attempt, and the lowest rank."""

    run: RunFolder
    attempt: int | None
    rank: int | None

    def once(self) -> Iterator[bytes]:
        """What is there.

        Raises:
            UsageError: The attempt or the rank is not in the run.
        """
        yield from _from(self._folder().output, 0)

    def follow(self) -> Iterator[bytes]:
        """What is there and what comes, also from later attempts, until the run has ended.

        Raises:
            UsageError: The attempt or the rank is not in the run.
        """
        while self.run.running and not self._there():
            time.sleep(_PERIOD_S)
        file, position = self._folder().output, 0
        while True:
            # Asked first: what is written until then is read after it.
            last = not self.run.running
            for data in _from(file, position):
                position += len(data)
                yield data
            if file != (newest := self._folder().output):
                file, position = newest, 0
            elif last:
                return
            else:
                time.sleep(_PERIOD_S)

    def _there(self) -> bool:
        try:
            return self._folder().output.exists()
        except UsageError:
            return False

    def _folder(self) -> RankFolder:
        name, attempts = self.run.path.name, self.run.attempts
        if not attempts:
            raise UsageError(f"no process of the run {name} was started")
        attempt = attempts[-1] if self.attempt is None else self.attempt
        if attempt not in attempts:
            raise UsageError(f"the run {name} has no attempt {attempt}; its last is {attempts[-1]}")
        ranks = self.run.ranks(attempt)
        rank = min(ranks, default=0) if self.rank is None else self.rank
        if rank not in ranks:
            here = f"{format_ranks(ranks)} ran on this machine" if ranks else "no rank ran on this machine"
            raise UsageError(f"attempt {attempt} of the run {name} has no log of rank {rank}; {here}")
        return ranks[rank]


def _from(file: Path, position: int) -> Iterator[bytes]:
    # Opening a named pipe would wait for a writer.
    if not file.is_file():  # also an attempt that is only about to start
        return
    with file.open("rb") as log:
        log.seek(position)
        yield from iter(lambda: log.read(_CHUNK), b"")


REASON_SIZE = 1024
"""Bytes that are read of it, on SageMaker."""
REASON_FILE = "failure_file"
"""The key of a plan's `agent` that names it."""
HOST_KEY = "host"
"""The key of a plan's `agent` that names this machine, where its own name means nothing."""


def write_reason(agent: Mapping[str, Any], text: str) -> None:
    """Write the reason, where the plan names a file for it; one that is there already was first.

    Args:
        agent: What the plan tells the agent.
        text: The reason.
    """
    # The run has failed already: a disk that is full is no reason to hide why.
    with contextlib.suppress(OSError):
        if agent.get(REASON_FILE) and not Path(agent[REASON_FILE]).exists():
            Path(agent[REASON_FILE]).write_bytes(_cut(text))


def fit_reason(head: str, lines: list[str]) -> str:
    """A text with as many of the last lines below its head as there is room for."""
    whole = "\n".join([head, *lines])
    return whole if len(_bytes(whole)) <= REASON_SIZE or not lines else fit_reason(head, lines[1:])


def _bytes(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


def _cut(text: str) -> bytes:
    # No letter is left in half.
    return _bytes(text)[:REASON_SIZE].decode(errors="ignore").encode()
