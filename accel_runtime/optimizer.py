"""Prepared optimizers under the module path of Accelerate."""

from accel_runtime.training.optimizer import *  # noqa: F403
