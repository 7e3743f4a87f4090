"""Words left in the store through which ranks met, and the reductions that gloo has: what groups of processes share."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from accel_runtime.backends.base import Backend

__all__ = ["OPERATIONS", "InStore"]

OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # gloo has no average: the sum is divided
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
"""By what `Backend.all_reduce` is asked for."""


class InStore(Backend):
    """A backend whose ranks share a store of torch's."""

    @property
    @abstractmethod
    def _store(self) -> Any:
        """The store."""

    @override
    def post(self, key: str, text: str) -> None:
        self._store.set(key, text)

    @override
    def posted(self, key: str) -> str | None:
        store = self._store
        return store.get(key).decode() if store.check([key]) else None

    @override
    def turn(self, key: str) -> int:
        # Counted in the store and not here: a second backend of this process goes on where this one is.
        return int(self._store.add(f"{key}/turns/{self.topology.rank}", 1))
