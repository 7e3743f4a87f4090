"""Functions of `accel_runtime.accelerate.other` under the module path of Accelerate."""

from typing import Any

from accel_runtime.accelerate.other import *  # noqa: F403
from accel_runtime.accelerate.other import __all__  # noqa: F401
from accel_runtime.accelerate.package import import_from_accelerate


def __getattr__(name: str) -> Any:
    return import_from_accelerate(__name__, name)
