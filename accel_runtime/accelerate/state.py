"""Accelerate's own `PartialState` has the ranks and the device of accel, for libraries that look at it.

Losses of transformers for detection and segmentation average their counts of boxes over the ranks only if it is filled, and
loggers of Accelerate raise an error if it is not.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from accel_runtime.backends.base import Backend
from accel_runtime.observe.import_hooks import call_after_import

__all__ = ["share_backend"]

_STATE = "accelerate.state"
_MODELS = ("eomt", "eomt_dinov3", "mask2former", "maskformer", "oneformer", "videomt")
_LOSSES = (
    "transformers.loss.loss_for_object_detection",
    *(f"transformers.models.{name}.modeling_{name}" for name in _MODELS),
)
"""The modules of transformers 5.23 that average counts over the ranks."""
_FILLED = threading.local()
"""The device in the state that this thread has filled: where replicas can be threads, Accelerate has a state for each."""


def share_backend(find_backend: Callable[[], Backend | None]) -> None:
    """Fill Accelerate's state from the backend of this thread, or clear it if there is none any more.

    If a script or library has created the state itself, it stays. Importing Accelerate takes a second, so that the state
    waits until a library imports it.
    """
    if _STATE in sys.modules:
        _update_state(sys.modules[_STATE], find_backend())
    _watch_imports(find_backend)


@functools.cache
def _watch_imports(find_backend: Callable[[], Backend | None]) -> None:
    call_after_import(_STATE, lambda module: _update_state(module, find_backend()))
    call_after_import(_LOSSES, _sum_counts)


def _update_state(module: ModuleType, backend: Backend | None) -> None:
    state = getattr(module, "PartialState", None)
    if state is None:  # a module of the script that has this name
        return
    shared: dict[str, Any] = state._shared_state  # noqa: SLF001 - what libraries look at
    if shared and shared.get("device") is not getattr(_FILLED, "device", None):
        return
    shared.clear()
    if backend is not None:
        shared.update(_list_attributes(backend, module.DistributedType))
        _FILLED.device = shared["device"]


def _list_attributes(backend: Backend, kinds: Any) -> dict[str, Any]:
    """Return the attributes of `PartialState`, as Accelerate 1.15 has them.

    Its constructor would choose them by environment variables, and set variables and the number of threads.
    """
    return {
        "_cpu": backend.device.type == "cpu",
        "backend": backend.collective_backend,
        "debug": False,
        "device": backend.device,
        "distributed_type": kinds(backend.distributed_type.value),
        "fork_launched": False,
        "local_process_index": backend.topology.local_rank,
        "num_processes": backend.topology.world_size,
        "process_index": backend.topology.rank,
    }


def _sum_counts(module: ModuleType) -> None:
    """Make the losses of a module sum their counts over the ranks before they divide by the number of ranks.

    They call `reduce` of Accelerate without an argument, whose default is the mean, so that N ranks divide twice, and losses of
    boxes and masks are N times those of one rank.
    """
    reduce = getattr(module, "reduce", None)
    if reduce is None:  # without Accelerate
        return

    @functools.wraps(reduce)
    def reduce_by_sum(tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        return reduce(tensor, reduction, scale)

    module.reduce = reduce_by_sum  # type: ignore[attr-defined]
