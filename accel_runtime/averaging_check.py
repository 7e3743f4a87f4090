"""Warnings of gradients that stay on their process instead of being averaged over all."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from accel_runtime.accumulation import Accumulation
from accel_runtime.backends.base import Backend
from accel_runtime.exchange.callsite import call_site

__all__ = ["AveragingCheck", "ForwardPasses"]

_LOG = logging.getLogger("accel_runtime.gradients")
_NAMES = 5
"""How many parameters a warning names."""

_Gradient = tuple[int, int] | None
"""The identity of a gradient, and how often it was changed in place."""


class AveragingCheck:
    """Warn once of each model and each optimizer with gradients that are not averaged over the processes.

    docs/design/replicated-models.md has the reasons.

    Args:
        backend: Tells the processes; the first one writes the warnings.
        accumulation: Tells whether a backward pass averages gradients.
        prepared: All prepared models; what is prepared later joins them.
    """

    def __init__(self, backend: Backend, accumulation: Accumulation, prepared: Sequence[nn.Module]) -> None:
        self._backend = backend
        self._accumulation = accumulation
        self._prepared = prepared
        self._expects_model = backend.topology.world_size > 1
        self._averaged: dict[nn.Module, set[nn.Parameter]] = {}
        self._models: list[_Model] = []

    def add(self, prepared: nn.Module, *, averages: bool) -> None:
        """Add a model.

        Args:
            prepared: As the script has it.
            averages: Whether gradients of parameters that require one now are averaged.
        """
        original = self._backend.original(prepared)
        trainable = [p for p in original.parameters() if p.requires_grad and averages]
        self._averaged[original] = set(trainable)
        if original is not prepared and trainable:
            passes = ForwardPasses()
            prepared.register_forward_pre_hook(passes)
            self._models.append(_Model(prepared, original, trainable, passes))

    def clear(self) -> None:
        """Forget all models."""
        self._averaged.clear()
        self._models.clear()

    def begin_backward(self) -> None:
        """Remember the gradients that there are."""
        accumulation = self._accumulation
        if self._expects_model:
            self._check_model()
        if self._models and accumulation.synced and not accumulation.held:
            for model in self._models:
                model.begin_backward()

    def _check_model(self) -> None:
        """Warn if there is no prepared model at the first backward pass."""
        self._expects_model = False
        if not self._prepared and self._backend.topology.rank == 0:
            _LOG.warning(
                "Gradients are not averaged over the %d processes in backward() at %s: no model is prepared, so each process "
                "trains weights of its own. Give the model to prepare(), also one in a DistributedDataParallel of your own.",
                self._backend.topology.world_size,
                call_site(),
            )

    def end_backward(self) -> None:
        """Warn of a model that received gradients without a forward pass after which DDP averages them."""
        accumulation = self._accumulation
        if self._models and accumulation.synced and not accumulation.held:
            for model in self._models:
                if model.end_backward() and self._backend.topology.rank == 0:
                    _LOG.warning(
                        "Gradients of %s are not averaged over the %d processes in backward() at %s: no forward pass of the "
                        "prepared model belongs to them. Call the model that prepare() returned, once for each backward(): "
                        "unwrap_model(model)(...) and methods of the model bypass it. Call a method that training needs in "
                        "forward().",
                        type(model.original).__name__,
                        self._backend.topology.world_size,
                        call_site(),
                    )

    def expect_average(self, prepared: nn.Module) -> None:
        """Note that the next backward pass averages the gradients of a model, whatever its forward pass was."""
        for model in self._models:
            if model.original is self._backend.original(prepared):
                model.passes.averaging = True

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Warn if an optimizer is about to apply gradients that are not averaged; return whether it does."""
        names = {p: name for model in self._averaged for name, p in model.named_parameters()}
        averaged = set[nn.Parameter]().union(*self._averaged.values())
        local = [
            (names.get(parameter, name), parameter)
            for name, parameter in _named_parameters(optimizer)
            if parameter.grad is not None and parameter not in averaged
        ]
        if not local:
            return False
        if self._backend.topology.rank == 0:
            text = ", ".join(f"{name} {list(parameter.shape)}" for name, parameter in local[:_NAMES])
            _LOG.warning(
                "%s trains %d parameters whose gradients are not averaged over the %d processes, so each process gets "
                "weights of its own: %s%s. %s.",
                type(optimizer).__name__,
                len(local),
                self._backend.topology.world_size,
                text,
                ", ..." if len(local) > _NAMES else "",
                "Their model is prepared for evaluation, or they required no gradient at prepare(): set requires_grad before "
                "prepare()"
                if all(parameter in names for _, parameter in local)
                else "They belong to no prepared model: give their model to prepare(), or average their gradients with "
                "accelerator.reduce(parameter.grad, 'mean')",
            )
        return True


class ForwardPasses:
    """A hook before the forward passes of a model in DDP."""

    averaging = False
    """Whether DDP averages the gradients of the next backward pass that reaches the model."""

    def __call__(self, model: Any, _: Any) -> None:
        """Note a forward pass, on the condition that DDP has for it."""
        if torch.is_grad_enabled() and model.require_backward_grad_sync:
            self.averaging = True


class _Model:
    """A model in DDP."""

    def __init__(
        self, prepared: Any, original: nn.Module, parameters: Sequence[nn.Parameter], passes: ForwardPasses
    ) -> None:
        self._prepared = prepared
        self.original = original
        self.passes = passes
        self._parameters = parameters
        self._first = parameters[0]
        self._before: _Gradient = None
        self._all_before: Sequence[_Gradient] = ()
        self._unexpected = 0
        self._warned = False

    def begin_backward(self) -> None:
        """Remember the first gradient; all of them, if the model is not expected to receive any."""
        if self.passes.averaging:
            self._before = _gradient(self._first)
            return
        if (
            not self._prepared.require_backward_grad_sync
        ):  # a script may hold gradients back by DDP's own means
            return
        self._unexpected += 1
        # A model that others are trained beside comes here every time: at the counts 1, 2, 4, 8, ... it costs nothing.
        if not (self._warned or self._unexpected & (self._unexpected - 1)):
            self._all_before = [_gradient(parameter) for parameter in self._parameters]

    def end_backward(self) -> bool:
        """Return whether there is something to warn of: gradients have arrived that DDP has not averaged."""
        if self.passes.averaging:
            # DDP completes all gradients or none, so that the first stands for all.
            self.passes.averaging = _gradient(self._first) == self._before
            return False
        before, self._all_before = self._all_before, ()
        self._warned = self._warned or any(
            _gradient(parameter) != old for parameter, old in zip(self._parameters, before, strict=False)
        )
        return bool(before) and self._warned


def _gradient(parameter: nn.Parameter) -> _Gradient:
    """Return what changes whenever a gradient is written or replaced."""
    grad = parameter.grad
    return None if grad is None else (id(grad), grad._version)  # noqa: SLF001 - torch has no other name for it


def _named_parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    for number, group in enumerate(optimizer.param_groups):
        unnamed = (f"parameter {index} of group {number}" for index in range(len(group["params"])))
        yield from zip(group.get("param_names") or unnamed, group["params"], strict=True)
