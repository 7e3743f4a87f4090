"""Forks beside the threads of collectives, and the wait for them."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from accel_runtime import Accelerator
from accel_runtime.backends.distributed import PAUSE_S, _other_threads_run, wait_for_threads

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
ROUNDS = 4_000_000


def pauses():
    """For how long a fork makes this process sleep, each time, in seconds."""
    Accelerator()
    found, sleep = [], time.sleep
    time.sleep = found.append
    try:
        if not (child := os.fork()):
            os._exit(0)
    finally:
        time.sleep = sleep
    os.waitpid(child, 0)
    return found


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="later versions of Python need no pause")
def test_a_process_in_a_group_forks_after_a_pause_in_which_threads_leave_python(pair):
    for found in pair.run(pauses):
        assert found
        assert set(found) == {PAUSE_S}


@on_linux
def test_a_thread_at_work_is_seen_and_one_that_waits_is_not():
    def seen():
        found = [_other_threads_run() for _ in range(50) if not time.sleep(PAUSE_S)]
        return sum(found) / len(found)

    assert seen() < 0.5
    with at_work():
        assert seen() > 0.5


@on_linux
def test_the_wait_is_as_long_as_the_work_of_others():
    with at_work() as ended:
        wait_for_threads(PAUSE_S, 600)
        returned = time.monotonic()
    assert ended[0] < returned + 0.5


@on_linux
def test_the_wait_is_not_longer_than_its_patience():
    with at_work() as ended:
        wait_for_threads(PAUSE_S, 0.05)
        returned = time.monotonic()
    assert returned < ended[0]


@contextmanager
def at_work():
    """A thread that computes for a second or two without the interpreter; then there is when it was done."""
    ended = []

    def work():
        hashlib.pbkdf2_hmac("sha256", b"", b"", ROUNDS)
        ended.append(time.monotonic())

    worker = threading.Thread(target=work)
    worker.start()
    while not (_other_threads_run() or ended):
        time.sleep(PAUSE_S)
    try:
        yield ended
    finally:
        worker.join()
