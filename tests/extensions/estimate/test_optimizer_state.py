"""The state of an optimizer, measured in a step on the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_runtime.extensions.estimate.memory import OPTIMIZERS, EstimateError, build_optimizer, measure_state


def build_model(device="meta"):
    with torch.device(device):
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    model[1].bias.requires_grad_(False)
    return model


def measure_real_state(make):
    model = build_model("cpu")
    optimizer = make(model)
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    return sum(
        value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def list_local_shapes(model):
    return {p: tuple(p.shape) for p in model.parameters()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_every_named_optimizer_equals_that_of_a_real_step(name):
    model = build_model()
    full = measure_state(build_optimizer(model, name), list_local_shapes(model))
    assert full == measure_real_state(lambda real: build_optimizer(real, name))
    assert (full == 0) == (name == "sgd")


def test_the_state_of_an_optimizer_with_groups_is_measured_for_shards():
    model = build_model()
    groups = [{"params": model[0].parameters(), "weight_decay": 0.1}, {"params": [model[1].weight]}]
    optimizer = build_optimizer(model, torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    parts = {p: (shape[0] // 2, *shape[1:]) for p, shape in list_local_shapes(model).items()}
    assert measure_state(optimizer, parts) == (2 * 6 + 2 + 1 * 4) * 4
    assert measure_state(optimizer, list_local_shapes(model)) == (4 * 6 + 4 + 2 * 4) * 4, (
        "a second question finds it as it was"
    )
    assert optimizer.param_groups[1]["params"][0] is model[1].weight


def test_state_created_before_the_first_step_is_measured_for_shards():
    model = build_model()
    optimizer = build_optimizer(model, torch.optim.Adagrad)
    halves = {p: (shape[0] // 2, *shape[1:]) for p, shape in list_local_shapes(model).items()}
    steps = 3 * 4
    assert (
        measure_state(optimizer, halves) - steps
        == (measure_state(optimizer, list_local_shapes(model)) - steps) / 2
    )


def test_a_frozen_model_has_no_optimizer_state():
    model = build_model().requires_grad_(False)
    assert measure_state(build_optimizer(model, "adamw"), list_local_shapes(model)) == 0


def test_bfloat16_parameters_have_bfloat16_optimizer_state():
    model = build_model().bfloat16()
    steps = 3 * 4
    assert (
        measure_state(build_optimizer(model, "adamw"), list_local_shapes(model))
        == 2 * 2 * (24 + 4 + 8) + steps
    )


@pytest.mark.parametrize(
    ("chosen", "message"),
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
def test_an_invalid_optimizer_is_rejected(chosen, message):
    with pytest.raises(EstimateError, match=message):
        build_optimizer(build_model(), chosen)


def test_an_optimizer_that_cannot_step_on_the_meta_device_is_named():
    model = build_model()
    optimizer = build_optimizer(model, torch.optim.LBFGS)
    with pytest.raises(EstimateError, match="the state of LBFGS cannot be measured"):
        measure_state(optimizer, list_local_shapes(model))
