"""Loggers of several processes under the module path of Accelerate."""

from accel_runtime.monitoring.logging import *  # noqa: F403
