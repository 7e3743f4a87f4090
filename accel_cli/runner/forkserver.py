"""The fork server: one interpreter imports torch, and every rank is a fork of it.

`exec_fork_server` replaces `accel launch` by a fresh interpreter that runs `forkserver_main.py`. That one imports torch
and calls `start_fork_server`: the copy serves requests to fork, and the original becomes the elastic agent.

multiprocessing has a fork server too, but its processes are children of the server and depend on it
(`current_process()`, a resource tracker, an empty stdin). Here they are children of the launcher.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import struct
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType
from typing import TextIO

from typing_extensions import override

from accel_cli import early_signals, start_time, worker
from accel_cli.errors import AccelError, UsageError, explain_os_error
from accel_cli.planning.plan import Plan
from accel_cli.runner.guard import HANDLED_SIGNALS

__all__ = [
    "ForkRequest",
    "ForkServer",
    "ForkServerError",
    "adopt_orphans",
    "exec_fork_server",
    "explain_fallback",
    "explain_unsafe_fork",
    "import_torch",
    "preload_modules",
    "read_source",
    "start_fork_server",
]


_FORKED = struct.Struct("=ii")
"""The message of a forked process: the index of its request, and its process id."""
_STDERR = 2
_GPUS = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
_PR_SET_CHILD_SUBREAPER = 36
_TORCH_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
"""The log level of torch's C++ code; read once, while torch is imported."""


def exec_fork_server(plan: Plan) -> int:
    """Replace this process by a fresh interpreter that imports torch once, for the agent and all ranks.

    This process has imported modules that the script must not find, and was started without the plan's environment:
    `LD_PRELOAD`, `PYTHON...` and the allocator's settings would come too late.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        plan_fd = _write_plan(plan)
    except OSError as error:
        raise AccelError(f"the plan cannot be passed on: {explain_os_error(error)}") from error
    os.set_inheritable(plan_fd, True)
    python, main = plan.argv[0], str(Path(__file__).with_name("forkserver_main.py"))
    try:
        with early_signals.block_signals():
            # The command line follows, so that lists of processes show the script.
            os.execve(python, [python, main, str(plan_fd), *sys.argv[1:]], {**os.environ, **plan.env})
    except OSError as error:
        raise UsageError(f"{python} cannot be executed: {error.strerror}") from error


def _write_plan(plan: Plan) -> int:
    """Write the start of the command and a plan to an anonymous file, since command lines are public; return its descriptor."""
    # Some builds of Python, such as conda's, have no memfd.
    with (
        os.fdopen(os.memfd_create("plan"), "w+b") if hasattr(os, "memfd_create") else TemporaryFile() as file
    ):
        file.write(f"{start_time.STARTED!r}\n{plan.to_json()}".encode("ascii"))
        file.seek(0)
        return os.dup(file.fileno())


def import_torch(*, quiet: bool) -> None:
    """Import torch; with `quiet`, its sockets do not print stack frames, unless the user has set their log level."""
    has_default = quiet and _TORCH_LOG_LEVEL not in os.environ
    if has_default:
        os.environ[_TORCH_LOG_LEVEL] = "ERROR"
    torch = importlib.import_module("torch")
    if "torch._C" not in sys.modules:
        raise UsageError(
            f"Cannot import torch: {torch.__file__} is another module of that name. Rename it, or leave its folder out of "
            "PYTHONPATH."
        )
    if has_default:
        del os.environ[_TORCH_LOG_LEVEL]


_COMPILER = "torch._dynamo"
"""What torch imports when an optimizer is made (torch 2.13: 800 modules)."""


def preload_modules() -> list[str]:
    """Import what every rank of a training would import after the fork; return the modules of torch that `import torch` leaves out."""
    variables = set(os.environ)
    preloaded: list[str] = []
    # Each rank tries again, and reports the error where it occurs.
    with suppress(ImportError, OSError, RuntimeError):
        importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks")  # accel_runtime imports it
        before = set(sys.modules)
        importlib.import_module(_COMPILER)
        preloaded = [name for name in sys.modules if name.startswith("torch.") and name not in before]
    # Each rank gets the environment of this process, and must not find what the compiler sets (TORCHINDUCTOR_CACHE_DIR).
    for name in os.environ.keys() - variables:
        del os.environ[name]
    return preloaded


class ForkServerError(Exception):
    """The server cannot fork; the message gives the reason."""


@dataclass(frozen=True)
class ForkRequest:
    """The command and environment of one process to fork."""

    argv: tuple[str, ...]
    """The command line that exec would run: interpreter, worker, and the worker's arguments."""
    environ: Mapping[str, str]
    preloaded: Collection[str] = ()
    """The modules of torch that are hidden until the script imports them, not torch alone."""

    def enter(self) -> None:
        """Set up the environment, random seeds and modules of this process as exec would; called once, before the script."""
        os.environ.clear()
        os.environ.update(self.environ)
        # New seeds, as every process draws at its start; Python's own generator does so at a fork too.
        if numpy := sys.modules.get("numpy.random"):
            numpy.seed()
        if torch := sys.modules.get("torch"):
            torch.default_generator.seed()
        if process := sys.modules.get("multiprocessing.process"):
            process.current_process().authkey = os.urandom(32)
        compiler = _HiddenModules(self.preloaded, _READ_BY_COMPILER, self.environ)
        names = [name for name in sys.modules if f"{name}.".startswith("torch.")]
        sys.meta_path[:0] = [_HiddenModules(names, _READ_BY_TORCH, self.environ), compiler]


class ForkServer:
    """The launcher's side of the fork server; requests and answers are lines of JSON."""

    def __init__(self, link: TextIO, pid: int) -> None:
        self._link = link
        self._pid = pid

    def fork(self, argv: Sequence[str], environs: Sequence[Mapping[str, str]]) -> list[int]:
        """Start a child of this process for each environment, and return their ids; raise ForkServerError if it fails."""
        request = {"argv": list(argv), "environs": [dict(environ) for environ in environs]}
        try:
            print(json.dumps(request), file=self._link, flush=True)
            response = json.loads(self._link.readline())
        except (OSError, ValueError):
            raise ForkServerError("the fork server has ended") from None
        pids: list[int] = response["pids"]
        if len(pids) < len(environs):
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            raise ForkServerError(f"the fork server could not fork: {os.strerror(response['errno'])}")
        return pids

    def close(self) -> None:
        """End the server; forked processes continue."""
        with suppress(OSError):  # it has ended, and did not read the last request
            self._link.close()
        os.waitpid(self._pid, 0)


def start_fork_server(preloaded: Collection[str] = ()) -> ForkServer | ForkRequest:
    """Fork the server; returns in this process, and again in every process that the server forks.

    `preloaded` are the modules that `preload_modules` returns.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    adopt_orphans()
    ends = socket.socketpair()
    pid = os.fork()
    link = ends[0 if pid else 1].makefile("rw")
    for end in ends:  # the file keeps its end open
        end.close()
    return ForkServer(link, pid) if pid else _serve(link, preloaded)


def adopt_orphans() -> None:
    """Make processes children of this one when their parent ends (`PR_SET_CHILD_SUBREAPER`)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _serve(link: TextIO, preloaded: Collection[str]) -> ForkRequest:
    """Serve requests until the launcher ends; returns only in a forked process, with its request."""
    # Signals to the launcher's process group, such as Ctrl-C, are not for the server.
    os.setsid()
    _close_inherited()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
    with suppress(OSError, ValueError):
        while True:
            message = json.loads(link.readline())
            argv = tuple(message["argv"])
            requests = [ForkRequest(argv, environ, preloaded) for environ in message["environs"]]
            forked = _fork(requests, link, mask)
            if forked:
                return forked
    os._exit(0)


def _close_inherited() -> None:
    """Close the descriptors that the launcher inherited; the agent's exec would close them too."""
    for fd in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        # One of them is the descriptor that listed the folder.
        with suppress(OSError):
            if fd > _STDERR and os.get_inheritable(fd):
                os.close(fd)


def _fork(
    requests: Sequence[ForkRequest], link: TextIO, mask: set[int | signal.Signals]
) -> ForkRequest | None:
    """Fork a process for each request and send their ids; return None in the server, the request in a forked process.

    An intermediate process forks them and ends, so that they become children of the launcher and the kernel reports
    their exit codes to it. They wait until that has happened.
    """
    start_read, start_write = os.pipe()
    pids_read, pids_write = os.pipe()
    intermediate = os.fork()
    if not intermediate:
        for index, request in enumerate(requests):
            try:
                pid = os.fork()
            except OSError as error:
                os._exit(error.errno or 1)
            if not pid:
                link.close()
                os.close(start_write)
                os.close(pids_read)
                _wait_for_start(index, pids_write, start_read, mask)
                return request
        os._exit(0)
    os.close(start_read)
    os.close(pids_write)
    with os.fdopen(pids_read, "rb") as reports:
        pids_by_index = dict(_FORKED.iter_unpack(reports.read()))
    errno = os.waitstatus_to_exitcode(os.waitpid(intermediate, 0)[1])
    pids = [pid for _, pid in sorted(pids_by_index.items())]
    # If the launcher has ended, the start pipe closes without a byte, and the processes end.
    with suppress(BrokenPipeError, ConnectionResetError):
        print(json.dumps({"pids": pids, "errno": errno}), file=link, flush=True)
        os.write(start_write, bytes(len(pids)))
    os.close(start_write)
    return None


def _wait_for_start(index: int, pids_write: int, start_read: int, mask: set[int | signal.Signals]) -> None:
    """Create a session, send the process id, and wait until the launcher is the parent."""
    os.setsid()
    for number in HANDLED_SIGNALS:
        # As after exec: ignored signals stay ignored, others have Python's default.
        if signal.getsignal(number) is not signal.SIG_IGN:
            default = signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.write(pids_write, _FORKED.pack(index, os.getpid()))
    os.close(pids_write)
    if not os.read(start_read, 1):
        os._exit(1)
    os.close(start_read)


class _HiddenModules(MetaPathFinder, Loader):
    """Removes loaded modules from `sys.modules`, as in a new process, and restores them when the first of them is imported.

    Variables that they have read keep their former values: a later change is a warning.
    """

    def __init__(self, names: Collection[str], prefixes: tuple[str, ...], environ: Mapping[str, str]) -> None:
        self._modules = {name: sys.modules.pop(name) for name in names}
        self._specs = {name: module.__spec__ for name, module in self._modules.items()}
        self._prefixes, self._variables = prefixes, _find_variables(prefixes, environ)
        # A package that stays would find its modules as attributes, without importing them.
        self._attributes = []
        for name, module in self._modules.items():
            package, _, attribute = name.rpartition(".")
            if (parent := sys.modules.get(package)) and vars(parent).get(attribute) is module:
                delattr(parent, attribute)
                self._attributes.append((parent, attribute, module))

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        before = self._specs.get(fullname)
        if before is None:
            return None
        spec = ModuleSpec(fullname, self, origin=before.origin)
        # Libraries read these fields before they import torch.
        spec.submodule_search_locations = before.submodule_search_locations
        spec.has_location = before.has_location
        return spec

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        sys.meta_path.remove(self)
        sys.modules.update(self._modules)
        for parent, attribute, module in self._attributes:
            setattr(parent, attribute, module)
        before, now = self._variables, _find_variables(self._prefixes, os.environ)
        if late := sorted(name for name in {*now, *before} if now.get(name) != before.get(name)):
            warnings.warn(
                f"{', '.join(late)} changed after {spec.name} was loaded for this process, and may have no effect; "
                "set it in the profile's env, or use launcher.start_method=exec",
                RuntimeWarning,
                stacklevel=2,
            )
        return self._modules[spec.name]

    @override
    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._specs[module.__name__]


_READ_BY_TORCH = ("ATEN_", "GOMP_", "GOTO_", "KMP_", "MKL_", "OMP_", "OPENBLAS_", "PYTORCH_", "TORCH_")
"""Prefixes of variables that are read when torch, or a library of it, is imported."""
_READ_BY_COMPILER = (
    *("AOTINDUCTOR_", "AOT_", "CUDA_HOME", "INDUCTOR_", "SYMPY_", "TORCHDYNAMO_", "TORCHINDUCTOR_"),
    *("TORCH_CACHING_", "TORCH_COMPILE", "TORCH_DYNAMO_", "TRITON_"),
)
"""Prefixes of variables that are read when torch's compiler is imported (torch 2.13)."""
_READ_LATER = ("TORCH_HOME", "TORCH_NCCL_")


def _find_variables(prefixes: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(prefixes) and not name.startswith(_READ_LATER)
    }


# The choice of exec instead of the fork server


def explain_fallback(plan: Plan, *, python_modules: Collection[str]) -> str | None:
    """Return the difference that the script could observe in a forked process; None without a difference."""
    if not Path("/proc/self/fd").is_dir():
        return "/proc is not available"
    folder = worker.get_import_folder(*plan.argv[2:4])
    shadowed = worker.find_shadowed(folder, python_modules)
    return (
        f"{folder} has modules with the names of imported ones: {', '.join(shadowed)}" if shadowed else None
    )


def explain_unsafe_fork() -> str:
    """Return why a fork of this process would not work, because of what imported libraries have done; empty if it works."""
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        # A fork would copy locks that they hold.
        return "a library started threads while modules were imported"
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor that lists the folder
            if str(entry.readlink()).startswith(_GPUS):
                # Drivers do not work in a fork.
                return "a library opened a GPU while modules were imported"
    return ""


def read_source(kind: str, target: str) -> bytes:
    """Read the source of a script or module without importing anything; empty if it cannot be found."""
    if kind == "script":
        # Only the script's own process may read a pipe.
        return Path(target).read_bytes() if Path(target).is_file() else b""
    path = [str(Path.cwd()), *sys.path]
    spec = _find_module_spec(target, path)
    if spec and spec.submodule_search_locations:
        spec = _find_module_spec(f"{target}.__main__", path)
    return Path(spec.origin).read_bytes() if spec and spec.origin else b""


def _find_module_spec(module: str, path: Sequence[str]) -> ModuleSpec | None:
    """Find a module by its dotted name in the folders of a path, without importing anything."""
    spec, names = None, module.split(".")
    for depth in range(1, len(names) + 1):
        spec = PathFinder.find_spec(".".join(names[:depth]), path)
        path = list(spec.submodule_search_locations or []) if spec else []
    return spec
