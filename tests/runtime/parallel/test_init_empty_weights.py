"""Models on the meta device, or on another device."""

from __future__ import annotations

import pytest
import torch
from support.training.models import TiedNet
from torch import nn

from accel_runtime import init_empty_weights, init_on_device


def build_model():
    """Return a model with a tied, a frozen and a missing parameter, and with buffers."""
    model = TiedNet()
    model.norm = nn.BatchNorm1d(3)
    model.register_parameter("none", None)
    model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    model.register_buffer("positions", torch.arange(3))
    return model


def test_parameters_are_on_meta_and_buffers_keep_their_values():
    with init_empty_weights():
        model = build_model()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.positions.tolist() == [0, 1, 2]
    assert not model.norm.running_mean.is_meta
    assert model.second.weight is model.first.weight
    assert not model.frozen.requires_grad
    assert not next(nn.Linear(1, 1).parameters()).is_meta, "outside, everything is as it was"


def test_include_buffers_puts_all_tensors_on_meta():
    with init_empty_weights(include_buffers=True):
        model = build_model()
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_init_on_the_default_device_changes_nothing():
    torch.manual_seed(0)
    with init_on_device("cpu"):
        there = nn.Linear(2, 2)
    torch.manual_seed(0)
    assert torch.equal(there.weight, nn.Linear(2, 2).weight)


def test_lazy_parameters_stay_uninitialized():
    with init_empty_weights():
        assert nn.LazyLinear(2).has_uninitialized_params()


def test_an_exception_ends_the_context():
    with pytest.raises(ZeroDivisionError), init_empty_weights():
        raise ZeroDivisionError
    assert not nn.Linear(1, 1).weight.is_meta


def test_attributes_of_a_parameter_are_kept():
    parameter = nn.Parameter(torch.ones(2))
    parameter.rank_of_words = 3
    with init_empty_weights():
        model = nn.ParameterList([parameter])
    assert model[0].is_meta
    assert model[0].rank_of_words == 3
