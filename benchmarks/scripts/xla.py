"""Time of training steps on torch_xla's CPU device, with accel and by hand, and the number of graphs they compile."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

os.environ |= {"PJRT_DEVICE": "CPU", "ACCEL_DEVICE": "xla"}

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch_xla.distributed.parallel_loader import MpDeviceLoader

from accel_runtime import Accelerator

_BLOCKS = 10
_STEPS = 100
_EARLY = 10
_BATCH = 64


def main() -> None:
    """Print graphs, and microseconds per step, by block: `{measurement: {"bare": [...], "library": [...]}}`."""
    torch.manual_seed(0)
    graphs = {"bare": _count_graphs(_build_bare_epoch(0)), "library": _count_graphs(_build_accel_epoch(0))}
    measured: dict[str, Any] = {
        f"graphs after {steps} steps": {name: [counts[steps]] for name, counts in graphs.items()}
        for steps in (_EARLY, _STEPS)
    }
    for workers in (0, 2):
        measured[f"a step, {workers} loader workers"] = _measure(
            _build_bare_epoch(workers), _build_accel_epoch(workers)
        )
    print(json.dumps(measured))


def _create_parts(workers: int) -> tuple[Any, Any, Any, Any]:
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    data = TensorDataset(torch.randn(_BATCH * _STEPS, 784), torch.randint(0, 10, (_BATCH * _STEPS,)))
    loader = DataLoader(
        data, batch_size=_BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )
    return model, loader, torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR


def _decay(step: int) -> float:
    return max(0.5, 1 - step / 10_000)


def _build_accel_epoch(workers: int) -> Callable[[], Iterable[int]]:
    accelerator = Accelerator()
    model, loader, optimizer, scheduler = _create_parts(workers)
    optimizer = optimizer(model.parameters(), lr=1e-4)
    scheduler = scheduler(optimizer, _decay)
    model, loader, optimizer, scheduler = accelerator.prepare(model, loader, optimizer, scheduler)

    def epoch() -> Iterable[int]:
        for step, (x, y) in enumerate(loader, 1):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            yield step

    return epoch


def _build_bare_epoch(workers: int) -> Callable[[], Iterable[int]]:
    device = torch_xla.device()
    model, loader, optimizer, scheduler = _create_parts(workers)
    model = model.to(device)
    optimizer = optimizer(model.parameters(), lr=1e-4)
    scheduler = scheduler(optimizer, _decay)
    loader = MpDeviceLoader(loader, device)

    def epoch() -> Iterable[int]:
        for step, (x, y) in enumerate(loader, 1):
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            xm.reduce_gradients(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            yield step

    return epoch


def _count_graphs(epoch: Callable[[], Iterable[int]]) -> dict[int, int]:
    """Return the number of compiled graphs after each step."""
    before = _read_graphs()
    counts = {step - 1: _read_graphs() - before for step in epoch()}
    torch_xla.sync(wait=True)
    return counts | {_STEPS: _read_graphs() - before}


def _read_graphs() -> int:
    return int(met.counter_value("UncachedCompile") or 0)


def _measure(
    bare: Callable[[], Iterable[int]], library: Callable[[], Iterable[int]]
) -> dict[str, list[float]]:
    """Return microseconds per step, by block; the first blocks compile and do not count."""
    times: dict[str, list[float]] = {"bare": [], "library": []}
    for block in range(_BLOCKS + 1):
        for name, epoch in (("bare", bare), ("library", library)):
            start = time.perf_counter_ns()
            for _ in epoch():
                pass
            torch_xla.sync(wait=True)
            elapsed = time.perf_counter_ns() - start
            if block:
                times[name].append(elapsed / _STEPS / 1000)
    return times


main()
