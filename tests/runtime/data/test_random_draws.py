"""On one process, prepared loaders draw the random numbers of the unprepared ones, and at the same moments."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.data_sets import (
    MappedDataset,
    PythonShuffledSampler,
    RandomOrderSampler,
    ShuffledStream,
    VariableBatchSampler,
    WorkerSplitStream,
)
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

from accel_runtime import Accelerator, set_seed

# A loader of these tests may have more workers than this machine has cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

COUNT = 6


class LateShuffledStream(ShuffledStream):
    """A stream that shuffles when its first sample is requested."""

    def __iter__(self):
        yield from super().__iter__()


def add_noise(index):
    return index + random.random() + np.random.rand() + float(torch.rand(()))  # noqa: NPY002 - what datasets use


def generator():
    return torch.Generator().manual_seed(3)


LOADERS = {
    "in order": dict,
    "shuffled": lambda: {"shuffle": True},
    "incomplete batches": lambda: {"shuffle": True, "batch_size": 4},
    "incomplete batches dropped": lambda: {"shuffle": True, "batch_size": 4, "drop_last": True},
    "own generator": lambda: {"shuffle": True, "generator": generator()},
    "own generator, incomplete batches": lambda: {
        "shuffle": True,
        "batch_size": 4,
        "generator": generator(),
    },
    "own generator, in order": lambda: {"generator": generator()},
    "replacement": lambda: {
        "sampler": RandomSampler(range(COUNT), replacement=True, num_samples=70, generator=generator()),
        "batch_size": 8,
    },
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0] * COUNT, COUNT)},
    "sampler": lambda: {"sampler": PythonShuffledSampler(COUNT)},
    "lazy sampler": lambda: {"sampler": RandomOrderSampler(COUNT, lazy=True)},
    "single samples": lambda: {"sampler": RandomOrderSampler(COUNT), "batch_size": None},
    "batch sampler": lambda: {
        "batch_sampler": VariableBatchSampler([[0, 1, 2], [3], [4, 5]], shuffle=True),
        "batch_size": 1,
    },
    "batch sampler of torch": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(range(COUNT)), 2, drop_last=False),
        "batch_size": 1,
    },
    "stream": lambda: {"dataset": WorkerSplitStream(COUNT)},
    "stream with own generator": lambda: {"dataset": WorkerSplitStream(COUNT), "generator": generator()},
}
"""Options of loaders, by kind."""
NOISY = {
    "noisy": lambda: {"dataset": MappedDataset(COUNT, add_noise), "shuffle": True},
    "shuffled stream": lambda: {"dataset": ShuffledStream(COUNT)},
    "late shuffled stream": lambda: {"dataset": LateShuffledStream(COUNT)},
}
"""Those whose datasets draw random numbers, which are others in workers."""
EVENTS = st.one_of(
    st.tuples(st.just("iter"), st.integers(0, 2)),
    st.tuples(st.just("next"), st.integers(0, 3)),
    st.tuples(st.just("drop"), st.integers(0, 3)),
    st.just(("draw", 0)),
)
ZIP = [("iter", 0), ("iter", 1), *[("next", 0), ("next", 1)] * 3, ("next", 0), ("drop", 0), ("drop", 0)] * 2


def build_loader(kind, workers):
    options = {"dataset": range(COUNT), "batch_size": 2, "num_workers": workers} | (LOADERS | NOISY)[kind]()
    return DataLoader(**options)


def capture_states(loaders):
    _, words, offset, *gauss = np.random.get_state()  # noqa: NPY002
    own = [loader.generator.get_state().tolist() for loader in loaders if loader.generator is not None]
    return torch.get_rng_state().tolist(), random.getstate(), (words.tolist(), offset, gauss), own


def run(events, kinds, workers, prepare):
    """Return the batch, or the number, and the states of all generators after each event."""
    set_seed(0)
    loaders = [prepare(build_loader(kind, workers)) for kind in kinds]
    iterators, results = [], []
    for event, number in events:
        result = None
        if event == "draw":
            result = torch.rand(()).item(), random.random(), np.random.rand()  # noqa: NPY002
        elif event == "iter":
            iterators.append(iter(loaders[number % len(loaders)]))
        elif iterators and event == "drop":
            del iterators[number % len(iterators)]
        elif iterators:
            batch = next(iterators[number % len(iterators)], None)
            result = batch if batch is None or isinstance(batch, int) else batch.tolist()
        results.append((event, result, capture_states(loaders)))
    return results


def check(events, kinds, workers=0):
    accelerator = Accelerator()
    prepared, unprepared = (
        run(events, kinds, workers, prepare) for prepare in (accelerator.prepare, lambda loader: loader)
    )
    for number, (actual, expected) in enumerate(zip(prepared, unprepared, strict=True)):
        assert actual[:2] == expected[:2], f"batch of event {number}"
        assert actual[2] == expected[2], f"states after event {number}, {expected[0]}"


@pytest.mark.parametrize("kind", [*LOADERS, *NOISY])
def test_zipped_loaders_draw_what_the_unprepared_ones_draw(kind):
    check(ZIP, [kind, kind])


@settings(max_examples=60)
@given(st.lists(EVENTS, max_size=25), st.lists(st.sampled_from([*LOADERS, *NOISY]), min_size=1, max_size=3))
@example([("iter", 0), ("draw", 0), ("iter", 0), ("next", 1), ("next", 0)], ["shuffled"])
def test_any_use_of_iterators_draws_what_it_draws_from_unprepared_loaders(events, kinds):
    check(events, kinds)


@pytest.mark.parametrize("kind", ["shuffled", "own generator", "single samples", "batch sampler", "stream"])
def test_zipped_loaders_with_workers_draw_what_the_unprepared_ones_draw(kind):
    check(ZIP, [kind, "shuffled"], workers=2)


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(EVENTS, max_size=15), st.lists(st.sampled_from([*LOADERS]), min_size=1, max_size=2))
def test_any_use_of_iterators_with_workers_draws_what_it_draws_from_unprepared_loaders(events, kinds):
    check(events, kinds, workers=2)


def test_zipped_loaders_have_one_order_on_any_number_of_ranks(ranks):
    def read():
        set_seed(0)
        accelerator = Accelerator(split_batches=True)
        loaders = accelerator.prepare(*(DataLoader(range(12), batch_size=6, shuffle=True) for _ in range(2)))
        batches = [batch for pair in zip(*loaders, strict=True) for batch in pair]
        return [accelerator.gather(batch).tolist() for batch in batches], torch.rand(()).item()

    set_seed(0)
    loaders = [DataLoader(range(12), batch_size=6, shuffle=True) for _ in range(2)]
    batches = [batch.tolist() for pair in zip(*loaders, strict=True) for batch in pair]
    expected = batches, torch.rand(()).item()
    assert ranks.run(read) == [expected] * ranks.size


def test_one_rank_creates_an_iterator_alone(pair):
    def read():
        accelerator = Accelerator()
        shuffled, in_order = accelerator.prepare(
            DataLoader(range(8), shuffle=True), DataLoader(range(8), batch_size=2)
        )
        if accelerator.is_main_process:
            iter(shuffled)
            assert next(iter(in_order)).tolist() == [0, 1]
        return sorted(accelerator.gather(torch.cat(list(shuffled))).tolist())

    assert pair.run(read) == [list(range(8))] * 2


@pytest.mark.parametrize(
    ("kind", "workers"),
    [*((kind, 0) for kind in (*LOADERS, *NOISY)), ("shuffled", 2), ("own generator", 2), ("stream", 2)],
)
def test_a_save_before_the_first_batch_continues_with_the_numbers_that_are_drawn(kind, workers, tmp_path):
    def start(seed):
        set_seed(seed)
        accelerator = Accelerator()
        return accelerator, accelerator.prepare(build_loader(kind, workers))

    def read(loader, iterator):
        epochs = [[torch.as_tensor(batch).tolist() for batch in batches] for batches in (iterator, loader)]
        return epochs, loader.epoch, capture_states([loader])

    accelerator, loader = start(0)
    iterator = iter(loader)
    torch.rand(())
    accelerator.save_state(tmp_path / "saved")
    expected = read(loader, iterator)
    accelerator, loader = start(1)
    accelerator.resume(tmp_path / "saved")
    assert read(loader, iter(loader)) == expected
