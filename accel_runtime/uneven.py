"""Loops of unequal length: processes that are through answer the gradient averaging of those that are not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.algorithms.join import Join, Joinable

from accel_runtime.processes import Processes

__all__ = ["UnevenInputs"]


class UnevenInputs(Processes):
    """`join_uneven_inputs` of an `Accelerator`."""

    _loaders: list[Any]

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Iterable[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Inside, a process may have fewer batches than others: the gradient averaging does not wait for it.

        It works over DDP on every device, the CPU too. Other collectives in the loop still have to be
        made by all.

        Args:
            joinables: Prepared models.
            even_batches: Whether prepared map-style loaders complete their last global batch, for this
                block; None leaves it as it is. Where they do complete it, there is nothing to join.

        Raises:
            TypeError: Something in `joinables` that torch cannot join.
            ValueError: A prepared loader cannot leave its last global batch as it is.
        """
        with ExitStack() as stack:
            for loader in self._loaders if even_batches is not None else ():
                stack.enter_context(_overridden(loader, even_batches=bool(even_batches)))
            even = getattr(self, "even_batches", True) if even_batches is None else even_batches
            if self.use_distributed and not even:
                stack.enter_context(Join([j for j in joinables if not _learns_nothing(j)]))
            yield


def _overridden(loader: Any, *, even_batches: bool) -> AbstractContextManager[Any]:
    override = getattr(loader, "overridden", None)
    if override is not None:
        context: AbstractContextManager[Any] = override(even_batches=even_batches)
        return context
    if even_batches:  # which is what a loader that cannot be told does
        return nullcontext()
    raise ValueError(
        "join_uneven_inputs(even_batches=False): a prepared loader always completes its last global batch, and "
        "cannot be told otherwise; leave even_batches out, or prepare only the model"
    )


def _learns_nothing(item: Any) -> bool:
    """Whether this is a model that was left as it is, since there is no gradient to average."""
    if isinstance(item, Joinable) or not isinstance(item, nn.Module):
        return False
    return not any(parameter.requires_grad for parameter in item.parameters())
