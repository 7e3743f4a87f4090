"""Runs that save in a loop until SIGKILL ends their ranks, and what they had saved by then."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

__all__ = ["KilledRun", "kill_ranks", "run_until_killed"]

INTERVAL_S = 0.002


@dataclass(frozen=True)
class KilledRun:
    """A run that was killed.

    Attributes:
        loaded: The step that rank 0 had loaded, 0 without a checkpoint, or None if it was killed before.
        saved: The steps whose saves had returned on rank 0; in the background, those that had completed.
        within_save: If a save had begun and not ended, by rank.
    """

    loaded: int | None
    saved: Sequence[int]
    within_save: Sequence[bool]


def run_until_killed(cluster, start, folder, *, first=-1, delays=()):
    """Run `save_in_loop` on all ranks until one is killed, and return the `KilledRun`.

    Args:
        cluster: The ranks; the others end soon after one.
        start: A function whose context has a run, the target of its saves, and if they are in the background.
        folder: The folder for the process ids of the ranks, by which they are killed, and for their logs.
        first: The number of saves that rank 0 begins before the delays begin; negative: other code kills the ranks.
        delays: Seconds until SIGKILL by rank; None for a rank that is not killed.
    """
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    ended = threading.Event()
    killer = threading.Thread(target=kill_later, args=(folder, first, delays, ended))
    if first >= 0:
        killer.start()
    try:
        assert cluster.run_until_killed(save_in_loop, start, folder)
    finally:
        ended.set()
        if first >= 0:
            killer.join()
    logs = [read_log(folder, rank) for rank in range(cluster.size)]
    loaded = [step for event, step in logs[0] if event == "loaded"]
    saved = [step for event, step in logs[0] if event == "saved"]
    within_save = [
        sum(event == "began" for event, _ in log) > sum(event == "saved" for event, _ in log) for log in logs
    ]
    return KilledRun(loaded[0] if loaded else None, saved, within_save)


def save_in_loop(start, folder):
    """Load and save in a loop, and log it."""
    rank = int(os.environ.get("RANK", "0"))
    log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))

    def write(event, step):
        os.write(log, f"{event} {step}\n".encode())

    with start() as (run, target, in_background):
        loaded = run.load(target)
        write("loaded", loaded)
        for step in itertools.count(loaded + 1):
            run.set_step(step)
            write("began", step)
            run.acc.save_state(target, async_save=in_background)
            # An asynchronous save is complete when the next one starts.
            if not in_background:
                write("saved", step)
            elif step > loaded + 1:
                write("saved", step - 1)


def kill_later(folder, first, delays, ended):
    """Kill ranks after their delays, counted from the beginning of a save, unless the run ends before."""
    while sum(event == "began" for event, _ in read_log(folder, 0)) <= first:
        if ended.wait(INTERVAL_S):
            return
    began = time.monotonic()
    for delay, rank in sorted((delay, rank) for rank, delay in enumerate(delays) if delay is not None):
        if ended.wait(max(0, began + delay - time.monotonic())):
            return
        kill_ranks(folder, [rank])


def kill_ranks(folder, ranks):
    """Kill ranks that have started."""
    for rank in ranks:
        with suppress(ProcessLookupError, FileNotFoundError, ValueError):
            os.kill(int((folder / f"pid-{rank}").read_text()), signal.SIGKILL)


def read_log(folder, rank):
    """Return the events of a rank with their steps."""
    path = folder / f"log-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(event, int(step)) for event, step in map(str.split, lines)]
