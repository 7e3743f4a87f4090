"""Ranks in real processes that stay alive and call the functions that tests send to them.

This file is both sides. Tests use `Cluster`, `Alone`, `preload` and `run_script`; a forked process calls `serve`.
"""

from __future__ import annotations

import importlib.util
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
import warnings
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

import cloudpickle
from support.processes.children import ForkedProcess, fork, free_port, wait_for_exit
from support.processes.commands import INTERPRETER as COMMANDS
from support.processes.interpreter import TESTS, Interpreter
from support.processes.waits import limit

CALL_S = limit(150)
"""Time limit of one function on all ranks."""
GROUP_TIMEOUT_S = 600
"""Time limit of a collective; a constant, as `describe()` shows it."""
STRAGGLER_S = limit(30)
"""Time limit of the other ranks after a rank has failed."""
SURVIVOR_S = 0.05
"""Time limit of the other ranks after a rank has killed itself."""
EXIT_DELAY_S = 5
"""Time after which a rank exits during a call if its test process has ended."""
IDLE_S = 10
"""Time after which idle ranks are killed: the idle threads of a dozen gloo groups use a quarter of a core."""
INTERPRETER = Interpreter(
    "numpy",
    "accel_runtime.accelerator.accelerator",
    "accel_runtime.utils",
    "support.processes.ranks",
    # In the environment of their own; elsewhere a folder of tests has the name, but no origin.
    *(
        ["accel_runtime.extensions.deepspeed.strategy"]
        if getattr(importlib.util.find_spec("deepspeed"), "origin", None)
        else []
    ),
    parent=COMMANDS,
)
"""The interpreter that has imported what a rank imports."""


class RanksFailedError(AssertionError):
    """A function raised or did not return on some ranks; the message contains their tracebacks."""


class RankEndedError(RanksFailedError):
    """A process ended during a call."""


class Alone:
    """A cluster of one rank: this process."""

    size = 1
    backend, kind, carrier = "Single", "NO", None

    @staticmethod
    def device(_rank):
        """Return the device of a rank."""
        return "cpu"

    @staticmethod
    def local_rank(_rank):
        """Return the local rank of a rank."""
        return 0

    def run(self, function, *args):
        """Call `function(*args)` in this process."""
        assert "RANK" not in os.environ
        return [function(*args)]

    def run_until_killed(self, function, *args):
        """Call a function in a fork of this process, which may kill itself; return whether it did."""
        code = wait_for_exit(fork(function, *args), CALL_S)
        if code > 0:
            raise RanksFailedError(f"the rank exited with code {code}")
        return code < 0

    def close(self):
        """Do nothing: no process was started."""


class Cluster:
    """Ranks over gloo; they start with the first `run`, and are killed when they have been idle for `IDLE_S`.

    Args:
        size: The world size.
        per_node: The ranks of a node, by `LOCAL_RANK` and `LOCAL_WORLD_SIZE`; all by default.
        settings: Environment variables of the ranks that replace those of a rank on the CPU.
    """

    backend, kind, carrier = "DistributedBackend", "MULTI_CPU", "gloo"

    def __init__(self, size, *, per_node=None, settings=None):
        self.size = size
        self._per_node = per_node or size
        self._settings = {"ACCEL_DEVICE": "cpu", "ACCEL_PROCESS_GROUP_TIMEOUT": GROUP_TIMEOUT_S} | (
            settings or {}
        )
        self._processes = []
        self._connections = []
        self._resources = ExitStack()
        self._lock = threading.Lock()
        self._idle_timer = threading.Timer(IDLE_S, self.close)

    @staticmethod
    def device(_rank):
        """Return the device of a rank."""
        return "cpu"

    def local_rank(self, rank):
        """Return the local rank of a rank."""
        return rank % self._per_node

    def run(self, function, *args):
        """Call `function(*args)`, both taken by value, on every rank; return the results in rank order."""
        return self._call(function, args, STRAGGLER_S)

    def run_to_first_error(self, function, *args):
        """Call `function(*args)` on every rank until one of them raises, and kill the others, which wait for it."""
        return self._call(function, args, 0)

    def run_until_killed(self, function, *args):
        """Call a function that may kill its rank, and kill the other ranks then; return whether a rank was killed."""
        try:
            self._call(function, args, SURVIVOR_S)
        except RankEndedError:
            return True
        return False

    def _call(self, function, args, straggler_s):
        self._idle_timer.cancel()
        with self._lock:
            if not self._processes:
                self._start_ranks()
            cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
            call = cloudpickle.dumps((function, args))
            try:
                for connection in self._connections:
                    connection.send_bytes(call)
                results = self._receive_results(straggler_s)
            except BaseException:
                self._kill_ranks()  # the ranks may be in different states: the next run starts new ones
                raise
        self._idle_timer = threading.Timer(IDLE_S, self.close)
        self._idle_timer.daemon = True
        self._idle_timer.start()
        return results

    def close(self):
        """End all ranks."""
        self._idle_timer.cancel()
        with self._lock:
            self._kill_ranks()

    def _kill_ranks(self):
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        self._resources.close()

    def _start_ranks(self):
        port = self._resources.enter_context(free_port())
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("ACCEL_")}
        for rank in range(self.size):
            local_end, remote_end = Pipe()
            local_rank_and_size = (self.local_rank(rank), self._per_node)
            variables = {"RANK": rank, "WORLD_SIZE": self.size}
            variables |= dict(zip(("LOCAL_RANK", "LOCAL_WORLD_SIZE"), local_rank_and_size, strict=True))
            group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
            environ = inherited | variables | group | self._settings
            process = ForkedProcess(
                INTERPRETER, "support.processes.ranks:serve", descriptors=[remote_end.fileno()], env=environ
            )
            self._processes.append(process)
            self._connections.append(local_end)
            remote_end.close()

    def _receive_results(self, straggler_s):
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        results, errors, error_type = {}, {}, RanksFailedError
        deadline = time.monotonic() + CALL_S
        while pending and (ready := wait(list(pending), max(0, deadline - time.monotonic()))):
            for connection in ready:
                rank = pending.pop(connection)
                try:
                    is_success, value = cloudpickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    is_success, value, error_type = False, "the process ended", RankEndedError
                (results if is_success else errors)[rank] = value
            if errors:
                deadline = min(deadline, time.monotonic() + straggler_s)
        errors |= dict.fromkeys(pending.values(), "no answer")
        if errors:
            message = "\n".join(
                f"rank {rank} of {self.size}: {text}" for rank, text in sorted(errors.items())
            )
            raise error_type(message)
        return [results[rank] for rank in range(self.size)]


def preload(clusters, *modules):
    """Import modules in the interpreter before it forks ranks, and end the ranks of clusters that lack them."""
    INTERPRETER.preload(*modules)
    for cluster in clusters:
        cluster.close()


def run_script(script, environs, timeout=240, arguments=(), interpreter=INTERPRETER, **options):
    """Run a script in one process for each environment, all at the same time.

    Args:
        script: The path of the script.
        environs: Variables of each process in addition to those of this process.
        timeout: The time limit of all processes in seconds, before it is scaled.
        arguments: The arguments of each process.
        interpreter: The interpreter that forks them; that of `support.processes.commands` has not imported the runtime.
        options: Options of `ForkedProcess`.

    Returns:
        The output, errors and exit code of each process; a negative code is a signal.
    """
    deadline = time.monotonic() + limit(timeout)
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                ForkedProcess(
                    interpreter, str(script), arguments, env={**os.environ, **environ}, **pipes, **options
                )
            )
            for environ in environs
        ]
        outputs = [process.communicate(timeout=deadline - time.monotonic()) for process in processes]
    return [(*output, process.returncode) for output, process in zip(outputs, processes, strict=True)]


def serve(descriptor):
    """Call the functions that arrive, until the other end of the connection is closed."""
    import numpy as np

    # A dependency of the SageMaker SDK installs a package `tests`: this repository must precede it.
    sys.path[:0] = [str(TESTS), str(TESTS.parent)]
    np.random.seed()  # noqa: NPY002 - scripts use the global generator
    try:
        _call_functions(Connection(descriptor))
    finally:
        os._exit(0)


def _call_functions(connection):
    calls = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, calls), daemon=True).start()
    from accel_runtime.backends import set_current_backend

    warnings.simplefilter(os.environ.get("RANK_WARNINGS", "error"))
    while (call := calls.get()) is not None:
        set_current_backend(None)  # tests must not share a backend
        try:
            function, args = cloudpickle.loads(call)
            answer = cloudpickle.dumps((True, function(*args)))
        except BaseException:  # noqa: BLE001 - the test reports it
            answer = cloudpickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)


def _receive(connection, calls):
    """Put received calls into the queue; when the other end is closed, exit even during a call."""
    with suppress(EOFError, ConnectionResetError):
        while True:
            calls.put(connection.recv_bytes())
    calls.put(None)
    time.sleep(EXIT_DELAY_S)
    os._exit(1)
