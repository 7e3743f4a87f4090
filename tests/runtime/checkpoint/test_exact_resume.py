"""A resumed run is bitwise equal to the uninterrupted run."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys

import cloudpickle
import pytest
import torch
from support.processes.waits import limit
from support.runs.recorded_runs import (
    COUNT,
    Script,
    assert_resumes_are_exact,
    point,
    resume_training,
    start_training,
    train_and_save,
    train_batch,
    train_to_end,
)
from support.training.data_sets import MappedDataset, RandomOrderSampler, RangeStream, StatefulStream
from torch.utils.data import BatchSampler, DataLoader

from accel_runtime import Accelerator, DataLoaderConfiguration


class UnevenBatches(BatchSampler):
    """A batch sampler of the script with batches of different sizes."""

    def __init__(self):
        self.batches = [[0, 1, 2], [3, 4], [5, 6, 7], [8], [9, 10, 11], [12, 13]]

    def __iter__(self):
        yield from (self.batches[at] for at in torch.randperm(len(self.batches)).tolist())

    def __len__(self):
        return len(self.batches)


def build_loader_options(**options):
    return {"loader": lambda data: DataLoader(data, **({"batch_size": 2} | options))}


def build_loader_config(**options):
    return {"options": lambda: {"dataloader_config": DataLoaderConfiguration(**options)}}


LOADERS = {
    "in order": build_loader_options,
    "shuffled": dict,
    "a generator": lambda: {
        "loader": lambda data: DataLoader(
            data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(torch.initial_seed())
        )
    },
    "drop_last": lambda: build_loader_options(batch_size=4, drop_last=True, shuffle=True),
    "a sampler": lambda: build_loader_options(sampler=RandomOrderSampler(COUNT, lazy=True)),
    "a batch sampler": lambda: {"loader": lambda data: DataLoader(data, batch_sampler=UnevenBatches())},
    "seedable": lambda: build_loader_config(use_seedable_sampler=True),
    "seedable with a seed": lambda: build_loader_config(use_seedable_sampler=True, data_seed=4),
    "split": lambda: (
        build_loader_config(split_batches=True) | build_loader_options(batch_size=6, shuffle=True)
    ),
    "uneven": lambda: build_loader_config(even_batches=False),
    "dispatched": lambda: build_loader_config(dispatch_batches=True),
    "workers": lambda: build_loader_options(shuffle=True, num_workers=2),
    "persistent workers": lambda: build_loader_options(shuffle=True, num_workers=1, persistent_workers=True),
    "a stream": lambda: {"dataset": lambda: RangeStream(COUNT, point)} | build_loader_options(),
    "a stream dispatched": lambda: (
        {"dataset": lambda: RangeStream(COUNT, point)}
        | build_loader_options()
        | build_loader_config(dispatch_batches=True)
    ),
    "a stream with state": lambda: {"dataset": lambda: StatefulStream(COUNT, point)} | build_loader_options(),
    "a stream with state and a worker": lambda: (
        {"dataset": lambda: StatefulStream(COUNT, point)} | build_loader_options(num_workers=1)
    ),
}


METHODS = ("skip_first_batches", "continue")
"""How scripts skip the batches they have trained on after `load_state`."""


def augment(index):
    number, inputs, targets = point(index)
    return number, inputs + torch.rand(()) + random.random(), targets


def build_augmented_data():
    """Return points with random augmentation."""
    return MappedDataset(COUNT, augment)


LOADERS["augmented"] = lambda: {"dataset": build_augmented_data}
ON_THREE = ("shuffled", "uneven", "dispatched", "workers", "a stream with state", "a stream dispatched")
"""Loaders that `make test-slow` runs on three ranks, and others on one; `make test-full` runs all on one to three."""


@pytest.mark.parametrize(
    ("kind", "size", "methods"),
    [
        pytest.param(
            kind,
            size,
            methods,
            marks=pytest.mark.slow if (size, methods) == first else pytest.mark.full,
            id=f"{kind}-{size}-{methods[0]}",
        )
        for kind in LOADERS
        for first in [(3 if kind in ON_THREE else 1, ("resume",))]
        for size, methods in itertools.product((1, 2, 3), (("resume",), METHODS))
    ],
)
def test_a_resume_continues_with_every_kind_of_loader(clusters, kind, size, methods, tmp_path):
    assert_resumes_are_exact(clusters[size], Script(**LOADERS[kind]()), tmp_path, (1, 4), methods)


# Scripts that skip by themselves ---------------------------------------------------------


def test_scripts_that_skip_batches_after_load_state_continue_from_every_step(alone, tmp_path):
    """The samples are augmented at random, also those that are loaded again and skipped."""
    assert_resumes_are_exact(alone, Script(dataset=build_augmented_data), tmp_path, methods=METHODS)


@pytest.mark.full
def test_scripts_that_skip_batches_continue_on_two_ranks(clusters, tmp_path):
    """Saved at the first batch, in the middle of an accumulation cycle, at the last batch of an epoch and after it."""
    assert_resumes_are_exact(clusters[2], build_accumulating_script(), tmp_path, (1, 4, 6), METHODS)


def load_state_and_continue(script, folder, name):
    run = start_training(script, 77)
    run.accelerator.load_state(f"{folder}/{name}")
    return train_to_end(script, run)


def test_a_stateful_loader_continues_by_itself_after_load_state(ranks, tmp_path):
    script = Script(**build_loader_config(use_stateful_dataloader=True))
    before = ranks.run(train_and_save, script, str(tmp_path), [3])
    after = ranks.run(load_state_and_continue, script, str(tmp_path), "3")
    assert after == [(rows[3:], end) for rows, end, _ in before]


# Any order of calls -----------------------------------------------------------------------


def build_accumulating_script():
    """Return a script whose fourth step ends within an accumulation cycle."""
    return Script(options=lambda: {"gradient_accumulation_steps": 3})


def train_step(run):
    train_batch(run, next(iter(run.loader)))


def accumulate_gradients(run):
    """Run two micro-batches of an accumulation cycle and keep the gradients."""
    for _ in range(2):
        train_step(run)
    assert run.model.weight.grad.any()


def resume_before(folder):
    return lambda run: run.accelerator.resume(folder)


BEFORE = {
    "a first step": lambda _: train_step,
    "gradients": lambda _: accumulate_gradients,
    "having been loaded": resume_before,
    "a walk under way": lambda _: lambda run: [None for _ in zip(range(3), run.loader, strict=False)],
    "an epoch": lambda _: lambda run: [train_batch(run, batch) for batch in run.loader],
}


@pytest.fixture(scope="module")
def runs():
    """The runs that several tests resume, which no test changes."""
    return []


@pytest.fixture
def trained(runs, tmp_path_factory):
    """Return the batches and the end of a run with accumulation, and the folder with its checkpoint `4`."""
    if not runs:
        folder = tmp_path_factory.mktemp("accumulating")
        rows, end, _ = train_and_save(build_accumulating_script(), folder, [4])
        runs.append((rows, end, folder))
    return runs[0]


@pytest.mark.parametrize("earlier", BEFORE)
def test_a_resume_replaces_any_earlier_state(alone, earlier, trained):
    rows, end, folder = trained
    assert resume_training(build_accumulating_script(), folder, "4", BEFORE[earlier](folder / "4")) == (
        rows[4:],
        end,
    )


def test_a_loaded_state_can_be_saved_immediately(alone, trained, tmp_path):
    rows, end, folder = trained
    run = start_training(build_accumulating_script(), 77)
    run.accelerator.resume(folder / "4")
    run.accelerator.save_state(tmp_path / "again")
    assert train_to_end(build_accumulating_script(), run) == (rows[4:], end)
    assert resume_training(build_accumulating_script(), tmp_path, "again") == (rows[4:], end)


def test_saving_does_not_change_the_results_of_a_run(ranks, tmp_path):
    """A run without saves has the same results as a run that saves at several steps."""
    saved = ranks.run(train_and_save, build_accumulating_script(), str(tmp_path), [2, 3, 4])
    assert [result[:2] for result in saved] == [
        result[:2] for result in ranks.run(train_and_save, build_accumulating_script(), str(tmp_path), [])
    ]


@pytest.mark.full
def test_a_new_process_continues_from_a_checkpoint(alone, tmp_path):
    rows, end, _ = train_and_save(build_accumulating_script(), tmp_path, [4])
    call = tmp_path / "call"
    call.write_bytes(cloudpickle.dumps((resume_training, build_accumulating_script(), str(tmp_path), "4")))
    text = "import cloudpickle, sys; f, *a = cloudpickle.load(open(sys.argv[1], 'rb')); print(repr(f(*a)))"
    process = subprocess.run(
        [sys.executable, "-c", text, str(call)],
        capture_output=True,
        text=True,
        timeout=limit(240),
        check=True,
    )
    assert process.stdout.strip() == repr((rows[4:], end))


def test_a_garbage_collected_loader_is_not_required_by_a_checkpoint(alone, tmp_path):
    def build_iterator(*, keep):
        accelerator = Accelerator()
        first, second = accelerator.prepare(DataLoader(range(4)), DataLoader(range(6), shuffle=True))
        iterator = iter(second)
        return accelerator, second, iterator, first if keep else None

    accelerator, _, iterator, _ = build_iterator(keep=False)
    next(iterator)
    accelerator.save_state(tmp_path / "saved")
    remaining = [int(batch) for batch in iterator]
    for keep in (False, True):
        resumed, loader, *_ = build_iterator(keep=keep)
        resumed.resume(tmp_path / "saved")
        assert [int(batch) for batch in loader] == remaining
