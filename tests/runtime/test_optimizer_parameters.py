"""Optimizers created before a model was sharded train the replaced parameters."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from accel_runtime.parallel.fully_shard import ParameterMap


def replaced(model):
    """Replace the parameters of a model by equal ones, and return the map from old to new."""
    before, parameter_map = dict(model.named_parameters(remove_duplicate=False)), ParameterMap()
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(old.detach().clone()))
    parameter_map.add(before, model)
    return parameter_map


def test_an_optimizer_trains_the_new_parameters_in_the_old_groups():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    groups = [{"params": list(model[1].parameters()), "lr": 0.5}, {"params": list(model[0].parameters())}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    replaced(model).replace_parameters(optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    for group, layer in zip(optimizer.param_groups, (model[1], model[0]), strict=True):
        assert [id(p) for p in group["params"]] == [id(p) for p in layer.parameters()]


def test_the_state_of_an_optimizer_is_moved_to_the_new_parameters():
    model = nn.Linear(2, 2)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(source.parameters(), lr=0.1) for source in (model, twin)]
    for step in range(2):
        if step:
            replaced(model).replace_parameters(optimizers[0])
        for source, optimizer in zip((model, twin), optimizers, strict=True):
            source(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(model.weight, twin.weight)


def test_an_optimizer_with_its_own_list_of_parameters_is_updated():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters())
    replaced(model).replace_parameters(optimizer)
    assert {id(p) for p in optimizer._params} == {id(p) for p in model.parameters()}


def test_replaced_parameters_are_freed():
    model = nn.Linear(2, 2)
    gone = weakref.ref(model.weight)
    parameter_map = replaced(model)
    gc.collect()
    assert gone() is None
    assert parameter_map is not None


def test_parameters_of_unprepared_models_are_rejected_before_a_step():
    model, other = nn.Linear(2, 2), nn.Linear(3, 3)
    parameter_map = replaced(model)
    parameter_map.check(torch.optim.SGD(model.parameters()), [model])
    with pytest.raises(
        ValueError,
        match=r"SGD cannot step: 2 of its parameters, the first of shape \[3, 3\]",
    ):
        parameter_map.check(torch.optim.SGD([*model.parameters(), *other.parameters()]), [model])
