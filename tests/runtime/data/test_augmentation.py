"""Random numbers a dataset draws: a resumed run goes on with those the uninterrupted run has."""

from __future__ import annotations

import copy
import random
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, get_worker_info

from accel_runtime import Accelerator

COUNT = 18
PART = 2


class Noisy:
    """Samples with random numbers from everywhere in them."""

    def __len__(self):
        return COUNT

    def __getitem__(self, at):
        noise = [random.random(), np.random.rand(), float(torch.rand(()))]  # noqa: NPY002 - what datasets use
        return torch.tensor([at, *noise], dtype=torch.float64)


class Together(Noisy):
    """The same, fetched a batch at a time."""

    def __getitems__(self, indices):
        shift = random.random()
        return [self[at] + shift for at in indices]


class Flow(IterableDataset):
    """The same as a stream."""

    def __iter__(self):
        return (Noisy()[at] for at in range(COUNT))


class Stateful(Flow):
    """A stream that says where it stands."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < COUNT:
            self.at += 1
            yield Noisy()[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Divided(Flow):
    """A stream that splits itself among its workers."""

    def __iter__(self):
        info = get_worker_info()
        return (Noisy()[at] for at in range(info.id, COUNT, info.num_workers))


def noisy_collate(samples):
    return torch.stack(samples) + random.random()


def seeded_by_the_worker(worker):
    random.seed(worker)
    assert isinstance(get_worker_info().dataset, Noisy)


KINDS = {
    "two": {},
    "shuffled": {"shuffle": True},
    "persistent": {"shuffle": True, "persistent_workers": True},
    "persistent in order": {"persistent_workers": True},
    "own generator": {"shuffle": True, "persistent_workers": True, "own": True},
    "far ahead": {"prefetch_factor": 5},
    "one by one": {"batch_size": None, "shuffle": True},
    "together": {"data": Together},
    "initialised": {"worker_init_fn": seeded_by_the_worker},
    "collated": {"collate_fn": noisy_collate},
    "dispatched": {"shuffle": True, "dispatch": True, "persistent_workers": True},
    "split by process": {"shuffle": True, "sharded": True, "persistent_workers": True},
    "split by process, without": {"num_workers": 0, "shuffle": True, "sharded": True},
    "a stream": {"data": Flow, "collate_fn": noisy_collate},
    "a persistent stream": {"data": Flow, "persistent_workers": True},
    "a stream with a state": {"data": Stateful, "persistent_workers": True},
    "a stream that divides itself": {"data": Divided, "own": True},
    "a dispatched stream": {"data": Stateful, "dispatch": True},
    "a stream with a state, without": {"data": Stateful, "num_workers": 0},
    "without": {"num_workers": 0, "shuffle": True},
    "without, in order": {"num_workers": 0},
}


def made(kind, workers=None):
    warnings.filterwarnings("ignore", "This DataLoader will create")
    options = {"num_workers": 2, "batch_size": PART, "data": Noisy} | KINDS[kind]
    if workers is not None and options["num_workers"]:
        options["num_workers"] = workers
    dispatch, own = options.pop("dispatch", False), options.pop("own", False)
    options |= {"generator": torch.Generator().manual_seed(5)} if own else {}
    sharded = options.pop("sharded", False)
    accelerator = Accelerator(dispatch_batches=dispatch)
    data = options.pop("data")()
    if sharded:
        data = Subset(data, range(COUNT // 2 - 3 * accelerator.process_index))
    loader = DataLoader(data, **options)
    how = "sharded" if sharded else "global"
    return accelerator, accelerator.prepare_data_loader(loader, data=how)


def step(accelerator, batch):
    """What a training step sees and draws: all ranks' samples, and the loop's own random numbers."""
    here = [float(torch.rand(())), random.random(), np.random.rand()]  # noqa: NPY002
    return accelerator.gather(batch).flatten().tolist() + here


def states():
    return torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002


def uninterrupted(kind, starts, apart, epochs):
    """Return by start, an epoch and a number of its batches, what is saved there and the steps of all epochs."""
    accelerator, loader = made(kind)
    for generator in (torch.manual_seed, random.seed, np.random.seed):
        generator(3 + apart * accelerator.process_index)
    saved, steps = {}, []
    for epoch in range(epochs):
        steps.append([])
        if (epoch, 0) in starts:
            saved[epoch, 0] = copy.deepcopy((loader.state_dict(), states()))
        for done, batch in enumerate(loader, 1):
            steps[-1].append(step(accelerator, batch))
            if (epoch, done) in starts:
                saved[epoch, done] = copy.deepcopy((loader.state_dict(), states()))
    return saved, steps


def resumed(kind, saved, workers, epochs):
    """Return the steps of all epochs of a run that loads what was saved."""
    accelerator, loader = made(kind, workers)
    for generator in (torch.manual_seed, random.seed, np.random.seed):
        generator(99)
    state, (torchs, pythons, numpys) = saved[accelerator.process_index]
    loader.load_state_dict(state, random_restored=True)
    torch.set_rng_state(torchs)
    random.setstate(pythons)
    np.random.set_state(numpys)  # noqa: NPY002
    return [[step(accelerator, batch) for batch in loader] for _ in range(epochs)]


def check(pair, kind, *starts, epochs, workers=None, apart=0):
    """Compare an uninterrupted run of so many epochs with three epochs of the runs that resume it at each start."""
    results = pair.run(uninterrupted, kind, starts, apart, epochs)
    for epoch, after in starts:
        saved = [saved[epoch, after] for saved, _ in results]
        again = pair.run(resumed, kind, saved, workers, 3)
        assert again == [[steps[epoch][after:], *steps[epoch + 1 : epoch + 3]] for _, steps in results]


SIBLINGS = ["two", "shuffled", "persistent", "persistent in order", "far ahead", "initialised", "a stream"]
SIBLINGS += ["a persistent stream"]
"""Kinds whose options are those of other kinds; `make test-slow` resumes them from other batches."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.full] * (kind in SIBLINGS)) for kind in KINDS]
)
def test_a_resumed_run_draws_what_the_uninterrupted_run_draws(pair, kind):
    """In the dataset, in collate_fn and in the loop, in the epoch it goes on with and in the next two."""
    check(pair, kind, (1, 2), epochs=4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "starts", [[(0, 0), (2, -1)], pytest.param([(0, 3), (2, 0)], marks=pytest.mark.full)], ids=str
)
def test_it_does_so_from_any_batch_of_any_epoch(pair, kind, starts):
    """Minus one is before the last batch."""
    steps = COUNT // (1 if kind == "one by one" else PART) // 2
    check(pair, kind, *((epoch, after % steps) for epoch, after in starts), epochs=5)


@pytest.mark.parametrize(
    "kind",
    [
        "shuffled",
        pytest.param("persistent", marks=pytest.mark.slow),
        pytest.param("together", marks=pytest.mark.slow),
        "dispatched",
    ],
)
def test_the_number_of_workers_does_not_matter(pair, kind):
    check(pair, kind, (1, 2), epochs=4, workers=1)


@pytest.mark.parametrize(
    ("kind", "after"),
    [
        ("two", 2),
        ("persistent", 0),
        ("split by process", 2),
        ("without", 0),
        ("without", 2),
        *(
            pytest.param(kind, after, marks=pytest.mark.slow)
            for kind, after in [
                ("two", 0),
                ("shuffled", 0),
                ("shuffled", 2),
                ("persistent", 2),
                ("dispatched", 0),
                ("dispatched", 2),
                ("split by process", 0),
            ]
        ),
    ],
)
def test_it_does_so_where_every_rank_draws_numbers_of_its_own(pair, kind, after):
    """Each loads its own state: they are not the same between two epochs."""
    check(pair, kind, (1, after), epochs=4, apart=1)


def test_two_processes_draw_for_a_batch_what_one_draws(alone, pair):
    """Also a run that goes on with another number of processes has the samples it would have had."""

    def batches(start):
        accelerator, loader = made("shuffled")
        torch.manual_seed(3)
        if start:
            loader.load_state_dict(start)
        seen = []
        for batch in loader:
            seen += accelerator.gather_for_metrics(batch).tolist()
            if not start and len(seen) == 2 * 2 * PART:
                start = loader.state_dict()
        return seen, start

    whole, saved = alone.run(batches, None)[0]
    assert pair.run(batches, None)[0][0] == whole
    assert pair.run(batches, saved)[0][0] == whole[2 * 2 * PART :]


def test_an_epoch_that_had_not_begun_draws_from_what_is_put_back_as_it_is_then(ranks):
    def order(restored):
        _, loader = made("without")
        torch.manual_seed(1)
        state, there = loader.state_dict(), torch.get_rng_state()
        torch.rand(3)  # what a script does before its next epoch
        wanted = [batch[:, 0].tolist() for batch in loader]
        _, loader = made("without")
        torch.manual_seed(2)
        loader.load_state_dict(state, random_restored=restored)
        if restored:
            torch.set_rng_state(there)
            torch.rand(3)
        return [batch[:, 0].tolist() for batch in loader] == wanted

    assert ranks.run(order, True) == [True] * ranks.size
    assert ranks.run(order, False) == [False] * ranks.size


def test_a_position_that_holds_for_other_processes_or_workers_only_is_refused_when_it_is_loaded(clusters):
    def state(kind):
        _, loader = made(kind)
        next(iter(loader))
        return loader.state_dict()

    def refusal(kind, saved, workers):
        _, loader = made(kind, workers)
        with pytest.raises(ValueError) as refused:
            loader.load_state_dict(saved)
        return str(refused.value)

    saved = clusters[2].run(state, "split by process, without")[0]
    for size in (1, 3):
        text = clusters[size].run(refusal, "split by process, without", saved, None)[0]
        assert f'saved on 2 processes with data="sharded" and cannot be resumed on {size}' in text
    saved = clusters[1].run(state, "a stream that divides itself")[0]
    text = clusters[1].run(refusal, "a stream that divides itself", saved, 1)[0]
    assert "Resume with num_workers=2" in text
