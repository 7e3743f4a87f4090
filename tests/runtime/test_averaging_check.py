"""Gradients that stay on their process are reported, and those that are averaged are not."""

from __future__ import annotations

import pytest
import torch
from log_messages import collect_messages
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_runtime import Accelerator, FullyShardedDataParallelPlugin, LocalSGD
from accel_runtime.optimizer import PreparedOptimizer
from accel_runtime.training.accumulation import Accumulation

BYPASSED = "no forward pass of the prepared model belongs to them"


class Autoencoder(nn.Module):
    """A model with more methods than `forward`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(2, 3)
        self.decoder = nn.Linear(3, 2)

    def forward(self, x):
        return self.decoder(self.encode(x))

    def encode(self, x):
        return self.encoder(x)


def warned(train, *args):
    """Return what a training logs on this rank."""
    with collect_messages("accel_runtime.training.gradients") as messages:
        train(*args)
    return messages


def prepared(**options):
    """Return an accelerator, a model, what `prepare` made of it, and its optimizer."""
    accelerator = Accelerator(**options)
    model = Autoencoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerator, model, *accelerator.prepare(model, optimizer)


def data():
    return torch.randn(3, 2)


def step(accelerator, optimizer, loss):
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


# Forward passes that bypass the prepared model ---------------------------------------------


def call_the_model():
    accelerator, model, _, optimizer = prepared()
    for _ in range(3):
        step(accelerator, optimizer, model(data()).sum())


def call_a_method():
    accelerator, _, model, optimizer = prepared()
    step(accelerator, optimizer, model(data()).sum())
    step(accelerator, optimizer, model.encode(data()).sum())


def call_a_method_with_a_weight():
    accelerator, model, _, optimizer = prepared(mixed_precision="bf16")
    accelerator.backward(model.encode(data()).mean(), weight=3)
    optimizer.step()


def call_backward_twice():
    accelerator, _, model, optimizer = prepared()
    first, second = model(data()).sum(), model(data()).sum()
    accelerator.backward(first)
    step(accelerator, optimizer, second)


def end_a_window_with_a_method():
    accelerator, _, model, optimizer = prepared(gradient_accumulation_steps=2)
    for compute in (model, model.encode):
        with accelerator.accumulate(model):
            step(accelerator, optimizer, compute(data()).sum())


@pytest.mark.parametrize(
    "train",
    [
        call_the_model,
        call_a_method,
        call_a_method_with_a_weight,
        call_backward_twice,
        end_a_window_with_a_method,
    ],
)
def test_a_backward_pass_that_averages_nothing_is_reported_once_with_its_line(pair, train):
    (message,), other = pair.run(warned, train)
    assert other == []
    assert message.startswith(
        "Gradients of Autoencoder are not averaged over the 2 processes in backward() at "
    )
    assert "test_averaging_check.py:" in message
    assert BYPASSED in message


def train_as_usual():
    accelerator, _, model, optimizer = prepared()
    for _ in range(2):
        step(accelerator, optimizer, model(data()).sum())
    with torch.no_grad():
        model.encode(data())


def accumulate():
    accelerator, own, model, optimizer = prepared(gradient_accumulation_steps=2)
    for compute in (own, model, own, model):  # DDP averages what a window has accumulated
        with accelerator.accumulate(model):
            step(accelerator, optimizer, compute(data()).sum())


def hold_gradients_back():
    accelerator, own, model, optimizer = prepared()
    with accelerator.no_sync(model):
        accelerator.backward(own(data()).sum())
        loss = model(data()).sum()
    with accelerator.trigger_sync_in_backward(model):
        step(accelerator, optimizer, loss)
    with LocalSGD(accelerator, model, 2) as local:
        for _ in range(2):
            step(accelerator, optimizer, own(data()).sum())
            local.step()


def hold_gradients_back_by_means_of_ddp():
    accelerator, _, model, optimizer = prepared()
    with model.no_sync():
        accelerator.backward(model(data()).sum())
    model.require_backward_grad_sync = False
    accelerator.backward(model(data()).sum())
    model.require_backward_grad_sync = True
    step(accelerator, optimizer, model(data()).sum())


def train_against_each_other():
    """The generator's forward pass comes before the backward pass of the discriminator."""
    accelerator, _, generator, of_generator = prepared()
    discriminator = Autoencoder()
    of_discriminator = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    discriminator, of_discriminator = accelerator.prepare(discriminator, of_discriminator)
    for _ in range(3):
        fake = generator(data())
        step(accelerator, of_discriminator, discriminator(data()).sum() - discriminator(fake.detach()).sum())
        step(accelerator, of_generator, discriminator(fake).sum())
        of_discriminator.zero_grad()


def prepare_for_evaluation():
    accelerator, _, model, optimizer = prepared()
    teacher = accelerator.prepare_model(Autoencoder(), evaluation_mode=True)
    step(accelerator, optimizer, (model(data()) - teacher.decoder(teacher.encode(data()))).sum())


@pytest.mark.parametrize(
    "train",
    [
        train_as_usual,
        accumulate,
        hold_gradients_back,
        hold_gradients_back_by_means_of_ddp,
        train_against_each_other,
        prepare_for_evaluation,
    ],
)
def test_what_is_averaged_or_kept_back_on_purpose_is_not_reported(pair, train):
    assert pair.run(warned, train) == [[], []]


def leave_everything_unprepared(**options):
    accelerator, model = Accelerator(**options), Autoencoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        step(accelerator, optimizer, model(data()).sum())


@pytest.mark.parametrize(
    "options", [{}, {"fsdp_plugin": FullyShardedDataParallelPlugin()}], ids=["replicated", "sharded"]
)
def test_a_backward_pass_without_any_prepared_model_is_reported_once(pair, options):
    def train():
        return warned(lambda: leave_everything_unprepared(**options))

    (message,), other = pair.run(train)
    assert other == []
    assert "no model is prepared" in message
    assert "test_averaging_check.py:" in message


# Parameters that no prepared model has -----------------------------------------------------


def leave_the_model_unprepared():
    accelerator, model = Accelerator(), Autoencoder()
    optimizer = accelerator.prepare(torch.optim.SGD(model.named_parameters(), lr=0.1))
    for _ in range(2):
        step(accelerator, optimizer, model(data()).sum())


def train_a_parameter_beside_the_model():
    accelerator, model = Accelerator(), Autoencoder()
    scale = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    step(accelerator, optimizer, (model(data()) * scale).sum())


def unfreeze_late():
    accelerator, model = Accelerator(), Autoencoder()
    model.encoder.requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    step(accelerator, optimizer, model(data()).sum())
    model.encoder.requires_grad_(requires_grad=True)
    step(accelerator, optimizer, model(data()).sum())


@pytest.mark.parametrize(
    ("train", "parts"),
    [
        (
            leave_the_model_unprepared,
            ["SGD trains 4 parameters", "encoder.weight [3, 2], ", "give their model to prepare()"],
        ),
        (
            train_a_parameter_beside_the_model,
            ["trains 1 parameters", "parameter 4 of group 0 [1]", "no prepared model"],
        ),
        (
            unfreeze_late,
            ["trains 2 parameters", "encoder.weight [3, 2], encoder.bias [3]", "set requires_grad before"],
        ),
    ],
)
def test_an_optimizer_whose_parameters_are_not_averaged_is_reported_once(pair, train, parts):
    messages, other = pair.run(warned, train)
    assert other == []
    (message,) = [text for text in messages if "whose gradients are not averaged" in text]
    assert all(part in message for part in parts), message


def own_ddp():
    accelerator = Accelerator()
    model = DistributedDataParallel(Autoencoder())
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step(accelerator, optimizer, model(data()).sum())


def train_a_part():
    accelerator, model = Accelerator(), Autoencoder()
    model.encoder.requires_grad_(requires_grad=False)
    loose = nn.Parameter(torch.ones(1))  # without a gradient it is not trained
    optimizer = torch.optim.SGD([*model.parameters(), loose], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    step(accelerator, optimizer, model(data()).sum())


@pytest.mark.parametrize("train", [own_ddp, train_a_part])
def test_an_optimizer_of_prepared_models_is_not_reported(pair, train):
    assert pair.run(warned, train) == [[], []]


@pytest.mark.parametrize("train", [call_the_model, leave_the_model_unprepared])
def test_one_process_has_nothing_to_average(alone, train):
    assert alone.run(warned, train) == [[]]


def test_an_optimizer_is_checked_at_steps_that_are_powers_of_two_until_something_is_found():
    parameter, seen = nn.Parameter(torch.ones(1)), []

    def check():
        seen.append(optimizer.steps + 1)
        return len(seen) == 4

    optimizer = PreparedOptimizer(torch.optim.SGD([parameter], lr=0.1), Accumulation(1), None, check=check)
    for _ in range(40):
        optimizer.step()
    assert seen == [1, 2, 4, 8]
