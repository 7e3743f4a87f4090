"""DeepSpeed's ZeRO as a strategy; the one package that imports deepspeed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_runtime.backends.base import Backend
    from accel_runtime.environment.settings import Settings
    from accel_runtime.extensions.deepspeed.settings import DeepSpeedConfig
    from accel_runtime.parallel.strategy import Strategy

__all__ = ["choose_strategy"]


def choose_strategy(backend: Backend, settings: Settings, config: DeepSpeedConfig | None = None) -> Strategy:
    """Return the strategy of the ZeRO stage that a configuration chooses: by default that of the settings and their file.

    Raises:
        SettingsError: The options contradict each other, or the JSON file has keys that are not supported.
        RuntimeError: deepspeed is not installed, or does not run here.
    """
    from accel_runtime.extensions.deepspeed.settings import DeepSpeed, read_deepspeed_config  # noqa: PLC0415 - as in the other strategies
    from accel_runtime.extensions.deepspeed.stage_0 import DDPWithClipping  # noqa: PLC0415

    config = config or read_deepspeed_config(DeepSpeed.of(settings))
    if not config.stage:
        return DDPWithClipping(backend, config)
    from accel_runtime.extensions.deepspeed.strategy import DeepSpeedStrategy  # noqa: PLC0415 - needs deepspeed

    return DeepSpeedStrategy(
        backend, config, settings.mixed_precision, zero3_init=DeepSpeed.of(settings).zero3_init
    )
