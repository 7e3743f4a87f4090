"""How processes failed: what each left behind, and which of several failures was the first."""

from __future__ import annotations

import dataclasses
import itertools
import json
import linecache
import re
import signal
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from accel_cli import console
from accel_cli.runner import run_dir
from accel_cli.runner.rank_filter import format_ranks
from accel_cli.runner.run_dir import RankFolder
from accel_runtime import env

__all__ = [
    "Cause",
    "ExceptionInfo",
    "Failure",
    "FailureExchange",
    "Frame",
    "ProcessExit",
    "complete_log",
    "find_first",
    "format_cause",
    "format_for_file",
    "format_in_line",
    "format_stack",
    "print_report",
    "read_failure",
    "read_log_tail",
    "resolve_replica",
    "strip_escapes",
]


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
class ExceptionInfo:
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
    chain: tuple[ExceptionInfo, ...] = ()
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


class ProcessExit(NamedTuple):
    """What the launcher knows of a failure before it reads what the process left; see `Failure`."""

    rank: int
    pid: int
    exitcode: int
    processes: int | None = None


def resolve_replica(folder: RankFolder, known: ProcessExit) -> ProcessExit:
    """The replica that failed, out of what is left by the process that has started it.

    Args:
        folder: Of that process.
        known: What the launcher knows of that process.
    """
    left = _read_error_file(folder).get("accel") or {}
    exitcode = int(left.get("exitcode", known.exitcode))
    return ProcessExit(
        left.get("rank", known.rank), left.get("pid", known.pid), exitcode, left.get("replicas", 0)
    )


def find_first(failures: Iterable[Failure]) -> Failure:
    """The one that the others came from: the earliest of those nearest to the root.

    Of processes that waited for others or lost them, those come first whose error tells where the others were.
    """

    def order(failure: Failure) -> tuple[object, ...]:
        cause, waits = failure.cause, failure.cause in {Cause.WAITED, Cause.LOST}
        tells = any(_TELLS.search(link.kind) for link in failure.chain[:1])
        return Cause.WAITED if waits else cause, waits and not tells, cause, failure.time, failure.rank

    return min(failures, key=order)


def read_failure(folder: RankFolder, seen: float, **known: Any) -> Failure:
    """A failure with what its process left in its folder.

    Args:
        folder: The folder of the rank.
        seen: When the launcher noticed; the time of a process that left none itself.
        known: The other fields, as the launcher knows them.
    """
    left = _read_error_file(folder).get("accel") or {}
    crash, crashed = _parse_crash(folder) if known["exitcode"] < 0 else ((), 0.0)
    return Failure(
        time=float(left.get("time") or crashed or seen),
        log=str(folder.output),
        chain=tuple(map(_parse_exception, left.get("raised", ()))),
        exit=left.get("exit"),
        crash=crash,
        **known,
    )


def complete_log(folder: RankFolder) -> None:
    """Add to the log of a process that has ended what it left to the launcher to say; and tidy up."""
    said = _read_unlogged_text(folder)
    if said:
        with folder.output.open("a", encoding="utf-8", errors="surrogateescape") as log:
            log.write(said)
    if folder.fault.exists() and not folder.fault.stat().st_size:
        folder.fault.unlink()


def _read_unlogged_text(folder: RankFolder) -> str:
    """The traceback that ended it, the text it gave to `sys.exit`, or the stack of its crash."""
    left = _read_error_file(folder)
    if ours := left.get("accel"):
        exit_said = ours.get("exit")
        if exit_said is None:
            return str(left["message"]["extraInfo"]["py_callstack"])
        return f"{exit_said}\n" if isinstance(exit_said, str) else ""
    return _read_fault_file(folder)


def _read_error_file(folder: RankFolder) -> Mapping[str, Any]:
    """What is in the file of a failure; also one that torch's @record wrote."""
    try:
        return dict(json.loads(folder.error.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _parse_exception(told: Mapping[str, Any]) -> ExceptionInfo:
    frames = tuple(Frame(file, line or 0, name, text or "") for file, line, name, text in told["frames"])
    return ExceptionInfo(told["kind"], told["said"], frames)


def _parse_crash(folder: RankFolder) -> tuple[tuple[Frame, ...], float]:
    """The stack of the thread that crashed, the outermost call first, and when."""
    *_, thread = re.split(r"^(?=Current thread)", _read_fault_file(folder), flags=re.MULTILINE)
    found = _CRASH.findall(thread.partition("\n\n")[0]) if thread.startswith("Current thread") else []
    frames = [Frame(file, int(line), name, linecache.getline(file, int(line))) for file, line, name in found]
    return tuple(reversed(frames)), folder.fault.stat().st_mtime if frames else 0.0


def _read_fault_file(folder: RankFolder) -> str:
    try:
        return folder.fault.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


_LINES = 12
"""How many lines the traceback has at most, with what was raised before it."""
_MESSAGE = 4
"""How many lines of a message are shown."""
_WIDTH = 300
_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*(\x07|\x1b\\)|.)?")
_INSTALLED = re.compile(r"[\\/](?:site|dist)-packages[\\/](torch)[\\/]")
_FROZEN = re.compile(r"<frozen (\w+)")
_IN_PYTHON = re.compile(r"[\\/]lib[\\/]python[\d.]+[\\/](runpy|importlib|contextlib|threading|concurrent)\b")
_OURS = str(Path(env.__file__).parent)


def format_stack(failure: Failure) -> list[str]:
    """Where it happened: the traceback without its last line, or where a crash found the Python code."""
    if failure.exit is not None or not failure.chain:
        # The first calls are those that led to the script.
        return _folded([*itertools.dropwhile(_folds, failure.crash)], _LINES)
    raised, *origins = failure.chain
    said = _said(raised)
    lines = [_after(origin) for origin in origins[:2]]
    lines += _folded(raised.frames, _LINES - len(lines) - len(said) + 1)
    place = said[:-1] if _is_syntax(raised) else []
    return [strip_escapes(line) for line in [*lines, *place]]


def format_cause(failure: Failure) -> str:
    """What was raised: the last line of a traceback, or the first few of a long message."""
    if failure.exit is not None or not failure.chain:
        return ""
    said = _said(failure.chain[0])
    return strip_escapes(said[-1] if _is_syntax(failure.chain[0]) else "\n".join(said))


def read_log_tail(failure: Failure, count: int = 5) -> list[str]:
    """The last lines of its output."""
    try:
        with Path(failure.log).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 8192))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [_cut(strip_escapes(line)) for line in lines if line.strip()][-count:]


def strip_escapes(text: str) -> str:
    """A text that moves no cursor and rings no bell."""
    text = _ESCAPES.sub("", text)
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _is_syntax(link: ExceptionInfo) -> bool:
    """Whether what is printed of it begins with a place, as that of a syntax error does."""
    return link.said.startswith('  File "')


def _said(link: ExceptionInfo) -> list[str]:
    """Its name and message, cut where they are long."""
    lines = [_cut(line) for line in link.said.rstrip("\n").split("\n")]
    if len(lines) <= _MESSAGE or _is_syntax(link):
        return lines
    return [*lines[: _MESSAGE - 1], f"... {len(lines) - _MESSAGE + 1} more lines in its log"]


def _cut(line: str) -> str:
    more = len(line) - _WIDTH
    return line if more <= 0 else f"{line[:_WIDTH]}... ({more} more characters in its log)"


def _after(link: ExceptionInfo) -> str:
    """An exception that another came from, in a line."""
    own = [frame for frame in link.frames if not _folds(frame)]
    where = f" ({own[-1].file}, line {own[-1].line})" if own else ""
    return _cut(f"after {link.said.strip().splitlines()[-1]}") + where


def _folds(frame: Frame) -> str:
    """What a frame belongs to, if that is folded away."""
    if frame.file.startswith((f"{_OURS}/", f"{Path(__file__).parent}/")):
        return "accel"
    found = _INSTALLED.search(frame.file) or _FROZEN.match(frame.file) or _IN_PYTHON.search(frame.file)
    return found[1] if found else ""


def _folded(frames: Sequence[Frame], room: int) -> list[str]:
    """The frames as lines, no more than there is room for: the first call and the last ones stay."""
    own = [index for index, frame in enumerate(frames) if not _folds(frame)]
    for last in range(room // 2, 0, -1):
        lines = list(_lines(frames, {*own[:1], *own[-last:]}))
        if len(lines) <= room:
            return lines
    return list(_lines(frames, set(own[-1:])))


def _lines(frames: Sequence[Frame], shown: AbstractSet[int]) -> Iterator[str]:
    for kept, run in itertools.groupby(range(len(frames)), lambda index: index in shown):
        if kept:
            for index in run:
                yield from _line(frames[index])
        else:
            yield _fold([frames[index] for index in run])


def _line(frame: Frame) -> Iterator[str]:
    yield f'  File "{frame.file}", line {frame.line}, in {frame.name}'
    if frame.text.strip():
        yield _cut(f"    {frame.text.strip()}")


def _fold(frames: Sequence[Frame]) -> str:
    rooms = list(dict.fromkeys(map(_folds, frames)))
    where = f" in {', '.join(rooms)}" if all(rooms) else ""
    return f"  ... {len(frames)} frame{'s' if len(frames) > 1 else ''}{where}"


_HINTS = (
    (
        re.compile(r"connectFullMesh.*127\.0\.1\.1|127\.0\.1\.1.*[Cc]onnection refused", re.DOTALL),
        (
            "this machine's name resolves to 127.0.1.1, where others cannot reach it: give it its own address in "
            "/etc/hosts, or name the network interface: --set env.GLOO_SOCKET_IFNAME=eth0"
        ),
    ),
    (
        re.compile(r"OutOfMemoryError.*reserved by PyTorch but unallocated memory is large", re.DOTALL),
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lessens fragmentation",
    ),
    (
        re.compile(r"(gloo|ProcessGroup|Watchdog).*(Timed out waiting \d+ms|Timeout\(ms\)=\d+)", re.DOTALL),
        "another rank did not come to this collective within process_group_timeout; the ranks' logs say where each was",
    ),
)


def print_report(culprit: Failure, failures: Collection[Failure], *, processes: int, shown: bool) -> None:
    """Say what failed first, cause last.

    Args:
        culprit: The first failure of all machines.
        failures: Those of this machine.
        processes: The number of processes on all machines.
        shown: Whether the culprit's own output was on this screen.
    """
    away = "" if culprit in failures else f" on {culprit.host}"
    for line in _describe_other_failures(culprit, failures):
        console.note(line)
    if hint := _find_hint(culprit):
        console.note(f"hint: {hint}")
    who = f"rank {culprit.rank}" if processes else "the process that starts the replicas"
    console.note(f"everything {who} wrote is in {console.short(culprit.log)}{away}")
    body = [] if away else format_stack(culprit)
    if not (body or away or shown or culprit.chain):
        body = [f"  | {line}" for line in read_log_tail(culprit)]
    of = f" of {processes}" if processes else ""
    console.failure(f"{who}{of} on {culprit.host} (pid {culprit.pid})", body, describe_end(culprit))


def format_in_line(failure: Failure) -> str:
    """A failure that is not the end of the run."""
    return f"rank {failure.rank} on {failure.host}: {describe_end(failure).splitlines()[0]} (its log: {console.short(failure.log)})"


def format_for_file(failure: Failure) -> str:
    """A failure for who reads no log: which process, what it raised, and the last places as far as there is room."""
    head = f"exit code {failure.code} on {failure.host}, rank {failure.rank}: {describe_end(failure)}"
    return run_dir.fit_reason(head, format_stack(failure) or read_log_tail(failure))


def describe_end(failure: Failure) -> str:
    """How a process ended: its exception if it left one, else the signal or code."""
    if failure.exitcode < 0 and not failure.chain:
        return _describe_signal(failure)
    if isinstance(failure.exit, str):
        return f"exited with code {failure.code}: {strip_escapes(failure.exit).strip()[:2000]}"
    return format_cause(failure) or f"exited with code {failure.code}"


def _describe_signal(failure: Failure) -> str:
    number = -failure.exitcode
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if failure.exitcode != -signal.SIGKILL:
        return f"was ended by {name}"
    killer = "killed by the kernel for memory" if failure.memory else "often the out-of-memory killer"
    return f"was ended by {name}: {killer}"


def _describe_other_failures(culprit: Failure, failures: Collection[Failure]) -> Iterator[str]:
    """What became of the other processes of this machine, where it was not the launcher that ended them."""
    others = [failure for failure in failures if failure != culprit and failure.cause != Cause.STOPPED]
    lost = [failure.rank for failure in others if failure.cause > Cause.OWN]
    failed = [failure for failure in others if failure.cause == Cause.OWN]
    if lost:
        yield f"{format_ranks(lost)} only lost the connection to it, or waited for it"
    if failed:
        same = (
            "the same way"
            if {describe_end(failure) for failure in failed} == {describe_end(culprit)}
            else "too"
        )
        yield f"{format_ranks(failure.rank for failure in failed)} failed {same}, after it"


def _find_hint(failure: Failure) -> str | None:
    if failure.killed_worker:
        killer = "the kernel for memory" if failure.memory else "a SIGKILL, often the kernel's for memory"
        return (
            f"data-loader worker {failure.killed_worker} was killed by {killer}: fewer workers (num_workers), a smaller "
            "prefetch_factor or smaller batches need less memory"
        )
    said = "\n".join(f"{link.kind} {link.said}" for link in failure.chain)
    return next((hint for pattern, hint in _HINTS if pattern.search(said)), None)


_KEY = "accel/failure/"
_READ = "accel/failures_read"
_PATIENCE_S = {True: 1.0, False: 10.0}
"""How long the others are waited for, where this machine has a failure of its own, and where it has not."""
_LINGER_S = 4.0
"""How long a machine stays for the others to read what it said: the store may be here."""
_PERIOD_S = 0.05


class FailureExchange:
    """What this machine tells the others, and they it.

    Args:
        store: What the machines share.
        mine: The first failure of this machine.
        machine: Its number.
        machines: How many there are.
    """

    def __init__(self, store: Any, mine: Failure, *, machine: int, machines: int) -> None:
        self._store, self._machine, self._machines = store, machine, machines
        self._found = [mine]
        self._asked = threading.Event()
        # A store that has gone may keep its callers waiting; nobody waits for this thread for long.
        self._thread = threading.Thread(target=self._talk, args=(mine,), name="failures", daemon=True)

    def first(self) -> Failure:
        """The first failure of all machines, as far as they say in time."""
        if self._machines > 1:
            self._thread.start()
            self._asked.wait(_PATIENCE_S[False])
        return find_first(list(self._found))

    def linger(self) -> None:
        """Stay until the others have read it, but not for ever."""
        if self._machines > 1:
            self._thread.join(_LINGER_S)

    def _talk(self, mine: Failure) -> None:
        try:
            self._store.set(f"{_KEY}{self._machine}", _to_json(mine))
            self._listen(time.monotonic() + _PATIENCE_S[mine.cause == Cause.OWN])
            self._asked.set()
            read = self._store.add(_READ, 1)
            while read < self._machines:
                time.sleep(_PERIOD_S)
                read = self._store.add(_READ, 0)
        except RuntimeError:  # the machine that holds the store has gone
            self._asked.set()

    def _listen(self, late: float) -> None:
        others = {f"{_KEY}{other}" for other in range(self._machines)} - {f"{_KEY}{self._machine}"}
        while others and time.monotonic() < late:
            there = {key for key in others if self._store.check([key])}
            self._found += [_from_json(self._store.get(key)) for key in there]
            others -= there
            time.sleep(_PERIOD_S)


def _to_json(failure: Failure) -> str:
    """A failure without the places in the code, which mean something on its own machine only."""
    chain = [(link.kind, link.said[:2000]) for link in failure.chain]
    return json.dumps({**dataclasses.asdict(failure), "chain": chain, "crash": ()})


def _from_json(text: bytes) -> Failure:
    said = json.loads(text)
    chain = tuple(ExceptionInfo(kind, words) for kind, words in said.pop("chain"))
    return Failure(**{**said, "chain": chain, "crash": ()})
