"""Gradients of a run: backward passes, clipping, unscaling, and the names of parameters in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from accel_runtime.backends.base import Backend
from accel_runtime.nested import has_dtensor
from accel_runtime.optimizer import PreparedOptimizer
from accel_runtime.training.accumulation import Accumulation
from accel_runtime.training.compilation import uncompiled_module
from accel_runtime.training.loss_weighting import (
    LossWeight,
    LossWeights,
    ParameterGroup,
    group_parameters,
    zero_loss,
)
from accel_runtime.training.precision import Precision

__all__ = ["Gradients", "name_parameters"]


def name_parameters(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    original: Callable[[nn.Module], nn.Module],
) -> dict[nn.Parameter, str]:
    """Return every parameter of models and optimizers with one name, however often it occurs.

    Parameters of the first model are `model.layer.weight`, of the second `model_1.layer.weight`. A parameter that is in no
    model is `optimizer.0.3`: the first optimizer's first group, fourth parameter. `original` unwraps a model, so that names
    do not depend on the world size.
    """
    names: dict[nn.Parameter, str] = {}
    for index, model in enumerate(models):
        for name, parameter in uncompiled_module(original(model)).named_parameters():
            names.setdefault(parameter, f"{numbered_name('model', index)}.{name}")
    for index, optimizer in enumerate(optimizers):
        for group_index, group in enumerate(optimizer.param_groups):
            for number, parameter in enumerate(group["params"]):
                names.setdefault(parameter, f"{numbered_name('optimizer', index)}.{group_index}.{number}")
    return names


def numbered_name(name: str, index: int) -> str:
    """Return the name of the n-th item of a kind: `model`, `model_1`, ..."""
    return f"{name}_{index}" if index else name


_Parameters = Iterable[torch.Tensor] | torch.Tensor


class Gradients:
    """Backward passes of a run, and operations on its gradients.

    Args:
        accumulation: Counts accumulation cycles.
        precision: Scales losses.
        backend: Sums weights over the ranks.
        models: The prepared models; updated by the caller.
        optimizers: The prepared optimizers; updated by the caller.
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
        """Device of the run."""
        self.weights = LossWeights(backend, accumulation)
        """Weights of losses that have one."""
        self._models = models
        self._optimizers = optimizers
        self._groups: list[ParameterGroup] = []
        self._group_key: tuple[int, ...] = ()

    def begin_plain_backward(self, loss_scale: float) -> bool:
        """Begin a backward pass that needs only `loss.backward()`; return False if it needs more."""
        accumulation = self._accumulation
        if (
            self._precision.scaler is None
            and loss_scale == 1
            and accumulation.steps == 1
            and (accumulation.is_new_cycle or not accumulation.weighted)
        ):
            accumulation.is_new_cycle = accumulation.weighted = False
            accumulation.had_backward = True
            return True
        return False

    def backward(
        self,
        loss: torch.Tensor,
        weight: float | torch.Tensor | None,
        loss_scale: float,
        options: dict[str, Any],
    ) -> None:
        """Run the backward pass of a scalar loss.

        `weight` is the number of items that the loss is the mean of; None if all micro-batches have the same weight.
        `loss_scale` is the weight of this rank's mean without `weight`; 0 excludes it. `options` are arguments for
        `loss.backward`. Raises ValueError for an invalid weight, or if only some losses of a cycle have weights.
        """
        if weight is not None:
            self._backward_weighted(loss, weight if loss_scale else 0.0, options)
            return
        self._begin_backward(weighted=False)
        if self._accumulation.steps != 1:
            loss = loss / self._accumulation.steps
        if loss_scale == 1:
            self._precision.backward(loss, options)
            return
        scale = self._build_weight(loss_scale, loss)
        with zero_loss(self._reachable_parameters, scale):
            self._precision.backward(loss * scale.amount, options)

    def _backward_weighted(
        self, loss: torch.Tensor, weight: float | torch.Tensor, options: dict[str, Any]
    ) -> None:
        loss_weight = self._build_weight(weight, loss)
        self._begin_backward(weighted=True)

        def run(weighted_loss: torch.Tensor) -> None:
            with zero_loss(self._reachable_parameters, loss_weight):
                self._precision.backward(weighted_loss, options)

        self.weights.backward(loss, loss_weight, run, self.find_groups())

    def _build_weight(self, weight: float | torch.Tensor, loss: torch.Tensor) -> LossWeight:
        return LossWeight.build(weight, self.device, loss.dtype, as_data=self._backend.single_program)

    def _begin_backward(self, *, weighted: bool) -> None:
        accumulation = self._accumulation
        if not accumulation.is_new_cycle and accumulation.weighted is not weighted:
            # If the script has cleared the gradients itself, this is the first backward pass of a cycle.
            accumulation.is_new_cycle = all(group.has_no_gradients for group in self.find_groups())
        accumulation.begin_backward(weighted=weighted)

    def _reachable_parameters(self) -> set[nn.Parameter]:
        """Return the parameters that a backward pass may reach; fully sharded ones are replaced during the pass."""
        parameters = {parameter for group in self.find_groups() for parameter in group.parameters}
        return parameters.union(*(model.parameters() for model in self._models))

    def find_groups(self) -> list[ParameterGroup]:
        """Return the groups of parameters, rebuilt if more has been prepared."""
        models, optimizers = self._models, self._optimizers
        key = len(models), *(len(optimizer.param_groups) for optimizer in optimizers)
        if key != self._group_key:
            self._groups, self._group_key = group_parameters(models, optimizers), key
        return self._groups

    @property
    def models(self) -> Sequence[nn.Module]:
        """Return the prepared models, as the script made them."""
        return [self._backend.unwrap_model(model) for model in self._models]

    def parameter_names(self) -> dict[nn.Parameter, str]:
        """Return every prepared parameter with its name in a checkpoint."""
        return name_parameters(self._models, self._optimizers, self._backend.unwrap_model)

    def clip_norm(self, parameters: _Parameters, max_norm: float, norm_type: float) -> torch.Tensor:
        """Run `torch.nn.utils.clip_grad_norm_` if the cycle is complete; otherwise only return the norm."""
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        utils = _clip_functions(tensors)
        if self._accumulation.synced:
            self.unscale(None)
            # torch itself warns of an exhausted generator.
            total: torch.Tensor = utils.clip_grad_norm_(tensors or parameters, max_norm, norm_type=norm_type)
            return total
        norm: torch.Tensor = utils.get_total_norm([p.grad for p in tensors if p.grad is not None], norm_type)
        return norm / self._precision.scale(torch.ones_like(norm))

    def clip_value(self, parameters: _Parameters, clip_value: float) -> None:
        """Run `torch.nn.utils.clip_grad_value_` if the cycle is complete."""
        if self._accumulation.synced:
            self.unscale(None)
            tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            _clip_functions(tensors).clip_grad_value_(tensors, clip_value)

    def unscale(self, optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None) -> None:
        """Unscale fp16 gradients of some prepared optimizers; None is all. Raise ValueError if one is not prepared."""
        if self._precision.scaler is None:
            return
        if isinstance(optimizers, torch.optim.Optimizer):
            optimizers = [optimizers]
        if optimizers is None:
            prepared = list(self._optimizers)
        else:
            prepared = [self._find_prepared(optimizer) for optimizer in optimizers]
        for optimizer in prepared:
            optimizer.unscale()

    def _find_prepared(self, optimizer: torch.optim.Optimizer) -> PreparedOptimizer:
        for prepared in self._optimizers:
            if optimizer is prepared or optimizer is prepared.optimizer:
                return prepared
        raise ValueError(
            f"unscale_gradients() failed: the {type(optimizer).__name__} is not prepared. Pass the optimizer that prepare() "
            "returned."
        )


def _clip_functions(parameters: Sequence[torch.Tensor]) -> Any:
    """Return the module with the functions that clip: torch's own, unless a parameter is sharded."""
    if not has_dtensor(parameters):
        return nn.utils
    from accel_runtime.parallel import grad_norm  # noqa: PLC0415 - its imports are slow and needed only by sharded models

    return grad_norm
