"""What lets several replicas of torch_xla's CPU device meet in collectives: for tests only.

There, replicas are threads of one process. XLA's CPU client lets those meet in a collective that run the same
executable, and each thread compiles one of its own, unless another has compiled the same graph before: so threads come
to the point where graphs are sent off one after the other. Without this every collective aborts the process after ten
seconds (pytorch/xla issues 5005 and 9089).
"""

from __future__ import annotations

import functools
import os
import threading

PATIENCE_S = 120


def prepare(environ, replicas):
    """The variables that several replicas need; to be set before torch_xla is loaded."""
    threads = str(2 * max(replicas, os.cpu_count() or 1))
    # A pool with fewer threads than replicas would never run them all at once.
    environ |= {"XLA_THREAD_POOL_SIZE": threads, "PJRT_NPROC": threads}
    # A buffer that is given to the result is held until the run is over, and its owner waits for that in his turn.
    environ["XLA_ENABLE_PARAM_ALIASING"] = "0"


def install(replicas):
    """Make graphs be sent off in turns; once in a process, before replicas start."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    core = torch_xla._XLAC
    all_here = threading.Barrier(replicas)
    turn = threading.Lock()

    def in_turn(send):
        all_here.wait(PATIENCE_S)
        try:
            with turn:
                return send()
        finally:
            # Whoever went on would free what the others still run on, with the interpreter's lock in hand.
            all_here.wait(PATIENCE_S)

    def instead(name, waits):
        original = getattr(core, name)

        @functools.wraps(original)
        def sent(*args, wait=waits, **options):
            in_turn(lambda: original(*args, wait=False, **options))
            if wait:
                core._xla_wait_device_ops([])

        setattr(core, name, sent)

    instead("_xla_step_marker", False)
    instead("_xla_sync_multi", True)
    xm.all_gather = functools.partial(_unpinned, xm.all_gather)


def _unpinned(all_gather, *args, pin_layout=True, **options):
    # Pinned, it is a sum over zeros, and every replica has a graph of its own.
    return all_gather(*args, pin_layout=False, **options)
