"""From a loss to gradients fit for a step: weights and shares counted, scale taken out, clipped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from accel_runtime.accumulation import Accumulation
from accel_runtime.backends.base import Backend
from accel_runtime.checkpoint.names import parameter_names
from accel_runtime.divided import any_divided
from accel_runtime.optimizer import PreparedOptimizer
from accel_runtime.precision import Precision
from accel_runtime.weights import Group, Weight, Weights, groups, silenced

__all__ = ["Gradients"]

_Parameters = Iterable[torch.Tensor] | torch.Tensor


class Gradients:
    """What happens to the gradients of a run.

    Args:
        accumulation: Says when a window is complete.
        precision: Scales losses.
        backend: Adds weights up over the ranks.
        models: The prepared models; what is prepared later joins them.
        optimizers: The prepared optimizers, likewise.
    """

    def __init__(
        self,
        accumulation: Accumulation,
        precision: Precision,
        backend: Backend,
        models: Sequence[nn.Module],
        optimizers: Sequence[PreparedOptimizer],
    ) -> None:
        self._accumulation = accumulation
        self._precision = precision
        self._backend = backend
        self.device = backend.device
        """The hardware that is computed on."""
        self.weights = Weights(backend, accumulation)
        """The books of losses that have weights."""
        self._models = models
        self._optimizers = optimizers
        self._whole = precision.scaler is None
        self._groups: list[Group] = []
        self._grouped: tuple[int, ...] = ()

    def plain(self, factor: float) -> bool:
        """Begin a backward pass that is nothing but `loss.backward()`; False where it is more than that."""
        accumulation = self._accumulation
        if (
            self._whole
            and factor == 1
            and accumulation.steps == 1
            and (accumulation.fresh or not accumulation.weighted)
        ):
            accumulation.fresh = accumulation.weighted = False
            accumulation.passed = True
            return True
        return False

    def backward(
        self, loss: torch.Tensor, weight: float | torch.Tensor | None, factor: float, options: dict[str, Any]
    ) -> None:
        """Run the backward pass of a loss.

        Args:
            loss: A scalar.
            weight: How many items it is the mean of; None where all micro-batches count the same.
            factor: What this rank's mean counts for among the ranks' without a weight; 0 is nothing at all.
            options: Arguments for `loss.backward`.

        Raises:
            ValueError: A weight that is none, or with and without weights in one window.
        """
        steps = self._accumulation.steps
        if weight is not None:
            self._weighted(loss, weight if factor else 0.0, options)
            return
        self._begin(weighted=False)
        if steps != 1:
            loss = loss / steps
        if factor == 1:
            self._precision.backward(loss, options)
            return
        share = self._weight(factor, loss)
        with silenced(self._reached, share):
            self._precision.backward(loss * share.amount, options)

    def _weighted(self, loss: torch.Tensor, weight: float | torch.Tensor, options: dict[str, Any]) -> None:
        given = self._weight(weight, loss)
        self._begin(weighted=True)

        def run(multiplied: torch.Tensor) -> None:
            with silenced(self._reached, given):
                self._precision.backward(multiplied, options)

        self.weights.backward(
            loss,
            given,
            run,
            self.find(),
        )

    def _weight(self, given: float | torch.Tensor, loss: torch.Tensor) -> Weight:
        return Weight.of(given, self.device, loss.dtype, as_data=self._backend.one_program)

    def _begin(self, *, weighted: bool) -> None:
        accumulation = self._accumulation
        if not accumulation.fresh and accumulation.weighted is not weighted:
            # The script may have zeroed by itself: then this is the first pass of a window after all.
            accumulation.fresh = all(group.clear for group in self.find())
        accumulation.begin(weighted=weighted)

    def _reached(self) -> set[nn.Parameter]:
        """The parameters that a backward pass may reach now; fully sharded ones are others during the pass."""
        found = {parameter for group in self.find() for parameter in group.parameters}
        return found.union(*(model.parameters() for model in self._models))

    def find(self) -> list[Group]:
        """The groups of parameters; found anew when more has been prepared, as it is best done outside of a pass."""
        models, optimizers = self._models, self._optimizers
        size = len(models), *(len(optimizer.param_groups) for optimizer in optimizers)
        if size != self._grouped:
            self._groups, self._grouped = groups(models, optimizers), size
        return self._groups

    @property
    def models(self) -> Sequence[nn.Module]:
        """The prepared models, as the script made them."""
        return [self._backend.original(model) for model in self._models]

    def names(self) -> dict[nn.Parameter, str]:
        """Every parameter of what is prepared, with the name it has in a checkpoint."""
        return parameter_names(self._models, self._optimizers, self._backend.original)

    def clip_norm(self, parameters: _Parameters, max_norm: float, norm_type: float) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` where the window is complete; else the norm only."""
        every = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        by = _norms(every)
        if self._accumulation.synced:
            self.unscale(None)
            # Of a generator that has ended torch warns by itself.
            total: torch.Tensor = by.clip_grad_norm_(every or parameters, max_norm, norm_type=norm_type)
            return total
        norm: torch.Tensor = by.get_total_norm([p.grad for p in every if p.grad is not None], norm_type)
        return norm / self._precision.scale(torch.ones_like(norm))

    def clip_value(self, parameters: _Parameters, clip_value: float) -> None:
        """`torch.nn.utils.clip_grad_value_` where the window is complete; else nothing."""
        if self._accumulation.synced:
            self.unscale(None)
            every = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            _norms(every).clip_grad_value_(every, clip_value)

    def unscale(self, wanted: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None) -> None:
        """Divide the fp16 scale out of the gradients of some prepared optimizers; None is all.

        Raises:
            ValueError: One of them is not prepared.
        """
        if self._precision.scaler is None:
            return
        if wanted is None:
            chosen = list(self._optimizers)
        else:
            asked = [wanted] if isinstance(wanted, torch.optim.Optimizer) else wanted
            chosen = [_prepared(one, self._optimizers) for one in asked]
        for optimizer in chosen:
            optimizer.unscale()


def _norms(parameters: Sequence[torch.Tensor]) -> Any:
    """What measures and clips: torch itself, unless a parameter is divided over processes."""
    if not any_divided(parameters):
        return nn.utils
    from accel_runtime.parallel import norms  # noqa: PLC0415 - whose models are whole does not pay for its imports

    return norms


def _prepared(wanted: torch.optim.Optimizer, optimizers: Sequence[PreparedOptimizer]) -> PreparedOptimizer:
    for optimizer in optimizers:
        if wanted is optimizer or wanted is optimizer.optimizer:
            return optimizer
    raise ValueError("unscale_gradients() was given an optimizer that prepare() has not seen")
