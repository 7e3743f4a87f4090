"""Let several replicas of torch_xla's CPU device run collectives: for tests only.

Replicas are threads of one process. XLA's CPU client runs a collective between threads with the same executable, but
each thread compiles its own, unless another thread has compiled the same graph before: therefore the threads execute
graphs one after the other. Without this, every collective aborts the process after ten seconds (pytorch/xla issues 5005
and 9089).
"""

from __future__ import annotations

import functools
import os
import threading

PATIENCE_S = 120


def prepare(environ, replicas):
    """Set the variables that several replicas need, before torch_xla is loaded."""
    threads = str(2 * max(replicas, os.cpu_count() or 1))
    # A pool with fewer threads than replicas would never run them all at once.
    environ |= {"XLA_THREAD_POOL_SIZE": threads, "PJRT_NPROC": threads}
    # A buffer donated to the result is locked until the execution ends, and its owner would wait for that in its turn.
    environ["XLA_ENABLE_PARAM_ALIASING"] = "0"


def install(replicas):
    """Execute graphs in turns; called once in a process, before the replicas start."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    core = torch_xla._XLAC
    barrier = threading.Barrier(replicas)
    turn = threading.Lock()

    def send_in_turn(send):
        barrier.wait(PATIENCE_S)
        try:
            with turn:
                return send()
        finally:
            # A thread that continued would free buffers of the other threads while it holds the interpreter's lock.
            barrier.wait(PATIENCE_S)

    def replace(name, waits_by_default):
        original = getattr(core, name)

        @functools.wraps(original)
        def send_serialized(*args, wait=waits_by_default, **options):
            send_in_turn(lambda: original(*args, wait=False, **options))
            if wait:
                core._xla_wait_device_ops([])

        setattr(core, name, send_serialized)

    replace("_xla_step_marker", False)
    replace("_xla_sync_multi", True)
    xm.all_gather = functools.partial(_unpinned, xm.all_gather)


def _unpinned(all_gather, *args, pin_layout=True, **options):
    # With a pinned layout it is a sum over zeros, and every replica has a different graph.
    return all_gather(*args, pin_layout=False, **options)
