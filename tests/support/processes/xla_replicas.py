"""Replicas of torch_xla's CPU device that stay alive and call the functions that tests send to them.

This file is both sides. Tests use `Replicas`; run as a script, it is one process with one thread for each replica.
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

sys.path.append(str(Path(__file__).parents[2]))  # run as a script

from support.processes.waits import limit

CALL_S = int(limit(120))
"""Time limit of one function on all replicas, which includes the compilation of new graphs."""
STRAGGLER_S = limit(5)
"""Time limit of the other replicas after one has failed."""


TERMINATION_MESSAGE = "Termination timeout for"
"""The message of XLA:CPU when it aborts a process in which not all replicas got a thread in time."""


class ReplicasFailedError(AssertionError):
    """A function raised or did not return on some replicas; the message contains their tracebacks."""


class ProcessEndedError(ReplicasFailedError):
    """The process of the replicas ended."""


class Replicas:
    """Replicas of the CPU device; they start with the first `run`.

    Args:
        size: The number of replicas.
        devices: The number of devices of the single replica with SPMD; 0 without SPMD.
    """

    kind = "XLA"

    def __init__(self, size, *, devices=0):
        self.size = size
        self.devices = devices
        self._process = None

    @property
    def backend(self):
        """Return the name of the backend class."""
        return "Single" if self.size == 1 else "XLABackend"

    @property
    def carrier(self):
        """Return the name of the transport of collectives."""
        return None if self.size == 1 else "xla"

    @staticmethod
    def device(rank):
        """Return the device of a rank."""
        return f"xla:{rank}"

    @staticmethod
    def local_rank(rank):
        """Return the local rank of a rank."""
        return rank

    def run(self, function, *args):
        """Call `function(*args)`, both pickled by value, on every replica; return the results in rank order.

        The call is repeated once if XLA:CPU did not give all replicas a thread in time, which is no failure of the function.
        """
        try:
            return self._run(function, args)
        except ProcessEndedError:
            if not self._has_message(TERMINATION_MESSAGE):
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
            raise ProcessEndedError("the process ended") from None
        except BaseException:
            self.close()
            raise
        failed = {rank: text for rank, (is_success, text) in enumerate(answers) if not is_success}
        if failed:
            self.close()  # the replicas may be in different states
            message = "\n".join(f"rank {rank} of {self.size}: {text}" for rank, text in failed.items())
            raise ReplicasFailedError(message)
        return [value for _, value in answers]

    def close(self):
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._connection.close()
            self._process = None
            with self._stderr_file as errors:
                errors.seek(0)
                self._stderr = errors.read().decode(errors="replace")
            sys.stderr.write(self._stderr)

    def _start(self):
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("ACCEL_")}
        variables = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": self.devices or self.size, "OMP_NUM_THREADS": 1}
        variables |= {
            "ACCEL_DEVICE": "xla",
            "ACCEL_SPMD": int(bool(self.devices)),
            "ACCEL_PROCESS_GROUP_TIMEOUT": CALL_S,
        }
        local_end, remote_end = Pipe()
        self._connection = local_end
        self._stderr_file = tempfile.TemporaryFile()  # noqa: SIM115 - it is open as long as the process runs
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(remote_end.fileno()), str(self.size)],
            env=inherited | {name: str(value) for name, value in variables.items()},
            pass_fds=[remote_end.fileno()],
            stderr=self._stderr_file,
        )
        remote_end.close()

    def _has_message(self, message):
        """Return whether the last process wrote this message to stderr."""
        return message in self._stderr


def serve(connection, size):
    """Call received functions on every replica until the other end is closed."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "extensions" / "xla" / "device"))
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

        rank = (
            xr.global_ordinal() if size > 1 else 0
        )  # calling it would initialize the devices before SPMD is enabled
        while True:
            function, args = cloudpickle.loads(calls[rank].get())
            try:
                answers.put((rank, (True, cloudpickle.dumps(function(*args)))))
            except BaseException:  # noqa: BLE001 - the test reports it
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
            for replica_calls in calls:
                replica_calls.put(call)
            connection.send_bytes(cloudpickle.dumps(_collect_answers(answers, size)))
    except (EOFError, ConnectionResetError):
        os._exit(1)


def _collect_answers(answers, size):
    results, deadline = {}, time.monotonic() + CALL_S
    while len(results) < size:
        try:
            rank, (is_success, value) = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        results[rank] = (is_success, cloudpickle.loads(value) if is_success else value)
        if not is_success:
            deadline = min(deadline, time.monotonic() + STRAGGLER_S)
    return [results.get(rank, (False, "no answer")) for rank in range(size)]


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
