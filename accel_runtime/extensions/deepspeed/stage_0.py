"""ZeRO stage 0: replicas that are averaged by DDP, and clipped if the configuration says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.extensions.deepspeed.configuration import check_batch_sizes, describe_configuration
from accel_runtime.extensions.deepspeed.settings import DeepSpeedConfig
from accel_runtime.parallel.ddp import DDPStrategy
from accel_runtime.parallel.strategy import ModelRequest, Placeholder

__all__ = ["DDPWithClipping"]


class DDPWithClipping(DDPStrategy):
    """DDP whose optimizers clip their gradients before each step.

    ZeRO stage 0 shards nothing. DeepSpeed's own engine is not used for it: it scales fp16 gradients of torch's optimizers by a loss
    scale that no loss was multiplied by (0.19.8), and cannot run `loss.backward()`.

    Args:
        backend: Ranks and device.
        config: The configuration of DeepSpeed.
    """

    def __init__(self, backend: Backend, config: DeepSpeedConfig) -> None:
        super().__init__(backend)
        self._config = config
        self._filled: dict[str, Any] = {}
        self._max_norm = float(config.get("gradient_clipping", 0.0))

    @override
    def configure(self, configuration: Any) -> None:
        if not isinstance(configuration, DeepSpeedConfig):
            super().configure(configuration)
        config: DeepSpeedConfig = configuration
        if config.stage:
            raise ValueError(
                f"Cannot select ZeRO stage {config.stage} ({config.sources.get('zero_optimization.stage', 'the configuration')}): the "
                "Accelerator uses stage 0. Make another Accelerator in another process, or use stage 0."
            )
        self._config = config
        self._max_norm = float(config.get("gradient_clipping", 0.0))

    @override
    def describe_options(self) -> Mapping[str, tuple[Any, str]]:
        return describe_configuration(self._config, {}, self._filled)

    @override
    def check_batch_sizes(self, batch_sizes: Sequence[int], step_sizes: Sequence[int]) -> None:
        check_batch_sizes(self._config, batch_sizes, step_sizes, self._filled)

    @override
    def prepare(
        self,
        models: Sequence[ModelRequest] = (),
        optimizers: Sequence[torch.optim.Optimizer] = (),
        schedulers: Sequence[LRScheduler] = (),
    ) -> list[nn.Module]:
        if self._config.get("optimizer.type") or self._config.get("scheduler.type"):
            from accel_runtime.extensions.deepspeed.configured_optimizers import refuse_unconfigured  # noqa: PLC0415 - needs deepspeed

            refuse_unconfigured(optimizers, schedulers, self._config)
        return super().prepare(models, optimizers, schedulers)

    @override
    def resolve_placeholders(self, placeholders: Sequence[Placeholder], num_batches: int) -> list[Any]:
        from accel_runtime.extensions.deepspeed.configured_optimizers import build_configured  # noqa: PLC0415 - needs deepspeed

        return build_configured(placeholders, self._config, num_batches, self._filled)

    @override
    def step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None
    ) -> float | None:
        if self._max_norm and closure is None:
            parameters = [p for group in self.list_parameter_groups(optimizer) for p in group]
            self.gradients.clip_norm(parameters, self._max_norm, 2.0)
        return super().step(optimizer, closure)
