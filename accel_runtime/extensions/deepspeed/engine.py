"""An optimizer of the script with the models that it trains, under ZeRO, and the loss scale of all of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from accel_runtime.extensions.deepspeed.library import DynamicLossScaler, ShardedOptimizer
from accel_runtime.extensions.deepspeed.settings import DeepSpeedConfig

__all__ = ["Engine", "LossScale"]


class Engine:
    """The gradients of one optimizer, from backward passes to the step.

    Gradients are not in `parameter.grad`. They become final when something reads them: the norm, or the step.

    Args:
        optimizer: The optimizer of the script.
        groups: The parameters of its groups, which deepspeed has replaced in it.
        sharded: The ZeRO optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[Sequence[nn.Parameter]],
        sharded: ShardedOptimizer,
    ) -> None:
        self.optimizer, self.sharded = optimizer, sharded
        self.groups = [list(group) for group in groups]
        """The parameters in the groups of the optimizer."""
        self.parameters = {parameter: None for group in self.groups for parameter in group}
        """All parameters, as the keys, in order."""
        self.trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        """The parameters that deepspeed shards: those that required gradients when the engine was built."""
        self.was_skipped = False
        """True if the newest step changed nothing, as gradients were not finite."""
        self.versions: dict[nn.Parameter, int] = {}
        """The number of the newest change of each gradient of the cycle."""
        self._changes = 0
        self._has_gradients = self._is_final = False
        self._reached: set[nn.Parameter] = set()
        """The parameters that the backward pass has reached."""
        self._is_clean = False
        """True if no buffer has gradients of an earlier cycle."""
        self._frozen = [parameter for parameter in self.parameters if not parameter.requires_grad]
        self._uncleared: set[nn.Parameter] = set()
        """The parameters whose gradients the script has not cleared since the newest step."""
        self._continues = False
        """True if a backward pass has reached such parameters: its gradients would be added to those of that step."""
        self._is_gathered = self._is_complete = False
        self._is_open = False
        """True in a backward pass of the strategy."""
        self._divisors: dict[nn.Parameter, torch.Tensor] = {}
        """Divisor of the gradients by the first parameter that it was set for; the groups of one engine have equal ones."""
        self._clip_factor: torch.Tensor | None = None
        self._norm: torch.Tensor | None = None
        """The norm of the final gradients; None until it is computed."""
        for parameter in self.trained:
            parameter.register_hook(partial(self._record, parameter))  # type: ignore[no-untyped-call]

    def _record(self, parameter: nn.Parameter, _: torch.Tensor) -> None:
        if not self._is_open:
            raise RuntimeError(
                "loss.backward() reached parameters that ZeRO trains, whose gradients would be lost. Call accelerator.backward(loss)."
            )
        if self._is_final:
            raise RuntimeError(
                f"backward() reached parameters of {type(self.optimizer).__name__} after their gradients were read, by a norm or by "
                "clipping, and ZeRO cannot add to them any more. Run all backward passes of a step first."
            )
        if parameter in self._reached:
            # Reentrant activation checkpointing runs a backward pass for each use of a block. deepspeed takes one gradient a pass.
            self._has_gradients, self._is_clean = True, False
            self.sharded.divide_backward()
            self._reached.clear()
        self._reached.add(parameter)
        self._continues = self._continues or parameter in self._uncleared
        self._touch(parameter)

    def _touch(self, parameter: nn.Parameter) -> None:
        self._changes += 1
        self.versions[parameter] = self._changes

    def begin_backward(self) -> None:
        """Prepare for a backward pass, which may not reach the parameters."""
        if any(parameter.requires_grad for parameter in self._frozen):
            raise RuntimeError(
                f"Parameters of {type(self.optimizer).__name__} were frozen in prepare() and require gradients now, for which ZeRO has no "
                "optimizer state. Freeze parameters after prepare(), or unfreeze them and prepare a new model in a new process."
            )
        self._is_open, self._is_complete = True, False
        self._reached.clear()
        if self._is_final:
            return
        # Divisions were undone, or divided zeros.
        self._divisors.clear()
        if not self._has_gradients and not self._is_clean:
            self.sharded.begin_cycle()
            self._is_clean = True
        self.sharded.begin_backward()

    def end_backward(self) -> None:
        """Combine the gradients of a backward pass; collective."""
        self._is_open = False
        if self._is_final:
            return
        if self._reached:
            self._has_gradients, self._is_clean = True, False
        self.sharded.end_backward(has_gradients=bool(self._reached))

    def scale_gradients(self, parameters: Sequence[nn.Parameter], factor: torch.Tensor) -> None:
        """Multiply the gradients of some parameters by a factor: `[]`; all of them must have the same one at the step."""
        first = parameters[0]
        self._divisors[first] = self._divisors.get(first, torch.ones_like(factor)) / factor
        for parameter in parameters:
            if parameter in self.versions:
                self._touch(parameter)

    def _read_divisor(self) -> float:
        divisors = {float(divisor) for divisor in self._divisors.values()}
        if len(divisors) > 1:
            raise ValueError(
                f"{type(self.optimizer).__name__} trains models whose losses have different weights, which ZeRO cannot divide apart. "
                "Use the same weight for both, or one optimizer a model."
            )
        divisor = next(iter(divisors), 1.0)
        factor = 1.0 if self._clip_factor is None else float(self._clip_factor)
        return divisor / factor if factor else math.inf

    def clip(self, max_norm: float, norm: torch.Tensor) -> None:
        """Multiply the final gradients of all parameters so that a norm, `[]`, becomes `max_norm` at most, as torch does."""
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        self._clip_factor = factor if self._clip_factor is None else self._clip_factor * factor
        for parameter in list(self.versions):
            self._touch(parameter)

    def _finish(self) -> None:
        if self._continues:
            raise RuntimeError(
                f"The gradients of {type(self.optimizer).__name__} were not cleared after its last step: others would be added to them, "
                "which ZeRO cannot do. Call optimizer.zero_grad() after each step."
            )
        if not self._is_final:
            self.sharded.finish_cycle()
            self._is_final = True

    def complete(self) -> None:
        """Record that the cycle is complete, unless another backward pass follows."""
        self._is_complete = True

    def compute_norm(self) -> torch.Tensor:
        """Return the norm of the gradients over all ranks, in an unfinished cycle that of what each rank has: `[]`; collective."""
        if not self._has_gradients:
            return torch.zeros(())
        if not self._is_complete:
            return self.sharded.compute_unfinished_norm() / self._read_divisor()
        self._finish()
        self._norm = self.sharded.compute_norm()
        return self._norm / self._read_divisor()

    def step(self, loss_scale: float = 1.0) -> None:
        """Step with the gradients of the cycle, if there are any, divided by the scale of the loss; collective."""
        if self._is_gathered:
            raise RuntimeError(
                "optimizer.step() inside gathered(model) would change the shards but not the gathered parameters. Exit the context first."
            )
        self.was_skipped = False
        if not self._has_gradients:
            return
        self._finish()
        reached = set(self.versions)
        self.was_skipped = not self.sharded.step(self._read_divisor() * loss_scale, reached)
        self._forget()
        self._uncleared.update(reached)

    def read_overflow(self) -> bool | None:
        """Return whether the gradients that a step would use are not finite; None if nothing has read their norm."""
        return None if self._norm is None else not bool(self._norm.isfinite())

    @property
    def has_gradients(self) -> bool:
        """Return whether a backward pass of the cycle has reached the parameters."""
        return self._has_gradients

    def restore_cycle(self, reached: Iterable[nn.Parameter]) -> None:
        """Continue a cycle with gradients that are written to `sharded.list_gradients`, or to `parameter.grad` in stage 1."""
        self.clear_gradients()
        self.sharded.begin_cycle()
        self.sharded.begin_restored_cycle()
        self._has_gradients = True
        for parameter in reached:
            self._touch(parameter)

    def clear_gradients(self) -> None:
        """Discard the gradients of the cycle."""
        if self._has_gradients:
            self.sharded.clear_gradients()
        self._uncleared.clear()
        self._forget()

    def clear_part(self, parameters: Collection[nn.Parameter]) -> None:
        """Discard the gradients of some parameters; raise RuntimeError if others have gradients."""
        if not self.versions.keys() <= set(parameters):
            raise RuntimeError(
                f"model.zero_grad() would clear a part of the gradients of {type(self.optimizer).__name__}, which ZeRO cannot do. Call "
                "optimizer.zero_grad()."
            )
        uncleared = self._uncleared.difference(parameters)
        self.clear_gradients()
        self._uncleared = uncleared

    @contextmanager
    def refuse_steps(self) -> Iterator[None]:
        """Return a context in which the parameters are gathered, so that a step is an error."""
        self._is_gathered = True
        try:
            yield
        finally:
            self._is_gathered = False

    def _forget(self) -> None:
        self._has_gradients = self._is_final = self._continues = False
        self._divisors.clear()
        self._clip_factor = self._norm = None
        self.versions.clear()


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
