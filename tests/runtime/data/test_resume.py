"""Position: an epoch goes on from anywhere, on any number of processes, with the samples it would have had."""

from __future__ import annotations

import io
import random
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pairs import pairwise_params
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from accel_runtime import Accelerator, DataLoaderConfiguration
from accel_runtime.backends.single import Single
from accel_runtime.data.iteration import ActiveLoops
from accel_runtime.data.loader import LoaderOptions, skip_first_batches
from accel_runtime.data.map_style import EpochOrder
from accel_runtime.data.prepare import prepare_loader
from accel_runtime.data.sharding import BatchSharding
from accel_runtime.topology import Topology

COUNT = 25
PART = 2  # samples a process a step


class Pythons(Sampler):
    """Draws from Python's own generator, one index after the other."""

    def __iter__(self):
        for _ in range(COUNT):
            yield random.randrange(COUNT)

    def __len__(self):
        return COUNT


class Pairs(Sampler):
    """A batch sampler of the script's own, with batches of different lengths in a random order."""

    def __iter__(self):
        batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10], [11, 12], [13]]
        return iter([batches[at] for at in torch.randperm(len(batches)).tolist()])

    def __len__(self):
        return 7


ORDERS = {
    "in order": dict,
    "shuffled": lambda: {"shuffle": True},
    "shuffled by a generator": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
    "workers": lambda: {"shuffle": True, "num_workers": 2},
    "a sampler of Python's": lambda: {"sampler": Pythons()},
    "batches of the script": lambda: {"batch_sampler": Pairs()},
    "one by one": lambda: {"batch_size": None, "shuffle": True},
}
RANKS = [
    pytest.param(1, id="1 process"),
    pytest.param(2, id="2 processes", marks=pytest.mark.full),
    pytest.param(3, id="3 processes"),
]


def made(accelerator, kind):
    options = ORDERS[kind]()
    if not {"batch_size", "batch_sampler"} & set(options):
        options["batch_size"] = PART
    return accelerator.prepare(DataLoader(torch.arange(COUNT)[:, None], **options))


def gathered(accelerator, loader, steps=None):
    """What the next steps give, all samples of the run in one list."""
    seen = []
    for at, batch in enumerate(loader):
        seen.append(accelerator.gather_for_metrics(batch).flatten().tolist())
        if at + 1 == steps:
            break
    return list(chain.from_iterable(seen))


def seeded():
    torch.manual_seed(11)
    random.seed(11)


def interrupted(kind, epoch, steps):
    """The state after some steps of an epoch, and what an uninterrupted run gives from there on."""
    seeded()
    accelerator = Accelerator()
    loader = made(accelerator, kind)
    for _ in range(epoch):
        gathered(accelerator, loader)
    walk = iter(loader)
    for _ in range(steps):
        next(walk)
    state = loader.state_dict()
    kept = io.BytesIO()
    torch.save(state, kept)
    rest = [accelerator.gather_for_metrics(batch).flatten().tolist() for batch in walk]
    following = gathered(accelerator, loader)
    return kept.getvalue(), list(chain.from_iterable(rest)), following


def resumed(kind, kept):
    """What another process gives that loads the state: the rest of the epoch, and the next one."""
    torch.manual_seed(99)  # nothing of it is left but the state
    random.seed(99)
    accelerator = Accelerator()
    loader = made(accelerator, kind)
    loader.load_state_dict(torch.load(io.BytesIO(kept), weights_only=True))
    epoch = loader.epoch
    return gathered(accelerator, loader), gathered(accelerator, loader), (epoch, loader.epoch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "kind", "epoch"),
    pairwise_params({"ranks": RANKS, "kind": list(ORDERS), "epoch": [0, 1]}),
    indirect=["ranks"],
)
def test_what_is_left_of_an_epoch_is_what_an_uninterrupted_run_has(ranks, kind, epoch):
    """Rows B1 and B6, with the samples of a step gathered, so that every rank says the same."""
    (kept, rest, _), *others = ranks.run(interrupted, kind, epoch, 2)
    assert all(other[1] == rest for other in others)
    for again, _, epochs in ranks.run(resumed, kind, kept):
        assert again == rest
        assert epochs == (epoch, epoch + 2)


def test_the_epoch_after_the_resumed_one_goes_on_with_the_loaders_own_generator(ranks):
    (kept, _, following), *_ = ranks.run(interrupted, "shuffled by a generator", 1, 2)
    assert [again for _, again, _ in ranks.run(resumed, "shuffled by a generator", kept)] == [
        following
    ] * ranks.size


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        # Workers take long to start; what they read is the same.
        pytest.param(kind, *sizes, marks=[pytest.mark.full] * (kind == "workers" and sizes[0] != 2))
        for kind in ORDERS
        for sizes in ((1, 2), (2, 3), (3, 2), (2, 1))
    ],
)
def test_a_run_goes_on_with_another_number_of_processes(clusters, kind, before, after):
    """Row B5: the samples not seen yet, in the order of the epoch."""
    kept, rest, _ = clusters[before].run(interrupted, kind, 1, 2)[0]
    for again, _, _ in clusters[after].run(resumed, kind, kept):
        assert again == rest


def test_a_state_is_the_same_on_all_ranks(several):
    states = several.run(interrupted, "shuffled", 1, 2)
    assert len({kept for kept, *_ in states}) == 1


def test_between_two_epochs_the_state_says_the_next_one(ranks):
    def between():
        seeded()
        accelerator = Accelerator()
        loader = made(accelerator, "shuffled by a generator")
        gathered(accelerator, loader)
        state = loader.state_dict()
        wanted = gathered(accelerator, loader)
        other = made(accelerator, "shuffled by a generator")
        other.load_state_dict(state)
        return state["epoch"], state["position"], gathered(accelerator, other) == wanted

    assert ranks.run(between) == [(1, 0, True)] * ranks.size


@pytest.mark.parametrize("position", ["next_batch", "epoch_start", "exact"])
def test_a_state_taken_at_the_last_step_begins_the_next_epoch_or_ends_its_own_exactly(ranks, position):
    def last(position):
        accelerator = Accelerator()
        loader = made(accelerator, "in order")
        for _ in loader:
            state = loader.state_dict()
        loader = made(accelerator, "in order")
        loader.load_state_dict(state, position=position)
        first = loader.epoch, gathered(accelerator, loader)
        return first, (loader.epoch, gathered(accelerator, loader))

    whole = list(range(COUNT))
    expected = ((0, []), (1, whole)) if position == "exact" else ((1, whole), (2, whole))
    assert ranks.run(last, position) == [expected] * ranks.size


def test_another_epoch_number_after_loading_begins_that_epoch_at_its_start(ranks):
    """Scripts count their epochs, and may set one that is not the one the state was taken in."""

    def second(epoch):
        accelerator = Accelerator()
        loader = made(accelerator, "in order")
        for step, _ in enumerate(loader):
            if step == 1:
                state = loader.state_dict()
        loader = made(accelerator, "in order")
        loader.load_state_dict(state)
        loader.set_epoch(epoch)
        return loader.epoch, gathered(accelerator, loader) == list(range(COUNT))

    for epoch, begins_at_its_start in ((0, False), (1, True), (4, True)):
        assert ranks.run(second, epoch) == [(epoch, begins_at_its_start)] * ranks.size


def test_drawing_for_a_resumed_epoch_leaves_the_global_generators_alone(ranks):
    def left(kept):
        accelerator = Accelerator()
        loader = made(accelerator, "a sampler of Python's")
        loader.load_state_dict(torch.load(io.BytesIO(kept), weights_only=True))
        torch.manual_seed(5)
        random.seed(5)
        gathered(accelerator, loader)
        return torch.rand(1).item(), random.random()

    kept = ranks.run(interrupted, "a sampler of Python's", 0, 2)[0][0]
    torch.manual_seed(5)
    random.seed(5)
    wanted = torch.rand(1).item(), random.random()
    assert ranks.run(left, kept) == [wanted] * ranks.size


def test_what_is_no_state_of_a_loader_or_of_another_kind_of_loader_is_refused():
    loader = Accelerator().prepare(DataLoader(range(3)))
    with pytest.raises(ValueError, match="an epoch and kind='Ordered', and it has neither"):
        loader.load_state_dict({"position": 3})
    with pytest.raises(ValueError, match=r"and it has .*'kind': 'Stream'"):
        loader.load_state_dict(loader.state_dict() | {"kind": "Stream"})


# Skipping ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "kind", "skip"),
    pairwise_params({"ranks": RANKS, "kind": list(ORDERS), "skip": [0, 1, 3]}),
    indirect=["ranks"],
)
def test_skipped_batches_are_left_out_and_the_rest_is_exact(ranks, kind, skip):
    """Row B4: what a gather for metrics returns of the last batch too."""

    def both(kind, skip):
        accelerator = Accelerator()
        seeded()
        steps = list(made(accelerator, kind))
        seeded()
        whole = made(accelerator, kind)
        kept = gathered(accelerator, whole, skip) if skip else []
        seeded()
        skipped = skip_first_batches(made(accelerator, kind), skip)
        rest = gathered(accelerator, skipped)
        seeded()
        everything = gathered(accelerator, made(accelerator, kind))
        return kept + rest == everything, len(skipped) == max(len(steps) - skip, 0)

    assert ranks.run(both, kind, skip) == [(True, True)] * ranks.size


def test_an_epoch_walked_from_the_middle_is_an_epoch_of_the_loader_it_came_from(ranks):
    """Row B2: the original loader does not replay it."""

    def epochs(skip):
        accelerator = Accelerator()
        loader = made(accelerator, "shuffled by a generator")
        first = gathered(accelerator, skip_first_batches(loader, 1) if skip else loader)
        return first, gathered(accelerator, loader), loader.epoch

    for (rest, second, epoch), (first, wanted, _) in zip(
        ranks.run(epochs, True), ranks.run(epochs, False), strict=True
    ):
        assert rest == first[PART * ranks.size :]
        assert second == wanted
        assert epoch == 2


def test_a_script_that_loads_a_state_and_skips_as_well_skips_once(ranks):
    def rest(kept):
        accelerator = Accelerator()
        loader = made(accelerator, "shuffled")
        loader.load_state_dict(torch.load(io.BytesIO(kept), weights_only=True))
        return gathered(accelerator, skip_first_batches(loader, 2))

    kept, wanted, *_ = ranks.run(interrupted, "shuffled", 1, 2)[0]
    assert ranks.run(rest, kept) == [wanted] * ranks.size


def test_samples_that_are_skipped_are_not_loaded():
    class Counting(list):
        loaded = 0

        def __getitem__(self, at):
            self.loaded += 1
            return super().__getitem__(at)

    data = Counting(range(1000))
    loader = Accelerator().prepare(DataLoader(data, batch_size=2, shuffle=True))
    assert len(list(skip_first_batches(loader, 499))) == 1
    assert data.loaded == 2


def test_skipping_works_on_a_loader_that_is_prepared_afterwards(ranks):
    def rest():
        accelerator = Accelerator()
        skipped = skip_first_batches(DataLoader(range(COUNT), batch_size=PART), 3)
        assert len(list(skipped)) == len(skipped) == 10
        return gathered(accelerator, accelerator.prepare(skipped))

    assert ranks.run(rest) == [list(range(6, COUNT))] * ranks.size


def test_fewer_than_no_batches_cannot_be_skipped():
    with pytest.raises(ValueError, match="num_batches=-1"):
        skip_first_batches(DataLoader(range(3)), -1)


# The order without its start ---------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 5), st.booleans())
def test_a_permutation_from_the_middle_is_that_of_torch_and_leaves_the_generator_there(count, at, size, own):
    """A change of torch's RandomSampler shows here."""

    def order(position):
        torch.manual_seed(5)
        generator = torch.Generator().manual_seed(6) if own else None
        sampler = RandomSampler(range(count), generator=generator)
        loader = DataLoader(range(count), batch_size=size, sampler=sampler)
        samples = EpochOrder(loader, BatchSharding(0, 1, size), Single(Topology(), torch.device("cpu")))
        drawn = [index for indices, _ in samples.iterate_steps(position, 0, eager=False) for index in indices]
        return drawn, torch.get_rng_state().tolist(), generator.get_state().tolist() if own else None

    whole, *states = order(0)
    assert order(min(at, count)) == (whole[min(at, count) :], *states)
    torch.manual_seed(5)
    torchs = RandomSampler(range(count), generator=torch.Generator().manual_seed(6) if own else None)
    assert whole == list(torchs)


def test_a_seed_of_its_own_draws_every_epoch_anew_and_says_it_from_its_number():
    def epochs(start):
        options = LoaderOptions(seeded=True, seed=7)
        script = DataLoader(range(COUNT), batch_size=5, shuffle=True)
        backend = Single(Topology(), torch.device("cpu"))
        loader = prepare_loader(script, backend, ActiveLoops(0, has_padding=False), options)
        loader.set_epoch(start)
        return [torch.cat(list(loader)).tolist() for _ in range(2)]

    first, second = epochs(0)
    assert epochs(1)[0] == second != first
    seeded = RandomSampler(range(COUNT), generator=torch.Generator().manual_seed(7 + 1))
    assert list(seeded) == second


@pytest.mark.parametrize("seedable", [False, True], ids=["drawn with the epoch", "of all epochs"])
def test_a_resumed_epoch_keeps_the_seed_of_its_order_in_a_process_of_another_seed(ranks, seedable):
    def run(seed, seedable, steps, state=None):
        torch.manual_seed(seed)
        config = DataLoaderConfiguration(use_seedable_sampler=seedable)
        accelerator = Accelerator(dataloader_config=config)
        loader = made(accelerator, "shuffled")
        if state is not None:
            loader.load_state_dict(state)
        seen = gathered(accelerator, loader, steps)
        state = loader.state_dict()
        return seen, state, gathered(accelerator, loader) if steps is None else []

    def continued(seedable):
        uninterrupted, _, following = run(1, seedable, None)
        begun, state, _ = run(1, seedable, 3)
        rest, _, next_epoch = run(2, seedable, None, state)
        # An order that is drawn with its epoch is another one in the next epoch.
        return begun + rest == uninterrupted, next_epoch == following or not seedable, len(rest) > 0

    assert ranks.run(continued, seedable) == [(True, True, True)] * ranks.size


def test_a_sampler_that_is_told_the_epoch_is_told_at_every_walk(ranks):
    class Remembering(SequentialSampler):
        def __init__(self, data):
            super().__init__(data)
            self.epochs = []

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

    def told():
        sampler = Remembering(range(COUNT))
        loader = Accelerator().prepare(DataLoader(range(COUNT), sampler=sampler, batch_size=PART))
        for _ in range(2):
            list(loader)
        next(iter(loader))
        list(loader)
        return sampler.epochs

    assert ranks.run(told) == [[0, 1, 2, 3]] * ranks.size


def test_a_batch_sampler_as_the_sampler_gives_its_lists_to_the_dataset(ranks):
    """`batch_size=None` with a BatchSampler: the dataset is asked for a whole batch."""

    class Whole:
        def __getitem__(self, indices):
            return torch.tensor(indices)

        def __len__(self):
            return COUNT

    def seen():
        accelerator = Accelerator()
        sampler = BatchSampler(SequentialSampler(range(COUNT)), PART, drop_last=False)
        return gathered(
            accelerator, accelerator.prepare(DataLoader(Whole(), sampler=sampler, batch_size=None))
        )

    assert ranks.run(seen) == [list(range(COUNT))] * ranks.size
