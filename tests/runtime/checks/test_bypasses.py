"""Each of the five changed lines of a script can be forgotten: that is reported once, or changes nothing."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from support.cases.log_messages import collect_messages
from torch import nn
from torch.utils.data import DataLoader

from accel_runtime import Accelerator

PREPARED = ("model", "optimizer", "loader", "scheduler")


def train(*, forgotten="", unused="", options=None):
    """Train for eight micro-batches; return the messages on this rank, the weights and the learning rate.

    `forgotten` is `backward` or what is not prepared; the prepared objects in `unused` are not used.
    """
    torch.manual_seed(0)
    # torch's own, since the scheduler is called more often than the optimizer steps.
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
    with collect_messages("accel_runtime") as messages:
        accelerator = Accelerator(**(options or {}))
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        objects = {
            "model": model,
            "optimizer": optimizer,
            "loader": DataLoader(torch.randn(16 * accelerator.num_processes, 2), batch_size=2),
            "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9),
        }
        names = [name for name in PREPARED if name != forgotten]
        prepared = dict(zip(names, accelerator.prepare(*(objects[name] for name in names)), strict=True))
        used = objects | {name: item for name, item in prepared.items() if name not in unused.split()}
        for batch in used["loader"]:
            with accelerator.accumulate(used["model"]):
                loss = used["model"](batch).square().mean()
                loss.backward() if forgotten == "backward" else accelerator.backward(loss)
                used["optimizer"].step()
                used["scheduler"].step()
                used["optimizer"].zero_grad()
        weights = model.weight.detach().clone()
        accelerator.free_memory()
    return messages, weights, used["scheduler"].get_last_lr()


ACCUMULATION = {"gradient_accumulation_steps": 2}


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize(
    ("case", "options", "text"),
    [
        (
            {"forgotten": "backward"},
            ACCUMULATION,
            "The gradients in the step of SGD are 2 times too large, unless the script divides the loss itself, at test_",
        ),
        ({"forgotten": "optimizer"}, ACCUMULATION, "SGD steps in every micro-batch, not once in 2, at"),
        ({"unused": "optimizer"}, ACCUMULATION, "Call that of the optimizer that prepare() returned."),
        ({"unused": "model optimizer loader scheduler"}, ACCUMULATION, "SGD steps in every micro-batch"),
        ({"forgotten": "scheduler"}, ACCUMULATION, "StepLR advances in every micro-batch, not once in 2, at"),
        ({"unused": "scheduler"}, ACCUMULATION, "StepLR advances in every micro-batch, not once in 2, at"),
        ({"forgotten": "optimizer"}, {"mixed_precision": "fp16"}, "SGD steps with gradients of the scaled loss, at"),
        ({"forgotten": "model"}, {"mixed_precision": "bf16"}, "Mixed precision has no effect on the step of SGD, at"),
    ],
)  # fmt: skip
def test_a_forgotten_line_that_changes_the_training_is_reported_once(clusters, size, case, options, text):
    (messages, *_), *others = clusters[size].run(lambda: train(**case, options=options))
    assert len([message for message in messages if text in message]) == 1, messages
    assert all(other[0] == [] for other in others)


@pytest.mark.parametrize(
    "case",
    [{"forgotten": name} for name in ("backward", "optimizer", "loader", "model")]
    + [{"unused": name} for name in ("model", "optimizer", "loader")],
    ids=str,
)
def test_on_one_process_without_options_a_forgotten_line_changes_nothing(alone, case):
    (expected,) = alone.run(train)
    ((messages, weights, rate),) = alone.run(lambda: train(**case))
    assert messages == []
    assert torch.equal(weights, expected[1])
    assert rate == expected[2]


def test_a_forgotten_backward_with_loss_scaling_is_an_error(alone):
    with pytest.raises(RuntimeError, match=r"no loss was scaled.*Call accelerator\.backward\(loss\)"):
        train(forgotten="backward", options={"mixed_precision": "fp16"})


@pytest.mark.parametrize("name", ["model", "loader"])
def test_on_several_processes_an_unused_model_or_loader_is_reported(pair, name):
    (messages, *_), _ = pair.run(lambda: train(unused=name))
    expected = {"model": "Gradients of Linear are not averaged", "loader": "Ranks 0 and 1 train on the same"}
    assert [message[:30] for message in messages] == [expected[name][:30]]


@pytest.mark.parametrize(
    "options", [{}, ACCUMULATION, {"mixed_precision": "bf16"}, {"mixed_precision": "fp16"}], ids=str
)
def test_a_complete_script_is_not_reported(pair, options):
    assert [messages for messages, *_ in pair.run(lambda: train(options=options))] == [[], []]


def test_a_scheduler_of_epochs_and_a_closure_are_not_reported(alone):
    def epochs():
        with collect_messages("accel_runtime") as messages:
            accelerator = Accelerator(gradient_accumulation_steps=2)
            model, optimizer = nn.Linear(2, 1), None
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            model, optimizer = accelerator.prepare(model, optimizer)
            for _ in range(4):
                for _ in range(4):
                    with accelerator.accumulate(model):
                        accelerator.backward(model(torch.ones(1, 2)).sum())
                        optimizer.step()
                        optimizer.zero_grad()
                scheduler.step()
        return messages

    assert alone.run(epochs) == [[]]


# Accumulation without `accumulate` ----------------------------------------------------------


def count_step(accelerator, model, optimizer, *, steps=True, weight=None):
    accelerator.backward(model(torch.ones(1, 2)).sum(), weight=weight)
    if steps:
        optimizer.step()
        optimizer.zero_grad()


def step_each_batch(accelerator, model, optimizer):
    for _ in range(4):
        count_step(accelerator, model, optimizer)


def step_each_batch_with_weights(accelerator, model, optimizer):
    for _ in range(4):
        count_step(accelerator, model, optimizer, weight=2)


def accumulate_by_a_condition(accelerator, model, optimizer):
    for _ in range(2):
        for number in range(1, 6):  # the last cycle of an epoch has one micro-batch
            count_step(accelerator, model, optimizer, steps=number % 4 == 0 or number == 5)


def accumulate_by_another_condition(accelerator, model, optimizer):
    for number in range(9):
        count_step(accelerator, model, optimizer, steps=number % 4 == 0)


def accumulate_by_no_sync(accelerator, model, optimizer):
    for _ in range(4):
        with accelerator.no_sync(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
        count_step(accelerator, model, optimizer)


def set_the_end_of_cycles(accelerator, model, optimizer):
    for number in range(4):
        accelerator.sync_gradients = number % 2 == 1
        count_step(accelerator, model, optimizer)


def accumulate_before_a_warm_up(accelerator, model, optimizer):
    with accelerator.accumulate(model):
        count_step(accelerator, model, optimizer)
    step_each_batch(accelerator, model, optimizer)


def collect_warnings(loop, steps=4):
    with collect_messages("accel_runtime") as messages:
        accelerator = Accelerator(gradient_accumulation_steps=steps)
        model = nn.Linear(2, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
        loop(accelerator, model, optimizer)
        accelerator.free_memory()
    return [message for message in messages if "Ranks 0 and 1 train on the same batch" not in message]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("loop", "part"),
    [(step_each_batch, ", with 1/4 of its gradients, at"), (step_each_batch_with_weights, ", at")],
)
def test_steps_after_each_backward_without_accumulate_are_reported_once(clusters, size, loop, part):
    messages, *others = clusters[size].run(lambda: collect_warnings(loop))
    (message,) = messages
    assert message.startswith(f"SGD steps in every micro-batch, not once in 4{part}")
    assert "inside `with accelerator.accumulate(model):`, or remove gradient_accumulation_steps." in message
    assert all(other == [] for other in others)


@pytest.mark.parametrize(
    "loop",
    [
        accumulate_by_a_condition,
        accumulate_by_another_condition,
        accumulate_by_no_sync,
        set_the_end_of_cycles,
        accumulate_before_a_warm_up,
    ],
)
def test_a_script_with_cycles_of_its_own_is_not_reported(alone, loop):
    assert alone.run(lambda: collect_warnings(loop)) == [[]]


def test_steps_after_each_backward_without_accumulation_are_not_reported(alone):
    assert alone.run(lambda: collect_warnings(step_each_batch, steps=1)) == [[]]


# Optimizers of other parameters -------------------------------------------------------------


def train_with_optimizer_of(
    parameters, *, mixed_precision="no", prepared_first=False, adds_temperature=False
):
    with collect_messages("accel_runtime") as messages:
        accelerator = Accelerator(mixed_precision=mixed_precision)
        torch.manual_seed(0)
        model, temperature = nn.Linear(2, 1), nn.Parameter(torch.ones(()))
        optimizer = torch.optim.SGD(parameters(model, temperature), 0.01)
        if prepared_first:
            optimizer = accelerator.prepare(optimizer)
            model = accelerator.prepare(model)
        else:
            model, optimizer = accelerator.prepare(model, optimizer)
        for number in range(4):
            loss = model(torch.ones(1, 2)).square().sum()
            accelerator.backward(loss * temperature if adds_temperature else loss)
            if number != 1:
                optimizer.step()
            optimizer.zero_grad()
        accelerator.free_memory()
    return [message for message in messages if "Ranks 0 and 1 train on the same batch" not in message]


def parameters_of_a_copy(model, _):
    return copy.deepcopy(model).parameters()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("mixed_precision", ["no", "fp16"])
def test_an_optimizer_of_another_model_is_reported_once(clusters, size, mixed_precision):
    messages, *others = clusters[size].run(
        lambda: train_with_optimizer_of(parameters_of_a_copy, mixed_precision=mixed_precision)
    )
    (message,) = messages
    assert message.startswith("The steps of SGD change nothing, at test_bypasses.py:")
    assert "Create the optimizer from the parameters of the model that is trained" in message
    assert all(other == [] for other in others)


@pytest.mark.parametrize("prepared_first", [False, True])
@pytest.mark.parametrize("trains", ["model", "temperature"])
def test_an_optimizer_of_parameters_that_are_trained_is_not_reported(alone, trains, prepared_first):
    def run():
        return train_with_optimizer_of(
            lambda model, temperature: model.parameters() if trains == "model" else [temperature],
            prepared_first=prepared_first,
            adds_temperature=trains == "temperature",
        )

    assert alone.run(run) == [[]]
