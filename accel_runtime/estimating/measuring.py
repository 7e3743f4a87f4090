"""What the forward pass keeps for the backward pass, measured on tensors without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from accel_runtime.estimating.arithmetic import Activations
from accel_runtime.estimating.dividing import Division
from accel_runtime.estimating.errors import EstimateError, raised

__all__ = ["Batch", "Forward", "activations"]


@dataclass(frozen=True)
class Batch:
    """What the model is called with."""

    inputs: Any
    """A tensor, a tuple or list of arguments, or a mapping of arguments by name."""
    loss: Callable[..., Any] | None = None

    def split(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments by place and by name."""
        if isinstance(self.inputs, Mapping):
            return (), dict(self.inputs)
        if isinstance(self.inputs, (tuple, list)):
            return tuple(self.inputs), {}
        return (self.inputs,), {}


@dataclass(frozen=True)
class Forward:
    """How a forward pass computes."""

    autocast: torch.dtype | None = None
    """The format of `mixed_precision`."""
    gathered: torch.dtype | None = None
    """What parameters were brought to as they were gathered; None leaves them."""
    tp: int = 1
    division: Division | None = None
    """What `tp` divides."""


@dataclass
class _Seen:
    """Memory that stays after the forward pass, and in which module it came to be."""

    given: frozenset[int]
    """Memory of parameters and buffers, which is counted elsewhere."""
    inside: int | None = None
    """The wrapped module that computes."""
    all: dict[int, int] = field(default_factory=dict)
    """Bytes of each piece of memory."""
    homes: dict[int, int | None] = field(default_factory=dict)
    inputs: set[int] = field(default_factory=set)
    """What went into wrapped modules."""
    alive: list[torch.Tensor] = field(default_factory=list)
    """A piece of memory that is given back could be counted under the name of another."""

    def add(self, value: Any) -> int | None:
        """Count the memory of a tensor once; its name, or None where it is counted elsewhere."""
        if not isinstance(value, torch.Tensor):
            return None
        storage = value.untyped_storage()
        key: int = storage._cdata  # noqa: SLF001 - the only name that memory has
        if key in self.given:
            return None
        self.alive.append(value)
        self.all.setdefault(key, storage.nbytes())
        self.homes.setdefault(key, self.inside)
        return key


def activations(model: nn.Module, units: Sequence[nn.Module], batch: Batch, forward: Forward) -> Activations:
    """What stays after a forward pass: saved for the backward pass, given in, and returned.

    It runs as on the CPU, whose kernels save what a GPU's do, where those of the meta device take others: attention there
    keeps every score. What `tp` divides has the shape of one rank's part.

    Args:
        model: On the meta device.
        units: What is checkpointed, where activations are.
        batch: What it is called with.
        forward: How it computes.

    Raises:
        EstimateError: The forward pass fails.
    """
    with FakeTensorMode(), ExitStack() as stack:
        apart = _kept_as_they_are(model)
        parameters = {
            name: _fake(p, _shape(name, p, forward), None if p in apart else forward.gathered)
            for name, p in model.named_parameters()
        }
        buffers = {name: _fake(b, tuple(b.shape), None) for name, b in model.named_buffers()}
        seen = _Seen(frozenset(t.untyped_storage()._cdata for t in (*parameters.values(), *buffers.values())))  # noqa: SLF001
        stack.enter_context(_watched(units, seen))
        stack.enter_context(_gathered(model, forward))
        stack.enter_context(saved_tensors_hooks(lambda t: (seen.add(t), t)[1], lambda t: t))
        stack.enter_context(_autocast(forward.autocast))
        positional, named = tree_map(_as_fake, batch.split())
        try:
            out = torch.func.functional_call(model, parameters | buffers, positional, named)
            out = (out, batch.loss(out)) if batch.loss else out
        except Exception as error:  # noqa: BLE001 - a model is anybody's code
            raise EstimateError(f"the forward pass failed: {raised(error)}") from None
        for value in tree_leaves((positional, named, _plain(out))):
            seen.add(value)
    return _summed(seen)


def _summed(seen: _Seen) -> Activations:
    kept = {key for key, home in seen.homes.items() if home is None} | (seen.inputs & seen.all.keys())
    again: dict[int, int] = {}
    for key, home in seen.homes.items():
        if home is not None and key not in kept:
            again[home] = again.get(home, 0) + seen.all[key]
    checkpointed = sum(seen.all[key] for key in kept) + max(again.values(), default=0)
    return Activations(sum(seen.all.values()), checkpointed, max(seen.all.values(), default=0))


def _kept_as_they_are(model: nn.Module) -> set[nn.Parameter]:
    """Parameters of batch normalisations, which stay in the format of their statistics."""
    return {p for module in model.modules() if isinstance(module, _BatchNorm) for p in module.parameters()}


def _fake(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None) -> torch.Tensor:
    wanted = dtype if dtype and tensor.is_floating_point() else tensor.dtype
    made = torch.empty(shape, dtype=wanted, device="cpu")
    return made.requires_grad_(tensor.requires_grad)


def _as_fake(value: Any) -> Any:
    return (
        torch.empty(value.shape, dtype=value.dtype, device="cpu")
        if isinstance(value, torch.Tensor)
        else value
    )


def _shape(name: str, parameter: nn.Parameter, forward: Forward) -> tuple[int, ...]:
    shape = list(parameter.shape)
    dim = forward.division.dims.get(name) if forward.division else None
    if dim is not None:
        shape[dim] //= forward.tp
    return tuple(shape)


def _plain(out: Any) -> Any:
    """An output whose tensors can be found: what torch does not know as a tree of values may be a mapping or an object."""
    return dict(out) if isinstance(out, Mapping) else out


def _autocast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype) if dtype else nullcontext()


@contextmanager
def _watched(units: Sequence[nn.Module], seen: _Seen) -> Iterator[None]:
    """Inside, it is known which wrapped module computes; none of them is inside another."""

    def enter(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if seen.inside is None:
            keys = {seen.add(value) for value in tree_leaves((args, kwargs))}
            seen.inputs |= {key for key in keys if key is not None}
            seen.inside = index

    def leave(index: int) -> None:
        seen.inside = None if seen.inside == index else seen.inside

    with ExitStack() as stack:
        for index, unit in enumerate(units):
            before = unit.register_forward_pre_hook(
                lambda _, args, kwargs, index=index: enter(index, args, kwargs), with_kwargs=True
            )
            after = unit.register_forward_hook(lambda *_, index=index: leave(index))
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield


@contextmanager
def _gathered(model: nn.Module, forward: Forward) -> Iterator[None]:
    """Inside, modules of the plan that put their outputs together do so."""

    def whole(_: nn.Module, __: Any, out: torch.Tensor) -> torch.Tensor:
        return torch.cat([out] * forward.tp, dim=-1)

    names = forward.division.gathered if forward.division and forward.tp > 1 else ()
    hooks = [model.get_submodule(name).register_forward_hook(whole) for name in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
