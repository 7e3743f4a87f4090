"""Replicas of torch_xla's CPU device that stay: started once, they call whatever function a test ships to them.

This file is both sides. Tests see `Replicas`; run as a script, it is one process with a thread a replica.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import time
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import cloudpickle

CALL_S = 120
"""How long the replicas may take over one function: a graph that is new is compiled first."""
STRAGGLER_S = 5
"""How long the others may still take once one has failed."""


ARTEFACT = "Termination timeout for"
"""What XLA:CPU says when it ends a process because it has not given all replicas a thread in time."""


class ReplicasFailedError(AssertionError):
    """A function raised, or did not come back, on some replicas; the message has their tracebacks."""


class EndedError(ReplicasFailedError):
    """The process of the replicas ended."""


class Replicas:
    """`size` replicas of the CPU device; they start at the first `run`.

    Args:
        size: How many.
        devices: With SPMD there is one replica that computes on several devices.
    """

    kind = "XLA"

    def __init__(self, size, *, devices=0):
        self.size = size
        self.devices = devices
        self._process = None

    @property
    def backend(self):
        """The class of the backend."""
        return "SPMDBackend" if self.devices else "SingleXLABackend" if self.size == 1 else "XLABackend"

    @property
    def carrier(self):
        """What carries collectives."""
        return None if self.size == 1 else "xla"

    @staticmethod
    def device(rank):
        """What a rank computes on."""
        return f"xla:{rank}"

    @staticmethod
    def local_rank(rank):
        """Where a rank stands on its machine."""
        return rank

    def run(self, function, *args):
        """Call `function(*args)`, both taken by value, on every replica; the results in rank order.

        Where XLA:CPU has not given all replicas a thread in time, which says nothing about them, once more.
        """
        try:
            return self._run(function, args)
        except EndedError:
            if not self._said(ARTEFACT):
                raise
        return self._run(function, args)

    def _run(self, function, args):
        if self._process is None:
            self._start()
        cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
        try:
            self._connection.send_bytes(cloudpickle.dumps((function, args)))
            answers = cloudpickle.loads(self._connection.recv_bytes())  # within CALL_S, see `_collected`
        except (EOFError, ConnectionResetError):
            self.close()
            raise EndedError("the process ended") from None
        except BaseException:
            self.close()
            raise
        failed = {rank: said for rank, (fine, said) in enumerate(answers) if not fine}
        if failed:
            self.close()  # they may be out of step
            told = "\n".join(f"rank {rank} of {self.size}: {said}" for rank, said in failed.items())
            raise ReplicasFailedError(told)
        return [value for _, value in answers]

    def close(self):
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._connection.close()
            self._process = None
            with self._errors as errors:
                errors.seek(0)
                self._told = errors.read().decode(errors="replace")
            sys.stderr.write(self._told)

    def _start(self):
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("ACCEL_")}
        told = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": self.devices or self.size, "OMP_NUM_THREADS": 1}
        told |= {
            "ACCEL_DEVICE": "xla",
            "ACCEL_SPMD": int(bool(self.devices)),
            "ACCEL_PROCESS_GROUP_TIMEOUT": CALL_S,
        }
        ours, theirs = Pipe()
        self._connection = ours
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), str(self.size)],
            env=inherited | {name: str(value) for name, value in told.items()},
            pass_fds=[theirs.fileno()],
            stderr=self._errors,
        )
        theirs.close()

    def _said(self, words):
        """Whether this is in what the last process wrote on stderr."""
        return words in self._told


def serve(connection, size):
    """Be all replicas: call what comes on every one of them, until the other end is gone."""
    sys.path.insert(0, str(Path(__file__).with_name("xla")))
    import cpu_collectives

    if size > 1:
        cpu_collectives.prepare(os.environ, size)
    from torch_xla._internal import pjrt

    if size > 1:
        cpu_collectives.install(size)
    calls = [queue.SimpleQueue() for _ in range(size)]
    answers = queue.SimpleQueue()

    def replica():
        import torch_xla.runtime as xr

        rank = xr.global_ordinal() if size > 1 else 0  # asked, it would take up devices before SPMD can be
        while True:
            function, args = cloudpickle.loads(calls[rank].get())
            try:
                answers.put((rank, (True, cloudpickle.dumps(function(*args)))))
            except BaseException:  # noqa: BLE001 - it is the test's
                answers.put((rank, (False, traceback.format_exc())))

    import threading

    if os.environ["ACCEL_SPMD"] == "1":
        run = replica
    else:
        run = lambda: pjrt._run_thread_per_device(0, 1, replica, pjrt.initialize_multiprocess)  # noqa: E731
    threading.Thread(target=run, daemon=True).start()
    try:
        while True:
            call = connection.recv_bytes()
            for waiting in calls:
                waiting.put(call)
            connection.send_bytes(cloudpickle.dumps(_collected(answers, size)))
    except (EOFError, ConnectionResetError):
        os._exit(1)


def _collected(answers, size):
    found, deadline = {}, time.monotonic() + CALL_S
    while len(found) < size:
        try:
            rank, (fine, said) = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        found[rank] = (fine, cloudpickle.loads(said) if fine else said)
        if not fine:
            deadline = min(deadline, time.monotonic() + STRAGGLER_S)
    return [found.get(rank, (False, "no answer")) for rank in range(size)]


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
