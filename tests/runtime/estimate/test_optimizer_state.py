"""The state of an optimizer, measured in a step that computes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_runtime.estimate.memory import OPTIMIZERS, EstimateError, build_optimizer, measure_state


def model_of(device="meta"):
    with torch.device(device):
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    model[1].bias.requires_grad_(False)
    return model


def real_state(make):
    model = model_of("cpu")
    optimizer = make(model)
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    return sum(
        value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def local(model):
    return {p: tuple(p.shape) for p in model.parameters()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_every_optimizer_with_a_name_is_that_of_a_real_step(name):
    model = model_of()
    whole = measure_state(build_optimizer(model, name), local(model))
    assert whole == real_state(lambda real: build_optimizer(real, name))
    assert (whole == 0) == (name == "sgd")


def test_an_optimizer_with_groups_is_stepped_over_the_parts():
    model = model_of()
    groups = [{"params": model[0].parameters(), "weight_decay": 0.1}, {"params": [model[1].weight]}]
    optimizer = build_optimizer(model, torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    parts = {p: (shape[0] // 2, *shape[1:]) for p, shape in local(model).items()}
    assert measure_state(optimizer, parts) == (2 * 6 + 2 + 1 * 4) * 4
    assert measure_state(optimizer, local(model)) == (4 * 6 + 4 + 2 * 4) * 4, (
        "a second question finds it as it was"
    )
    assert optimizer.param_groups[1]["params"][0] is model[1].weight


def test_state_that_is_there_before_the_first_step_is_that_of_the_part():
    model = model_of()
    optimizer = build_optimizer(model, torch.optim.Adagrad)
    halves = {p: (shape[0] // 2, *shape[1:]) for p, shape in local(model).items()}
    steps = 3 * 4
    assert measure_state(optimizer, halves) - steps == (measure_state(optimizer, local(model)) - steps) / 2


def test_a_model_that_learns_nothing_has_no_state():
    model = model_of().requires_grad_(False)
    assert measure_state(build_optimizer(model, "adamw"), local(model)) == 0


def test_half_precision_parameters_have_state_of_their_own_format():
    model = model_of().bfloat16()
    steps = 3 * 4
    assert measure_state(build_optimizer(model, "adamw"), local(model)) == 2 * 2 * (24 + 4 + 8) + steps


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ("adamm", "Invalid --optimizer 'adamm': expected one of adamw, adam, "),
        (lambda p: p, "the factory's optimizer returned list"),
        (
            lambda p: torch.optim.SGD(p, momentum=-1),
            "could not be created: .*momentum",
        ),
        (torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=1), r"not in the model, the first of shape \[3\]"),
    ],
)
def test_what_is_no_optimizer_of_the_model_is_said(chosen, said):
    with pytest.raises(EstimateError, match=said):
        build_optimizer(model_of(), chosen)


def test_an_optimizer_that_cannot_step_without_numbers_is_named():
    model = model_of()
    optimizer = build_optimizer(model, torch.optim.LBFGS)
    with pytest.raises(EstimateError, match="the state of LBFGS cannot be measured"):
        measure_state(optimizer, local(model))
