"""Wall time of gathering small tensors and small objects, with a library and bare, in alternating blocks: `gather.py LIBRARY`."""

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
"""Number of calls in a block, divided by the number of processes, as calls of more processes take longer."""


def main() -> None:
    """Print milliseconds per call, by block: `{measurement: {"bare": [...], "library": [...]}}`."""
    library = sys.argv[1]
    accelerator = importlib.import_module(library).Accelerator(cpu=True)
    rank = dist.get_rank()
    tensors = {f"metric {i}": torch.full((8,), 100.0 * i + rank) for i in range(20)}
    objects = [{"id": rank * 4 + i, "text": "a short answer"} for i in range(4)]
    expected = _gather_bare(tensors)
    for key, tensor in accelerator.gather(tensors).items():
        assert torch.equal(tensor, expected[key]), f"{key} is not gathered correctly"
    gather_object = _find_gather_object(library, accelerator)
    assert gather_object(objects) == _gather_bare_objects(objects), "objects are not gathered correctly"
    times = {
        "20 tensors": _measure(_gather_bare, accelerator.gather, tensors),
        "4 objects": _measure(_gather_bare_objects, gather_object, objects),
    }
    if rank == 0:
        print(json.dumps(times))
    # The exit would abort while threads of gloo release the last tensors.
    time.sleep(0.1)
    dist.destroy_process_group()


def _measure(bare: Callable[[Any], Any], library: Callable[[Any], Any], data: Any) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"bare": [], "library": []}
    calls = max(1, _CALLS // dist.get_world_size())
    for block in range(_BLOCKS + 1):
        for name, gather in (("bare", bare), ("library", library)):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                gather(data)
            seconds = time.perf_counter() - start
            if block:
                times[name].append(seconds / calls * 1000)
    return times


def _find_gather_object(library: str, accelerator: Any) -> Callable[[Any], Any]:
    if library == "accelerate":
        function: Callable[[Any], Any] = importlib.import_module("accelerate.utils").gather_object
        return function
    metrics = importlib.import_module("accel_runtime.data.metrics")
    return lambda objects: metrics.gather_object(objects, accelerator._backend)  # noqa: SLF001


def _gather_bare_objects(objects: list[Any]) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, objects)
    return [item for items in gathered for item in items]


def _gather_bare(data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gather with one collective per tensor."""
    gathered = {}
    for key, tensor in data.items():
        tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(tensors, tensor)
        gathered[key] = torch.cat(tensors)
    return gathered


main()
