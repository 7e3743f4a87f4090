"""Forks beside the threads of collectives, and the wait for them."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from accel_runtime import Accelerator
from accel_runtime.backends.settling import PAUSE_S, _others_run, wait_for_threads

pytestmark = pytest.mark.skipif(sys.version_info >= (3, 12), reason="later versions of Python need no pause")


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


def test_a_process_in_a_group_forks_after_a_pause_in_which_threads_leave_python(pair):
    for found in pair.run(pauses):
        assert found
        assert set(found) == {PAUSE_S}


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_a_thread_at_work_is_seen_and_one_that_waits_is_not():
    def seen():
        found = [_others_run() for _ in range(50) if not time.sleep(PAUSE_S)]
        return sum(found) / len(found)

    assert seen() < 0.5
    with at_work(600):
        assert seen() > 0.5


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_the_wait_ends_with_the_work_of_others_and_with_its_patience():
    with at_work(0.4):
        begun = time.monotonic()
        wait_for_threads(PAUSE_S, 60)
        assert 0.2 < time.monotonic() - begun < 50
    with at_work(600):
        begun = time.monotonic()
        wait_for_threads(PAUSE_S, 0.3)
        assert time.monotonic() - begun < 50


@contextmanager
def at_work(seconds):
    """A thread that computes for so long, or until the block is left."""
    over, begun = threading.Event(), threading.Event()

    def work():
        numbers = torch.rand(400, 400)
        end = time.monotonic() + seconds
        begun.set()
        while not over.is_set() and time.monotonic() < end:
            numbers = torch.tanh(numbers @ numbers)

    worker = threading.Thread(target=work)
    worker.start()
    begun.wait()
    try:
        yield
    finally:
        over.set()
        worker.join()
