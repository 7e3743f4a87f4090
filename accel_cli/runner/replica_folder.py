"""What a replica leaves in the run's folder: that it is there, and how it failed."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_cli.runner import worker

__all__ = ["COUNT", "THREAD", "ReplicaFolder", "died"]

COUNT = "replicas"
"""The file whose appearance says that a replica is there; it holds how many there are."""
THREAD = "thread"
"""The file that says which thread of its process a replica is, as faulthandler names it."""
_PATIENCE_S = 30.0
_PERIOD_S = 0.02


@dataclass(frozen=True)
class ReplicaFolder:
    """The folder of one replica, beside that of the process that started them.

    Args:
        host: The file in which the launcher looks for the failure of this machine.
        rank: Of the replica.
        size: The number of replicas on all machines.
    """

    host: Path
    rank: int
    size: int

    @property
    def path(self) -> Path:
        """The folder."""
        return self.host.parent.parent / f"rank_{self.rank}"

    @property
    def error(self) -> Path:
        """Where its failure goes."""
        return self.path / "error.json"

    @property
    def about(self) -> dict[str, Any]:
        """What is said of the replica beside its failure."""
        return {"rank": self.rank, "replicas": self.size, "pid": os.getpid()}

    def announce(self, thread: int | None) -> None:
        """Say that the replica is there, and wait until the launcher has said where it prints."""
        self.path.mkdir(exist_ok=True)
        (self.path / "pid").write_text(str(os.getpid()))
        if thread is not None:
            (self.path / THREAD).write_text(f"0x{thread:016x}")
        fresh = self.path / f"{COUNT}.new"
        fresh.write_text(str(self.size))
        fresh.replace(self.path / COUNT)
        late = time.monotonic() + _PATIENCE_S
        # It is the second of the two that the launcher leaves.
        while not os.path.lexists(self.path / "stderr") and time.monotonic() < late:
            time.sleep(_PERIOD_S)

    def blame(self) -> None:
        """Make what this replica left the failure of its machine, unless another's is already."""
        with suppress(OSError):
            os.link(self.error, self.host)

    def failed(self, error: BaseException) -> int:
        """Record what the script raised; the exit code that belongs to it."""
        worker.record(error, self.error, **self.about)
        self.blame()
        code = error.code if isinstance(error, SystemExit) else 1
        return code if isinstance(code, int) else 1


def died(host: Path, pid: int, exitcode: int) -> None:
    """Record that a process of replicas ended without a word, unless a failure is known."""
    if host.exists():
        return
    folders = [file.parent for file in host.parent.parent.glob("rank_*/pid") if file.read_text() == str(pid)]
    numbers = sorted(int(folder.name.partition("_")[2]) for folder in folders)
    said: dict[str, Any] = {"time": time.time(), "raised": [], "pid": pid, "exitcode": exitcode}
    if exitcode > 0:
        said["exit"] = exitcode
    message = {"message": "", "extraInfo": {"py_callstack": "", "timestamp": str(int(time.time()))}}
    if numbers:
        folder = host.parent.parent / f"rank_{numbers[0]}"
        said |= {"rank": numbers[0], "replicas": int((folder / COUNT).read_text())}
    host.write_text(json.dumps({"message": message, "accel": said}), encoding="utf-8")
