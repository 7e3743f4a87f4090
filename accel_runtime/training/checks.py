"""Checks of training scripts: gradients that are not averaged over the processes, and equal inputs on two ranks."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accel_runtime import nested
from accel_runtime.backends.base import Backend
from accel_runtime.heartbeat import TORCH, call_site
from accel_runtime.torch_internals import version_of
from accel_runtime.training.accumulation import Accumulation

__all__ = ["AveragingCheck", "FirstInput"]

_GRADIENTS_LOG = logging.getLogger("accel_runtime.training.gradients")
_MAX_NAMES = 5
"""Number of parameters that a warning names."""

_Version = tuple[int, int] | None
"""Identity of a gradient and its version, which changes in place."""


class AveragingCheck:
    """Warn once per model and optimizer with gradients that are not averaged over the processes.

    docs/design/replicated-models.md has the reasons.

    Args:
        backend: The backend of the run; its first rank writes the warnings.
        accumulation: Counts accumulation cycles.
        prepared: All prepared models; updated by the caller.
    """

    def __init__(self, backend: Backend, accumulation: Accumulation, prepared: Sequence[nn.Module]) -> None:
        self._backend = backend
        self._accumulation = accumulation
        self._prepared = prepared
        self._expects_model = backend.topology.world_size > 1
        self._averaged: dict[nn.Module, set[nn.Parameter]] = {}
        self._models: list[_Model] = []

    def add(self, prepared: nn.Module, *, averages: bool) -> None:
        """Add a prepared model; `averages` if gradients of parameters that now require one are averaged."""
        original = self._backend.unwrap_model(prepared)
        trainable = [p for p in original.parameters() if p.requires_grad and averages]
        self._averaged[original] = set(trainable)
        if original is not prepared and trainable:
            passes = ForwardPasses()
            prepared.register_forward_pre_hook(passes)
            self._models.append(_Model(prepared, original, trainable, passes))

    def clear(self) -> None:
        """Remove all models."""
        self._averaged.clear()
        self._models.clear()

    def begin_backward(self) -> None:
        """Record the gradients before a backward pass."""
        accumulation = self._accumulation
        if self._expects_model:
            self._expects_model = False
            if not self._prepared and self._backend.topology.rank == 0:
                _GRADIENTS_LOG.warning(
                    "Gradients are not averaged over the %d processes in backward() at %s: no model is prepared, so each process "
                    "trains weights of its own. Give the model to prepare(), also one in a DistributedDataParallel of your own.",
                    self._backend.topology.world_size,
                    call_site(),
                )
        if self._models and accumulation.synced and not accumulation.no_sync_depth:
            for model in self._models:
                model.begin_backward()

    def end_backward(self) -> None:
        """Warn if a model received gradients without a forward pass after which DDP averages them."""
        accumulation = self._accumulation
        if self._models and accumulation.synced and not accumulation.no_sync_depth:
            for model in self._models:
                if model.end_backward() and self._backend.topology.rank == 0:
                    _GRADIENTS_LOG.warning(
                        "Gradients of %s are not averaged over the %d processes in backward() at %s: no forward pass of the "
                        "prepared model belongs to them. Call the model that prepare() returned, once for each backward(): "
                        "unwrap_model(model)(...) and methods of the model bypass it. Call a method that training needs in "
                        "forward().",
                        type(model.original).__name__,
                        self._backend.topology.world_size,
                        call_site(),
                    )

    def expect_averaging(self, prepared: nn.Module) -> None:
        """Record that the next backward pass averages the gradients of a model, whatever its forward pass was."""
        for model in self._models:
            if model.original is self._backend.unwrap_model(prepared):
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
            text = ", ".join(f"{name} {list(parameter.shape)}" for name, parameter in local[:_MAX_NAMES])
            _GRADIENTS_LOG.warning(
                "%s trains %d parameters whose gradients are not averaged over the %d processes, so each process gets "
                "weights of its own: %s%s. %s.",
                type(optimizer).__name__,
                len(local),
                self._backend.topology.world_size,
                text,
                ", ..." if len(local) > _MAX_NAMES else "",
                "Their model is prepared for evaluation, or they required no gradient at prepare(): set requires_grad before "
                "prepare()"
                if all(parameter in names for _, parameter in local)
                else "They belong to no prepared model: give their model to prepare(), or average their gradients with "
                "accelerator.reduce(parameter.grad, 'mean')",
            )
        return True


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

    def __init__(
        self, prepared: Any, original: nn.Module, parameters: Sequence[nn.Parameter], passes: ForwardPasses
    ) -> None:
        self._prepared = prepared
        self.original = original
        self.passes = passes
        self._parameters = parameters
        self._first = parameters[0]
        self._before: _Version = None
        self._all_before: Sequence[_Version] = ()
        self._unexpected = 0
        self._warned = False

    def begin_backward(self) -> None:
        """Record the first gradient, or all of them if the model is not expected to receive any."""
        if self.passes.averaging:
            self._before = _version_of(self._first)
            return
        if not self._prepared.require_backward_grad_sync:  # the script uses DDP's own no_sync
            return
        self._unexpected += 1
        # Checked at the counts 1, 2, 4, 8, ... only, as a model that is not trained yet gets here in every pass.
        if not (self._warned or self._unexpected & (self._unexpected - 1)):
            self._all_before = [_version_of(parameter) for parameter in self._parameters]

    def end_backward(self) -> bool:
        """Return whether gradients have arrived without an average over the processes."""
        if self.passes.averaging:
            # DDP completes all gradients or none, so the first one is enough.
            self.passes.averaging = _version_of(self._first) == self._before
            return False
        before, self._all_before = self._all_before, ()
        self._warned = self._warned or any(
            _version_of(parameter) != old for parameter, old in zip(self._parameters, before, strict=False)
        )
        return bool(before) and self._warned


def _version_of(parameter: nn.Parameter) -> _Version:
    """Return a value that changes whenever a gradient is written or replaced."""
    grad = parameter.grad
    return None if grad is None else (id(grad), version_of(grad))


def _named_parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    for number, group in enumerate(optimizer.param_groups):
        unnamed = (f"parameter {index} of group {number}" for index in range(len(group["params"])))
        yield from zip(group.get("param_names") or unnamed, group["params"], strict=True)


_DATA_LOG = logging.getLogger("accel_runtime.data")
_KEY = "accel/first input"
_MAX_ELEMENTS = 1 << 16
"""Maximum number of elements of a tensor that are compared."""


class FirstInput:
    """Compare the first training batch of a model in DDP between the first two ranks, unless a loader shards the data.

    Rank 1 stores a fingerprint at its first forward pass, and rank 0 reads it at its second: by then DDP has
    synchronized with rank 1, and no rank has to wait.
    """

    def __init__(self, backend: Backend, divides_data: Callable[[], bool]) -> None:
        self._backend = backend
        self._divides_data = divides_data
        self._recorded: tuple[str, str, str] | None = None
        self._handle: RemovableHandle | None = None

    def watch(self, model: nn.Module) -> None:
        """Check the forward passes of a model in DDP until its input is compared."""
        if self._backend.topology.rank in {0, 1}:
            self._handle = model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, model: Any, args: Any, kwargs: Any) -> None:
        """Record or compare the input of a forward pass."""
        # torch.compile cannot trace this hook.
        if torch.compiler.is_compiling() or not (
            torch.is_grad_enabled() and model.require_backward_grad_sync
        ):
            return
        if self._recorded is not None:
            self._compare(*self._recorded)
        elif not self._divides_data() and (fingerprint := _fingerprint((args, kwargs))):
            key = f"{_KEY}/{self._backend.increment_store_key(_KEY)}"
            if self._backend.topology.rank == 0:
                self._recorded = (key, fingerprint, str(call_site(TORCH)))
                return
            self._backend.set_store_key(key, fingerprint)
        if self._handle is not None:
            self._handle.remove()

    def _compare(self, key: str, fingerprint: str, site: str) -> None:
        if self._backend.get_store_key(key) != fingerprint:
            return
        _DATA_LOG.warning(
            "Ranks 0 and 1 train on the same batch, at %s: no DataLoader is prepared, and the inputs of the model are equal. Give "
            "the DataLoader to prepare(), or let each process take data of its own, by accelerator.process_index, "
            "split_between_processes() or a generator with another seed on each process.",
            site,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model belongs to no run.
        return partial, (_do_nothing,)


def _fingerprint(data: Any) -> str:
    """Return a checksum of the tensors of a batch; empty without tensors."""
    tensors = [
        leaf
        for leaf in nested.leaves(data)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]
    checksum = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, -(-len(flat) // _MAX_ELEMENTS))].cpu().contiguous()
        checksum = zlib.crc32(sample.view(torch.uint8).numpy().tobytes(), checksum)
    return f"{[list(tensor.shape) for tensor in tensors]} {checksum}" if tensors else ""


def _do_nothing(*_: Any) -> None:
    return None
