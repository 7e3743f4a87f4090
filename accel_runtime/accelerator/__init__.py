"""The `Accelerator`, and what scripts call beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_runtime.accelerator.accelerator import Accelerator as Accelerator

__all__ = ["Accelerator"]


def __getattr__(name: str) -> Any:
    # On first use: modules of this package are imported without the class.
    if name != "Accelerator":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from accel_runtime.accelerator.accelerator import Accelerator  # noqa: PLC0415

    return Accelerator
