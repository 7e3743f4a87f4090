"""Activation checkpointing: equal gradients with less memory."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from accel_runtime import Accelerator
from accel_runtime.parallel import fsdp_units as activations
from accel_runtime.parallel.fsdp_units import find_units


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 32), nn.Linear(32, 8), nn.Dropout(0.3)
        self.runs = 0

    def forward(self, x, *, scale=1.0):
        if not torch.compiler.is_compiling():
            self.runs += 1
        return x + scale * self.down(self.drop(self.up(x).relu()))


class Model(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x.sin()


def compute_gradients(model):
    torch.manual_seed(5)
    model(torch.linspace(-1, 1, 32).view(4, 8)).square().sum().backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[name] = getattr(parameter.grad, "full_tensor", lambda g=parameter.grad: g)()
    return gradients


def count_saved_bytes(model):
    size_by_storage = {}

    def pack(tensor):
        size_by_storage[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.ones(64, 8))
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return sum(size for storage, size in size_by_storage.items() if storage not in parameters)


def test_gradients_are_equal_with_dropout_and_names_are_kept():
    plain, checkpointed = Model(), Model()
    activations.checkpoint_activations(checkpointed, find_units(checkpointed, "Block"))
    torch.testing.assert_close(compute_gradients(checkpointed), compute_gradients(plain), rtol=0, atol=0)
    assert list(checkpointed.state_dict()) == list(plain.state_dict())
    assert [type(layer) for layer in checkpointed.layers] == [Block] * 3
    assert [layer.runs for layer in checkpointed.layers] == [2] * 3
    assert count_saved_bytes(checkpointed) < count_saved_bytes(plain) / 2


def test_nothing_is_recomputed_without_gradients():
    model = Model()
    activations.checkpoint_activations(model, find_units(model, "Block"))
    with torch.no_grad():
        model(torch.ones(2, 8))
    assert [layer.runs for layer in model.layers] == [1] * 3


def test_only_the_innermost_units_are_checkpointed_once():
    model = nn.ModuleDict({"a": Model(1), "b": Model(2)})
    units = find_units(model, "Model,Block")
    activations.checkpoint_activations(model, units)
    activations.checkpoint_activations(model, units)
    assert sorted(name for name, _ in activations.innermost_units(units)) == [
        "a.layers.0",
        "b.layers.0",
        "b.layers.1",
    ]
    assert not activations.is_checkpointed(model["a"])
    assert not isinstance(model["a"].layers[0].forward.forward, activations.CheckpointedForward)


def test_a_model_without_units_is_warned_about(caplog):
    activations.checkpoint_activations(Model(), [])
    assert (
        "activation_checkpointing has no effect on Model: fully_shard.wrap selects no module" in caplog.text
    )


class Renamed:
    """A model of transformers 5, which warns of the earlier name."""

    is_activation_checkpointing = True

    @property
    def is_gradient_checkpointing(self):
        warnings.warn("deprecated", FutureWarning, stacklevel=2)
        return True


@pytest.mark.parametrize(
    "model", [SimpleNamespace(is_gradient_checkpointing=True), Renamed()], ids=["earlier", "renamed"]
)
def test_a_model_with_its_own_checkpointing_is_rejected(model):
    with pytest.raises(ValueError, match="Use one of them"):
        activations.checkpoint_activations(model, [("a", nn.Linear(1, 1))])


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize(
    ("regional", "backend"),
    [
        pytest.param(False, "aot_eager", id="the model-aot_eager"),
        pytest.param(True, "eager", id="its blocks-eager"),
        pytest.param(False, "eager", id="the model-eager", marks=pytest.mark.full),
        pytest.param(True, "aot_eager", id="its blocks-aot_eager", marks=pytest.mark.full),
    ],
)
def test_compiled_modules_are_recomputed(regional, backend):
    plain, checkpointed = Model(), Model()
    activations.checkpoint_activations(checkpointed, find_units(checkpointed, "Block"))
    for module in checkpointed.layers if regional else [checkpointed]:
        module.compile(backend=backend)
    for layer in [*plain.layers, *checkpointed.layers]:
        layer.drop.p = 0.0  # the compiler draws random numbers in another order
    torch.testing.assert_close(compute_gradients(checkpointed), compute_gradients(plain))
    if backend == "aot_eager":
        assert count_saved_bytes(checkpointed) < count_saved_bytes(plain)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("nested", [False, True])
def test_sharded_modules_have_equal_gradients(reshard, nested, pair):
    def trained(reshard, nested):
        Accelerator()
        gradients = []
        for is_checkpointed in (False, True):
            model = Model()
            units = find_units(model, "Block,Linear" if nested else "Block")
            if is_checkpointed:
                activations.checkpoint_activations(model, find_units(model, "Block"))
            for _, module in units:
                fully_shard(module, reshard_after_forward=reshard)
            fully_shard(model)
            gradients.append(compute_gradients(model))
            gradients.append(compute_gradients(model))
        return gradients

    for plain, twice, is_checkpointed, again_twice in pair.run(trained, reshard, nested):
        torch.testing.assert_close(is_checkpointed, plain, rtol=0, atol=0)
        torch.testing.assert_close(again_twice, twice, rtol=0, atol=0)
