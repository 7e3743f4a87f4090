"""Functions of `accel_runtime.compat.other` under the module path of Accelerate."""

from accel_runtime.compat.other import *  # noqa: F403
