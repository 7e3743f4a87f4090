"""A resumed stream has the samples of the uninterrupted run, also if the state of its dataset is not exact."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from support.cases.pairs import pairwise_params
from support.training.data_sets import (
    RangeStream,
    ShardedStream,
    WorkerSplitStatefulStream,
    WorkerSplitStream,
    split_range,
)
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel_runtime import Accelerator

EPOCHS = 3

# Runs -----------------------------------------------------------------------------------------


def start_reading(build, options, seed):
    warnings.filterwarnings("ignore", "This DataLoader will create")
    torch.manual_seed(seed)
    random.seed(seed)
    accelerator = Accelerator()
    return accelerator, accelerator.prepare(DataLoader(build(), **({"batch_size": 2} | options)))


def read_epoch(accelerator, loader, after=lambda _: None):
    """Return the batches of an epoch, gathered over all ranks; call `after(step)` after each, from 1."""
    batches = []
    for step, batch in enumerate(loader, 1):
        values = torch.as_tensor(batch["id"]) if isinstance(batch, dict) else batch
        batches.append(accelerator.gather_for_metrics(values).tolist())
        after(step)
    return batches


def read_and_save(build, options, saves, folder):
    """Return the epochs of a run that saves at some `(epoch, step)`."""
    accelerator, loader = start_reading(build, options, 1)
    epochs = []
    for epoch in range(EPOCHS):

        def save(step, epoch=epoch):
            if (epoch, step) in saves:
                accelerator.save_state(f"{folder}/{epoch}-{step}")

        epochs.append(read_epoch(accelerator, loader, save))
    return epochs


def resume_and_read(build, options, save, folder):
    """Return the rest of the epoch of a save, and the epochs after it."""
    accelerator, loader = start_reading(build, options, 2)
    accelerator.resume(f"{folder}/{save[0]}-{save[1]}")
    return [read_epoch(accelerator, loader) for _ in range(save[0], EPOCHS)]


SAVES = ((0, 1), (1, 3), (1, 12), (1, 24))
"""The epochs and steps after which a run saves."""


def check_resumes(ranks, build, options, folder, saves=SAVES):
    """Interrupt a run at each save, and compare what follows with the uninterrupted run."""
    uninterrupted = ranks.run(read_and_save, build, options, saves, str(folder))
    expected = uninterrupted[0]
    assert all(epochs == expected for epochs in uninterrupted)
    for epoch, step in saves:
        if step > len(expected[epoch]):
            continue
        following = [expected[epoch][step:], *expected[epoch + 1 :]]
        for resumed in ranks.run(resume_and_read, build, options, (epoch, step), str(folder)):
            assert resumed == following, f"saved at step {step} of epoch {epoch}"


# Workers --------------------------------------------------------------------------------------

SPLIT = {
    "in __iter__": (lambda: WorkerSplitStream(90), None),
    "with a state": (lambda: WorkerSplitStatefulStream(90), None),
    "by shards": (lambda: ShardedStream(90, shards=5), None),
    "by worker_init_fn": (lambda: RangeStream(90), split_range),
}
KINDS_OF_SPLIT = [
    pytest.param(kind, marks=[pytest.mark.slow] * (kind != "in __iter__"), id=kind) for kind in SPLIT
]


READINGS = [
    pytest.param((True, 2), id="persistent-2"),
    pytest.param((False, 3), id="new-3"),
    pytest.param((True, 3), id="persistent-3", marks=pytest.mark.full),
    pytest.param((False, 2), id="new-2", marks=pytest.mark.full),
]
"""Whether workers persist, and their number."""


@pytest.mark.parametrize(("reading", "kind"), pairwise_params({"reading": READINGS, "kind": KINDS_OF_SPLIT}))
def test_all_epochs_after_a_resume_within_an_epoch_are_in_the_order_of_the_uninterrupted_run(
    alone, reading, kind, tmp_path
):
    (persistent, workers), (build, init) = reading, SPLIT[kind]
    options = {"num_workers": workers, "persistent_workers": persistent, "worker_init_fn": init}
    check_resumes(alone, build, options, tmp_path, saves=((0, 1), (1, 3), (1, 31)))


# Hugging Face `datasets` ------------------------------------------------------------------------


def generate(shards):
    for shard in shards:
        for number in range(30 + shard % 2):
            yield {"id": 100 * shard + number}


def from_generator(shards):
    import datasets

    return datasets.IterableDataset.from_generator(generate, gen_kwargs={"shards": list(range(shards))})


def from_dataset(shards):
    import datasets

    return datasets.Dataset.from_dict({"id": list(range(110))}).to_iterable_dataset(num_shards=shards)


def interleave(shards):
    import datasets

    others = datasets.Dataset.from_dict({"id": list(range(1000, 1080))}).to_iterable_dataset(
        num_shards=shards
    )
    return datasets.interleave_datasets([from_generator(shards), others])


def concatenate(shards):
    import datasets

    return datasets.concatenate_datasets([from_generator(shards), from_dataset(shards)])


HF = {
    "generator": from_generator,
    "dataset": from_dataset,
    "shuffle": lambda shards: from_generator(shards).shuffle(seed=3, buffer_size=4),
    "shuffle of a dataset": lambda shards: from_dataset(shards).shuffle(seed=3, buffer_size=20),
    "map": lambda shards: from_generator(shards).map(lambda row: {"id": row["id"] * 2}),
    "map of batches": lambda shards: from_generator(shards).map(
        lambda rows: {"id": [number * 2 for number in rows["id"]]}, batched=True, batch_size=3
    ),
    "filter": lambda shards: from_generator(shards).filter(lambda row: row["id"] % 3),
    "map and shuffle": lambda shards: (
        from_generator(shards).map(lambda row: {"id": row["id"] + 1}).shuffle(seed=3, buffer_size=4)
    ),
    "shuffle and map": lambda shards: (
        from_generator(shards).shuffle(seed=3, buffer_size=4).map(lambda row: {"id": row["id"] + 1})
    ),
    "interleave": interleave,
    "concatenate": concatenate,
    "batch": lambda shards: from_generator(shards).batch(2, drop_last_batch=True),
    "take": lambda shards: from_generator(shards).take(50),
    "skip": lambda shards: from_generator(shards).skip(3),
    "shuffle and take": lambda shards: from_generator(shards).shuffle(seed=3, buffer_size=4).take(50),
    "repeat": lambda shards: from_generator(shards).repeat(2),
}

HF_CASES = [
    (kind, size, workers, shards)
    for kind in HF
    for size in (1, 2)
    for workers, shards in ((0, 1), (0, 3), (1, 3), (2, 1), (2, 3), (2, 4), (3, 2), (3, 5))
]
HF_PARTS = {
    "dataset",
    "map",
    "shuffle",
    "generator",
    "shuffle and map",
    "shuffle and take",
    "skip",
    "concatenate",
}
"""Kinds whose operations are in those of others, or that read like them; `make test-full` resumes them."""
HF_SLOW = {
    case
    for number, case in enumerate(HF_CASES)
    if number % 16 == 5 * (number // 16) % 16 and case[0] not in HF_PARTS
}
"""Each of the other kinds once, with another size, and number of workers and shards."""
HF_SAVES = (SAVES[::2], SAVES[1::2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size", "workers", "shards", "saves"),
    [
        pytest.param(
            *case,
            saves,
            marks=[pytest.mark.full] * (case not in HF_SLOW or number // 32 % 2 != half),
            id=f"{case[0]}, {case[1]} processes, {case[2]} workers, {case[3]} shards, saves {half}",
        )
        for number, case in enumerate(HF_CASES)
        for half, saves in enumerate(HF_SAVES)
    ],
)
def test_a_stream_of_datasets_loses_and_repeats_no_sample(  # noqa: PLR0913, PLR0917
    clusters, kind, size, workers, shards, saves, tmp_path
):
    pytest.importorskip("datasets")
    options = {"num_workers": workers}
    if kind == "batch":
        options["batch_size"] = None
    check_resumes(clusters[size], _HuggingFace(kind, shards), options, tmp_path, saves)


class _HuggingFace:
    """Builds a stream; the functions of `HF` are pickled with this module."""

    def __init__(self, kind, shards):
        self.kind, self.shards = kind, shards

    def __call__(self):
        return HF[self.kind](self.shards)


# States that are not exact ----------------------------------------------------------------------


class NumberStream(IterableDataset):
    """A stream of numbers in an order that depends on the epoch; its state is the number of samples that it has read.

    Each iteration begins at the first sample, except for the first one after `load_state_dict`.
    """

    count, size_of_shard = 90, 50

    def __init__(self):
        self.epoch = self.start = self.offset = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def list_numbers(self):
        numbers = [(17 * self.epoch + number) % self.count for number in range(self.count)]
        info = get_worker_info()
        return numbers if info is None else numbers[info.id :: info.num_workers]

    def __iter__(self):
        numbers = self.list_numbers()
        self.offset, self.start = self.start, 0
        while self.offset < len(numbers):
            self.offset += 1
            yield numbers[self.offset - 1]

    def state_dict(self):
        return {"at": self.offset}

    def load_state_dict(self, state):
        self.start = self.offset = state["at"]


class ExactStream(NumberStream):
    """A stream with an exact state."""


class SharesItsState(NumberStream):
    """`state_dict` returns an object that changes with the next sample."""

    def __init__(self):
        super().__init__()
        self.state = {"at": 0}

    def __iter__(self):
        for number in super().__iter__():
            self.state["at"] = self.offset
            yield number

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state
        super().load_state_dict(state)


class LeavesOutItsBuffer(NumberStream):
    """A shuffled stream whose state lacks the samples in its buffer."""

    def __iter__(self):
        generator, buffer = random.Random(self.epoch), []
        for number in super().__iter__():
            buffer.append(number)
            if len(buffer) > 4:
                yield buffer.pop(generator.randrange(len(buffer)))
        generator.shuffle(buffer)
        yield from buffer


class CountsAhead(NumberStream):
    """A stream that reads three samples ahead, and counts them in its state."""

    def __iter__(self):
        ahead = []
        for number in super().__iter__():
            ahead.append(number)
            if len(ahead) > 3:
                yield ahead.pop(0)
        yield from ahead


class CountsAfterwards(NumberStream):
    """A stream that counts a sample when the next one is read."""

    def __iter__(self):
        numbers = self.list_numbers()
        self.offset, self.start = self.start, 0
        while self.offset < len(numbers):
            yield numbers[self.offset]
            self.offset += 1


class RaisesOnLoad(NumberStream):
    """A stream that cannot load its state."""

    def load_state_dict(self, state):
        if state["at"]:
            raise IndexError("list index out of range")


class RaisesWhenRead(NumberStream):
    """A stream that fails when it is read after a state was loaded."""

    def __iter__(self):
        if self.start:
            self.start = 0
            raise IndexError("list index out of range")
        return super().__iter__()


class RaisesOnSave(NumberStream):
    """A stream that has no state while it is read."""

    def state_dict(self):
        if self.offset:
            raise NotImplementedError("no state within a shard")
        return {"at": 0}


class KnowsShardsOnly(NumberStream):
    """A stream whose state is the start of the current shard."""

    def state_dict(self):
        return {"at": self.offset // self.size_of_shard * self.size_of_shard}


class ForgetsItsEpoch(NumberStream):
    """A stream that loads its state for the first epoch."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.epoch = 0


class IgnoresItsState(NumberStream):
    """A stream that begins at its first sample after a state was loaded."""

    def load_state_dict(self, state):
        pass


class HasAnEmptyState(NumberStream):
    """A stream with an empty state."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class KeepsItsState(NumberStream):
    """A stream of which every iteration begins at the state that was loaded last, as in `datasets`."""

    def __iter__(self):
        start = self.start
        yield from super().__iter__()
        self.start = start


class RepeatsAndLoses(NumberStream):
    """A stream that continues with the right number of samples, but others after the next one."""

    def __iter__(self):
        started = self.start
        numbers = list(super().__iter__())
        if started:
            numbers[1:] = reversed(numbers[1:])
        for number in numbers:
            self.offset = started = started + 1
            yield number


class ForgetsARareSource(NumberStream):
    """A stream of two sources, of which the state has the position of one; every 25th sample is of the other."""

    def __iter__(self):
        rare = 1000
        for number in super().__iter__():
            if self.offset % 25 == 0:
                rare += 1
                yield rare
            else:
                yield number


EXACT = [ExactStream, SharesItsState, KeepsItsState]
INEXACT = [
    LeavesOutItsBuffer,
    CountsAhead,
    CountsAfterwards,
    RaisesOnLoad,
    RaisesWhenRead,
    RaisesOnSave,
    KnowsShardsOnly,
    ForgetsItsEpoch,
    IgnoresItsState,
    HasAnEmptyState,
    RepeatsAndLoses,
]
NEAR = pytest.mark.xfail(strict=True, reason="only the samples next to a state are compared")
RARE = pytest.param(ForgetsARareSource, 1, 0, marks=NEAR)


@pytest.mark.parametrize(
    ("make", "size", "workers"),
    [
        pytest.param(
            make,
            size,
            workers,
            marks=[]
            if (size, workers) == (1, 0)
            else pytest.mark.slow
            if number % 10 == (3 * size + workers) % 5
            else pytest.mark.full,
        )
        for number, make in enumerate(EXACT + INEXACT)
        for size in (1, 2)
        for workers in (0, 1, 2)
    ]
    + [RARE],
)
def test_a_stream_has_the_samples_of_the_uninterrupted_run_if_its_state_is_exact_or_not(
    clusters, make, size, workers, tmp_path
):
    check_resumes(clusters[size], make, {"num_workers": workers}, tmp_path)


@pytest.mark.parametrize("make", EXACT + INEXACT)
def test_a_resume_warns_once_of_a_state_that_is_not_used(make, tmp_path, caplog, recwarn):
    read_and_save(make, {}, {(1, 24)}, tmp_path)
    caplog.clear()
    recwarn.clear()
    resume_and_read(make, {}, (1, 24), tmp_path)
    texts = [record.getMessage() for record in caplog.records] + [str(w.message) for w in recwarn]
    assert len([text for text in texts if make.__name__ in text]) == (make in INEXACT)
