"""Gradients of a run: backward passes, weights of losses, clipping, unscaling, and the names of parameters in a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accel_runtime.foundation.module_names import named_parameters
from accel_runtime.foundation.nested import has_dtensor
from accel_runtime.parallel.dtensor import list_gathered, map_shard
from accel_runtime.parallel.strategy import GradientAccess, GradientVersions, ScaleLoss, Strategy
from accel_runtime.training.accumulation import Accumulation
from accel_runtime.training.optimizer import PreparedOptimizer
from accel_runtime.training.precision import Precision

__all__ = [
    "Gradients",
    "LossWeight",
    "LossWeights",
    "ParameterGroup",
    "group_parameters",
    "name_parameters",
    "zero_loss",
]


class ParameterGroup:
    """Parameters of the same model and optimizer, and the weights in their gradients."""

    def __init__(self, parameters: Sequence[nn.Parameter], access: GradientAccess) -> None:
        self.parameters = parameters
        self._access = access
        self.pending: torch.Tensor | None = None
        """Weights of this rank in gradients that are not divided yet; `[]`."""
        self.total: torch.Tensor | None = None
        """Weights of all ranks that the gradients have been divided by; `[]`."""
        self._recorded: GradientVersions = []
        self._is_sharded = any(hasattr(parameter, "device_mesh") for parameter in parameters)

    def begin_backward(self, unit: torch.Tensor) -> None:
        """Forget weights of gradients that were cleared, and undo the division of the others.

        `unit` is the common divisor of all weights inside a backward pass; `[]`.
        """
        if self._versions() != self._recorded:
            self.pending = self.total = None
        if self.total is not None:
            self._access.scale(self.parameters, self.total / unit)
        self._recorded = self._versions()

    def end_backward(self, weight: torch.Tensor, *, synchronized: bool) -> None:
        """Add the weight of a backward pass (`[]`) if it changed the gradients of this group.

        Fully sharded parameters show their gradients only after a pass that synchronizes them.
        """
        versions = self._versions()
        if versions != self._recorded or (self._is_sharded and not synchronized):
            self.pending = weight if self.pending is None else self.pending + weight
        self._recorded = versions

    def divide(self, reduced: torch.Tensor, unit: torch.Tensor) -> None:
        """Divide the gradients by all weights in them: those of earlier divisions and those now reduced."""
        self.total = reduced if self.total is None else self.total + reduced
        self.pending = None
        # Without an item on any rank, the gradients are zeros and remain zeros.
        self._access.scale(self.parameters, torch.where(self.total > 0, unit / self.total, 0.0))
        self._recorded = self._versions()

    def set_weights(self, pending: torch.Tensor | None, total: torch.Tensor | None) -> None:
        """Set the weights in the gradients as they are now."""
        self.pending, self.total = pending, total
        self._recorded = self._versions()

    @property
    def is_current(self) -> bool:
        """Return whether there are weights, and they belong to the gradients as they are now."""
        return self.has_weights and self._versions() == self._recorded

    @property
    def has_weights(self) -> bool:
        """Return whether there are weights in the gradients."""
        return self.pending is not None or self.total is not None

    @property
    def has_no_gradients(self) -> bool:
        """Return whether no parameter has a gradient."""
        return all(version is None for version in self._versions())

    def _versions(self) -> GradientVersions:
        return self._access.read_versions(self.parameters)


class LossWeights:
    """Backward passes of losses that are means over a number of items.

    Inside a cycle every loss is multiplied by its weight over a unit that is the same on all ranks, so gradients keep their
    magnitude (fp16 would overflow). At its end, the gradients are divided by the weights of all ranks.
    """

    def __init__(self, strategy: Strategy, accumulation: Accumulation) -> None:
        self._access, self._backend = strategy.gradients, strategy.backend
        self._accumulation = accumulation
        self.unit: torch.Tensor | None = None
        """Common divisor of all weights inside backward passes, set by the first; `[]`."""

    def backward(
        self, weight: LossWeight, run: Callable[[torch.Tensor], None], groups: list[ParameterGroup]
    ) -> None:
        """Run the backward pass of a scalar loss that is a mean over `weight` items.

        `run` runs the backward pass of the loss times the factor (`[]`) that it is passed; `groups` are equally many, in the same
        order, on all ranks.
        """
        if self.unit is None:  # the expected sum of the weights of the first cycle: `[]`
            total = self._backend.all_reduce_async(weight.amount * self._accumulation.steps)()
            self.unit = torch.where(total > 0, total, 1.0)
        unit = self.unit
        for group in groups:
            group.begin_backward(unit)
        pending_before = [group.pending for group in groups]
        # The sums are reduced during the backward pass; which groups its weight belongs to is known after it.
        zero = torch.zeros_like(weight.amount)
        local = [zero if pending is None else pending for pending in pending_before]
        finish_sum = (
            self._backend.all_reduce_async(torch.stack([*local, weight.amount]))
            if self._accumulation.syncs_gradients
            else None
        )
        run(weight.amount * self._backend.topology.world_size / unit)
        for group in groups:
            group.end_backward(weight.amount, synchronized=finish_sum is not None)
        if finish_sum is None:
            return
        self._access.finish()
        *sums, weight_sum = finish_sum().unbind()
        for group, pending, reduced in zip(groups, pending_before, sums, strict=True):
            if group.has_weights:
                group.divide(reduced if group.pending is pending else reduced + weight_sum, unit)


@dataclass(frozen=True)
class LossWeight:
    """Number of items that the loss of one backward pass is the mean of."""

    amount: torch.Tensor
    """Number, on the device: `[]`, float32, or float64 if the loss is float64."""
    is_zero: bool | None
    """True if it is 0; None if that is unknown without waiting for the device."""

    @classmethod
    def build(
        cls,
        weight: float | torch.Tensor,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        as_data: bool = False,
    ) -> LossWeight:
        """Return the weight that a script has passed, for a loss of `dtype`.

        With `as_data` it must not change the program: neither its operations nor its constants. Raises ValueError if it is
        not one number, or if a number or CPU tensor is negative or not finite.
        """
        # All ranks have losses of the same dtype, but some may have weights that are numbers and others tensors.
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
        if isinstance(weight, torch.Tensor):
            if weight.numel() != 1:
                raise ValueError(
                    f"Invalid weight: it is a tensor of shape {list(weight.shape)}. Pass one number of items."
                )
            weight = weight.detach()
            if weight.device.type != "cpu":
                return cls(weight.reshape(()).to(device, dtype), is_zero=None)
        number = float(weight)
        if not (math.isfinite(number) and number >= 0):
            raise ValueError(f"Invalid weight {number}: expected a finite number of items, at least 0.")
        if as_data:
            # A scalar of 0 or 1 would become a constant.
            return cls(torch.tensor([number], dtype=dtype, device="cpu").to(device).view(()), is_zero=None)
        # Filled on the device: a copy to it would synchronize.
        return cls(torch.full((), number, dtype=dtype, device=device), is_zero=number == 0)


@contextmanager
def zero_loss(reachable: Callable[[], Iterable[torch.Tensor]], weight: LossWeight) -> Iterator[None]:
    """Make backward passes of weight 0 add exact zeros, whatever the loss is, and run all hooks.

    `reachable` returns the leaves that the pass may reach. If the value of `weight` is unknown, every gradient is
    selected by it on the device.
    """
    if weight.is_zero is False:
        yield
        return

    def set_zero(grad: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(grad)

    def select(grad: torch.Tensor) -> torch.Tensor:
        if grad.is_sparse:
            values = select(grad._values())  # noqa: SLF001 - the public one is for what is added up
            return torch.sparse_coo_tensor(grad._indices(), values, grad.shape, check_invariants=False)  # noqa: SLF001
        return map_shard(grad, lambda shard: torch.where(weight.amount.to(shard.device) == 0, 0.0, shard))

    hook = set_zero if weight.is_zero else select
    leaves = [leaf for leaf in reachable() if leaf.requires_grad]
    handles = [leaf.register_hook(hook) for leaf in leaves]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def group_parameters(
    models: Sequence[nn.Module],
    optimizers: Sequence[PreparedOptimizer],
    access: GradientAccess,
) -> list[ParameterGroup]:
    """Return the parameters of models and optimizers, grouped by model and optimizer, each once."""
    owners: dict[nn.Parameter, list[int | None]] = {}
    for index, model in enumerate(models):
        for parameter in model.parameters():
            owners.setdefault(parameter, [index, None])
    for index, optimizer in enumerate(optimizers):
        for parameter in optimizer.parameters:
            owners.setdefault(parameter, [None, None])[1] = index
    members: dict[tuple[int | None, ...], list[nn.Parameter]] = {}
    for parameter, owner in owners.items():
        members.setdefault(tuple(owner), []).append(parameter)
    return [ParameterGroup(parameters, access) for parameters in members.values()]


def name_parameters(
    models: Sequence[nn.Module], optimizers: Sequence[Sequence[Sequence[nn.Parameter]]]
) -> dict[nn.Parameter, str]:
    """Return every parameter of models and optimizers with one name, however often it occurs.

    Parameters of the first model are `model.layer.weight`, of the second `model_1.layer.weight`. A parameter that is in no
    model is `optimizer.0.3`: the first optimizer's first group, fourth parameter.

    Args:
        models: Modules of the script.
        optimizers: The parameters in the groups of each optimizer.
    """
    names: dict[nn.Parameter, str] = {}
    for index, model in enumerate(models):
        for name, parameter in named_parameters(model):
            names.setdefault(parameter, f"{numbered_name('model', index)}.{name}")
    for index, groups in enumerate(optimizers):
        for group_index, group in enumerate(groups):
            for number, parameter in enumerate(group):
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
        strategy: Runs backward passes, and clips gradients.
        models: The prepared models; updated by the caller.
        optimizers: The prepared optimizers; updated by the caller.
    """

    def __init__(
        self,
        accumulation: Accumulation,
        precision: Precision,
        strategy: Strategy,
        models: Sequence[nn.Module],
        optimizers: Sequence[PreparedOptimizer],
    ) -> None:
        self._accumulation = accumulation
        self._precision = precision
        self._strategy, self._access = strategy, strategy.gradients
        self.weights = LossWeights(strategy, accumulation)
        """Weights of losses that have one."""
        self._models = models
        self._optimizers = optimizers
        self._groups: list[ParameterGroup] = []
        self._group_key: tuple[int, ...] = ()

    @property
    def device(self) -> torch.device:
        """Return the device of the run."""
        return self._strategy.backend.device

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
        inputs = options.get("inputs")
        if inputs is not None and has_dtensor([inputs] if isinstance(inputs, torch.Tensor) else inputs):
            raise ValueError(
                "Invalid inputs: they have parameters of a sharded model, whose gradients torch does not compute alone. Leave out inputs, "
                "and clear other gradients with zero_grad()."
            )
        self.run_backward(
            loss.dtype, weight, loss_scale, lambda scale: self._strategy.backward(scale(loss), options)
        )

    def run_backward(
        self,
        dtype: torch.dtype,
        weight: float | torch.Tensor | None,
        loss_scale: float,
        run: Callable[[ScaleLoss], None],
    ) -> None:
        """Prepare the gradients, call `run` with a function that scales a loss of `dtype`, and complete the gradients.

        The other arguments and errors are those of `backward`.
        """
        if weight is not None:
            self._run_weighted(dtype, weight if loss_scale else 0.0, run)
            return
        self._begin_backward(weighted=False)
        if loss_scale == 1:
            run(lambda loss: self._precision.scale(self._divide(loss)))
            return
        share = self._build_weight(loss_scale, dtype)
        with zero_loss(self._reachable_leaves, share):
            run(lambda loss: self._precision.scale(self._divide(loss) * share.amount))

    def _divide(self, loss: torch.Tensor) -> torch.Tensor:
        """Divide a loss by the micro-batches of a cycle."""
        return loss if self._accumulation.steps == 1 else loss / self._accumulation.steps

    def _run_weighted(
        self, dtype: torch.dtype, weight: float | torch.Tensor, run: Callable[[ScaleLoss], None]
    ) -> None:
        loss_weight = self._build_weight(weight, dtype)
        self._begin_backward(weighted=True)

        def run_part(factor: torch.Tensor) -> None:
            with zero_loss(self._reachable_leaves, loss_weight):
                run(lambda loss: self._precision.scale(loss * factor))

        self.weights.backward(loss_weight, run_part, self.find_groups())

    def _build_weight(self, weight: float | torch.Tensor, dtype: torch.dtype) -> LossWeight:
        return LossWeight.build(
            weight, self.device, dtype, as_data=self._strategy.backend.runtime.static_shapes
        )

    def _begin_backward(self, *, weighted: bool) -> None:
        accumulation = self._accumulation
        is_mixed = not accumulation.is_new_cycle and accumulation.weighted is not weighted
        # If the script has cleared the gradients itself, this is the first backward pass of a cycle.
        if is_mixed and all(group.has_no_gradients for group in self.find_groups()):
            accumulation.end_cycle()
        accumulation.begin_backward(weighted=weighted)
        if self._precision.scaler is not None:
            kept = self._list_weighted()
            self._precision.begin_backward()
            self._keep_weights(kept)

    def _list_weighted(self) -> list[ParameterGroup]:
        """Return the groups with weights in their gradients, for `_keep_weights`."""
        return [group for group in self._groups if group.is_current]

    @staticmethod
    def _keep_weights(groups: Iterable[ParameterGroup]) -> None:
        """Let the weights in gradients stay theirs, although the gradients were changed in place."""
        for group in groups:
            group.set_weights(group.pending, group.total)

    def _reachable_leaves(self) -> set[torch.Tensor]:
        """Return the leaves that a backward pass may reach: parameters, and what the forward pass has gathered of sharded ones."""
        leaves = {parameter for group in self.find_groups() for parameter in group.parameters}
        return leaves.union(*((*model.parameters(), *list_gathered(model)) for model in self._models))

    def find_groups(self) -> list[ParameterGroup]:
        """Return the groups of parameters, rebuilt if more has been prepared."""
        models, optimizers = self._models, self._optimizers
        key = len(models), *(len(optimizer.param_groups) for optimizer in optimizers)
        if key != self._group_key:
            self._groups = group_parameters(models, optimizers, self._access)
            self._group_key = key
        return self._groups

    def clear(self) -> None:
        """Forget the groups: what is prepared next has other parameters, though as many."""
        self._groups, self._group_key = [], ()

    def list_unused(self) -> set[nn.Parameter]:
        """Return the parameters whose optimizer did not step or clear their gradients since the newest backward pass."""
        return {
            parameter
            for optimizer in self._optimizers
            if not optimizer.has_used_gradients
            for parameter in optimizer.parameters
        }

    def set_unused(self, parameters: Container[nn.Parameter]) -> None:
        """Set the parameters whose optimizers did not step or clear their gradients."""
        for optimizer in self._optimizers:
            is_unused = any(parameter in parameters for parameter in optimizer.parameters)
            optimizer.restore_use(used=not is_unused)

    @property
    def in_parameters(self) -> bool:
        """Return whether gradients are in `parameter.grad`; see `GradientAccess.in_parameters`."""
        return self._access.in_parameters

    def read_shape(self, parameter: nn.Parameter) -> list[int]:
        """Return the shape of a parameter, also if this rank has only a shard of it."""
        return list(self._strategy.read_shape(parameter))

    def read_unsynced(self) -> dict[nn.Parameter, torch.Tensor]:
        """Return the gradients that are not combined over the ranks yet; see `GradientAccess.read_local`."""
        return self._access.read_local(self._models)

    def restore_unsynced(self, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Restore the result of `read_unsynced`."""
        self._access.restore_local(self._models, gradients)

    def parameter_names(self) -> dict[nn.Parameter, str]:
        """Return every prepared parameter with its name in a checkpoint."""
        models = [self._strategy.unwrap_model(model) for model in self._models]
        return name_parameters(models, [optimizer.parameter_groups for optimizer in self._optimizers])

    def clip_norm(self, parameters: _Parameters, max_norm: float, norm_type: float) -> torch.Tensor:
        """Unscale all gradients and clip some, if the cycle is complete; otherwise only return the norm."""
        tensors = self._list_current(parameters)
        if not self._accumulation.synced:
            norm = self._access.compute_norm(tensors, norm_type)
            return norm / self._precision.scale(torch.ones_like(norm))
        self._access.finish()
        kept = self._list_weighted()
        self._unscale(self._optimizers)
        if not tensors:  # torch itself warns of an exhausted generator
            nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        norm = self._access.clip_norm(tensors, max_norm, norm_type)
        self._keep_weights(kept)
        return norm

    def clip_value(self, parameters: _Parameters, clip_value: float) -> None:
        """Unscale all gradients and clamp some, if the cycle is complete."""
        if self._accumulation.synced:
            self._access.finish()
            kept = self._list_weighted()
            self._unscale(self._optimizers)
            self._access.clip_value(self._list_current(parameters), clip_value)
            self._keep_weights(kept)

    def _list_current(self, parameters: _Parameters) -> list[torch.Tensor]:
        # A list from before prepare() has the full parameters, which get no gradients once their model is sharded.
        return self._strategy.list_current(
            [parameters] if isinstance(parameters, torch.Tensor) else parameters
        )

    def unscale(self, optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None) -> None:
        """Unscale fp16 gradients of some prepared optimizers; None is all. Raise ValueError if one is not prepared."""
        if self._precision.scaler is None:
            return
        if isinstance(optimizers, torch.optim.Optimizer):
            optimizers = [optimizers]
        kept = self._list_weighted()
        self._unscale(
            self._optimizers
            if optimizers is None
            else [self._find_prepared(optimizer) for optimizer in optimizers]
        )
        self._keep_weights(kept)

    def _unscale(self, optimizers: Sequence[PreparedOptimizer]) -> None:
        if self._precision.scaler is not None:
            for optimizer in optimizers:
                optimizer.unscale()

    def _find_prepared(self, optimizer: torch.optim.Optimizer) -> PreparedOptimizer:
        for prepared in self._optimizers:
            if optimizer is prepared or optimizer is prepared.optimizer:
                return prepared
        raise ValueError(
            f"unscale_gradients() failed: the {type(optimizer).__name__} is not prepared. Pass the optimizer that prepare() "
            "returned."
        )
