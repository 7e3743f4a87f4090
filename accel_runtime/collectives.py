"""What processes do together with data: the one place other files import it from."""

from __future__ import annotations

from accel_runtime.exchange.agreement import MismatchError, RankLostError, StallError
from accel_runtime.exchange.samples import broadcast_object_list, gather_object, gather_valid, scatter_object
from accel_runtime.exchange.tensors import broadcast, gather, pad_across_processes, reduce

__all__ = [
    "MismatchError",
    "RankLostError",
    "StallError",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "gather_valid",
    "pad_across_processes",
    "reduce",
    "scatter_object",
]
