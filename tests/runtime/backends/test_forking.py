"""Forks beside the threads of collectives."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest
import torch

from accel_runtime import Accelerator
from accel_runtime.backends.forking import PAUSE_S, _others_run

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

    over = threading.Event()

    def work():
        numbers = torch.rand(400, 400)
        while not over.is_set():
            numbers = torch.tanh(numbers @ numbers)

    assert seen() < 0.5
    worker = threading.Thread(target=work)
    worker.start()
    try:
        assert seen() > 0.5
    finally:
        over.set()
        worker.join()
