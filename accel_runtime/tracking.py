"""Trackers under the module path of Accelerate."""

from accel_runtime.monitoring.tracking import *  # noqa: F403
from accel_runtime.monitoring.tracking import __getattr__  # noqa: F401
