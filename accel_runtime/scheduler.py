"""Prepared schedulers under the module path of Accelerate."""

from accel_runtime.training.scheduler import *  # noqa: F403
