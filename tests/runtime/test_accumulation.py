"""Accumulation cycles: the micro-batches after which gradients are averaged."""

from __future__ import annotations

import contextlib

import pytest
import torch
from support.log_messages import collect_messages
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import DataLoader

from accel_runtime import Accelerator, GradientAccumulationPlugin, GradScalerKwargs
from accel_runtime.training.accumulation import Accumulation


def collect_cycle_ends(steps, micro_batches, epochs=1, **fields):
    """Return, for each micro-batch, whether it ends an accumulation cycle."""
    accumulation = Accumulation(GradientAccumulationPlugin(steps, **fields))
    epoch = range(1, micro_batches + 1)
    return [accumulation.advance(is_last=index == micro_batches) for _ in range(epochs) for index in epoch]


def test_the_optimizer_may_step_before_the_first_micro_batch():
    assert Accumulation(4).synced


def test_each_micro_batch_is_a_cycle_if_steps_is_one():
    assert collect_cycle_ends(1, 3) == [True, True, True]


def test_a_cycle_ends_after_its_number_of_steps():
    assert collect_cycle_ends(2, 4) == [False, True, False, True]


def test_the_last_micro_batch_of_an_epoch_ends_the_cycle():
    assert collect_cycle_ends(3, 5, epochs=2) == [False, False, True, False, True] * 2


def test_synced_equals_the_result_of_advance():
    accumulation = Accumulation(2)
    assert [accumulation.advance(is_last=False) == accumulation.synced for _ in range(5)] == [True] * 5


@pytest.mark.parametrize("steps", [0, -1])
def test_an_accumulation_cycle_needs_at_least_one_micro_batch(steps):
    with pytest.raises(ValueError, match=f"{steps}: expected at least 1"):
        Accumulation(steps)


def test_a_cycle_continues_across_epochs_without_sync_with_dataloader():
    assert (
        collect_cycle_ends(3, 4, epochs=2, sync_with_dataloader=False)
        == [False, False, True, False, False, True] + [False] * 2
    )


# Through Accelerator ---------------------------------------------------------------------


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


def test_a_break_at_the_last_batch_does_not_disable_accumulation(ranks):
    def train_after_break():
        run = Run(gradient_accumulation_steps=4)
        for index, x in enumerate(run.loader):
            run.run_micro_batch(x)
            if index == 5:
                break
        return [run.run_micro_batch(x) for x in run.loader]

    assert ranks.run(train_after_break) == [[False, False, False, True, False, True]] * ranks.size


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
