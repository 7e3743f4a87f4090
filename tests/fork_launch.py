"""Run `accel launch` in a process forked from an interpreter that has imported torch, which takes milliseconds.

This file is both sides. Tests use `Accel` and `run`; run as a script, it is the interpreter. A forked `accel` has its own
environment, folder, descriptors and session, and its plan, fork server, agent and ranks are real. Only the start of an
interpreter that imports torch is left out: tests of the start of a launch, and tests with variables that Python or torch
reads at its start, use `accel` of `conftest.py`.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

from processes import Process

PRELOADED = (
    "accel_cli.runner.forkserver_main",  # the first: it must not see the modules below as loaded
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.utils.data",
    "torch._dynamo",
    "safetensors.torch",
    "accel_cli.main",
    "accel_cli.runner.agent",
    "accel_cli.planner",
    "accel_cli.runner.stalls",
    "rich.traceback",
    "typer.rich_utils",
)
"""Modules that the interpreter imports before it forks."""
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
MS_BIND, MS_REC, MS_SLAVE = 0x1000, 0x4000, 0x80000
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
"""Constants of Linux, from sys/prctl.h, sched.h and sys/mount.h."""


class Accel(Process):
    """A running command `accel`: a child of this process, with the interface of `subprocess.Popen`.

    Args:
        args: The arguments of `accel`.
        host: The names of a network namespace and of its host; None for the namespace of this process.
        options: Options of `subprocess.Popen` for streams, text, folder and environment.
    """

    def __init__(self, *args, host=None, **options):
        self._host = host
        super().__init__(["accel", *map(str, args)], **options)

    def _execute_child(self, args, *options):
        """Fork instead of executing a command."""
        if sys.platform != "linux":  # a process can adopt others on Linux only
            super()._execute_child([sys.executable, "-m", "accel_cli", *args[1:]], *options)
            return
        cwd, env = options[4:6]
        stdin, _, _, stdout, _, stderr = pipes = options[9:15]
        request = {
            "args": args[1:],
            "environ": dict(os.environ if env is None else env),
            "folder": str(cwd or Path.cwd()),
            "host": self._host,
        }
        # -1 means that the stream of this process is inherited.
        streams = [number if pipe == -1 else pipe for number, pipe in enumerate((stdin, stdout, stderr))]
        self.pid = INTERPRETER.fork(request, streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def run(*args, timeout=240, **options):
    """Run `accel` and wait for its exit, like the fixture `accel` of `conftest.py`.

    Args:
        args: The arguments of `accel`.
        timeout: Seconds until the process is killed.
        options: Options of `Accel`; by default the output is captured as text.
    """
    options = {"stdin": subprocess.DEVNULL, "text": True} | options
    if options.pop("capture_output", True):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Accel(*args, **options) as process:
        out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def preload(*modules):
    """Import modules in the interpreter before it forks the next command.

    Args:
        modules: Names of modules, or paths of files that are run.
    """
    INTERPRETER.extra_modules += [
        str(module) for module in modules if str(module) not in INTERPRETER.extra_modules
    ]


class Interpreter:
    """The test process's side of the interpreter that forks; it starts with the first command and ends with the tests."""

    def __init__(self):
        self.extra_modules = []
        """Modules to import besides `PRELOADED`; see `preload`."""
        self._process = None
        self._lock = threading.Lock()

    def fork(self, request, streams):
        """Fork an `accel`, as a child of this process.

        Args:
            request: The arguments, environment, folder and host of the command.
            streams: The file descriptors of standard input, output and error.

        Returns:
            The process id.
        """
        with self._lock, adopt_orphans():
            if self._process is None:
                self._start()
            late_variables = {name for name, _ in _read_at_start(request["environ"]) ^ self._read}
            assert not late_variables, f"{late_variables} would come too late: use `accel` of conftest.py"
            message = request | {"preload": self.extra_modules}
            socket.send_fds(self._link, [json.dumps(message).encode()], streams)
            pid = self._link.recv(100)
        assert pid, "the interpreter that forks launches has ended"
        return int(pid)

    def close(self):
        """End the interpreter; forked commands are children of this process and keep running."""
        if self._process is not None:
            self._link.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self):
        self._read = _read_at_start(os.environ)
        self._link, remote_end = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with remote_end:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(remote_end.fileno())],
                # torch must not keep compiled code in the temporary folder of a test.
                env={key: value for key, value in os.environ.items() if key != "TMPDIR"}
                | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[remote_end.fileno()],
                start_new_session=True,
            )


@contextmanager
def adopt_orphans():
    """Make processes children of this one when their parent ends."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


INTERPRETER = Interpreter()
"""The interpreter of this test process."""


def _read_at_start(environ):
    return {(name, value) for name, value in environ.items() if name.startswith(("PYTHON", "LD_", "MALLOC_"))}


def serve(link):
    """Fork a process for each request until the tests end; return its request in each of them."""
    for name in PRELOADED:
        if name == "torch":
            # torch reads the variable once: a launch on several nodes sets it before it imports torch.
            os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        importlib.import_module(name)
        os.environ.pop("TORCH_CPP_LOG_LEVEL", None)
    loaded = []
    gc.collect()
    gc.freeze()
    while True:
        data, streams, _, _ = socket.recv_fds(link, 1 << 20, 3)
        if not data:
            os._exit(0)
        request = json.loads(data)
        for module in request["preload"][len(loaded) :]:
            load(module)
            loaded.append(module)
        if pid := fork():
            link.send(str(pid).encode())
            for stream in streams:
                os.close(stream)
            continue
        link.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        for stream in set(streams):
            os.close(stream)
        return request


def load(module):
    """Import a module by its name, or run a file."""
    if module.endswith(".py"):
        runpy.run_path(module, run_name="preloaded")
    else:
        importlib.import_module(module)


def fork():
    """Fork twice, so that the new process is no child of this one; return its id, and 0 in it."""
    read, write = os.pipe()
    intermediate = os.fork()
    if not intermediate:
        pid = os.fork()
        if not pid:
            os.close(read)
            os.close(write)
            return 0
        os.write(write, str(pid).encode())
        os._exit(0)
    os.waitpid(intermediate, 0)
    pid = int(os.read(read, 100))
    os.close(read)
    os.close(write)
    return pid


class PlanReadyError(BaseException):
    """Unwinds the stack of the command line with the plan that the fork server would execute."""


def run_forked_command(request):
    """Run the `accel` command of a request; return only in a rank whose script has ended."""
    from accel_cli import main
    from accel_cli.runner import forkserver, forkserver_main

    os.setsid()
    if request["host"]:
        enter_namespace(*request["host"])
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["folder"])
    sys.argv = ["accel", *request["args"]]
    sys.stdout.reconfigure(line_buffering=os.isatty(1))

    def raise_plan(plan):
        raise PlanReadyError(plan)

    forkserver.exec_fork_server = raise_plan
    try:
        main.main()
    except SystemExit as error:
        exit_process(error.code)
    except PlanReadyError as error:
        (plan,) = error.args
    os.environ.update(plan.env)
    # Continue like `exec_fork_server` in a new interpreter, but in this one.
    sys.argv = [forkserver_main.__file__, str(forkserver._write_plan(plan)), *sys.argv[1:]]
    forkserver_main.main()


def enter_namespace(namespace, name):
    """Enter a network namespace like `ip netns exec`, and set the host name."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result):
        assert result == 0, os.strerror(ctypes.get_errno())

    with Path("/run/netns", namespace).open() as file:
        check(libc.setns(file.fileno(), CLONE_NEWNET))
    check(libc.unshare(CLONE_NEWNS | CLONE_NEWUTS))
    check(libc.mount(b"none", b"/", None, MS_REC | MS_SLAVE, None))
    for file in Path("/etc/netns", namespace).iterdir():
        check(libc.mount(bytes(file), b"/etc/" + file.name.encode(), None, MS_BIND, None))
    socket.sethostname(name)


def exit_process(code):
    """Exit immediately, without the slow teardown of torch."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    del sys.path[0]
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        command_request = serve(channel)
    run_forked_command(command_request)
