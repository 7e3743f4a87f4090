"""The first process of a container: unpacks accel, starts its host, passes signals on, and ends as the host ends.

Standard library only, and run by path, as there is no accel before it has unpacked one. It stands in
`ROOT/input/data/accel/`, beside the other files of the job, and so knows its ROOT: `/opt/ml` on the platform.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tarfile
from pathlib import Path
from types import FrameType

__all__ = ["main"]

_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_PYTHON = (3, 10)
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def main(root: Path) -> int:
    """Run the job on this host; its exit code, 128 + n where signal n ended it."""
    first, host = _First(), _host(root)
    if problem := _problem(root):
        _reason(root, f"{host}: {problem}")
        code = 1
    else:
        file = root / "accel" / "accel_cli" / "container" / "host.py"
        code = first.run([sys.executable, str(file), str(root)])
    if code < 0 and not first.told:
        killed = f"the launcher was ended by {_name(-code)}: SIGKILL is often the out-of-memory killer"
        _reason(root, f"{host}: {killed}")
    code = code if code >= 0 else 128 - code
    # Whoever follows the logs of all hosts knows by this line that the log of this one is whole.
    print(f"accel: {host} ended with exit code {code}", flush=True)  # noqa: T201 - it is its output
    return code


class _First:
    """The process whose signals are the container's: the kernel hands a first process none that it does not handle."""

    def __init__(self) -> None:
        self.told: list[int] = []
        """The signals that came."""
        self._child = 0
        for number in _SIGNALS:
            signal.signal(number, self._pass_on)

    def run(self, argv: list[str]) -> int:
        """Run a program; its exit code, -n where signal n ended it."""
        if self.told:
            return -self.told[0]
        # Not subprocess, which would have to be asked about each process that is reaped here.
        self._child = os.posix_spawn(argv[0], argv, os.environ, setsigdef=_IGNORED_BY_PYTHON)
        for number in self.told:
            os.kill(self._child, number)
        while True:
            # What other processes leave behind becomes a child of the first process.
            pid, status = os.wait()
            if pid == self._child:
                self._child = 0
                return os.waitstatus_to_exitcode(status)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self.told.append(number)
        # It may have been reaped just now, before `run` knows.
        with contextlib.suppress(ProcessLookupError):
            if self._child:
                os.kill(self._child, number)


def _problem(root: Path) -> str:
    """Unpack accel; what keeps it from running here."""
    if sys.version_info < _PYTHON:
        return f"this image has Python {sys.version.split()[0]}, and accel needs 3.10 or newer: choose another (launcher.image_uri)"
    try:
        _unpack(root)
    except (OSError, EOFError, ValueError, KeyError, tarfile.TarError) as error:
        return f"accel cannot be unpacked: {error}. The upload may be broken; launch again."
    return ""


def _unpack(root: Path) -> None:
    bundle, folder = Path(__file__).parent, root / "accel"
    version = json.loads((bundle / "job.json").read_text(encoding="utf-8"))["accel"]
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(bundle / "accel.tar.gz") as archive:
        # Made by `accel launch` from its own two packages. Pythons of 3.14 on need no word for it.
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, filter="data")
        else:
            archive.extractall(folder)  # noqa: S202
    # With it accel is installed, for who asks for its version.
    about = folder / f"accel-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: accel\nVersion: {version}\n", encoding="utf-8"
    )


def _host(root: Path) -> str:
    try:
        said = (root / "input" / "config" / "resourceconfig.json").read_text(encoding="utf-8")
        return str(json.loads(said)["current_host"])
    except (OSError, ValueError, KeyError):
        return socket.gethostname()


def _reason(root: Path, text: str) -> None:
    """Say it, and leave it where the platform looks for the reason of a failure."""
    sys.stderr.write(f"accel: error: {text}\n")
    file = root / "output" / "failure"
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            file.write_text(text, encoding="utf-8")


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[3]))
