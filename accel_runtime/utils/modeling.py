"""Names of Accelerate's `utils.modeling`, which are taken from the installed package."""

from typing import Any

from accel_runtime.accelerate.package import import_from_accelerate

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    return import_from_accelerate(__name__, name)
