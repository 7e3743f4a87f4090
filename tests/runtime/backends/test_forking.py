"""Forks beside the threads of collectives."""

from __future__ import annotations

import os
import sys
import time

import pytest

from accel_runtime import Accelerator
from accel_runtime.backends.forking import PAUSE_S


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
    assert pair.run(pauses) == [[PAUSE_S], [PAUSE_S]]
