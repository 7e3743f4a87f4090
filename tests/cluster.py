"""Real processes that stay: started once, they call whatever function a test ships to them.

This file is both sides. Tests see `Cluster` and `Alone`; run as a script, it is an interpreter that has imported torch
and forks a rank whenever it is asked to, which takes milliseconds where a fresh interpreter takes seconds.
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
"""How long the ranks may take over one function."""
STRAGGLER_S = 30
"""How long the others may still take once a rank has failed."""
LEAVE_S = 5
"""How long a rank that is in the midst of a call stays once its test process has ended."""
IDLE_S = 10
"""How long ranks that are not called stay: the threads of a dozen gloo groups cost a quarter of a core, also at rest."""
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
"""What the interpreter imports before it forks ranks."""


class RanksFailedError(AssertionError):
    """A function raised, or did not return, on some ranks; the message has their tracebacks."""


class Alone:
    """The cluster of this one process."""

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
        """Call `function(*args)` here."""
        assert "RANK" not in os.environ
        return [function(*args)]

    def close(self):
        """Do nothing: no process was started."""


class Cluster:
    """`size` ranks over gloo; they start at a `run`, and end when they are not called for a while.

    Args:
        size: The world size.
        apart: Each rank has a node of its own: `LOCAL_RANK` 0 and `LOCAL_WORLD_SIZE` 1.
        settings: Variables of the ranks in place of those of a rank on the CPU.
    """

    backend, kind, carrier = "DDPBackend", "MULTI_CPU", "gloo"

    def __init__(self, size, *, apart=False, settings=None):
        self.size = size
        self._apart = apart
        self._settings = {"ACCEL_DEVICE": "cpu", "ACCEL_PROCESS_GROUP_TIMEOUT": CALL_S} | (settings or {})
        self._pids = []
        self._connections = []
        self._held = ExitStack()
        self._running = threading.Lock()
        self._rest = threading.Timer(IDLE_S, self.close)

    @staticmethod
    def device(_rank):
        """Return the device of a rank."""
        return "cpu"

    def local_rank(self, rank):
        """Return the local rank of a rank."""
        return 0 if self._apart else rank

    def run(self, function, *args):
        """Call `function(*args)`, both taken by value, on every rank; return the results in rank order."""
        self._rest.cancel()
        with self._running:
            if not self._pids:
                self._start()
            cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
            call = cloudpickle.dumps((function, args))
            try:
                for connection in self._connections:
                    connection.send_bytes(call)
                results = self._results()
            except BaseException:
                self._end()  # the ranks may be out of step: the next run starts new ones
                raise
        self._rest = threading.Timer(IDLE_S, self.close)
        self._rest.daemon = True
        self._rest.start()
        return results

    def close(self):
        """End all ranks."""
        self._rest.cancel()
        with self._running:
            self._end()

    def _end(self):
        if self._pids:
            INTERPRETER.kill(self._pids)
        for connection in self._connections:
            connection.close()
        self._pids, self._connections = [], []
        self._held.close()

    def _start(self):
        port = self._held.enter_context(free_port())
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("ACCEL_")}
        for rank in range(self.size):
            ours, theirs = Pipe()
            local = (0, 1) if self._apart else (rank, self.size)
            place = {"RANK": rank, "WORLD_SIZE": self.size}
            place |= dict(zip(("LOCAL_RANK", "LOCAL_WORLD_SIZE"), local, strict=True))
            group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
            told = {name: str(value) for name, value in (place | group | self._settings).items()}
            self._pids.append(INTERPRETER.fork(inherited | told, theirs.fileno()))
            self._connections.append(ours)
            theirs.close()

    def _results(self):
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        results, errors = {}, {}
        deadline = time.monotonic() + CALL_S
        while waiting and (ready := wait(list(waiting), max(0, deadline - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    fine, value = cloudpickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    fine, value = False, "the process ended"
                (results if fine else errors)[rank] = value
            if errors:
                deadline = min(deadline, time.monotonic() + STRAGGLER_S)
        errors |= dict.fromkeys(waiting.values(), "no answer")
        if errors:
            told = "\n".join(f"rank {rank} of {self.size}: {text}" for rank, text in sorted(errors.items()))
            raise RanksFailedError(told)
        return [results[rank] for rank in range(self.size)]


class Interpreter:
    """An interpreter that has imported torch, as the test process sees it; it starts with the first rank."""

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
        self._link, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
            )


INTERPRETER = Interpreter()
"""The one of this test process."""


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
            end(pid)
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
        end(pid)


def end(pid):
    """Kill a rank, and wait for its end."""
    os.kill(pid, signal.SIGKILL)  # a child that nobody has waited for: its id is still its own
    os.waitpid(pid, 0)


def run_rank(request, connection):
    """Be a rank, in a process that was just forked."""
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
        set_current_backend(None)  # no test starts from what another left
        try:
            function, args = cloudpickle.loads(call)
            answer = cloudpickle.dumps((True, function(*args)))
        except BaseException:  # noqa: BLE001 - the test reports it
            answer = cloudpickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)


def _receive(connection, calls):
    """Pass calls on; when the other end is closed, end this process even during a call."""
    with suppress(EOFError, ConnectionResetError):
        while True:
            calls.put(connection.recv_bytes())
    calls.put(None)
    time.sleep(LEAVE_S)
    os._exit(1)


if __name__ == "__main__":
    # A dependency of the SageMaker SDK installs a package called `tests`: this one comes first.
    sys.path.insert(1, str(Path(__file__).parents[1]))
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        preload(channel)
