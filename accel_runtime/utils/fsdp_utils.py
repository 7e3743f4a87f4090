"""Functions of `accel_runtime.accelerate.fsdp_utils` under the module path of Accelerate."""

from accel_runtime.accelerate.fsdp_utils import *  # noqa: F403
