"""The scale of fp16 losses under ZeRO: deepspeed's dynamic scale, with one value for all engines."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from accel_runtime.extensions.deepspeed.library import DynamicLossScaler
from accel_runtime.extensions.deepspeed.settings import DeepSpeedConfig

__all__ = ["LossScale"]


class LossScale:
    """A scale that decreases when gradients overflow, and increases after steps without an overflow.

    One loss may train several models, so the engines have one scale. It changes when all optimizers of an iteration have stepped,
    at the latest at the next backward pass.

    Args:
        config: The section `fp16` has the options, with deepspeed's names and defaults.
    """

    def __init__(self, config: DeepSpeedConfig) -> None:
        static = float(config.get("fp16.loss_scale", 0))
        self._scaler = DynamicLossScaler(
            init_scale=static or 2.0 ** config.get("fp16.initial_scale_power", 16),
            scale_window=config.get("fp16.loss_scale_window", 1000),
            min_scale=config.get("fp16.min_loss_scale", 1),
            delayed_shift=config.get("fp16.hysteresis", 2),
            consecutive_hysteresis=config.get("fp16.consecutive_hysteresis", False),
            raise_error_at_min_scale=False,
        )
        self._is_static = bool(static)
        self._min_scale = float(config.get("fp16.min_loss_scale", 1))
        self._stepped: set[int] = set()
        self._has_overflowed = False
        self._skips_at_minimum = 0

    @property
    def value(self) -> float:
        """Return the scale."""
        return float(self._scaler.cur_scale)

    def begin_backward(self) -> float:
        """Update the scale if optimizers have stepped since the last backward pass, and return it."""
        if self._stepped:
            self._update()
        return self.value

    def record_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizers: Collection[torch.optim.Optimizer],
        *,
        skipped: bool,
    ) -> None:
        """Record the step of one of the optimizers; equal on all ranks.

        Raises:
            RuntimeError: Gradients overflow with the smallest scale, again and again.
        """
        self._stepped.add(id(optimizer))
        self._has_overflowed |= skipped
        at_minimum = self._is_static or self.value <= self._min_scale
        self._skips_at_minimum = self._skips_at_minimum + 1 if skipped and at_minimum else 0
        if self._skips_at_minimum >= _MAX_SKIPS:
            raise RuntimeError(
                f"Gradients overflowed in {_MAX_SKIPS} steps in a row with the smallest loss scale, {self.value:g}: the loss is not "
                "finite, or fp16 is too small for this model. Use mixed_precision: bf16, a lower learning rate, or clip gradients."
            )
        if len(self._stepped) >= len(optimizers):
            self._update()

    def _update(self) -> None:
        if not self._is_static:
            self._scaler.update_scale(self._has_overflowed)
        self._has_overflowed = False
        self._stepped.clear()

    def state_dict(self) -> dict[str, float]:
        """Return the state in the form of torch's GradScaler, which loads it in other layouts, with deepspeed's hysteresis."""
        scaler = self._scaler
        steps = scaler.cur_iter - scaler.last_overflow_iter - 1
        return {
            "scale": scaler.cur_scale,
            "growth_factor": scaler.scale_factor,
            "backoff_factor": 1 / scaler.scale_factor,
            "growth_interval": scaler.scale_window,
            "_growth_tracker": steps % scaler.scale_window,
            "hysteresis": scaler.cur_hysteresis,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the scale, and the steps since its last change, of this or of torch's; a fixed scale and options stay."""
        if self._is_static:
            return
        scaler = self._scaler
        scaler.cur_scale = state["scale"]
        scaler.cur_iter, scaler.last_overflow_iter = int(state["_growth_tracker"]), -1
        scaler.cur_hysteresis = int(state.get("hysteresis", scaler.delayed_shift))


_MAX_SKIPS = 50
