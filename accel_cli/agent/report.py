"""What is said of a failure: the last thing on the screen."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterator

from accel_cli import console, reason, tracebacks
from accel_cli.failures import Cause, Failure
from accel_cli.ranks import in_words

__all__ = ["in_a_file", "in_a_line", "report"]

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


def report(culprit: Failure, failures: Collection[Failure], *, processes: int, shown: bool) -> None:
    """Say what failed first, cause last.

    Args:
        culprit: The first failure of all machines.
        failures: Those of this machine.
        processes: The number of processes on all machines.
        shown: Whether the culprit's own output was on this screen.
    """
    away = "" if culprit in failures else f" on {culprit.host}"
    for line in _beside(culprit, failures):
        console.note(line)
    if hint := _hint(culprit):
        console.note(f"hint: {hint}")
    who = f"rank {culprit.rank}" if processes else "the process that starts the replicas"
    console.note(f"everything {who} wrote is in {console.short(culprit.log)}{away}")
    body = [] if away else tracebacks.stack(culprit)
    if not (body or away or shown or culprit.chain):
        body = [f"  | {line}" for line in tracebacks.tail(culprit)]
    of = f" of {processes}" if processes else ""
    console.failure(f"{who}{of} on {culprit.host} (pid {culprit.pid})", body, how(culprit))


def in_a_line(failure: Failure) -> str:
    """A failure that is not the end of the run."""
    return f"rank {failure.rank} on {failure.host}: {how(failure).splitlines()[0]} (its log: {console.short(failure.log)})"


def in_a_file(failure: Failure) -> str:
    """A failure for who reads no log: which process, what it raised, and the last places as far as there is room."""
    head = f"exit code {failure.code} on {failure.host}, rank {failure.rank}: {how(failure)}"
    return reason.fitting(head, tracebacks.stack(failure) or tracebacks.tail(failure))


def how(failure: Failure) -> str:
    """How a process ended: its exception if it left one, else the signal or code."""
    if failure.exitcode < 0 and not failure.chain:
        return _signalled(failure)
    if isinstance(failure.exit, str):
        return f"exited with code {failure.code}: {tracebacks.clean(failure.exit).strip()[:2000]}"
    return tracebacks.cause(failure) or f"exited with code {failure.code}"


def _signalled(failure: Failure) -> str:
    number = -failure.exitcode
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if failure.exitcode != -signal.SIGKILL:
        return f"was ended by {name}"
    killer = "killed by the kernel for memory" if failure.memory else "often the out-of-memory killer"
    return f"was ended by {name}: {killer}"


def _beside(culprit: Failure, failures: Collection[Failure]) -> Iterator[str]:
    """What became of the other processes of this machine, where it was not the launcher that ended them."""
    others = [failure for failure in failures if failure != culprit and failure.cause != Cause.STOPPED]
    lost = [failure.rank for failure in others if failure.cause > Cause.OWN]
    failed = [failure for failure in others if failure.cause == Cause.OWN]
    if lost:
        yield f"{in_words(lost)} only lost the connection to it, or waited for it"
    if failed:
        same = "the same way" if {how(failure) for failure in failed} == {how(culprit)} else "too"
        yield f"{in_words(failure.rank for failure in failed)} failed {same}, after it"


def _hint(failure: Failure) -> str | None:
    if failure.killed_worker:
        killer = "the kernel for memory" if failure.memory else "a SIGKILL, often the kernel's for memory"
        return (
            f"data-loader worker {failure.killed_worker} was killed by {killer}: fewer workers (num_workers), a smaller "
            "prefetch_factor or smaller batches need less memory"
        )
    said = "\n".join(f"{link.kind} {link.said}" for link in failure.chain)
    return next((hint for pattern, hint in _HINTS if pattern.search(said)), None)
