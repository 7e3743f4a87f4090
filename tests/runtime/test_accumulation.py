"""Accumulation cycles: the micro-batches that end one, in loops of any shape, and what an `Accelerator` does there."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque

import pytest
import torch
from support.cases.log_messages import collect_messages
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import DataLoader

from accel_runtime import Accelerator, GradientAccumulationPlugin, GradScalerKwargs
from accel_runtime.training.accumulation import Accumulation

# Counting ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "micro_batches", "epochs", "sync_with_dataloader", "expected"),
    [
        (1, 3, 1, True, "111"),
        (2, 4, 1, True, "0101"),
        (3, 5, 2, True, "0010100101"),
        (3, 4, 2, False, "00100100"),
    ],
)
def test_a_cycle_ends_after_its_steps_or_with_an_epoch(
    steps, micro_batches, epochs, sync_with_dataloader, expected
):
    plugin = GradientAccumulationPlugin(steps, sync_with_dataloader=sync_with_dataloader)
    accumulation = Accumulation(plugin)
    assert accumulation.synced  # the optimizer may step before the first micro-batch
    ends = ""
    for number in range(1, 1 + epochs * micro_batches):
        is_end = accumulation.advance(is_last=number % micro_batches == 0)
        assert is_end == accumulation.synced
        ends += str(int(is_end))
    assert ends == expected


@pytest.mark.parametrize("steps", [0, -1])
def test_an_accumulation_cycle_needs_at_least_one_micro_batch(steps):
    with pytest.raises(ValueError, match=f"{steps}: expected at least 1"):
        Accumulation(steps)


# Loops -------------------------------------------------------------------------------------


class Cycles:
    """Two models that train with accumulation; `ends` has a digit for each micro-batch, 1 if it completes a cycle."""

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


def run_script(script, steps=2, lengths=(5, 3), **fields):
    """Return the ends of cycles of `script(cycles, *loaders)`, and the messages.

    The ends have "!" at the end if the script is refused, and "?" if a cycle continues in another loop.
    """
    cycles = Cycles(steps, **fields)
    loaders = [cycles.prepare_loader(length) for length in lengths]
    with collect_messages("accel_runtime.training.gradients") as logged:
        try:
            script(cycles, *loaders)
        except ValueError as error:
            assert "sync_with_dataloader=False" in str(error)
            cycles.ends = cycles.ends.strip() + "!"
    continued = [message for message in logged if "loop before it trained on 1 only" in message]
    return cycles.ends.strip() + "?" * len(continued)


def over(batches, epochs=2, limit=None):
    """Return a script that trains on every item of what `batches(*loaders)` returns."""

    def train(cycles, *loaders):
        for _ in range(epochs):
            for number, item in enumerate(batches(*loaders)):
                if number == limit:
                    break
                items = item if isinstance(item, (tuple, list)) else [item]
                cycles.train(*(batch for batch in items if batch is not None))
            cycles.ends += " "

    return train


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


ITERABLES = {
    # Two epochs: 5 and 3 batches, and cycles of 2.
    "a loader": (lambda a, _: a, "01011 01011"),
    "a list": (lambda a, _: list(a), "01010 10101"),
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
REFUSED = {
    "the second repeats": lambda a, b: zip(a, endless(b), strict=False),
    "the first repeats": lambda a, b: zip(endless(b), a, strict=False),
    "one repeats with epochs": lambda a, b: zip(a, endless_with_epochs(b), strict=False),
    "one repeats in a generator": lambda a, b: zip(a, passed_through(endless(b)), strict=False),
    "one repeats, in generators": lambda a, b: passed_through(zip(passed_through(a), endless(b), strict=False)),
    "pairs": paired,
    "itertools.cycle": lambda a, b: zip(a, itertools.cycle(b)),
    "zip_longest": itertools.zip_longest,
    "an iterator repeats": lambda a, b: zip(a, Endless(b), strict=False),
    "a generator repeats for a while": lambda a, b: zip(a, repeated(b, 4), strict=False),
    "both repeat": lambda a, b: zip(endless(a), endless(b), strict=False),
}  # fmt: skip
"""Loops in which a loader ends before the loop does, which is found at the micro-batch after it."""


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


def evaluate_within(cycles, loader, others):
    """An evaluation before and after a micro-batch, and one that is left and kept."""
    for _ in range(2):
        kept = []
        for batch in loader:
            list(others)
            cycles.train(batch)
            list(others)
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


def divide_unevenly(cycles, loader, _):
    """Batches of 4, 3 and micro-batches of at most 2."""
    loader = cycles.accelerator.prepare(DataLoader(torch.ones(7, 1), batch_size=4))
    for batch in loader:
        for part in batch.split(2):
            cycles.train(part)


def retry(cycles, loader, _):
    """Micro-batches that fail before their backward pass are tried again."""
    for number, batch in enumerate(loader):
        if number in {3, 4}:
            with pytest.raises(RuntimeError), cycles.accelerator.accumulate(cycles.models[0]):
                raise RuntimeError("no memory")
        cycles.train(batch)


def break_at_the_last(cycles, loader, _):
    """The loop is left with its last batch."""
    for _ in range(2):
        for number, batch in enumerate(loader, 1):
            cycles.train(batch)
            if number == 5:
                break
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
    retry: "01011",
    break_at_the_last: "01011 01011",
    # Reads beyond the end of a loader.
    read_beside: "011!",
    hold_a_stream: "011 011!",
    read_within_iterator: "01010 1011!?",
    divide_unevenly: "011!",
    # A cycle continues in the next loop, and that is reported once.
    leave: "010 101 010?",
    filter_the_last: "010 101 010?",
    combine_batches: "010 101?",
}


@pytest.mark.parametrize("name", ITERABLES)
def test_the_end_of_the_training_loop_ends_the_cycle(name):
    batches, expected = ITERABLES[name]
    assert run_script(over(batches)).strip("?") == expected


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_cycle_ends_with_the_loop_that_accumulate_stands_in(script):
    assert run_script(script) == SCRIPTS[script]


@pytest.mark.parametrize("name", REFUSED)
def test_a_loop_that_goes_on_after_the_end_of_a_loader_is_rejected_unless_each_micro_batch_is_a_cycle(name):
    assert run_script(over(REFUSED[name])) == "011!"
    assert set(run_script(over(REFUSED[name], limit=9), steps=1)) == {"1", " "}


@pytest.mark.parametrize(
    ("lengths", "expected"), [((5, 2), "01011 01011"), ((6, 2), "010101 010101"), ((4, 4), "0101 0101")]
)
@pytest.mark.parametrize("name", ["the second repeats", "the first repeats", "pairs"])
def test_a_loader_that_is_repeated_is_accepted_if_its_end_completes_the_cycle(name, lengths, expected):
    assert run_script(over(REFUSED[name]), lengths=lengths) == expected


@pytest.mark.parametrize(
    ("length", "count", "expected"),
    [
        (6, 2, "010101 010101"),
        (6, 1, "01011!"),
        (5, 2, "011!"),
        (5, 1, "01010 1011!?"),  # the first epoch leaves a cycle incomplete
    ],
)
def test_reading_ahead_is_rejected_if_the_last_batch_ends_a_cycle_early(length, count, expected):
    assert run_script(over(lambda a, _: read_ahead(a, count)), lengths=(length, 1)) == expected


def test_the_same_loops_are_decided_in_the_same_way_on_several_processes(pair):
    def run():
        return [
            run_script(over(ITERABLES["the first is shorter"][0])),
            run_script(over(REFUSED["pairs"])),
            run_script(leave),
        ]

    assert pair.run(run) == [["011 011", "011!", "010 101 010?"], ["011 011", "011!", "010 101 010"]]


def test_loaders_that_are_read_in_turn_end_the_cycle_with_the_later_one():
    assert run_script(alternate, 4, (3, 3)) == "000101 000101"


def test_only_counts_end_a_cycle_without_sync_with_dataloader():
    ends = run_script(over(lambda a, b: zip(a, itertools.cycle(b))), sync_with_dataloader=False)
    assert ends == "01010 10101"


# Through Accelerator -----------------------------------------------------------------------


class Run:
    """Train a weight of value 10 with SGD of rate 1 and micro-batches whose gradient is 1."""

    def __init__(self, **options):
        self.accelerator = Accelerator(**options)
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.model.weight, 10.0)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.model, self.optimizer = self.accelerator.prepare(self.model, optimizer)
        self.loader = self.accelerator.prepare(DataLoader(torch.ones(6 * self.accelerator.num_processes, 1)))

    def run_micro_batch(self, x=None):
        """Run one iteration of the training loop, and return whether the optimizer stepped."""
        x = torch.ones(1, 1) if x is None else x
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(x).sum())
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self.accelerator.sync_gradients

    @property
    def value(self):
        return self.accelerator.unwrap_model(self.model).weight.item()


def test_a_cycle_left_open_by_a_break_ends_in_the_next_loop(ranks):
    def train_after_break():
        run = Run(gradient_accumulation_steps=3)
        for x in run.loader:
            run.run_micro_batch(x)
            break
        before = run.value
        return before, [run.run_micro_batch(x) for x in run.loader][:3], run.value

    assert (
        ranks.run(train_after_break)
        == [(10, [False, True, False], pytest.approx(10 - 1 - 1 - 1 / 3))] * ranks.size
    )


@pytest.mark.parametrize("failing", [1, 3])
def test_a_micro_batch_that_fails_before_its_backward_pass_is_not_counted(ranks, failing):
    def train_after_break(failing):
        run = Run(gradient_accumulation_steps=3)
        for step in range(1, 4):
            if step == failing:
                with pytest.raises(RuntimeError, match="no memory"), run.accelerator.accumulate(run.model):
                    raise RuntimeError("no memory")
            run.run_micro_batch()
        return run.value, run.accelerator.sync_gradients

    assert ranks.run(train_after_break, failing) == [(9, True)] * ranks.size


def test_a_micro_batch_that_fails_after_its_backward_pass_is_counted():
    run = Run(gradient_accumulation_steps=2)
    with contextlib.suppress(OSError), run.accelerator.accumulate(run.model):
        run.accelerator.backward(run.model(torch.ones(1, 1)).sum())
        raise OSError("no space")
    assert run.run_micro_batch()
    assert run.value == 9


@pytest.mark.parametrize("each", [False, True])
def test_sync_each_batch_averages_gradients_after_every_micro_batch(pair, each):
    def collect_gradients(each):
        plugin = GradientAccumulationPlugin(3, sync_each_batch=each)
        run = Run(gradient_accumulation_plugin=plugin)
        rank, records = run.accelerator.process_index, []
        for _ in range(3):
            with run.accelerator.accumulate(run.model):
                run.accelerator.backward(run.model(torch.full((1, 1), 1.0 + rank)).sum())
                records.append(run.model.module.weight.grad.item())
        return records

    first, second = pair.run(collect_gradients, each)
    assert (first[:2] == second[:2]) == each
    assert first[2] == second[2] == pytest.approx(1.5)


def test_gradient_accumulation_steps_and_sync_gradients_can_be_assigned():
    run = Run()
    run.accelerator.gradient_accumulation_steps = 2
    assert run.accelerator.gradient_accumulation_steps == 2
    assert [run.run_micro_batch() for _ in range(2)] == [False, True]
    run.accelerator.sync_gradients = False
    run.optimizer.step()
    assert run.value == 9
    with pytest.raises(ValueError, match="0: expected at least 1"):
        run.accelerator.gradient_accumulation_steps = 0


def test_gradient_accumulation_steps_and_a_plugin_are_rejected_together():
    plugin = GradientAccumulationPlugin(2)
    assert Accelerator(gradient_accumulation_plugin=plugin).gradient_accumulation_steps == 2
    with pytest.raises(
        ValueError, match="Pass either gradient_accumulation_steps or gradient_accumulation_plugin"
    ):
        Accelerator(gradient_accumulation_steps=4, gradient_accumulation_plugin=plugin)


# Schedulers, with one global batch size on any number of processes --------------------------


@pytest.mark.parametrize("adjust", [True, False])
def test_a_scheduler_advances_once_a_cycle_and_counts_calls_with_adjust_scheduler(ranks, adjust):
    def step_scheduler(adjust):
        run = Run(gradient_accumulation_plugin=GradientAccumulationPlugin(3, adjust_scheduler=adjust))
        scheduler = run.accelerator.prepare(LambdaLR(run.optimizer, lambda _: 1.0))
        for _ in range(6):
            run.run_micro_batch()
            scheduler.step()
        return scheduler.last_epoch, scheduler.scheduler._step_count

    n = ranks.size
    expected = (2 * n, 1 + 2 * n + (4 if adjust else 0))
    assert ranks.run(step_scheduler, adjust) == [expected] * n


def test_one_cycle_lr_reaches_its_end_with_accumulation():
    for adjust in (True, False):
        run = Run(gradient_accumulation_plugin=GradientAccumulationPlugin(4, adjust_scheduler=adjust))
        scheduler = run.accelerator.prepare(OneCycleLR(run.optimizer, max_lr=1.0, total_steps=5))
        for _ in range(20):
            run.run_micro_batch()
            scheduler.step()
        assert scheduler.last_epoch == 4


# Clipping --------------------------------------------------------------------------------


@pytest.mark.parametrize("mixed_precision", ["no", "fp16"])
def test_clipping_is_skipped_until_the_end_of_a_cycle_and_returns_the_current_norm(ranks, mixed_precision):
    def clip_gradients(mixed_precision):
        scaler = GradScalerKwargs(init_scale=128.0)
        run = Run(gradient_accumulation_steps=2, mixed_precision=mixed_precision, kwargs_handlers=[scaler])
        records = []
        for _ in range(2):
            with run.accelerator.accumulate(run.model):
                run.accelerator.backward(run.model(torch.full((1, 1), 4.0)).sum())
                weight = run.accelerator.unwrap_model(run.model).weight
                run.accelerator.clip_grad_value_(weight, 3.0)
                norm = run.accelerator.clip_grad_norm_(run.model.parameters(), 1.0).item()
                records.append(round(norm, 4))
        return records, round(weight.grad.item(), 4)

    assert ranks.run(clip_gradients, mixed_precision) == [([2.0, 3.0], 1.0)] * ranks.size


@pytest.mark.parametrize("in_one_context", [False, True])
def test_accumulating_for_alternating_models_is_reported_once(pair, in_one_context):
    def collect_reports(in_one_context):
        accelerator = Accelerator(gradient_accumulation_steps=2)
        models = accelerator.prepare(nn.Linear(1, 1), nn.Linear(1, 1))
        with collect_messages("accel_runtime.training.gradients") as logged:
            for _ in range(4):
                for contexts in [models] if in_one_context else [models[:1], models[1:]]:
                    with accelerator.accumulate(*contexts):
                        for model in contexts:
                            accelerator.backward(model(torch.ones(1, 1)).sum())
        return [message for message in logged if "other models" in message]

    first, other = pair.run(collect_reports, in_one_context)
    assert len(first) == (not in_one_context)
    assert not other


def test_a_resumed_cycle_is_not_reported_as_a_cycle_of_other_models(tmp_path):
    run = Run(gradient_accumulation_steps=2)
    run.run_micro_batch()
    run.accelerator.save_state(tmp_path)
    later = Run(gradient_accumulation_steps=2)
    later.accelerator.load_state(tmp_path)
    with collect_messages("accel_runtime.training.gradients") as logged:
        assert later.run_micro_batch()
    assert not logged
