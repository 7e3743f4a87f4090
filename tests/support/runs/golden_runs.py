"""A script that trains three tiny models by several strategies, and prints their losses: `docs/proof/losses/`.

`accel launch golden_runs.py mlp/ddp/fp32 lm/tp/fp64` trains these, one after the other. The samples of a step are the same for
every strategy and world size.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from support.runs.sharded_runs import build_accelerator, to_full
from support.training.models import LanguageModel
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_runtime import DataLoaderConfiguration
from accel_runtime.backends import set_current_backend

STEPS, BATCH, LENGTH, WORDS = 8, 8, 8, 32
PRECISIONS = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 2e-2}
"""The relative difference from a golden file that each precision may have; "bf16" is mixed."""


@dataclass(frozen=True)
class Layout:
    """A strategy.

    Attributes:
        world_size: The number of processes.
        sizes: The sizes of the section `parallel:` of a profile.
        accumulation: The number of micro-batches of a step.
        models: The models that it can train.
    """

    world_size: int = 2
    sizes: dict[str, int] = field(default_factory=dict)
    accumulation: int = 1
    models: tuple[str, ...] = ("mlp", "conv", "lm")


LAYOUTS = {
    "one process": Layout(1),
    "accumulation": Layout(1, accumulation=2),
    "ddp": Layout(),
    "ddp, accumulation": Layout(accumulation=2),
    "dp_shard": Layout(sizes={"dp_shard": 2}),
    "tp": Layout(sizes={"tp": 2}, models=("mlp", "lm")),
    "cp": Layout(sizes={"cp": 2}, models=("lm",)),
    "sp": Layout(sizes={"sp": 2}, models=("lm",)),
    "dp_shard x tp": Layout(4, {"dp_shard": 2, "tp": 2}, models=("mlp", "lm")),
}
CELLS = tuple(
    f"{model}/{layout}/{precision}"
    for layout, row in LAYOUTS.items()
    for model in row.models
    for precision in PRECISIONS
)
PLANS = {
    "mlp": {"first": "colwise", "last": "rowwise"},
    "lm": {
        f"layers.*.{name}": "rowwise" if name in {"attention.o", "down"} else "colwise"
        for name in ("attention.q", "attention.k", "attention.v", "attention.o", "up", "down")
    },
}


class Mlp(nn.Module):
    """Three layers with batch norm, for regression."""

    def __init__(self):
        super().__init__()
        self.enter, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.first(torch.relu(self.norm(self.enter(x))))))


def build_conv():
    """Return a convolutional classifier of images of 8 x 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.GELU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(256, 4),
    )


MODELS = {"mlp": Mlp, "conv": build_conv, "lm": lambda: LanguageModel(WORDS, tied=False)}


def draw_samples(name, dtype):
    """Return inputs and targets of all steps."""
    generator = torch.Generator().manual_seed(7)
    count = STEPS * BATCH
    if name == "lm":
        start, stride = (
            torch.randint(WORDS, (count, 1), generator=generator),
            torch.arange(count)[:, None] % 3,
        )
        words = (start + (stride + 1) * torch.arange(LENGTH + 1)) % WORDS
        return words[:, :-1].contiguous(), words[:, 1:].contiguous()
    if name == "conv":
        images = torch.rand(count, 1, 8, 8, generator=generator, dtype=torch.float64)
        kinds = torch.arange(count) % 4
        for number, kind in enumerate(kinds.tolist()):  # one quarter is brighter
            top, left = 4 * (kind // 2), 4 * (kind % 2)
            images[number, 0, top : top + 4, left : left + 4] += 1
        return images.to(dtype), kinds
    x = torch.rand(count, 8, generator=generator, dtype=torch.float64) - 0.5
    return x.to(dtype), torch.sin(3 * x.sum(1, keepdim=True)).to(dtype)


def compute_loss(name, outputs, targets):
    """Return the mean loss in at least float32."""
    outputs = outputs if outputs.dtype is torch.float64 else outputs.float()
    if name == "mlp":
        return (outputs - targets).square().mean()
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def train(cell: str) -> dict[str, Any]:
    """Train a model; return the losses of the steps, and the norm of the weights after them."""
    name, layout_name, precision = cell.split("/")
    layout = LAYOUTS[layout_name]
    dtype = torch.float64 if precision == "fp64" else torch.float32
    sizes: dict[str, Any] = dict(layout.sizes)
    if "tp" in sizes:
        sizes["tp_plan"] = ",".join(f"{module}={style}" for module, style in PLANS[name].items())
    set_current_backend(None)
    accelerator = build_accelerator(
        sizes,
        gradient_accumulation_steps=layout.accumulation,
        mixed_precision="bf16" if precision == "bf16" else "no",
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    torch.manual_seed(3)
    model = MODELS[name]().double().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(TensorDataset(*draw_samples(name, dtype)), BATCH // layout.accumulation)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: list[float] = []
    for number, (inputs, targets) in enumerate(loader):
        with (
            accelerator.accumulate(model),
            accelerator.maybe_context_parallel([inputs, targets], [1, 1] if name == "lm" else [0, 0]),
        ):
            loss = compute_loss(name, model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if number % layout.accumulation == 0:
            losses.append(0.0)
        losses[-1] += accelerator.reduce(loss.detach(), "mean").item() / layout.accumulation
    weights = [to_full(p.detach()).double() for p in accelerator.unwrap_model(model).parameters()]
    norm = torch.stack([weight.square().sum() for weight in weights]).sum().sqrt().item()
    is_printed = accelerator.is_main_process
    accelerator.wait_for_everyone()
    return {"losses": losses, "norm": norm} if is_printed else {}


if __name__ == "__main__":
    # The output of the group norm of torch under DDP, and layers that FSDP wraps: warnings of torch about its own hooks.
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(1)
    for cell in sys.argv[1:]:
        if result := train(cell):
            print("GOLDEN", json.dumps({"cell": cell, **result}), flush=True)
