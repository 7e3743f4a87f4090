"""Wall time of a step of a sharded transformer, by hand and with accel, in alternating blocks: `sharding.py cpu|cuda`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from accel_runtime import Accelerator, ParallelismConfig

_WORDS, _WIDTH, _LAYERS, _HEADS, _LENGTH, _ROWS = 512, 256, 4, 8, 64, 8
_BLOCKS, _STEPS = 10, 5
_Step = Callable[[torch.Tensor], torch.Tensor]
"""Step on a batch, which returns the loss; it is not read while time is measured."""


class Layer(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, scale: int) -> None:
        super().__init__()
        width = _WIDTH * scale
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer."""
        q, k, v = (
            part.unflatten(-1, (_HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.first(x)).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        inside: torch.Tensor = self.down(nn.functional.gelu(self.up(self.second(x))))
        return x + inside


class LanguageModel(nn.Module):
    """A small language model."""

    def __init__(self, scale: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(_WORDS, _WIDTH * scale)
        self.layers = nn.ModuleList(Layer(scale) for _ in range(_LAYERS))
        self.head = nn.Linear(_WIDTH * scale, _WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def main() -> None:
    """Print milliseconds per step, by block: `{measurement: {"bare": [...], "library": [...]}}`."""
    on_gpu = sys.argv[1] == "cuda"
    accelerator = Accelerator(
        cpu=not on_gpu,
        mixed_precision="bf16" if on_gpu else "no",
        dynamo_backend="inductor" if on_gpu else None,
        parallelism_config=ParallelismConfig(dp_shard_size="auto"),
    )
    if not dist.is_initialized():
        raise SystemExit("sharding.py needs several processes. Run it with torchrun.")
    steps = {
        "bare": _build_bare_step(accelerator.device, on_gpu=on_gpu),
        "library": _build_accel_step(accelerator, on_gpu=on_gpu),
    }
    torch.manual_seed(dist.get_rank())
    scale = 8 if on_gpu else 1
    words = torch.randint(_WORDS, (_ROWS * scale, _LENGTH * scale), device=accelerator.device)
    times: dict[str, list[float]] = {name: [] for name in steps}
    first = {name: step(words).item() for name, step in steps.items()}
    assert abs(first["bare"] - first["library"]) < (0.05 if on_gpu else 1e-5), f"the losses differ: {first}"
    for block in range(_BLOCKS + 1):
        for name, step in steps.items():
            milliseconds = _measure(step, words, on_gpu=on_gpu)
            if block:
                times[name].append(milliseconds)
    if accelerator.is_main_process:
        print(json.dumps({"a sharded step": times}))
    accelerator.end_training()


def _measure(step: _Step, words: torch.Tensor, *, on_gpu: bool) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(_STEPS):
        step(words)
    if on_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / _STEPS * 1000


def _create_model(device: torch.device, *, on_gpu: bool) -> LanguageModel:
    torch.manual_seed(0)
    with device:
        return LanguageModel(8 if on_gpu else 1)


def _create_optimizer(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def _build_bare_step(device: torch.device, *, on_gpu: bool) -> _Step:
    model = _create_model(device, on_gpu=on_gpu)
    if on_gpu:
        model.compile(backend="inductor")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if on_gpu
        else MixedPrecisionPolicy()
    )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    optimizer = _create_optimizer(model)

    def step(words: torch.Tensor) -> torch.Tensor:
        loss = _compute_loss(model, words)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _build_accel_step(accelerator: Accelerator, *, on_gpu: bool) -> _Step:
    model = _create_model(accelerator.device, on_gpu=on_gpu)
    model, optimizer = accelerator.prepare(model, _create_optimizer(model))

    def step(words: torch.Tensor) -> torch.Tensor:
        loss = _compute_loss(model, words)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _compute_loss(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    logits = model(words[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), words[:, 1:].flatten())


main()
