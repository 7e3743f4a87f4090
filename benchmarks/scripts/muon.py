"""CPU time of a step and bytes that a rank sends in it, of AdamW and of Muon in three forms, in alternating blocks.

Run `accel launch -q --cpu --nproc-per-node N benchmarks/scripts/muon.py`, with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.profiler import ProfilerActivity, profile

from accel_runtime import Accelerator, ParallelismConfig

_WIDTH, _LAYERS, _ROWS = 512, 4, 64
_BLOCKS, _STEPS = 8, 3
_SIZES = {"c10::BFloat16": 2, "float": 4}


class Layer(nn.Module):
    """A feed-forward network of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer."""
        inside: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + inside


def orthogonalize(x: torch.Tensor) -> torch.Tensor:
    """Return the result of five steps of Newton-Schulz, in bfloat16 as scripts compute it."""
    is_tall = x.size(-2) > x.size(-1)
    x = x.bfloat16().mT if is_tall else x.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if is_tall else x


class ScriptMuon(torch.optim.Optimizer):
    """Keller Jordan's Muon on sharded parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.02, "momentum": 0.95})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Step all parameters."""
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = self.gather(p.grad.lerp(momentum, group["momentum"]))
                p.add_(orthogonalize(update).to(p.dtype), alpha=-group["lr"])

    def gather(self, update: Any) -> Any:
        """Return the matrix to orthogonalize."""
        return update


class GatheringMuon(ScriptMuon):
    """The same, which gathers each matrix once."""

    def gather(self, update: Any) -> Any:
        """Return the matrix on each rank, in the dtype in which it is orthogonalized."""
        return update.bfloat16().redistribute(placements=[Replicate()] * update.device_mesh.ndim)


FORMS = {
    "AdamW": torch.optim.AdamW,
    "torch.optim.Muon": torch.optim.Muon,
    "Muon of a script": ScriptMuon,
    "Muon of a script, gathered once": GatheringMuon,
}


def build_step(accelerator: Accelerator, kind: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return functions of a training step: the passes, and the optimizers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(_LAYERS)))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    model, *optimizers = accelerator.prepare(model, kind(matrices), torch.optim.AdamW(rest))
    batch = torch.randn(_ROWS, _WIDTH)

    def compute() -> None:
        accelerator.backward(model(batch).square().mean())

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()

    return compute, step


def count_bytes(function: Callable[[], None], ranks: int) -> float:
    """Return the bytes that a rank sends to others, as rings of all-gather, reduce-scatter and all-reduce do."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        function()
    total = 0.0
    for event in profiler.profiler.kineto_results.events():
        name = event.name().removeprefix("_c10d_functional::")
        factor = {
            "all_gather_into_tensor": ranks - 1,
            "reduce_scatter_tensor": (ranks - 1) / ranks,
            "all_reduce": 2 * (ranks - 1) / ranks,
        }.get(name)
        if factor is not None:
            elements = torch.Size(event.shapes()[0]).numel()
            total += factor * elements * _SIZES[event.dtypes()[0]]
    return total


def main() -> None:
    """Print a row for each form: median CPU milliseconds of a step and of its optimizers, ratios to AdamW, megabytes sent."""
    accelerator = Accelerator(parallelism_config=ParallelismConfig(dp_shard_size="auto"))
    steps = {name: build_step(accelerator, kind) for name, kind in FORMS.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for block in range(_BLOCKS + 1):
        for name, (compute, step) in steps.items():
            for _ in range(_STEPS):
                start = time.process_time()
                compute()
                middle = time.process_time()
                step()
                if block:
                    end = time.process_time()
                    times[name].append((end - start, end - middle))
    medians = {
        name: [statistics.median(column) * 1000 for column in zip(*rows, strict=True)]
        for name, rows in times.items()
    }
    whole, optimizer = medians["AdamW"]
    for name, (compute, step) in steps.items():
        compute()
        sent = count_bytes(step, accelerator.num_processes) / 1e6
        accelerator.print(
            f"{accelerator.num_processes} ranks | {name} | {medians[name][0]:.0f} ms, {medians[name][0] / whole:.2f} | "
            f"{medians[name][1]:.0f} ms, {medians[name][1] / optimizer:.1f} | {sent:.1f} MB"
        )
    accelerator.end_training()


main()
