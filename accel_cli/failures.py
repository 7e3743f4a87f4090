"""How processes failed: what each left behind, and which of several failures was the first."""

from __future__ import annotations

import json
import linecache
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from accel_cli.runs import RankFolder

__all__ = ["Cause", "Failure", "Frame", "Known", "Link", "complete", "first", "read", "replica"]

_LOST = re.compile(
    r"RankLostError|DistNetworkError|connectFullMesh|ncclRemoteError|communicator was aborted|"
    r"(?i:connection (closed|reset|refused|was broken)|broken pipe|read error|remote process exited|"
    r"no route to host|failed to (recv|send))"
)
_WAITED = re.compile(r"StallError|Watchdog caught collective|(?i:timed out|timeout)")
_TELLS = re.compile(r"^accel_runtime\..*\.(StallError|RankLostError)$")
_TALKS = re.compile(
    r"^(accel_runtime\.collectives|torch\.distributed)\b|gloo|nccl|NCCL|smddp|TCPStore|c10d|ProcessGroup"
)
_WORKER_KILLED = re.compile(r"DataLoader worker \(pid (\d+)\) is killed by signal: Killed")
"""What torch says of a data-loader worker that SIGKILL ended."""
_CRASH = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


class Cause(IntEnum):
    """What a failure is to those of the others: the lower, the nearer to the root."""

    OWN = 0
    ABORTED = 1
    """Ended by SIGABRT: a library gave up, often for what another process did."""
    WAITED = 2
    """Waited for other processes longer than allowed."""
    LOST = 3
    """Lost its connection to another process."""
    STOPPED = 4
    """Still ran when the launcher ended it."""


@dataclass(frozen=True)
class Frame:
    """A line of a traceback."""

    file: str
    line: int
    name: str
    text: str


@dataclass(frozen=True)
class Link:
    """An exception, alone or in a chain."""

    kind: str
    """Its class, with the module."""
    said: str
    """Its name and message, as Python prints them."""
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True)
class Failure:
    """How one process failed."""

    rank: int
    host: str
    pid: int
    exitcode: int
    """As `subprocess` gives it: -n where signal n ended it."""
    time: float
    log: str
    """The file with everything it wrote."""
    stopped: bool = False
    """Whether it still ran when the launcher ended all processes."""
    chain: tuple[Link, ...] = ()
    """The exception it raised, and what that came from."""
    memory: bool = False
    """Whether the kernel is known to have killed it, or a data-loader worker of it, for memory."""
    exit: int | str | None = None
    """What it gave to `sys.exit`."""
    crash: tuple[Frame, ...] = ()
    """Where its Python code was when a signal ended it."""
    processes: int | None = None
    """How many ranks there are, where the launcher does not know: 0 is none yet."""

    @property
    def code(self) -> int:
        """What the launcher exits with: 128 + n where signal n ended the process."""
        if self.chain and self.exitcode in {-signal.SIGTERM, -signal.SIGKILL}:
            # It had failed, and the launcher ended it before it was done with ending.
            return self.exit if isinstance(self.exit, int) else 1
        return self.exitcode if self.exitcode >= 0 else 128 - self.exitcode

    @property
    def killed_worker(self) -> int | None:
        """The id of a data-loader worker that SIGKILL ended, which made this process fail."""
        found = (_WORKER_KILLED.search(link.said) for link in self.chain)
        return next((int(match[1]) for match in found if match), None)

    @property
    def cause(self) -> Cause:
        """What it is to the failures of others."""
        if self.stopped:
            return Cause.STOPPED
        if self.exitcode == -signal.SIGABRT and not self.chain:
            return Cause.ABORTED
        talked = [f"{link.kind}: {link.said}" for link in self.chain]
        talked = [said for said in talked if _TALKS.search(said)]
        if any(map(_LOST.search, talked)):
            return Cause.LOST
        return Cause.WAITED if any(map(_WAITED.search, talked)) else Cause.OWN


class Known(NamedTuple):
    """What the launcher knows of a failure before it reads what the process left; see `Failure`."""

    rank: int
    pid: int
    exitcode: int
    processes: int | None = None


def replica(folder: RankFolder, known: Known) -> Known:
    """The replica that failed, out of what is left by the process that has started it.

    Args:
        folder: Of that process.
        known: What the launcher knows of that process.
    """
    left = _left(folder).get("accel") or {}
    exitcode = int(left.get("exitcode", known.exitcode))
    return Known(left.get("rank", known.rank), left.get("pid", known.pid), exitcode, left.get("replicas", 0))


def first(failures: Iterable[Failure]) -> Failure:
    """The one that the others came from: the earliest of those nearest to the root.

    Of processes that waited for others or lost them, those come first whose error tells where the others were.
    """

    def order(failure: Failure) -> tuple[object, ...]:
        cause, waits = failure.cause, failure.cause in {Cause.WAITED, Cause.LOST}
        tells = any(_TELLS.search(link.kind) for link in failure.chain[:1])
        return Cause.WAITED if waits else cause, waits and not tells, cause, failure.time, failure.rank

    return min(failures, key=order)


def read(folder: RankFolder, seen: float, **known: Any) -> Failure:
    """A failure with what its process left in its folder.

    Args:
        folder: The folder of the rank.
        seen: When the launcher noticed; the time of a process that left none itself.
        known: The other fields, as the launcher knows them.
    """
    left = _left(folder).get("accel") or {}
    crash, crashed = _crash(folder) if known["exitcode"] < 0 else ((), 0.0)
    return Failure(
        time=float(left.get("time") or crashed or seen),
        log=str(folder.output),
        chain=tuple(map(_link, left.get("raised", ()))),
        exit=left.get("exit"),
        crash=crash,
        **known,
    )


def complete(folder: RankFolder) -> None:
    """Add to the log of a process that has ended what it left to the launcher to say; and tidy up."""
    said = _unsaid(folder)
    if said:
        with folder.output.open("a", encoding="utf-8", errors="surrogateescape") as log:
            log.write(said)
    if folder.fault.exists() and not folder.fault.stat().st_size:
        folder.fault.unlink()


def _unsaid(folder: RankFolder) -> str:
    """The traceback that ended it, the text it gave to `sys.exit`, or the stack of its crash."""
    left = _left(folder)
    if ours := left.get("accel"):
        exit_said = ours.get("exit")
        if exit_said is None:
            return str(left["message"]["extraInfo"]["py_callstack"])
        return f"{exit_said}\n" if isinstance(exit_said, str) else ""
    return _text(folder)


def _left(folder: RankFolder) -> Mapping[str, Any]:
    """What is in the file of a failure; also one that torch's @record wrote."""
    try:
        return dict(json.loads(folder.error.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _link(told: Mapping[str, Any]) -> Link:
    frames = tuple(Frame(file, line or 0, name, text or "") for file, line, name, text in told["frames"])
    return Link(told["kind"], told["said"], frames)


def _crash(folder: RankFolder) -> tuple[tuple[Frame, ...], float]:
    """The stack of the thread that crashed, the outermost call first, and when."""
    *_, thread = re.split(r"^(?=Current thread)", _text(folder), flags=re.MULTILINE)
    found = _CRASH.findall(thread.partition("\n\n")[0]) if thread.startswith("Current thread") else []
    frames = [Frame(file, int(line), name, linecache.getline(file, int(line))) for file, line, name in found]
    return tuple(reversed(frames)), folder.fault.stat().st_mtime if frames else 0.0


def _text(folder: RankFolder) -> str:
    try:
        return folder.fault.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
