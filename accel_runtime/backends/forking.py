"""Forks beside the threads of collectives: this is how the workers of a DataLoader start."""

from __future__ import annotations

import functools
import os
import sys
import time

__all__ = ["let_threads_settle"]

PAUSE_S = 0.002


@functools.cache
def let_threads_settle() -> None:
    """Have every fork of this process from now on wait until the threads of collectives are done with Python.

    Such a thread lets go of the tensors a moment after the collective is over, and enters Python for it. A child that is
    forked in that moment waits for ever, with a lock that nobody opens, where Python is older than 3.12
    (python/cpython#112275): of 1000 forks, each beside four threads that enter, one or two did, and none after a pause.
    """
    if sys.version_info < (3, 12):
        os.register_at_fork(before=_pause)


def _pause() -> None:
    time.sleep(PAUSE_S)
