"""XLA devices in the table of devices; torch_xla is imported when one is used, which takes seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_runtime.backends.base import Backend
    from accel_runtime.environment.settings import Settings
    from accel_runtime.environment.topology import Topology

__all__ = ["XlaDevices"]


class XlaDevices:
    """The functions of `accel_runtime/extensions/xla/backend.py`."""

    @staticmethod
    def connect(settings: Settings, topology: Topology, options: dict[str, Any]) -> Backend:
        """Connect this replica; raise ValueError if the settings shard a model over torch.distributed."""
        if engine := settings.engine:
            raise ValueError(
                f"{engine.name}: is not supported on XLA devices. Remove it, or set launcher.spmd: true to shard a model over the XLA "
                "devices of a machine."
            )
        if not settings.parallel.plain:
            raise ValueError(
                "parallel: and fully_shard: are not supported on XLA devices: they shard models over torch.distributed. Remove them, "
                "or set launcher.spmd: true to shard a model over the XLA devices of a machine."
            )
        from accel_runtime.extensions.xla import backend  # noqa: PLC0415

        return backend.connect(settings, topology, options)

    @staticmethod
    def read_topology(settings: Settings, topology: Topology) -> Topology:
        """Return rank and world size of this replica; with SPMD, those of its process."""
        if settings.spmd:
            return topology
        from accel_runtime.extensions.xla import backend  # noqa: PLC0415

        return backend.read_topology(topology)

    @staticmethod
    def seed_device(settings: Settings, seed: int) -> None:
        """Seed the generator of this replica's device."""
        from accel_runtime.extensions.xla import backend  # noqa: PLC0415

        backend.seed_device(settings, seed)
