"""Functions of `accel_runtime.compat.environment` under the module path of Accelerate."""

from accel_runtime.compat.environment import *  # noqa: F403
