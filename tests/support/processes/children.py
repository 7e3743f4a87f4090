"""Processes of tests: forked from an interpreter that has imported torch, or from the test process."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from support.processes.interpreter import ForkRequest
from support.processes.waits import limit

__all__ = ["AS_SESSION", "ForkedProcess", "Process", "fork", "free_port", "wait_for_exit"]

EXIT_S = limit(120)
AS_SESSION = (
    sys.executable,
    "-c",
    "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])",
)
"""Begins a command that leads a session, whose terminal is its standard input."""


class Process(subprocess.Popen):
    """A process that is killed if its `with` block fails, where `subprocess.Popen` would wait for its exit."""

    def __exit__(self, kind, *error):
        if kind is not None:
            self.kill()
        super().__exit__(kind, *error)


class ForkedProcess(Process):
    """A process that an interpreter forks, as a child of this process.

    Args:
        interpreter: The `Interpreter`.
        function: What it calls, as `module:function`, or the path of a script.
        arguments: Arguments of the function, values of JSON.
        descriptors: Descriptors of this process whose numbers there are the last arguments of the function.
        teardown: Whether it ends as the interpreter does, for a test of that. Else it exits after its functions of `atexit`.
        options: Options of `subprocess.Popen` for streams, text, folder and environment.
    """

    def __init__(self, interpreter, function, arguments=(), *, descriptors=(), teardown=False, **options):
        self._interpreter, self._function, self._arguments = interpreter, function, tuple(arguments)
        self._descriptors, self._teardown = descriptors, teardown
        super().__init__([function, *map(str, arguments)], **options)

    def _execute_child(self, args, *options):  # noqa: ARG002
        """Fork instead of executing a command."""
        cwd, env = options[4:6]
        stdin, _, _, stdout, _, stderr = pipes = options[9:15]
        environ = {name: str(value) for name, value in (os.environ if env is None else env).items()}
        request = ForkRequest(
            self._function, self._arguments, environ, str(cwd or Path.cwd()), teardown=self._teardown
        )
        if sys.platform != "linux":  # where no process can adopt another
            request = replace(request, arguments=(*request.arguments, *self._descriptors))
            options = (*options[:3], tuple(self._descriptors), *options[4:])
            super()._execute_child(self._interpreter.build_command(request), *options)
            return
        # -1 means that the stream of this process is inherited.
        streams = [number if pipe == -1 else pipe for number, pipe in enumerate((stdin, stdout, stderr))]
        self.pid = self._interpreter.fork(request, [*streams, *self._descriptors])
        self._child_created = True
        self._close_pipe_fds(*pipes)


def fork(function, *args):
    """Call a function in a fork of the test process, which exits with code 0, or 1 after an error; return its process id."""
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


@contextmanager
def free_port():
    """Return a port of loopback that stays reserved for a server of the test inside this context.

    Linux lets several sockets with SO_REUSEADDR bind a port if none of them listens. The bound socket keeps the kernel
    from assigning the port to a connection, and servers, which set the option too, can bind it.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]
