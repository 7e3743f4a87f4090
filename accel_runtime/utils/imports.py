"""Functions of `accel_runtime.accelerate.imports` under the module path of Accelerate."""

from accel_runtime.accelerate.imports import *  # noqa: F403
