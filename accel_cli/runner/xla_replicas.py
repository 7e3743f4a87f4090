"""What the elastic agent starts on each machine with `launcher.kind: xla`: the user's script on every replica.

Run by path: `xla_replicas.py all|1|spmd FUNCTION script|module TARGET [ARGS]...`; FUNCTION is empty, or the function of the
script that is called. The one file of the command line that loads torch_xla, which starts the replicas: as processes, as
threads of one process (its CPU device, TPU v2 and v3), or both.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    # This file's own folder.
    del sys.path[0]

import json
import multiprocessing
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType, ModuleType
from typing import Any, TextIO

from accel_cli.runner import worker
from accel_cli.runner.forkserver_process import SIGNALS
from accel_cli.runner.replica_folder import ReplicaFolder, died
from accel_runtime.env import RANK_FOLDER

__all__ = ["ReplicaProcesses", "ReplicaSignalHandlers", "ReplicaThreads", "main"]


_OF_THE_HOST = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip
"""What the agent says of its processes, which are machines here: torch_xla and scripts would take it for replicas."""


def main(arguments: list[str]) -> None:
    """Run a script or a module on the devices of this machine.

    Args:
        arguments: Which devices, the function to call, `script` or `module`, its path or name, its own arguments.
    """
    devices, function, kind, *sys.argv = arguments
    file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    machine, machines = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in _OF_THE_HOST:
        os.environ.pop(name, None)
    worker.connect(str(file.parent))
    worker.prepare(kind)
    work = _Work(kind, sys.argv[0], function, file)
    if devices == "spmd":
        # Nothing may touch a device before the runtime has said that they are one.
        work.alone(machine, machines)
        return
    try:
        _launch(work, one=devices == "1")
    except Exception as error:  # noqa: BLE001 - before any replica ran: no device, or one that another process has
        worker.record(error, file)
        sys.exit(1)


def _launch(work: _Work, *, one: bool) -> None:
    import torch_xla  # noqa: PLC0415 - it costs seconds, and is not there for everybody

    if one:
        torch_xla.launch(lambda _: work.alone(0, 1), debug_single_process=True)
        return
    pool = ReplicaProcesses(work.file)
    pool.watch()
    try:
        torch_xla.launch(_Sent(work), start_method="spawn")
    except BrokenProcessPool:
        pool.settle()
        raise RuntimeError("a replica ended its process by itself, as with os._exit(0)") from None


@dataclass(frozen=True)
class _Work:
    """What every replica does."""

    kind: str
    target: str
    function: str
    file: Path
    """Where the launcher looks for the failure of this machine."""

    def alone(self, rank: int, size: int) -> None:
        """Be the one replica of this process, in its main thread."""
        folder = ReplicaFolder(self.file, rank, size)
        folder.announce(None)
        _take(folder)
        try:
            worker.run(self.executed, folder.error, **folder.about)
        finally:
            folder.blame()

    def executed(self) -> None:
        """As `python` itself would, in a process of its own."""
        if self.function:
            self._called()
        else:
            worker.execute(self.kind, self.target)

    def beside(self, threads: ReplicaThreads) -> None:
        """The same, in a thread that may have others beside it."""
        if self.function:
            self._called()
            return
        code, module = worker.code_of(self.kind, self.target)
        if self.kind == "module":
            sys.argv[0] = str(module.__file__)
        threads.be_main(module)
        exec(code, vars(module))  # noqa: S102 - it is the user's script

    def _called(self) -> None:
        name = self.target if self.kind == "module" else Path(self.target).stem
        found = getattr(importlib.import_module(name), self.function, None)
        if not callable(found):
            raise SystemExit(
                f"launcher.main_training_function: {self.target} has no function {self.function!r}"
            )
        found()


@dataclass(frozen=True)
class _Sent:
    """What torch_xla sends to the processes it starts: unpickled, it is what each replica there is."""

    work: _Work

    def __reduce__(self) -> tuple[Callable[[_Work], _Replicas], tuple[_Work]]:
        return _arrived, (self.work,)

    def __call__(self, index: int) -> None:
        raise NotImplementedError("it is called where it arrives")


def _arrived(work: _Work) -> _Replicas:
    """Prepare a process for the replicas in it; this is its main thread, and the last time that it has a say."""
    worker.prepare(work.kind, here=True)
    return _Replicas(work)


class _Replicas:
    """The replicas of this process: called once for each, in a thread of its own."""

    def __init__(self, work: _Work) -> None:
        self._work = work
        self._threads = ReplicaThreads()
        self._folders: dict[int, ReplicaFolder] = {}
        self._connected = threading.Event()
        self._ending = threading.Lock()
        self._hook = worker.quiet()
        ReplicaSignalHandlers(self._threads, self._stop).install()

    def __call__(self, index: int) -> None:
        import torch_xla.runtime as xr  # noqa: PLC0415 - as above

        several = xr.addressable_device_count()
        number = xr.local_ordinal() % several
        self._threads.enter(number, several=several > 1)
        folder = self._folders[number] = ReplicaFolder(self._work.file, index, xr.world_size())
        folder.announce(threading.get_ident())
        self._connect(number, folder)
        try:
            self._work.beside(self._threads)
        except BaseException as error:  # noqa: BLE001 - whatever the script raises is its failure
            if not _fine(error):
                self._stop(number, error)
        self._threads.flush()

    def _connect(self, number: int, folder: ReplicaFolder) -> None:
        """Print where the launcher said: the first replica with all of the process, others by themselves."""
        if number == 0:
            _take(folder)
            self._connected.set()
        else:
            self._connected.wait()
            self._threads.print_to(str(folder.path))
            # Stacks of all threads are written into one file.
            (folder.path / worker.STACKS).symlink_to(self._folders[0].path / worker.STACKS)

    def _stop(self, number: int, error: BaseException) -> NoReturn:
        """End the process, and so the run; where replicas are threads, the first failure is the one that is told."""
        with self._ending:
            code = 0 if _fine(error) else self._folders[number].failed(error)
            if not isinstance(error, SystemExit):
                self._hook.ending = True
                worker.said(error)
            self._threads.flush()
            os._exit(code)


def _fine(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in {None, 0}


def _take(folder: ReplicaFolder) -> None:
    """Make a replica's folder that of this process."""
    worker.connect(str(folder.path))
    worker.answer_for_stacks(str(folder.path))
    os.environ[RANK_FOLDER] = str(folder.path)


class ReplicaSignalHandlers:
    """Takes the place of `signal.signal` and `signal.getsignal`, so that a script may call them on a replica.

    A handler of a replica is called in the main thread, as everywhere; where replicas are threads of one process, those
    of all of them. Until a script sets one, a signal ends the process: an exception in the main thread, such as
    KeyboardInterrupt, would not reach the script.

    Args:
        threads: The replicas of this process.
        failed: Called with the number of a replica whose handler raised, and what.
    """

    def __init__(self, threads: ReplicaThreads, failed: Callable[[int, BaseException], None]) -> None:
        self._threads = threads
        self._failed = failed
        self._set = signal.signal
        self._get = signal.getsignal
        self._own: defaultdict[int, dict[int, Any]] = defaultdict(dict)

    def install(self) -> None:
        """Take their place; in the main thread, before replicas start."""
        for number in SIGNALS:
            if self._get(number) is not signal.SIG_IGN:
                self._set(number, self._came)
        signal.signal = self._signal  # type: ignore[assignment]
        signal.getsignal = self._getsignal  # type: ignore[assignment]

    def _signal(self, number: int, handler: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return self._set(number, handler)
        if number not in SIGNALS:
            raise ValueError(
                f"{signal.Signals(number).name}: on a replica of torch_xla, whose script does not run in the main thread, "
                f"only {', '.join(known.name for known in SIGNALS)} can be handled"
            )
        if not callable(handler) and handler not in {signal.SIG_IGN, signal.SIG_DFL}:
            raise TypeError("signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object")
        before = self._getsignal(number)
        self._own[number][self._threads.mine()] = handler
        return before

    def _getsignal(self, number: int) -> Any:
        if number not in SIGNALS or threading.current_thread() is threading.main_thread():
            return self._get(number)
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        return self._own[number].get(self._threads.mine(), default)

    def _came(self, number: int, frame: FrameType | None) -> None:
        own = {
            replica: handler
            for replica, handler in self._own[number].items()
            if handler is not signal.SIG_DFL
        }
        if all(handler is signal.default_int_handler for handler in own.values()):
            self._set(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        raised = [
            found
            for replica, handler in own.items()
            if (found := self._called(replica, handler, number, frame))
        ]
        if raised:
            self._failed(*min(raised, key=lambda found: isinstance(found[1], SystemExit)))

    def _called(
        self, replica: int, handler: Any, number: int, frame: FrameType | None
    ) -> tuple[int, BaseException] | None:
        """What a handler raised, and on which replica: it would end nothing in this thread."""
        if callable(handler) and handler is not signal.default_int_handler:
            try:
                with self._threads.acting_for(replica):
                    handler(number, frame)
            except BaseException as error:  # noqa: BLE001 - SystemExit too
                return replica, error
        return None


_LOOK_S = 0.1
_REAP_S = 5.0


class ReplicaProcesses:
    """The processes of replicas, from the outside.

    torch_xla collects results in the order of ranks, and its pool waits for whoever is left: while one replica is stuck
    in a collective, the failure of another would not be seen.

    Args:
        error: The file in which the launcher looks for a failure.
    """

    def __init__(self, error: Path) -> None:
        self._error = error
        self._children: dict[int, BaseProcess] = {}
        self._sent: set[int] = set()
        self._watcher = threading.Thread(target=self._look, name="replicas", daemon=True)

    def watch(self) -> None:
        """Begin, before any is started; in the main thread."""
        for number in (*SIGNALS, signal.SIGWINCH):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._pass_on)
        self._watcher.start()

    def settle(self) -> None:
        """Once the pool is broken: wait for what is known of the process that ended, which ends this one."""
        self._watcher.join(_REAP_S)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        running = [child for child in multiprocessing.active_children() if child.pid]
        self._sent.add(number)
        for child in running:
            with suppress(ProcessLookupError):
                os.kill(child.pid or 0, number)
        if not running and number != signal.SIGWINCH:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _look(self) -> None:
        while True:
            self._children |= {child.pid or 0: child for child in multiprocessing.active_children()}
            wait([child.sentinel for child in self._children.values()] or [], _LOOK_S)
            for child in self._ended():
                if child.exitcode:
                    self._end(child)
                del self._children[child.pid or 0]

    def _ended(self) -> Iterator[BaseProcess]:
        yield from [child for child in self._children.values() if child.exitcode is not None]

    def _end(self, child: BaseProcess) -> None:
        """End with the code of the failure; the launcher then ends what still runs."""
        assert child.pid is not None
        assert child.exitcode is not None
        if -child.exitcode not in self._sent:
            died(self._error, child.pid, child.exitcode)
        os._exit(self._code(child.exitcode))

    def _code(self, exitcode: int) -> int:
        """Of what was recorded first; the replica whose end is seen first may have failed after it."""
        try:
            said = json.loads(self._error.read_text(encoding="utf-8"))["accel"]
        except (OSError, ValueError, KeyError):
            return exitcode if exitcode > 0 else 128 - exitcode
        if "exitcode" in said:
            return int(said["exitcode"]) if said["exitcode"] > 0 else 128 - int(said["exitcode"])
        code = said.get("exit")
        return code & 0xFF if isinstance(code, int) else 1


_MARK = "accel_replica"


class ReplicaThreads:
    """The replicas of this process, counted from 0; a thread counts as the replica that started it.

    Threads that are not Python's own, such as those of a device, count as the first replica.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._modules: dict[int, ModuleType] = {}
        self._streams: dict[str, dict[int, TextIO]] = {"stdout": {}, "stderr": {}}
        self._several = False

    def mine(self) -> int:
        """The number of the replica that calls."""
        return int(getattr(threading.current_thread(), _MARK, 0))

    @contextmanager
    def acting_for(self, number: int) -> Iterator[None]:
        """Have the thread that calls count as another replica for a while."""
        thread, before = threading.current_thread(), self.mine()
        setattr(thread, _MARK, number)
        try:
            yield
        finally:
            setattr(thread, _MARK, before)

    def enter(self, number: int, *, several: bool) -> None:
        """Be this replica from now on, in the thread that calls and in those it starts."""
        setattr(threading.current_thread(), _MARK, number)
        with self._lock:
            if several and not self._several:
                self._several = True
                self._share()

    def _share(self) -> None:
        _inherit(self.mine)
        for name, streams in self._streams.items():
            streams[0] = getattr(sys, name)
            setattr(sys, name, _ThreadStream(self._chosen(streams)))
        sys.modules["__main__"] = _ThreadMain(self._chosen(self._modules))

    def _chosen(self, each: dict[int, Any]) -> Callable[[], Any]:
        return lambda: each.get(self.mine()) or next(iter(each.values()))

    def print_to(self, folder: str) -> None:
        """Have this replica print to what the launcher left in its folder; others keep the process's own output."""
        for name, streams in self._streams.items():
            like = streams[0]
            own = open(  # noqa: SIM115, PTH123 - until the process ends
                worker.opened(folder, name), "w", buffering=1, encoding=like.encoding, errors=like.errors
            )
            worker.ignore_full_disk(own, f"{folder}/{name}")
            streams[self.mine()] = own

    def be_main(self, module: ModuleType) -> None:
        """Make a module the `__main__` of this replica."""
        with self._lock:
            self._modules[self.mine()] = module
            if not self._several:
                sys.modules["__main__"] = module

    def flush(self) -> None:
        """Write out what any replica has printed."""
        for stream in (
            sys.stdout,
            sys.stderr,
            *(s for each in self._streams.values() for s in each.values()),
        ):
            try:
                stream.flush()
            except (OSError, ValueError):  # its reader has gone
                continue


def _inherit(mine: Callable[[], int]) -> None:
    """Have a new thread count as the replica that starts it."""
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        setattr(thread, _MARK, mine())
        start(thread)

    threading.Thread.start = started  # type: ignore[method-assign,assignment]


class _ThreadStream:
    """Whatever is asked of it, the caller's own stream answers."""

    def __init__(self, chosen: Callable[[], TextIO]) -> None:
        object.__setattr__(self, "_chosen", chosen)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_chosen")(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(object.__getattribute__(self, "_chosen")(), name, value)


class _ThreadMain(ModuleType):
    """`sys.modules["__main__"]`: whatever is asked of it, the caller's own module answers."""

    def __init__(self, chosen: Callable[[], ModuleType]) -> None:
        object.__setattr__(self, "_chosen", chosen)

    def __getattribute__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_chosen")(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(object.__getattribute__(self, "_chosen")(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(object.__getattribute__(self, "_chosen")(), name)


if __name__ == "__main__":
    main(sys.argv[1:])
