"""Every source satisfies the contract of `data/source.py`.

A new source needs an entry in `SOURCES`. The data are the numbers below `COUNT`. Where ranks have their own data, the first
rank has the first `FIRST` of them, and so more steps than the others.
"""

from __future__ import annotations

import io
import random
from itertools import chain
from typing import NamedTuple

import numpy as np
import pytest
import torch
from support.runs import read_epochs
from support.runs.read_epochs import check_steps, read_steps, split_batches, to_plain
from torch.utils.data import DataLoader, IterableDataset

from accel_runtime import set_seed
from accel_runtime.data import prepare
from accel_runtime.data.iterable import IterableSource
from accel_runtime.data.loader import LoaderOptions
from accel_runtime.data.map_style import MapStyleSource
from accel_runtime.data.prepare import DispatchedIterable, DispatchedMapStyle
from accel_runtime.data.presharded import PreshardedSource
from accel_runtime.data.source import Source
from accel_runtime.foundation.epoch_progress import EpochProgress
from accel_runtime.storage.schema import read_value, write_record

# A loader of these tests may have more workers than this machine has cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

COUNT, FIRST, SIZE = 17, 9, 2


class Implementation(NamedTuple):
    """A source, and the loader and options that select it."""

    source: type[Source]
    """Its class on several ranks."""
    is_stream: bool = False
    workers: int = 0
    dispatch: bool = False
    presharded: bool = False


SOURCES = {
    "map-style": Implementation(MapStyleSource),
    "map-style, worker": Implementation(MapStyleSource, workers=1),
    "stream": Implementation(IterableSource, is_stream=True),
    "stream, worker": Implementation(IterableSource, is_stream=True, workers=1),
    "dispatched map-style": Implementation(DispatchedMapStyle, dispatch=True),
    "dispatched stream": Implementation(DispatchedIterable, is_stream=True, dispatch=True),
    "presharded map-style": Implementation(PreshardedSource, presharded=True),
    "presharded stream": Implementation(PreshardedSource, is_stream=True, presharded=True),
}
CASES = [
    # Workers take long to start.
    pytest.param((name, size), id=f"{name}, world size {size}", marks=[pytest.mark.full] * (size == rare))
    for name, each in SOURCES.items()
    for size, rare in (((1, 0), (2, 2)) if each.workers else ((1, 0), (2, 2), (3, 0)))
]
"""Each source on several numbers of processes."""


class Numbers(IterableDataset):
    """A stream of samples; `shuffled` draws their order from all generators of the process."""

    def __init__(self, samples, *, shuffled):
        self.samples, self.shuffled = samples, shuffled

    def __iter__(self):
        order = list(range(len(self.samples)))
        if self.shuffled:
            order = torch.randperm(len(order)).tolist()
            random.shuffle(order)
            np.random.shuffle(order)  # noqa: NPY002
        return (self.samples[index] for index in order)


class SizedNumbers(Numbers):
    """A stream with a length."""

    def __len__(self):
        return len(self.samples)


def build_loader(implementation, samples, *, shuffled=False, sized=True, **options):
    """Return the loader of a script."""
    options = {"batch_size": SIZE, "num_workers": implementation.workers} | options
    if not implementation.is_stream:
        return DataLoader(samples, shuffle=shuffled, **options)
    kind = SizedNumbers if sized else Numbers
    return DataLoader(kind(samples, shuffled=shuffled), **options)


def select_samples(implementation, rank, world_size, count=COUNT):
    """Return the samples that the loader of a rank has."""
    if not implementation.presharded or world_size == 1:
        return range(count)
    return range(FIRST) if rank == 0 else range(FIRST, count)[rank - 1 :: world_size - 1]


def build(implementation, *, even=True, samples=None, **options):
    """Return the source of this rank."""
    backend = read_epochs.get_backend()
    topology = backend.topology
    samples = samples or select_samples(implementation, topology.rank, topology.world_size)
    loader_options = LoaderOptions(
        even_batches=even, dispatch=implementation.dispatch, presharded=implementation.presharded
    )
    return prepare._build_source(build_loader(implementation, samples, **options), backend, loader_options)


def restore(state):
    """Return a state as a checkpoint returns it."""
    saved = io.BytesIO()
    torch.save(write_record(state), saved)
    saved.seek(0)
    return read_value(type(state), torch.load(saved, weights_only=True))


def describe(steps):
    """Return the samples and the information of steps, which == compares."""
    return [(step.samples, step.step_info) for step in steps]


@pytest.fixture(params=CASES)
def case(request):
    """The name of each source with each number of processes in turn."""
    return request.param


@pytest.fixture
def source(case):
    """The source of the case."""
    return SOURCES[case[0]]


@pytest.fixture
def ranks(case, clusters):
    """The processes of the case."""
    return clusters[case[1]]


@pytest.fixture(scope="module")
def _epochs_by_case():
    return {}


@pytest.fixture(params=[False, True], ids=["in order", "shuffled"])
def shuffled(request):
    """Whether the script shuffles."""
    return request.param


@pytest.fixture
def epochs(source, shuffled, ranks, _epochs_by_case):
    """Two epochs of every rank, which several rules look at: the steps, and the number of steps that the source expects."""

    def read(implementation, shuffled):
        set_seed(3)
        source = build(implementation, shuffled=shuffled)
        return [(read_steps(source), source.num_steps(epoch)) for epoch in range(2)]

    case = (source, shuffled, ranks.size)
    if case not in _epochs_by_case:
        _epochs_by_case[case] = ranks.run(read, source, shuffled)
    by_rank = _epochs_by_case[case]
    return [[rank_epochs[number] for rank_epochs in by_rank] for number in range(2)]


# The table --------------------------------------------------------------------------------


def test_every_source_is_in_the_table():
    def list_classes(parent):
        children = [
            child for child in parent.__subclasses__() if child.__module__.startswith("accel_runtime.")
        ]
        return {child for each in children for child in {each, *list_classes(each)}}

    mixins = {prepare._Dispatch}
    assert {each.source for each in SOURCES.values()} == list_classes(Source) - mixins


@pytest.mark.parametrize("name", SOURCES)
def test_the_options_of_the_script_select_the_source(name, pair):
    source = SOURCES[name]

    def find_class(implementation):
        built = build(implementation)
        return type(built).__name__, built.state_type.kind

    assert pair.run(find_class, source) == [(source.source.__name__, source.source.state_type.kind)] * 2
    # Checkpoints have the word: it never changes.
    assert source.source.state_type.kind in {"map_style", "iterable", "presharded"}


# An epoch ---------------------------------------------------------------------------------


def test_every_sample_is_valid_once_and_the_counts_add_up_to_the_data(epochs):
    for epoch in epochs:
        batches = check_steps([steps for steps, _ in epoch])
        assert sorted(chain.from_iterable(batches)) == list(range(COUNT))
        infos = [step.step_info for step in epoch[0][0]]
        assert sum(sum(info.num_valid) for info in infos) == COUNT
        assert sum(info.num_padding + sum(info.num_valid) for info in infos) == sum(
            len(step.samples) for steps, _ in epoch for step in steps
        )


def test_ranks_take_as_many_steps_as_the_source_expects(epochs):
    for epoch in epochs:
        (num_steps,) = {len(steps) for steps, _ in epoch}
        # A rank with its own data expects the steps of these.
        assert max(expected for _, expected in epoch) == num_steps


def test_without_padding_every_sample_is_valid_once_and_weighted_by_samples(source, ranks):
    def read(implementation):
        return read_steps(build(implementation, even=False))

    steps_by_rank = ranks.run(read, source)
    assert sorted(chain.from_iterable(check_steps(steps_by_rank))) == list(range(COUNT))
    assert all(step.step_info.by_samples for step in steps_by_rank[0]) or ranks.size == 1


def test_a_second_epoch_has_another_order_if_the_script_shuffles(epochs, shuffled):
    first, second = ([[step.samples for step in steps] for steps, _ in epoch] for epoch in epochs)
    assert (first != second) == shuffled


def test_the_order_is_that_of_the_unprepared_loader_on_one_process(source, ranks):
    def read(implementation):
        set_seed(3 + read_epochs.get_backend().topology.rank)  # the order is that of the first rank
        source = build(implementation, shuffled=True)
        return [read_steps(source) for _ in range(2)]

    if source.presharded:
        return  # each rank has the order of its own data
    by_rank = ranks.run(read, source)
    set_seed(3)
    unprepared = build_loader(source, range(COUNT), shuffled=True, batch_size=SIZE * ranks.size)
    for number in range(2):
        expected = [batch.tolist() for batch in unprepared]
        assert check_steps([rank_epochs[number] for rank_epochs in by_rank]) == expected


def test_two_loops_over_one_source_each_read_every_sample(source, ranks):
    def read(implementation):
        source, loops = build(implementation), (EpochProgress(), EpochProgress())
        pairs = zip(*(source.iterate(loop, source.state_type()) for loop in loops), strict=True)
        return [
            (*(batch.tolist() for batch in batches), *(loop.step_info for loop in loops)) for batches in pairs
        ]

    for steps in ranks.run(read, source):
        assert all(a == b and info == other for a, b, info, other in steps)


def test_a_stream_without_a_length_has_no_number_of_steps(source, ranks):
    def count(implementation):
        with pytest.raises(TypeError, match="has no length"):
            build(implementation, sized=False).num_steps(0)

    if source.is_stream:
        ranks.run(count, source)


# A state ----------------------------------------------------------------------------------


def is_plain(value):
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return value is None or type(value) in {bool, int, float, str, bytes, torch.Tensor}


def test_a_state_is_plain_data_and_equal_after_a_checkpoint(epochs):
    for steps, _ in epochs[1]:
        for step in steps:
            assert is_plain(write_record(step.offset))
            assert to_plain(restore(step.offset)) == to_plain(step.offset)


def test_an_epoch_continues_from_any_step_in_a_new_source(source, ranks):
    def read(implementation):
        rests, expected = [], []
        for shuffled in (True,) if implementation.workers else (False, True):
            set_seed(3)
            script = build(implementation, shuffled=shuffled)
            read_steps(script)
            epoch = read_steps(script)
            for at in (0,) if implementation.workers else range(len(epoch)):
                set_seed(99)  # only the state is kept
                resumed = build(implementation, shuffled=shuffled)
                rests.append(describe(read_steps(resumed, restore(epoch[at].offset))))
                expected.append(describe(epoch[at + 1 :]))
        return rests, expected

    for rests, expected in ranks.run(read, source):
        assert rests == expected


def test_skipping_steps_is_reading_and_dropping_them(source, ranks):
    def read(implementation):
        rank = read_epochs.get_backend().topology.rank

        def describe_valid(steps):
            # A rank whose own data have been skipped gets other padding.
            own = [(step.samples[: step.step_info.num_valid[rank]], step.step_info) for step in steps]
            return own if implementation.presharded else describe(steps)

        set_seed(3)
        epoch = read_steps(build(implementation, shuffled=True))
        rests = []
        for skipped, start in ((2, None), (1, restore(epoch[0].offset))):
            set_seed(3)
            source = build(implementation, shuffled=True)
            start = start or source.state_type()  # noqa: PLW2901
            rests.append(describe_valid(read_steps(source, start.skip(skipped, source.stride))))
        return [describe_valid(epoch[2:])] * 2, rests

    for expected, rests in ranks.run(read, source):
        assert rests == expected


def test_the_state_between_two_epochs_is_the_start_of_the_second(source, ranks):
    def read(implementation):
        set_seed(3)
        script = build(implementation, shuffled=True)
        read_steps(script)
        state = restore(script.next_epoch())
        second = read_steps(script)
        set_seed(99)
        return describe(second), describe(read_steps(build(implementation, shuffled=True), state))

    for expected, actual in ranks.run(read, source):
        assert actual == expected


def test_a_restarted_epoch_has_the_same_order_from_its_first_step(source, ranks):
    def read(implementation):
        set_seed(3)
        epoch = read_steps(build(implementation, shuffled=True))
        set_seed(99)
        source = build(implementation, shuffled=True)
        return describe(epoch), describe(read_steps(source, restore(epoch[1].offset).restart()))

    for expected, actual in ranks.run(read, source):
        assert actual == expected


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] * each.workers) for name, each in SOURCES.items()],
)
@pytest.mark.parametrize(("before", "after"), [(3, 2), pytest.param(2, 3, marks=pytest.mark.full)])
def test_a_state_is_valid_on_another_world_size_or_rejected_with_both(name, clusters, before, after):
    source = SOURCES[name]

    def read(implementation, state):
        set_seed(99 if state else 3)
        source = build(implementation, even=False, shuffled=True)
        try:
            return read_steps(source, state)
        except ValueError as error:
            return str(error)

    steps_by_rank = clusters[before].run(read, source, None)
    epoch = check_steps(steps_by_rank)
    rests = clusters[after].run(read, source, restore(steps_by_rank[0][0].offset))
    if source.presharded:
        assert all(f"saved on {before} processes" in rest and f"on {after}." in rest for rest in rests)
    else:
        assert check_steps(rests) == split_batches(chain.from_iterable(epoch[1:]), SIZE * after)


# Batches ----------------------------------------------------------------------------------


def test_single_samples_are_one_per_step_and_rank(source, ranks):
    def read(implementation):
        return read_steps(build(implementation, batch_size=None))

    steps_by_rank = ranks.run(read, source)
    batches = check_steps(steps_by_rank)
    assert {len(step.samples) for steps in steps_by_rank for step in steps} == {1}
    assert sorted(chain.from_iterable(batches)) == list(range(COUNT))
    assert source.presharded or batches == split_batches(range(COUNT), ranks.size)


def collate_texts(samples):
    """Return a batch of texts and of a tensor that is padded to its longest sample."""
    rows = [torch.full((number % 4 + 1,), number) for number in samples]
    return {
        "text": [f"no {n}" for n in samples],
        "x": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
    }


def test_a_batch_is_what_the_script_collates(source, ranks):
    def read(implementation):
        source, widths = build(implementation, even=False, collate_fn=collate_texts), []

        def to_samples(batch):
            numbers = batch["x"][:, 0].tolist()
            widths.append(batch["x"].shape[1] == max(number % 4 for number in numbers) + 1)
            return list(zip(numbers, batch["text"], strict=True))

        return read_steps(source, to_samples=to_samples), all(widths)

    results = ranks.run(read, source)
    samples = chain.from_iterable(check_steps([steps for steps, _ in results]))
    assert sorted(samples) == [(number, f"no {number}") for number in range(COUNT)]
    assert all(are_padded for _, are_padded in results)


class Broken:
    """Samples of which one cannot be read."""

    def __init__(self, samples, at):
        self.samples, self.at = samples, at

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        if index == self.at:
            raise FileNotFoundError("the shard")
        return self.samples[index]


@pytest.mark.parametrize("at", [0, 5])
def test_a_read_error_of_one_rank_is_raised_on_all_that_wait_for_it(source, at, ranks):
    def read(implementation, reader, at):
        rank = read_epochs.get_backend().topology.rank
        samples = Broken(range(COUNT), at if rank == reader else None)
        with pytest.raises(FileNotFoundError if rank == reader else RuntimeError) as caught:
            read_steps(build(implementation, samples=samples))
        return str(caught.value)

    # Ranks that know the lengths of all do not wait for each other, and those that read one stream do at its first step
    # only: a rank that fails later ends the run. Torch ends workers only seconds after an error.
    waits = source.dispatch or (source.is_stream and (source.presharded or at == 0))
    if ranks.size > 1 and waits and not source.workers:
        reader = 0 if source.dispatch else 1
        texts = ranks.run(read, source, reader, at)
        assert all("the shard" in text or f"rank {reader}" in text for text in texts), texts
