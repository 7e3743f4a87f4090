"""Dispatched data: the first rank reads for all, and every sample is delivered exactly once."""

from __future__ import annotations

import random
from itertools import chain

import pytest
import torch
from support.runs import read_epochs
from support.runs.read_epochs import check_steps, read_steps, split_batches
from support.training.data_sets import RangeStream, ShuffledStream, WorkerSplitStream
from torch.utils.data import DataLoader, RandomSampler

from accel_runtime import Accelerator, DataLoaderConfiguration

DATASETS = {"a stream": RangeStream, "a map": range}


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
@pytest.mark.parametrize("kind", DATASETS)
def test_dispatched_global_batches_equal_those_of_one_process(ranks, kind, even):
    """A12, A13: Accelerate fails for empty streams and for streams shorter than the world size."""

    def read_source(make, even):
        steps_by_case = {}
        world = read_epochs.get_backend().topology.world_size
        for count in (0, 1, 2, 17, 24):
            for size, split, drop in ((1, False, False), (4, False, True), (6, True, False)):
                loader = DataLoader(make(count), batch_size=size, drop_last=drop)
                source = read_epochs.build_dispatched_source(
                    loader, read_epochs.get_backend(), split=split, even=even
                )
                key = (count, size if split else size * world, drop)
                steps_by_case[key] = (
                    read_steps(source),
                    None if make is RangeStream else source.num_steps(0),
                )
        return steps_by_case

    results = ranks.run(read_source, DATASETS[kind], even)
    for (count, size, drop), (_, steps) in results[0].items():
        actual = check_steps([rank_results[count, size, drop][0] for rank_results in results])
        assert actual == split_batches(range(count), size, drop_last=drop)
        assert steps in {None, len(actual)}


def test_only_the_first_rank_reads(several):
    def read_source():
        backend = read_epochs.get_backend()

        def read_on_first_rank(number):
            assert backend.topology.rank == 0
            return number

        stream = RangeStream(11, read_on_first_rank)
        return read_steps(read_epochs.build_dispatched_source(DataLoader(stream, batch_size=2), backend))

    assert check_steps(several.run(read_source)) == split_batches(range(11), 2 * several.size)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("kind", [RangeStream, WorkerSplitStream, range, ShuffledStream])
def test_workers_read_for_all_ranks(ranks, kind, workers):
    def read_source(kind, workers):
        read_epochs.get_backend()
        loader = DataLoader(kind(17), batch_size=2, num_workers=workers)
        return read_steps(read_epochs.build_dispatched_source(loader, read_epochs.get_backend()))

    actual = check_steps(ranks.run(read_source, kind, workers))
    assert sorted(chain.from_iterable(actual)) == list(range(17))


class Uneven:
    """Batches of different lengths."""

    batches = ([0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10])

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


@pytest.mark.parametrize("even", [True, False])
def test_dispatched_batches_of_any_length_are_not_split(ranks, even):
    """A16: Accelerate loses a sample and repeats another."""

    def read_source(sampler, even):
        return read_steps(
            read_epochs.build_dispatched_source(
                DataLoader(range(11), batch_sampler=sampler), read_epochs.get_backend(), even=even
            )
        )

    results = ranks.run(read_source, Uneven(), even)
    assert list(chain.from_iterable(check_steps(results))) == list(range(11))
    for rank, steps in enumerate(results):
        for step, batch in zip(steps, Uneven.batches[rank :: ranks.size], strict=False):
            assert step.samples[: len(batch)] == batch


def build_shuffled(count, **options):
    """Return a shuffled map-style loader."""
    return DataLoader(range(count), shuffle=True, **options)


def build_with_generator(count, **options):
    """Return a loader that is shuffled by its own generator."""
    data = range(count)
    return DataLoader(
        data, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(3)), **options
    )


def build_stream(count, **options):
    """Return a loader of a stream that shuffles."""
    return DataLoader(ShuffledStream(count), **options)


@pytest.mark.parametrize("make", [build_shuffled, build_with_generator, build_stream])
@pytest.mark.parametrize("epoch", [0, 1])
def test_dispatched_iteration_continues_from_an_offset_on_any_world_size(clusters, make, epoch):
    def read_source(make, epoch, start=None):
        torch.manual_seed(read_epochs.get_backend().topology.rank)
        random.seed(5)
        source = read_epochs.build_dispatched_source(
            make(23, batch_size=2), read_epochs.get_backend(), even=False
        )
        for _ in range(epoch):
            read_steps(source)
        return read_steps(source, start)

    all_steps = clusters[2].run(read_source, make, epoch)
    flat = list(chain.from_iterable(check_steps(all_steps)))
    assert sorted(flat) == list(range(23))
    offset = all_steps[1][2].offset
    for world in (1, 2, 3):
        remaining = check_steps(clusters[world].run(read_source, make, 0, offset))
        assert remaining == split_batches(flat[12:], 2 * world)


@pytest.mark.parametrize("make", [build_shuffled, build_with_generator, build_stream])
@pytest.mark.parametrize("first", [True, False], ids=["from dispatched", "to dispatched"])
def test_an_offset_is_valid_with_and_without_dispatch(pair, make, first):
    def read_source(make, first):
        loaders, remaining = [], []
        for dispatch in (first, not first):
            config = DataLoaderConfiguration(dispatch_batches=dispatch, even_batches=False)
            accelerator = Accelerator(dataloader_config=config)
            loaders.append(accelerator.prepare(make(23, batch_size=2)))
        for step, batch in enumerate(loaders[0]):
            if step == 2:
                loaders[1].load_state_dict(loaders[0].state_dict())
            elif step > 2:
                remaining.append(batch.tolist())
        return remaining == [batch.tolist() for batch in loaders[1]]

    assert pair.run(read_source, make, first) == [True, True]


def test_a_seeded_order_is_equal_with_and_without_dispatch(pair):
    def read_source(make):
        samples = []
        for dispatch in (False, True):
            config = DataLoaderConfiguration(
                dispatch_batches=dispatch, use_seedable_sampler=True, data_seed=7
            )
            loader = Accelerator(dataloader_config=config).prepare(make(23, batch_size=2))
            samples.append([[batch.tolist() for batch in loader] for _ in range(2)])
        return samples[0] == samples[1] and samples[0][0] != samples[0][1]

    assert pair.run(read_source, build_shuffled) == [True, True]
