"""Forks of a process with threads that run collectives."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from accel_runtime import Accelerator
from accel_runtime.observe.threads import PAUSE_S, find_running_threads, wait_for_threads

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
ROUNDS = 4_000_000


def collect_pauses():
    """Return the times in seconds that a fork makes this process sleep."""
    Accelerator()
    pauses, sleep = [], time.sleep
    time.sleep = pauses.append
    try:
        if not (child := os.fork()):
            os._exit(0)
    finally:
        time.sleep = sleep
    os.waitpid(child, 0)
    return pauses


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="later versions of Python need no pause")
def test_a_fork_in_a_process_group_waits_for_other_threads(pair):
    for pauses in pair.run(collect_pauses):
        assert pauses
        assert set(pauses) == {PAUSE_S}


@on_linux
def test_only_a_running_thread_is_detected():
    def detect():
        detections = [find_running_threads() for _ in range(50) if not time.sleep(PAUSE_S)]
        return sum(map(bool, detections)) / len(detections)

    assert detect() < 0.5
    with compute_in_thread():
        assert detect() > 0.5


@on_linux
def test_the_wait_lasts_as_long_as_other_threads_run():
    with compute_in_thread() as ended:
        wait_for_threads(PAUSE_S, 600)
        returned = time.monotonic()
    assert ended[0] < returned + 0.5


@pytest.mark.slow
@on_linux
def test_the_wait_ends_at_its_limit():
    with compute_in_thread() as ended:
        wait_for_threads(PAUSE_S, 0.05)
        returned = time.monotonic()
    assert returned < ended[0]


@on_linux
def test_a_thread_of_gloo_is_awaited_beyond_the_limit():
    """On a busy machine it is scheduled late, and would abort the process while the interpreter ends."""
    with compute_in_thread("pt_gloo_runloop") as ended:
        wait_for_threads(PAUSE_S, 0.05)
        returned = time.monotonic()
    assert ended[0] < returned + 0.5


@contextmanager
def compute_in_thread(name=""):
    """Run a thread that computes without the GIL for a second or two, and yield its end time."""
    ended = []

    def work():
        if name:
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        hashlib.pbkdf2_hmac("sha256", b"", b"", ROUNDS)
        ended.append(time.monotonic())

    worker = threading.Thread(target=work)
    worker.start()
    while not (find_running_threads() or ended):
        time.sleep(PAUSE_S)
    try:
        yield ended
    finally:
        worker.join()
