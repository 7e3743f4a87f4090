"""Activations measured on the meta device, compared with a real forward pass."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pytest
import torch
from support.training.models import LanguageModel, TransformerLayer
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from accel_runtime.extensions.estimate.memory import EstimateError, ModelSpec, measure_activations, read_plan


def build_model():
    """Return a model with a tensor-parallel plan and a buffer."""
    model = LanguageModel(40, 32, 4, depth=3, dropout=0.1, tied=False)
    model.register_buffer("scale", torch.ones(32))
    model.tp_plan = {
        "layers.*.attention.q": "colwise",
        "layers.*.attention.k": "colwise",
        "layers.*.attention.v": "colwise",
        "layers.*.attention.o": "rowwise",
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
        "head": "colwise_rep",
    }
    return model


class StorageRecorder(TorchDispatchMode):
    """Records the storages of all tensors that operators return."""

    def __init__(self):
        super().__init__()
        self.storages = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.storages[leaf.untyped_storage()] = None
        return out


def count_alive_bytes(model, batch, dtype=None):
    """Return the bytes alive after a real forward pass, without parameters and buffers, by tracking storages."""
    model_storages = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    with StorageRecorder() as recorder, torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
        loss = model(**batch)
    inputs = [value.untyped_storage() for value in batch.values()]
    size_by_storage = {
        s.data_ptr(): s.nbytes() for s in (*recorder.storages, *inputs, loss.untyped_storage())
    }
    return sum(size for pointer, size in size_by_storage.items() if pointer not in model_storages)


def count_saved_bytes(model, batch, dtype=None):
    """Return the bytes that a real forward pass saves for autograd, with inputs and outputs."""
    model_storages = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    tensors = [*batch.values()]
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: (tensors.append(t), t)[1], lambda t: t),
        torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext(),
    ):
        tensors.append(model(**batch))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for pointer, size in storages.items() if pointer not in model_storages)


@dataclass
class Case:
    model: nn.Module
    batch: dict[str, torch.Tensor]

    def measured(self, **options):
        return measure_activations(ModelSpec(self.model, self.batch), list(self.model.layers), **options)


@pytest.fixture
def meta():
    with torch.device("meta"):
        return Case(build_model(), build_batch())


def build_batch():
    return {"words": torch.zeros(4, 16, dtype=torch.long), "labels": torch.zeros(4, 16, dtype=torch.long)}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_measured_activations_equal_the_saved_tensors_of_a_forward_pass(meta, dtype):
    assert meta.measured(autocast=dtype).full == count_saved_bytes(build_model(), build_batch(), dtype)


def test_measured_activations_equal_the_storages_alive_after_a_forward_pass(meta):
    assert meta.measured().full == count_alive_bytes(build_model(), build_batch())


def test_checkpointed_activations_are_those_of_torch_plus_one_layer(meta):
    real = build_model()
    inside = count_saved_bytes(
        TransformerLayer(32, 4, dropout=0.1), {"x": torch.zeros(4, 16, 32, requires_grad=True)}
    )
    for index, layer in enumerate(real.layers):
        real.layers[index] = checkpoint_wrapper(layer, CheckpointImpl.NO_REENTRANT)
    activations = meta.measured()
    # The layer's input is kept anyway; its output is not saved by the layer itself.
    row = 4 * 16 * 32 * 4
    assert activations.checkpointed == count_alive_bytes(real, build_batch()) + inside - 2 * row
    assert activations.checkpointed < activations.full


def test_the_largest_activation_is_measured(meta):
    assert meta.measured().largest == 4 * 16 * 64 * 4


def test_parameters_gathered_in_bfloat16_are_not_cast_again(meta):
    cast = meta.measured(autocast=torch.bfloat16).full
    gathered = meta.measured(autocast=torch.bfloat16, gathered=torch.bfloat16).full
    weights = sum(
        p.numel() * 2 for name, p in meta.model.named_parameters() if p.ndim == 2 and name != "embed.weight"
    )
    assert cast - gathered >= weights


def test_tp_divides_the_activations_of_sharded_layers(meta):
    division = read_plan(meta.model)
    assert division.gathered == ("head",)
    full, half = meta.measured(), meta.measured(tp=2, plan=division)
    # q, k, v, what attention gives back, its sums; up and gelu's: half as much on each of three layers.
    parts = 4 * 16 * (4 * 32 + 4 + 2 * 64) * 4
    assert full.full - half.full == 3 * parts // 2


def test_measuring_leaves_no_hooks_on_the_model(meta):
    meta.measured()
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in meta.model.modules())
    assert all(p.is_meta for p in meta.model.parameters())


def test_inputs_can_be_a_tensor_a_sequence_or_a_dict():
    with torch.device("meta"):
        model, x = nn.Linear(4, 4), torch.zeros(2, 4)
    activations = {
        measure_activations(ModelSpec(model, inputs), []).full for inputs in (x, (x,), [x], {"input": x})
    }
    assert activations == {2 * 4 * 4 * 2}


def test_the_loss_is_part_of_the_activations():
    with torch.device("meta"):
        model, x = nn.Linear(4, 4), torch.zeros(2, 4)
    activations = measure_activations(ModelSpec(model, x, loss=lambda out: out.exp().sum()), []).full
    assert activations == 2 * 4 * 4 * 3 + 4, "input, output, its exponential, and the loss"


def test_a_failed_forward_pass_reports_its_line_and_leaves_no_hook():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3)])

        def forward(self, x):
            return {}["nothing", x.shape]

    with torch.device("meta"):
        model = Wrong()
    with pytest.raises(EstimateError, match=r"test_activations.py:\d+: KeyError: ") as raised:
        measure_activations(ModelSpec(model, torch.zeros(1, 3, device="meta")), list(model.layers))
    assert raised.value.__cause__ is None
    assert not model.layers[0]._forward_hooks
