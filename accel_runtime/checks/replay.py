"""Run forward and backward passes of a prepared model twice, and report results that differ."""

from __future__ import annotations

import logging
import random
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from accel_runtime.backends.base import Backend
from accel_runtime.foundation import nested
from accel_runtime.foundation.tensor_bytes import hash_tensor
from accel_runtime.foundation.torch_internals import local_tensor

__all__ = ["ReplayCheck"]

_LOG = logging.getLogger("accel_runtime.checks.replay")
Digests = dict[str, int]
"""Hashes of what a pass computes, by description, in the order of the pass."""


class ReplayCheck:
    """Replay passes of a model, and warn once for each place at which two of them differ.

    Each replay starts from the same inputs, parameters, buffers and states of random number generators. It computes the outputs of all
    modules, and the gradients of a fixed linear function of the outputs of the model, without an exchange between ranks: the
    gradients, buffers and generators of the training stay as they are.

    Args:
        prepared: The prepared model.
        model: The model inside of it.
        backend: Ranks and device.
        every: The first of so many forward passes is checked.
    """

    def __init__(self, prepared: nn.Module, model: nn.Module, backend: Backend, every: int) -> None:
        self.prepared = prepared
        self._model, self._backend, self._every = model, backend, every
        self._passes = 0
        self._is_replaying = False
        self._reported: set[str] = set()
        self._hook = prepared.register_forward_pre_hook(self._begin_pass, with_kwargs=True)

    def remove(self) -> None:
        """Check no more."""
        self._hook.remove()

    def _begin_pass(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_replaying or not (torch.is_grad_enabled() and self._model.training):
            return
        self._passes += 1
        if (self._passes - 1) % self._every:
            return
        self._is_replaying = True
        try:
            self._check(args, kwargs)
        finally:
            self._is_replaying = False

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        def replay() -> Digests:
            with self._keep_state():
                return self._replay(args, kwargs)

        first, second = replay(), replay()
        if (place := _find_difference(first, second)) is None or place in self._reported:
            return
        self._reported.add(place)
        _LOG.warning(
            "A replay of forward pass %d differs on rank %d (%s, host %s): first in %s. %s",
            self._passes,
            self._backend.topology.rank,
            self._backend.device,
            socket.gethostname(),
            place,
            _explain(place, first, second, replay),
        )

    @contextmanager
    def _keep_state(self) -> Iterator[None]:
        """Restore buffers and the states of random number generators at the end."""
        buffers = [(one, one.detach().clone()) for one in self._model.buffers()]
        python = random.getstate()
        numpy = sys.modules.get("numpy.random")
        array = None if numpy is None else numpy.get_state()
        device = self._backend.device
        devices = [device] if device.type not in {"cpu", "mps"} else []
        try:
            with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
                yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.set_state(array)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)

    def _replay(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Digests:
        digests: Digests = {}
        # A model may change its inputs.
        args, kwargs = nested.map_tensors(_copy, (args, kwargs))
        hooks = [
            module.register_forward_hook(_build_hook(digests, f"the output of {name}"))
            for name, module in self._model.named_modules()
            if name
        ]
        try:
            # Not the module itself, whose own hooks count passes.
            output = self._model.forward(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        _add_outputs(digests, "the output of the model", output)
        tensors = [
            one for one in nested.list_tensors(output) if one.requires_grad and one.is_floating_point()
        ]
        named = [(name, one) for name, one in self._model.named_parameters() if one.requires_grad]
        if tensors and named:
            gradients = torch.autograd.grad(
                tensors, [one for _, one in named], [_draw_like(one) for one in tensors], allow_unused=True
            )
            # The backward pass computes the last ones first.
            for (name, _), gradient in reversed(list(zip(named, gradients, strict=True))):
                if gradient is not None:
                    digests[f"the gradient of {name}"] = hash_tensor(local_tensor(gradient))
        return digests


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _build_hook(digests: Digests, name: str) -> Callable[[nn.Module, Any, Any], None]:
    def record(_: nn.Module, _args: Any, output: Any) -> None:
        _add_outputs(digests, name, output)

    return record


def _add_outputs(digests: Digests, name: str, output: Any) -> None:
    for tensor in nested.list_tensors(output):
        if nested.is_strided_tensor(tensor):
            calls = sum(key.partition(",")[0] == name for key in digests)
            digests[f"{name}, tensor {calls + 1}" if calls else name] = hash_tensor(tensor.detach())


def _draw_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same random numbers for each replay."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)


def _find_difference(first: Digests, second: Digests) -> str | None:
    """Return the first result in which two passes differ."""
    for name, value in first.items():
        if second.get(name) != value:
            return name
    return next((name for name in second if name not in first), None)


def _explain(place: str, first: Digests, second: Digests, replay: Callable[[], Digests]) -> str:
    third = replay()
    with _use_deterministic_algorithms():
        pair = replay(), replay()
    if _find_difference(*pair) is not None:
        return (
            "Passes with deterministic algorithms differ too: it computes from a value that is neither input, parameter, buffer nor "
            "random state, by a kernel that torch does not know as nondeterministic, or the device computes wrong results. Run it on "
            "another device to tell these apart."
        )
    agrees = any(third.get(place) == one.get(place) for one in (first, second))
    if agrees:
        return (
            "Two of three passes agree, and those with deterministic algorithms do: the device may have computed a wrong result (silent "
            "corruption), or a nondeterministic kernel rarely differs. Run it on another device to tell these apart."
        )
    return (
        "Three passes differ, and those with deterministic algorithms agree: a nondeterministic kernel. Call "
        "torch.use_deterministic_algorithms(True) to find or replace it."
    )


@contextmanager
def _use_deterministic_algorithms() -> Iterator[None]:
    enabled, warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
