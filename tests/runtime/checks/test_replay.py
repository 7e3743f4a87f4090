"""Replays of passes: results that differ are reported with rank, device and place, and the training does not change."""

from __future__ import annotations

import random
import time

import pytest
import torch
from support.cases.log_messages import collect_messages
from torch import nn

from accel_runtime import Accelerator


class Noise(nn.Module):
    """Add what is neither input, parameter, buffer nor random state, in the passes that are named."""

    def __init__(self, *, in_backward=False, numbers=range(1000)):
        super().__init__()
        self.in_backward, self.numbers, self.calls = in_backward, numbers, 0

    def forward(self, x):
        self.calls += 1
        if self.calls not in self.numbers:
            return x
        noise = (1 + time.perf_counter_ns() % 1000) * 1e-3
        return Scale.apply(x, noise) if self.in_backward else x + noise


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def build_model(noise=None):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), noise or nn.Identity(), nn.Linear(4, 1)
    )


def train(noise=None, *, every=2, rank=None, passes=4):
    """Train on the CPU; return the messages, the weights, buffers and the next random numbers."""
    with collect_messages("accel_runtime.checks.replay") as messages:
        accelerator = Accelerator(cpu=True)
        model = build_model(noise if rank in {None, accelerator.process_index} else None)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        if every:
            accelerator.check_replay(every=every)
        for _ in range(passes):
            accelerator.backward(model(torch.randn(4, 2)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    state = torch.cat([one.detach().double().flatten() for one in model.state_dict().values()])
    return messages, state, (torch.randn(1).item(), random.random())


@pytest.fixture(autouse=True)
def _generators():
    random.seed(0)
    torch.manual_seed(0)


def test_nothing_is_reported_of_a_deterministic_model_and_its_training_stays_the_same():
    random.seed(0)
    messages, state, numbers = train()
    random.seed(0)
    _, plain, plain_numbers = train(every=0)
    assert messages == []
    assert torch.equal(state, plain)
    assert numbers == plain_numbers


def test_a_result_that_differs_names_rank_device_host_and_module():
    messages, _, _ = train(Noise())
    (message,) = messages  # once for a place
    assert message.startswith("A replay of forward pass 1 differs on rank 0 (cpu, host ")
    assert "first in the output of 3." in message
    assert "deterministic algorithms differ too" in message


def test_a_gradient_that_differs_names_the_last_parameter_behind_it():
    messages, _, _ = train(Noise(in_backward=True))
    assert "first in the gradient of 1.bias." in messages[0]


def test_one_wrong_result_is_told_from_a_nondeterministic_kernel():
    (corrupt,), _, _ = train(Noise(numbers={2}))
    assert "Two of three passes agree" in corrupt
    assert "silent corruption" in corrupt
    (kernel,), _, _ = train(Noise(numbers={1, 2, 3}), passes=1)
    assert "Three passes differ, and those with deterministic algorithms agree" in kernel


def test_one_pass_of_so_many_is_replayed():
    noise = Noise(numbers=())
    train(noise, every=3, passes=7)
    assert noise.calls == 7 + 2 * 3


def test_the_rank_that_computes_other_results_reports_it(pair):
    (first, *_), (second, *_) = pair.run(lambda: train(Noise(), rank=1))
    assert first == []
    assert "differs on rank 1 (cpu, host " in second[0]
    (first, *_), (second, *_) = pair.run(train)
    assert (first, second) == ([], [])


def test_the_setting_of_a_run_replays_each_model_that_is_prepared(monkeypatch):
    monkeypatch.setenv("ACCEL_CHECK_REPLAY", "2")
    messages, _, _ = train(Noise(), every=0)
    assert "first in the output of 3." in messages[0]
    noises = [Noise(numbers=()), Noise(numbers=())]
    accelerator = Accelerator(cpu=True)
    for noise in noises:
        model = accelerator.prepare(build_model(noise))
        for _ in range(3):
            model(torch.randn(4, 2))
    assert [noise.calls for noise in noises] == [3 + 2 * 2] * 2
    accelerator.check_replay(every=100)
    model(torch.randn(4, 2))
    model(torch.randn(4, 2))
    assert noises[1].calls == 3 + 2 * 2 + 2 + 2 * 1


def test_the_setting_says_where_it_has_no_effect(pair):
    def prepare():
        with (
            pytest.MonkeyPatch.context() as patch,
            collect_messages("accel_runtime.training.gradients") as messages,
        ):
            patch.setenv("ACCEL_CHECK_REPLAY", "1")
            accelerator = Accelerator(cpu=True)
            for _ in range(2):
                model = nn.Sequential(nn.Linear(2, 4), nn.SyncBatchNorm(4))
                accelerator.prepare_model(model, evaluation_mode=True)
        return messages

    (first, second) = pair.run(prepare)
    assert len(first) == 1
    assert first[0].startswith("check_replay has no effect: a pass of this run needs other ranks")
    assert second == []


def test_a_check_that_cannot_run_is_refused():
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match="no model is prepared"):
        accelerator.check_replay()
    accelerator.prepare(build_model())
    with pytest.raises(ValueError, match="expected a number of passes"):
        accelerator.check_replay(every=0)
