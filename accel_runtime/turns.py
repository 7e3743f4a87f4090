"""One process goes first: the others wait for its word in the store, and in no collective."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from accel_runtime.backends.base import Backend

__all__ = ["leader_first", "word_of"]

REPORT_S = 10.0
"""How long a rank waits before it says so, seconds."""
_SHORTEST_S, _LONGEST_S = 0.005, 0.5
_DONE, _FAILED, _FOLLOWS = "done", "failed", "follows"


@contextmanager
def leader_first(backend: Backend, leader: int, what: str) -> Iterator[None]:
    """Rank `leader` runs the block; whoever waits for it runs it afterwards, all at once.

    No collective is open meanwhile, so the block may take hours, whatever the process group's timeout.

    Args:
        backend: Carries the word. Every rank has to come here, as often as the others.
        leader: The rank this one waits for; its own for one that goes first.
        what: The call, for messages; ranks that call different ones do not meet.

    Raises:
        RuntimeError: The leader's block raised, or the leader waits for somebody itself.
    """
    rank = backend.topology.rank
    key = f"accel/{what}/{backend.turn(f'accel/{what}')}"
    if rank == leader:
        try:
            yield
        except BaseException as error:
            backend.post(f"{key}/{rank}", f"{_FAILED}:{type(error).__name__}: {error}")
            raise
        backend.post(f"{key}/{rank}", _DONE)
        return
    backend.post(f"{key}/{rank}", _FOLLOWS)
    # One of those who wait is enough to say it.
    said = word_of(backend, leader, f"{key}/{leader}", what if rank == leader + 1 else None)
    if said == _FOLLOWS:
        raise RuntimeError(
            f"{what}: rank {rank} took rank {leader} for the first of its machine, but it is not: this needs "
            "the ranks of a machine to be consecutive, as `accel launch` and `torchrun` number them"
        )
    if said != _DONE:
        raise RuntimeError(f"{what}: rank {leader} failed in its block: {said.removeprefix(f'{_FAILED}:')}")
    yield


def word_of(backend: Backend, rank: int, key: str, what: str | None) -> str:
    """The word that `rank` leaves under `key`, waited for without limit.

    Args:
        backend: Carries it.
        rank: Who is waited for.
        key: Where the word will be.
        what: What is said on stderr, once, after `REPORT_S` seconds; None says nothing.
    """
    begun, pause = time.monotonic(), _SHORTEST_S
    while (word := backend.posted(key)) is None:
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_S)
        waited = time.monotonic() - begun
        if what is not None and waited > REPORT_S:
            line = f"rank {backend.topology.rank}: waiting for rank {rank} ({waited:.0f} s) in {what}"
            print(line, file=sys.stderr, flush=True)  # noqa: T201 - a person looks at a still screen
            what = None
    return word
