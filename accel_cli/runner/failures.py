"""Failures of ranks: read the record of each, find the first across nodes, format and print the report."""

from __future__ import annotations

import itertools
import json
import linecache
import re
import signal
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from accel_cli import console
from accel_cli.failure_hints import find_hint
from accel_cli.runs.run_dir import RankFolder, fit_reason, format_ranks
from accel_cli.runs.run_files import read_bytes, read_last_objects, read_text
from accel_runtime.environment import settings as env
from accel_runtime.environment.text import decode_text, encode_text, parse_json

__all__ = [
    "Cause",
    "ExceptionInfo",
    "Failure",
    "FailureExchange",
    "Frame",
    "complete_log",
    "find_root_failure",
    "format_cause",
    "format_one_line",
    "format_reason",
    "format_stack",
    "is_unexplained_timeout",
    "names_fork",
    "print_lingering",
    "print_report",
    "read_failure",
    "read_log_tail",
    "read_record",
    "read_thread_failures",
    "strip_escapes",
]


_LOST_PEER = re.compile(
    r"RankLostError|DistNetworkError|connectFullMesh|ncclRemoteError|communicator was aborted|"
    r"(?i:connection (closed|reset|refused|was broken)|broken pipe|read error|remote process exited|"
    r"no route to host|failed to (recv|send))"
)
_TIMED_OUT = re.compile(r"StallError|Watchdog caught collective|(?i:timed out|timeout)")
_NAMES_RANKS = re.compile(r"^accel_runtime\..*\.(StallError|RankLostError)$")
"""Errors whose message names the ranks that are missing."""
_COMMUNICATION = re.compile(
    r"^(accel_runtime\.collectives|torch\.distributed)\b|gloo|nccl|NCCL|smddp|TCPStore|c10d|ProcessGroup"
)
_WORKER_LOST = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (\d+(?:, \d+)*)\) (?:is killed by signal: Killed|exited unexpectedly)"
)
_WORKER_NOT_KILLED = re.compile(
    r"DataLoader worker \(pid \d+\) (?:exited unexpectedly with exit code|is killed by signal: (?!Killed))"
)
"""The end of a worker as torch's handler of SIGCHLD names it; the error of the loader follows, which does not."""
_CHILD_KILLED = re.compile(r"died with <Signals\.SIGKILL|terminated with signal SIGKILL|\bexit ?code:? -9\b")
"""In the messages of subprocess, torch.multiprocessing and concurrent programs about a child process."""
_CODES_OF_SIGKILL = frozenset({128 + signal.SIGKILL, 256 - signal.SIGKILL})
"""The exit codes of a shell and of `sys.exit(process.returncode)` whose child was killed."""
_RANK = re.compile(r"\brank \d+\b")
_CRASH_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


class Cause(IntEnum):
    """Cause of a failure; the lowest value is the nearest to the root cause."""

    PRIMARY = 0
    """Not a consequence of another rank's failure, as far as its record shows."""
    ABORTED = 1
    """Terminated by SIGABRT, often from a library that lost another process."""
    TIMED_OUT = 2
    """Waited for another process longer than allowed."""
    LOST_PEER = 3
    """Lost its connection to another process."""
    STOPPED = 4
    """Still ran when the launcher stopped it."""


@dataclass(frozen=True)
class Frame:
    """One frame of a traceback."""

    file: str
    line: int
    name: str
    text: str


@dataclass(frozen=True)
class ExceptionInfo:
    """One exception of a chain."""

    kind: str
    """The class, with its module."""
    text: str
    """The class name and message, as Python prints them."""
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True)
class Failure:
    """The failure of one process."""

    rank: int
    host: str
    pid: int
    exitcode: int
    """The exit code as `subprocess` returns it: -n for signal n."""
    time: float
    """Seconds on the monotonic clock; of failures that were read, since the start of the attempt.

    All nodes leave the rendezvous of an attempt together, so that these times can be compared.
    """
    log: str = ""
    stopped: bool = False
    """True if it still ran when the launcher stopped all processes."""
    chain: tuple[ExceptionInfo, ...] = ()
    """The exception that it raised, and the causes of that."""
    out_of_memory: bool = False
    """True if the kernel killed it, or another process of its control group during the run, because memory ran out."""
    exit: int | str | None = None
    """The argument of `sys.exit`."""
    crash: tuple[Frame, ...] = ()
    """The Python stack at a fatal signal."""
    world_size: int | None = None
    """The number of replicas, if the launcher does not start them itself; 0 if none has started yet."""
    early_exits: str = ""
    """The ranks that had exited with code 0 before it lost or awaited another rank, as text."""
    thread_failures: str = ""
    """The exceptions that had ended threads of it, as text."""

    @property
    def code(self) -> int:
        """The exit code of the launcher for this failure: 128 + n for signal n, and its own of a process that ended while it failed."""
        if self.chain and self.exitcode in {-signal.SIGTERM, -signal.SIGKILL}:
            # It had failed, and the launcher ended it while it was exiting.
            return self.exit if isinstance(self.exit, int) else 1
        return self.exitcode if self.exitcode >= 0 else 128 - self.exitcode

    def count_ranks(self, started: int) -> int:
        """Return the number of ranks of the run: that of its replicas, or those that the launcher has started."""
        return started if self.world_size is None else self.world_size

    @property
    def is_consequence(self) -> bool:
        """True if the failure seems to be the consequence of what happened to another rank."""
        return self.cause in {Cause.ABORTED, Cause.TIMED_OUT, Cause.LOST_PEER}

    @property
    def lost_workers(self) -> tuple[int, ...]:
        """The process ids of data-loader workers whose end caused this failure, if the kernel may have killed them."""
        if any(_WORKER_NOT_KILLED.search(link.text) for link in self.chain):
            return ()
        matches = (_WORKER_LOST.search(link.text) for link in self.chain)
        return next((tuple(map(int, match[1].split(", "))) for match in matches if match), ())

    @property
    def lost_child(self) -> bool:
        """True if the SIGKILL of a child process seems to have caused this failure."""
        texts = [link.text for link in self.chain]
        return self.exitcode in _CODES_OF_SIGKILL or any(map(_CHILD_KILLED.search, texts))

    @property
    def cause(self) -> Cause:
        """The cause, as far as the exit code and the exceptions show."""
        if self.stopped:
            return Cause.STOPPED
        if self.exitcode == -signal.SIGABRT and not self.chain:
            return Cause.ABORTED
        texts = [f"{link.kind}: {link.text}" for link in self.chain]
        texts = [text for text in texts if _COMMUNICATION.search(text)]
        if any(map(_LOST_PEER.search, texts)):
            return Cause.LOST_PEER
        return Cause.TIMED_OUT if any(map(_TIMED_OUT.search, texts)) else Cause.PRIMARY


def find_root_failure(failures: Iterable[Failure]) -> Failure:
    """Return the failure that caused the others: the earliest of those nearest to the root cause.

    Of failures that are consequences, those come first whose error names the missing ranks.
    """

    def get_order(failure: Failure) -> tuple[object, ...]:
        cause, is_consequence = failure.cause, failure.cause in {Cause.TIMED_OUT, Cause.LOST_PEER}
        names_ranks = any(_NAMES_RANKS.search(link.kind) for link in failure.chain[:1])
        group = Cause.TIMED_OUT if is_consequence else cause
        return group, is_consequence and not names_ranks, cause, failure.time, failure.rank

    return min(failures, key=get_order)


def read_failure(folder: RankFolder, failure: Failure, *, started: float, is_replica_host: bool) -> Failure:
    """Complete the facts that the launcher knows with the record of the process, of an attempt that began at `started`.

    The replica that failed replaces the process that starts replicas; the time of detection is replaced by that of the
    failure.
    """
    record = read_record(folder.error, None if is_replica_host else failure.pid)
    if is_replica_host:
        rank, world_size = record.get("rank", failure.rank), record.get("replicas", 0)
        pid, exitcode = record.get("pid", failure.pid), int(record.get("exitcode", failure.exitcode))
        failure = replace(failure, rank=rank, pid=pid, exitcode=exitcode, world_size=world_size)
        if world_size:
            folder = RankFolder(folder.path.with_name(f"rank_{rank}"))
    crash, crash_time = _parse_crash(folder, failure.exitcode) if failure.exitcode < 0 else ((), None)
    failed = record.get("monotonic", failure.time if crash_time is None else crash_time)
    return replace(
        failure,
        time=failed - started,
        log=str(folder.output),
        chain=tuple(
            ExceptionInfo(
                link["kind"],
                link["text"],
                tuple(
                    Frame(file, line or 0, name, linecache.getline(file, line or 0) if text is None else text)
                    for file, line, name, text in link["frames"]
                ),
            )
            for link in record.get("chain", ())
        ),
        exit=record.get("exit"),
        crash=crash,
        thread_failures=read_thread_failures(folder),
    )


def complete_log(folder: RankFolder) -> None:
    """Append the traceback, the text passed to `sys.exit` or the stack of the crash to the log of a process that has failed."""
    record = read_record(folder.error)
    if not record:
        error = read_text(folder.fault)
    elif record.get("exit") is None:
        error = record.get("text", "")
    else:
        error = f"{record['exit']}\n" if isinstance(record["exit"], str) else ""
    if error:
        with folder.output.open("ab") as log:
            log.write(encode_text(error))
    if folder.fault.exists() and not folder.fault.stat().st_size:
        folder.fault.unlink()


def read_record(error_file: Path, pid: int | None = None) -> Mapping[str, Any]:
    """Return the record of a failure; empty without one, and for a record of another process than `pid`.

    Processes that a rank starts inherit the path, and torch's `@record` writes there too.
    """
    try:
        content = parse_json(read_text(error_file))
        record = dict(content.get("accel", {}), text=content["message"]["extraInfo"]["py_callstack"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    return record if "monotonic" in record and pid in {None, record.get("pid")} else {}


def read_thread_failures(folder: RankFolder) -> str:
    """Return the exceptions that have ended threads of a rank, with the lines of the user; empty without any."""
    texts: dict[str, None] = {}
    for record in read_last_objects(folder.thread_failures):
        with suppress(KeyError, ValueError, TypeError, AttributeError, IndexError):  # a damaged file
            message = strip_escapes(record["text"].strip().splitlines()[0])
            frames = [Frame(file, line or 0, name, text or "") for file, line, name, text in record["frames"]]
            place = next((frame for frame in frames[::-1] if not _LIBRARY.search(frame.file)), None)
            where = f" at {Path(place.file).name}:{place.line} ({place.name})" if place else ""
            texts[f"{_shorten(message)}{where}"] = None
    return f"a thread has failed before: {'; '.join(texts)}" if texts else ""


def _parse_crash(folder: RankFolder, exitcode: int) -> tuple[tuple[Frame, ...], float | None]:
    """Return the stack of the thread that crashed, the outermost call first, and the time of the crash.

    A library that aborts in a thread of its own, as gloo does, has no stack of Python: then it is that of the main thread.
    """
    *others, last = re.split(r"^(?=Current thread|Thread 0x)", read_text(folder.fault), flags=re.MULTILINE)
    threads = [thread.partition("\n\n")[0] for thread in (*others, last)]
    calls = next(
        (_CRASH_FRAME.findall(thread) for thread in threads if thread.startswith("Current thread")), []
    )
    if not calls and exitcode == -signal.SIGABRT and threads[-1].startswith("Thread 0x"):
        calls = _CRASH_FRAME.findall(threads[-1])  # the main thread is the last
    frames = [Frame(file, int(line), name, linecache.getline(file, int(line))) for file, line, name in calls]
    if not frames:
        return (), None
    # Its age, since the file has the time of the other clock.
    age = max(0.0, time.time() - folder.fault.stat().st_mtime)
    return tuple(reversed(frames)), time.monotonic() - age


_MAX_STACK_LINES = 12
"""The longest traceback, with the exceptions that preceded it."""
_MAX_MESSAGE_LINES = 4
_MAX_WIDTH = 300
_MAX_ACCEL_LINES, _MAX_ACCEL_WIDTH = 16, 2000
"""Limits of the messages of accel, whose last sentence is the cure."""
_TAIL_SHARE = 3
"""Of a shortened line, one character in this many is from its end."""
_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*(\x07|\x1b\\)|.)?")
_FOLDED = re.compile(
    r"/(?:site|dist)-packages/(torch)/|^<frozen (\w+)|/lib/python[\d.]+/(runpy|importlib|contextlib|threading|concurrent)\b"
)
"""Files whose frames are folded, with the name of their package."""
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|^<frozen |/lib/python[\d.]+/")
"""Files of libraries and of Python."""
_REMOTE = "Traceback (most recent call last):"
"""In the message of an exception that another process has raised: a data-loader worker, or a process of a pool."""
_REMOTE_FRAME = re.compile(r'^ +File "(.+)", line (\d+), in (.+)$')
_ACCEL = (f"{Path(env.__file__).parents[1]}/", f"{Path(__file__).parents[1]}/")


def format_stack(failure: Failure) -> list[str]:
    """Format the traceback without its last line, or the Python stack of a crash."""
    if failure.exit is not None:
        frames = [
            frame for link in failure.chain[:1] for frame in link.frames if not _LIBRARY.search(frame.file)
        ]
        return _format_frames(frames[-1:], _MAX_STACK_LINES)
    if not failure.chain:
        # The first frames are those that lead to the script.
        return _format_frames([*itertools.dropwhile(_get_package, failure.crash)], _MAX_STACK_LINES)
    raised, *origins = failure.chain
    message = _format_message(raised)
    lines = []
    for origin in origins[:2]:
        frames = [frame for frame in origin.frames if not _get_package(frame)]
        if not frames and _is_explanation(raised):
            continue
        location = f" ({frames[-1].file}, line {frames[-1].line})" if frames else ""
        text = origin.text.strip().splitlines()[-1 if _is_syntax_error(origin) else 0]
        if remote := _parse_remote(origin.text):
            location = f" in another process ({remote.frame.file}, line {remote.frame.line})"
            text = remote.error
        lines.append(_shorten(f"after {text}") + location)
    lines += _format_frames(raised.frames, _MAX_STACK_LINES - len(lines) - len(message) + 1)
    lines += message[:-1] if _is_syntax_error(raised) else []
    return list(map(strip_escapes, lines))


def format_cause(failure: Failure) -> str:
    """Format the exception: the last line of a traceback, or the first few of a long message."""
    if failure.exit is not None or not failure.chain:
        return ""
    message = _format_message(failure.chain[0])
    return strip_escapes(message[-1] if _is_syntax_error(failure.chain[0]) else "\n".join(message))


def read_log_tail(failure: Failure, count: int = 5) -> list[str]:
    """Return the last lines of the log."""
    try:
        lines = decode_text(read_bytes(Path(failure.log), max_size=8192, at_end=True)).splitlines()
    except OSError:
        return []
    return [_shorten(strip_escapes(line)) for line in lines if line.strip()][-count:]


def strip_escapes(text: str) -> str:
    """Remove escape sequences and control characters."""
    text = _ESCAPES.sub("", text)
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _is_syntax_error(link: ExceptionInfo) -> bool:
    """Return True if the text begins with a location, as that of a syntax error does."""
    return link.text.startswith('  File "')


def _is_explanation(link: ExceptionInfo) -> bool:
    """Return True for an error that accel raises, also in place of one of a library: its message has the cause and the cure."""
    is_of_accel = link.kind.startswith("accel_runtime.")
    return is_of_accel or bool(link.frames and _get_package(link.frames[-1]) == "accel")


def _format_message(link: ExceptionInfo) -> list[str]:
    """Return the class name and message, shortened."""
    is_explained = _is_explanation(link)
    max_lines = _MAX_ACCEL_LINES if is_explained else _MAX_MESSAGE_LINES
    max_width = _MAX_ACCEL_WIDTH if is_explained else _MAX_WIDTH
    lines = [_shorten(line, max_width) for line in link.text.rstrip("\n").split("\n")]
    if len(lines) <= max_lines or _is_syntax_error(link):
        return lines
    if not is_explained and (remote := _parse_remote(link.text)):
        head = [line for line in lines[: remote.start] if line.strip()][:2]
        shown = [*_format_frames([remote.frame], 2), _shorten(remote.error)]
        return [*head, f"... {len(lines) - len(head) - len(shown)} more lines in its log", *shown]
    more = len(lines) - max_lines + 1
    if is_explained:
        return [*lines[: -more - 1], f"... {more} more lines in its log", lines[-1]]
    return [*lines[:-more], f"... {more} more lines in its log"]


class _Remote(NamedTuple):
    """The traceback of another process in a message."""

    start: int
    """The number of its first line."""
    frame: Frame
    """The last frame of the user's code."""
    error: str
    """The exception."""


def _parse_remote(text: str) -> _Remote | None:
    """Parse the traceback of another process in a message; None without one that has a frame of the user's code."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.endswith(_REMOTE)), len(lines))
    found = [
        (number, match)
        for number, line in enumerate(lines[start:], start)
        if (match := _REMOTE_FRAME.match(line)) and not _LIBRARY.search(match[1])
    ]
    if not found:
        return None
    number, match = found[-1]
    source = next(iter(lines[number + 1 : number + 2]), "")
    error = next((line for line in lines[number + 1 :] if line.strip() and not line.startswith(" ")), "")
    return _Remote(start, Frame(match[1], int(match[2]), match[3], source), error)


def _shorten(line: str, max_width: int = _MAX_WIDTH) -> str:
    """Return a line without its middle if it is long: the end of a message often has the cure."""
    more = len(line) - max_width
    if more <= 0:
        return line
    tail = max_width // _TAIL_SHARE
    return f"{line[: max_width - tail]} ... ({more} more characters in its log) ... {line[-tail:]}"


def _get_package(frame: Frame) -> str:
    """Return the package of a frame whose frames are folded; empty for the user's code."""
    if frame.file.startswith(_ACCEL):
        return "accel"
    match = _FOLDED.search(frame.file)
    return match[match.lastindex or 0] if match else ""


def _format_frames(frames: Sequence[Frame], max_lines: int) -> list[str]:
    """Format frames in at most `max_lines` lines: the user's first frame and the last ones, others folded."""
    user_frames = [index for index, frame in enumerate(frames) if not _get_package(frame)]
    for count in range(max_lines // 2, 0, -1):
        lines = list(_fold_frames(frames, {*user_frames[:1], *user_frames[-count:]}))
        if len(lines) <= max_lines:
            return lines
    return list(_fold_frames(frames, set(user_frames[-1:])))


def _fold_frames(frames: Sequence[Frame], shown: AbstractSet[int]) -> Iterator[str]:
    for is_shown, indices in itertools.groupby(range(len(frames)), lambda index: index in shown):
        group = [frames[index] for index in indices]
        if not is_shown:
            packages = list(dict.fromkeys(map(_get_package, group)))
            location = f" in {', '.join(packages)}" if all(packages) else ""
            yield f"  ... {len(group)} frame{'s' if len(group) > 1 else ''}{location}"
            continue
        for frame in group:
            yield f'  File "{frame.file}", line {frame.line}, in {frame.name}'
            if frame.text.strip():
                yield _shorten(f"    {frame.text.strip()}")


def print_report(first: Failure, local: Collection[Failure], *, world_size: int, shown: bool) -> None:
    """Print the first failure on all nodes, its cause last; `shown` if the output of its rank was on this screen."""
    is_remote = first not in local
    for line in _describe_other_failures(first, local):
        console.note(line)
    if places := _describe_places(first, local):
        console.note(places)
    if first.thread_failures:
        console.note(f"rank {first.rank}: {first.thread_failures}")
    if hint := _find_hint(first):
        console.note(f"hint: {hint}")
    name = f"rank {first.rank}" if world_size else "the process that starts the replicas"
    console.note(
        f"full output of {name}: {console.abbreviate_home(first.log)}{f' on {first.host}' if is_remote else ''}"
    )
    body = [] if is_remote else format_stack(first)
    if not (body or is_remote or shown or first.chain):
        body = [f"  | {line}" for line in read_log_tail(first)]
    _print_failure(first, body, world_size)


def is_unexplained_timeout(failure: Failure) -> bool:
    """Return True if a rank has waited for others too long, and the error does not name them."""
    return failure.cause is Cause.TIMED_OUT and not any(
        _NAMES_RANKS.fullmatch(link.kind) for link in failure.chain
    )


def print_lingering(failure: Failure, *, world_size: int) -> None:
    """Print the failure of a process that still runs."""
    _print_failure(failure, format_stack(failure), world_size)
    console.note(
        f"process {failure.pid} of {_name_process(failure, world_size)} has failed, but does not exit: a non-daemon thread, a child process or an exit "
        "handler keeps it alive. Print its threads: accel stacks. End the run: Ctrl-C."
    )


def _print_failure(failure: Failure, body: Sequence[str], world_size: int) -> None:
    name = _name_process(failure, world_size)
    console.print_failure(f"{name} on {failure.host} (pid {failure.pid})", body, describe_end(failure))


def _name_process(failure: Failure, world_size: int) -> str:
    """Return the rank of a process; `world_size` is 0 if it has started no replica yet."""
    return f"rank {failure.rank} of {world_size}" if world_size else "the process that starts the replicas"


def format_one_line(failure: Failure) -> str:
    """Format a failure after which the run continues."""
    end = describe_end(failure).splitlines()[0]
    return f"rank {failure.rank} on {failure.host}: {end} (its log: {console.abbreviate_home(failure.log)})"


def format_reason(failure: Failure) -> str:
    """Format a failure for the reason file: the rank, the exception, and the last frames that fit."""
    head = f"exit code {failure.code} on {failure.host}, rank {failure.rank}: {describe_end(failure)}"
    stack = format_stack(failure)
    is_exit = failure.exit is not None or not stack
    return fit_reason(head, [*stack, *(read_log_tail(failure) if is_exit else ())])


def describe_end(failure: Failure) -> str:
    """Return the exception if the process recorded one, else its signal or exit code; after the ranks that exited before."""
    end = _describe_own_end(failure)
    return f"{failure.early_exits}: {end}" if failure.early_exits else end


def _describe_own_end(failure: Failure) -> str:
    if failure.exitcode >= 0 or failure.chain:
        if isinstance(failure.exit, str):
            return f"exited with code {failure.code}: {strip_escapes(failure.exit).strip()[:2000]}"
        return format_cause(failure) or f"exited with code {failure.code}"
    number = -failure.exitcode
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if number != signal.SIGKILL:
        return f"terminated by {name}"
    is_known = failure.out_of_memory
    return f"terminated by {name}: {'killed by the kernel because memory ran out' if is_known else 'often the out-of-memory killer'}"


def _describe_other_failures(first: Failure, local: Collection[Failure]) -> Iterator[str]:
    """Yield a line for consequences of the first failure, and one for other failures, on this node."""
    others = [failure for failure in local if failure != first]
    aborted = [failure.rank for failure in others if failure.cause == Cause.ABORTED]
    if aborted:
        yield f"{format_ranks(aborted)} {'was' if len(aborted) == 1 else 'were'} terminated by SIGABRT too"
    consequences = [failure.rank for failure in others if failure.cause in {Cause.TIMED_OUT, Cause.LOST_PEER}]
    if consequences:
        yield f"{format_ranks(consequences)} failed as a consequence: lost the connection or timed out"
    independent = [failure for failure in others if failure.cause == Cause.PRIMARY]
    if independent:
        # Messages of accel name their rank.
        ends = {_RANK.sub("", describe_end(failure)) for failure in (first, *independent)}
        is_same = len(ends) == 1
        ranks = format_ranks(failure.rank for failure in independent)
        yield f"{ranks} failed later, {'in the same way' if is_same else 'in another way'}"


def _describe_places(first: Failure, local: Collection[Failure]) -> str:
    """Return the line of each rank of this node if a collective failed, and they were at different ones; else an empty text.

    The rank that fails first in a collective is often not the one that has called it too often, or another one.
    """
    ranks: dict[str, list[int]] = {}
    for failure in local if first.is_consequence else ():
        frames = failure.chain[0].frames if failure.chain else failure.crash
        if user_frames := [frame for frame in frames if not _get_package(frame)]:
            last = user_frames[-1]
            ranks.setdefault(f"{Path(last.file).name}:{last.line} ({last.name})", []).append(failure.rank)
    places = [f"{format_ranks(group)} at {place}" for place, group in ranks.items()]
    return f"the ranks were in different calls: {'; '.join(places)}" if len(places) > 1 else ""


def names_fork(failure: Failure) -> bool:
    """Return True if a process could not use its device because it was forked; data-loader workers do not count."""
    texts = [link.text for link in failure.chain]
    return any("in forked subprocess" in text and "DataLoader worker" not in text for text in texts)


def _find_hint(failure: Failure) -> str | None:
    if workers := failure.lost_workers:
        names = f"data-loader worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"
        end = (
            "killed by the kernel because memory ran out"
            if failure.out_of_memory
            else "SIGKILL or a crash, often for lack of memory"
        )
        return f"{names} ended: {end}. To use less memory, reduce num_workers, prefetch_factor or the batch size."
    if failure.lost_child and not failure.out_of_memory:
        return "a child process of this rank was killed by SIGKILL, often by the kernel for lack of memory"
    if failure.out_of_memory and failure.exitcode != -signal.SIGKILL:
        return (
            "the kernel killed a process of this control group during the run because memory ran out, perhaps a child of this "
            "rank. Use less memory, or raise the limit of the container or job."
        )
    if failure.cause is Cause.ABORTED:
        # The library has written the reason before the stack of the crash.
        hint = find_hint("\n".join(read_log_tail(failure, count=200)))
        if hint or not failure.early_exits:
            return hint
    if failure.early_exits:
        return (
            "a rank that exits with code 0 joins no collective of the others. Let all ranks make the same calls until the end, or "
            "exit with another code to report a failure."
        )
    lines = [link.frames[-1].text for link in failure.chain if link.frames]
    return find_hint("\n".join(f"{link.kind} {link.text}" for link in failure.chain), "\n".join(lines))


_KEY = "accel/failure/"
_NUM_READ_KEY = "accel/failures_read"
_WAIT_S, _WAIT_FOR_CAUSE_S = 1.0, 10.0
"""The time to wait for other nodes: after a primary failure on this node, and after a consequence."""
_WAIT_UNTIL_READ_S = 4.0
"""The longest time to wait until other nodes have read the failure, since this node may serve the store."""
_POLL_S = 0.05


class FailureExchange:
    """Exchange of each node's first failure through the store of the rendezvous."""

    def __init__(self, store: Any, failure: Failure, *, node_rank: int, num_nodes: int) -> None:
        self._store, self._node_rank, self._num_nodes = store, node_rank, num_nodes
        self._failures = [failure]
        self._is_complete = threading.Event()
        # A thread, since calls block if the store is lost.
        self._thread = threading.Thread(target=self._run, args=(failure,), name="failures", daemon=True)

    def find_root_failure(self) -> Failure:
        """Return the first failure on all nodes that answer in time."""
        if self._num_nodes > 1:
            self._thread.start()
            self._is_complete.wait(_WAIT_FOR_CAUSE_S)
        return find_root_failure(list(self._failures))

    def wait_until_read(self) -> None:
        """Wait until the other nodes have read the failure of this node, up to a limit."""
        if self._num_nodes > 1:
            self._thread.join(_WAIT_UNTIL_READ_S)

    def _run(self, failure: Failure) -> None:
        # Without frames, which are of use on their own node only.
        chain = [(link.kind, link.text[:2000]) for link in failure.chain]
        missing = {f"{_KEY}{rank}" for rank in range(self._num_nodes) if rank != self._node_rank}
        timeout = _WAIT_S if failure.cause == Cause.PRIMARY else _WAIT_FOR_CAUSE_S
        deadline = time.monotonic() + timeout
        try:
            self._store.set(
                f"{_KEY}{self._node_rank}", json.dumps({**asdict(failure), "chain": chain, "crash": ()})
            )
            while missing and time.monotonic() < deadline:
                present = {key for key in missing if self._store.check([key])}
                for fields in map(json.loads, map(self._store.get, present)):
                    links = tuple(ExceptionInfo(*link) for link in fields["chain"])
                    self._failures.append(Failure(**{**fields, "chain": links, "crash": ()}))
                missing -= present
                time.sleep(_POLL_S)
            self._is_complete.set()
            num_read = self._store.add(_NUM_READ_KEY, 1)
            while num_read < self._num_nodes:
                time.sleep(_POLL_S)
                num_read = self._store.add(_NUM_READ_KEY, 0)
        except RuntimeError:  # the store is lost
            self._is_complete.set()
