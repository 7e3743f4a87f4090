"""The actor on each node of a Ray job: it starts `accel launch` there, and passes its output and its end to the driver."""

from __future__ import annotations

import os
import select
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray

from accel_cli.errors import AccelError
from accel_cli.extensions.ray.plan import ARCHIVE, RayRun
from accel_cli.launchers.node_launch import NodeEnd, NodeLaunch, find_problem, unpack
from accel_cli.planning.network import Endpoint
from accel_cli.planning.nodes import VARIABLES
from accel_runtime.environment import settings as env

__all__ = ["NodeLauncher"]

_START = """\
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Becomes `accel launch`, to which the kernel sends SIGTERM if its parent, a worker of Ray, is killed (PR_SET_PDEATHSIG).

It runs isolated (`-I`), so that no module of the working folder is imported."""
_READ_S = 1.0
"""Seconds that a read waits for output; a signal waits behind it."""
_CHUNK = 1 << 18


class NodeLauncher:
    """Runs one `accel launch` on this node; Ray calls its methods one after another.

    Args:
        text: The run, as `RayRun.to_json` wrote it.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._launch = NodeLaunch()
        self._folder = Path.cwd()

    def describe(self) -> dict[str, Any]:
        """Prepare the working folder, and return the facts that the driver needs before the start."""
        try:
            problem = self._prepare_folder(RayRun.from_json(self._text))
        except AccelError as error:  # another version of accel
            problem = str(error)
        address, port = ray.util.get_node_ip_address(), self._launch.reserve_port()
        return {"host": socket.gethostname(), "address": address, "port": port, "problem": problem}

    def start(self, rank: int, endpoint: tuple[str, int], run_id: str, name: str, *, resume: bool) -> None:
        """Start `accel launch`.

        Args:
            rank: The rank of this node.
            endpoint: The address and port of the rendezvous.
            run_id: The name of the run at the rendezvous.
            name: The name of this node in messages.
            resume: Continue from the newest checkpoint.
        """
        run = RayRun.from_json(self._text)
        command = run.build_command(sys.executable, rank, Endpoint(*endpoint), run_id, resume=resume)
        # A worker may have been started by another scheduler, whose variables describe its own processes.
        foreign = {variable for names in VARIABLES.values() for variable in names} | {"OMP_NUM_THREADS"}
        environ = {key: value for key, value in os.environ.items() if key not in foreign} | dict(run.env)
        self._launch.start(
            [sys.executable, "-I", "-c", _START, str(os.getpid()), *command],
            self._folder,
            {**environ, env.NODE_NAME: name},
            serves_rendezvous=rank == 0 and run.nnodes > 1,
        )

    def read(self) -> tuple[bytes, NodeEnd | None]:
        """Return new output, and after the last output the end of `accel launch`."""
        process = self._launch.process
        assert process
        assert process.stdout
        has_exited = process.poll() is not None  # before the last output is read
        # Processes that the script has left running may keep the pipe open.
        if select.select([process.stdout], [], [], 0 if has_exited else _READ_S)[0]:
            if data := os.read(process.stdout.fileno(), _CHUNK):
                return data, None
        elif not has_exited:
            return b"", None
        return b"", self._launch.wait()

    def send_signal(self, number: int) -> None:
        """Send a signal to `accel launch`."""
        self._launch.send_signal(number)

    def _prepare_folder(self, run: RayRun) -> str:
        """Unpack the source if the job carries it, and return why the script cannot run here; empty if it can."""
        if run.sends_source:
            # The folder of the job is that of Ray, which deletes it when it needs space. A retry finds the files of before.
            node_id = ray.get_runtime_context().get_node_id()
            source = Path.cwd() / f"source-{node_id[:12]}"
            if not source.exists():
                scratch = Path(tempfile.mkdtemp(dir=Path.cwd()))
                unpack(Path.cwd() / ARCHIVE, scratch)
                scratch.rename(source)
            self._folder = source / (run.folder or ".")
        elif run.folder:
            self._folder = Path(run.folder)
        problem = find_problem(self._folder, run.script)
        if problem and not run.sends_source:
            problem += ". Use a shared file system, or launcher.source: folder"
        return problem
