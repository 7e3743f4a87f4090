"""Building models without memory under the module path of Accelerate."""

from typing import Any

from accel_runtime.accelerate.package import import_from_accelerate
from accel_runtime.parallel.big_modeling import *  # noqa: F403
from accel_runtime.parallel.big_modeling import __all__  # noqa: F401


def __getattr__(name: str) -> Any:
    return import_from_accelerate(__name__, name)
