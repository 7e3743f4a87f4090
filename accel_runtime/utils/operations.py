"""Functions of `accel_runtime.accelerate.operations` under the module path of Accelerate."""

from accel_runtime.accelerate.operations import *  # noqa: F403
from accel_runtime.accelerate.operations import __all__  # noqa: F401
from accel_runtime.accelerate.package import build_getattr

__getattr__ = build_getattr(__name__)
