"""The wait for the other ranks while a process group is created: which are missing, and at which address."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from accel_runtime.environment.settings import RANK_PROCESS, find_rank_process, format_rank_process
from accel_runtime.environment.text import print_note
from accel_runtime.environment.topology import Topology
from accel_runtime.foundation.torch_internals import TCPStore

__all__ = ["forget_rank_process", "record_rank_process", "refuse_child_of_rank", "report_missing_ranks"]

REPORT_S = 10.0
"""Seconds after which a rank that waits for the others reports the missing ones, and again after twice the time."""
_ANSWER = timedelta(seconds=5)
_MAX_NAMED_RANKS = 8


def record_rank_process() -> None:
    """Record for the processes that this rank starts that the variables of its rank are in use."""
    os.environ[RANK_PROCESS] = format_rank_process(os.environ, os.getpid())


def forget_rank_process() -> None:
    """Remove the record of this process as a rank, but not the record of a parent process."""
    if os.environ.get(RANK_PROCESS, "").partition(" ")[0] == str(os.getpid()):
        del os.environ[RANK_PROCESS]


def refuse_child_of_rank(topology: Topology) -> None:
    """Raise RuntimeError in a process that a running rank has started with the variables of that rank."""
    if (pid := find_rank_process(os.environ)) is not None:
        raise RuntimeError(
            f"Cannot connect to the other processes: this process has inherited the variables of rank {topology.rank} of "
            f"{topology.world_size} from process {pid}, which is that rank and still runs, so that the others would never join. Start it "
            "without RANK, WORLD_SIZE and LOCAL_RANK to run it as a single process: subprocess.run(command, env={name: value for name, "
            "value in os.environ.items() if name not in {'RANK', 'WORLD_SIZE', 'LOCAL_RANK'}})."
        )


@contextmanager
def report_missing_ranks(topology: Topology) -> Iterator[None]:
    """Print which ranks are missing while the block creates a process group from the variables of the environment."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if topology.world_size == 1 or not port.isdigit():
        yield
        return
    has_ended = threading.Event()
    watch = threading.Thread(
        target=_watch, args=(topology, host, int(port), has_ended), name="accel-arrivals", daemon=True
    )
    watch.start()
    try:
        yield
    finally:
        has_ended.set()


def _watch(topology: Topology, host: str, port: int, has_ended: threading.Event) -> None:
    started, pause = time.monotonic(), REPORT_S
    store = None
    while not has_ended.wait(pause):
        if store is None:
            # torch prints C++ stacks for a store that cannot be reached, so the port is tried first.
            with suppress(OSError, RuntimeError):
                store = _connect(host, port)
        with suppress(RuntimeError):
            text = _describe(topology, f"{host}:{port}", store, time.monotonic() - started)
            if text and not has_ended.is_set():
                print_note(text)
        pause *= 2
    if store is not None:
        with suppress(RuntimeError):
            store.delete_key(_key(topology.rank))  # a store may serve several process groups


def _connect(host: str, port: int) -> TCPStore:
    """Connect to the store of the process group, beside the connection that is being made."""
    import socket  # noqa: PLC0415 - only if ranks are missing

    socket.create_connection((host, port), _ANSWER.total_seconds()).close()
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_ANSWER)


def _describe(topology: Topology, address: str, store: TCPStore | None, seconds: float) -> str:
    """Return a line about the missing ranks; empty if another rank reports them."""
    rank, size = topology.rank, topology.world_size
    waited = f"rank {rank} of {size} has waited {seconds:.0f} s for"
    if store is None:
        return f"{waited} rank 0, and no process listens at {address} (MASTER_ADDR and MASTER_PORT). {_get_cure(size)}"
    store.set(_key(rank), "")
    arrived = [other for other in range(size) if other == rank or store.check([_key(other)])]
    missing = [other for other in range(size) if other not in arrived]
    if not missing or rank != arrived[0]:
        return ""
    named = ", ".join(map(str, missing[:_MAX_NAMED_RANKS]))
    more = f" and {len(missing) - _MAX_NAMED_RANKS} more" if len(missing) > _MAX_NAMED_RANKS else ""
    return f"{waited} rank{'s' if len(missing) > 1 else ''} {named}{more} to connect at {address}. {_get_cure(size)}"


def _key(rank: int) -> str:
    # The launchers of torch keep one store for all restarts.
    return f"accel/arrived/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}/{rank}"


def _get_cure(size: int) -> str:
    """Return how the missing ranks are started; in an interactive Slurm step, which has set the variables, with srun."""
    if "SLURM_PTY_PORT" in os.environ:
        return (
            "Only the first task of srun --pty has the terminal: run srun accel launch ... in the shell of salloc, or start the shell with "
            "one task (srun -n1 --pty)."
        )
    return f"Start all {size} processes, each with its own RANK; or unset RANK, WORLD_SIZE and LOCAL_RANK to run this one alone."
