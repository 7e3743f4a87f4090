"""Run a block on one process before the others, which wait for a store key and in no collective."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from accel_runtime.backends.base import Backend

__all__ = ["reported_result", "run_first"]

REPORT_S = 10.0
"""Seconds before a waiting rank reports it on stderr."""
_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.005, 0.5
_DONE, _FAILED, _FOLLOWS = "done", "failed", "follows"


@contextmanager
def run_first(backend: Backend, leader: int, operation: str) -> Iterator[None]:
    """Run the block on rank `leader` first, then on all ranks that wait for it at once.

    No collective is pending meanwhile, so the block may take longer than the timeout of the process group.

    Raises:
        RuntimeError: The block failed on the leader, or the leader itself waits for another rank.
    """
    rank = backend.topology.rank
    key = f"accel/{operation}/{backend.increment_store_key(f'accel/{operation}')}"
    if rank == leader:
        try:
            yield
        except BaseException as error:
            backend.set_store_key(f"{key}/{rank}", f"{_FAILED}:{type(error).__name__}: {error}")
            raise
        backend.set_store_key(f"{key}/{rank}", _DONE)
        return
    backend.set_store_key(f"{key}/{rank}", _FOLLOWS)
    # Only one of the waiting ranks reports it.
    result = reported_result(backend, leader, f"{key}/{leader}", operation if rank == leader + 1 else None)
    if result == _FOLLOWS:
        raise RuntimeError(
            f"{operation} failed: rank {rank} waits for rank {leader}, which is not the first rank of its machine. Number the ranks "
            "of a machine consecutively, as `accel launch` and `torchrun` do."
        )
    if result != _DONE:
        raise RuntimeError(f"{operation} failed on rank {leader}: {result.removeprefix(f'{_FAILED}:')}")
    yield


def reported_result(backend: Backend, rank: int, key: str, operation: str | None) -> str:
    """Wait without a timeout for the value that `rank` sets for `key`, and report that once on stderr if `operation` is given."""
    started, pause = time.monotonic(), _MIN_INTERVAL_S
    while (value := backend.get_store_key(key)) is None:
        time.sleep(pause)
        pause = min(2 * pause, _MAX_INTERVAL_S)
        waited = time.monotonic() - started
        if operation is not None and waited > REPORT_S:
            line = f"rank {backend.topology.rank}: waiting for rank {rank} ({waited:.0f} s) in {operation}"
            print(line, file=sys.stderr, flush=True)  # noqa: T201 - for the terminal, whatever the logging
            operation = None
    return value
