"""Torch's record of its collectives, the Flight Recorder, written when the launcher asks for it. Standard library only.

The main thread may wait in a collective, in C, so that another thread writes the record.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from accel_runtime.observe.import_hooks import call_after_torch_import
from accel_runtime.observe.request_pipes import serve_requests

__all__ = ["TRACE_FILE", "TRACE_REQUEST_FILE", "serve_trace_requests", "write_trace"]

TRACE_REQUEST_FILE, TRACE_FILE = "trace_request", "collectives.json"
"""The pipe, and the file of the record, in the folder of a rank."""


def serve_trace_requests(folder: Path) -> None:
    """Write the record of this process to its folder at each request, once it has imported torch."""

    def serve(_: ModuleType) -> None:
        serve_requests(folder / TRACE_REQUEST_FILE, lambda: write_trace(folder))

    call_after_torch_import(serve)


def write_trace(folder: Path) -> None:
    """Write the record to the folder of the rank; without `torch.distributed`, an empty one."""
    library = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(library, "_dump_fr_trace_json", None) or getattr(library, "_dump_nccl_trace_json", None)
    text = b"{}" if dump is None else dump(True, False)
    new = folder / f"{TRACE_FILE}.new"
    new.write_bytes(text.encode() if isinstance(text, str) else text)
    new.replace(folder / TRACE_FILE)
