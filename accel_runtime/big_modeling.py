"""Building models without memory under the module path of Accelerate."""

from accel_runtime.parallel.big_modeling import *  # noqa: F403
