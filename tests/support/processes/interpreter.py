"""Fork processes from an interpreter that has imported torch: it takes milliseconds, a new interpreter seconds of CPU time.

This file is both sides. Tests use `Interpreter`; run as a script, it is the interpreter. A forked process is a child of the
test process, with its own environment, folder and descriptors.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import weakref
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
"""Constants of Linux, from sys/prctl.h."""
MADV_COLLAPSE, HUGE_PAGE = 25, 1 << 21
"""Constants of Linux, from sys/mman.h."""


@dataclass(frozen=True)
class ForkRequest:
    """A process to fork."""

    function: str
    """What the process calls, as `module:function`; or the path of a script that it runs as `__main__`."""
    arguments: tuple[Any, ...]
    """Arguments of the function, values of JSON; the numbers of the additional descriptors follow them."""
    environ: dict[str, str]
    """All environment variables."""
    folder: str
    """The working folder."""
    teardown: bool = False
    """Whether the process ends as the interpreter does, and not at once after its functions of `atexit`."""


class Interpreter:
    """The test process's side; the interpreter starts with the first process, and ends with the tests.

    Args:
        modules: Modules that it imports, in this order, before it forks.
        parent: The interpreter that forks this one, with what it has imported; None for a new one.
    """

    def __init__(self, *modules, parent=None):
        self._modules = list(modules)
        self._parent = parent
        self._pid = self._process = None
        self._lock = threading.RLock()

    def preload(self, *modules):
        """Import modules, or run files whose paths are given, before the next process is forked."""
        self._modules += [str(module) for module in modules if str(module) not in self._modules]

    def build_command(self, request):
        """Return the command of a new interpreter that does what a forked process would do."""
        modules = [*(self._parent._modules if self._parent else ()), *self._modules]
        return [sys.executable, __file__, json.dumps(asdict(request) | {"modules": modules})]

    def fork(self, request, descriptors):
        """Fork a process, as a child of this one.

        Args:
            request: The `ForkRequest`.
            descriptors: The file descriptors of its standard input, output and error, and additional ones.

        Returns:
            The process id.
        """
        with self._lock, _adopt_orphans():
            if self._pid is None:
                self._start()
            late_variables = {name for name, _ in _read_at_start(request.environ) ^ self._read}
            assert not late_variables, f"{late_variables} would come too late: use `accel` of conftest.py"
            message = asdict(request) | {"modules": self._modules}
            socket.send_fds(self._link, [json.dumps(message).encode()], descriptors)
            pid = self._link.recv(100)
        assert pid, "the interpreter that forks processes has ended"
        return int(pid)

    def close(self):
        """End the interpreter; the forked processes keep running."""
        if self._pid is not None:
            self._link.close()
            os.kill(self._pid, signal.SIGKILL)
            self._process.wait() if self._process else os.waitpid(self._pid, 0)
            self._pid = self._process = None

    def _start(self):
        self._read = _read_at_start(os.environ)
        self._link, remote_end = socket.socketpair(type=socket.SOCK_SEQPACKET)
        # torch must not keep compiled code in the temporary folder of a test.
        environ = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
        environ["OMP_NUM_THREADS"] = "1"
        with remote_end, Path(os.devnull).open("rb") as nothing:
            if self._parent:
                request = ForkRequest("__main__:serve_in_session", (), environ, str(Path.cwd()))
                self._pid = self._parent.fork(request, [nothing.fileno(), 1, 2, remote_end.fileno()])
                return
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(remote_end.fileno())],
                env=environ,
                stdin=nothing,
                pass_fds=[remote_end.fileno()],
                start_new_session=True,
            )
            self._pid = self._process.pid


@contextmanager
def _adopt_orphans():
    """Make processes children of this one when their parent ends."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def _read_at_start(environ):
    """Return the variables that Python or the C library reads when a process starts.

    `set_up` applies PYTHONPATH, which is for modules that the interpreter has not imported.
    """
    return {
        (name, value)
        for name, value in environ.items()
        if name.startswith(("PYTHON", "LD_", "MALLOC_")) and name != "PYTHONPATH"
    }


def serve(link):
    """Fork a process for each request until the tests end; return the request and its descriptors in each of them."""
    loaded = []
    while True:
        data, descriptors, _, _ = socket.recv_fds(link, 1 << 20, 16)
        if not data:
            os._exit(0)
        request, modules = parse_message(data)
        if len(loaded) < len(modules):
            gc.disable()  # it would visit a million objects that stay
            for name in modules[len(loaded) :]:
                load_module(name)
            loaded = modules
            gc.collect()
            gc.freeze()  # garbage collections of forked processes must not copy these pages
            for finalizer in weakref.finalize._registry:  # hundreds of libraries of operators
                finalizer.atexit = False
            gc.enable()
            use_huge_pages()
        if pid := fork_twice():
            link.send(str(pid).encode())
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        link.close()
        return request, descriptors


def use_huge_pages():
    """Move the memory of this process into huge pages, if Linux has them: a fork copies an entry for each page."""
    libc = ctypes.CDLL(None)
    with contextlib.suppress(OSError):  # a system without /proc
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, access, *_, inode = line.split()[:5]
            if access == "rw-p" and inode == "0":
                first, last = (int(address, 16) for address in addresses.split("-"))
                first, last = -(-first // HUGE_PAGE) * HUGE_PAGE, last // HUGE_PAGE * HUGE_PAGE
                if first < last:
                    libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_COLLAPSE)


def parse_message(data):
    """Return the request, and the modules to import before it."""
    fields = json.loads(data)
    modules = fields.pop("modules")
    return ForkRequest(**fields), modules


def load_module(name):
    """Import a module by its name, or run a file; the modules of the tests can be imported meanwhile."""
    if name.endswith(".py"):
        runpy.run_path(name, run_name="preloaded")
        return
    if name == "torch":
        # torch reads the variable once: a launch on several nodes sets it before it imports torch.
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    sys.path[:0] = [str(TESTS)]
    importlib.import_module(name)
    del sys.path[0]
    os.environ.pop("TORCH_CPP_LOG_LEVEL", None)


def fork_twice():
    """Fork, so that the new process is no child of this one; return its id, and 0 in it."""
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


def set_up(request, descriptors):
    """Set the environment, folder and standard streams of a forked process; return the additional descriptors."""
    streams, additional = descriptors[:3], descriptors[3:]
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    for descriptor in {*streams} - {0, 1, 2}:
        os.close(descriptor)
    added = request.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in added if path and path not in sys.path]
    os.environ.clear()
    os.environ.update(request.environ)
    os.chdir(request.folder)
    return additional


def serve_in_session(descriptor):
    """Serve as an interpreter of its own in a new session, and run the request in each forked process."""
    os.setsid()
    with socket.socket(fileno=descriptor) as link:
        request, received = serve(link)
    run(request, set_up(request, received))


def run(request, additional_descriptors):
    """Run the script of a request as `__main__`, or call its function."""
    with contextlib.nullcontext() if request.teardown else exit_at_once():
        call(request.function, [*request.arguments, *additional_descriptors])


@contextmanager
def exit_at_once():
    """Exit after the body without the teardown of the interpreter, which takes 0.3 s for the modules of torch.

    Threads, functions of `atexit` and output end as always. An exception other than SystemExit is raised.
    """
    code = 0
    try:
        yield
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            raise
        code = error.code or 0
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def call(target, arguments):
    """Run a script as `__main__`, or call a function, given as `module:function`."""
    if target.endswith(".py"):
        sys.argv = [target, *arguments]
        sys.path.insert(0, str(Path(target).parent))
        # In `__main__`, which the interpreter tears down last, as for a script.
        exec(compile(Path(target).read_text("utf-8"), target, "exec", dont_inherit=True), globals())  # noqa: S102
    else:
        module_name, _, function_name = target.partition(":")
        getattr(sys.modules[module_name], function_name)(*arguments)


if __name__ == "__main__":
    del sys.path[0]
    if sys.argv[1].isdecimal():
        with socket.socket(fileno=int(sys.argv[1])) as channel:
            fork_request, received = serve(channel)
        run(fork_request, set_up(fork_request, received))
    else:
        fork_request, module_names = parse_message(sys.argv[1])
        for name in module_names:
            load_module(name)
        run(fork_request, ())
