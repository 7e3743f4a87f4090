"""`accel launch` on a node that ssh or Ray reaches: the port of its rendezvous, its variables, and its end."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from accel_cli.planning.network import bind_free_port
from accel_cli.planning.nodes import PORT
from accel_runtime.environment import settings as env

__all__ = ["NodeLaunch", "find_problem"]

_NUM_PORTS = 100


class NodeLaunch:
    """One `accel launch`, for the process that starts it on a node and reports its end."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        """The process of `accel launch`; None until it has started."""
        self._scratch = ""
        self._port = bind_free_port(PORT, _NUM_PORTS)
        """A socket with the port of the rendezvous, which stays reserved until `accel launch` of the first node listens on it."""

    @property
    def port(self) -> int:
        """The port of the rendezvous, if this is the first node."""
        return int(self._port.getsockname()[1])

    def start(
        self,
        command: Sequence[str],
        folder: str | Path,
        environ: Mapping[str, str],
        *,
        serves_rendezvous: bool,
        stderr: int = subprocess.STDOUT,
    ) -> subprocess.Popen[bytes]:
        """Start the command, with its output in a pipe."""
        self._scratch = tempfile.mkdtemp(prefix="accel-node-")
        variables = {**environ, env.FAILURE_FILE: str(self._reason_file)}
        if serves_rendezvous:
            variables[env.RDZV_SOCKET] = str(self._port.fileno())
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=variables,
            pass_fds=[self._port.fileno()] if serves_rendezvous else [],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
        self._port.close()
        return self.process

    def send_signal(self, number: int) -> None:
        """Send a signal to `accel launch`, which passes it on to its processes, if it runs."""
        if self.process and self.process.poll() is None:
            self.process.send_signal(number)

    def wait(self) -> tuple[int, str]:
        """Wait for the end, and return the exit code and the reason of a failure."""
        assert self.process
        code, file = self.process.wait(), self._reason_file
        reason = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        self.remove_files()
        return code if code >= 0 else 128 - code, reason

    def remove_files(self) -> None:
        """Remove the temporary files."""
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def _reason_file(self) -> Path:
        return Path(self._scratch, "reason")


def find_problem(folder: str | Path, script: str | None) -> str:
    """Return why a script cannot run in a folder of this node; empty if it can."""
    if not Path(folder).is_dir():
        return f"folder not found: {folder}"
    if not os.access(folder, os.X_OK):
        return f"cannot enter the folder {folder}: permission denied"
    if script is not None and not Path(folder, script).is_file():
        return f"script not found: {Path(folder, script)}"
    return ""
