"""Functions of `accel_runtime.accelerator.operations` under the module path of Accelerate."""

from accel_runtime.accelerator.operations import *  # noqa: F403
