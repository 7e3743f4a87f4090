"""Functions of `accel_runtime.accelerate.other` under the module path of Accelerate."""

from accel_runtime.accelerate.other import *  # noqa: F403
from accel_runtime.accelerate.other import __all__  # noqa: F401
from accel_runtime.accelerate.package import build_getattr

__getattr__ = build_getattr(__name__)
