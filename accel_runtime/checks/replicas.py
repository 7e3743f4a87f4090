"""Check from time to time that the replicas of a model have the same weights."""

from __future__ import annotations

import logging
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from accel_runtime.foundation.tensor_bytes import hash_tensor
from accel_runtime.parallel.strategy import Strategy
from accel_runtime.training.accumulation import Accumulation
from accel_runtime.training.optimizer import PreparedOptimizer

__all__ = ["CHECK_INTERVAL", "ReplicaCheck", "WeightDigests"]

_LOG = logging.getLogger("accel_runtime.checks.replicas")
CHECK_INTERVAL = 500
"""The number of backward passes between two checks; the first follow after 1, 8 and 64."""
_GROWTH = 8
_MAX_NAMES = 3


class WeightDigests(NamedTuple):
    """Hashes of the trained parameters of this rank, after a number of backward passes."""

    number: int
    """The number of backward passes."""
    names: tuple[str, ...]
    """The names of the parameters."""
    text: str
    """The number of optimizer steps and all hashes."""


class ReplicaCheck:
    """Compare the weights of replicas, and warn once with the first parameter that differs.

    Replicas get equal gradients, so they stay equal to the bit, unless the script changes them on its own: an optimizer that
    steps in a hook of the backward pass, before gradients are averaged, or weights set on one rank.

    During training it waits for no rank: each one stores its hashes after the same number of backward passes, and the first
    compares them at the check after that. A save, in which all ranks take part, sends the hashes with its own.

    It goes on to the end: a script may change weights of one rank, or compute gradients that are not averaged, in a later loop.

    Args:
        strategy: Connects the ranks, and combines their gradients.
        accumulation: Counts backward passes.
        parameters: Yields the names and parameters whose gradients are averaged.
        optimizers: The prepared optimizers; ranks with another number of steps are not compared.
        on_difference: Called on the first rank after the warning.
    """

    def __init__(
        self,
        strategy: Strategy,
        accumulation: Accumulation,
        parameters: Callable[[], Iterator[tuple[str, torch.Tensor]]],
        optimizers: Sequence[PreparedOptimizer],
        on_difference: Callable[[], None],
    ) -> None:
        backend = strategy.backend
        self._backend, self._parameters, self._optimizers = backend, parameters, optimizers
        self._accumulation, self._on_difference = accumulation, on_difference
        self._start = 0
        self.next_pass = sys.maxsize
        """The number of the next backward pass after which `compare_stored` is called."""
        self._last: WeightDigests | None = None
        # With static shapes, reading weights would compile another program.
        self._is_enabled = backend.topology.world_size > 1 and not (
            strategy.shards_models or backend.runtime.static_shapes
        )

    def disable(self) -> None:
        """Compare no more: the weights of the ranks may differ, or their numbers of backward passes."""
        self._is_enabled = False

    def restart(self) -> None:
        """Compare after the backward passes 1, 8, 64, 512, 1012, ... from now on; called on all ranks at the same pass."""
        self._start = self._accumulation.num_backward
        self.next_pass = self._start + 1

    def compute_digests(self, hash_of: Callable[[torch.Tensor], int] = hash_tensor) -> WeightDigests | None:
        """Return the hashes of this rank for a comparison with those of the others; None if weights may differ."""
        return self._compute(hash_of) if self._is_enabled else None

    def compare_stored(self) -> None:
        """Store the hashes of now, and compare those of the check before, which all ranks have stored meanwhile."""
        passes = self._accumulation.num_backward - self._start
        self.next_pass = self._start + min(passes * _GROWTH, passes + CHECK_INTERVAL)
        if not self._is_enabled:
            return
        before, digests = self._last, self._compute()
        self._last = digests
        rank, size = self._backend.topology.rank, self._backend.topology.world_size
        self._backend.set_store_key(self._get_key(digests.number, rank), digests.text)
        if rank or before is None:
            return
        stored = [self._backend.get_store_key(self._get_key(before.number, other)) for other in range(size)]
        gathered = [text for text in stored if text is not None]
        if len(gathered) == size:
            self.compare(before, gathered)

    @staticmethod
    def _get_key(number: int, rank: int) -> str:
        return f"accel/weights/{number}/{rank}"

    def _compute(self, hash_of: Callable[[torch.Tensor], int] = hash_tensor) -> WeightDigests:
        named = list(self._parameters())
        hashes = [hash_of(parameter) for _, parameter in named]
        steps = sum(optimizer.steps for optimizer in self._optimizers)
        text = f"{steps}:{struct.pack(f'={len(hashes)}Q', *hashes).hex()}"
        return WeightDigests(self._accumulation.num_backward, tuple(name for name, _ in named), text)

    def compare(self, digests: WeightDigests, gathered: Sequence[str]) -> None:
        """Warn on the first rank if the hashes of the ranks differ; `gathered` has the text of each rank."""
        if len(set(gathered)) == 1:
            return
        self.disable()
        steps, texts = zip(*(text.split(":") for text in gathered), strict=True)
        if len(set(steps)) > 1 or self._backend.topology.rank:
            return
        width = 2 * struct.calcsize("=Q")
        columns = [[text[start : start + width] for start in range(0, len(text), width)] for text in texts]
        names = [
            name
            for name, values in zip(digests.names, zip(*columns, strict=False), strict=False)
            if len(set(values)) > 1
        ]
        others = [rank for rank, text in enumerate(gathered) if text != gathered[0]]
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        _LOG.warning(
            "The weights of the processes differ after backward pass %d: %s%s (rank 0 has others than rank %s). Each process "
            "trains a model of its own. Step optimizers after backward(), not in hooks of parameters, and change weights on all "
            "processes alike.",
            digests.number,
            ", ".join(names[:_MAX_NAMES]),
            more,
            ", ".join(map(str, others[:_MAX_NAMES])),
        )
        self._on_difference()
