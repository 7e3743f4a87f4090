"""Fork the test process."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import traceback

EXIT_S = 120


def fork(function, *args):
    """Call a function in a forked process, which then exits with code 0, or 1 after an error; return its process id."""
    is_gc_enabled = gc.isenabled()
    gc.disable()  # until the forked process has called `gc.freeze`
    pid = os.fork()
    if pid:
        if is_gc_enabled:
            gc.enable()
        return pid
    code = 1
    try:
        # Garbage of the test process must not be collected here: a process group or a loader in it would wait for
        # threads or workers that this process does not have.
        gc.freeze()
        if is_gc_enabled:
            gc.enable()
        function(*args)
        code = 0
    except BaseException:  # noqa: BLE001 - any error is printed
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait_for_exit(pid, timeout=EXIT_S):
    """Return the exit code of a forked process, negative for a signal; kill it and fail after a time in seconds."""
    deadline = time.monotonic() + timeout
    while not (status := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"the forked process {pid} did not exit within {timeout} seconds")
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(status[1])
