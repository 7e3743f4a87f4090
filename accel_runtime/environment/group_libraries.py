"""Libraries that bring a backend of torch's process group, by its name. Standard library only."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

from accel_runtime.environment.registry import Registry

if TYPE_CHECKING:
    import torch

__all__ = ["GROUP_LIBRARIES", "GroupLibrary"]


class GroupLibrary(Protocol):
    """A library that brings a backend, which must be the only one of the process group."""

    package: ClassVar[str]
    """Its package, which shows that it is installed."""

    @staticmethod
    def register(device: torch.device) -> None:
        """Make the backend known to torch; raise RuntimeError if it cannot be used on a device."""


GROUP_LIBRARIES: Registry[type[GroupLibrary]] = Registry(
    {
        "smddp": "accel_runtime.extensions.sagemaker.process_group:Smddp",
    }
)
