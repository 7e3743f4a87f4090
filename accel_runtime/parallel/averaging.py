"""Averages of gradients and buffers over the replicas of a model without DDP."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from accel_runtime.collectives.handshake import Handshake, build_writer, call_at_site
from accel_runtime.foundation.module_names import script_names
from accel_runtime.foundation.torch_internals import TORCH, graph_task_id, on_backward_end

__all__ = [
    "BufferAveraging",
    "GradientAveraging",
    "operate_flat",
    "refuse_max_norm",
    "split_by_size",
]


_GROUP_BYTES = 64 * 1024 * 1024
"""Bytes of tensors in one collective."""


class GradientAveraging:
    """Average the gradients of parameters over the ranks without DDP.

    All gradients are averaged at once after the last: if programs are compiled, collectives of one graph are merged and
    overlapped anyway, so buckets gain nothing.

    Args:
        named_parameters: The parameters; trainable ones are averaged.
        average: Averages gradients over the replicas, in place.
        handshake: Compares which gradients each replica has, since all must run the same program.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        average: Callable[[Sequence[torch.Tensor]], None],
        handshake: Handshake,
    ) -> None:
        trainable = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        self._names = [name for name, _ in trainable]
        self._parameters = [parameter for _, parameter in trainable]
        self._average, self._handshake = average, handshake
        self._compared: Sequence[bool] = ()
        self.is_active = True
        """True if the current backward passes average gradients."""
        self._last_pass = -1
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    @contextmanager
    def set_sync(self, *, wanted: bool) -> Iterator[None]:
        """Return a context in which gradients are averaged, or not."""
        before, self.is_active = self.is_active, wanted
        try:
            yield
        finally:
            self.is_active = before

    def _on_gradient(self, _: torch.Tensor) -> None:
        # The id of the pass and no flag, since a pass that fails never ends.
        number = graph_task_id()
        if not self.is_active or self._last_pass == number:
            return
        self._last_pass = number
        on_backward_end(self._average_all)

    @torch.no_grad()
    def _average_all(self) -> None:
        present = [parameter.grad is not None for parameter in self._parameters]
        if present != self._compared:
            self._compare(present)
            self._compared = present
        self._average([parameter.grad for parameter in self._parameters if parameter.grad is not None])

    def _compare(self, present: Sequence[bool]) -> None:
        """Raise RuntimeError if replicas have gradients of different parameters."""
        # Compared in the first pass, and in those that leave other gradients.
        call = call_at_site("backward()", anywhere=True, libraries=(TORCH,))
        result = self._handshake.exchange(call, len(present), build_writer(bytes(present)))
        present_by_rank = zip(*map(result.view, range(self._handshake.size)), strict=True)
        for name, presence in zip(self._names, present_by_rank, strict=True):
            if any(presence) and not all(presence):
                without = ", ".join(str(rank) for rank, is_present in enumerate(presence) if not is_present)
                raise RuntimeError(
                    f"Gradients cannot be averaged: the backward pass left no gradient of {name!r} on rank {without}, but left one on "
                    "others. Replicas run one program, so each must use the same parameters in a step, also with "
                    "find_unused_parameters=True. Add the unused outputs times zero to the loss."
                )


class BufferAveraging:
    """Forward hooks that broadcast the buffers of the first rank when DDP would.

    This is before the first forward pass and after each one whose gradients are averaged.

    Args:
        averages: Returns whether gradients are averaged; None on a copy of the model.
        broadcast: Broadcasts tensors from the first rank, in place.
    """

    def __init__(
        self,
        averages: Callable[[], bool] | None = None,
        broadcast: Callable[[Sequence[torch.Tensor]], None] | None = None,
    ) -> None:
        self._averages, self._broadcast = averages, broadcast
        self._is_due = True

    def before(self, model: nn.Module, _: Any) -> None:
        """Broadcast buffers before a forward pass, if due."""
        buffers = list(model.buffers()) if self._is_due and self._broadcast else []
        if self._broadcast and buffers:
            self._broadcast(buffers)

    def after(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        """Record after a forward pass whether the next one broadcasts."""
        self._is_due = self._averages is not None and torch.is_grad_enabled() and self._averages()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Return a context without broadcasts; restores the state afterwards."""
        broadcast, due = self._broadcast, self._is_due
        self._broadcast = None
        try:
            yield
        finally:
            self._broadcast, self._is_due = broadcast, due

    def __reduce__(self) -> tuple[type[BufferAveraging], tuple[()]]:
        return type(self), ()


def split_by_size(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield tensors of one dtype in groups of `_GROUP_BYTES` at most, unless one is larger."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        group: list[torch.Tensor] = []
        for tensor in (other for other in tensors if other.dtype == dtype):
            if group and sum(other.nbytes for other in group) + tensor.nbytes > _GROUP_BYTES:
                yield group
                group = []
            group.append(tensor)
        yield group


@torch.no_grad()
def operate_flat(tensors: Sequence[torch.Tensor], operate: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change tensors in place by an elementwise operation on flat groups of them, such as a collective."""
    for group in split_by_size(tensors):
        flat = operate(torch.cat([tensor.reshape(-1) for tensor in group]))
        for tensor, values in zip(group, torch.split(flat, [t.numel() for t in group]), strict=True):
            tensor.copy_(values.view_as(tensor))


def refuse_max_norm(model: nn.Module, replicated: Collection[nn.Parameter]) -> None:
    """Raise ValueError for embeddings that change their weights in the forward pass; `replicated` ones may be frozen.

    The change is lost in the gathered copy of a sharded weight. Each replica changes the rows of its own batches only.
    """
    for path, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module.max_norm is None:
            continue
        if module.weight.requires_grad or module.weight not in replicated:
            name = script_names(model, [path])[path] or "the model"
            raise ValueError(
                f"Cannot train {name} of {type(model).__name__} on several processes: max_norm changes the rows of its weight that a "
                "forward pass reads, and each process reads other rows. Leave out max_norm, and after each optimizer step write: "
                "with torch.no_grad(): weight.mul_((max_norm / weight.norm(dim=1, keepdim=True)).clamp(max=1))."
            )
