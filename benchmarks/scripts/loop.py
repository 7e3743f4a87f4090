"""CPU time of training steps and batches, with a library and bare, in alternating blocks: `loop.py LIBRARY`."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

_BLOCKS = 20
_STEPS = 250
_BATCHES = 256


def main() -> None:
    """Print microseconds per step and per batch, by block: `{measurement: {"bare": [...], "library": [...]}}`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = importlib.import_module(sys.argv[1]).Accelerator(cpu=True)
    measured = {
        "training step": _measure(
            _build_steps(_create_training(), torch.Tensor.backward),
            _build_steps(accelerator.prepare(*_create_training()), accelerator.backward),
            _STEPS,
        ),
        "batch, in order": _measure_loaders(accelerator, shuffle=False),
        "batch, shuffled": _measure_loaders(accelerator, shuffle=True),
    }
    print(json.dumps(measured))


def _create_training() -> tuple[Any, Any, Any]:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def _build_steps(training: tuple[Any, Any, Any], backward: Callable[[Any], None]) -> Callable[[], None]:
    model, optimizer, scheduler = training
    x, y = torch.randn(8, 4), torch.randn(8, 4)

    def block() -> None:
        for _ in range(_STEPS):
            loss = nn.functional.mse_loss(model(x), y)
            backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return block


def _measure_loaders(accelerator: Any, *, shuffle: bool) -> dict[str, list[float]]:
    data = TensorDataset(torch.randn(32 * _BATCHES, 4), torch.randn(32 * _BATCHES))

    def build_epoch(loader: Iterable[Any]) -> Callable[[], None]:
        def block() -> None:
            for _ in loader:
                pass

        return block

    bare, prepared = (DataLoader(data, batch_size=32, shuffle=shuffle) for _ in range(2))
    return _measure(build_epoch(bare), build_epoch(accelerator.prepare(prepared)), _BATCHES)


def _measure(bare: Callable[[], None], library: Callable[[], None], count: int) -> dict[str, list[float]]:
    """Return CPU microseconds of this thread per iteration, by block of `count` iterations; the first blocks do not count."""
    times: dict[str, list[float]] = {"bare": [], "library": []}
    for block in range(_BLOCKS + 1):
        for name, run_block in (("bare", bare), ("library", library)):
            start = time.thread_time_ns()
            run_block()
            elapsed = time.thread_time_ns() - start
            if block:
                times[name].append(elapsed / count / 1000)
    return times


main()
