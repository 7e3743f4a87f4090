"""The fork server: a copy of this process, with torch loaded and one thread, that forks processes on demand.

multiprocessing has a fork server too, but what it starts is a child of the server that knows it (its
`current_process()`, its resource tracker, its stdin). Here a process is a child of the launcher, and
nothing but its memory remembers where it came from.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import struct
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from multiprocessing import current_process
from pathlib import Path
from types import ModuleType

from typing_extensions import override

from accel_cli.runner.exec_fallback import get_torch_variables

__all__ = [
    "SIGNALS",
    "ForkRequest",
    "ForkServer",
    "ForkServerError",
    "enter_environment",
    "hide_package",
    "start_fork_server",
    "start_session",
]


_LENGTH = struct.Struct("!Q")
_BORN = struct.Struct("=ii")
"""What a process says of itself: the place of its request, and its id."""
_STDERR = 2
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


class ForkServerError(Exception):
    """The server cannot fork; the message says why."""


@dataclass(frozen=True)
class ForkRequest:
    """What one forked process is to run."""

    argv: tuple[str, ...]
    """The command that would have been executed: interpreter, worker, and the worker's arguments."""
    environ: Mapping[str, str]
    """Its whole environment."""

    @property
    def arguments(self) -> list[str]:
        """What the worker is told."""
        return list(self.argv[2:])

    def enter(self) -> None:
        """Make this process what the request says; called once, before anything of the script's runs."""
        enter_environment(self.environ)


class ForkServer:
    """The server as its launcher sees it."""

    def __init__(self, link: socket.socket, pid: int) -> None:
        self._link = link
        self._pid = pid

    def fork(self, argv: Sequence[str], environs: Sequence[Mapping[str, str]]) -> list[int]:
        """Start a process for each environment, as children of this one; their ids.

        Raises:
            ServerError: The server does not answer, or cannot fork.
        """
        asked = json.dumps({"argv": list(argv), "environs": [dict(e) for e in environs]}).encode()
        with _adopting():
            try:
                self._link.sendall(_LENGTH.pack(len(asked)) + asked)
                answer = json.loads(_received(self._link))
            except (OSError, EOFError):
                raise ForkServerError("the fork server has ended") from None
        pids: list[int] = answer["pids"]
        if len(pids) < len(environs):
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            raise ForkServerError(f"the fork server could not fork: {os.strerror(answer['errno'])}")
        return pids

    def close(self) -> None:
        """End the server; the processes go on."""
        self._link.close()
        os.waitpid(self._pid, 0)


def start_fork_server() -> ForkServer | ForkRequest:
    """Fork the server off; returns in this process, and again in every process the server forks."""
    sys.stdout.flush()
    sys.stderr.flush()
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        return ForkServer(ours, pid)
    ours.close()
    return _serve(theirs)


@contextmanager
def _adopting() -> Iterator[None]:
    """While this holds, a process whose parent ends becomes a child of this one."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def _serve(link: socket.socket) -> ForkRequest:
    """The server's whole life; returns only in a process it has forked."""
    # A Ctrl-C is the launcher's and the scripts' affair, and so is a signal that a scheduler sends to all.
    os.setsid()
    _close_inherited()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    while True:
        try:
            asked = json.loads(_received(link))
        except (OSError, EOFError):
            os._exit(0)
        argv = tuple(asked["argv"])
        requests = [ForkRequest(argv, environ) for environ in asked["environs"]]
        forked = _fork(requests, link, mask)
        if forked:
            return forked


def _close_inherited() -> None:
    """Close what the launcher's own parent left open: it does not pass an exec by the agent either."""
    for fd in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        # ServerError is the one that listed them.
        with suppress(OSError):
            if fd > _STDERR and os.get_inheritable(fd):
                os.close(fd)


def _fork(
    requests: Sequence[ForkRequest], link: socket.socket, mask: set[int | signal.Signals]
) -> ForkRequest | None:
    """Fork a process a request and tell their ids; None in the server, its request in a forked process.

    A child in between forks them and ends, so that they become children of the launcher, whom the kernel
    then tells how each one ended. They begin when that has happened.
    """
    go, begin = os.pipe()
    born, announce = os.pipe()
    between = os.fork()
    if not between:
        for place, request in enumerate(requests):
            try:
                pid = os.fork()
            except OSError as error:
                os._exit(error.errno or 1)
            if not pid:
                link.close()
                os.close(begin)
                os.close(born)
                _wait_for_start(place, announce, go, mask)
                return request
        os._exit(0)
    os.close(go)
    os.close(announce)
    with os.fdopen(born, "rb") as said:
        places = dict(_BORN.iter_unpack(said.read()))
    failed = os.waitstatus_to_exitcode(os.waitpid(between, 0)[1])
    pids = [pid for _, pid in sorted(places.items())]
    answer = json.dumps({"pids": pids, "errno": failed}).encode()
    # Processes whose pipe closes without a byte were forked by a server that was killed, and end.
    with suppress(BrokenPipeError, ConnectionResetError):
        link.sendall(_LENGTH.pack(len(answer)) + answer)
        os.write(begin, bytes(len(pids)))
    os.close(begin)
    return None


def _wait_for_start(place: int, announce: int, go: int, mask: set[int | signal.Signals]) -> None:
    """Become a session that takes signals; say so; and wait until the launcher is the parent."""
    start_session(mask)
    os.write(announce, _BORN.pack(place, os.getpid()))
    os.close(announce)
    if not os.read(go, 1):
        os._exit(1)
    os.close(go)


def _received(link: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(link, _LENGTH.size))
    return _exactly(link, length)


def _exactly(link: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = link.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""What a launcher handles, and a process that it executes therefore finds as Python's defaults."""


def start_session(mask: set[int | signal.Signals]) -> None:
    """A session of its own, and signals as after exec; what came before waits until this is done."""
    os.setsid()
    for number in SIGNALS:
        # What is ignored stays so after exec.
        if signal.getsignal(number) is not signal.SIG_IGN:
            default = signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def enter_environment(environ: Mapping[str, str]) -> None:
    """The environment, what every process draws for itself, and torch as good as not imported."""
    _set_environment(environ)
    _reseed()
    hide_package("torch", environ)


def _reseed() -> None:
    """What every process draws for itself when it starts; Python's own generator does at a fork too."""
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
    # With it a process knows its own children.
    current_process().authkey = os.urandom(32)


def _set_environment(environ: Mapping[str, str]) -> None:
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    for name, value in environ.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def hide_package(package: str, environ: Mapping[str, str]) -> None:
    """Take a package out of `sys.modules`; importing it brings it back as it is.

    Args:
        package: Its name.
        environ: The environment it was loaded under.
    """
    names = [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]
    modules = {name: sys.modules.pop(name) for name in names}
    if not modules:
        return
    sys.meta_path.insert(0, _LoadedModules(modules, get_torch_variables(environ)))


class _LoadedModules(MetaPathFinder, Loader):
    """Finds modules that are loaded."""

    def __init__(self, modules: Mapping[str, ModuleType], environ: Mapping[str, str]) -> None:
        self._modules = modules
        self._specs = {name: module.__spec__ for name, module in modules.items()}
        self._environ = environ

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in self._modules else None

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        sys.meta_path.remove(self)
        sys.modules.update(self._modules)
        self._compare()
        return self._modules[spec.name]

    @override
    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._specs[module.__name__]

    def _compare(self) -> None:
        """Say what the script has set too late for a torch that is loaded already."""
        now = get_torch_variables(os.environ)
        late = sorted(name for name in {*now, *self._environ} if now.get(name) != self._environ.get(name))
        if late:
            warnings.warn(
                f"{', '.join(late)} changed after torch was loaded for this process, and may have no effect; "
                "set it in the profile's env, or use launcher.start_method=exec",
                RuntimeWarning,
                stacklevel=2,
            )
