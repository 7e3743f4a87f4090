"""Preparation of a script's loader: checks, the choice of its source, and the source that reads for all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.backends.rng import RandomStates
from accel_runtime.backends.single import Single
from accel_runtime.collectives.handshake import scatter_objects
from accel_runtime.data.active_loops import ActiveLoops
from accel_runtime.data.iterable import IterableSource
from accel_runtime.data.loader import LoaderOptions, PreparedLoader
from accel_runtime.data.map_style import MapStyleSource
from accel_runtime.data.presharded import PreshardedSource
from accel_runtime.data.sharding import sharding_of_loader
from accel_runtime.data.source import Source, batch_size_of, sampler_of_loader, yields_single_samples
from accel_runtime.data.state import MapStyleState, StreamState
from accel_runtime.data.token_batches import LengthOf, TokenBatchSampler, estimate_padding, find_lengths
from accel_runtime.environment.topology import DataRank, Topology
from accel_runtime.foundation.epoch_progress import EpochProgress, StepInfo
from accel_runtime.foundation.options import DataLoaderConfiguration, changed_fields
from accel_runtime.foundation.torch_internals import copy_loader
from accel_runtime.observe.throughput import TokenCounter

__all__ = [
    "DispatchError",
    "DispatchedIterable",
    "DispatchedMapStyle",
    "check_loader_configuration",
    "loader_options",
    "prepare_loader",
]

_T = TypeVar("_T")


def check_loader_configuration(config: DataLoaderConfiguration) -> None:
    """Raise ValueError for an option that has no effect without another one, such as a seed for an order that is not drawn from it.

    Assignments are not checked: of two fields that are assigned one after the other, either may be the first.
    """
    if config.data_seed is not None and not (config.use_seedable_sampler or config.max_tokens):
        raise ValueError(
            f"data_seed={config.data_seed} has no effect without use_seedable_sampler=True. Set it, or leave data_seed out."
        )
    if config.max_tokens is None:
        changed = changed_fields(config).keys() & {"balance", "padded", "window"}
        if changed:
            raise ValueError(
                f"Cannot prepare loaders with {', '.join(sorted(changed))}: without max_tokens, batches are those of the script. Set "
                "max_tokens, or leave them out."
            )
    elif config.length is None:
        raise ValueError(
            f"Cannot prepare loaders with max_tokens={config.max_tokens}: the lengths of the samples are unknown. Set length to a function of "
            "a sample, the name of a column, or the length of each sample."
        )


def loader_options(
    config: DataLoaderConfiguration,
    put_on_device: bool,
    rng_types: tuple[str, ...],
    count_tokens: TokenCounter | None = None,
    global_batch_size: int | None = None,
) -> LoaderOptions:
    """Return the options of loaders from a script's configuration."""
    return LoaderOptions(
        split_batches=config.split_batches,
        even_batches=config.even_batches and global_batch_size is None,
        global_batch_size=global_batch_size,
        dispatch=bool(config.dispatch_batches),
        seeded=config.use_seedable_sampler,
        seed=config.data_seed,
        budget=config.token_budget,
        length=config.length,
        put_on_device=put_on_device,
        non_blocking=config.non_blocking,
        count_tokens=count_tokens,
        rng_types=rng_types,
    )


def prepare_loader(
    loader: DataLoader[_T], backend: Backend, loops: ActiveLoops, options: LoaderOptions
) -> PreparedLoader[_T]:
    """Return the prepared loader; raise ValueError if the script's loader cannot be sharded exactly."""
    if getattr(loader, "next_iter_state", None) is not None:
        raise ValueError(
            "Cannot prepare this StatefulDataLoader: load_state_dict() was called before prepare(), and a prepared loader does "
            "not read that state. Prepare it first, then call accelerator.resume(), or load_state_dict() of the prepared loader."
        )
    if options.presharded:
        _check_presharded_options(options)
    if options.budget is not None:
        loader, options = _build_token_batches(loader, backend, options)
        loops.expect_weights()
    elif options.length is not None:
        options = replace(options, padding=_estimate_padding(loader, options.length, backend))
    if options.global_batch_size is not None:
        _check_global_batch_size(loader, backend, options.global_batch_size)
    if options.put_on_device:
        _check_batch_size(loader, backend.runtime.num_batch_shards)
    return PreparedLoader(loader, _build_source(loader, backend, options), backend, loops, options)


def _build_token_batches(
    loader: DataLoader[_T], backend: Backend, options: LoaderOptions
) -> tuple[DataLoader[_T], LoaderOptions]:
    """Return a copy of a loader with batches by a budget of tokens, and its options.

    Raises:
        ValueError: The loader has no samples with indices, or batches of its own; it cannot be combined with another option; or a sample
            is longer than the budget.
    """
    budget, length = options.budget, options.length
    assert budget is not None
    assert length is not None
    _check_token_loader(loader, backend, options)
    seed = _choose_seed(options, backend)
    lengths = find_lengths(loader.dataset, length, backend)
    sampler: Any = loader.sampler
    batches = TokenBatchSampler(sampler, lengths, budget, seed)
    if batches.is_known:
        batches.plan_known(seed, 0)  # a sample that is too long is an error now
    copied = copy_loader(loader, batch_sampler=batches, batch_size=None)
    return copied, replace(options, even_batches=False, seeded=True, seed=seed)


def _choose_seed(options: LoaderOptions, backend: Backend) -> int:
    """Return the seed of shuffled orders: that of the options, else torch's initial seed on the first rank."""
    if options.seed is not None:
        return options.seed
    seed: int = backend.broadcast_object(torch.initial_seed(), "the seed of a loader")
    return seed


def _estimate_padding(loader: DataLoader[Any], length: LengthOf, backend: Backend) -> float | None:
    """Return the share of padding in the batches of the script, if each is padded to its longest sample; None without a batch size."""
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(  # noqa: TRY004 - the type of the loader is right
            "Cannot measure the padding of this DataLoader: its dataset is a stream, whose samples have no indices. Leave out length."
        )
    lengths, size = find_lengths(loader.dataset, length, backend), batch_size_of(loader)
    is_ordered = type(loader.sampler) is SequentialSampler
    return None if size is None else estimate_padding(lengths, size, shuffled=not is_ordered)


def _check_token_loader(loader: DataLoader[Any], backend: Backend, options: LoaderOptions) -> None:
    """Raise ValueError if the batches of a loader cannot be built by a budget of tokens."""
    budget = options.budget
    assert budget is not None
    others = "Or assign accelerator.dataloader_config = DataLoaderConfiguration() before you prepare loaders with batches of their own."
    problems = {
        "its dataset is a stream, whose samples have no indices. Use a map-style dataset, or pack the stream itself.": isinstance(
            loader.dataset, IterableDataset
        ),
        'batches are packed from the samples of the whole dataset, and with data="sharded" each process has its own. Leave out '
        "data.": options.presharded,
        "with dispatch_batches=True only the first process reads, and the lengths are measured by all. Set dispatch_batches=False.": (
            options.dispatch
        ),
        "split_batches=True splits a global batch, and a batch of max_tokens is that of one process. Set split_batches=False.": (
            options.split_batches
        ),
        "global_batch_size counts samples, and batches have a number of tokens. Leave out global_batch_size.": (
            options.global_batch_size is not None
        ),
        f"it has a batch sampler of its own, a {type(loader.batch_sampler).__name__}. Pass its sampler. {others}": (
            loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler
        ),
        f"batch_size={loader.batch_size} sets its batches. Leave out batch_size. {others}": (
            type(loader.batch_sampler) is BatchSampler and loader.batch_size != 1
        ),
        f"batch_size=None yields single samples. Leave out batch_size. {others}": loader.batch_sampler
        is None,
        "drop_last=True drops samples, and here a missing batch at the end is padding without weight. Leave out drop_last.": (
            loader.drop_last
        ),
        "batches have different shapes, and this device compiles a program for each shape. Pad the samples to one length, and leave out "
        "max_tokens.": backend.runtime.static_shapes,
    }
    for problem, applies in problems.items():
        if applies:
            raise ValueError(f"Cannot prepare this DataLoader with max_tokens={budget.max_tokens}: {problem}")


def _build_source(loader: DataLoader[Any], backend: Backend, options: LoaderOptions) -> Source[Any]:
    is_distributed = backend.topology.world_size > 1
    if is_distributed and options.presharded:
        _check_presharded(loader, backend.data_rank)
        single = Single(Topology(), backend.runtime, is_counted=False)
        local = _build_source(loader, single, replace(options, presharded=False, dispatch=False))
        pad_last = backend.runtime.static_shapes and options.even_batches
        return PreshardedSource(local, loader, backend, pad_last=pad_last)
    _check_loader(loader, backend, options)
    sharding = sharding_of_loader(
        loader,
        backend.data_rank,
        split=options.split_batches,
        pad_last=options.even_batches,
        static_shapes=backend.runtime.static_shapes,
        cycle_size=options.global_batch_size,
    )
    if isinstance(loader.dataset, IterableDataset):
        # A stream may draw with every sample: ranks that read it in turn would draw from each other's generators.
        dispatched = is_distributed and (options.dispatch or backend.ranks_share_generators)
        return (DispatchedIterable if dispatched else IterableSource)(loader, backend, sharding)
    seed = _choose_seed(options, backend) if options.seeded else options.seed
    dispatched = is_distributed and options.dispatch
    return (DispatchedMapStyle if dispatched else MapStyleSource)(loader, backend, sharding, seed)


def _check_presharded_options(options: LoaderOptions) -> None:
    """Raise ValueError for an option that has no meaning if every process reads its shard only."""
    if options.dispatch:
        raise ValueError(
            'Cannot prepare this DataLoader with data="sharded" and dispatch_batches=True: the first process does not have '
            "the data of the others. Set dispatch_batches=False, or leave out data."
        )
    if options.global_batch_size is not None:
        raise ValueError(
            f'Cannot prepare this DataLoader with data="sharded" and global_batch_size={options.global_batch_size}: each process has '
            "its own data, and no order of samples is common to all. Leave out data, or use gradient_accumulation_steps."
        )
    if options.split_batches:
        raise ValueError(
            'Cannot prepare this DataLoader with data="sharded" and split_batches=True: batch_size is that of one process '
            "there, and the batch is not split. Set split_batches=False."
        )


def _check_global_batch_size(loader: DataLoader[Any], backend: Backend, size: int) -> None:
    """Raise ValueError if the steps of a loader cannot have the samples of global batches of a size."""
    world_size, batch_size = backend.data_rank.world_size, batch_size_of(loader)
    if size < world_size:
        raise ValueError(
            f"Cannot prepare this DataLoader with global_batch_size={size}: each of the {world_size} data-parallel ranks needs a sample of "
            f"each global batch. Use at least {world_size}, or at most {size} processes."
        )
    if not backend.runtime.static_shapes:
        return
    is_even = batch_size is not None and size % (batch_size * world_size) == 0
    if not (is_even and getattr(sampler_of_loader(loader), "drop_last", False)):
        raise ValueError(
            f"Cannot prepare this DataLoader with global_batch_size={size}: on this device all ranks must run the same program, so all "
            f"micro-batches need the same size. Use drop_last=True, and a multiple of batch_size times {world_size} ranks."
        )


def _check_batch_size(loader: DataLoader[Any], num_devices: int) -> None:
    """Raise ValueError if the devices of one process cannot split the batch equally: each would compute all of it."""
    size = None if yields_single_samples(loader) else batch_size_of(loader)
    if size is not None and size % num_devices:
        near = {num_devices * max(size // num_devices, 1), num_devices * (size // num_devices + 1)}
        raise ValueError(
            f"Cannot prepare this DataLoader for {num_devices} devices in one process: each takes an equal part of the batch, and "
            f"the batch size is {size}. Use a multiple of {num_devices}, such as {' or '.join(map(str, sorted(near)))}."
        )


def _check_loader(loader: DataLoader[Any], backend: Backend, options: LoaderOptions) -> None:
    """Raise ValueError if a loader cannot be sharded exactly."""
    if backend.topology.world_size == 1:
        return
    data_rank = backend.data_rank
    world_size = data_rank.world_size
    source = sampler_of_loader(loader)
    size = getattr(source, "batch_size", None)
    ranks = f"{world_size} processes"
    if data_rank.model_parallel_size > 1:
        ranks = f"{world_size} data-parallel ranks of {data_rank.model_parallel_size} processes"
    samplers = (loader.sampler, getattr(source, "sampler", None))
    problems = {
        "its sampler is a DistributedSampler, and sharding twice would skip samples. Remove the sampler, or use "
        'prepare_data_loader(loader, data="sharded").': any(
            isinstance(sampler, DistributedSampler) for sampler in samplers
        ),
        "its dataset is sharded by rank already (split_dataset_by_node), and sharding twice would skip samples. Pass the "
        'whole dataset, or use prepare_data_loader(loader, data="sharded").': getattr(
            loader.dataset, "_distributed", None
        )
        is not None,
        "in_order=False lets batches overtake each other. Leave it out.": not getattr(
            loader, "in_order", True
        ),
        "split_batches needs one batch size, and the DataLoader has none: its batches come from its dataset, or from a batch "
        "sampler without batch_size. Use split_batches=False, or a batch sampler with batch_size.": (
            options.split_batches and world_size > 1 and size is None
        ),
        f"split_batches needs a batch size divisible by {world_size}, and it is {size}. Change the batch size.": bool(
            options.split_batches and size is not None and size % world_size
        ),
        "even_batches=False gives ranks batches of different sizes at the end of an epoch, and on this device all ranks must "
        "run the same program. Use even_batches=True (gather_for_metrics drops the padding) or drop_last=True.": (
            backend.runtime.static_shapes
            and not (options.even_batches or getattr(source, "drop_last", False))
        ),
    }
    for problem, applies in problems.items():
        if applies:
            raise ValueError(f"Cannot prepare this DataLoader for {ranks}: {problem}")


def _check_presharded(loader: DataLoader[Any], data_rank: DataRank) -> None:
    """Raise ValueError if a sampler shards by process although several processes have the same batch."""
    source = sampler_of_loader(loader)
    for sampler in (source, getattr(source, "sampler", None)):
        if not isinstance(sampler, DistributedSampler) or data_rank.model_parallel_size == 1:
            continue
        if (sampler.rank, sampler.num_replicas) != (data_rank.rank, data_rank.world_size):
            raise ValueError(
                f"Cannot prepare this DataLoader: its DistributedSampler yields part {sampler.rank} of "
                f"{sampler.num_replicas}, and this process needs part {data_rank.rank} of {data_rank.world_size}, as do "
                f"{data_rank.model_parallel_size} model-parallel processes. Create it with rank=accelerator.data_parallel_rank, "
                "num_replicas=accelerator.data_parallel_size."
            )


_State = TypeVar("_State", MapStyleState, StreamState)


class DispatchError(RuntimeError):
    """Failure of the first rank, which reads for all; raised on the other ranks."""


class _RankBatch(NamedTuple):
    """Batch of one rank for one step."""

    batch: Any
    step_info: StepInfo
    state: MapStyleState | StreamState
    """State after the step; its random states come with the first step only."""


class _Dispatch(Source[_State]):
    """Mixin of a source that reads the batches of all ranks: only the first rank reads, and sends every rank its own."""

    def __init__(self, loader: DataLoader[Any], backend: Backend, *args: Any) -> None:
        super().__init__(loader, backend, *args, all_ranks=True)  # type: ignore[call-arg]
        self._ranks = backend
        kind, size = type(loader.dataset).__name__, batch_size_of(loader)
        self._subject = f"scatter_object of the batches of a {kind}, batches of {size}"

    @property
    @override
    def can_fetch_ahead(self) -> bool:
        return False

    @override
    def iterate(self, progress: EpochProgress, start: _State) -> Iterator[Any]:
        data_rank, is_first = self._ranks.data_rank, self._ranks.topology.rank == 0
        state: MapStyleState | StreamState = start
        progress.read_states_from(lambda _: state)
        steps = self._group_by_rank(EpochProgress(progress.epoch), start) if is_first else iter(())
        is_last = False
        while not is_last:
            messages, error = self._fetch(steps) if is_first else (None, None)
            item, rng_states = scatter_objects(self._subject, messages, self._ranks.handshake)
            if rng_states is not None:
                rng_states.restore()
            if error is not None:
                raise error
            if isinstance(item, DispatchError):
                raise item
            if item is None:
                return
            state = item.state if item.state.random is not None else replace(item.state, random=state.random)
            info = item.step_info
            progress.advance(info.weigh_for(data_rank.rank))
            is_last = info.is_last
            yield item.batch

    def _fetch(self, steps: Iterator[list[_RankBatch]]) -> tuple[list[tuple[Any, Any]], Exception | None]:
        """Return the message to each rank, and the exception if reading failed.

        A message has the rank's next batch, None at the end or an error, and the random states of the first rank for its
        model-parallel ranks if reading changed them.
        """
        data_ranks, world_size = self._ranks.grid.data_ranks, self._ranks.topology.world_size
        has_followers = self._ranks.data_rank.model_parallel_size > 1
        before = RandomStates.capture() if has_followers else None
        error: Exception | None = None
        items: list[Any] = [None] * world_size
        try:
            if batches := next(steps, None):
                items = [batches[data_rank] for data_rank in data_ranks]
        except Exception as failure:  # noqa: BLE001 - the other ranks wait for a message in any case
            error = failure
            text = f"rank 0, which reads for all ranks, failed: {type(failure).__name__}: {failure}"
            items = [DispatchError(text)] * world_size
        after = RandomStates.capture() if has_followers else None
        states = None if before == after else after
        followers = [rank for rank, data_rank in enumerate(data_ranks) if rank and not data_rank]
        return [(item, states if rank in followers else None) for rank, item in enumerate(items)], error

    def _group_by_rank(self, progress: EpochProgress, start: _State) -> Iterator[list[_RankBatch]]:
        """Yield the batches of all data ranks, step by step."""
        batches: Iterator[Any] = super().iterate(progress, start)  # type: ignore[safe-super, arg-type]
        is_first_step = True
        for first in batches:
            step = [first, *islice(batches, self._ranks.data_rank.world_size - 1)]
            state, info = progress.state(), progress.step_info
            assert info is not None
            if not is_first_step:
                state = replace(state, random=None)
            is_first_step = False
            yield [_RankBatch(batch, info, state) for batch in step]


class DispatchedMapStyle(_Dispatch[MapStyleState], MapStyleSource):
    """Source for a map-style dataset that only the first rank reads."""


class DispatchedIterable(_Dispatch[StreamState], IterableSource):
    """Source for a stream that only the first rank reads."""
