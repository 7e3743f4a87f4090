"""Real processes that stay: started once, they call whatever function a test ships to them.

This file is both sides. Tests see `Cluster` and `Alone`; run as a script, it is one rank.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
import traceback
import warnings
from contextlib import ExitStack
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

import cloudpickle
from ports import free_port

CALL_S = 150
"""How long the ranks may take over one function."""
STRAGGLER_S = 30
"""How long the others may still take once a rank has failed."""
LEAVE_S = 5
"""How long a rank that is in the midst of a call stays once nobody waits for it."""
IDLE_S = 120
"""How long processes that nobody calls stay: the threads of a dozen gloo groups cost a quarter of a core, also at rest."""


class RanksFailedError(AssertionError):
    """A function raised, or did not come back, on some ranks; the message has their tracebacks."""


class Alone:
    """The cluster of this one process."""

    size = 1
    backend, kind, carrier = "Single", "NO", None

    @staticmethod
    def device(_rank):
        """What a rank computes on."""
        return "cpu"

    @staticmethod
    def local_rank(_rank):
        """Where a rank stands on its machine."""
        return 0

    def run(self, function, *args):
        """Call `function(*args)` here."""
        assert "RANK" not in os.environ
        return [function(*args)]

    def close(self):
        """Nothing was started."""


class Cluster:
    """`size` processes a launcher might have started, over gloo; they start at a `run`, and end when nobody calls them.

    `apart`, each is told that it is alone on its machine.
    """

    backend, kind, carrier = "Distributed", "MULTI_CPU", "gloo"

    def __init__(self, size, *, apart=False):
        self.size = size
        self._apart = apart
        self._processes = []
        self._connections = []
        self._held = ExitStack()
        self._running = threading.Lock()
        self._rest = threading.Timer(IDLE_S, self.close)

    @staticmethod
    def device(_rank):
        """What a rank computes on."""
        return "cpu"

    def local_rank(self, rank):
        """Where a rank stands on its machine."""
        return 0 if self._apart else rank

    def run(self, function, *args):
        """Call `function(*args)`, both taken by value, on every rank; the results in rank order."""
        self._rest.cancel()
        with self._running:
            if not self._processes:
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
        """End all processes."""
        self._rest.cancel()
        with self._running:
            self._end()

    def _end(self):
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
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
            settings = {"ACCEL_DEVICE": "cpu", "ACCEL_PROCESS_GROUP_TIMEOUT": CALL_S}
            told = {name: str(value) for name, value in (place | group | settings).items()}
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._processes.append(
                subprocess.Popen(command, env=inherited | told, pass_fds=[theirs.fileno()])
            )
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


def serve(connection):
    """Be one rank: call what comes, until the other end is gone."""
    calls = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, calls), daemon=True).start()
    import torch  # noqa: F401 - before warnings are errors: not all of its own are ours to mend

    from accel_runtime.current import set_current_backend

    warnings.simplefilter("error")
    while (call := calls.get()) is not None:
        set_current_backend(None)  # no test starts from what another left
        try:
            function, args = cloudpickle.loads(call)
            answer = cloudpickle.dumps((True, function(*args)))
        except BaseException:  # noqa: BLE001 - whatever it is, the test is told
            answer = cloudpickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)


def _receive(connection, calls):
    """Pass calls on; when the other end is gone, end this process even if it is in the midst of a call."""
    try:
        while True:
            calls.put(connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        calls.put(None)
    time.sleep(LEAVE_S)
    os._exit(1)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
