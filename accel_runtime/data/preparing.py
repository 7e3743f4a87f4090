"""Which source fits a script's loader, or why it cannot be shared out exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from accel_runtime.backends.base import Backend
from accel_runtime.backends.single import Single
from accel_runtime.data.dispatch import Dispatched
from accel_runtime.data.loader import LoaderOptions, PreparedLoader
from accel_runtime.data.loops import Loops
from accel_runtime.data.ordered import Ordered
from accel_runtime.data.script import batch_size_of, gives_single, sampler_of, sharding_of
from accel_runtime.data.separate import Separate
from accel_runtime.data.source import Source
from accel_runtime.data.streams import Stream, split_by_node
from accel_runtime.options import DataLoaderConfiguration
from accel_runtime.topology import DataPlace, Topology

__all__ = ["check_loader_configuration", "loader_options", "prepare_loader"]


def check_loader_configuration(config: DataLoaderConfiguration) -> None:
    """Raise ValueError if there is a seed for an order that is not drawn from it.

    An assignment is not checked for it: of two fields that are assigned one after the other, either may be the first.
    """
    if config.data_seed is not None and not config.use_seedable_sampler:
        raise ValueError(
            "data_seed needs use_seedable_sampler=True: without it, orders are not drawn from a seed"
        )


def loader_options(config: DataLoaderConfiguration, place: bool, rng_types: tuple[str, ...]) -> LoaderOptions:
    """How loaders are prepared, as a script's configuration says it."""
    return LoaderOptions(
        split_batches=config.split_batches,
        even_batches=config.even_batches,
        dispatch=bool(config.dispatch_batches),
        seeded=config.use_seedable_sampler,
        seed=config.data_seed,
        place=place,
        non_blocking=config.non_blocking,
        rng_types=rng_types,
    )


def prepare_loader(
    loader: DataLoader[Any], backend: Backend, loops: Loops, options: LoaderOptions
) -> PreparedLoader:
    """The prepared form of a script's loader.

    Raises:
        ValueError: The loader cannot be shared out exactly; the message says why and what to do.
    """
    if options.place:
        _check_size(loader, backend.parts)
    return PreparedLoader(loader, _source(loader, backend, options), backend, loops, options)


def _source(loader: DataLoader[Any], backend: Backend, options: LoaderOptions) -> Source:
    several = backend.topology.world_size > 1
    if several and options.data == "sharded":
        _check_own(loader, backend.data)
        own = Single(Topology(), backend.device)
        own.static_shapes = backend.static_shapes
        alone = replace(options, data="global", dispatch=False)
        filled = backend.static_shapes and options.even_batches
        return Separate(_source(loader, own, alone), loader, backend, filled=filled)
    _check(loader, backend, options)
    sharding = sharding_of(
        loader,
        backend.data,
        split=options.split_batches,
        even=options.even_batches,
        static=backend.static_shapes,
    )
    stream = isinstance(loader.dataset, IterableDataset)
    # A stream may draw with every sample, and threads that read it by turns would draw each other's numbers.
    dispatched = several and (options.dispatch or (stream and backend.threads))
    if stream and not dispatched:
        return Stream(loader, backend, sharding)
    return (Dispatched if dispatched else Ordered)(loader, backend, sharding, _seed(options, backend))


def _check_size(loader: DataLoader[Any], parts: int) -> None:
    """Refuse batches that devices cannot share equally: each would compute all of them."""
    size = None if gives_single(loader) else batch_size_of(loader)
    if size is not None and size % parts:
        near = {parts * max(size // parts, 1), parts * (size // parts + 1)}
        raise ValueError(
            f"this DataLoader cannot be prepared for {parts} devices that compute as one: its batch size is {size}, "
            f"and it is the global one, of which every device takes an equal part. Multiples of {parts} fit, such as "
            f"{' or '.join(map(str, sorted(near)))}"
        )


def _seed(options: LoaderOptions, backend: Backend) -> int | None:
    if not options.seeded or options.seed is not None:
        return options.seed
    first: int = backend.broadcast_object(torch.initial_seed(), "the seed of a loader")
    return first


def _check(loader: DataLoader[Any], backend: Backend, options: LoaderOptions) -> None:
    """Refuse what could not be shared out exactly."""
    if backend.topology.world_size == 1:
        return
    world_size = backend.data.world_size
    source = sampler_of(loader)
    size = getattr(source, "batch_size", None)
    split = isinstance(loader.sampler, DistributedSampler) or isinstance(
        getattr(source, "sampler", None), DistributedSampler
    )
    who = _told(backend.data)
    refusals = {
        "its sampler is a DistributedSampler, and sharding twice would skip samples: leave the sampler to "
        'prepare(), or say prepare_data_loader(loader, data="sharded")': split,
        "its dataset is split by rank already (split_dataset_by_node), and sharding twice would skip samples: give "
        'the whole dataset, or say prepare_data_loader(loader, data="sharded")': split_by_node(
            loader.dataset
        ),
        "in_order=False lets batches overtake each other": not getattr(loader, "in_order", True),
        f"split_batches needs a batch size that {who} divide; it is {size}": bool(
            options.split_batches and world_size > 1 and (size is None or size % world_size)
        ),
        "even_batches=False gives them batches of different sizes at the end of an epoch, and on this device they have to "
        "run the same program: leave it at True (gather_for_metrics drops the repeats), or say drop_last=True": (
            backend.one_program and not (options.even_batches or getattr(source, "drop_last", False))
        ),
    }
    for reason, applies in refusals.items():
        if applies:
            raise ValueError(f"this DataLoader cannot be prepared for {who}: {reason}")


def _check_own(loader: DataLoader[Any], place: DataPlace) -> None:
    """Refuse a sampler that splits by process where several processes have the same part of every batch."""
    source = sampler_of(loader)
    for sampler in (source, getattr(source, "sampler", None)):
        if not isinstance(sampler, DistributedSampler) or place.copies == 1:
            continue
        if (sampler.rank, sampler.num_replicas) != (place.rank, place.world_size):
            raise ValueError(
                f"this DataLoader's DistributedSampler gives part {sampler.rank} of {sampler.num_replicas}, and this "
                f"process computes part {place.rank} of {place.world_size}, which {place.copies} processes have: make it "
                "with rank=accelerator.data_parallel_rank, num_replicas=accelerator.data_parallel_size"
            )


def _told(place: DataPlace) -> str:
    """Who shares the batches, for people."""
    if place.copies == 1:
        return f"{place.world_size} processes"
    return f"{place.world_size} part(s), each on {place.copies} processes"
