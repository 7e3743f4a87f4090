"""The `Accelerator`: the object through which a training script uses this library."""

from __future__ import annotations

from accel_runtime.accelerator.accelerator import Accelerator

__all__ = ["Accelerator"]
