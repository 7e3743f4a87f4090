"""Whether the backward passes of a divided model combine gradients, or keep them to this rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import ref

from torch.distributed.fsdp import FSDPModule

from accel_runtime.backends.averaging import Averaging

__all__ = ["Syncing"]


class Syncing:
    """The switch of one model.

    Args:
        gathered: The modules that `fully_shard` was applied to.
        whole: Averages the gradients of parameters that it left alone.
    """

    def __init__(self, gathered: Sequence[FSDPModule], whole: Averaging) -> None:
        # Weak: what knows of a model by this is not to keep it.
        self._gathered = [ref(module) for module in gathered]
        self._whole = whole
        self.wanted = True
        """Whether they do: torch can be told, and does not tell."""

    @contextmanager
    def set(self, *, wanted: bool) -> Iterator[None]:
        """Inside, they do, or do not."""
        before = self.wanted
        self._tell(wanted=wanted)
        try:
            with self._whole.released() if wanted else self._whole.held():
                yield
        finally:
            self._tell(wanted=before)

    def _tell(self, *, wanted: bool) -> None:
        if wanted is self.wanted:
            return
        self.wanted = wanted
        for reference in self._gathered:
            if (module := reference()) is not None:
                module.set_requires_gradient_sync(wanted, recurse=False)
