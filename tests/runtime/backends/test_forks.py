"""Forks of a process with threads that run collectives."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from accel_runtime import Accelerator
from accel_runtime.environment.threads import PAUSE_S, other_threads_run, wait_for_threads

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
        detections = [other_threads_run() for _ in range(50) if not time.sleep(PAUSE_S)]
        return sum(detections) / len(detections)

    assert detect() < 0.5
    with compute_in_thread():
        assert detect() > 0.5


@on_linux
def test_the_wait_lasts_as_long_asother_threads_run():
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


@contextmanager
def compute_in_thread():
    """Run a thread that computes without the GIL for a second or two, and yield its end time."""
    ended = []

    def work():
        hashlib.pbkdf2_hmac("sha256", b"", b"", ROUNDS)
        ended.append(time.monotonic())

    worker = threading.Thread(target=work)
    worker.start()
    while not (other_threads_run() or ended):
        time.sleep(PAUSE_S)
    try:
        yield ended
    finally:
        worker.join()
