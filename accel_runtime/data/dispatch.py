"""Source that reads the batches of all ranks on the first rank and sends each rank its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.collectives.objects import scatter_objects
from accel_runtime.data.iterable import IterableSource
from accel_runtime.data.map_style import MapStyleSource
from accel_runtime.data.sharding import BatchSharding, loss_scale
from accel_runtime.data.source import EpochIterator, Source, StepInfo
from accel_runtime.rng import are_equal, current_states, restore_states, to_serializable

__all__ = ["DispatchError", "DispatchSource"]


class DispatchError(RuntimeError):
    """Failure of the first rank, which reads for all; raised on the other ranks."""


class _RankBatch(NamedTuple):
    """Batch of one rank for one step."""

    batch: Any
    step_info: StepInfo
    state: dict[str, Any]
    """State after the step; its random states come with the first step only."""


class _Failure(NamedTuple):
    """Failure of the first rank to read."""

    text: str


class _DispatchedBatch(NamedTuple):
    """Message of the first rank to one rank."""

    item: _RankBatch | _Failure | None
    """None at the end."""
    rng_states: dict[str, Any] | None = None
    """Random states of the first rank after reading, for its model-parallel ranks, if reading changed them."""


class DispatchSource(Source):
    """Batches of all ranks, read on the first rank; its states are those of the source that it reads.

    Args:
        loader: The script's loader, over a dataset of any kind; only the first rank iterates over it.
        backend: Sends the batches.
        sharding: The sharding of the samples.
        seed: As for `MapStyleSource`.
    """

    def __init__(
        self, loader: DataLoader[Any], backend: Backend, sharding: BatchSharding, seed: int | None = None
    ) -> None:
        self._backend = backend
        self._source: MapStyleSource | IterableSource
        if isinstance(loader.dataset, IterableDataset):
            self._source = IterableSource(loader, backend, sharding, all_ranks=True)
        else:
            self._source = MapStyleSource(loader, backend, sharding, seed, all_ranks=True)
        self.inner = self._source.inner
        self._subject = f"scatter_object of the batches of a {type(loader.dataset).__name__}, batches of {sharding.batch_size}"

    @property
    @override
    def kind(self) -> str:
        return self._source.kind

    @override
    def override_padding(self, *, pad_last: bool) -> AbstractContextManager[None]:
        return self._source.override_padding(pad_last=pad_last)

    @override
    def iterate(self, loop: EpochIterator, start: dict[str, Any]) -> Iterator[Any]:
        data_rank = self._backend.data_rank
        data_ranks = [data_rank.of(rank) for rank in range(self._backend.topology.world_size)]
        state = start
        loop.state_at = lambda _: state
        is_first = self._backend.topology.rank == 0
        steps = self._read_steps(EpochIterator(loop.epoch), start) if is_first else iter(())
        is_last = False
        while not is_last:
            messages, error = self._fetch(steps, data_ranks) if is_first else (None, None)
            item, rng_states = scatter_objects(self._subject, messages, self._backend.handshake)
            if rng_states is not None:
                restore_states(rng_states)
            if error is not None:
                raise error
            if isinstance(item, _Failure):
                raise DispatchError(f"rank 0, which reads for all ranks, failed: {item.text}")
            if item is None:
                return
            state = {"random": state.get("random")} | item.state
            info = item.step_info
            scale = loss_scale(info.num_valid, data_rank.rank) if info.by_samples else 1.0
            loop.step_info = info._replace(loss_scale=scale)
            is_last = info.is_last
            yield item.batch

    def _fetch(
        self, steps: Iterator[list[_RankBatch]], data_ranks: list[int]
    ) -> tuple[list[_DispatchedBatch], Exception | None]:
        """Return the message to each rank with its next batch, the end or a failure, and the exception if reading failed."""
        model_parallel_size = self._backend.data_rank.model_parallel_size
        before = current_states() if model_parallel_size > 1 else {}
        error: Exception | None = None
        items: list[Any] = [None] * len(data_ranks)
        try:
            batches = next(steps, None)
            items = items if batches is None else [batches[data_rank] for data_rank in data_ranks]
        except Exception as failure:  # noqa: BLE001 - the other ranks wait for a message in any case
            items, error = [_Failure(f"{type(failure).__name__}: {failure}")] * len(data_ranks), failure
        after = current_states() if model_parallel_size > 1 else {}
        rng_states = None if are_equal(before, after) else to_serializable(after)
        return [
            _DispatchedBatch(item, rng_states if 0 < rank < model_parallel_size else None)
            for rank, item in enumerate(items)
        ], error

    def _read_steps(self, loop: EpochIterator, start: dict[str, Any]) -> Iterator[list[_RankBatch]]:
        """Yield the batches of all data ranks, step by step."""
        batches = self._source.iterate(loop, start)
        is_first_step = True
        for first in batches:
            step = [first, *islice(batches, self._backend.data_rank.world_size - 1)]
            state, info = loop.state_dict(), loop.step_info
            assert info is not None
            if not is_first_step:
                del state["random"]
            is_first_step = False
            yield [_RankBatch(batch, info, state) for batch in step]

    @override
    def num_steps(self) -> int:
        return self._source.num_steps()

    @override
    def next_epoch(self) -> dict[str, Any]:
        return self._source.next_epoch()

    @override
    def skip_steps(self, steps: int, start: dict[str, Any]) -> dict[str, Any]:
        return self._source.skip_steps(steps, start)

    @override
    def check(self, start: dict[str, Any]) -> None:
        self._source.check(start)

    @override
    def with_restored_rng(self, start: dict[str, Any]) -> dict[str, Any]:
        return self._source.with_restored_rng(start)

    @override
    def restart(self, start: dict[str, Any]) -> dict[str, Any]:
        return self._source.restart(start)
