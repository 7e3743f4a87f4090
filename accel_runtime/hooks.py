"""Hooks, which are not supported, under the module path of Accelerate."""

from accel_runtime.compat.hooks import *  # noqa: F403
from accel_runtime.compat.hooks import __getattr__  # noqa: F401
