"""Wait for threads of libraries that end their work a moment after the call that caused it. Standard library only."""

from __future__ import annotations

import functools
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from accel_runtime.observe.import_hooks import call_after_torch_import

__all__ = ["PAUSE_S", "wait_at_group_end", "wait_for_collectives", "wait_for_threads"]

PAUSE_S = 0.002
_EXIT_PAUSE_S, _EXIT_PATIENCE_S = 0.05, 0.5
_GLOO_PATIENCE_S = 60.0
"""With 64 ranks on two cores, a thread that has work is scheduled after seconds."""
_TASKS = Path("/proc/self/task")


def wait_at_group_end() -> None:
    """Make `destroy_process_group` of torch wait for the threads of collectives, once this process has imported torch.

    The last reference to a group may be that of a model, which a function drops when it returns. The main thread then joins
    gloo's threads with the GIL, for which one of them waits: both hang (torch 2.9 to 2.13).
    """
    call_after_torch_import(_wrap_destroy)


def _wrap_destroy(_: ModuleType) -> None:
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None:  # a torch without distributed
        return
    destroy = distributed.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        with suppress(Exception):
            if "gloo" in distributed.get_backend_config(group):
                wait_for_threads(PAUSE_S, _EXIT_PATIENCE_S)
        destroy(group)

    for module in (distributed, sys.modules["torch.distributed"]):
        module.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]


def wait_for_collectives() -> None:
    """Wait at exit until the threads of torch's collectives do not use Python, if a script leaves its process group open.

    gloo's threads release the tensors of the last collective a moment after it returned, and need the GIL for it. If they
    request it while the interpreter shuts down, the process aborts ("terminate called without an active exception"):
    docs/design/leaving-gloo.md has the numbers.
    """
    distributed = sys.modules.get("torch.distributed")
    with suppress(Exception):  # of a torch without distributed, or one that is only partly imported
        if distributed is not None and distributed.is_initialized():
            wait_for_threads(_EXIT_PAUSE_S, _EXIT_PATIENCE_S)


def wait_for_threads(pause_s: float, patience_s: float) -> None:
    """Sleep for `pause_s`, then until no other thread of this process runs.

    Threads of the script may run for ever: they are waited for `patience_s` seconds at most. Those of gloo end their work
    whatever the load is.
    """
    start = time.monotonic()
    time.sleep(pause_s)
    while running := find_running_threads():
        waited = time.monotonic() - start
        if waited > (_GLOO_PATIENCE_S if any("gloo" in name for name in running) else patience_s):
            return
        time.sleep(PAUSE_S)


def find_running_threads() -> list[str]:
    """Return the names of the other threads of this process that are runnable; none if that cannot be read."""
    own = str(threading.get_native_id())
    try:
        return [name for task in _TASKS.iterdir() if task.name != own and (name := _read_running_name(task))]
    except OSError:
        return []


def _read_running_name(task: Path) -> str:
    """Return the name of a thread; empty if it does not run."""
    try:
        stat = (task / "stat").read_text(encoding="ascii", errors="replace")
    except OSError:  # the thread has ended
        return ""
    # "12 (a name) R 1 ...", see proc_pid_stat(5); a name may have brackets of its own.
    before, _, after = stat.rpartition(")")
    return before.partition("(")[2] or "?" if after.lstrip().startswith("R") else ""
