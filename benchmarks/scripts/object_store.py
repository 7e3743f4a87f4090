"""Wall time of saving and loading a model with AdamW: `object_store.py MILLIONS LOCATION...`, directories or URLs.

It prints `{location: {"save": [...], "load": [...]}}`, and keeps the checkpoints as `LOCATION/0`, `LOCATION/1`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accel_runtime import Accelerator

_WIDTH = 2048
_SAVES = 2


def main() -> None:
    """Print seconds of each save and load."""
    millions, locations = int(sys.argv[1]), sys.argv[2:]
    accelerator = Accelerator(cpu=True)
    layers = round(millions * 1e6 / _WIDTH**2)
    model: nn.Module = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    seconds = {}
    for location in locations:
        # New names: some servers do not replace an object on the condition that it has an ETag.
        paths = [f"{location}/{number}" for number in range(_SAVES)]
        saves = [_measure(accelerator.save_state, path) for path in paths]
        loads = [_measure(accelerator.load_state, path) for path in paths]
        seconds[location] = {"save": saves, "load": loads}
    print(json.dumps(seconds))


def _measure(operation: Callable[[str], Any], path: str) -> float:
    start = time.perf_counter()
    operation(path)
    return time.perf_counter() - start


main()
