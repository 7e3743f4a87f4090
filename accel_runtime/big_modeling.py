"""The module that scripts import functions of `accel_runtime.initializing` from, as in Accelerate."""

from accel_runtime.initializing import init_empty_weights, init_on_device

__all__ = ["init_empty_weights", "init_on_device"]
