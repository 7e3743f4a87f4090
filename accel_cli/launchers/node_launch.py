"""`accel launch` on a node of another launcher: its files, its command, its process, and its end.

Imports nothing but the standard library and what torch needs itself: the container of a SageMaker job uses it before the
packages of accel are installed.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from accel_cli.errors import AccelError
from accel_cli.planning.network import bind_free_port
from accel_cli.planning.nodes import PORT
from accel_runtime.environment import settings as env

__all__ = [
    "NodeEnd",
    "NodeLaunch",
    "bind_rendezvous_port",
    "build_command",
    "build_node_options",
    "build_rendezvous_options",
    "find_problem",
    "get_failure_order",
    "unpack",
]

_NUM_PORTS = 100


# Files


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive that `write_archive` wrote into a folder, which is created.

    Raises:
        AccelError: The archive is damaged.
    """
    folder.mkdir(exist_ok=True)
    try:
        with tarfile.open(archive, "r:gz") as tar:
            # Pythons before 3.11.4 have no filters. Who can change the archive can change accel too.
            safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            tar.extractall(folder, **safe)  # type: ignore[arg-type]  # noqa: S202
    except (EOFError, gzip.BadGzipFile, tarfile.TarError, zlib.error) as error:
        raise AccelError(f"{archive.name} is damaged: {error}. Launch again.") from error


def find_problem(folder: str | Path, script: str | None) -> str:
    """Return why a script cannot run in a folder of this node; empty if it can."""
    if not Path(folder).is_dir():
        return f"folder not found: {folder}"
    if not os.access(folder, os.X_OK):
        return f"cannot enter the folder {folder}: permission denied"
    if script is not None and not Path(folder, script).is_file():
        return f"script not found: {Path(folder, script)}"
    return ""


# The command


def build_node_options(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the options of `accel launch` on a node: the launcher torchrun with the values that are not None."""
    # As JSON, since the values of --set are YAML, in which ` #` begins a comment.
    keys = (
        f"launcher.{key}={json.dumps(value, ensure_ascii=False)}"
        for key, value in values.items()
        if value is not None
    )
    return tuple(word for text in ("launcher.kind=torchrun", *keys) for word in ("--set", text))


def build_rendezvous_options(
    nnodes: int, node_rank: int | None, endpoint: str, run_id: str
) -> tuple[str, ...]:
    """Return the options with which a node joins the others; none for one node.

    Args:
        nnodes: The number of nodes.
        node_rank: The rank of this node; None if the rendezvous assigns it.
        endpoint: The rendezvous as `host:port`.
        run_id: The name of the run at the rendezvous.
    """
    if nnodes == 1:
        return ()
    rank = () if node_rank is None else ("--node-rank", str(node_rank))
    return ("--nnodes", str(nnodes), "--rdzv-endpoint", endpoint, "--rdzv-id", run_id, *rank)


def build_command(python: str, *words: str) -> tuple[str, ...]:
    """Return the command `accel launch` of a node: its interpreter, and the options, the target and its arguments."""
    return (python, "-m", "accel_cli", "launch", "--quiet", "--no-profile", *words)


# The process and its end


def bind_rendezvous_port() -> socket.socket:
    """Bind a free port for the rendezvous, which `accel launch` of the first node inherits."""
    return bind_free_port(PORT, _NUM_PORTS)


class NodeEnd(NamedTuple):
    """The end of `accel launch` on a node."""

    code: int
    """The exit code; 128 + n if signal n ended it."""
    reason: str = ""
    """The reason of a failure; empty if the run ended on another node."""

    def describe(self) -> str:
        """Return the failure in one line."""
        return self.reason.partition("\n")[0] or f"accel launch ended with exit code {self.code}"


def get_failure_order(end: NodeEnd | None, ended_at: float) -> tuple[bool, float]:
    """Return the order of a failed node: the root cause has the lowest.

    Args:
        end: The end of its `accel launch`; None if the node was lost.
        ended_at: The time of its end.
    """
    is_cause = end is None or bool(end.reason)
    return not is_cause, ended_at


class NodeLaunch:
    """One `accel launch`, for the process that starts it on a node and reports its end.

    Args:
        failure_file: The file for the reason of a failure; None takes a temporary one.
    """

    def __init__(self, failure_file: Path | None = None) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        """The process of `accel launch`; None until it has started."""
        self._port: socket.socket | None = None
        self._failure_file, self._scratch = failure_file, ""

    def reserve_port(self) -> int:
        """Return a port for the rendezvous, reserved until `accel launch` of the first node listens on it."""
        self._port = bind_rendezvous_port()
        return int(self._port.getsockname()[1])

    def start(
        self,
        command: Sequence[str],
        folder: str | Path,
        environ: Mapping[str, str],
        *,
        serves_rendezvous: bool = False,
        streams: tuple[int | None, int | None] = (subprocess.PIPE, subprocess.STDOUT),
    ) -> subprocess.Popen[bytes]:
        """Start the command, with its output in a pipe unless `streams` has others.

        Args:
            command: The command.
            folder: The working folder.
            environ: The environment, to which the variables of this module are added.
            serves_rendezvous: True if this is the first node of several, and its port is reserved.
            streams: Its standard output and error, as for `subprocess.Popen`.
        """
        if self._failure_file is None:
            self._scratch = tempfile.mkdtemp(prefix="accel-node-")
            self._failure_file = Path(self._scratch, "reason")
        variables, inherited = {**environ, env.FAILURE_FILE: str(self._failure_file)}, []
        if self._port and serves_rendezvous:
            inherited = [self._port.fileno()]
            variables[env.RDZV_SOCKET] = str(self._port.fileno())
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=variables,
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            stdout=streams[0],
            stderr=streams[1],
            start_new_session=True,
        )
        if self._port:
            self._port.close()
        return self.process

    def send_signal(self, number: int) -> None:
        """Send a signal to `accel launch`, which passes it on to its processes, if it runs."""
        # Without Popen.poll, which would reap it while `wait` does.
        if self.process and self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def wait(self) -> NodeEnd:
        """Wait for the end of `accel launch`, and return it."""
        assert self.process
        assert self._failure_file
        while os.getpid() == 1 and self.process.returncode is None:
            # The kernel makes process 1 the parent of all orphans, which it reaps too.
            pid, status = os.wait()
            if pid == self.process.pid:
                self.process.returncode = os.waitstatus_to_exitcode(status)
        code, file = self.process.wait(), self._failure_file
        reason = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        self.remove_files()
        return NodeEnd(code if code >= 0 else 128 - code, reason)

    def remove_files(self) -> None:
        """Remove the temporary files."""
        shutil.rmtree(self._scratch, ignore_errors=True)
