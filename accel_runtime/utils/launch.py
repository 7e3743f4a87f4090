"""Functions of `accel_runtime.compat.launch` under the module path of Accelerate."""

from accel_runtime.compat.launch import *  # noqa: F403
