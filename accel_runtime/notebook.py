"""Launchers of functions from Python: on several processes of a notebook or a test."""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import functools
import gc
import math
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, SupportsIndex, get_args

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, start_processes

from accel_runtime.accelerate.environment import patch_environment
from accel_runtime.backends import set_current_backend
from accel_runtime.environment.settings import RANK_FOLDER, MixedPrecision, Settings, is_placed_by_device
from accel_runtime.environment.text import decode_text, encode_text, print_note
from accel_runtime.foundation.keywords import check_keywords_of
from accel_runtime.foundation.torch_internals import TCPStore
from accel_runtime.observe.debuggers import skip_debuggers

__all__ = ["LaunchError", "debug_launcher", "notebook_launcher"]

_SHUTDOWN_S = 30
"""The time of an interrupted rank to end by itself: the default of `accel launch` (`launcher.shutdown_timeout`)."""
_GRACE_S = 5
"""The time after SIGTERM, and after the end of the session, until a rank is killed."""
_INTERRUPTED = 128 + signal.SIGINT
"""The exit code of a rank that ended by KeyboardInterrupt."""
_DUPLICATE_S = 0.1
"""A second interrupt within this time is a copy of the first: `timeout` sends it twice."""
_POLL_S = 0.1
_NO_FAILURES = frozenset({None, 0, _INTERRUPTED})
"""The exit codes of ranks for which the others are not ended; None while it runs."""
_PR_SET_PDEATHSIG = 1
_OMP_PAUSE_SOFT = 1
"""`omp_pause_soft` of OpenMP 5."""
_CUDA_PROBE_TIMEOUT_S = 60
_MAX_DESCRIPTORS = 4096
_CRASH = ".crash"
"""The suffix of the file with the Python stack of a rank that crashed."""


class LaunchError(RuntimeError):
    """Failure of a launched process; the message has its rank and traceback."""


class _ProcessGroupSpec(NamedTuple):
    """Processes of this node in the process group."""

    num_local: int
    node: int
    nodes: int
    host: str
    port: int


@check_keywords_of
def notebook_launcher(  # noqa: PLR0913, PLR0917 - the signature scripts know
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str | None = None,
    use_port: str | int | None = None,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: dict[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Run a function on several processes, from a notebook or any other Python session.

    The processes are forked, so the function may be defined in the notebook. It creates its own `Accelerator`. With one
    process it runs in the current one. Each process computes on one thread, until it calls `torch.set_num_threads`.

    An interrupt of the session (Ctrl-C) is passed on to the processes, once: KeyboardInterrupt in the function. They have 30
    seconds for `except` and `finally` blocks, then get SIGTERM, and five seconds later SIGKILL. A second interrupt kills them.

    Args:
        function: Called as `function(*args)`; its result is dropped.
        args: Its arguments.
        num_processes: The number of processes on this node.
        mixed_precision: `no`, `bf16` or `fp16`, for an `Accelerator` without its own; None uses the environment.
        use_port: The port of the rendezvous; None is any free port, and 29500 with several nodes.
        master_addr: The address of the first node.
        node_rank: The rank of this node, from 0.
        num_nodes: The number of nodes; each of them makes this call, with as many processes.
        rdzv_backend: `static`; or `c10d` on one node, which is the same there. `accel launch` has the others.
        rdzv_endpoint: `host:port`, instead of `master_addr` and `use_port`.
        rdzv_conf: None only, except with `c10d`: one node does not need it.
        rdzv_id: The default only, except with `c10d`.
        max_restarts: 0 only.
        monitor_interval: The default only, as the end of a process is noticed at once.
        log_line_prefix_template: None only.

    Raises:
        ValueError: An unsupported argument; the message names it.
        RuntimeError: CUDA is initialized already, so that processes cannot be forked; the message names the import that
            initialized it, if it was one.
        LaunchError: A process failed; its rank and traceback are in the message. The others are terminated.
        KeyboardInterrupt: The session was interrupted, or a process; all have ended.
    """
    # On one node, c10d starts the same processes; its options are for several.
    is_alone = rdzv_backend == "c10d" and num_nodes == 1
    for name, value, default in (
        ("rdzv_backend", "static" if is_alone else rdzv_backend, "static"),
        ("rdzv_conf", None if is_alone else rdzv_conf or None, None),
        ("rdzv_id", "none" if is_alone else rdzv_id, "none"),
        ("max_restarts", max_restarts, 0),
        ("monitor_interval", monitor_interval, 0.1),
        ("log_line_prefix_template", log_line_prefix_template, None),
    ):
        if value != default:
            raise ValueError(
                f"{name}={value!r} is not supported by notebook_launcher. Leave it at {default!r}, or use `accel launch`."
            )
    num_processes = _check_num_processes(num_processes)
    if not isinstance(num_nodes, SupportsIndex) or not isinstance(node_rank, SupportsIndex):
        raise ValueError(  # noqa: TRY004 - as for other values
            f"Invalid node_rank={node_rank!r} or num_nodes={num_nodes!r}: expected integers."
        )
    if not 0 <= node_rank < num_nodes:
        raise ValueError(
            f"Invalid node_rank={node_rank}: expected 0 to {num_nodes - 1} with num_nodes={num_nodes}."
        )
    settings = _override_precision(Settings.from_env(os.environ), mixed_precision)
    if num_processes == num_nodes == 1:
        with patch_environment(**settings.to_env()):
            function(*args)
        return
    if is_placed_by_device(os.environ):
        raise ValueError(
            f"num_processes={num_processes}: notebook_launcher starts processes, and the library of the device {settings.device} "
            "starts its replicas itself. Use `accel launch` with the launcher of this device, or num_processes=1 for the replica that "
            "this session is"
        )
    host, port = _parse_endpoint(rdzv_endpoint, master_addr, use_port, num_nodes)
    _check_cuda_uninitialized()
    _run(function, args, _ProcessGroupSpec(num_processes, node_rank, num_nodes, host, port), settings)


@check_keywords_of
def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Run a function on several processes of this machine, on the CPU, to debug it.

    Args:
        function: Called as `function(*args)`; its result is dropped.
        args: Its arguments.
        num_processes: The number of processes, at least 1.

    Raises:
        ValueError: `num_processes` is no integer, or below 1.
        LaunchError: A process failed; its rank and traceback are in the message. The others are terminated.
        KeyboardInterrupt: The session was interrupted, or a process; see `notebook_launcher`.
    """
    num_processes = _check_num_processes(num_processes)
    settings = replace(Settings.from_env(os.environ), device="cpu", mixed_precision="no")
    _run(function, args, _ProcessGroupSpec(num_processes, 0, 1, "127.0.0.1", 0), settings)


def _check_num_processes(number: int | None) -> int:
    if not isinstance(number, SupportsIndex) or number < 1:
        raise ValueError(
            f"Invalid num_processes={number!r}: expected an integer of at least 1. Pass the number of processes to start."
        )
    return number


def _run(
    function: Callable[..., Any], args: Sequence[Any], spec: _ProcessGroupSpec, settings: Settings
) -> None:
    """Start the processes of this node, wait for them, and terminate all when one fails."""
    if dist.is_initialized():
        raise RuntimeError(
            "Cannot launch processes: this process is in a process group already (an Accelerator that shards models joins one), and "
            "forked processes would hang in it. Create the Accelerator inside the function, and restart the session (or the "
            "notebook's kernel)."
        )
    store = None
    if spec.node == 0:
        # The store is in this process and not in rank 0, so that it outlives every rank.
        store = TCPStore(spec.host, spec.port, is_master=True, wait_for_workers=False)
        spec = spec._replace(port=store.port)
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(),
        _defer_interrupts() as interrupts,
    ):
        # Python 3.12 warns of threads that are not forked: `_work` accounts for them.
        warnings.filterwarnings("ignore", ".*is multi-threaded", DeprecationWarning)
        context: ProcessContext | None = None
        codes: list[int | None] = []
        others = set(multiprocessing.active_children())
        try:
            context = _start_ranks(functools.partial(function, *args), spec, settings, Path(folder))
            ranks = context.processes
            _wait(ranks, lambda: bool(interrupts) or not {rank.exitcode for rank in ranks} <= _NO_FAILURES)
            codes = [rank.exitcode for rank in ranks]
        finally:
            # The start of one may fail after others are started.
            started = [process for process in multiprocessing.active_children() if process not in others]
            _end(
                context.processes if context else started,
                interrupts,
                has_failed=not set(codes) <= _NO_FAILURES,
            )
            for file in context.error_files if context else ():
                Path(file).unlink(missing_ok=True)
            del store
        records = _read_records(Path(folder))
        if not set(codes) <= _NO_FAILURES:
            index = _find_first_failure(codes, records)
            raise LaunchError(_format_failure(index, codes[index], spec, Path(folder), records))
        for index, code in enumerate(rank.exitcode for rank in ranks):
            # Only after an interrupt, which is the exception of the session.
            if code not in _NO_FAILURES:
                failure = _format_failure(index, code, spec, Path(folder), records)
                print_note(f"after the interrupt, {failure.partition(chr(10))[0]}")
    if interrupts or _INTERRUPTED in codes:
        # The handler of the session has not raised it, or only ranks were interrupted.
        raise KeyboardInterrupt


@contextmanager
def _defer_interrupts() -> Iterator[list[float]]:
    """Yield the times of interrupts, which are handled at the end of the context: before, the ranks are ended.

    Signals are handled in the main thread only: in another one, and if they are ignored, there are none.
    """
    received: list[float] = []
    if not _handles_interrupts():
        yield received
        return
    handler = signal.signal(signal.SIGINT, lambda *_: received.append(time.monotonic()))
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            signal.raise_signal(signal.SIGINT)


def _handles_interrupts() -> bool:
    """Return True if this thread handles interrupts by a handler that Python can install again."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGINT) not in {None, signal.SIG_IGN}


def _start_ranks(
    function: Callable[[], Any], spec: _ProcessGroupSpec, settings: Settings, failures: Path
) -> ProcessContext:
    """Fork the ranks of this node."""
    _end_openmp_threads()
    is_gc_enabled = gc.isenabled()
    gc.disable()  # until the forked processes have called `gc.freeze`
    # An interrupt must not reach a process before it has its own handler.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return start_processes(  # type: ignore[no-any-return, no-untyped-call]
            _work,
            args=(function, spec, settings, failures, is_gc_enabled, _handles_interrupts(), mask),
            nprocs=spec.num_local,
            join=False,
            start_method="fork",
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if is_gc_enabled:
            gc.enable()


def _end_openmp_threads() -> None:
    """End the threads that GNU's OpenMP keeps for this thread; it starts them again at the next parallel loop.

    In a fork they would not exist, and its first parallel loop would wait for them. Other OpenMP libraries notice a fork.
    """
    maps = Path("/proc/self/maps")
    lines = maps.read_text(errors="replace").splitlines() if maps.exists() else []
    for path in {line.split(maxsplit=5)[-1] for line in lines if "/libgomp" in line}:
        with suppress(OSError, AttributeError):  # AttributeError: before GCC 9
            ctypes.CDLL(path).omp_pause_resource_all(_OMP_PAUSE_SOFT)


def _work(  # noqa: PLR0913, PLR0917 - called by torch with the rank and positional arguments
    local_rank: int,
    function: Callable[[], Any],
    spec: _ProcessGroupSpec,
    settings: Settings,
    failures: Path,
    is_gc_enabled: bool,
    leads_session: bool,
    mask: set[signal.Signals],
) -> None:
    """Run the function in a forked process; a failure is written to a file of `failures` that the parent reads."""
    if leads_session:
        # Ctrl-C on a terminal and a notebook's interrupt reach the process group: the session passes them on, once, and not
        # to data-loader workers of the rank.
        os.setsid()
    session = multiprocessing.parent_process()
    assert session is not None
    _end_with_session(session.pid)
    # Those of the session may do nothing here, such as that of asyncio.
    signal.set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # multiprocessing has replaced the first only.
    vars(sys)["__stdin__"] = sys.stdin
    skip_debuggers(
        lambda place: print_note(
            f"rank {os.environ['RANK']} did not stop in the debugger{place}: launched processes have no standard input. Call "
            "notebook_launcher(..., num_processes=1), which runs the function in the session itself."
        )
    )
    # Garbage of the parent must not be collected here: a process group or a loader in it would wait for threads or
    # workers that this process does not have.
    gc.freeze()
    if is_gc_enabled:
        gc.enable()
    os.environ.update(
        settings.to_env(),
        RANK=str(spec.node * spec.num_local + local_rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(spec.nodes * spec.num_local),
        LOCAL_WORLD_SIZE=str(spec.num_local),
        MASTER_ADDR=spec.host,
        MASTER_PORT=str(spec.port),
        # Tells torch that the launcher holds the store.
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    if local_rank:
        # A launcher of the parent watches one process: the first.
        os.environ.pop(RANK_FOLDER, None)
    torch.set_num_threads(1)
    set_current_backend(None)
    # Not stderr, where the stacks of several ranks would mix. Under a high number, which stays unused if the script closes
    # all descriptors and opens other files; faulthandler would write to one of these.
    with (failures / f"{local_rank}{_CRASH}").open("wb") as crash:
        limit = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _MAX_DESCRIPTORS)
        faulthandler.enable(fcntl.fcntl(crash, fcntl.F_DUPFD_CLOEXEC, limit - 1), all_threads=False)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        function()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - any exception is reported
        trace = error.__traceback__
        lines = traceback.format_exception(type(error), error, trace.tb_next if trace else None)
        summary = f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")
        text = "".join(lines).strip()
        (failures / str(local_rank)).write_bytes(encode_text(f"{time.monotonic_ns()}\n{summary}\n{text}"))
        sys.exit(_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)
    if dist.is_initialized():
        dist.destroy_process_group()


def _end_with_session(session: int | None) -> None:
    """Interrupt this process once the session has ended, and kill it some seconds later.

    The kernel's signal for this, which torch requests, is sent again for each thread of the session, also into `finally:`.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
    threading.Thread(target=_watch_session, args=(session,), name="session", daemon=True).start()


def _watch_session(session: int | None) -> None:
    while os.getppid() == session:
        time.sleep(1)
    for number in (signal.SIGINT, signal.SIGKILL):
        os.kill(os.getpid(), number)
        time.sleep(_GRACE_S)


def _wait(ranks: Sequence[BaseProcess], is_over: Callable[[], bool], seconds: float = math.inf) -> None:
    """Wait until all ranks have ended, until the condition holds, or for some seconds."""
    deadline = time.monotonic() + seconds
    while running := [rank for rank in ranks if rank.exitcode is None]:
        if is_over() or time.monotonic() >= deadline:
            return
        # Children of a rank may hold its sentinel open after its end.
        multiprocessing.connection.wait([rank.sentinel for rank in running], _POLL_S)


def _end(ranks: Sequence[BaseProcess], interrupts: Sequence[float], *, has_failed: bool) -> None:
    """End the ranks that still run, after an interrupt of the session with time to save; a second interrupt kills them at once."""
    began = interrupts[0] if interrupts else time.monotonic()
    steps = [(signal.SIGTERM, _SHUTDOWN_S)]
    if interrupts and not has_failed:
        steps = [(signal.SIGINT, _SHUTDOWN_S), (signal.SIGTERM, _GRACE_S)]
        print_note(f"interrupted: the processes have {_SHUTDOWN_S} s to exit; a second interrupt kills them")

    def is_interrupted_again() -> bool:
        return any(at > began + _DUPLICATE_S for at in interrupts)

    for number, seconds in steps:
        running = [rank for rank in ranks if rank.exitcode is None and not is_interrupted_again()]
        for rank in running:
            os.kill(_get_pid(rank), number)
        _wait(running, is_interrupted_again, seconds)
    for rank in ranks:
        rank.kill()
        rank.join()
        # Its data-loader workers and other children, as far as it leads a session: they might serve it while it saves.
        if rank.exitcode != 0:
            with suppress(ProcessLookupError):
                os.killpg(_get_pid(rank), signal.SIGTERM)


def _get_pid(rank: BaseProcess) -> int:
    assert rank.pid is not None
    return rank.pid


class _Record(NamedTuple):
    """The failure that a rank has recorded."""

    time: int
    """In nanoseconds, on the monotonic clock."""
    summary: str
    trace: str


def _read_records(failures: Path) -> dict[int, _Record]:
    """Read the failures that ranks have recorded, by local rank."""
    texts = {int(file.name): file.read_bytes() for file in failures.iterdir() if file.suffix != _CRASH}
    # A process that is terminated while it writes leaves an empty file.
    parts = {rank: decode_text(text).split("\n", 2) for rank, text in texts.items() if b"\n" in text}
    return {rank: _Record(int(time), summary, trace) for rank, (time, summary, trace) in parts.items()}


def _find_first_failure(codes: Sequence[int | None], records: Mapping[int, _Record]) -> int:
    """Return the local rank that failed first: others lost the connection to it."""
    crashed = [rank for rank, code in enumerate(codes) if code not in _NO_FAILURES and rank not in records]
    # All have failed within a moment, and a crash is rarely a consequence.
    return crashed[0] if crashed else min(records, key=lambda rank: records[rank].time)


def _format_failure(
    index: int, code: int | None, spec: _ProcessGroupSpec, failures: Path, records: Mapping[int, _Record]
) -> str:
    """Format the failure of a local rank: its exception, or how it was ended."""
    rank = f"rank {spec.node * spec.num_local + index} of {spec.nodes * spec.num_local}"
    if record := records.get(index):
        return f"{rank} failed: {record.summary}\n{record.trace}"
    assert code is not None
    if code < 0:
        reason = f"{rank} was ended by {signal.Signals(-code).name}"
        crash = failures / f"{index}{_CRASH}"
        dump = crash.read_text(encoding="utf-8", errors="replace") if crash.exists() else ""
        stack = dump.partition("(most recent call first):\n")[2].partition(f'  File "{__file__}"')[0].rstrip()
        return f"{reason}\nIts Python stack, most recent call first:\n{stack}" if stack else reason
    return f"{rank} exited with code {code}"


def _override_precision(settings: Settings, mixed_precision: str | None) -> Settings:
    if mixed_precision is None:
        return settings
    # Members of the enum PrecisionType are equal to their text.
    for precision in get_args(MixedPrecision):
        if mixed_precision == precision:
            return replace(settings, mixed_precision=precision)
    raise ValueError(
        f"Invalid mixed_precision {mixed_precision!r}: expected one of {', '.join(get_args(MixedPrecision))}."
    )


def _parse_endpoint(endpoint: str, host: str, port: str | int | None, nodes: int) -> tuple[str, int]:
    if endpoint:
        host, _, port = endpoint.rpartition(":")
    number = port if port is not None else 29500 if nodes > 1 else 0
    if not host or not str(number).isdigit():
        raise ValueError(
            f'Invalid rendezvous address: rdzv_endpoint={endpoint!r}, use_port={port!r}. Pass rdzv_endpoint="host:port".'
        )
    return host, int(number)


def _check_cuda_uninitialized() -> None:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    package = _find_cuda_import(dict(sys.modules))
    reason = f"by importing {package}" if package else "by a cell of this session"
    raise RuntimeError(
        f"Cannot launch processes: CUDA is initialized in this session already ({reason}), so forked processes could not use it. "
        "Restart the session, and use CUDA only inside the launched function."
    )


_CUDA_PROBE = """
import sys, importlib, traceback, torch
init, at = torch.cuda._lazy_init, []
def noted():
    at.extend(traceback.extract_stack()[:-1])
    init()
torch.cuda._lazy_init = noted
library = torch.__file__.removesuffix("__init__.py")
for name in sys.argv[1:]:
    at.clear()
    try: importlib.import_module(name)
    except BaseException: continue
    if torch.cuda.is_initialized():
        own = [frame for frame in at if not frame.filename.startswith((library, "<"))]
        print(f"\\n{name}\\t{own[-1].filename}:{own[-1].lineno}" if own else f"\\n{name}\\t")
        break
"""


def _find_cuda_import(modules: dict[str, ModuleType]) -> str | None:
    """Return the first of the imported packages that initializes CUDA, and its line; they are tried in a child process."""
    excluded = {"torch", "accel_runtime", "__main__", *sys.stdlib_module_names}
    names = [
        name for name in modules if "." not in name and not name.startswith("_") and name not in excluded
    ]
    try:
        result = subprocess.run(
            [sys.executable, "-c", _CUDA_PROBE, *names], capture_output=True, text=True, timeout=_CUDA_PROBE_TIMEOUT_S, check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    name, _, line = "".join(result.stdout.splitlines()[-1:]).partition("\t")
    if name not in names:
        return None
    return f"{name!r} ({line})" if line else repr(name)
