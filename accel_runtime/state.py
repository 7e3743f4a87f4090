"""State objects under the module path of Accelerate."""

from accel_runtime.accelerator.state import *  # noqa: F403
