"""Copies of a model run their own modules."""

from __future__ import annotations

from functools import partial
from types import MethodType

import pytest
import torch
from torch import nn

from accel_runtime.foundation.precision import FORMATS
from accel_runtime.training.compile import copy_modules
from accel_runtime.training.precision import Autocast, AutocastForward


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.by_name = {"first": (self.blocks[0], 1)}
        self.ran = []
        self.register_forward_pre_hook(partial(_run_hook, self))

    def forward(self, x):
        for block in [self.by_name["first"][0], self.blocks[1]]:
            x = block(x)
            self.ran.append(block)
        return x


def _run_hook(owner, model, _):
    model.ran.append(owner)


class Wrapper:
    def __init__(self, model):
        self.inner = model.forward

    def __call__(self, x):
        return self.inner(x)

    def run(self, x):
        return self.inner(x)


def wrap_in_closure(model):
    forward = model.forward
    return lambda x: forward(x) * 1


WAYS = {
    "of the class": lambda _: None,
    "bound": lambda model: MethodType(lambda self, x: type(self).forward(self, x), model),
    "partial": lambda model: partial(type(model).forward, model),
    "closure": wrap_in_closure,
    "decorated": lambda model: torch.no_grad()(model.forward),
    "callable object": Wrapper,
    "method of another object": lambda model: Wrapper(model).run,
    "autocast": lambda model: AutocastForward(model.forward, Autocast(FORMATS["no"], "cpu", {})),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_runs_its_own_modules_however_its_instance_defines_forward(way):
    model = Model()
    if (forward := WAYS[way](model)) is not None:
        model.forward = forward
    copies = copy_modules(model)
    copied = copies[model]
    copied.ran = []
    torch.testing.assert_close(copied(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert copied.ran == [copied, *copied.blocks]
    assert model.ran == [model, *model.blocks]
    assert not {*copied.modules()} & {*model.modules()}
    assert [id(p) for p in copied.parameters()] == [id(p) for p in model.parameters()]


def test_a_copy_shares_what_contains_no_module_of_it():
    model = Model()
    model.config, model.other, model.on_step = {"a": [1]}, Wrapper(model), Wrapper(model).run
    copied = copy_modules(model)[model]
    assert (copied.config, copied.other, copied.on_step) == (model.config, model.other, model.on_step)
    assert copied.config is model.config


def _call_original(x):
    return _ORIGINAL(x)  # noqa: F821 - a script defines it later


def test_a_method_that_runs_the_model_through_a_global_variable_is_rejected(monkeypatch):
    model = Model()
    monkeypatch.setitem(globals(), "_ORIGINAL", model.forward)
    model.forward = _call_original
    with pytest.raises(
        ValueError, match=r"Cannot copy Model: _call_original\(\) .* global variable '_ORIGINAL'"
    ):
        copy_modules(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_is_not_copied():
    with pytest.raises(ValueError, match="RecursiveScriptModule in it is scripted"):
        copy_modules(nn.Sequential(torch.jit.script(nn.Linear(2, 2))))
