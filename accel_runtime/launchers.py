"""Processes started from Python: a function of a notebook, or of a test, on several of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import (
    ProcessContext,
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from accel_runtime.current import set_current_backend
from accel_runtime.env import MixedPrecision, Settings, placed_by_device
from accel_runtime.utils.environment import patch_environment

__all__ = ["LaunchError", "debug_launcher", "notebook_launcher"]

_GRACE_S = 5.0
_PROBE_S = 60


class LaunchError(RuntimeError):
    """A process that was started failed; the message names its rank and has its traceback."""


class _Place(NamedTuple):
    """Where the processes of this machine stand among all."""

    here: int
    node: int
    nodes: int
    host: str
    port: int


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

    The processes are forked, so the function may be defined in the notebook. It makes its own `Accelerator`.
    With one process it runs in this one. Each process computes on one thread, until it calls
    `torch.set_num_threads`.

    Args:
        function: Called as `function(*args)`; what it returns is not kept.
        args: Its arguments.
        num_processes: How many processes on this machine.
        mixed_precision: `no`, `bf16` or `fp16`, for an `Accelerator` that does not say itself; None leaves it
            to the environment.
        use_port: Where the processes meet; None is any free port, and 29500 with several machines.
        master_addr: The address of the first machine.
        node_rank: This machine among all, from 0.
        num_nodes: How many machines; each of them makes this call, with as many processes.
        rdzv_backend: `static` only. `accel launch` has the others.
        rdzv_endpoint: `host:port`, in place of `master_addr` and `use_port`.
        rdzv_conf: None only.
        rdzv_id: Not used by `static`: the default only.
        max_restarts: 0 only.
        monitor_interval: The default only: a process that ends is noticed at once.
        log_line_prefix_template: None only.

    Raises:
        ValueError: An argument we cannot honour; the message names it.
        RuntimeError: CUDA is initialised already, so that processes cannot be forked; the message names
            the import that did it, if one did.
        LaunchError: A process failed; its rank and traceback are in the message. The others are ended.
    """
    _refuse(
        rdzv_backend=(rdzv_backend, "static"),
        rdzv_conf=(rdzv_conf or None, None),
        rdzv_id=(rdzv_id, "none"),
        max_restarts=(max_restarts, 0),
        monitor_interval=(monitor_interval, 0.1),
        log_line_prefix_template=(log_line_prefix_template, None),
    )
    if num_processes is None or num_processes < 1:
        raise ValueError(f"num_processes says how many processes to start; it is {num_processes}")
    if not 0 <= node_rank < num_nodes:
        raise ValueError(
            f"node_rank lies from 0 to {num_nodes - 1} with num_nodes={num_nodes}; it is {node_rank}"
        )
    settings = _precise(Settings.from_env(os.environ), mixed_precision)
    if num_processes == num_nodes == 1:
        with patch_environment(**settings.to_env()):
            function(*args)
        return
    if placed_by_device(os.environ):
        raise ValueError(
            f"num_processes={num_processes}: notebook_launcher starts processes, and torch_xla (ACCEL_DEVICE=xla, or "
            "PJRT_DEVICE is set) starts its replicas itself. Use `accel launch` with launcher.kind: xla, or "
            "num_processes=1 for the replica that this session is"
        )
    host, port = _endpoint(rdzv_endpoint, master_addr, use_port, num_nodes)
    _refuse_cuda()
    _run(function, args, _Place(num_processes, node_rank, num_nodes, host, port), settings)


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Run a function on several processes of this machine, on the CPU: to try what it does on several.

    Args:
        function: Called as `function(*args)`; what it returns is not kept.
        args: Its arguments.
        num_processes: How many processes, at least 1.

    Raises:
        ValueError: `num_processes` is below 1.
        LaunchError: A process failed; its rank and traceback are in the message. The others are ended.
    """
    if num_processes < 1:
        raise ValueError(f"num_processes must be at least 1; it is {num_processes}")
    settings = replace(Settings.from_env(os.environ), device="cpu", mixed_precision="no")
    _run(function, args, _Place(num_processes, 0, 1, "127.0.0.1", 0), settings)


def _run(function: Callable[..., Any], args: Sequence[Any], place: _Place, settings: Settings) -> None:
    """Start the processes of this machine, wait for them, and leave none behind."""
    _refuse_group()
    store = None
    if place.node == 0:
        # The store is here and not in rank 0, so that no rank takes it away from the others when it ends.
        store = dist.TCPStore(place.host, place.port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        place = place._replace(port=store.port)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # Python 3.12 warns of the threads that are not forked; `_Started` sees to those of torch.
        warnings.filterwarnings("ignore", ".*is multi-threaded", DeprecationWarning)
        context: ProcessContext | None = None
        others = set(multiprocessing.active_children())
        try:
            context = start_processes(  # type: ignore[no-untyped-call]
                _Started(function, tuple(args), place, settings, Path(folder)),
                nprocs=place.here,
                join=False,
                start_method="fork",
            )
            assert context is not None
            while not context.join():
                pass
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise LaunchError(_told(error, place, Path(folder))) from None
        finally:
            # Not those of the context: an interrupt may come before all are started.
            started = [process for process in multiprocessing.active_children() if process not in others]
            _end(started, context.error_files if context else ())
            del store


class _Started:
    """What a started process runs."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        place: _Place,
        settings: Settings,
        failures: Path,
    ) -> None:
        self._failures = failures
        self._function = function
        self._args = args
        self._place = place
        self._settings = settings

    def __call__(self, local_rank: int) -> None:
        place = self._place
        os.environ.update(
            self._settings.to_env(),
            RANK=str(place.node * place.here + local_rank),
            LOCAL_RANK=str(local_rank),
            WORLD_SIZE=str(place.nodes * place.here),
            LOCAL_WORLD_SIZE=str(place.here),
            MASTER_ADDR=place.host,
            MASTER_PORT=str(place.port),
            # torch's word for a store that the launcher holds.
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RESTART_COUNT="0",
        )
        # The threads of the parent's OpenMP were not forked; to wait for them would be for ever.
        torch.set_num_threads(1)
        set_current_backend(None)
        try:
            self._function(*self._args)
        except Exception as error:  # noqa: BLE001 - whatever the function raises is its failure
            self._record(local_rank, error)
            sys.exit(1)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _record(self, local_rank: int, error: Exception) -> None:
        """Leave the traceback, from the function on, where the parent finds it."""
        assert error.__traceback__ is not None
        lines = traceback.format_exception(type(error), error, error.__traceback__.tb_next)
        (self._failures / str(local_rank)).write_text("".join(lines).strip(), encoding="utf-8")


def _end(processes: Sequence[BaseProcess], files: Sequence[str]) -> None:
    """See to it that no process is left, and no file either; a second interrupt does not wait for them."""
    try:
        for process in processes:
            if process.is_alive():
                process.terminate()
        for process in processes:
            process.join(_GRACE_S)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for file in files:
            Path(file).unlink(missing_ok=True)


def _told(error: ProcessRaisedException | ProcessExitedException, place: _Place, failures: Path) -> str:
    """What failed first: the others lost it and failed for that, or were ended."""
    recorded = {int(file.name): file for file in failures.iterdir()}
    index = error.error_index
    if index in recorded:
        index = min(recorded, key=lambda some: recorded[some].stat().st_mtime_ns)
    who = f"rank {place.node * place.here + index} of {place.nodes * place.here}"
    if index in recorded:
        trace = recorded[index].read_text(encoding="utf-8")
        return f"{who} failed: {trace.splitlines()[-1]}\n{trace}"
    code = getattr(error, "exit_code", 1)
    if code < 0:
        return f"{who} was ended by {signal.Signals(-code).name}"
    return f"{who} exited with code {code}"


def _precise(settings: Settings, wanted: str | None) -> Settings:
    if wanted is None:
        return settings
    # A member of PrecisionType is its own text.
    for known in get_args(MixedPrecision):
        if wanted == known:
            return replace(settings, mixed_precision=known)
    raise ValueError(
        f"mixed_precision must be one of {', '.join(get_args(MixedPrecision))}; it is {wanted!r}"
    )


def _endpoint(endpoint: str, host: str, port: str | int | None, nodes: int) -> tuple[str, int]:
    if endpoint:
        host, _, port = endpoint.rpartition(":")
    number = port if port is not None else 29500 if nodes > 1 else 0
    if not host or not str(number).isdigit():
        raise ValueError(f"the processes meet at host:port; rdzv_endpoint={endpoint!r}, use_port={port!r}")
    return host, int(number)


def _refuse(**arguments: tuple[Any, Any]) -> None:
    for name, (given, only) in arguments.items():
        if given != only:
            raise ValueError(
                f"{name}={given!r} cannot be honoured here; leave it at {only!r}, or use `accel launch`"
            )


def _refuse_group() -> None:
    if dist.is_initialized():
        raise RuntimeError(
            "this process is in a process group already, which an Accelerator joins that divides models, and processes that "
            "are started from it would take that for their own and hang. Make the Accelerator inside of the function, and "
            "restart the session (or the notebook's kernel)"
        )


def _refuse_cuda() -> None:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    culprit = _initialises_cuda(dict(sys.modules))
    why = f"importing {culprit} does it" if culprit else "a cell of this session has used it"
    raise RuntimeError(
        f"CUDA is initialised in this session already, and a forked process could not use it any more: {why}. "
        "Restart the session, and do this inside the function that is launched."
    )


_PROBE = """
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


def _initialises_cuda(modules: dict[str, ModuleType]) -> str | None:
    """The first of the imported packages that initialises CUDA by itself, and the line that does.

    They are tried in a process of its own.
    """
    ours = {"torch", "accel_runtime", "__main__", *sys.stdlib_module_names}
    names = [name for name in modules if "." not in name and not name.startswith("_") and name not in ours]
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, *names], capture_output=True, text=True, timeout=_PROBE_S, check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    name, _, line = "".join(done.stdout.splitlines()[-1:]).partition("\t")
    if name not in names:
        return None
    return f"{name!r} ({line})" if line else repr(name)
