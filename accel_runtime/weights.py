"""Losses with weights: gradients that are the mean over all items of a window, on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_runtime.accumulation import Accumulation
from accel_runtime.backends.base import Backend

if TYPE_CHECKING:
    from accel_runtime.optimizer import PreparedOptimizer

__all__ = ["Group", "Weight", "Weights", "groups", "silenced"]

_Stamp = list[tuple[int, int] | None]


class Group:
    """Parameters that belong to the same model and the same optimizer, and the weights in their gradients.

    Args:
        parameters: Its parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.pending: torch.Tensor | None = None
        """Weights of this rank that are in the gradients, which are not divided yet; `[]`."""
        self.total: torch.Tensor | None = None
        """Weights of all ranks that the gradients have been divided by; `[]`."""
        self._stamp: _Stamp = []
        self._sharded = any(hasattr(parameter, "device_mesh") for parameter in parameters)

    def resume(self, unit: torch.Tensor) -> None:
        """Before a backward pass: forget what was zeroed since the last, and undo the division of what was not.

        Args:
            unit: What all weights of all ranks are divided by inside a backward pass; `[]`.
        """
        if self._seen() != self._stamp:
            self.pending = self.total = None
        if self.total is not None:
            self._multiply(self.total / unit)
        self._stamp = self._seen()

    def add(self, weight: torch.Tensor, *, shown: bool) -> None:
        """After a backward pass: count its weight if it left something in the gradients here.

        Args:
            weight: `[]`.
            shown: Whether all of it is to be seen; fully sharded parameters keep it back while a window is open.
        """
        seen = self._seen()
        if seen != self._stamp or (self._sharded and not shown):
            self.pending = weight if self.pending is None else self.pending + weight
        self._stamp = seen

    def divide(self, arrived: torch.Tensor, unit: torch.Tensor) -> None:
        """Divide the gradients by all weights in them: those divided by before and those that arrived."""
        self.total = arrived if self.total is None else self.total + arrived
        self.pending = None
        # No rank had an item: the gradients are zeros, and remain zeros.
        self._multiply(torch.where(self.total > 0, unit / self.total, 0.0))
        self._stamp = self._seen()

    def put(self, pending: torch.Tensor | None, total: torch.Tensor | None) -> None:
        """Take the gradients as they are now for ones with these weights in them."""
        self.pending, self.total = pending, total
        self._stamp = self._seen()

    @property
    def counted(self) -> bool:
        """Whether the books here are of the gradients as they are now."""
        return self.open and self._seen() == self._stamp

    @property
    def open(self) -> bool:
        """Whether the gradients are not divided yet."""
        return self.pending is not None or self.total is not None

    @property
    def clear(self) -> bool:
        """Whether there are no gradients."""
        return all(parameter.grad is None for parameter in self.parameters)

    def _seen(self) -> _Stamp:
        """What changes whenever a gradient is written or replaced."""
        grads = [parameter.grad for parameter in self.parameters]
        return [None if grad is None else (id(grad), _version(grad)) for grad in grads]

    def _multiply(self, scale: torch.Tensor) -> None:
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        with torch.no_grad():
            for parameter in self.parameters:
                if parameter.grad is not None:
                    by_device.setdefault(parameter.grad.device, []).append(_here(parameter.grad))
            for device, grads in by_device.items():
                torch._foreach_mul_(grads, scale.to(device))


def _here(grad: torch.Tensor) -> Any:
    """What this rank has of a gradient: torch does not take divided ones and whole ones, or other meshes, together."""
    return grad.to_local() if hasattr(grad, "to_local") else grad


class Weights:
    """Backward passes whose losses are means over so many items.

    Inside a window every loss is multiplied by its weight over a unit that is the same on all ranks, so that
    numbers stay where they were (fp16 would overflow). Where the window is complete, the gradients are divided
    by the weights of all ranks.

    Args:
        backend: Adds up the weights of the ranks.
        accumulation: Says when a window is complete.
    """

    def __init__(self, backend: Backend, accumulation: Accumulation) -> None:
        self._backend = backend
        self._accumulation = accumulation
        self.unit: torch.Tensor | None = None
        """What all weights are divided by inside backward passes, from the first on; `[]`."""

    def backward(
        self,
        loss: torch.Tensor,
        weight: Weight,
        run: Callable[[torch.Tensor], None],
        found: list[Group],
    ) -> None:
        """Run the backward pass of a loss that is a mean over `weight` items.

        Args:
            loss: A scalar.
            weight: How many items.
            run: Runs the backward pass of the loss it is given.
            found: All groups of parameters; as many, in the same order, on all ranks.
        """
        unit = self.unit = self._first(weight) if self.unit is None else self.unit
        for group in found:
            group.resume(unit)
        before = [group.pending for group in found]
        # The sums travel while the backward pass computes; whose gradients it changes is known after it.
        nothing = torch.zeros_like(weight.amount)
        local = [nothing if pending is None else pending for pending in before]
        arrive = (
            self._backend.begin_sum(torch.stack([*local, weight.amount]))
            if self._accumulation.complete
            else None
        )
        run(loss * (weight.amount * self._backend.topology.world_size / unit))
        for group in found:
            group.add(weight.amount, shown=arrive is not None)
        if arrive is None:
            return
        *sums, own = arrive().unbind()
        for group, pending, arrived in zip(found, before, sums, strict=True):
            if group.open:
                group.divide(arrived if group.pending is pending else arrived + own, unit)

    def _first(self, weight: Weight) -> torch.Tensor:
        """What the weights of the first window will be about: `[]`."""
        total = self._backend.begin_sum(weight.amount * self._accumulation.steps)()
        return torch.where(total > 0, total, 1.0)


@dataclass(frozen=True)
class Weight:
    """How many items the loss of one backward pass is the mean of."""

    amount: torch.Tensor
    """The number, on the device: `[]`, float32, or float64 where the loss is float64."""
    empty: bool | None
    """Whether it is 0; None where that cannot be told without waiting for the device."""

    @classmethod
    def of(
        cls,
        given: float | torch.Tensor,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        as_data: bool = False,
    ) -> Weight:
        """A weight as a script gives it.

        Args:
            given: The number.
            device: Where it is to be.
            dtype: Of the loss: the weight is float64 where it is.
            as_data: It may not show in the program: not in what is computed, and not as a constant.

        Raises:
            ValueError: Not one number; or negative or not finite, which is seen for numbers and tensors on
                the CPU.
        """
        # Every rank has losses of the same format, but not weights: those may be numbers here and tensors there.
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
        if isinstance(given, torch.Tensor):
            if given.numel() != 1:
                raise ValueError(f"weight must be one number; it is a tensor of shape {list(given.shape)}")
            given = given.detach()
            if given.device.type != "cpu":
                return cls(given.reshape(()).to(device, dtype), empty=None)
        number = float(given)
        if not (math.isfinite(number) and number >= 0):
            raise ValueError(f"weight must be a finite number of items, at least 0; it is {number}")
        if as_data:
            # A scalar of 0 or 1 would become a constant.
            return cls(torch.tensor([number], dtype=dtype, device="cpu").to(device).view(()), empty=None)
        # Filled on the device: a copy to it would wait for it.
        return cls(torch.full((), number, dtype=dtype, device=device), empty=number == 0)


@contextmanager
def silenced(reached: Callable[[], Iterable[nn.Parameter]], weight: Weight) -> Iterator[None]:
    """Inside, a backward pass of weight 0 adds exact zeros, whatever its loss is, and all hooks fire.

    Args:
        reached: Finds the parameters that the pass may reach.
        weight: Where its value is not known, every gradient is selected by it on the device.
    """
    if weight.empty is False:
        yield
        return

    def zeros(grad: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(grad)

    def selected(grad: torch.Tensor) -> torch.Tensor:
        return grad if grad.is_sparse else torch.where(weight.amount.to(grad.device) == 0, 0.0, grad)

    hook = zeros if weight.empty else selected
    parameters = [parameter for parameter in reached() if parameter.requires_grad]
    handles = [parameter.register_hook(hook) for parameter in parameters]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _version(grad: torch.Tensor) -> int:
    # A sharded tensor is a shell, and only what is inside it counts its changes.
    version: int = getattr(grad, "_local_tensor", grad)._version  # noqa: SLF001
    return version


def groups(models: Sequence[nn.Module], optimizers: Sequence[PreparedOptimizer]) -> list[Group]:
    """The parameters of models and optimizers, each once, together where model and optimizer are the same."""
    owner: dict[nn.Parameter, list[int | None]] = {}
    for index, model in enumerate(models):
        for parameter in model.parameters():
            owner.setdefault(parameter, [index, None])
    for index, optimizer in enumerate(optimizers):
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            owner.setdefault(parameter, [None, None])[1] = index
    members: dict[tuple[int | None, ...], list[nn.Parameter]] = {}
    for parameter, key in owner.items():
        members.setdefault(tuple(key), []).append(parameter)
    return [Group(found) for found in members.values()]
