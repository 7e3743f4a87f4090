"""A checkpoint of each layout loads into each other one with all digits: weights, frozen ones too, buffers and optimizer state."""

from __future__ import annotations

import json
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file
from support.runs.zero_runs import connect, read_state
from torch import nn

from accel_runtime.utils import GradScalerKwargs

pytest.importorskip("deepspeed", reason="deepspeed is in an environment of its own: make test-deepspeed")

LAYOUTS = ("replicated", "fully_shard", "stage 1", "stage 2", "stage 3")
KINDS = ("frozen", "adapters", "tied", "buffers")
PRECISIONS = ("no", "bf16", "fp16")


class Net(nn.Module):
    """Layers whose sizes no world size divides, with one property that a layout may handle in another way."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 1)
        if kind == "frozen":
            self.first.requires_grad_(requires_grad=False)
            self.inner.bias.requires_grad_(requires_grad=False)
        if kind == "adapters":  # of a model that was loaded in bf16, but for its head
            self.first.to(torch.bfloat16)
            self.requires_grad_(requires_grad=False)
            self.down, self.up = nn.Linear(3, 2, bias=False), nn.Linear(2, 5, bias=False)
        if kind == "tied":
            self.other = nn.Linear(5, 5)
            self.other.weight = self.inner.weight
        if kind == "buffers":
            self.norm = nn.LayerNorm(5)
            self.register_buffer("mean", torch.full((5,), 1 / 3))
            self.register_buffer("rounded", torch.full((3,), 1 / 3, dtype=torch.bfloat16))
            self.register_buffer("count", torch.tensor(0))
            self.register_buffer("angles", torch.full((5,), 1 / 7), persistent=False)
        self.kind = kind

    def forward(self, x):
        if self.kind == "adapters":
            y = self.first(x.to(self.first.weight.dtype)).float() + self.up(self.down(x))
        else:
            y = self.first(x)
        if self.kind == "buffers":
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * x.mean())
                self.count.add_(1)
            y = self.norm(y) + self.mean + self.angles
        y = self.inner(torch.tanh(y))
        if self.kind == "tied":
            y = self.other(y)
        return self.head(torch.tanh(y))


def build(kind):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Net(kind)


def start(layout, precision, kind, file):
    """Return an Accelerator with a prepared model and optimizer; deepspeed and accel refuse fp16 on CPUs."""
    from unittest import mock

    from deepspeed.accelerator import get_accelerator

    from accel_runtime.extensions.deepspeed.strategy import DeepSpeedStrategy

    is_zero, in_fp16 = layout.startswith("stage"), precision == "fp16"
    if in_fp16:
        type(get_accelerator()).is_fp16_supported = lambda _: True
    settings = {"deepspeed_config_file": file} if is_zero and in_fp16 else {}
    handlers = [GradScalerKwargs(init_scale=32.0, growth_interval=7)] if in_fp16 and not is_zero else []
    with mock.patch.object(DeepSpeedStrategy, "check_options") if in_fp16 else nullcontext():
        accelerator = connect(layout, settings, mixed_precision=precision, kwargs_handlers=handlers)
    model = build(kind)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(trained, lr=0.01))


def train(accelerator, model, optimizer, steps):
    generator = torch.Generator().manual_seed(2 + accelerator.process_index)
    for _ in range(steps):
        rows = torch.randn(2, 3, generator=generator)
        accelerator.backward(model(rows).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def read(accelerator, model, optimizer):
    """Return the weights, the optimizer state, and the loss scale with the steps since its last change."""
    run = accelerator._run
    scaler = run.precision.scaler or run.strategy.loss_scale
    scale = {} if scaler is None else scaler.state_dict()
    weights, groups, states = read_state(accelerator, model, optimizer)
    return deepcopy((weights, groups, states, scale.get("scale"), scale.get("_growth_tracker")))


def save(layout, precision, kind, file, folder):
    """Train and save; return the state."""
    accelerator, model, optimizer = start(layout, precision, kind, file)
    first = accelerator.get_state_dict(model, everywhere=True)
    torch.testing.assert_close(first, dict(build(kind).state_dict()), atol=0, rtol=0)
    train(accelerator, model, optimizer, 3)
    accelerator.save_state(folder)
    accelerator.save_model(model, folder.with_suffix(".export"))
    return read(accelerator, model, optimizer)


def load(layout, precision, kind, file, folder):
    accelerator, model, optimizer = start(layout, precision, kind, file)
    train(accelerator, model, optimizer, 1)
    accelerator.load_state(folder)
    state = read(accelerator, model, optimizer)
    train(accelerator, model, optimizer, 1)
    return state


SHORT = ("stage 2", "replicated", "stage 3", "fully_shard", "stage 1", "replicated")


@pytest.mark.parametrize(
    ("precision", "kind"),
    [
        # Each kind of model with one precision.
        pytest.param(precision, kind, marks=[pytest.mark.full] * ((at + number) % len(PRECISIONS) != 0))
        for at, precision in enumerate(PRECISIONS)
        for number, kind in enumerate(KINDS)
    ],
)
@pytest.mark.parametrize("pairs", [
    pytest.param(list(pairwise(SHORT)), id="one after another"),
    pytest.param([(a, b) for a in LAYOUTS for b in LAYOUTS], id="all pairs", marks=pytest.mark.full),
])  # fmt: skip
def test_a_checkpoint_moves_between_layouts_with_all_digits_and_dtypes(
    clusters, tmp_path, kind, precision, pairs
):
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps({"fp16": {"enabled": True, "initial_scale_power": 4}}))
    dtypes = {name: value.dtype for name, value in build(kind).state_dict().items()}
    for before in dict.fromkeys(before for before, _ in pairs):
        folder = tmp_path / before
        expected = clusters[2].run(save, before, precision, kind, file, folder)
        weights = expected[0][0]
        assert {name: value.dtype for name, value in weights.items()} == dtypes
        exported = load_file(folder.with_suffix(".export") / "model.safetensors")
        torch.testing.assert_close(exported, {name: weights[name] for name in exported}, atol=0, rtol=0)
        for after in [after for source, after in pairs if source == before]:
            actual = clusters[2].run(load, after, precision, kind, file, folder)
            name_pair = partial("{} to {}: {}".format, before, after)
            # Buffers differ between the ranks, as with DDP.
            torch.testing.assert_close(actual, expected, atol=0, rtol=0, msg=name_pair)


def test_frozen_weights_that_the_script_changes_are_saved_as_they_are_now(clusters):
    def change(layout):
        accelerator, model, _ = start(layout, "bf16", "frozen", None)
        with accelerator.gathered(model) as module, torch.no_grad():
            module.first.weight[1].fill_(0.25)
        return accelerator.get_state_dict(model, everywhere=True)

    expected = dict(build("frozen").state_dict())
    expected["first.weight"][1] = 0.25
    for layout in LAYOUTS[2:]:
        for state in clusters[2].run(change, layout):
            torch.testing.assert_close(state, expected, atol=0, rtol=0)
