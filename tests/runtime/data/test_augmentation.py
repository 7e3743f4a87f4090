"""Random augmentation: a resumed run draws the same numbers as the uninterrupted run."""

from __future__ import annotations

import copy
import random
import warnings

import numpy as np
import pytest
import torch
from support.training.data_sets import MappedDataset, RangeStream, StatefulStream, WorkerSplitStream
from torch.utils.data import DataLoader, Subset, get_worker_info

from accel_runtime import Accelerator

COUNT = 18
PART = 2


def add_noise(at):
    """Return a sample with random numbers of Python, NumPy and torch."""
    noise = [random.random(), np.random.rand(), float(torch.rand(()))]  # noqa: NPY002 - what datasets use
    return torch.tensor([at, *noise], dtype=torch.float64)


class BatchedDataset(MappedDataset):
    """Samples that are fetched in batches."""

    def __getitems__(self, indices):
        shift = random.random()
        return [self[at] + shift for at in indices]


def noisy_collate(samples):
    return torch.stack(samples) + random.random()


def seeded_by_the_worker(worker):
    random.seed(worker)
    assert isinstance(get_worker_info().dataset, MappedDataset)


KINDS = {
    "two": {},
    "shuffled": {"shuffle": True},
    "persistent": {"shuffle": True, "persistent_workers": True},
    "persistent in order": {"persistent_workers": True},
    "own generator": {"shuffle": True, "persistent_workers": True, "own": True},
    "far ahead": {"prefetch_factor": 5},
    "one by one": {"batch_size": None, "shuffle": True},
    "together": {"data": BatchedDataset, "collate_fn": noisy_collate},
    "initialised": {"worker_init_fn": seeded_by_the_worker},
    "dispatched": {"shuffle": True, "dispatch": True, "persistent_workers": True},
    "split by process": {"shuffle": True, "sharded": True, "persistent_workers": True},
    "split by process, without": {"num_workers": 0, "shuffle": True, "sharded": True},
    "a stream": {"data": RangeStream, "collate_fn": noisy_collate},
    "a persistent stream": {"data": RangeStream, "persistent_workers": True},
    "a stream with a state": {"data": StatefulStream, "persistent_workers": True},
    "a stream that divides itself": {"data": WorkerSplitStream, "own": True},
    "a dispatched stream": {"data": StatefulStream, "dispatch": True},
    "a stream with a state, without": {"data": StatefulStream, "num_workers": 0},
    "without": {"num_workers": 0, "shuffle": True},
    "without, in order": {"num_workers": 0},
}


def prepare_noisy_loader(kind, workers=None):
    warnings.filterwarnings("ignore", "This DataLoader will create")
    options = {"num_workers": 2, "batch_size": PART, "data": MappedDataset} | KINDS[kind]
    if workers is not None and options["num_workers"]:
        options["num_workers"] = workers
    dispatch, has_own_generator = options.pop("dispatch", False), options.pop("own", False)
    options |= {"generator": torch.Generator().manual_seed(5)} if has_own_generator else {}
    sharded = options.pop("sharded", False)
    accelerator = Accelerator(dispatch_batches=dispatch)
    data = options.pop("data")(COUNT, add_noise)
    if sharded:
        data = Subset(data, range(COUNT // 2 - 3 * accelerator.process_index))
    loader = DataLoader(data, **options)
    setting = "sharded" if sharded else "global"
    return accelerator, accelerator.prepare_data_loader(loader, data=setting)


def record_step(accelerator, batch):
    """Return the samples of all ranks and random numbers of the training loop."""
    here = [float(torch.rand(())), random.random(), np.random.rand()]  # noqa: NPY002
    return accelerator.gather(batch).flatten().tolist() + here


def capture_generators():
    return torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002


def run_uninterrupted(kind, starts, apart, epochs):
    """Return the saved state at each start (epoch, batch), and the steps of all epochs."""
    accelerator, loader = prepare_noisy_loader(kind)
    for generator in (torch.manual_seed, random.seed, np.random.seed):
        generator(3 + apart * accelerator.process_index)
    saved, steps = {}, []
    for epoch in range(epochs):
        steps.append([])
        if (epoch, 0) in starts:
            saved[epoch, 0] = copy.deepcopy((loader.state_dict(), capture_generators()))
        for step, batch in enumerate(loader, 1):
            steps[-1].append(record_step(accelerator, batch))
            if (epoch, step) in starts:
                saved[epoch, step] = copy.deepcopy((loader.state_dict(), capture_generators()))
    return saved, steps


def run_resumed(kind, saved, workers, epochs):
    """Return the steps of all epochs of a run that loads what was saved."""
    accelerator, loader = prepare_noisy_loader(kind, workers)
    for generator in (torch.manual_seed, random.seed, np.random.seed):
        generator(99)
    state, (torchs, pythons, numpys) = saved[accelerator.process_index]
    loader.load_state_dict(state, random_restored=True)
    torch.set_rng_state(torchs)
    random.setstate(pythons)
    np.random.set_state(numpys)  # noqa: NPY002
    return [[record_step(accelerator, batch) for batch in loader] for _ in range(epochs)]


def require_equal_resumes(pair, kind, *starts, epochs, workers=None, apart=0):
    """Compare an uninterrupted run of so many epochs with three epochs of the runs that resume it at each start."""
    results = pair.run(run_uninterrupted, kind, starts, apart, epochs)
    for epoch, after in starts:
        saved = [saved[epoch, after] for saved, _ in results]
        resumed = pair.run(run_resumed, kind, saved, workers, 3)
        assert resumed == [[steps[epoch][after:], *steps[epoch + 1 : epoch + 3]] for _, steps in results]


SIBLINGS = ["two", "shuffled", "persistent", "persistent in order", "far ahead", "initialised", "a stream"]
SIBLINGS += ["a persistent stream", "split by process", "without"]
"""Kinds whose options are those of other kinds, or of a test below; `make test-full` resumes them."""
FROM_ANY_BATCH = ["one by one", "dispatched", "a stream with a state", "without"]
"""Kinds that `make test-slow` resumes from the first batch and from the last one; `make test-full` resumes all."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.full] * (kind in SIBLINGS)) for kind in KINDS]
)
def test_a_resumed_run_draws_what_the_uninterrupted_run_draws(pair, kind):
    """In the dataset, in collate_fn and in the loop; in the resumed epoch and in the next two."""
    require_equal_resumes(pair, kind, (1, 2), epochs=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.full] * (kind not in FROM_ANY_BATCH)) for kind in KINDS]
)
@pytest.mark.parametrize(
    "starts", [[(0, 0), (2, -1)], pytest.param([(0, 3), (2, 0)], marks=pytest.mark.full)], ids=str
)
def test_a_resume_from_any_batch_of_any_epoch_draws_the_same_numbers(pair, kind, starts):
    """-1 is the position before the last batch."""
    steps = COUNT // (1 if kind == "one by one" else PART) // 2
    require_equal_resumes(pair, kind, *((epoch, after % steps) for epoch, after in starts), epochs=5)


@pytest.mark.parametrize(
    "kind",
    [
        "shuffled",
        pytest.param("persistent", marks=pytest.mark.slow),
        pytest.param("together", marks=pytest.mark.slow),
        "dispatched",
    ],
)
def test_a_resume_with_another_number_of_workers_draws_the_same_numbers(pair, kind):
    require_equal_resumes(pair, kind, (1, 2), epochs=4, workers=1)


@pytest.mark.parametrize(
    ("kind", "after"),
    [
        ("two", 2),
        ("persistent", 0),
        ("split by process", 2),
        ("without", 0),
        ("without", 2),
        *(
            pytest.param(kind, after, marks=pytest.mark.full)
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
def test_a_resume_with_rank_specific_generators_draws_the_same_numbers(pair, kind, after):
    """Each rank loads its own state, since states differ between two epochs."""
    require_equal_resumes(pair, kind, (1, after), epochs=4, apart=1)


def test_two_ranks_draw_the_same_numbers_for_a_batch_as_one(alone, pair):
    """A run that resumes on another world size has the same samples, too."""

    def batches(start):
        accelerator, loader = prepare_noisy_loader("shuffled")
        torch.manual_seed(3)
        if start:
            loader.load_state_dict(start)
        batches_seen = []
        for batch in loader:
            batches_seen += accelerator.gather_for_metrics(batch).tolist()
            if not start and len(batches_seen) == 2 * 2 * PART:
                start = loader.state_dict()
        return batches_seen, start

    expected, saved = alone.run(batches, None)[0]
    assert pair.run(batches, None)[0][0] == expected
    assert pair.run(batches, saved)[0][0] == expected[2 * 2 * PART :]


def test_an_epoch_saved_before_its_start_draws_from_the_restored_generator(ranks):
    def order(restored):
        _, loader = prepare_noisy_loader("without")
        torch.manual_seed(1)
        state, there = loader.state_dict(), torch.get_rng_state()
        torch.rand(3)  # what a script does before its next epoch
        expected = [batch[:, 0].tolist() for batch in loader]
        _, loader = prepare_noisy_loader("without")
        torch.manual_seed(2)
        loader.load_state_dict(state, random_restored=restored)
        if restored:
            torch.set_rng_state(there)
            torch.rand(3)
        return [batch[:, 0].tolist() for batch in loader] == expected

    assert ranks.run(order, True) == [True] * ranks.size
    assert ranks.run(order, False) == [False] * ranks.size


def test_load_state_dict_rejects_a_state_of_another_world_size_or_number_of_workers(clusters):
    def state(kind):
        _, loader = prepare_noisy_loader(kind)
        iterator = iter(loader)
        next(iterator)
        return loader.state_dict()

    def refusal(kind, saved, workers):
        _, loader = prepare_noisy_loader(kind, workers)
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
