"""Prepared loaders under the module path of Accelerate."""

from accel_runtime.compat.data_loader import *  # noqa: F403
