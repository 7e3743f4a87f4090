"""Rank-specific data: every rank reads its own samples once, and all ranks take equal step counts."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from support.runs import read_epochs
from support.runs.read_epochs import check_steps, read_steps
from support.training.data_sets import RangeStream, SampleStream
from torch.utils.data import DataLoader, DistributedSampler

from accel_runtime import Accelerator, DataLoaderConfiguration
from accel_runtime.backends.single import Single
from accel_runtime.data.presharded import PreshardedSource
from accel_runtime.environment.topology import Topology
from accel_runtime.foundation.epoch_progress import EpochProgress
from accel_runtime.observe.heartbeat import heartbeat

COUNTS = [(8, 8, 8), (9, 4, 1), (1, 7, 7), (5, 0, 3), (0, 0, 0), (0, 2, 0)]


def alone():
    """Return the backend of a source of one rank."""
    return Single(Topology(), torch.device("cpu"), is_counted=False)


def build_source(kind, counts, options=None):
    """Return a source of the samples of this rank, which start at 100 times the rank."""
    backend = read_epochs.get_backend()
    rank = backend.topology.rank
    loaders = {
        "a stream": SampleStream(range(rank * 100, rank * 100 + counts[rank])),
        "a map": range(rank * 100, rank * 100 + counts[rank]),
    }
    loader = DataLoader(loaders[kind], batch_size=2, **options or {})
    local = (
        read_epochs.build_iterable_source(loader, alone())
        if kind == "a stream"
        else read_epochs.build_dispatched_source(loader, alone())
    )
    return PreshardedSource(local, loader, backend)


def test_collectives_of_a_source_of_one_rank_are_not_counted(pair):
    """Ranks compare their number of collectives before they save."""

    def count():
        before = heartbeat().collectives
        alone().barrier()
        return heartbeat().collectives - before

    assert pair.run(count) == [0, 0]


def valid_samples(steps_by_rank):
    """Check the epoch; return the samples of every rank without padding."""
    check_steps(steps_by_rank)
    return [
        list(chain.from_iterable(step.samples[: step.step_info.num_valid[rank]] for step in steps))
        for rank, steps in enumerate(steps_by_rank)
    ]


@pytest.mark.parametrize("kind", ["a stream", "a map"])
def test_a_batch_that_collates_to_none_does_not_end_the_epoch(kind):
    """The batches after it are returned too, as by a bare loader."""
    data = RangeStream(6) if kind == "a stream" else range(6)
    loader = DataLoader(data, batch_size=2, collate_fn=lambda rows: None if 2 in rows else rows)
    local = (
        read_epochs.build_iterable_source(loader, alone())
        if kind == "a stream"
        else read_epochs.build_dispatched_source(loader, alone())
    )
    source = PreshardedSource(local, loader, read_epochs.SimulatedRank(0, 2))
    batches = [step.samples for step in read_steps(source, to_samples=lambda batch: batch)]
    assert batches == [[0, 1], None, [4, 5]]


@pytest.mark.parametrize("kind", ["a stream", "a map"])
@pytest.mark.parametrize("counts", COUNTS)
def test_every_rank_reads_its_own_samples_once_in_equal_step_counts(ranks, kind, counts):
    """A11, F1: Accelerate hangs if ranks have different numbers of batches."""

    def read_source(kind, counts):
        source = build_source(kind, counts)
        return [read_steps(source), read_steps(source)]

    results = ranks.run(read_source, kind, counts)
    for epoch in (0, 1):
        expected = [list(range(r * 100, r * 100 + counts[r])) for r in range(ranks.size)]
        assert valid_samples([steps[epoch] for steps in results]) == expected
        longest = max(-(-count // 2) for count in counts[: ranks.size])
        assert len(results[0][epoch]) == longest


def test_a_rank_without_further_data_repeats_its_first_batch(pair):
    def read_source(kind):
        return read_steps(build_source(kind, (5, 2)))

    for kind in ("a stream", "a map"):
        first, second = pair.run(read_source, kind)
        assert [step.samples for step in second] == [[100, 101]] * 3
        assert [step.step_info.loss_scale for step in first] == [1.0, 2.0, 2.0]
        assert [step.step_info.loss_scale for step in second] == [1.0, 0.0, 0.0]


def test_a_rank_without_data_receives_a_batch_of_another(pair):
    def read_source(kind):
        return read_steps(build_source(kind, (0, 3)))

    for kind in ("a stream", "a map"):
        assert [step.samples for step in pair.run(read_source, kind)[0]] == [[100, 101]] * 2


def test_a_repeated_batch_is_not_affected_by_changes_of_the_script(pair):
    def read_source():
        backend = read_epochs.get_backend()
        rank = backend.topology.rank
        loader = DataLoader([{"x": n, "label": n} for n in range(6 if rank == 0 else 1)], batch_size=2)
        source = PreshardedSource(read_epochs.build_dispatched_source(loader, alone()), loader, backend)
        return [batch.pop("label").tolist() for batch in source.iterate(EpochProgress(), source.state_type())]

    assert pair.run(read_source) == [[[0, 1], [2, 3], [4, 5]], [[0]] * 3]


def test_a_loader_with_a_distributed_sampler_is_not_sharded_again(ranks):
    """A20: Accelerate splits it a second time, and loses half."""

    def read_source():
        backend = read_epochs.get_backend()
        topology = backend.topology
        sampler = DistributedSampler(range(18), topology.world_size, topology.rank, shuffle=False)
        loader = DataLoader(range(18), batch_size=2, sampler=sampler)
        return read_steps(
            PreshardedSource(read_epochs.build_dispatched_source(loader, alone()), loader, backend)
        )

    assert sorted(chain.from_iterable(check_steps(ranks.run(read_source)))) == list(range(18))


@pytest.mark.parametrize("kind", ["a stream", "a map"])
def test_workers_read_the_samples_of_their_rank(pair, kind):
    def read_source(kind):
        return read_steps(build_source(kind, (9, 4), {"num_workers": 2}))

    assert valid_samples(pair.run(read_source, kind)) == [list(range(9)), list(range(100, 104))]


def test_a_sampler_shorter_than_its_length_is_an_error():
    class Short:
        def __iter__(self):
            return iter([0, 1])

        def __len__(self):
            return 4

    loader = DataLoader(range(4), batch_size=2, sampler=Short())
    source = PreshardedSource(read_epochs.build_dispatched_source(loader, alone()), loader, alone())
    with pytest.raises(RuntimeError, match="fewer samples than its length"):
        read_steps(source)


@pytest.mark.parametrize("option", ["dispatch_batches", "split_batches"])
def test_options_of_a_global_order_are_rejected_for_presharded_data(option):
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**{option: True}))
    with pytest.raises(ValueError, match=f'data="sharded" and {option}=True'):
        accelerator.prepare_data_loader(DataLoader(range(4)), data="sharded")
