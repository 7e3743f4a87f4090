"""Functions of `accel_runtime.compat.imports` under the module path of Accelerate."""

from accel_runtime.compat.imports import *  # noqa: F403
