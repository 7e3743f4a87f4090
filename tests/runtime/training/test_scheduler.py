"""The prepared scheduler."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from support.cases.log_messages import collect_messages
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LRScheduler,
    MultiplicativeLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from accel_runtime import Accelerator
from accel_runtime.training.accumulation import Accumulation
from accel_runtime.training.loss_scaler import LossScaler
from accel_runtime.training.optimizer import PreparedOptimizer
from accel_runtime.training.scheduler import PreparedScheduler


def prepare_scheduler(make, *, strides=1, with_optimizer=True, cycle=1, scaler=None):
    """Return a scheduler of an optimizer of rate 1, the optimizer, and the accumulation."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    accumulation = Accumulation(cycle)
    prepared = PreparedOptimizer(optimizer, accumulation, scaler)
    scheduler = PreparedScheduler(
        make(optimizer), [prepared], accumulation, strides=strides, with_optimizer=with_optimizer
    )
    return scheduler, prepared, accumulation


def build_halving_scheduler(optimizer):
    return LambdaLR(optimizer, lambda step: 0.5**step)


def collect_rates(scheduler, optimizer, steps):
    """Return the learning rate after each step."""
    rates = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize(
    ("strides", "expected"), [(1, [0.5, 0.25]), (2, [0.25, 0.0625]), (3, [0.125, 0.015625])]
)
def test_a_scheduler_advances_once_for_each_process(strides, expected):
    scheduler, optimizer, _ = prepare_scheduler(build_halving_scheduler, strides=strides)
    assert collect_rates(scheduler, optimizer, 2) == expected
    assert scheduler.get_last_lr() == expected[-1:]
    assert scheduler.last_epoch == 2 * strides


def test_a_scheduler_does_not_advance_before_the_end_of_a_cycle():
    scheduler, optimizer, accumulation = prepare_scheduler(build_halving_scheduler, cycle=2)
    rates = []
    for _ in range(4):
        accumulation.advance(is_last=False)
        rates += collect_rates(scheduler, optimizer, 1)
    assert rates == [1, 0.5, 0.5, 0.25]


def test_a_scheduler_does_not_advance_if_its_optimizer_skipped_the_step():
    scaler = LossScaler("cpu")
    scheduler, optimizer, _ = prepare_scheduler(build_halving_scheduler, scaler=scaler)
    (weight,) = optimizer.parameters
    for factor, rate in [(math.inf, 1.0), (1.0, 0.5)]:
        scaler.scale(weight * factor).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        assert scheduler.get_last_lr() == [rate]


def test_a_scheduler_without_step_with_optimizer_advances_once_a_call():
    scheduler, optimizer, accumulation = prepare_scheduler(
        build_halving_scheduler, strides=3, with_optimizer=False, cycle=2
    )
    optimizer.step()
    accumulation.advance(is_last=False)
    scheduler.step()
    assert scheduler.last_epoch == 1


def test_reduce_lr_on_plateau_advances_once_for_each_metric():
    scheduler, optimizer, _ = prepare_scheduler(
        lambda o: ReduceLROnPlateau(o, patience=1, factor=0.5), strides=3
    )
    rates = []
    for metric in (1.0, 1.0, 1.0):
        optimizer.step()
        scheduler.step(metric)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1, 1, 0.5]


@pytest.mark.parametrize("steps_with_optimizer", [True, False])
def test_reduce_lr_on_plateau_uses_the_mean_of_metrics_that_differ(several, steps_with_optimizer):
    def step():
        accelerator = Accelerator(step_scheduler_with_optimizer=steps_with_optimizer)
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        plateau = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        optimizer, scheduler = accelerator.prepare(optimizer, plateau)
        rates = []
        with collect_messages("accel_runtime.scheduler") as messages:
            # The metric of rank 0 gets worse with each call, and the mean gets better.
            for call in range(3):
                optimizer.step()
                scheduler.step(metrics=1.0 + (call if accelerator.is_main_process else -2 * call))
                rates.append(optimizer.param_groups[0]["lr"])
            equal = copy.deepcopy(scheduler.scheduler.best)
            scheduler.step(float("nan"))
        return rates, equal, scheduler.num_bad_epochs, messages

    mean = 1.0 + (2 - 4 * (several.size - 1)) / several.size
    for rank, (rates, best, num_bad_epochs, messages) in enumerate(several.run(step)):
        assert rates == [1.0, 1.0, 1.0]
        assert best == mean
        assert num_bad_epochs == 0, "a metric that is not a number counts on all ranks"
        assert len(messages) == (rank == 0)
        assert not messages or "got different metrics on the ranks at test_scheduler.py" in messages[0]


@pytest.mark.parametrize("strides", [1, 2, 3, 4])
def test_one_cycle_lr_ends_at_its_lowest_rate_for_any_stride(strides):
    total = 10
    scheduler, optimizer, _ = prepare_scheduler(
        lambda o: OneCycleLR(o, max_lr=1.0, total_steps=total), strides=strides
    )
    rates = collect_rates(scheduler, optimizer, total)
    assert scheduler.last_epoch == total - 1
    assert rates[-1] == min(rates) == pytest.approx(1.0 / 25 / 1e4)


def test_a_prepared_scheduler_has_the_attributes_of_the_original():
    scheduler, optimizer, _ = prepare_scheduler(build_halving_scheduler)
    assert isinstance(scheduler, LRScheduler)
    assert scheduler.optimizer is optimizer.optimizer
    assert scheduler.base_lrs == [1.0]
    assert not hasattr(scheduler, "no_such_attribute")


def test_state_dicts_of_prepared_and_plain_schedulers_are_exchangeable():
    scheduler, optimizer, _ = prepare_scheduler(build_halving_scheduler, strides=3)
    collect_rates(scheduler, optimizer, 1)
    plain = build_halving_scheduler(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))
    plain.load_state_dict(scheduler.state_dict())
    assert plain.last_epoch == 3
    other, _, _ = prepare_scheduler(build_halving_scheduler)
    other.load_state_dict(plain.state_dict())
    assert other.scheduler.last_epoch == 3


def test_a_scheduler_can_be_copied_together_with_its_optimizer():
    scheduler, optimizer, _ = prepare_scheduler(build_halving_scheduler)
    collect_rates(scheduler, optimizer, 1)
    assert collect_rates(*copy.deepcopy((scheduler, optimizer)), 1) == [0.25]
    assert scheduler.get_last_lr() == [0.5]


def step_after_optimizer_steps(scheduler, optimizer, pattern):
    """Step the scheduler after each of the given numbers of optimizer steps."""
    for count in pattern:
        for _ in range(count):
            optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    ("pattern", "options", "is_reported"),
    [
        ((3, 3, 3), {}, 1),
        ((3, 1, 1, 4, 5), {}, 1),
        ((9, 1, 1), {}, 0),  # begins late, and then counts batches
        ((1, 1, 1), {}, 0),
        ((3, 3, 3), {"strides": 1}, 0),
        ((3, 3, 3), {"with_optimizer": False}, 0),
    ],
)
def test_a_scheduler_that_seems_to_count_epochs_is_reported_once(caplog, pattern, options, is_reported):
    scheduler, optimizer, _ = prepare_scheduler(build_halving_scheduler, **{"strides": 2} | options)
    step_after_optimizer_steps(scheduler, optimizer, pattern)
    assert len(caplog.messages) == is_reported
    if is_reported:
        assert "LambdaLR advances too fast if its steps are epochs" in caplog.text
        assert "leave the scheduler out of prepare()" in caplog.text
        assert "step_scheduler_with_optimizer=False" in caplog.text
        assert "test_scheduler.py:" in caplog.text
        assert scheduler.advances.startswith("2 step(s) of the schedule a call of step(), once in ")


def test_a_skipped_step_is_not_counted_between_two_scheduler_calls(caplog):
    scheduler, optimizer, _ = prepare_scheduler(build_halving_scheduler, strides=2)
    for skipped in (False, True, False):
        optimizer.step()
        optimizer.step_was_skipped = skipped
        scheduler.step()
    assert not caplog.messages


def test_loading_a_state_does_not_count_as_optimizer_steps(caplog):
    scheduler, optimizer, _ = prepare_scheduler(build_halving_scheduler, strides=2)
    step_after_optimizer_steps(scheduler, optimizer, (1, 1))
    optimizer.steps = 500
    scheduler.load_state_dict(scheduler.state_dict())
    step_after_optimizer_steps(scheduler, optimizer, (1, 1))
    assert not caplog.messages


def test_only_the_first_process_reports_a_scheduler_that_seems_to_count_epochs(pair):
    def train():
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer, scheduler = accelerator.prepare(
            model, optimizer, build_halving_scheduler(optimizer)
        )
        with collect_messages("accel_runtime.scheduler") as messages:
            for batch in range(16):
                with accelerator.accumulate(model):
                    accelerator.backward(model(torch.ones(1, 1)).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                if batch % 8 == 7:
                    scheduler.step()
        return len(messages), scheduler.last_epoch, accelerator.describe().schedulers[0].advances

    expected = "2 step(s) of the schedule a call of step(), once in 4 optimizer steps"
    assert pair.run(train) == [(1, 4, expected), (0, 4, expected)]


# Calls that are not made once for each micro-batch -----------------------------------------


def call_at_the_end_of_epochs(make, *args, cycle=2, batches=3, epochs=4):
    """Return the learning rate after each epoch, if cycles continue in the next epoch."""
    scheduler, optimizer, accumulation = prepare_scheduler(make, cycle=cycle)
    rates = []
    for _ in range(epochs):
        for _ in range(batches):
            accumulation.advance(is_last=False)
            optimizer.step()
        scheduler.step(*args)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("batches", [1, 2, 3, 5])
def test_every_metric_counts_if_epochs_end_within_a_cycle(batches):
    rates = call_at_the_end_of_epochs(
        lambda o: ReduceLROnPlateau(o, patience=0, factor=0.5), 1.0, cycle=4, batches=batches
    )
    assert rates == [1, 0.5, 0.25, 0.125]


def test_a_metric_counts_although_the_newest_step_was_skipped():
    scheduler, optimizer, _ = prepare_scheduler(lambda o: ReduceLROnPlateau(o, patience=0, factor=0.5))
    for _ in range(2):
        optimizer.step()
        optimizer.step_was_skipped = True
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_metric_of_each_micro_batch_counts_once_a_cycle():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer, scheduler = accelerator.prepare(
        optimizer, ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    )
    rates = []
    for _ in range(6):
        with accelerator.accumulate():
            accelerator.backward(weight.sum() * 0)
            optimizer.step()
            scheduler.step(1.0)
            rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1, 1, 1, 0.5, 0.5, 0.25]


def test_a_schedule_of_epochs_advances_if_epochs_end_within_a_cycle():
    assert call_at_the_end_of_epochs(build_halving_scheduler) == [0.5, 0.25, 0.125, 0.0625]


@pytest.mark.parametrize("scheduler_first", [False, True])
def test_a_schedule_of_micro_batches_advances_once_a_cycle_in_any_order_of_calls(scheduler_first):
    scheduler, optimizer, accumulation = prepare_scheduler(build_halving_scheduler, cycle=3)
    positions = []
    for _ in range(7):
        accumulation.advance(is_last=False)
        for step in (scheduler.step, optimizer.step) if scheduler_first else (optimizer.step, scheduler.step):
            step()
        positions.append(scheduler.last_epoch)
    assert positions == [0, 0, 1, 1, 1, 2, 2]


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize(
    "make",
    [lambda o: MultiplicativeLR(o, lambda _: 0.5), lambda o: CosineAnnealingWarmRestarts(o, T_0=2)],
    ids=["multiplicative", "cosine"],
)
def test_a_position_is_set_once_on_any_number_of_processes(make):
    scheduler, optimizer, _ = prepare_scheduler(make, strides=3)
    optimizer.step()
    optimizer.step()
    scheduler.step(1)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5)


def test_a_position_of_an_epoch_does_not_warn_of_epochs():
    scheduler, optimizer, _ = prepare_scheduler(lambda o: CosineAnnealingWarmRestarts(o, T_0=2), strides=3)
    with collect_messages("accel_runtime.scheduler") as messages:
        for epoch in range(2):
            optimizer.step()
            optimizer.step()
            scheduler.step(epoch)
    assert not messages


@pytest.mark.parametrize("kind", ["sequential", "chained"])
def test_a_composed_schedule_stops_at_the_end_of_its_one_cycle_part(kind):
    def make(optimizer):
        if kind == "chained":
            return ChainedScheduler(
                [ConstantLR(optimizer, factor=1.0), OneCycleLR(optimizer, 1.0, total_steps=7)], optimizer
            )
        parts = [ConstantLR(optimizer, factor=0.5), OneCycleLR(optimizer, 1.0, total_steps=7)]
        return SequentialLR(optimizer, parts, milestones=[4])

    scheduler, optimizer, _ = prepare_scheduler(make, strides=4)
    rates = collect_rates(scheduler, optimizer, 4)
    assert rates[-1] == rates[-2] == pytest.approx(4e-6, rel=1e-3)
