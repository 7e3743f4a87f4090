"""Loops of unequal length: processes that are through answer the gradient averaging of those that are not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakValueDictionary

from torch import nn
from torch.distributed.algorithms.join import Joinable

from accel_runtime.data.loader import PreparedLoader
from accel_runtime.facade.processes import Processes
from accel_runtime.heartbeat import heartbeat

__all__ = ["UnevenInputs"]


class UnevenInputs(Processes):
    """`join_uneven_inputs` of an `Accelerator`."""

    _loaders: WeakValueDictionary[int, PreparedLoader]

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Iterable[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Inside, a process may have fewer batches than others: the gradient averaging does not wait for it.

        It works over DDP on every device, the CPU too. Other collectives in the loop still have to be
        made by all. Sharded models and replicas of torch_xla cannot be joined: there it warns once, and has no effect but
        for `even_batches`.

        Args:
            joinables: Prepared models.
            even_batches: Whether prepared loaders with indices complete their last global batch, for this
                block; None leaves it as it is. With True there is nothing to join.

        Raises:
            TypeError: Something in `joinables` that torch cannot join.
            ValueError: A prepared loader cannot leave its last global batch as it is.
        """
        with ExitStack() as stack:
            if even_batches is not None:
                for loader in list(self._loaders.values()):
                    stack.enter_context(loader.overridden(even_batches=even_batches))
            joined = [item for item in joinables if not _learns_nothing(item)]
            if joined and self.use_distributed and not even_batches:
                stack.enter_context(self._backend.joined(joined))
            yield
        if (progress := heartbeat()) is not None:
            progress.level()


def _learns_nothing(item: Any) -> bool:
    """Whether this is a model that was left as it is, since there is no gradient to average."""
    if isinstance(item, Joinable) or not isinstance(item, nn.Module):
        return False
    return not any(parameter.requires_grad for parameter in item.parameters())
