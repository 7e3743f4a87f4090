"""Accumulation cycles in loops over zipped, repeated and filtered loaders, and loaders that are read ahead."""

from __future__ import annotations

import itertools
from collections import deque

import pytest
import torch
from support.log_messages import collect_messages
from torch import nn
from torch.utils.data import DataLoader

from accel_runtime import Accelerator, GradientAccumulationPlugin


class Cycles:
    """A model that trains with accumulation; `ends` has a digit for each micro-batch, 1 if it completes a cycle."""

    def __init__(self, steps=2, **fields):
        self.accelerator = Accelerator(
            gradient_accumulation_plugin=GradientAccumulationPlugin(steps, **fields)
        )
        self.models = [self.accelerator.prepare(nn.Linear(1, 1, bias=False)) for _ in range(2)]
        self.ends = ""

    def prepare_loader(self, num_batches, size=1):
        """Return a loader of this number of batches on each rank."""
        rows = num_batches * size * self.accelerator.num_processes
        return self.accelerator.prepare(DataLoader(torch.ones(rows, 1), batch_size=size))

    def train(self, *batches, model=0):
        """Run one micro-batch."""
        with self.accelerator.accumulate(self.models[model]):
            self.accelerator.backward(sum(self.models[model](batch).sum() for batch in batches))
        self.ends += str(int(self.accelerator.sync_gradients))


def endless(loader):
    """Repeat a loader."""
    while True:
        yield from loader


def endless_with_epochs(loader):
    """Repeat a loader, with a statement between its epochs."""
    epoch = 0
    while True:
        for batch in loader:  # noqa: UP028 - as scripts write it
            yield batch
        epoch += 1
        loader.set_epoch(epoch)


def passed_through(loader):
    """Yield each batch at once, as a progress bar does."""
    number = 0
    for batch in loader:
        yield batch
        number += 1  # noqa: SIM113 - as progress bars count


def repeated(loader, times):
    """Repeat a loader a number of times."""
    for _ in range(times):
        yield from loader


def read_ahead(loader, count=1):
    """Yield the batches of a loader `count` batches late."""
    pending = deque()
    for batch in loader:
        pending.append(batch)
        if len(pending) > count:
            yield pending.popleft()
    yield from pending


class Endless:
    """Iterator that repeats a loader."""

    def __init__(self, loader):
        self.loader = loader
        self.iterator = iter(loader)

    def __iter__(self):
        return self

    def __next__(self):
        try:
            return next(self.iterator)
        except StopIteration:
            self.iterator = iter(self.loader)
            return next(self.iterator)


class Moved:
    """Iterable whose iterator passes each batch on."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        self.iterator = iter(self.loader)
        return self

    def __next__(self):
        return next(self.iterator)


def paired(first, second):
    """Yield pairs from a loader and one that is repeated."""
    iterator = iter(second)
    for batch in first:
        try:
            other = next(iterator)
        except StopIteration:
            iterator = iter(second)
            other = next(iterator)
        yield batch, other


def train_on(batches, cycles, *, epochs=2, limit=None):
    """Train on every item of what `batches()` returns."""
    for _ in range(epochs):
        for number, item in enumerate(batches()):
            if number == limit:
                break
            cycles.train(*(item if isinstance(item, (tuple, list)) else [item]))
        cycles.ends += " "


ITERABLES = {
    # Two epochs: 5 and 3 batches, and cycles of 2.
    "a loader": (lambda a, _: a, "01011 01011"),
    "a generator between": (lambda a, _: passed_through(a), "01011 01011"),
    "enumerate": (lambda a, _: (batch for _, batch in enumerate(a)), "01011 01011"),
    "loaders of equal length": (lambda a, _: zip(a, passed_through(a), strict=False), "01011 01011"),
    "the second is shorter": (lambda a, b: zip(a, b, strict=False), "011 011"),
    "the first is shorter": (lambda a, b: zip(b, a, strict=False), "011 011"),
    "each in a generator, the second shorter": (lambda a, b: zip(passed_through(a), passed_through(b), strict=False), "011 011"),
    "each in a generator, the first shorter": (lambda a, b: zip(passed_through(b), passed_through(a), strict=False), "011 011"),
    "each in an iterator, the second shorter": (lambda a, b: zip(Moved(a), Moved(b), strict=False), "011 011"),
    "zip in a generator": (lambda a, b: passed_through(zip(b, a, strict=False)), "011 011"),
    "one in a generator": (lambda a, b: zip(a, passed_through(b), strict=False), "011 011"),
}  # fmt: skip


def collect_ends(batches, lengths=(5, 3), steps=2, **options):
    """Return the ends of cycles in two epochs over `batches(*loaders)`, and the error that ended them."""
    cycles = Cycles(steps)
    loaders = [cycles.prepare_loader(length) for length in lengths]
    error = ""
    try:
        train_on(lambda: batches(*loaders), cycles, **options)
    except ValueError as raised:
        error = str(raised)
    return cycles.ends.strip(), "sync_with_dataloader=False" in error


@pytest.mark.parametrize("name", ITERABLES)
def test_the_end_of_the_training_loop_ends_the_cycle(alone, name):
    batches, expected = ITERABLES[name]
    assert alone.run(collect_ends, batches) == [(expected, False)]


REFUSED = {
    "the second repeats": (lambda a, b: zip(a, endless(b), strict=False), "011"),
    "the first repeats": (lambda a, b: zip(endless(b), a, strict=False), "011"),
    "one repeats with epochs": (lambda a, b: zip(a, endless_with_epochs(b), strict=False), "011"),
    "one repeats in a generator": (lambda a, b: zip(a, passed_through(endless(b)), strict=False), "011"),
    "one repeats, in generators": (lambda a, b: passed_through(zip(passed_through(a), endless(b), strict=False)), "011"),
    "pairs": (paired, "011"),
    "itertools.cycle": (lambda a, b: zip(a, itertools.cycle(b)), "011"),
    "zip_longest": (lambda a, b: ((x, y) for x, y in itertools.zip_longest(a, b) if True), "011"),
    "an iterator repeats": (lambda a, b: zip(a, Endless(b), strict=False), "011"),
    "a generator repeats for a while": (lambda a, b: zip(a, repeated(b, 4), strict=False), "011"),
    "both repeat": (lambda a, b: zip(endless(a), endless(b), strict=False), "011"),
}  # fmt: skip
"""Loops in which a loader ends before the loop does, which is found at the micro-batch after it."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_loop_that_goes_on_after_the_end_of_a_loader_is_rejected(alone, name):
    batches, expected = REFUSED[name]

    def without_missing(*loaders):
        return ([b for b in item if b is not None] for item in batches(*loaders))

    assert alone.run(collect_ends, without_missing) == [(expected, True)]


@pytest.mark.parametrize(
    ("lengths", "expected"), [((5, 2), "01011 01011"), ((6, 2), "010101 010101"), ((4, 4), "0101 0101")]
)
@pytest.mark.parametrize("name", ["the second repeats", "the first repeats", "pairs"])
def test_a_loader_that_is_repeated_is_accepted_if_its_end_completes_the_cycle(alone, name, lengths, expected):
    assert alone.run(collect_ends, REFUSED[name][0], lengths) == [(expected, False)]


@pytest.mark.parametrize(
    ("length", "count", "expected"),
    [
        (6, 2, ("010101 010101", False)),
        (6, 1, ("01011", True)),
        (5, 2, ("011", True)),
        (5, 1, ("01010 1011", True)),  # the first epoch leaves a cycle incomplete, with a warning
    ],
)
def test_reading_ahead_is_rejected_if_the_last_batch_ends_a_cycle_early(alone, length, count, expected):
    assert alone.run(collect_ends, lambda a, _: read_ahead(a, count), (length, 1)) == [expected]


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_is_rejected_with_one_micro_batch_a_cycle(alone, name):
    def without_missing(*loaders):
        return ([b for b in item if b is not None] for item in REFUSED[name][0](*loaders))

    ends, is_rejected = alone.run(lambda: collect_ends(without_missing, limit=9, steps=1))[0]
    assert not is_rejected
    assert set(ends) == {"1", " "}


def test_the_same_loops_are_decided_in_the_same_way_on_several_processes(pair):
    def collect_all():
        return (
            collect_ends(ITERABLES["the first is shorter"][0]),
            collect_ends(REFUSED["the second repeats"][0]),
        )

    assert pair.run(collect_all) == [(("011 011", False), ("011", True))] * 2


def run_alone(alone, script, steps=2, lengths=(5, 3)):
    """Return the ends of cycles of `script(cycles, *loaders)`, and the warnings."""

    def run():
        cycles = Cycles(steps)
        loaders = [cycles.prepare_loader(length) for length in lengths]
        with collect_messages("accel_runtime.training.gradients") as logged:
            script(cycles, *loaders)
        return cycles.ends.strip(), logged

    return alone.run(run)[0]


def read_beside(cycles, labeled, others):
    """The other loader is read in the body of the loop, and begun again at its end."""
    iterator = iter(others)
    for _ in range(2):
        for batch in passed_through(labeled):
            try:
                other = next(iterator)
            except StopIteration:
                iterator = iter(others)
                other = next(iterator)
            cycles.train(batch, other)
        cycles.ends += " "


def evaluate(loader):
    """Read a whole loader."""
    return list(loader)


def evaluate_within(cycles, loader, others):
    """An evaluation before and after a micro-batch, and one that is left and kept."""
    for _ in range(2):
        kept = []
        for batch in loader:
            evaluate(others)
            cycles.train(batch)
            evaluate(others)
            kept.append(iter(others))
            next(kept[-1])
        cycles.ends += " "


def evaluate_in_parts(cycles, loader, _):
    """An evaluation that goes on with a batch at every second micro-batch, over all epochs, and is not at its end."""
    parts = iter(cycles.prepare_loader(99))
    next(parts)
    for _ in range(2):
        for number, batch in enumerate(loader):
            if number % 2 == 0:
                next(parts)
            cycles.train(batch)
        cycles.ends += " "


def nest(cycles, tasks, loader):
    """The loader is read once for each batch of another one."""
    for _ in tasks:
        for batch in loader:
            cycles.train(batch)
        cycles.ends += " "


def step_through(cycles, loader, _):
    """The loader is read by `next`."""
    for _ in range(2):
        iterator = iter(loader)
        for _ in range(5):
            cycles.train(next(iterator))
        cycles.ends += " "


def hold_a_stream(cycles, loader, others):
    """A stream is read beside each epoch of another loader."""
    stream = iter(loader)
    for _ in range(1):
        for batches in zip(others, stream, strict=False):
            cycles.train(*batches)
        cycles.ends += " "
    held = endless(loader)
    for _ in range(2):
        for batches in zip(others, held, strict=False):
            cycles.train(*batches)
        cycles.ends += " "


def repeat_alone(cycles, loader, _):
    """One loader that is repeated: each of its epochs ends a cycle."""
    for number, batch in enumerate(endless(loader)):
        if number == 10:
            break
        cycles.train(batch)
        if number % 5 == 4:
            cycles.ends += " "


def train_on_own_data(cycles, loader, _):
    """Micro-batches that are not from a loader, after a loop and without one."""
    for _ in range(2):
        for batch in loader:
            cycles.train(batch)
        cycles.train(torch.ones(1, 1))
        cycles.train(torch.ones(1, 1))
        cycles.ends += " "


def train_two_models(cycles, loader, _):
    """One `accumulate` for each model of a GAN."""
    for _ in range(2):
        for batch in loader:
            cycles.train(batch)
            cycles.train(batch, model=1)
        cycles.ends += " "


def filter_batches(cycles, loader, _):
    """Batches that are not used, other than the last."""
    for _ in range(2):
        for number, batch in enumerate(passed_through(loader)):
            if number != 1:
                cycles.train(batch)
        cycles.ends += " "


def divide_batches(cycles, loader, _):
    """Three micro-batches of each batch."""
    for _ in range(2):
        for batch in loader:
            for _ in range(3):
                cycles.train(batch)
        cycles.ends += " "


def combine_batches(cycles, loader, _):
    """Two batches in each micro-batch, and the last alone, after the loader has ended."""
    for _ in range(2):
        iterator = iter(loader)
        for batch in iterator:
            other = next(iterator, None)
            cycles.train(*([batch] if other is None else [batch, other]))
        cycles.ends += " "


def repeat_divided(cycles, loader, _):
    """A loader that is repeated, and several micro-batches of each batch, as in reinforcement learning."""
    batches = endless(loader)
    for _ in range(2):
        for _ in range(5):
            batch = next(batches)
            for _ in range(4):
                cycles.train(batch)
        cycles.ends += " "


def read_within_iterator(cycles, loader, _):
    """An object that reads one batch ahead."""

    class Prefetcher:
        def __init__(self):
            self.iterator = iter(loader)
            self.following = next(self.iterator)

        def next(self):
            current, self.following = self.following, next(self.iterator, None)
            return current

    for _ in range(2):
        prefetcher = Prefetcher()
        while (batch := prefetcher.next()) is not None:
            cycles.train(batch)
        cycles.ends += " "


def alternate(cycles, first, second):
    """Two loaders that are read in turn."""
    for _ in range(2):
        iterators = iter(first), iter(second)
        for _ in range(3):
            for iterator in iterators:
                cycles.train(next(iterator))
        cycles.ends += " "


SCRIPTS = {
    evaluate_within: "01011 01011",
    evaluate_in_parts: "01011 01011",
    nest: "011 011 011 011 011",
    step_through: "01011 01011",
    repeat_alone: "01011 01011",
    train_on_own_data: "0101101 0101101",
    train_two_models: "0101010111 0101010111",
    filter_batches: "0101 0101",
    divide_batches: "010101010101011 010101010101011",
    repeat_divided: "01010101010101010101 01010101010101010101",
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_cycle_ends_with_the_loop_that_accumulate_stands_in(alone, script):
    ends, logged = run_alone(alone, script)
    assert ends == SCRIPTS[script]
    assert not [message for message in logged if "continues an accumulation cycle" in message]


def test_loaders_that_are_read_in_turn_end_the_cycle_with_the_later_one(alone):
    assert run_alone(alone, alternate, 4, (3, 3))[0] == "000101 000101"


@pytest.mark.parametrize(
    ("script", "expected"),
    [(read_beside, "011"), (hold_a_stream, "011 011"), (read_within_iterator, "01010 1011")],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_script_that_reads_beyond_the_end_of_a_loader_is_rejected(alone, script, expected):
    def run():
        cycles = Cycles()
        with pytest.raises(ValueError, match="sync_with_dataloader=False"):
            script(cycles, cycles.prepare_loader(5), cycles.prepare_loader(3))
        return cycles.ends.strip()

    assert alone.run(run) == [expected]


def test_batches_that_are_divided_unevenly_are_rejected(alone):
    def divide(cycles, loader, _):
        loader = cycles.accelerator.prepare(DataLoader(torch.ones(7, 1), batch_size=4))
        for batch in loader:
            for part in batch.split(2):
                cycles.train(part)

    with pytest.raises(ValueError, match="sync_with_dataloader=False"):
        run_alone(alone, divide, 4)


def test_a_micro_batch_that_is_tried_again_ends_the_cycle(alone):
    def retry(cycles, loader, _):
        for number, batch in enumerate(loader):
            if number in {3, 4}:
                with pytest.raises(RuntimeError), cycles.accelerator.accumulate(cycles.models[0]):
                    raise RuntimeError("no memory")
            cycles.train(batch)

    assert run_alone(alone, retry)[0] == "01011"


def leave(cycles, loader, _):
    """The loop is left within a cycle."""
    for _ in range(3):
        for batch in itertools.islice(loader, 3):
            cycles.train(batch)
        cycles.ends += " "


def filter_the_last(cycles, loader, _):
    """The last batch is not used."""
    for _ in range(3):
        for number, batch in enumerate(loader):
            if number < 3:
                cycles.train(batch)
        cycles.ends += " "


@pytest.mark.parametrize(
    ("script", "expected"),
    [(leave, "010 101 010"), (filter_the_last, "010 101 010"), (combine_batches, "010 101")],
)
def test_a_cycle_that_continues_in_the_next_loop_is_reported_once(alone, script, expected):
    ends, logged = run_alone(alone, script)
    assert ends == expected
    assert len([message for message in logged if "loop before it trained on 1 only" in message]) == 1


def test_only_counts_end_a_cycle_without_sync_with_dataloader(alone):
    def train():
        cycles = Cycles(2, sync_with_dataloader=False)
        first, second = cycles.prepare_loader(5), cycles.prepare_loader(3)
        with collect_messages("accel_runtime.training.gradients") as logged:
            train_on(lambda: zip(first, itertools.cycle(second)), cycles)
        return cycles.ends.strip(), logged

    assert alone.run(train) == [("01010 10101", [])]


def test_only_counts_end_a_cycle_of_batches_in_a_list(alone):
    ends, _ = run_alone(alone, lambda cycles, a, _: train_on(lambda: list(a), cycles))
    assert ends == "01010 10101"
