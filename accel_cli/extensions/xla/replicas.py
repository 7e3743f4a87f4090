"""Run the user's script on every replica of torch_xla on this node, with `launcher.kind: xla`.

Run by path, once on each node: `replicas.py all|1|spmd FUNCTION script|module TARGET [ARGS]...`; FUNCTION is empty, or
the function of the script to call. torch_xla starts the replicas as processes, as threads of one process (its CPU device,
TPU v2 and v3), or both. No other file of the command line imports torch_xla.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    # Remove this file's own folder.
    del sys.path[0]

import multiprocessing
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType, ModuleType
from typing import Any, TextIO

from accel_cli import worker
from accel_cli.runner.guard import HANDLED_SIGNALS, send_signal
from accel_cli.runs.run_dir import RankFolder
from accel_cli.runs.run_files import read_json, read_pid, read_text
from accel_runtime.environment.settings import RANK_FOLDER

__all__ = ["ReplicaFolder", "ReplicaProcesses", "ReplicaSignalHandlers", "ReplicaThreads", "main"]


_AGENT_VARIABLES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip
"""Variables that the agent sets for this node; torch_xla and scripts would take them for those of a replica."""
_ROUTE_TIMEOUT_S = 30.0
_ROUTE_POLL_S = 0.02


def main(arguments: list[str]) -> None:
    """Run a script or a module on the devices of this node."""
    devices, function, kind, *sys.argv = arguments
    error_file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    node_rank, num_nodes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in _AGENT_VARIABLES:
        os.environ.pop(name, None)
    worker.connect_output(str(error_file.parent))
    worker.prepare_script(kind)
    task = _Task(kind, sys.argv[0], function, error_file)
    if devices == "spmd":
        # No device may be used before the runtime has configured SPMD.
        task.run_alone(node_rank, num_nodes)
        return
    try:
        _launch(task, single=devices == "1")
    except Exception as error:  # noqa: BLE001 - no replica ran: no device, or one in use by another process
        worker.record_failure(error, error_file)
        sys.exit(1)


def _launch(task: _Task, *, single: bool) -> None:
    import torch_xla  # noqa: PLC0415 - takes seconds, and is optional

    if single:
        torch_xla.launch(lambda _: task.run_alone(0, 1), debug_single_process=True)
        return
    processes = ReplicaProcesses(task.error_file)
    processes.watch()
    try:
        torch_xla.launch(_PickledTask(task), start_method="spawn")
    except BrokenProcessPool:
        processes.wait_for_failure()
        raise RuntimeError("a replica ended its process by itself, as with os._exit(0)") from None


class ReplicaFolder(RankFolder):
    """Folder of one replica, in which it registers with the launcher and records its failure.

    The launcher looks for the failure of this node in `node_error_file`; `num_replicas` are those of all nodes.
    """

    def __init__(self, node_error_file: Path, rank: int, num_replicas: int) -> None:
        super().__init__(node_error_file.parent.parent / f"rank_{rank}")
        self._node_error_file = node_error_file
        self.details = {"rank": rank, "replicas": num_replicas, "pid": os.getpid()}
        """Fields of this replica, recorded with its failure."""

    def register(self, thread: int | None) -> None:
        """Register the replica, and wait until the launcher has created its output files."""
        self.path.mkdir(exist_ok=True)
        self.pid.write_text(str(os.getpid()))
        if thread is not None:
            self.thread.write_text(f"0x{thread:016x}")
        new = self.path / f"{worker.REPLICA_COUNT_FILE}.new"
        new.write_text(str(self.details["replicas"]))
        new.replace(self.path / worker.REPLICA_COUNT_FILE)
        deadline = time.monotonic() + _ROUTE_TIMEOUT_S
        # The launcher creates stderr last.
        while not os.path.lexists(self.path / "stderr") and time.monotonic() < deadline:
            time.sleep(_ROUTE_POLL_S)

    def use(self, set_stream: Callable[[str, TextIOWrapper], None] = worker.set_stream) -> None:
        """Make this folder that of the process: for its output, its stacks and its heartbeat."""
        worker.connect_output(str(self.path), set_stream)
        worker.serve_stacks(str(self.path))
        os.environ[RANK_FOLDER] = str(self.path)

    def publish_failure(self) -> None:
        """Make the failure of this replica that of the node, unless another replica failed before."""
        with suppress(OSError):
            os.link(self.error, self._node_error_file)

    def record_failure(self, error: BaseException) -> int:
        """Record an exception of the script, and return its exit code."""
        worker.record_failure(error, self.error, **self.details)
        self.publish_failure()
        code = error.code if isinstance(error, SystemExit) else 1
        return code if isinstance(code, int) else 1


@dataclass(frozen=True)
class _Task:
    """The script that every replica runs."""

    kind: str
    target: str
    function: str
    error_file: Path
    """The file in which the launcher looks for the failure of this node."""

    def run_alone(self, rank: int, num_replicas: int) -> None:
        """Run as the only replica of this process, in its main thread."""
        folder = ReplicaFolder(self.error_file, rank, num_replicas)
        folder.register(None)
        folder.use()
        try:
            worker.run_script(self.execute, folder.error, **folder.details)
        finally:
            folder.publish_failure()

    def execute(self, set_main: Callable[[ModuleType], None] = worker.set_main) -> None:
        """Run the script, or call its function, in the calling thread."""
        if self.function:
            self._call_function()
        else:
            worker.execute(self.kind, self.target, set_main)

    def _call_function(self) -> None:
        name = self.target if self.kind == "module" else Path(self.target).stem
        function = getattr(importlib.import_module(name), self.function, None)
        if not callable(function):
            raise SystemExit(
                f"launcher.main_training_function: {self.target} has no function {self.function!r}"
            )
        function()


@dataclass(frozen=True)
class _PickledTask:
    """The task for processes that torch_xla starts; unpickled, it is their `_ReplicaRunner`."""

    task: _Task

    def __reduce__(self) -> tuple[type[_ReplicaRunner], tuple[_Task]]:
        return _ReplicaRunner, (self.task,)

    def __call__(self, index: int) -> None:
        raise NotImplementedError("only the unpickled object is called")


class _ReplicaRunner:
    """Runs the replicas of this process: created in its main thread, and called by torch_xla in a thread for each."""

    def __init__(self, task: _Task) -> None:
        worker.prepare_script(task.kind, in_path=True)
        self._task = task
        self._threads = ReplicaThreads()
        self._folders: dict[int, ReplicaFolder] = {}
        self._is_first_connected = threading.Event()
        self._exit_lock = threading.Lock()
        sys.excepthook = sys.__excepthook__ = self._hook = worker.ExceptHook()
        ReplicaSignalHandlers(self._threads, self._exit).install()

    def __call__(self, index: int) -> None:
        import torch_xla.runtime as xr  # noqa: PLC0415 - as above

        count = xr.addressable_device_count()
        number = xr.local_ordinal() % count
        self._threads.enter(number, several=count > 1)
        folder = self._folders[number] = ReplicaFolder(self._task.error_file, index, xr.world_size())
        folder.register(threading.get_ident())
        self._connect(number, folder)
        try:
            self._task.execute(self._threads.set_main)
        except BaseException as error:  # noqa: BLE001 - any exception is a failure of the script
            if not _is_success(error):
                self._exit(number, error)
        self._threads.flush()

    def _connect(self, number: int, folder: ReplicaFolder) -> None:
        """Connect the output: of the first replica that of the process, of others their own threads'."""
        if number == 0:
            folder.use(self._threads.set_first_stream)
            self._is_first_connected.set()
        else:
            self._is_first_connected.wait()
            self._threads.redirect_output(str(folder.path))
            # The process writes the stacks of all threads to one file.
            folder.stacks.symlink_to(self._folders[0].stacks)
            folder.stack_request.symlink_to(self._folders[0].stack_request)

    def _exit(self, number: int, error: BaseException) -> NoReturn:
        """Record the failure of a replica and exit the process, which ends the run; the first failure counts."""
        with self._exit_lock:
            code = 0 if _is_success(error) else self._folders[number].record_failure(error)
            if not isinstance(error, SystemExit):
                self._hook.is_ending = True
                worker.print_exception(error)
            self._threads.flush()
            os._exit(code)


def _is_success(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in {None, 0}


class ReplicaSignalHandlers:
    """Replacement of `signal.signal` and `signal.getsignal` that works in the threads of replicas.

    A handler that a replica sets is called in the main thread, once for each replica of the process; if it raises,
    `exit_failed` is called. Until a script sets one, a signal ends the process: an exception in the main thread, such as
    KeyboardInterrupt, would not reach the script.
    """

    def __init__(self, threads: ReplicaThreads, exit_failed: Callable[[int, BaseException], None]) -> None:
        self._threads = threads
        self._exit_failed = exit_failed
        self._set = signal.signal
        self._get = signal.getsignal
        self._handlers: defaultdict[int, dict[int, Any]] = defaultdict(dict)

    def install(self) -> None:
        """Replace both functions; called in the main thread, before replicas start."""
        for number in HANDLED_SIGNALS:
            if self._get(number) is not signal.SIG_IGN:
                self._set(number, self._handle)
        signal.signal = self._signal  # type: ignore[assignment]
        signal.getsignal = self._getsignal  # type: ignore[assignment]

    def _signal(self, number: int, handler: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return self._set(number, handler)
        if number not in HANDLED_SIGNALS:
            names = ", ".join(known.name for known in HANDLED_SIGNALS)
            raise ValueError(
                f"{signal.Signals(number).name}: on a replica of torch_xla, whose script does not run in the main thread, "
                f"only {names} can be handled"
            )
        if not callable(handler) and handler not in {signal.SIG_IGN, signal.SIG_DFL}:
            raise TypeError("signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object")
        before = self._getsignal(number)
        self._handlers[number][self._threads.get_current()] = handler
        return before

    def _getsignal(self, number: int) -> Any:
        if number not in HANDLED_SIGNALS or threading.current_thread() is threading.main_thread():
            return self._get(number)
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        return self._handlers[number].get(self._threads.get_current(), default)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        handlers = {
            replica: handler
            for replica, handler in self._handlers[number].items()
            if handler is not signal.SIG_DFL
        }
        if all(handler is signal.default_int_handler for handler in handlers.values()):
            self._set(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        errors = []
        for replica, handler in handlers.items():
            if callable(handler) and handler is not signal.default_int_handler:
                try:
                    with self._threads.act_as(replica):
                        handler(number, frame)
                except BaseException as error:  # noqa: BLE001 - it would not end a replica from this thread
                    errors.append((replica, error))
        if errors:
            self._exit_failed(*min(errors, key=lambda entry: isinstance(entry[1], SystemExit)))


_POLL_S = 0.1
_REAP_S = 5.0


class ReplicaProcesses:
    """Watches the processes that torch_xla starts, and exits with the first failure.

    torch_xla collects results in the order of ranks, and its pool waits for all processes: without a watch, the failure of
    one replica would not be seen while another one is blocked in a collective.
    """

    def __init__(self, error_file: Path) -> None:
        self._error_file = error_file
        self._children: dict[int, BaseProcess] = {}
        self._forwarded: set[int] = set()
        self._watcher = threading.Thread(target=self._watch, name="replicas", daemon=True)

    def watch(self) -> None:
        """Start to watch and to forward signals; called in the main thread, before any process starts."""
        for number in (*HANDLED_SIGNALS, signal.SIGWINCH):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._forward)
        self._watcher.start()

    def wait_for_failure(self) -> None:
        """Wait, once the pool is broken, until the watcher has seen the failed process and exits this one."""
        self._watcher.join(_REAP_S)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        running = [child.pid for child in multiprocessing.active_children() if child.pid]
        self._forwarded.add(number)
        send_signal(running, number)
        if not running and number != signal.SIGWINCH:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _watch(self) -> None:
        while True:
            self._children |= {child.pid or 0: child for child in multiprocessing.active_children()}
            wait([child.sentinel for child in self._children.values()] or [], _POLL_S)
            for pid, child in list(self._children.items()):
                exitcode = child.exitcode  # read once: the process may end between two reads
                if exitcode:
                    self._exit(pid, exitcode)
                elif exitcode is not None:
                    del self._children[pid]

    def _exit(self, pid: int, exitcode: int) -> NoReturn:
        """Exit with the code of the first failure; the launcher then ends the other processes."""
        if -exitcode not in self._forwarded and not self._error_file.exists():
            self._record_exit(pid, exitcode)
        try:
            record = read_json(self._error_file)["accel"]
        except (OSError, ValueError, KeyError):
            os._exit(_to_exit_code(exitcode))
        # Another replica may have failed before this one.
        if "exitcode" in record:
            os._exit(_to_exit_code(int(record["exitcode"])))
        code = record.get("exit")
        os._exit(code & 0xFF if isinstance(code, int) else 1)

    def _record_exit(self, pid: int, exitcode: int) -> None:
        """Record that a process ended and recorded no failure."""
        attempt = self._error_file.parent.parent
        folders = [file.parent for file in attempt.glob("rank_*/pid") if read_pid(file) == pid]
        ranks = sorted(int(folder.name.partition("_")[2]) for folder in folders)
        fields: dict[str, Any] = {"chain": [], "pid": pid, "exitcode": exitcode}
        if exitcode > 0:
            fields["exit"] = exitcode
        if ranks:
            count = read_text(attempt / f"rank_{ranks[0]}" / worker.REPLICA_COUNT_FILE)
            fields |= {"rank": ranks[0], "replicas": int(count)}
        worker.write_record(self._error_file, "", fields)


def _to_exit_code(exitcode: int) -> int:
    return exitcode if exitcode > 0 else 128 - exitcode


_REPLICA_ATTRIBUTE = "accel_replica"


class ReplicaThreads:
    """The replicas of this process, numbered from 0; a thread belongs to the replica that started it.

    Threads that Python did not start, such as those of a device, belong to the first replica.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._modules: dict[int, ModuleType] = {}
        self._streams: dict[str, dict[int, TextIO]] = {"stdout": {}, "stderr": {}}
        self._are_several = False

    def get_current(self) -> int:
        """Return the number of the replica to which the calling thread belongs."""
        return int(getattr(threading.current_thread(), _REPLICA_ATTRIBUTE, 0))

    @contextmanager
    def act_as(self, number: int) -> Iterator[None]:
        """Let the calling thread belong to another replica."""
        thread, before = threading.current_thread(), self.get_current()
        setattr(thread, _REPLICA_ATTRIBUTE, number)
        try:
            yield
        finally:
            setattr(thread, _REPLICA_ATTRIBUTE, before)

    def enter(self, number: int, *, several: bool) -> None:
        """Let the calling thread, and the threads it starts, belong to a replica."""
        setattr(threading.current_thread(), _REPLICA_ATTRIBUTE, number)
        with self._lock:
            if several and not self._are_several:
                self._are_several = True
                self._isolate_replicas()

    def _isolate_replicas(self) -> None:
        """Give each replica its own `__main__`, stdout and stderr, and let new threads inherit their replica."""
        start = threading.Thread.start

        def start_in_replica(thread: threading.Thread) -> None:
            setattr(thread, _REPLICA_ATTRIBUTE, self.get_current())
            start(thread)

        threading.Thread.start = start_in_replica  # type: ignore[method-assign,assignment]
        for name, streams in self._streams.items():
            streams[0] = getattr(sys, name)
            setattr(sys, name, _ReplicaAttribute(self._select(streams)))
        sys.modules["__main__"] = _ReplicaAttribute(self._select(self._modules))

    def _select(self, by_replica: dict[int, Any]) -> Callable[[], Any]:
        """Return a function that returns the entry of the calling replica, by default the first."""
        return lambda: by_replica.get(self.get_current()) or next(iter(by_replica.values()))

    def set_first_stream(self, name: str, stream: TextIOWrapper) -> None:
        """Set stdout or stderr of the first replica."""
        if self._are_several:
            self._streams[name][0] = stream
        else:
            worker.set_stream(name, stream)

    def redirect_output(self, folder: str) -> None:
        """Redirect the output of the calling replica to the files that the launcher created in its folder."""
        for name, streams in self._streams.items():
            like = streams[0]
            stream = open(  # noqa: SIM115, PTH123 - until the process ends
                worker.open_output(folder, name), "w", buffering=1, encoding=like.encoding, errors=like.errors
            )
            worker.ignore_full_disk(stream, f"{folder}/{name}")
            streams[self.get_current()] = stream

    def set_main(self, module: ModuleType) -> None:
        """Set the `__main__` module of the calling replica."""
        with self._lock:
            self._modules[self.get_current()] = module
            if not self._are_several:
                sys.modules["__main__"] = module

    def flush(self) -> None:
        """Flush the output of all replicas."""
        redirected = [stream for streams in self._streams.values() for stream in streams.values()]
        for stream in [sys.stdout, sys.stderr, *redirected]:
            with suppress(OSError, ValueError):  # its reader has ended
                stream.flush()


class _ReplicaAttribute(ModuleType):
    """`__main__`, stdout or stderr that delegates to that of the calling replica."""

    def __init__(self, select: Callable[[], Any]) -> None:
        object.__setattr__(self, "_select", select)

    def __getattribute__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_select")(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(object.__getattribute__(self, "_select")(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(object.__getattribute__(self, "_select")(), name)


if __name__ == "__main__":
    main(sys.argv[1:])
