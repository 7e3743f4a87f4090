"""Building models without memory under the module path of Accelerate."""

from accel_runtime.accelerate.package import build_getattr
from accel_runtime.parallel.big_modeling import *  # noqa: F403
from accel_runtime.parallel.big_modeling import __all__  # noqa: F401

__getattr__ = build_getattr(__name__)
