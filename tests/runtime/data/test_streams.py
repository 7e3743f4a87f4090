"""Iterable datasets on several ranks: every sample exactly once, with any number of workers."""

from __future__ import annotations

import gc
import random
import warnings
from itertools import chain, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cases.pairs import pairwise_params
from support.runs import read_epochs
from support.runs.read_epochs import check_steps, read_steps, split_batches, to_plain
from support.training.data_sets import (
    BufferedShuffleStream,
    RangeStream,
    SampleStream,
    ShardedStream,
    ShuffledStream,
    SizedStream,
    StatefulStream,
    WorkerSplitStatefulStream,
    WorkerSplitStream,
    split_range,
)
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import worker as torchs

from accel_runtime import Accelerator, set_seed
from accel_runtime.backends.rng import RandomStates
from accel_runtime.backends.single import Single
from accel_runtime.data.iterable import StreamsDifferError
from accel_runtime.data.state import DatasetState, ReaderState, StreamState
from accel_runtime.data.stream_reader import ReadingRNG, StreamReader
from accel_runtime.environment.topology import Topology
from accel_runtime.foundation.epoch_progress import EpochProgress

# This machine has two cores, and torch warns of a third worker.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

RANKS = [
    pytest.param(1, id="1 process"),
    pytest.param(2, id="2 processes", marks=pytest.mark.full),
    pytest.param(3, id="3 processes"),
]
WHOLE = [
    RangeStream,
    ShuffledStream,
    BufferedShuffleStream,
    StatefulStream,
]
WHOLE += [pytest.param(SizedStream, marks=pytest.mark.full)]
DIVIDED = {
    "in __iter__": (WorkerSplitStream, None),
    "by worker_init_fn": (RangeStream, split_range),
    "by shards": (ShardedStream, None),
}


@pytest.fixture
def _impatient(monkeypatch):
    """Torch waits five seconds for each worker of a loader that the garbage collector ends."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    yield
    gc.collect()


def read_on_all_ranks(world, loader, start=None, stop=None, **options):
    """Return the epochs of all ranks, which this process reads one after another."""
    generator_states = RandomStates.capture()
    steps_by_rank = []
    for rank in range(world):
        generator_states.restore()
        steps_by_rank.append(
            read_steps(
                read_epochs.build_iterable_source(
                    loader(), read_epochs.SimulatedRank(rank, world), **options
                ),
                start,
                stop,
            )
        )
    return steps_by_rank


# Every sample once ------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
@pytest.mark.parametrize("drop_last", [False, True], ids=["whole", "drop_last"])
def test_global_batches_of_streams_equal_those_of_one_process(world, even, drop_last):
    for count in range(34):
        for size in range(1, 6):

            def loader(count=count, size=size):
                return DataLoader(RangeStream(count), batch_size=size, drop_last=drop_last)

            batches = check_steps(read_on_all_ranks(world, loader, even=even))
            assert batches == split_batches(range(count), size * world, drop_last=drop_last)


@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 5), st.booleans(), st.booleans(), st.booleans())
def test_global_batches_of_streams_are_exact_for_any_options(count, world, each, split, even, drop_last):  # noqa: PLR0913, PLR0917
    def loader():
        return DataLoader(RangeStream(count), batch_size=each * world if split else each, drop_last=drop_last)

    batches = check_steps(read_on_all_ranks(world, loader, even=even, split=split))
    assert batches == split_batches(range(count), each * world, drop_last=drop_last)


@pytest.mark.parametrize(
    ("ranks", "kind", "workers", "count", "options"),
    [
        pytest.param(*param.values[:3], *param.values[3], id=param.id, marks=param.marks)
        for param in pairwise_params(
            {
                "ranks": RANKS,
                "kind": WHOLE,
                "workers": [1, 2, pytest.param(3, marks=pytest.mark.full)],
                "data": [
                    pytest.param((17, {}), id="17"),
                    pytest.param((2, {}), id="2"),
                    pytest.param((12, {"drop_last": True}), id="12, drop_last"),
                    pytest.param((7, {"persistent_workers": True}), id="7, persistent"),
                ],
            }
        )
    ],
    indirect=["ranks"],
)
def test_a_stream_that_ignores_workers_is_read_once(ranks, kind, workers, count, options):
    """A7: Accelerate returns every sample once per worker."""

    def read_source(kind, workers, count, options):
        read_epochs.get_backend()
        torch.manual_seed(0)
        loader = DataLoader(kind(count), batch_size=2, num_workers=workers, **options)
        source = read_epochs.build_iterable_source(
            loader, read_epochs.get_backend(), even=not options.get("drop_last")
        )
        return [read_steps(source), read_steps(source)]

    size = 2 * ranks.size
    num_samples = count // size * size if options.get("drop_last") else count
    for steps in zip(*ranks.run(read_source, kind, workers, count, options), strict=True):
        actual = check_steps(steps)
        flat = list(chain.from_iterable(actual))
        assert [len(b) for b in actual] == [len(b) for b in split_batches(flat, size)]
        assert len(flat) == num_samples
        if kind in {ShuffledStream, BufferedShuffleStream}:
            assert len(set(flat)) == len(flat)
        else:
            assert flat == list(range(num_samples))


@pytest.mark.parametrize(
    ("ranks", "kind", "workers", "data"),
    pairwise_params(
        {
            "ranks": RANKS,
            "kind": list(DIVIDED),
            "workers": [1, 2, 3],
            "data": [
                pytest.param((16, True), id="16, even"),
                pytest.param((17, False), id="17, uneven"),
                pytest.param((2, True), id="2, even"),
            ],
        }
    ),
    indirect=["ranks"],
)
def test_a_stream_sharded_by_workers_is_read_once(ranks, kind, workers, data):
    """A8: Accelerate pads the last batch of every worker; A11: three shards on two ranks hang."""
    (make, init), (count, even) = DIVIDED[kind], data

    def read_source(make, init, workers, count, even):
        read_epochs.get_backend()
        loader = DataLoader(make(count), batch_size=2, num_workers=workers, worker_init_fn=init)
        return read_steps(read_epochs.build_iterable_source(loader, read_epochs.get_backend(), even=even))

    actual = check_steps(ranks.run(read_source, make, init, workers, count, even))
    assert sorted(chain.from_iterable(actual)) == list(range(count))
    if ranks.size == 1:
        loader = DataLoader(make(count), batch_size=2, num_workers=workers, worker_init_fn=init)
        assert actual == [batch.tolist() for batch in loader]


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "workers", "world", "count", "even"),
    pairwise_params(
        {
            "kind": [RangeStream, WorkerSplitStream],
            "workers": [0, 1, 2, 3],
            "world": [1, 3, 4],
            "count": [0, 1, 3, 16, 23],
            "even": [True, False],
        }
    ),
)
def test_streams_of_any_length_are_read_once_with_any_world_size_and_workers(
    kind, workers, world, count, even
):
    def loader():
        return DataLoader(kind(count), batch_size=2, num_workers=workers)

    actual = check_steps(read_on_all_ranks(world, loader, even=even))
    assert sorted(chain.from_iterable(actual)) == list(range(count))


def test_the_last_batch_is_padded_from_the_start_of_the_epoch(pair):
    def read_source():
        return read_steps(
            read_epochs.build_iterable_source(
                DataLoader(RangeStream(11), batch_size=4), read_epochs.get_backend()
            )
        )

    first, second = pair.run(read_source)
    assert [step.samples for step in first] == [[0, 1, 2, 3], [8, 9, 10, 0]]
    assert [step.samples for step in second] == [[4, 5, 6, 7], [1, 2, 3, 4]]
    assert first[-1].step_info.num_valid == (3, 0)


def test_uneven_last_batches_are_split_and_weighted(several):
    def read_source():
        size = 4 * read_epochs.get_backend().topology.world_size
        return read_steps(
            read_epochs.build_iterable_source(
                DataLoader(RangeStream(size + 1), batch_size=4), read_epochs.get_backend(), even=False
            )
        )

    results = several.run(read_source)
    check_steps(results)
    world = several.size
    assert [steps[-1].step_info.batch_sizes for steps in results] == [(1,) * world] * world
    assert [steps[-1].step_info.num_valid for steps in results] == [(1,) + (0,) * (world - 1)] * world
    assert [steps[-1].step_info.loss_scale for steps in results] == [float(world)] + [0.0] * (world - 1)


# Loaders of other classes ------------------------------------------------------------------


class Doubling(DataLoader):
    """A subclass with its own `__iter__`, which prefetches one batch."""

    def __iter__(self):
        ahead = None
        for batch in super().__iter__():
            if ahead is not None:
                yield ahead * 2
            ahead = batch
        if ahead is not None:
            yield ahead * 2


@pytest.mark.parametrize("workers", [0, 2])
def test_the_iteration_of_a_subclass_is_kept(ranks, workers):
    def read_source(workers):
        read_epochs.get_backend()
        return read_steps(
            read_epochs.build_iterable_source(
                Doubling(RangeStream(11), batch_size=2, num_workers=workers), read_epochs.get_backend()
            )
        )

    samples = list(chain.from_iterable(check_steps(ranks.run(read_source, workers))))
    assert samples == list(range(0, 22, 2))


@pytest.mark.parametrize(
    ("ranks", "workers", "persistent"),
    [
        (1, 2, False),
        (3, 0, False),
        (3, 2, True),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                (1, 0, False),
                (1, 2, True),
                (2, 0, False),
                (2, 2, False),
                (2, 2, True),
                (3, 2, False),
            ]
        ),
    ],
    indirect=["ranks"],
)
def test_the_stateful_loader_of_torchdata_reads_every_epoch_and_continues(ranks, workers, persistent):
    pytest.importorskip("torchdata")

    def read_source(workers, persistent):
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # by torchdata 0.11
        from torchdata.stateful_dataloader import StatefulDataLoader

        read_epochs.get_backend()
        options = {"batch_size": 2, "num_workers": workers, "persistent_workers": persistent}
        source = read_epochs.build_iterable_source(
            StatefulDataLoader(StatefulStream(11), **options), read_epochs.get_backend()
        )
        first, second = read_steps(source), read_steps(source)
        resumed = read_steps(source, second[0].offset)
        assert [step.samples for step in second] == [step.samples for step in first]
        assert [step.samples for step in resumed] == [step.samples for step in second[1:]]
        return second

    assert list(chain.from_iterable(check_steps(ranks.run(read_source, workers, persistent)))) == list(
        range(11)
    )


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_torchdata_loader_with_a_loaded_state_is_rejected():
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    loader = stateful.StatefulDataLoader(StatefulStream(11), batch_size=2)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match=r"load_state_dict\(\) was called before prepare\(\)"):
        Accelerator().prepare(loader)


# Random streams ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        (ShuffledStream, 2),
        (BufferedShuffleStream, 0),
        pytest.param(ShuffledStream, 0, marks=pytest.mark.full),
        pytest.param(BufferedShuffleStream, 2, marks=pytest.mark.full),
    ],
)
def test_streams_shuffled_by_each_rank_have_one_order(several, kind, workers):
    """A9: Accelerate loses samples and repeats others."""

    def read_source(kind, workers):
        read_epochs.get_backend()
        set_seed(3, device_specific=True)
        source = read_epochs.build_iterable_source(
            DataLoader(kind(23), batch_size=2, num_workers=workers), read_epochs.get_backend(), even=False
        )
        epochs, rank_orders = [], []
        for _ in range(3):
            epochs.append(read_steps(source))
            rank_orders.append(random.random())
        return epochs, rank_orders

    results = several.run(read_source, kind, workers)
    epochs = [check_steps([results[rank][0][epoch] for rank in range(several.size)]) for epoch in range(3)]
    flat = [list(chain.from_iterable(epoch)) for epoch in epochs]
    assert all(sorted(epoch) == list(range(23)) for epoch in flat)
    assert len({tuple(epoch) for epoch in flat}) == 3, "every epoch in another order"
    assert len({tuple(rank_orders) for _, rank_orders in results}) == several.size, (
        "each keeps its own random numbers"
    )


def test_persistent_workers_of_all_ranks_shuffle_equally_after_a_break(ranks):
    def read_source():
        loader = DataLoader(ShuffledStream(23), batch_size=2, num_workers=2, persistent_workers=True)
        source = read_epochs.build_iterable_source(loader, read_epochs.get_backend(), even=False)
        return [read_steps(source, stop=2), read_steps(source), read_steps(source)]

    results = ranks.run(read_source)
    epochs = [
        list(chain.from_iterable(check_steps([rank_epochs[epoch] for rank_epochs in results])))
        for epoch in (1, 2)
    ]
    assert [sorted(epoch) for epoch in epochs] == [list(range(23))] * 2
    assert epochs[0] != epochs[1]


# Inconsistent streams ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ragged", "workers"),
    [
        pytest.param(False, 2, id="equally long-2"),
        pytest.param(True, 0, id="one is empty-0"),
        pytest.param(False, 0, id="equally long-0", marks=pytest.mark.full),
        pytest.param(True, 2, id="one is empty-2", marks=pytest.mark.full),
    ],
)
def test_a_stream_sharded_by_rank_is_rejected_before_the_first_batch(several, workers, ragged):
    def read_source(ragged, workers):
        backend = read_epochs.get_backend()
        rank, world_size = backend.topology.rank, backend.topology.world_size
        stream = SampleStream(range(0) if ragged and rank else range(rank, 24, world_size))
        source = read_epochs.build_iterable_source(
            DataLoader(stream, batch_size=2, num_workers=workers), backend
        )
        with pytest.raises(StreamsDifferError, match=r'data="sharded".*dispatch_batches=True'):
            read_steps(source)
        return True

    assert all(several.run(read_source, ragged, workers))


def test_streams_that_diverge_later_raise_an_error(pair):
    def read_source():
        backend, loop = read_epochs.get_backend(), EpochProgress()
        rank = backend.topology.rank
        stream = RangeStream(64, lambda n: n if n < 20 else n * (rank + 1))
        taken = []
        source = read_epochs.build_iterable_source(DataLoader(stream, batch_size=2), backend)
        with pytest.raises(StreamsDifferError):
            taken.extend(source.iterate(loop, StreamState()))
        return len(taken)

    assert pair.run(read_source) == [7, 7]


def test_workers_that_read_a_stream_in_different_orders_are_rejected(ranks):
    class Seeded(RangeStream):
        def __iter__(self):
            info = get_worker_info()
            order = list(range(self.count))
            random.Random(info.seed).shuffle(order)
            return iter(order)

    def read_source(kind):
        source = read_epochs.build_iterable_source(
            DataLoader(kind(24), batch_size=2, num_workers=2), read_epochs.get_backend()
        )
        with pytest.raises(StreamsDifferError, match="workers"):
            read_steps(source)
        return True

    assert all(ranks.run(read_source, Seeded))


# Seeding by worker ------------------------------------------------------------------------


def seed_by_number(worker_id):
    """Seed the generators by worker id, as many scripts do."""
    import numpy as np

    np.random.seed(7 + worker_id)  # noqa: NPY002
    random.seed(7 + worker_id)


def test_a_worker_init_fn_that_only_seeds_loses_no_sample(ranks):
    def read_source(init):
        torch.manual_seed(0)
        loader = DataLoader(ShuffledStream(23), batch_size=2, num_workers=2, worker_init_fn=init)
        return read_steps(read_epochs.build_iterable_source(loader, read_epochs.get_backend(), even=False))

    flat = list(chain.from_iterable(check_steps(ranks.run(read_source, seed_by_number))))
    assert sorted(flat) == list(range(23))


def collate_noisy(samples):
    """Collate samples with random numbers."""
    return torch.tensor([[n, random.randrange(10**9)] for n in samples])


def test_random_numbers_in_collate_fn_do_not_affect_the_order(several):
    def read_source(collate):
        torch.manual_seed(0)
        loader = DataLoader(BufferedShuffleStream(40), batch_size=2, num_workers=2, collate_fn=collate)
        source = read_epochs.build_iterable_source(loader, read_epochs.get_backend(), even=False)
        random_numbers = []

        def to_samples(batch):
            random_numbers.extend(batch[:, 1].tolist())
            return batch[:, 0].tolist()

        return read_steps(source, to_samples=to_samples), random_numbers

    results = several.run(read_source, collate_noisy)
    assert sorted(chain.from_iterable(check_steps([steps for steps, _ in results]))) == list(range(40))
    draws = list(chain.from_iterable(random_numbers for _, random_numbers in results))
    assert len(set(draws)) == len(draws), "each rank draws its own"


def test_the_private_worker_names_of_torch_exist():
    """accel replaces these private names of torch for single workers."""
    assert torchs._worker_info is None
    torchs._worker_info = marker = object()
    try:
        assert get_worker_info() is marker
    finally:
        torchs._worker_info = None
    assert len(torchs._generate_state(5, 0)) == 4
    assert callable(DataLoader._get_iterator)


def test_get_worker_info_matches_torch():
    class Curious(RangeStream):
        def __iter__(self):
            info = get_worker_info()
            batches = info.id + 10 * info.num_workers
            assert info.dataset is self
            assert info.seed == torch.initial_seed()
            yield batches

    actual = check_steps(
        [
            read_steps(
                read_epochs.build_iterable_source(
                    DataLoader(Curious(1), num_workers=2), Single(Topology(), torch.device("cpu"))
                )
            )
        ]
    )
    assert actual == [[20], [21]]


# Length -----------------------------------------------------------------------------------


@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.booleans())
def test_num_steps_equals_the_number_of_batches_of_an_epoch(count, world, each, split, drop_last):
    """A6, A35: Accelerate counts with another batch size."""
    size = each * world if split else each

    def loader():
        return DataLoader(SizedStream(count), batch_size=size, drop_last=drop_last)

    source = read_epochs.build_iterable_source(loader(), read_epochs.SimulatedRank(0, world), split=split)
    assert source.num_steps(0) == len(check_steps(read_on_all_ranks(world, loader, split=split)))


# Position ---------------------------------------------------------------------------------

KINDS = {
    "plain": (RangeStream, 0),
    "plain, workers": (RangeStream, 2),
    "shuffled": (ShuffledStream, 0),
    "shuffled, workers": (ShuffledStream, 2),
    "buffered": (BufferedShuffleStream, 0),
    "stateful": (StatefulStream, 0),
    "stateful, workers": (StatefulStream, 2),
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "epoch", "at", "world"),
    pairwise_params({"kind": list(KINDS), "epoch": [0, 1], "at": [0, 3, 10, 11], "world": [1, 2, 3]}),
)
def test_a_stream_continues_from_an_offset_on_any_world_size(kind, epoch, at, world):
    """B5: Accelerate loses samples on another world size."""
    make, workers = KINDS[kind]

    def loader():
        return DataLoader(make(23), batch_size=2, num_workers=workers)

    source = read_epochs.build_iterable_source(loader(), Single(Topology(), torch.device("cpu")))
    for _ in range(epoch):
        read_steps(source)
    all_steps = read_steps(source)
    flat = list(chain.from_iterable(check_steps([all_steps])))
    offset = all_steps[at].offset
    torch.manual_seed(99)
    random.seed(99)
    remaining = check_steps(read_on_all_ranks(world, loader, offset))
    assert remaining == split_batches(flat[offset.offset :], 2 * world)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_stream_is_equal_including_padding(kind, pair):
    make, workers = KINDS[kind]

    def read_source(make, workers):
        read_epochs.get_backend()
        source = read_epochs.build_iterable_source(
            DataLoader(make(23), batch_size=3, num_workers=workers), read_epochs.get_backend()
        )
        all_steps = read_steps(source)
        resumed = read_steps(source, all_steps[1].offset)
        twice = read_steps(source, resumed[0].offset)
        return (
            [(s.samples, s.step_info) for s in all_steps[2:]],
            [(s.samples, s.step_info) for s in resumed],
            twice,
            resumed,
        )

    for all_steps, resumed, twice, steps in pair.run(read_source, make, workers):
        assert all_steps == resumed
        assert [to_plain(step._asdict()) for step in twice] == [
            to_plain(step._asdict()) for step in steps[1:]
        ]


@pytest.mark.parametrize(
    ("make", "workers"),
    [
        pytest.param(WorkerSplitStream, 2, marks=pytest.mark.full),
        pytest.param(WorkerSplitStatefulStream, 3, marks=pytest.mark.slow),
        pytest.param(WorkerSplitStream, 3, marks=pytest.mark.slow),
        pytest.param(WorkerSplitStatefulStream, 2, marks=pytest.mark.full),
    ],
)
def test_a_stream_sharded_by_workers_continues_in_worker_order(make, workers):
    def loader(count=23):
        return DataLoader(make(count), batch_size=2, num_workers=workers)

    all_steps = read_on_all_ranks(2, loader)
    for at in range(len(all_steps[0])):
        remaining = read_on_all_ranks(2, loader, all_steps[0][at].offset)
        assert check_steps(remaining) == check_steps([steps[at + 1 :] for steps in all_steps])
        assert [[s.samples for s in steps] for steps in remaining] == [
            [s.samples for s in steps[at + 1 :]] for steps in all_steps
        ]


@pytest.mark.usefixtures("_impatient")
def test_an_offset_of_another_number_of_workers_is_rejected():
    def source(workers, kind=WorkerSplitStream):
        return read_epochs.build_iterable_source(
            DataLoader(kind(23), batch_size=2, num_workers=workers), read_epochs.SimulatedRank(0, 2)
        )

    split_offset, unsplit_offset = read_steps(source(2))[0].offset, read_steps(source(0))[0].offset
    for other, offset, expected in ((3, split_offset, 2), (0, split_offset, 2), (2, unsplit_offset, 0)):
        with pytest.raises(ValueError, match=f"num_workers={expected}"):
            read_steps(source(other), offset)
    with pytest.raises(ValueError, match="num_workers=2"):
        read_steps(source(2, RangeStream), split_offset)


SKIPPED_WITH_WORKERS = [(StatefulStream, 1), (ShuffledStream, 5), (WorkerSplitStream, 5)]
"""Streams and numbers of batches that are skipped with workers in `make test`: one that workers split is skipped in another way."""


def skipping_cases():
    kinds = [
        RangeStream,
        ShuffledStream,
        BufferedShuffleStream,
        StatefulStream,
        WorkerSplitStream,
    ]
    for kind, workers, skipped in product(kinds, [0, 2, 3], [0, 1, 4, 5, 40]):
        chosen = not workers or (workers == 2 and (kind, skipped) in SKIPPED_WITH_WORKERS)
        yield pytest.param(kind, workers, skipped, marks=[] if chosen else [pytest.mark.full])


@pytest.mark.parametrize(("kind", "workers", "skipped"), [*skipping_cases()])
def test_skip_steps_skips_exactly_the_first_batches(kind, workers, skipped):
    """B3: Accelerate skips too few on several ranks."""

    def loader():
        return DataLoader(kind(23), batch_size=2, num_workers=workers)

    set_seed(0)
    all_steps = read_on_all_ranks(2, loader)
    source = read_epochs.build_iterable_source(loader(), read_epochs.SimulatedRank(0, 2))
    set_seed(0)
    assert check_steps(
        read_on_all_ranks(2, loader, StreamState().skip(skipped, source.stride))
    ) == check_steps([s[skipped:] for s in all_steps])
    next_offset = all_steps[0][0].offset.skip(skipped, source.stride)
    assert check_steps(read_on_all_ranks(2, loader, next_offset)) == check_steps(
        [s[skipped + 1 :] for s in all_steps]
    )


def test_a_stateful_dataset_is_not_read_again():
    stream = StatefulStream(400_000)
    source = read_epochs.build_iterable_source(
        DataLoader(stream, batch_size=2), Single(Topology(), torch.device("cpu"))
    )
    at = 300_000 - 16
    samples = StreamReader(RangeStream(400_000), 0, ReadingRNG())
    samples.open()
    samples.verify(DatasetState({"at": at}, at, 16, 0), 300_000)
    saved = samples._marks[0].build_state()
    offset = StreamState(begun=True, offset=300_000, reader=ReaderState(300_000, dataset=saved))
    assert [step.samples for step in read_steps(source, offset, stop=2)] == [
        [300_000, 300_001],
        [300_002, 300_003],
    ]
    assert stream.num_read < 30
    assert read_steps(source, stop=1)[0].samples == [0, 1], "the next walk begins at the start"


def test_skipped_samples_are_not_collated():
    collated = []

    def collate(samples):
        collated.extend(samples)
        return torch.tensor(samples)

    source = read_epochs.build_iterable_source(
        DataLoader(RangeStream(23), batch_size=2, collate_fn=collate), read_epochs.SimulatedRank(0, 2)
    )
    read_steps(source, StreamState().skip(3, source.stride))
    assert min(collated[:2]) == 12
