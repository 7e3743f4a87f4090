"""Gradients averaged at the end of a backward pass, where nothing of torch's does it; and buffers made the first rank's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from accel_runtime.exchange.agreement import Agreement, Call, filled
from accel_runtime.exchange.callsite import CallSite

__all__ = ["Averaging", "Buffers", "in_parts"]

_AT_ONCE = 64 * 1024 * 1024
"""Bytes of tensors that travel together."""
_PASS = Call("backward()", CallSite("", 0, ""), anywhere=True)


class Averaging:
    """What makes parameters average their gradients over the ranks, where it stands for DDP.

    All gradients go together, once the last is there: where programs are compiled, collectives of one graph are joined and
    overlapped anyway, so nothing is gained by buckets.

    Args:
        named: The parameters by name; those that learn are averaged.
        average: Makes gradients their mean over the replicas, in place.
        agreement: Tells which parameters each replica has gradients of, since all must run the same program.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        average: Callable[[Sequence[torch.Tensor]], None],
        agreement: Agreement,
    ) -> None:
        learn = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self._names, self._parameters = [name for name, _ in learn], [parameter for _, parameter in learn]
        self._average, self._agreement = average, agreement
        self._agreed: Sequence[bool] = ()
        self._held = 0
        self._pass = -1
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, gradients stay those of this replica."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    @contextmanager
    def released(self) -> Iterator[None]:
        """Inside, gradients are averaged whatever `held` is around it."""
        held, self._held = self._held, 0
        try:
            yield
        finally:
            self._held = held

    @property
    def averages(self) -> bool:
        """Whether the backward passes that end now average."""
        return not self._held

    def _arrived(self, _: torch.Tensor) -> None:
        # A number and no flag: a pass that fails never ends. Neither it nor what is called at the end of a pass has a
        # public name (torch 2.13); DDP and FSDP use them.
        number: int = torch._C._current_graph_task_id()  # noqa: SLF001
        if self._held or self._pass == number:
            return
        self._pass = number
        torch.autograd.Variable._execution_engine.queue_callback(self._complete)  # noqa: SLF001

    @torch.no_grad()
    def _complete(self) -> None:
        present = [parameter.grad is not None for parameter in self._parameters]
        if present != self._agreed:
            self._check(present)
            self._agreed = present
        self._average([parameter.grad for parameter in self._parameters if parameter.grad is not None])

    def _check(self, present: Sequence[bool]) -> None:
        """See to it that all replicas have the same gradients.

        Raises:
            RuntimeError: They do not.
        """
        met = self._agreement.exchange(_PASS, len(present), filled(bytes(present)))
        everyones = zip(*map(met.view, range(self._agreement.size)), strict=True)
        for name, have in zip(self._names, everyones, strict=True):
            if any(have) and not all(have):
                without = ", ".join(str(rank) for rank, has in enumerate(have) if not has)
                raise RuntimeError(
                    f"the backward pass left no gradient of {name!r} on rank {without}, but on others it did. Replicas "
                    "compute one program, so each has to use the same parts of the model at a step, also with "
                    "find_unused_parameters=True: add what is left out times zero to the loss."
                )


class Buffers:
    """Hooks that give every replica the first one's buffers at the forward passes at which DDP does.

    These are the first, and each one after a pass that computes gradients to be averaged.

    Args:
        averages: Whether gradients are averaged now; None on a copy of the model, which belongs to no run.
        share: Gives every replica the first one's values.
    """

    def __init__(
        self,
        averages: Callable[[], bool] | None = None,
        share: Callable[[Sequence[torch.Tensor]], None] | None = None,
    ) -> None:
        self._averages, self._share = averages, share
        self._due = True

    def before(self, model: nn.Module, _: Any) -> None:
        """A forward pass begins."""
        buffers = list(model.buffers()) if self._due and self._share else []
        if self._share and buffers:
            self._share(buffers)

    def after(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        """A forward pass is over."""
        self._due = self._averages is not None and torch.is_grad_enabled() and self._averages()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, nothing is given to anybody; after it all is as before."""
        share, due = self._share, self._due
        self._share = None
        try:
            yield
        finally:
            self._share, self._due = share, due

    def __reduce__(self) -> tuple[type[Buffers], tuple[()]]:
        return type(self), ()


def in_parts(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors of one dtype each, `_AT_ONCE` bytes together at most unless one is larger."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        part: list[torch.Tensor] = []
        for tensor in (some for some in tensors if some.dtype == dtype):
            if part and sum(some.nbytes for some in part) + tensor.nbytes > _AT_ONCE:
                yield part
                part = []
            part.append(tensor)
        yield part
