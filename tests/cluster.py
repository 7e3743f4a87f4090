"""Ranks in real processes that stay alive and call the functions that tests send to them.

This file is both sides. Tests use `Cluster` and `Alone`; run as a script, it is an interpreter that has imported torch
and forks ranks on request. A fork takes milliseconds, a new interpreter that imports torch seconds.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import cloudpickle
from ports import free_port

CALL_S = 150
"""Time limit of one function on all ranks."""
STRAGGLER_S = 30
"""Time limit of the other ranks after a rank has failed."""
EXIT_DELAY_S = 5
"""Time after which a rank exits during a call if its test process has ended."""
IDLE_S = 10
"""Time after which idle ranks are killed: the idle threads of a dozen gloo groups use a quarter of a core."""
PRELOADED = (
    "torch",
    "numpy",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.utils.data",
    "torch._dynamo",
    "accel_runtime.accelerator",
    "accel_runtime.utils",
)
"""Modules that the interpreter imports before it forks ranks."""


class RanksFailedError(AssertionError):
    """A function raised or did not return on some ranks; the message contains their tracebacks."""


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

    def close(self):
        """Do nothing: no process was started."""


class Cluster:
    """Ranks over gloo; they start with the first `run`, and are killed when they have been idle for `IDLE_S`.

    Args:
        size: The world size.
        one_per_node: Whether each rank is on its own node: `LOCAL_RANK` 0 and `LOCAL_WORLD_SIZE` 1.
        settings: Environment variables of the ranks that replace those of a rank on the CPU.
    """

    backend, kind, carrier = "DDPBackend", "MULTI_CPU", "gloo"

    def __init__(self, size, *, one_per_node=False, settings=None):
        self.size = size
        self._one_per_node = one_per_node
        self._settings = {"ACCEL_DEVICE": "cpu", "ACCEL_PROCESS_GROUP_TIMEOUT": CALL_S} | (settings or {})
        self._pids = []
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
        return 0 if self._one_per_node else rank

    def run(self, function, *args):
        """Call `function(*args)`, both taken by value, on every rank; return the results in rank order."""
        self._idle_timer.cancel()
        with self._lock:
            if not self._pids:
                self._start_ranks()
            cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
            call = cloudpickle.dumps((function, args))
            try:
                for connection in self._connections:
                    connection.send_bytes(call)
                results = self._receive_results()
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
        if self._pids:
            INTERPRETER.kill(self._pids)
        for connection in self._connections:
            connection.close()
        self._pids, self._connections = [], []
        self._resources.close()

    def _start_ranks(self):
        port = self._resources.enter_context(free_port())
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("ACCEL_")}
        for rank in range(self.size):
            local_end, remote_end = Pipe()
            local_rank_and_size = (0, 1) if self._one_per_node else (rank, self.size)
            variables = {"RANK": rank, "WORLD_SIZE": self.size}
            variables |= dict(zip(("LOCAL_RANK", "LOCAL_WORLD_SIZE"), local_rank_and_size, strict=True))
            group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
            environ = {name: str(value) for name, value in (variables | group | self._settings).items()}
            self._pids.append(INTERPRETER.fork(inherited | environ, remote_end.fileno()))
            self._connections.append(local_end)
            remote_end.close()

    def _receive_results(self):
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        results, errors = {}, {}
        deadline = time.monotonic() + CALL_S
        while pending and (ready := wait(list(pending), max(0, deadline - time.monotonic()))):
            for connection in ready:
                rank = pending.pop(connection)
                try:
                    is_success, value = cloudpickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    is_success, value = False, "the process ended"
                (results if is_success else errors)[rank] = value
            if errors:
                deadline = min(deadline, time.monotonic() + STRAGGLER_S)
        errors |= dict.fromkeys(pending.values(), "no answer")
        if errors:
            message = "\n".join(
                f"rank {rank} of {self.size}: {text}" for rank, text in sorted(errors.items())
            )
            raise RanksFailedError(message)
        return [results[rank] for rank in range(self.size)]


class Interpreter:
    """The test process's side of the interpreter that has imported torch; it starts with the first rank."""

    def __init__(self):
        self._process = None
        self._lock = threading.RLock()

    def fork(self, environ, connection):
        """Fork a rank.

        Args:
            environ: The environment of the rank.
            connection: The file descriptor of its end of a pipe.

        Returns:
            Its process id.
        """
        request = json.dumps({"environ": environ, "folder": str(Path.cwd())}).encode()
        with self._lock:
            if self._process is None:
                self._start()
            socket.send_fds(self._link, [request], [connection])
            return self._answer()

    def kill(self, pids):
        """Kill ranks, and return once they have ended."""
        with self._lock:
            self._link.send(json.dumps({"kill": pids}).encode())
            self._answer()

    def close(self):
        """End the interpreter and all ranks it has forked."""
        if self._process is not None:
            self._link.close()
            self._process.wait()
            self._process = None

    def _answer(self):
        answer = self._link.recv(1 << 16)
        assert answer, "the interpreter that forks ranks has ended"
        return json.loads(answer)

    def _start(self):
        self._link, remote_end = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with remote_end:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(remote_end.fileno())],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                pass_fds=[remote_end.fileno()],
            )


INTERPRETER = Interpreter()
"""The interpreter of this test process."""


def preload(link):
    """Import torch, and fork ranks until the other end of the link is closed."""
    for name in PRELOADED:
        __import__(name)
    gc.collect()
    gc.freeze()
    ranks = set()
    while message := socket.recv_fds(link, 1 << 20, 1):
        data, (*connections,), _, _ = message
        if not data:
            break
        request = json.loads(data)
        for pid in request.get("kill", []):
            kill_rank(pid)
            ranks.discard(pid)
        pid = None
        if connections:
            pid = os.fork()
            if not pid:
                link.close()
                run_rank(request, Connection(*connections))
            ranks.add(pid)
            os.close(*connections)
        link.send(json.dumps(pid).encode())
    for pid in ranks:
        kill_rank(pid)


def kill_rank(pid):
    """Kill a rank and wait for its exit."""
    os.kill(pid, signal.SIGKILL)  # the process is not reaped yet, so its id is not reused
    os.waitpid(pid, 0)


def run_rank(request, connection):
    """Run as a rank in a forked process."""
    import numpy as np

    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["folder"])
    np.random.seed()  # noqa: NPY002 - scripts use the global generator
    try:
        serve(connection)
    finally:
        os._exit(0)


def serve(connection):
    """Call the functions that arrive, until the other end is closed."""
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


if __name__ == "__main__":
    # A dependency of the SageMaker SDK installs a package `tests`: this repository must precede it.
    sys.path.insert(1, str(Path(__file__).parents[1]))
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        preload(channel)
