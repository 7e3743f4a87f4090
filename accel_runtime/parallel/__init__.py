"""Strategies: replicas, shards, DeepSpeed's ZeRO, and those of XLA devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_runtime.backends.base import Backend
    from accel_runtime.environment.settings import Settings
    from accel_runtime.parallel.strategy import Strategy

__all__ = ["choose_strategy"]


def choose_strategy(backend: Backend, settings: Settings, engine_config: Any = None) -> Strategy:
    """Return what happens to the models of a run; modules of other strategies are not imported.

    `engine_config` is the `EngineConfig` of the engine, if one is used; by default that of the settings.
    """
    if settings.device == "xla":
        from accel_runtime.extensions.xla import strategies as xla  # noqa: PLC0415 - needs torch_xla

        return xla.choose_strategy(backend)
    if settings.engine:
        from accel_runtime.extensions import deepspeed  # noqa: PLC0415 - needs deepspeed

        return deepspeed.choose_strategy(backend, settings, engine_config)
    if not settings.parallel.plain:
        from accel_runtime.parallel.fully_shard import Sharded  # noqa: PLC0415 - loads slowly

        return Sharded(backend, settings)
    from accel_runtime.parallel.replicated import Replicated  # noqa: PLC0415 - submodules of this package are imported alone

    return Replicated(backend)
