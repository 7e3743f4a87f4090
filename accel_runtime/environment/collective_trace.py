"""Torch's record of its collectives, the Flight Recorder, written when the launcher asks for it. Standard library only.

The main thread may wait in a collective, in C, so that another thread writes the record. It sleeps until a byte arrives in a
pipe of the rank's folder.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path
from types import ModuleType

from accel_runtime.environment.import_hooks import call_after_torch_import

__all__ = ["REQUEST_FILE", "TRACE_FILE", "serve_trace_requests", "write_trace"]

REQUEST_FILE, TRACE_FILE = "trace_request", "collectives.json"
"""The pipe, and the file of the record, in the folder of a rank."""
_FIRST_DESCRIPTOR = 1000
"""A script that closes all files and opens others gets lower numbers."""


def serve_trace_requests(folder: Path) -> None:
    """Write the record of this process to its folder at each request, once it has imported torch."""

    def start(_: ModuleType) -> None:
        with contextlib.suppress(OSError):  # no pipes on this file system, or a low limit on open files
            os.mkfifo(folder / REQUEST_FILE)
            # For writing too: a pipe without writers is at its end.
            opened = os.open(folder / REQUEST_FILE, os.O_RDWR | os.O_CLOEXEC)
            pipe = _move_descriptor(opened)
            threading.Thread(target=_serve, args=(pipe, folder), name="accel-trace", daemon=True).start()

    call_after_torch_import(start)


def _move_descriptor(descriptor: int) -> int:
    """Return a copy of a descriptor with a high number, which replaces it."""
    import fcntl  # noqa: PLC0415 - not on all systems

    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_DESCRIPTOR)
    finally:
        os.close(descriptor)


def _serve(pipe: int, folder: Path) -> None:
    identity = os.fstat(pipe).st_ino
    with contextlib.suppress(OSError):  # the script has closed the pipe, or the folder is gone
        # Not from a file that the script has opened under this number since.
        while os.fstat(pipe).st_ino == identity and os.read(pipe, 1):
            write_trace(folder)


def write_trace(folder: Path) -> None:
    """Write the record to the folder of the rank; without `torch.distributed`, an empty one."""
    library = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(library, "_dump_fr_trace_json", None) or getattr(library, "_dump_nccl_trace_json", None)
    text = b"{}" if dump is None else dump(True, False)
    new = folder / f"{TRACE_FILE}.new"
    new.write_bytes(text.encode() if isinstance(text, str) else text)
    new.replace(folder / TRACE_FILE)
