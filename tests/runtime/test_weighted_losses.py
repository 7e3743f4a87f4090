"""Weighted losses: what has weights of its own, when weights are dropped, and which weights are refused.

`test_training_equality.py` compares whole trainings with weights.
"""

from __future__ import annotations

import pytest
import torch
from support.training.models import TwoLayerNet, TwoPartNet
from support.training.numerics import relative_error
from torch import nn

from accel_runtime import Accelerator, DistributedDataParallelKwargs

BAR = 1e-12
"""Relative error in float64."""


def build_rows(rank, step, scale=1):
    """Return the samples of a micro-batch, of another number for each rank and step."""
    generator = torch.Generator().manual_seed(10 * rank + step)
    return scale * torch.randn(2 + rank + 3 * step, 4, generator=generator, dtype=torch.float64)


def build_all_rows(size, steps, scale=1):
    return torch.cat([build_rows(rank, step, scale) for rank in range(size) for step in range(steps)])


def compute_loss(model, x, *args):
    return (model(x, *args) - x.sum(1, keepdim=True)).square().mean()


def flatten_gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def flatten(*models):
    return torch.cat([p.detach().flatten() for model in models for p in model.parameters()])


def compute_reference(x):
    """Return the gradient of one process on all rows at once."""
    model = TwoLayerNet().double()
    compute_loss(model, x).backward()
    return flatten_gradients(model)


def are_near(results, expected):
    return all(relative_error(actual, expected) <= BAR for actual in results)


@pytest.mark.parametrize("steps", [1, 2])
def test_backward_does_not_synchronize_with_the_device(steps):
    """Use `meta`, where reading any value fails."""
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    accelerator._backend.runtime.device = torch.device("meta")
    model = accelerator.prepare(TwoLayerNet())
    for _ in range(2):
        for weight in (7, torch.tensor(7), torch.tensor(7, device="meta")):
            with accelerator.accumulate(model):
                loss = model(torch.zeros(2, 4, device="meta")).mean()
                accelerator.backward(loss, weight=weight)
    assert flatten_gradients(model).device.type == "meta"


@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_weight_zero_hides_a_nonfinite_loss_and_other_weights_do_not(ranks, loss):
    def finite(loss):
        accelerator = Accelerator()
        records = []
        for weight in (0, 1):
            model = accelerator.prepare(TwoLayerNet().double())
            accelerator.backward(compute_loss(model, build_rows(0, 0)) * float(loss), weight=weight)
            records.append(bool(flatten_gradients(model).isfinite().all()))
        return records

    assert ranks.run(finite, loss) == [[True, False]] * ranks.size


# Several models and optimizers -------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2])
def test_two_models_in_one_cycle_have_separate_weights(ranks, steps):
    def train_both(steps):
        accelerator = Accelerator(gradient_accumulation_steps=steps)
        models = accelerator.prepare(*(TwoLayerNet().double() for _ in range(2)))
        for step in range(steps):
            with accelerator.accumulate(*models):
                for index, model in enumerate(models):
                    x = build_rows(accelerator.process_index, step + index)
                    accelerator.backward(compute_loss(model, x), weight=len(x))
        return [flatten_gradients(model) for model in models]

    results = ranks.run(train_both, steps)
    for index in range(2):
        rows = [build_rows(rank, step + index) for rank in range(ranks.size) for step in range(steps)]
        assert are_near([rank[index] for rank in results], compute_reference(torch.cat(rows)))


def play(accelerator, rounds):
    """Train a GAN on pairs of noise and real samples, on one process without an accelerator."""
    torch.manual_seed(3)
    maker, critic = nn.Linear(4, 4).double(), nn.Linear(4, 1).double()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (maker, critic)]
    if accelerator is not None:
        maker, critic, optimizers = accelerator.prepare(maker, critic, optimizers)

    def step(optimizer, losses):
        optimizer.zero_grad()
        if accelerator is None:
            losses.mean().backward()
        else:
            accelerator.backward(losses.mean(), len(losses))
        optimizer.step()

    for noise, real in rounds:
        scores = critic(torch.cat([real, maker(noise).detach()]))
        signs = torch.cat([torch.ones(len(real), 1), -torch.ones(len(noise), 1)])
        step(optimizers[1], nn.functional.softplus(-signs * scores))
        step(optimizers[0], nn.functional.softplus(-critic(maker(noise))))
    return flatten(maker, critic)


def test_the_optimizers_of_a_gan_get_their_own_gradients(ranks):
    """The gradients of the critic from the loss of the generator do not count."""

    def play_on_rank():
        accelerator = Accelerator()
        rank = accelerator.process_index
        return play(accelerator, [(build_rows(rank, at), build_rows(rank, at + 1, 2)) for at in range(3)])

    def join(at, scale):
        return torch.cat([build_rows(rank, at, scale) for rank in range(ranks.size)])

    assert are_near(ranks.run(play_on_rank), play(None, [(join(at, 1), join(at + 1, 2)) for at in range(3)]))


def test_two_optimizers_of_one_model_can_step_alternately(ranks):
    def alternate():
        ddp = DistributedDataParallelKwargs(find_unused_parameters=True)
        accelerator = Accelerator(kwargs_handlers=[ddp])
        model = TwoPartNet().double()
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model.parts]
        model, optimizers = accelerator.prepare(model, optimizers)
        for step in range(4):
            x = build_rows(accelerator.process_index, step)
            accelerator.backward(compute_loss(model, x, step % 2), weight=len(x))
            optimizers[step % 2].step()
            optimizers[step % 2].zero_grad()
        return flatten(model)

    model = TwoPartNet().double()
    for step in range(4):
        x = torch.cat([build_rows(rank, step) for rank in range(ranks.size)])
        compute_loss(model, x, step % 2).backward()
        torch.optim.SGD(model.parts[step % 2].parameters(), lr=0.1).step()
        model.zero_grad()
    assert are_near(ranks.run(alternate), flatten(model))


def test_parameters_outside_of_models_are_scaled_too():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    free = nn.Parameter(torch.tensor([2.0]))
    optimizer = accelerator.prepare(torch.optim.SGD([free], lr=1.0))
    for x, weight in ((1.0, 3), (5.0, 1)):
        with accelerator.accumulate():
            accelerator.backward((free * x).sum(), weight=weight)
            optimizer.step()
    assert free.item() == pytest.approx(2 - (1 * 3 + 5 * 1) / 4)


# Cycles of the script ----------------------------------------------------------------------


def test_trigger_sync_in_backward_averages_after_a_forward_pass_in_no_sync(ranks):
    def train_late():
        accelerator = Accelerator()
        model = accelerator.prepare(TwoLayerNet().double())
        rows = [build_rows(accelerator.process_index, step) for step in range(2)]
        with accelerator.no_sync(model):
            losses = [compute_loss(model, x) for x in rows]
        accelerator.backward(losses[0], weight=len(rows[0]))
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(losses[1], weight=len(rows[1]))
        return flatten_gradients(model)

    assert are_near(ranks.run(train_late), compute_reference(build_all_rows(ranks.size, 2)))


@pytest.mark.parametrize("to_none", [True, False])
def test_zeroing_gradients_in_the_script_also_drops_their_weights(ranks, to_none):
    def drop(to_none):
        accelerator = Accelerator()
        model = accelerator.prepare(TwoLayerNet().double())
        with accelerator.no_sync(model):
            accelerator.backward(compute_loss(model, build_rows(9, 0)), weight=1000)
        model.zero_grad(set_to_none=to_none)
        x = build_rows(accelerator.process_index, 0)
        accelerator.backward(compute_loss(model, x), weight=len(x))
        return flatten_gradients(model)

    assert are_near(ranks.run(drop, to_none), compute_reference(build_all_rows(ranks.size, 1)))


@pytest.mark.parametrize("end", ["step", "zero_grad", "by hand"])
def test_the_next_cycle_can_have_no_weights(end):
    accelerator = Accelerator()
    model = TwoLayerNet().double()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    x = build_rows(0, 0)
    for weight in (None, 3, None):
        accelerator.backward(compute_loss(model, x), weight=weight)
        assert accelerator._run.accumulation.weighted is (weight is not None)
        assert are_near([flatten_gradients(model)], compute_reference(x))
        if end == "step":
            optimizer.step()
        if end == "zero_grad":
            optimizer.zero_grad()
        else:
            model.zero_grad()


# Errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "text"),
    [
        *((weight, "expected a finite number of items, at least 0") for weight in (-1, float("nan"), float("inf"), torch.tensor(-2.0))),
        (torch.ones(3), r"a tensor of shape \[3\]\. Pass one number"),
    ],
)  # fmt: skip
def test_a_weight_that_is_no_valid_count_is_rejected(weight, text):
    accelerator = Accelerator()
    model = accelerator.prepare(TwoLayerNet().double())
    with pytest.raises(ValueError, match=text):
        accelerator.backward(compute_loss(model, build_rows(0, 0)), weight=weight)


@pytest.mark.parametrize("weights", [(None, 3), (3, None)])
def test_weighted_and_unweighted_losses_in_one_cycle_are_rejected(weights):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(TwoLayerNet().double())
    with accelerator.accumulate(model):
        accelerator.backward(compute_loss(model, build_rows(0, 0)), weight=weights[0])
    with accelerator.accumulate(model), pytest.raises(ValueError, match="with a weight and without one"):
        accelerator.backward(compute_loss(model, build_rows(0, 0)), weight=weights[1])
