"""Functions of `accel_runtime.compat.fsdp_utils` under the module path of Accelerate."""

from accel_runtime.compat.fsdp_utils import *  # noqa: F403
