"""Functions of `accel_runtime.parallel.meta_init` under the name of Accelerate's `big_modeling`."""

from accel_runtime.parallel.meta_init import init_empty_weights, init_on_device

__all__ = ["init_empty_weights", "init_on_device"]
