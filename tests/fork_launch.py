"""`accel launch` as a process that starts in milliseconds: forked from an interpreter that has imported torch.

This file is both sides. Tests see `Accel` and `run`; run as a script, it is the interpreter. What it forks is an `accel`
like any other, with an environment, a folder, descriptors and a session of its own, and everything that follows is real:
its plan, its fork server, its agent, its ranks. Only the fresh interpreter that imports torch is left out; the tests of
how a launch starts, and those that set variables which Python or torch reads at the start, use `accel` of `conftest.py`.
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

PRELOADED = (
    "accel_cli.runner.forkserver_main",  # the first: what is loaded by then is what a bare process has loaded
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
"""What the interpreter imports before it forks."""
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
MS_BIND, MS_REC, MS_SLAVE = 0x1000, 0x4000, 0x80000
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
"""Numbers of Linux, from sys/prctl.h, sched.h and sys/mount.h."""


class Accel(subprocess.Popen):
    """The command `accel` under way: a child of this process, with all that `subprocess.Popen` offers.

    Args:
        args: What follows `accel`.
        host: The name of a network namespace, and that of the host which it stands for; None stays where this process is.
        options: Those of `subprocess.Popen` for streams, text, folder and environment.
    """

    def __init__(self, *args, host=None, **options):
        self._host = host
        super().__init__(["accel", *map(str, args)], **options)

    def _execute_child(self, args, *options):
        """Fork where `subprocess.Popen` would execute a command."""
        if sys.platform != "linux":  # no process there can adopt another
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
    """Run `accel` to its end, as the fixture `accel` of `conftest.py` does.

    Args:
        args: What follows `accel`.
        timeout: Seconds until it is killed.
        options: Those of `Accel`; without any, its output is captured as text.
    """
    options = {"stdin": subprocess.DEVNULL, "text": True} | options
    if options.pop("capture_output", True):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Accel(*args, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def preload(*modules):
    """Have the interpreter import more before it forks the next command.

    Args:
        modules: Names of modules, or paths of files that are run.
    """
    INTERPRETER.more += [str(module) for module in modules if str(module) not in INTERPRETER.more]


class Interpreter:
    """The interpreter that forks, as the test process sees it; it starts with the first command and ends with the tests."""

    def __init__(self):
        self.more = []
        """What it imports besides `PRELOADED`; see `preload`."""
        self._process = None
        self._lock = threading.Lock()

    def fork(self, request, streams):
        """Fork an `accel`, as a child of this process.

        Args:
            request: Its arguments, environment and folder.
            streams: The file descriptors of its standard input, output and error.

        Returns:
            Its process id.
        """
        with self._lock, adopt_orphans():
            if self._process is None:
                self._start()
            late = {name for name, _ in _read_at_start(request["environ"]) ^ self._read}
            assert not late, f"{late} would come too late: use `accel` of conftest.py"
            told = request | {"preload": self.more}
            socket.send_fds(self._link, [json.dumps(told).encode()], streams)
            pid = self._link.recv(100)
        assert pid, "the interpreter that forks launches has ended"
        return int(pid)

    def close(self):
        """End the interpreter; what it has forked are children of this process, and run on."""
        if self._process is not None:
            self._link.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self):
        self._read = _read_at_start(os.environ)
        self._link, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                # The temporary folder of a test is not where torch keeps what it compiles.
                env={key: value for key, value in os.environ.items() if key != "TMPDIR"}
                | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
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
"""The one of this test process."""


def _read_at_start(environ):
    return {(name, value) for name, value in environ.items() if name.startswith(("PYTHON", "LD_", "MALLOC_"))}


def serve(link):
    """Fork a process for each request until the tests end; return its request in each of them."""
    for name in PRELOADED:
        if name == "torch":
            # torch reads it once: a launch of several machines sets it before it imports torch.
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
    """Fork a process whose parent is not this one: a process in between ends. Return its id, and 0 in it."""
    read, write = os.pipe()
    between = os.fork()
    if not between:
        pid = os.fork()
        if not pid:
            os.close(read)
            os.close(write)
            return 0
        os.write(write, str(pid).encode())
        os._exit(0)
    os.waitpid(between, 0)
    pid = int(os.read(read, 100))
    os.close(read)
    os.close(write)
    return pid


class PlannedError(BaseException):
    """What leads out of the command line's stack, with the plan that the fork server would be executed with."""


def run_forked_command(request):
    """Run the `accel` command of a request; return only in a rank whose script has ended."""
    from accel_cli import main
    from accel_cli.runner import forkserver, forkserver_main

    os.setsid()
    if request["host"]:
        enter(*request["host"])
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["folder"])
    sys.argv = ["accel", *request["args"]]
    sys.stdout.reconfigure(line_buffering=os.isatty(1))

    def planned(plan):
        raise PlannedError(plan)

    forkserver.exec_fork_server = planned
    try:
        main.main()
    except SystemExit as error:
        end(error.code)
    except PlannedError as error:
        (plan,) = error.args
    os.environ.update(plan.env)
    # What `exec_fork_server` does in a fresh interpreter, done in this one.
    sys.argv = [forkserver_main.__file__, str(forkserver._write_plan(plan)), *sys.argv[1:]]
    forkserver_main.main()


def enter(namespace, name):
    """Move to a network namespace, as `ip netns exec` does, and call its host by a name."""
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


def end(code):
    """Exit at once, without the slow teardown of torch."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    del sys.path[0]
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        asked = serve(channel)
    run_forked_command(asked)
