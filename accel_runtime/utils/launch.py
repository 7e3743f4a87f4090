"""Functions of `accel_runtime.accelerate.launch` under the module path of Accelerate."""

from accel_runtime.accelerate.launch import *  # noqa: F403
