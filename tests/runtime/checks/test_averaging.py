"""Gradients that are not averaged over the processes are reported; averaged ones are not."""

from __future__ import annotations

import pytest
import torch
from support.cases.log_messages import collect_messages
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from accel_runtime import (
    Accelerator,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    LocalSGD,
)

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


def collect_reports(train, *args):
    """Return the messages that a training function logs on this rank."""
    with collect_messages("accel_runtime.checks.averaging") as messages:
        train(*args)
    return messages


def prepare_autoencoder(**options):
    """Return an accelerator, a model, the prepared model, and its optimizer."""
    accelerator = Accelerator(**options)
    model = Autoencoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerator, model, *accelerator.prepare(model, optimizer)


def draw_batch():
    return torch.randn(3, 2)


def run_step(accelerator, optimizer, loss):
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


# Forward passes that bypass the prepared model ---------------------------------------------


def call_the_model():
    accelerator, model, _, optimizer = prepare_autoencoder()
    for _ in range(3):
        run_step(accelerator, optimizer, model(draw_batch()).sum())


def call_a_method():
    accelerator, _, model, optimizer = prepare_autoencoder()
    run_step(accelerator, optimizer, model(draw_batch()).sum())
    run_step(accelerator, optimizer, model.encode(draw_batch()).sum())


def call_a_method_with_a_weight():
    accelerator, model, _, optimizer = prepare_autoencoder(mixed_precision="bf16")
    accelerator.backward(model.encode(draw_batch()).mean(), weight=3)
    optimizer.step()


def call_backward_twice():
    accelerator, _, model, optimizer = prepare_autoencoder()
    first, second = model(draw_batch()).sum(), model(draw_batch()).sum()
    accelerator.backward(first)
    run_step(accelerator, optimizer, second)


def end_a_cycle_with_a_method():
    accelerator, _, model, optimizer = prepare_autoencoder(gradient_accumulation_steps=2)
    for compute in (model, model.encode):
        with accelerator.accumulate(model):
            run_step(accelerator, optimizer, compute(draw_batch()).sum())


@pytest.mark.parametrize(
    "train",
    [
        call_the_model,
        call_a_method,
        call_a_method_with_a_weight,
        call_backward_twice,
        end_a_cycle_with_a_method,
    ],
)
def test_a_backward_pass_that_averages_nothing_is_reported_once_with_its_line(pair, train):
    (message,), other = pair.run(collect_reports, train)
    assert other == []
    assert message.startswith(
        "Gradients of Autoencoder are not averaged over the 2 processes in backward() at "
    )
    assert "test_averaging.py:" in message
    assert BYPASSED in message


def train_as_usual():
    accelerator, _, model, optimizer = prepare_autoencoder()
    for _ in range(2):
        run_step(accelerator, optimizer, model(draw_batch()).sum())
    with torch.no_grad():
        model.encode(draw_batch())


def accumulate():
    accelerator, module, model, optimizer = prepare_autoencoder(gradient_accumulation_steps=2)
    for compute in (module, model, module, model):  # DDP averages the gradients of the whole cycle
        with accelerator.accumulate(model):
            run_step(accelerator, optimizer, compute(draw_batch()).sum())


def defer_averaging():
    accelerator, module, model, optimizer = prepare_autoencoder()
    with accelerator.no_sync(model):
        accelerator.backward(module(draw_batch()).sum())
        loss = model(draw_batch()).sum()
    with accelerator.trigger_sync_in_backward(model):
        run_step(accelerator, optimizer, loss)
    with LocalSGD(accelerator, model, 2) as local:
        for _ in range(2):
            run_step(accelerator, optimizer, module(draw_batch()).sum())
            local.step()


def defer_averaging_with_ddp():
    accelerator, _, model, optimizer = prepare_autoencoder()
    with model.no_sync():
        accelerator.backward(model(draw_batch()).sum())
    model.require_backward_grad_sync = False
    accelerator.backward(model(draw_batch()).sum())
    model.require_backward_grad_sync = True
    run_step(accelerator, optimizer, model(draw_batch()).sum())


def train_a_gan():
    """Run the forward pass of the generator before the backward pass of the discriminator."""
    accelerator, _, generator, of_generator = prepare_autoencoder()
    discriminator = Autoencoder()
    of_discriminator = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    discriminator, of_discriminator = accelerator.prepare(discriminator, of_discriminator)
    for _ in range(3):
        fake = generator(draw_batch())
        run_step(
            accelerator,
            of_discriminator,
            discriminator(draw_batch()).sum() - discriminator(fake.detach()).sum(),
        )
        run_step(accelerator, of_generator, discriminator(fake).sum())
        of_discriminator.zero_grad()


def prepare_for_evaluation():
    accelerator, _, model, optimizer = prepare_autoencoder()
    teacher = accelerator.prepare_model(Autoencoder(), evaluation_mode=True)
    run_step(
        accelerator, optimizer, (model(draw_batch()) - teacher.decoder(teacher.encode(draw_batch()))).sum()
    )


@pytest.mark.parametrize(
    "train",
    [
        train_as_usual,
        accumulate,
        defer_averaging,
        defer_averaging_with_ddp,
        train_a_gan,
        prepare_for_evaluation,
    ],
)
def test_averaged_and_deliberately_deferred_gradients_are_not_reported(pair, train):
    assert pair.run(collect_reports, train) == [[], []]


def train_without_prepare(**options):
    accelerator, model = Accelerator(**options), Autoencoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        run_step(accelerator, optimizer, model(draw_batch()).sum())


class CheckpointedTwice(nn.Module):
    """A model that uses a checkpointed layer twice."""

    def __init__(self, *, use_reentrant):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self._use_reentrant = use_reentrant

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layer, x.requires_grad_(), use_reentrant=self._use_reentrant)
        return x


def train_checkpointed(use_reentrant, handlers):
    """Train a checkpointed model on other data on each rank; return its reports and its first gradients."""
    accelerator = Accelerator(kwargs_handlers=list(handlers))
    torch.manual_seed(0)
    model = CheckpointedTwice(use_reentrant=use_reentrant)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    gradients = []

    def train():
        for _ in range(4):
            x = torch.ones(3, 2) * (accelerator.process_index + 1)
            accelerator.backward(prepared(x).pow(2).mean())
            gradients.append(model.layer.weight.grad.clone())
            optimizer.step()
            optimizer.zero_grad()

    return collect_reports(train), gradients[0]


def test_a_layer_that_is_checkpointed_twice_by_reentrant_passes_is_reported_once(pair):
    (reports, first), (others, second) = pair.run(train_checkpointed, True, [])
    assert not torch.equal(first, second)
    assert len(reports) == 1
    assert "layer.weight, layer.bias received several" in reports[0]
    assert "use_reentrant=False" in reports[0]
    assert others == []


@pytest.mark.parametrize(
    ("use_reentrant", "handlers"),
    [(False, []), (True, [DistributedDataParallelKwargs(static_graph=True)])],
    ids=["not reentrant", "static graph"],
)
def test_the_cures_of_a_layer_that_is_checkpointed_twice_average_its_gradients(pair, use_reentrant, handlers):
    (reports, first), (_, second) = pair.run(train_checkpointed, use_reentrant, handlers)
    assert torch.equal(first, second)
    assert reports == []


@pytest.mark.parametrize(
    "options", [{}, {"fsdp_plugin": FullyShardedDataParallelPlugin()}], ids=["replicated", "sharded"]
)
def test_a_backward_pass_without_any_prepared_model_is_reported_once(pair, options):
    def train():
        return collect_reports(lambda: train_without_prepare(**options))

    (message,), other = pair.run(train)
    assert other == []
    assert "no model is prepared" in message
    assert "test_averaging.py:" in message


# Parameters outside of prepared models ------------------------------------------------------


def train_unprepared_model():
    accelerator, model = Accelerator(), Autoencoder()
    optimizer = accelerator.prepare(torch.optim.SGD(model.named_parameters(), lr=0.1))
    for _ in range(2):
        run_step(accelerator, optimizer, model(draw_batch()).sum())


def train_a_parameter_outside_the_model():
    accelerator, model = Accelerator(), Autoencoder()
    scale = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    run_step(accelerator, optimizer, (model(draw_batch()) * scale).sum())


def unfreeze_late():
    accelerator, model = Accelerator(), Autoencoder()
    model.encoder.requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    run_step(accelerator, optimizer, model(draw_batch()).sum())
    model.encoder.requires_grad_(requires_grad=True)
    run_step(accelerator, optimizer, model(draw_batch()).sum())


@pytest.mark.parametrize(
    ("train", "parts"),
    [
        (
            train_unprepared_model,
            ["SGD trains 4 parameters", "encoder.weight [3, 2], ", "give their model to prepare()"],
        ),
        (
            train_a_parameter_outside_the_model,
            ["trains 1 parameters", "parameter 4 of group 0 [1]", "no prepared model"],
        ),
        (
            unfreeze_late,
            ["trains 2 parameters", "encoder.weight [3, 2], encoder.bias [3]", "set requires_grad before"],
        ),
    ],
)
def test_an_optimizer_whose_parameters_are_not_averaged_is_reported_once(pair, train, parts):
    messages, other = pair.run(collect_reports, train)
    assert other == []
    (message,) = [text for text in messages if "whose gradients are not averaged" in text]
    assert all(part in message for part in parts), message


def train_ddp_model():
    accelerator = Accelerator()
    model = DistributedDataParallel(Autoencoder())
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run_step(accelerator, optimizer, model(draw_batch()).sum())


def train_half_of_the_model():
    accelerator, model = Accelerator(), Autoencoder()
    model.encoder.requires_grad_(requires_grad=False)
    unused = nn.Parameter(torch.ones(1))  # it gets no gradient
    optimizer = torch.optim.SGD([*model.parameters(), unused], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    run_step(accelerator, optimizer, model(draw_batch()).sum())


@pytest.mark.parametrize("train", [train_ddp_model, train_half_of_the_model])
def test_an_optimizer_of_prepared_models_is_not_reported(pair, train):
    assert pair.run(collect_reports, train) == [[], []]


@pytest.mark.parametrize("train", [call_the_model, train_unprepared_model])
def test_a_single_process_reports_nothing(alone, train):
    assert alone.run(collect_reports, train) == [[]]


def test_a_model_that_is_unwrapped_and_prepared_again_is_one_model(ranks, tmp_path):
    def train(folder):
        with collect_messages("accel_runtime.checks") as messages:
            accelerator = Accelerator()
            model = nn.Linear(2, 1)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            for _ in range(2):
                for _ in range(3):
                    accelerator.backward(model(torch.ones(1, 2) * accelerator.process_index).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                model = accelerator.prepare(accelerator.unwrap_model(model))
        accelerator.save_state(folder)
        return messages, len(accelerator._run.prepared.models), model.weight.tolist()

    results = ranks.run(train, tmp_path / "saved")
    assert {(len(messages), count) for messages, count, _ in results} == {(0, 1)}
    assert len({str(weights) for *_, weights in results}) == 1
    assert not list((tmp_path / "saved").glob("model_1*"))


def train_models_that_share_an_encoder(bypasses):
    accelerator, encoder = Accelerator(), nn.Linear(2, 2)
    first, second = nn.Sequential(encoder, nn.Linear(2, 1)), nn.Sequential(encoder, nn.Linear(2, 2))
    optimizer = torch.optim.SGD([*first.parameters(), *second[1].parameters()], lr=0.1)
    prepared, other, optimizer = accelerator.prepare(first, second, optimizer)
    for model in (prepared, second if bypasses else other):
        accelerator.backward(model(draw_batch()).sum())
    optimizer.step()


@pytest.mark.parametrize("bypasses", [False, True])
def test_models_that_share_a_module_are_told_apart(pair, bypasses):
    messages, _ = pair.run(collect_reports, train_models_that_share_an_encoder, bypasses)
    assert len(messages) == bypasses
    assert all(BYPASSED in message for message in messages)
