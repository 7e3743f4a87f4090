"""Strategies: replicas, shards, and those of the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from accel_runtime.environment.registry import Registry

if TYPE_CHECKING:
    from accel_runtime.backends.base import Backend
    from accel_runtime.environment.engines import EngineConfig
    from accel_runtime.environment.settings import Settings
    from accel_runtime.parallel.strategy import Strategy

__all__ = ["STRATEGIES", "choose_strategy"]

STRATEGIES: Registry[Callable[..., Strategy]] = Registry(
    {
        "xla": "accel_runtime.extensions.xla.strategies:choose_strategy",
        "deepspeed": "accel_runtime.extensions.deepspeed:choose_strategy",
    },
)
"""Functions that choose the strategy of a backend, by the device or the engine of the settings."""


def choose_strategy(
    backend: Backend, settings: Settings, engine_config: EngineConfig | None = None
) -> Strategy:
    """Return what happens to the models of a run; modules of other strategies are not imported.

    `engine_config` is that of the engine, if one is used; by default that of the settings.
    """
    if settings.device in STRATEGIES.names:
        return STRATEGIES[settings.device](backend, settings)
    if settings.engine:
        return STRATEGIES[settings.engine.name](backend, settings, engine_config)
    if not settings.parallel.plain:
        from accel_runtime.parallel.fully_shard import FullyShardStrategy  # noqa: PLC0415 - loads slowly

        return FullyShardStrategy(backend, settings)
    from accel_runtime.parallel.ddp import DDPStrategy  # noqa: PLC0415 - submodules of this package are imported alone

    return DDPStrategy(backend)
