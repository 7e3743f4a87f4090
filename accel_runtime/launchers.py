"""Launchers of functions under the module path of Accelerate."""

from accel_runtime.notebook import *  # noqa: F403
