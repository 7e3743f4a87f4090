"""Source for map-style datasets: one order on all ranks, iterated from any offset, and a seed for every batch of workers."""

from __future__ import annotations

import copy
import hashlib
import logging
import pickle
import random
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, count, cycle, islice, repeat
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.backends.rng import KINDS, IsolatedRNG, RandomStates, broadcast_from_first, hash_text
from accel_runtime.backends.single import Single
from accel_runtime.data.sharding import BatchSharding, Index, Step, batch_slices
from accel_runtime.data.source import (
    Source,
    len_or_none,
    sampler_attribute,
    sampler_of_loader,
    yields_single_samples,
)
from accel_runtime.data.state import MapStyleState
from accel_runtime.data.token_batches import TokenBatchSampler
from accel_runtime.environment.text import encode_text
from accel_runtime.environment.topology import Topology
from accel_runtime.foundation.epoch_progress import EpochProgress, StepInfo
from accel_runtime.foundation.torch_internals import (
    copy_loader,
    iterator_function,
    replace_iterator,
    set_worker_dataset,
)

__all__ = ["EpochOrder", "EpochStart", "MapStyleSource", "hash_seed", "seed_worker"]

_LOG = logging.getLogger("accel_runtime.data")


class MapStyleSource(Source[MapStyleState]):
    """Source for a map-style dataset: the script's sampler defines the order, and `BatchSharding` the ranks' slices.

    Args:
        loader: The script's loader.
        backend: Exchanges random states and orders between the ranks.
        sharding: The sharding of the batches.
        seed: If given, torch's `RandomSampler` draws from `seed + epoch`; other samplers draw from the generators.
        all_ranks: Read the batches of all ranks, in rank order in every step, without communication.
    """

    state_type = MapStyleState

    def __init__(
        self,
        loader: DataLoader[Any],
        backend: Backend,
        sharding: BatchSharding,
        seed: int | None = None,
        *,
        all_ranks: bool = False,
    ) -> None:
        self._backend = Single(Topology(), backend.runtime, is_counted=False) if all_ranks else backend
        self._order = order = EpochOrder(loader, sharding, self._backend, seed, all_ranks=all_ranks)
        self._generator = loader.generator
        source = sampler_of_loader(loader)
        parts = (loader, source, getattr(source, "sampler", None))
        generators = [getattr(part, "generator", None) for part in parts]
        self._generators = tuple({id(g): g for g in generators if g is not None}.values())
        attribute = sampler_attribute(loader)
        self.inner: DataLoader[Any] = copy_loader(loader, **{attribute: order})
        self._iterated = self.inner
        """Loader that draws a seed for workers when an iteration begins, unless its workers persist."""
        if loader.num_workers:
            self._iterated = copy_loader(
                self.inner,
                dataset=_SeededDataset(loader.dataset),
                worker_init_fn=_UnwrappingInit(loader.worker_init_fn),
                **{attribute: _SeededSampler(order)},
            )
            replace_iterator(self.inner, partial(iterator_function(loader), self._iterated))

    @override
    def override_padding(self, *, pad_last: bool) -> AbstractContextManager[None]:
        return self._order.override_padding(pad_last=pad_last)

    @property
    @override
    def can_fetch_ahead(self) -> bool:
        return self.inner.num_workers > 0 and self._order.is_independent_after_first_step

    @property
    @override
    def stride(self) -> int:
        return self._order.stride

    @override
    def check(self, start: MapStyleState) -> None:
        start.check_cycle(self._order.sharding.cycle_size)

    @override
    def skip(self, state: MapStyleState, steps: int) -> MapStyleState:
        return self._order.skip(state, steps)

    @override
    def iterate(self, progress: EpochProgress, start: MapStyleState) -> Iterator[Any]:
        current = RandomStates.capture(self._generators, self._rng_kinds)
        random = self._find_states(start, current)
        if random is not current:
            random.restore_generators(self._generators)
        order = self._order
        offset, cycle_offset, fingerprint = start.offset, start.cycle_offset, start.fingerprint
        num_items: int | None = None
        is_saved = start.random is not None
        persist = start.workers_persist if is_saved else self._workers_persist
        seed = order.seed if start.seed is None else start.seed
        begun = MapStyleState(True, start.offset, random, seed=seed, workers_persist=persist)

        pending: deque[_PendingBatch] | None = None

        def state_at(info: StepInfo | None) -> MapStyleState:
            if info is not None and info.is_last:
                length = len_or_none(order.source) if num_items is None else num_items
                return replace(begun, offset=offset if length is None else length)
            state = replace(begun, offset=offset, fingerprint=fingerprint)
            return state if info is None else state.enter_cycle(cycle_offset, info.cycle)

        progress.read_states_from(state_at)
        epoch_rng = IsolatedRNG(random, random if self._uses_spare_generator else current)
        epoch_seed = draw_epoch_seed(random, progress.epoch) if self.inner.num_workers else 0
        order.begin(
            EpochStart(
                start.offset,
                progress.epoch,
                epoch_rng,
                is_saved,
                seed,
                epoch_seed,
                start.fingerprint,
                start.cycle_offset,
            )
        )
        iterator = self._start_iteration(start, epoch_rng, drawn=persist)
        for batch in iterator:
            # Not before the first batch: a subclass may begin its iteration as late as that.
            if pending is None:
                pending, num_items = order.pending, order.num_planned
            step_info, fingerprint, offset, cycle_offset = pending.popleft()
            progress.advance(step_info)
            yield batch

    @property
    def _rng_kinds(self) -> tuple[str, ...]:
        """Return the global generators that are drawn from."""
        kinds = self._order.draws_from
        # Workers' random numbers are derived from torch's state.
        return ("torch",) if self.inner.num_workers and not kinds else kinds

    def _find_states(self, start: MapStyleState, current: RandomStates) -> RandomStates:
        """Return the random states at the start of the epoch; `current` itself if all ranks have these."""
        if start.random is None:
            # Nothing is drawn, so nothing is exchanged.
            return broadcast_from_first(current, self._backend) if self._rng_kinds else current
        # Nothing has been drawn between two epochs, and every rank has saved its own states.
        return (
            start.random if start.begun else broadcast_from_first(current.update(start.random), self._backend)
        )

    @property
    def _uses_spare_generator(self) -> bool:
        """Return whether another rank draws the seed for this one, from the generators that they share."""
        return self._backend.ranks_share_generators and self._backend.topology.rank > 0

    @property
    def _workers_persist(self) -> bool:
        return getattr(self.inner, "_iterator", None) is not None

    def _start_iteration(self, start: MapStyleState, epoch_rng: IsolatedRNG, *, drawn: bool) -> Iterator[Any]:
        """Return torch's iterator, and draw the seed for workers only if the uninterrupted run draws it here.

        `drawn` is true if it was drawn in an earlier epoch, as workers persist.
        """
        generator, random = self._generator, start.random
        # Inside an epoch the seed has been drawn before, and the generator restored is past that draw.
        spare = (
            drawn
            or self._uses_spare_generator
            or (start.begun and generator is None and (random is None or random.torch is None))
        )
        self._iterated.generator = torch.Generator() if spare else generator
        with epoch_rng():
            if self._workers_persist and not spare and random is not None:
                torch.empty((), dtype=torch.int64).random_(generator=generator)
            return iter(self.inner)

    @override
    def restore(self, next_epoch: MapStyleState) -> None:
        if next_epoch.seed is not None:
            self._order.set_seed(next_epoch.seed)

    @override
    def num_steps(self, epoch: int) -> int:
        return self._order.num_steps(epoch)

    @override
    def next_epoch(self) -> MapStyleState:
        random = RandomStates.capture(self._generators, self._rng_kinds)
        return MapStyleState(random=random, seed=self._order.seed, workers_persist=self._workers_persist)


_TORCH_SAMPLERS = {RandomSampler, SubsetRandomSampler, WeightedRandomSampler}
"""Samplers that draw from a generator of torch only."""
_LOOKAHEAD_STEPS = 64
"""Number of steps that are drawn and compared at once if a sampler has no length."""


class EpochStart(NamedTuple):
    """Start of the next iteration over an order."""

    offset: int = 0
    """Samples, or batches of the script's batch sampler, that are left out."""
    epoch: int = 0
    rng: IsolatedRNG = IsolatedRNG(RandomStates())
    """Random states that the order is drawn under."""
    draws_at_once: bool = False
    """If true, the whole order is drawn with the first step."""
    seed: int | None = None
    """Seed of shuffled orders, which are then drawn from `seed + epoch`; None draws from the generators."""
    batch_seed: int = 0
    """Seed that all batches of the epoch share, if workers draw random numbers."""
    fingerprint: int | None = None
    """Fingerprint of the samples that are left out, to verify that they are those of an earlier run."""
    cycle_offset: int = 0
    """Samples of the first cycle that are left out."""


class _PendingBatch(NamedTuple):
    """A batch whose indices were yielded."""

    step_info: StepInfo
    fingerprint: int | None
    """Fingerprint of the samples up to the end of its step, if a sampler of the script draws the order."""
    offset: int
    """Number of samples, or of the script's batches, up to the end of its step."""
    cycle_offset: int
    """Samples of its cycle up to the end of its step; 0 at the end of the cycle, and without cycles."""


class EpochOrder(Sampler[Any]):
    """Order of an epoch, which is the same on all ranks, as the batch sampler of one rank or of all.

    Samples are split into batches of one size. A batch sampler of the script yields batches of any size, which are assigned
    to ranks without splitting them.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        sharding: BatchSharding,
        backend: Backend,
        seed: int | None = None,
        *,
        all_ranks: bool = False,
    ) -> None:
        source = sampler_of_loader(loader)
        # torch's own attributes of a BatchSampler, which callers read.
        self.sampler = getattr(source, "sampler", source)
        self.batch_size = getattr(source, "batch_size", None)
        self.drop_last = bool(getattr(source, "drop_last", False))
        is_batch_sampler = type(source) is BatchSampler
        self.source = source.sampler if is_batch_sampler else source
        """Sampler, or batch sampler, of the script."""
        self.sharding = sharding
        """Sharding of the batches over the ranks."""
        self.seed = seed
        """Seed of shuffled orders, until an epoch begins with another one."""
        self.ranks = range(sharding.world_size) if all_ranks else range(sharding.rank, sharding.rank + 1)
        """Ranks whose batches it yields, in rank order in every step."""
        self._start = EpochStart()
        self.pending: deque[_PendingBatch] = deque()
        """Batches whose indices the newest iterator has yielded and that have not arrived yet."""
        self._backend = backend
        self._single = yields_single_samples(loader)
        self._has_samples = is_batch_sampler or self._single
        self._tokens = source if isinstance(source, TokenBatchSampler) else None
        self._plan_fingerprint: int | None = None
        self.num_planned: int | None = None
        """Number of batches in the epoch of the newest iterator, if they were all packed with its first step."""

    def begin(self, start: EpochStart) -> None:
        """Set the start of the next iterator."""
        self._start, self.seed = start, start.seed

    def set_seed(self, seed: int) -> None:
        """Set the seed of shuffled orders, which is that of a loaded state."""
        self.seed = seed
        if self._tokens is not None:
            self._tokens.set_seed(seed)

    @contextmanager
    def override_padding(self, *, pad_last: bool) -> Iterator[None]:
        """Pad the last batch of epochs that begin inside the context, or do not; ValueError if it cannot be padded."""
        if pad_last and self.sharding.cycle_size is not None:
            raise ValueError(
                f"Cannot override even_batches=True for this loader: with global_batch_size={self.sharding.cycle_size} no sample "
                "is repeated. Leave out even_batches."
            )
        before = self.sharding
        self.sharding = replace(before, pad_last=pad_last)
        try:
            yield
        finally:
            self.sharding = before

    @property
    def draws_from(self) -> tuple[str, ...]:
        """Return the global generators that may be drawn from, a subset of `rng.KINDS`."""
        if self._tokens is not None:
            return () if self._tokens.is_known else KINDS
        if type(self.source) is SequentialSampler:
            return ()
        return ("torch",) if type(self.source) in _TORCH_SAMPLERS else KINDS

    @property
    def is_independent_after_first_step(self) -> bool:
        """Return True if no step after the first draws from the global generators or needs the other ranks."""
        compared = self._backend.topology.world_size > 1 or self._tokens is not None
        return self.draws_from != KINDS or (compared and len_or_none(self.source) is not None)

    @property
    def stride(self) -> int:
        """Return how far a full step advances the offset."""
        return self.sharding.padded_size if self._has_samples else self.sharding.batches_per_step

    @property
    def epoch(self) -> int:
        """Return the number of the epoch of the newest iterator."""
        return self._start.epoch

    def iterate_seeds(self) -> Iterator[BatchSeed]:
        """Yield the seeds of the batches of the newest iterator, each after the indices of its batch."""
        if self.sharding.cycle_size is None:
            return map(partial(self._build_seed, self._start), count())
        return map(partial(self._find_seed, self._start, self.pending), cycle(self.ranks))

    def _build_seed(self, start: EpochStart, batch: int) -> BatchSeed:
        step, index = divmod(batch, len(self.ranks))
        local_stride, rest = divmod(self.stride, self.sharding.world_size)
        offset = start.offset + step * self.stride + self.ranks[index] * local_stride
        return start.batch_seed, offset, self.ranks[index] if rest else 0

    def _find_seed(self, start: EpochStart, pending: deque[_PendingBatch], rank: int) -> BatchSeed:
        """Return the seed of the newest batch, which is of this rank, by the offset of its first sample."""
        newest = pending[-1]
        if not self._has_samples:
            return start.batch_seed, newest.offset, rank
        after = sum(newest.step_info.num_valid[rank:])
        return start.batch_seed, newest.offset - after, 0 if newest.step_info.num_valid[rank] else rank

    def num_steps(self, epoch: int) -> int:
        """Return the steps of an epoch; raise TypeError if they are unknown."""
        if self._tokens is not None:
            if not self._tokens.is_known and self.num_planned is not None and epoch == self._start.epoch:
                return self.sharding.num_steps(self.num_planned, self.stride)
            num_batches = self._tokens.plan_known(self._tokens.seed, epoch).num_batches
            return self.sharding.num_steps(num_batches, self.stride)
        if self.sharding.cycle_size is not None and self.sharding.batch_size is None:
            raise TypeError(
                f"The number of steps is unknown: the batches of the {type(self.source).__name__} have no fixed size, and "
                f"global_batch_size={self.sharding.cycle_size} divides them by samples. Count the steps."
            )
        return self.sharding.num_steps(len(self.source), self.stride)

    def __len__(self) -> int:
        return self.num_steps(self._start.epoch) * len(self.ranks)

    def skip(self, state: MapStyleState, steps: int) -> MapStyleState:
        """Return the state `steps` steps later; raise ValueError if that depends on batches that are not drawn yet."""
        if self.sharding.cycle_size is None:
            return state.skip(steps, self.stride)
        if not self._has_samples:
            raise ValueError(
                f"skip_first_batches() failed: with global_batch_size={self.sharding.cycle_size}, steps of a "
                f"{type(self.source).__name__} depend on the sizes of its batches. Load the state of the loader: accelerator.resume()."
            )
        offset, size = self.sharding.find_offset(steps, len_or_none(self.source)), self.sharding.cycle_size
        within = offset % size
        return replace(state.skip(0, 0), offset=offset, cycle_offset=within, cycle_size=size if within else 0)

    @override
    def __iter__(self) -> Iterator[list[Index] | Index]:
        # Not a generator: each iterator has its own queue, which the loader takes at its first batch.
        self.pending = deque()
        return self._iterate_batches(self.pending.append, self._start)

    def _iterate_batches(
        self, record: Callable[[_PendingBatch], None], start: EpochStart
    ) -> Iterator[list[Index] | Index]:
        with start.rng():
            steps = self.iterate_steps(start)
            first_step = list(islice(steps, 1))  # the order is drawn with it
        last_info: StepInfo | None = None
        slices: list[Any] = []
        offset, cycle_offset, stride = start.offset, start.cycle_offset, self.stride
        fingerprint = (start.fingerprint or 0) if self.draws_from == KINDS else None
        if self._tokens is not None:
            fingerprint = self._plan_fingerprint
        for samples, info in chain(first_step, steps):
            if info.cycle is None:
                offset += stride
            else:
                num_samples = sum(info.num_valid)
                offset += num_samples if self._has_samples else sum(map(bool, info.num_valid))
                cycle_offset = 0 if info.cycle.ends else cycle_offset + num_samples
            if fingerprint is not None and self._tokens is None:
                fingerprint = _fingerprint_order(samples, fingerprint)
            if info is not last_info:
                last_info, slices = info, self._slices(info)
            for local_slice in slices:
                record(_PendingBatch(info, fingerprint, offset, cycle_offset))
                yield samples if local_slice is None else samples[local_slice]

    def _slices(self, info: StepInfo) -> list[Any]:
        """Return the slices of a step; indices for single samples, and None for the whole step of one rank."""
        slices = batch_slices(info)[self.ranks.start : self.ranks.stop]
        if self._single:
            return [part.start for part in slices]
        return [None] if len(info.batch_sizes) == 1 else slices

    def iterate_steps(self, start: EpochStart) -> Iterator[Step]:
        """Yield the steps of all ranks from the offset of an iteration on."""
        source, kind, offset = self.source, type(self.source), start.offset
        draws_alone = not self._backend.ranks_share_generators
        if self._tokens is not None:
            return self._iterate_planned(self._tokens, start)
        if not self._has_samples:
            order, head = self._split(self._draw(map(list, source), draws_at_once=start.draws_at_once), start)
            return self.sharding.group_batches(order, head, start.cycle_offset)
        if start.seed is not None and kind is RandomSampler:
            source = copy.copy(source)
            source.generator = torch.Generator().manual_seed(start.seed + start.epoch)
        samples: Iterable[Index]
        first_samples: Sequence[Index] | None
        if kind is SequentialSampler:
            indices = range(len(source))
            samples, first_samples = indices[offset:], indices[: self.stride] if offset else None
        elif kind is RandomSampler and offset and draws_alone and _is_permutation(source):
            samples, first_samples = _draw_permutation(source, offset, self.stride)
        else:
            is_shared = kind in _TORCH_SAMPLERS and draws_alone
            drawn = iter(source) if is_shared else self._draw(source, draws_at_once=start.draws_at_once)
            samples, first_samples = self._split(drawn, start)
        return self.sharding.split_samples(samples, first_samples, start.cycle_offset)

    def _iterate_planned(self, tokens: TokenBatchSampler, start: EpochStart) -> Iterator[Step]:
        """Yield the steps over the batches of a budget of tokens, all of which are packed now."""
        seed = start.seed or 0
        if tokens.is_known:
            plan = tokens.plan_known(seed, start.epoch)
        else:
            plan = tokens.plan(self._draw(tokens.sampler, draws_at_once=True), seed, start.epoch)
        self.num_planned, self._plan_fingerprint = plan.num_batches, plan.fingerprint
        if start.fingerprint not in {None, plan.fingerprint} and self._backend.topology.rank == 0:
            _LOG.warning(
                "The batches of max_tokens=%d cannot be continued exactly: the order or the lengths of the samples are not those of the "
                "save. Samples may be repeated or left out in this epoch. Resume with the same data, lengths and options.",
                tokens.budget.max_tokens,
            )
        for samples, info in self.sharding.group_batches(plan.iterate(start.offset)):
            yield samples, tokens.count_tokens(cast("list[int]", samples), info)

    def _draw(self, items: Iterable[Any], *, draws_at_once: bool) -> Iterator[Any]:
        """Yield the first rank's items: a sampler of the script may draw from anything.

        All ranks draw many at a time, and they are sent only if the ranks differ. If they share the
        random number generators, the first draws for all.
        """
        source = self.source if self._tokens is None else self._tokens.sampler
        backend, length = self._backend, len_or_none(source)
        if not draws_at_once and backend.topology.world_size == 1:
            yield from items
            return
        size = (self.stride * _LOOKAHEAD_STEPS if length is None else length) + 1
        subject = f"the order of a {type(source).__name__} that is read {size} at a time"
        iterator = iter(() if backend.ranks_share_generators and backend.topology.rank else items)
        is_complete = False
        while not is_complete:
            drawn = list(islice(iterator, size))
            if backend.ranks_share_generators or not self._is_equal_on_ranks(drawn):
                drawn = backend.broadcast_object(drawn, subject)
            yield from drawn
            is_complete = len(drawn) < size

    def _split(self, drawn: Iterator[Any], start: EpochStart) -> tuple[Iterator[Any], list[Any] | None]:
        """Return the items from the offset of an iteration on and, unless that is 0, those of the first step."""
        if not start.offset:
            return drawn, None
        items = list(islice(drawn, max(start.offset, self.stride)))
        before = items[: start.offset] if self._has_samples else chain.from_iterable(items[: start.offset])
        is_first_rank = self._backend.topology.rank == 0
        if start.fingerprint not in {None, _fingerprint_order(before, 0)} and is_first_rank:
            _LOG.warning(
                "The order of %s cannot be continued exactly: from the start of the epoch, it yields other samples than before the "
                "save. Samples may be repeated or left out in this epoch. Draw the whole order at the start of __iter__, from a "
                "generator that nothing else draws from.",
                type(self.source).__name__,
            )
        return chain(items[start.offset :], drawn), items[: self.stride]

    def _is_equal_on_ranks(self, items: list[Any]) -> bool:
        digest = hashlib.blake2b(digest_size=8)
        for start in range(0, len(items), 4096):
            digest.update(pickle.dumps(items[start : start + 4096]))
        fingerprint = int.from_bytes(digest.digest(), "little", signed=True)
        return len(set(self._backend.all_gather_numbers([fingerprint], "fingerprints of an order"))) == 1


def _fingerprint_order(samples: Iterable[Index], fingerprint: int) -> int:
    """Return the fingerprint of an order after more of its samples."""
    for sample in samples:
        fingerprint = zlib.crc32(encode_text(repr(sample)), fingerprint)
    return fingerprint


def _is_permutation(sampler: RandomSampler) -> bool:
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


def _draw_permutation(sampler: RandomSampler, offset: int, stride: int) -> tuple[Iterator[int], list[int]]:
    """Return what RandomSampler draws from `offset` on, without iterating over the indices before it.

    The draws are those of torch's `RandomSampler.__iter__`, including the last one, so the generator ends in the same
    state.
    """
    generator = sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    num_samples = sampler.num_samples
    order = torch.randperm(num_samples, generator=generator)

    def draw_rest() -> Iterator[int]:
        yield from order[offset:].tolist()
        torch.randperm(num_samples, generator=generator)

    return draw_rest(), order[:stride].tolist()


BatchSeed = tuple[int, int, int]
"""Parts of the seed of one batch, which depend neither on the worker nor on the time: the seed of the epoch, the offset of
its first sample in the epoch, and the rank it belongs to, if ranks share an offset (otherwise 0)."""


class _SeededIndices(NamedTuple):
    """Message to a worker: what to fetch, with which seed, and in which epoch."""

    indices: Any
    """Indices of the samples, or one index with `batch_size=None`."""
    seed: BatchSeed
    epoch: int


def draw_epoch_seed(states: RandomStates, epoch: int) -> int:
    """Return the seed that all batches of an epoch share, from torch's random states at its start and its number.

    The number matters for persistent workers: they draw nothing at the start of an epoch, so states may not change.
    """
    return hash_seed(epoch, replace(states, python=None, numpy=None).fingerprint)


def seed_worker(seed: int) -> None:
    """Seed torch, Python and, if it is loaded, NumPy."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every device too
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed([seed & 0xFFFFFFFF, seed >> 32])


class _SeededSampler(Sampler[_SeededIndices]):
    """Sampler that adds a seed to everything that an order yields."""

    def __init__(self, order: EpochOrder) -> None:
        self._order = order

    @override
    def __iter__(self) -> Iterator[_SeededIndices]:
        # Both are of the newest iterator, also if another one begins before the first item is requested.
        return map(_SeededIndices, iter(self._order), self._order.iterate_seeds(), repeat(self._order.epoch))

    def __len__(self) -> int:
        return len(self._order)


class _SeededDataset(Dataset[Any]):
    """Dataset that seeds the generators before each batch; the collate function then draws from them too.

    Workers that persist have a copy of the script's dataset since their first epoch: its `set_epoch` is called in them too.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._epoch: int | None = None
        """Number of the epoch of this worker's newest batch."""

    def _begin_batch(self, item: _SeededIndices) -> None:
        if self._epoch not in {None, item.epoch} and callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(item.epoch)
        self._epoch = item.epoch
        seed_worker(hash_seed(*item.seed))

    def __getitems__(self, item: _SeededIndices) -> Any:
        self._begin_batch(item)
        getitems = getattr(self.dataset, "__getitems__", None)
        return getitems(item.indices) if getitems else [self.dataset[index] for index in item.indices]

    @override
    def __getitem__(self, item: _SeededIndices) -> Any:
        self._begin_batch(item)
        return self.dataset[item.indices]


class _UnwrappingInit:
    """`worker_init_fn` that shows the worker the script's own dataset, and then calls the script's function."""

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        set_worker_dataset(info, info.dataset.dataset)
        if self._init is not None:
            self._init(worker)


def hash_seed(*numbers: int) -> int:
    """Return a seed that depends on all numbers."""
    return hash_text(" ".join(map(str, numbers)))
