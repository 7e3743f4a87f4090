"""Training steps on torch_xla's device, with accel and written by hand, in turn; and the graphs they compile."""

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
    """Print `{what: {"bare": [], "library": []}}`: graphs, and microseconds a step."""
    torch.manual_seed(0)
    graphs = {"bare": _compiled(_by_hand(0)), "library": _compiled(_with_accel(0))}
    measured: dict[str, Any] = {
        f"graphs after {steps} steps": {who: [found[steps]] for who, found in graphs.items()}
        for steps in (_EARLY, _STEPS)
    }
    for workers in (0, 2):
        measured[f"a step, {workers} loader workers"] = _compared(_by_hand(workers), _with_accel(workers))
    print(json.dumps(measured))


def _parts(workers: int) -> tuple[Any, Any, Any, Any]:
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    data = TensorDataset(torch.randn(_BATCH * _STEPS, 784), torch.randint(0, 10, (_BATCH * _STEPS,)))
    loader = DataLoader(
        data, batch_size=_BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )
    return model, loader, torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR


def _falling(step: int) -> float:
    return max(0.5, 1 - step / 10_000)


def _with_accel(workers: int) -> Callable[[], Iterable[int]]:
    accelerator = Accelerator()
    model, loader, optimizer, scheduler = _parts(workers)
    optimizer = optimizer(model.parameters(), lr=1e-4)
    scheduler = scheduler(optimizer, _falling)
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


def _by_hand(workers: int) -> Callable[[], Iterable[int]]:
    device = torch_xla.device()
    model, loader, optimizer, scheduler = _parts(workers)
    model = model.to(device)
    optimizer = optimizer(model.parameters(), lr=1e-4)
    scheduler = scheduler(optimizer, _falling)
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


def _compiled(epoch: Callable[[], Iterable[int]]) -> dict[int, int]:
    """Return the number of compiled graphs after each step."""
    before = _graphs()
    found = {step - 1: _graphs() - before for step in epoch()}
    torch_xla.sync(wait=True)
    return found | {_STEPS: _graphs() - before}


def _graphs() -> int:
    return int(met.counter_value("UncachedCompile") or 0)


def _compared(
    bare: Callable[[], Iterable[int]], library: Callable[[], Iterable[int]]
) -> dict[str, list[float]]:
    """Microseconds a step, block by block, after a block of each that compiles."""
    times: dict[str, list[float]] = {"bare": [], "library": []}
    for block in range(_BLOCKS + 1):
        for name, epoch in (("bare", bare), ("library", library)):
            start = time.perf_counter_ns()
            for _ in epoch():
                pass
            torch_xla.sync(wait=True)
            spent = time.perf_counter_ns() - start
            if block:
                times[name].append(spent / _STEPS / 1000)
    return times


main()
