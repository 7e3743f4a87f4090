"""Wall time of gathering 20 small tensors, with a library and bare, in turn: `gather.py LIBRARY`."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_BLOCKS = 10
_CALLS = 20


def main() -> None:
    """Print milliseconds a call, one number a block: `{bare: [], library: []}`."""
    accelerator = importlib.import_module(sys.argv[1]).Accelerator(cpu=True)
    rank = dist.get_rank()
    data = {f"metric {i}": torch.full((8,), 100.0 * i + rank) for i in range(20)}
    ways: dict[str, Callable[[Any], Any]] = {"bare": _bare, "library": accelerator.gather}
    expected = _bare(data)
    for key, tensor in accelerator.gather(data).items():
        assert torch.equal(tensor, expected[key]), f"{key} is gathered wrong"
    times: dict[str, list[float]] = {name: [] for name in ways}
    for block in range(_BLOCKS + 1):
        for name, gather in ways.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(_CALLS):
                gather(data)
            spent = time.perf_counter() - start
            if block:
                times[name].append(spent / _CALLS * 1000)
    if rank == 0:
        print(json.dumps(times))
    # gloo's threads still drop the last tensors; leaving under them would abort.
    time.sleep(0.1)
    dist.destroy_process_group()


def _bare(data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One collective a tensor, as one writes it by hand."""
    gathered = {}
    for key, tensor in data.items():
        everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, tensor)
        gathered[key] = torch.cat(everyone)
    return gathered


main()
