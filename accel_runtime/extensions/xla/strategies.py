"""The strategies of XLA devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_runtime.backends.base import Backend
    from accel_runtime.environment.settings import Settings
    from accel_runtime.parallel.strategy import Strategy

__all__ = ["choose_strategy"]


def choose_strategy(backend: Backend, _settings: Settings) -> Strategy:
    """Return the strategy of a backend with an XLA device."""
    from accel_runtime.extensions.xla.backend import XLABackend  # noqa: PLC0415 - needs torch_xla
    from accel_runtime.extensions.xla.replicas import Replicas, SingleReplica  # noqa: PLC0415
    from accel_runtime.extensions.xla.runtime import SPMDRuntime  # noqa: PLC0415
    from accel_runtime.extensions.xla.spmd_strategy import ShardedOverDevices  # noqa: PLC0415

    if isinstance(backend.runtime, SPMDRuntime):
        return ShardedOverDevices(backend, backend.runtime.sharding)
    return Replicas(backend) if isinstance(backend, XLABackend) else SingleReplica(backend)
