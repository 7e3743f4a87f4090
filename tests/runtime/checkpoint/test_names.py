"""Every parameter has one name, independent of the wrappers of its model."""

from __future__ import annotations

import torch
from support.training.models import TiedNet
from torch import nn

from accel_runtime import Accelerator
from accel_runtime.training.accumulation import Accumulation
from accel_runtime.training.gradients import name_parameters
from accel_runtime.training.optimizer import PreparedOptimizer


def list_parameter_names(*, compiled=False):
    accelerator = Accelerator(cpu=True)
    first, second, alone = TiedNet(2), nn.Linear(2, 1), nn.Parameter(torch.zeros(3))
    groups = [{"params": list(first.parameters())}, {"params": [second.bias, alone]}]
    first, second, optimizer = accelerator.prepare(
        torch.compile(first, backend="eager") if compiled else first, second, torch.optim.SGD(groups, lr=0.1)
    )
    return list(
        name_parameters(
            [accelerator._run.strategy.unwrap_model(model) for model in (first, second)],
            [optimizer.parameter_groups],
        ).values()
    )


NAMES = [
    "model.first.weight",
    "model.first.bias",
    "model.second.bias",
    "model_1.weight",
    "model_1.bias",
    "optimizer.1.1",
]


def test_each_parameter_has_one_name_on_any_world_size(ranks):
    assert ranks.run(list_parameter_names) == [NAMES] * ranks.size


def test_a_compiled_model_keeps_its_parameter_names(alone):
    assert alone.run(lambda: list_parameter_names(compiled=True)) == [NAMES]


def test_a_parameter_of_two_models_is_named_after_the_first():
    model = nn.Linear(1, 1)
    assert set(name_parameters([model, nn.Sequential(model)], []).values()) == {
        "model.weight",
        "model.bias",
    }


def test_a_parameter_without_a_model_is_named_after_its_optimizer_and_group():
    loose = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    optimizers = [
        PreparedOptimizer(torch.optim.SGD(groups), Accumulation(1), None)
        for groups in (loose[:1], [{"params": []}, {"params": loose[1:]}])
    ]
    assert list(name_parameters([], [optimizer.parameter_groups for optimizer in optimizers]).values()) == [
        "optimizer.0.0",
        "optimizer_1.1.0",
        "optimizer_1.1.1",
    ]
