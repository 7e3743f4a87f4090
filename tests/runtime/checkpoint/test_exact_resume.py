"""A run that is saved and loaded is the run that was not interrupted, bit for bit."""

from __future__ import annotations

import random
import subprocess
import sys

import cloudpickle
import pytest
import torch
from recorded_runs import COUNT, Script, begun, continues, learn, point, resumed, uninterrupted, walked
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from accel_runtime import Accelerator, DataLoaderConfiguration


class Backwards(Sampler):
    """A sampler of the script's own that draws, too."""

    def __iter__(self):
        yield from reversed(torch.randperm(COUNT).tolist())

    def __len__(self):
        return COUNT


class Uneven(BatchSampler):
    """Batches of the script's own."""

    def __init__(self):
        self.batches = [[0, 1, 2], [3, 4], [5, 6, 7], [8], [9, 10, 11], [12, 13]]

    def __iter__(self):
        yield from (self.batches[at] for at in torch.randperm(len(self.batches)).tolist())

    def __len__(self):
        return len(self.batches)


class Stream(IterableDataset):
    """So many points in order."""

    def __iter__(self):
        return (point(index) for index in range(COUNT))


class Stateful(IterableDataset):
    """A stream that says where it stands."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < COUNT:
            self.at += 1
            yield point(self.at - 1)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def with_loader(**options):
    return {"loader": lambda data: DataLoader(data, **({"batch_size": 2} | options))}


def configured(**options):
    return {"options": lambda: {"dataloader_config": DataLoaderConfiguration(**options)}}


LOADERS = {
    "in order": with_loader,
    "shuffled": dict,
    "a generator": lambda: {
        "loader": lambda data: DataLoader(
            data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(torch.initial_seed())
        )
    },
    "drop_last": lambda: with_loader(batch_size=4, drop_last=True, shuffle=True),
    "a sampler": lambda: with_loader(sampler=Backwards()),
    "a batch sampler": lambda: {"loader": lambda data: DataLoader(data, batch_sampler=Uneven())},
    "seedable": lambda: configured(use_seedable_sampler=True),
    "seedable with a seed": lambda: configured(use_seedable_sampler=True, data_seed=4),
    "split": lambda: configured(split_batches=True) | with_loader(batch_size=6, shuffle=True),
    "uneven": lambda: configured(even_batches=False),
    "dispatched": lambda: configured(dispatch_batches=True),
    "workers": lambda: with_loader(shuffle=True, num_workers=2),
    "persistent workers": lambda: with_loader(shuffle=True, num_workers=1, persistent_workers=True),
    "a stream": lambda: {"dataset": Stream} | with_loader(),
    "a stream dispatched": lambda: {"dataset": Stream} | with_loader() | configured(dispatch_batches=True),
    "a stream with state": lambda: {"dataset": Stateful} | with_loader(),
    "a stream with state and a worker": lambda: {"dataset": Stateful} | with_loader(num_workers=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOADERS)
def test_data_continue(alone, kind, tmp_path):
    continues(alone, Script(**LOADERS[kind]()), tmp_path, None if kind == "shuffled" else (1, 4))


ON_THREE = ("shuffled", "uneven", "dispatched", "workers", "a stream with state", "a stream dispatched")
"""Loaders of which `make test-slow` has three processes; `make test-full` has all, on two and on three."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in ON_THREE else pytest.mark.full) for kind in LOADERS]
)
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.full), 3])
def test_data_continue_on_several_processes(clusters, size, kind, tmp_path):
    continues(clusters[size], Script(**LOADERS[kind]()), tmp_path, (1, 4))


# Scripts that skip by themselves ---------------------------------------------------------

WAYS = ("skip_first_batches", "continue")
"""How scripts skip the batches they have trained on after `load_state`."""


class Noisy(torch.utils.data.Dataset):
    """Points that are changed at random when they are read."""

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        number, inputs, targets = point(index)
        return number, inputs + torch.rand(()) + random.random(), targets


SKIPPING = LOADERS | {"augmented": lambda: {"dataset": Noisy}}


def test_scripts_that_skip_batches_after_load_state_continue_from_every_step(alone, tmp_path):
    """The samples are augmented at random, also those that are loaded again for nothing."""
    continues(alone, Script(dataset=Noisy), tmp_path, ways=WAYS)


def test_scripts_that_skip_batches_continue_on_two_processes(clusters, tmp_path):
    """Saved at the first batch, in the middle of an accumulation cycle, at the last batch of an epoch and after it."""
    continues(clusters[2], half_way(), tmp_path, (1, 4, 6), WAYS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SKIPPING)
def test_scripts_that_skip_batches_continue_with_every_kind_of_loader(alone, kind, tmp_path):
    script = Script(**SKIPPING[kind]())
    last = len(begun(script, 5).loader) if "stream" not in kind else COUNT // 2
    continues(alone, script, tmp_path, (1, 4, last), WAYS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in ON_THREE else pytest.mark.full) for kind in SKIPPING]
)
def test_scripts_that_skip_batches_continue_on_three_processes(clusters, kind, tmp_path):
    continues(clusters[3], Script(**SKIPPING[kind]()), tmp_path, (1, 3, 4), WAYS)


def load_state_and_continue(script, folder, name):
    run = begun(script, 77)
    run.accelerator.load_state(f"{folder}/{name}")
    return walked(script, run)


def test_a_stateful_loader_continues_by_itself_after_load_state(ranks, tmp_path):
    script = Script(**configured(use_stateful_dataloader=True))
    before = ranks.run(uninterrupted, script, str(tmp_path), [3])
    after = ranks.run(load_state_and_continue, script, str(tmp_path), "3")
    assert after == [(rows[3:], end) for rows, end, _ in before]


@pytest.mark.parametrize("way", ["resume", *WAYS])
def test_every_way_continues_the_same_batches_on_another_number_of_processes(clusters, alone, way, tmp_path):
    # Global batches are the same on every number of processes.
    script = Script(**configured(split_batches=True), **with_loader(batch_size=6, shuffle=True))

    def batches(number, folder):
        run = begun(script, 77)
        per_epoch = len(run.loader)
        if way == "resume":
            run.accelerator.resume(f"{folder}/{number}")
            return [run.accelerator.gather_for_metrics(batch[0]).tolist() for batch in run.loader]
        run.accelerator.load_state(f"{folder}/{number}")
        done = number % per_epoch
        loader = run.accelerator.skip_first_batches(run.loader, done) if way == WAYS[0] else run.loader
        seen = [run.accelerator.gather_for_metrics(batch[0]).tolist() for batch in loader]
        return seen if way == WAYS[0] else seen[done:]

    rows, _, _ = uninterrupted(script, str(tmp_path), [1, 3])
    per_epoch = len(rows) // 3
    for number in (1, 3):
        expected = [row[1] for row in rows[number : number - number % per_epoch + per_epoch]]
        assert clusters[2].run(batches, number, str(tmp_path)) == [expected] * 2


# In whatever order ------------------------------------------------------------------------


def half_way():
    """A run that is saved with gradients held, at its fourth step."""
    return Script(options=lambda: {"gradient_accumulation_steps": 3})


def a_step(run):
    learn(run, next(iter(run.loader)))


def with_gradients(run):
    """Two passes of a window, left open."""
    for _ in range(2):
        a_step(run)
    assert run.model.weight.grad.any()


def twice(folder):
    return lambda run: run.accelerator.resume(folder)


BEFORE = {
    "a first step": lambda _: a_step,
    "gradients": lambda _: with_gradients,
    "having been loaded": twice,
    "a walk under way": lambda _: lambda run: [None for _ in zip(range(3), run.loader, strict=False)],
    "an epoch": lambda _: lambda run: [learn(run, batch) for batch in run.loader],
}


@pytest.mark.parametrize("what", BEFORE)
def test_loading_after(alone, what, tmp_path):
    rows, end, _ = uninterrupted(half_way(), tmp_path, [4])
    assert resumed(half_way(), tmp_path, "4", BEFORE[what](tmp_path / "4")) == (rows[4:], end)


def test_what_was_loaded_can_be_saved_at_once(alone, tmp_path):
    rows, end, _ = uninterrupted(half_way(), tmp_path, [4])
    run = begun(half_way(), 77)
    run.accelerator.resume(tmp_path / "4")
    run.accelerator.save_state(tmp_path / "again")
    assert walked(half_way(), run) == (rows[4:], end)
    assert resumed(half_way(), tmp_path, "again") == (rows[4:], end)


def test_saving_changes_nothing(ranks, tmp_path):
    """The run that is never saved sees what the run sees that is saved at every step."""
    saved = ranks.run(uninterrupted, half_way(), str(tmp_path), [2, 3, 4])
    assert [one[:2] for one in saved] == [
        one[:2] for one in ranks.run(uninterrupted, half_way(), str(tmp_path), [])
    ]


@pytest.mark.slow
def test_a_fresh_process_continues(alone, tmp_path):
    rows, end, _ = uninterrupted(half_way(), tmp_path, [4])
    call = tmp_path / "call"
    call.write_bytes(cloudpickle.dumps((resumed, half_way(), str(tmp_path), "4")))
    text = "import cloudpickle, sys; f, *a = cloudpickle.load(open(sys.argv[1], 'rb')); print(repr(f(*a)))"
    done = subprocess.run(
        [sys.executable, "-c", text, str(call)], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.strip() == repr((rows[4:], end))


def test_a_loader_that_is_let_go_is_not_missed(alone, tmp_path):
    def run(*, keep):
        accelerator = Accelerator()
        first, second = accelerator.prepare(DataLoader(range(4)), DataLoader(range(6), shuffle=True))
        walk = iter(second)
        return accelerator, second, walk, first if keep else None

    accelerator, _, walk, _ = run(keep=False)
    next(walk)
    accelerator.save_state(tmp_path / "saved")
    rest = [int(batch) for batch in walk]
    for keep in (False, True):
        again, loader, *_ = run(keep=keep)
        again.resume(tmp_path / "saved")
        assert [int(batch) for batch in loader] == rest
