"""`LocalSGD` under the module path of Accelerate."""

from accel_runtime.accelerator.local_sgd import *  # noqa: F403
