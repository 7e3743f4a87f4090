"""Check that the gradients of a backward pass, and those of an optimizer's parameters, are averaged over the processes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from accel_runtime.foundation.module_names import named_parameters
from accel_runtime.foundation.torch_internals import version_of
from accel_runtime.observe.call_sites import call_site
from accel_runtime.parallel.strategy import Strategy
from accel_runtime.storage.errors import format_names
from accel_runtime.training.accumulation import Accumulation

__all__ = ["AveragingCheck"]

_LOG = logging.getLogger("accel_runtime.checks.averaging")
_MAX_NAMES = 5
"""Number of parameters that a warning names."""

_Version = tuple[int, int] | None
"""Identity of a gradient and its version, which changes in place."""


class AveragingCheck:
    """Warn once per model and optimizer with gradients that are not averaged over the processes.

    docs/design/checks.md has the reasons.

    Args:
        strategy: The strategy of the run; its first rank checks.
        accumulation: Counts accumulation cycles.
        prepared: All prepared models; updated by the caller.
    """

    def __init__(self, strategy: Strategy, accumulation: Accumulation, prepared: Sequence[nn.Module]) -> None:
        self._strategy, self._backend = strategy, strategy.backend
        self._accumulation = accumulation
        self._prepared = prepared
        self._expects_model = strategy.backend.topology.world_size > 1
        self._averaged: dict[nn.Module, set[nn.Parameter]] = {}
        self._all_averaged: set[nn.Parameter] = set()
        self._models: list[_Model] = []
        self._reported = WeakSet[torch.optim.Optimizer]()

    def add(self, prepared: nn.Module, *, averages: bool) -> None:
        """Add a prepared model; `averages` if gradients of parameters that now require one are averaged."""
        original = self._strategy.unwrap_model(prepared)
        # A model that was unwrapped and prepared again.
        for model in [model for model in self._models if model.original is original]:
            model.stop()
            self._models.remove(model)
        trainable = [p for p in original.parameters() if p.requires_grad and averages]
        self._averaged[original] = set(trainable)
        self._all_averaged = set().union(*self._averaged.values())
        if isinstance(prepared, DistributedDataParallel) and trainable:
            self._models.append(_Model(prepared, original))
            self._separate_models()

    def _separate_models(self) -> None:
        """Let each model be recognized by parameters of its own: others get gradients in the passes of another model too."""
        averaged = [self._averaged[model.original] for model in self._models]
        counts = Counter(parameter for parameters in averaged for parameter in parameters)
        for model, parameters in zip(self._models, averaged, strict=True):
            own = {parameter for parameter in parameters if counts[parameter] == 1}
            model.watch([parameter for parameter in model.original.parameters() if parameter in own])

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters whose gradients are averaged, with their names in their models."""
        for model, averaged in self._averaged.items():
            yield from ((name, p) for name, p in model.named_parameters() if p in averaged)

    def clear(self) -> None:
        """Remove all models."""
        self.stop()
        self._averaged.clear()
        self._all_averaged.clear()
        self._models.clear()

    def start(self) -> None:
        """Check the next backward passes."""
        for model in self._models:
            model.start()

    def stop(self) -> None:
        """Remove all hooks, until `start`."""
        for model in self._models:
            model.stop()

    def begin_backward(self) -> None:
        """Record the gradients before a backward pass."""
        if self._expects_model:
            self._expects_model = False
            if not self._prepared:
                _LOG.warning(
                    "Gradients are not averaged over the %d processes in backward() at %s: no model is prepared, so each process "
                    "trains weights of its own. Give the model to prepare(), also one in a DistributedDataParallel of your own.",
                    self._backend.topology.world_size,
                    call_site(),
                )
        if self._models and self._accumulation.syncs_gradients:
            for model in self._models:
                model.begin_backward()

    def end_backward(self) -> None:
        """Warn if a model received gradients without a forward pass after which DDP averages them."""
        if self._models and self._accumulation.syncs_gradients:
            for model in self._models:
                if model.end_backward():
                    _LOG.warning(
                        "Gradients of %s are not averaged over the %d processes in backward() at %s: no forward pass of the "
                        "prepared model belongs to them. Call the model that prepare() returned, once for each backward(): "
                        "unwrap_model(model)(...) and methods of the model bypass it. Call a method that training needs in "
                        "forward().",
                        type(model.original).__name__,
                        self._backend.topology.world_size,
                        call_site(),
                    )
                if repeated := model.take_repeated_gradients():
                    _LOG.warning(
                        "Gradients of %s are averaged over the %d processes in part only, in backward() at %s: DDP averages the first "
                        "gradient of a parameter, and %s received several, as activation checkpointing with use_reentrant=True does for "
                        "layers that are used twice. Pass use_reentrant=False to torch.utils.checkpoint.checkpoint.",
                        type(model.original).__name__,
                        self._backend.topology.world_size,
                        call_site(),
                        format_names(repeated, _MAX_NAMES),
                    )

    def expect_averaging(self, prepared: nn.Module) -> None:
        """Record that the next backward pass averages the gradients of a model, whatever its forward pass was."""
        for model in self._models:
            if model.original is self._strategy.unwrap_model(prepared):
                model.passes.averaging = True

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn once if an optimizer is about to apply gradients that are not averaged."""
        local = [
            (name, parameter)
            for name, parameter in _named_parameters(optimizer)
            if parameter.grad is not None and parameter not in self._all_averaged
        ]
        if not local or optimizer in self._reported:
            return
        self._reported.add(optimizer)
        names = {p: name for model in self._averaged for name, p in named_parameters(model)}
        named = [f"{names.get(parameter, name)} {list(parameter.shape)}" for name, parameter in local]
        _LOG.warning(
            "%s trains %d parameters whose gradients are not averaged over the %d processes, so each process gets "
            "weights of its own: %s%s. %s.",
            type(optimizer).__name__,
            len(local),
            self._backend.topology.world_size,
            ", ".join(named[:_MAX_NAMES]),
            ", ..." if len(local) > _MAX_NAMES else "",
            "Their model is prepared for evaluation, or they required no gradient at prepare(): set requires_grad before "
            "prepare()"
            if all(parameter in names for _, parameter in local)
            else "They belong to no prepared model: give their model to prepare(), or average their gradients with "
            "accelerator.reduce(parameter.grad, 'mean')",
        )


class ForwardPasses:
    """Hook before the forward passes of a model in DDP."""

    averaging = False
    """True if DDP averages the gradients of the next backward pass that reaches the model."""

    def __call__(self, model: Any, _: Any) -> None:
        """Record a forward pass, on the same condition as DDP."""
        if torch.is_grad_enabled() and model.require_backward_grad_sync:
            self.averaging = True


class _Model:
    """Model in DDP."""

    def __init__(self, prepared: Any, original: nn.Module) -> None:
        self._prepared = prepared
        self.original = original
        self.passes = ForwardPasses()
        self._handle: RemovableHandle | None = None
        self._had_steps = False
        """True if there may have been forward passes without the hook."""
        self._parameters: Sequence[nn.Parameter] = ()
        self._before: _Version = None
        self._all_before: Sequence[_Version] = ()
        self._unexpected = 0
        self._warned = False
        self._num_averaged = 0
        self._has_repeats = False
        self._counts: _GradientCounts | None = None

    def watch(self, parameters: Sequence[nn.Parameter]) -> None:
        """Recognize the model by the gradients of these parameters; it is not checked without any."""
        self._parameters = parameters

    def start(self) -> None:
        """Record forward passes from now on."""
        if self._handle is None:
            self._handle = self._prepared.register_forward_pre_hook(self.passes)
            self._num_averaged = self._unexpected = 0
            # The backward pass of an earlier forward pass may follow.
            self.passes.averaging = self._had_steps

    def stop(self) -> None:
        """Record no forward passes."""
        self.take_repeated_gradients()
        if self._handle is not None:
            self._handle.remove()
            self._handle, self._all_before, self._had_steps = None, (), True

    def begin_backward(self) -> None:
        """Record the first gradient, or all of them if the model is not expected to receive any."""
        self.take_repeated_gradients()  # of a pass that failed
        if not self._parameters:
            return
        if self.passes.averaging:
            self._before = _version_of(self._parameters[0])
            self._num_averaged += 1
            # Counted in the passes 1, 2, 4, 8, ... only. A static graph is averaged after the last gradient of each parameter.
            if not (
                self._num_averaged & (self._num_averaged - 1)
                or self._has_repeats
                or self._prepared.static_graph
            ):
                self._counts = _GradientCounts(self._parameters)
            return
        if not self._prepared.require_backward_grad_sync:  # the script uses DDP's own no_sync
            return
        self._unexpected += 1
        # Checked at the counts 1, 2, 4, 8, ... only, as a model that is not trained yet gets here in every pass.
        if not (self._warned or self._unexpected & (self._unexpected - 1)):
            self._all_before = [_version_of(parameter) for parameter in self._parameters]

    def end_backward(self) -> bool:
        """Return whether gradients have arrived without an average over the processes."""
        if not self._parameters:
            return False
        if self.passes.averaging:
            # DDP completes all gradients or none, so the first one is enough.
            self.passes.averaging = _version_of(self._parameters[0]) == self._before
            return False
        before, self._all_before = self._all_before, ()
        self._warned = self._warned or any(
            _version_of(parameter) != old for parameter, old in zip(self._parameters, before, strict=False)
        )
        return bool(before) and self._warned

    def take_repeated_gradients(self) -> list[str]:
        """Return the names of the parameters that received several gradients in the backward pass, if they were counted."""
        counts, self._counts = self._counts, None
        if counts is None:
            return []
        counts.remove()
        repeated = [name for name, p in named_parameters(self.original) if counts.by_parameter[p] > 1]
        self._has_repeats = bool(repeated)
        return repeated


class _GradientCounts:
    """Counts the gradients that each parameter receives until `remove` is called."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.by_parameter = Counter[torch.Tensor]()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._count)  # type: ignore[no-untyped-call]
            for parameter in parameters
            if parameter.requires_grad  # the script may freeze some after prepare()
        ]

    def _count(self, parameter: torch.Tensor) -> None:
        self.by_parameter[parameter] += 1

    def remove(self) -> None:
        """Count no more."""
        for handle in self._handles:
            handle.remove()


def _version_of(parameter: nn.Parameter) -> _Version:
    """Return a value that changes whenever a gradient is written or replaced."""
    grad = parameter.grad
    return None if grad is None else (id(grad), version_of(grad))


def _named_parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    for number, group in enumerate(optimizer.param_groups):
        unnamed = (f"parameter {index} of group {number}" for index in range(len(group["params"])))
        yield from zip(group.get("param_names") or unnamed, group["params"], strict=True)
