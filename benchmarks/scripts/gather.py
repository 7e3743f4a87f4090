"""Wall time of gathering small tensors and small objects, with a library and bare, in turn: `gather.py LIBRARY`."""

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
"""All processes share them: the more there are, the longer a call takes."""


def main() -> None:
    """Print milliseconds a call, one number a block: `{what: {bare: [], library: []}}`."""
    library = sys.argv[1]
    accelerator = importlib.import_module(library).Accelerator(cpu=True)
    rank = dist.get_rank()
    tensors = {f"metric {i}": torch.full((8,), 100.0 * i + rank) for i in range(20)}
    objects = [{"id": rank * 4 + i, "text": "a short answer"} for i in range(4)]
    expected = _bare(tensors)
    for key, tensor in accelerator.gather(tensors).items():
        assert torch.equal(tensor, expected[key]), f"{key} is gathered wrong"
    gather_object = _gather_object(library, accelerator)
    assert gather_object(objects) == _bare_objects(objects), "objects are gathered wrong"
    times = {
        "20 tensors": _timed({"bare": _bare, "library": accelerator.gather}, tensors),
        "4 objects": _timed({"bare": _bare_objects, "library": gather_object}, objects),
    }
    if rank == 0:
        print(json.dumps(times))
    # gloo's threads still drop the last tensors; leaving under them would abort.
    time.sleep(0.1)
    dist.destroy_process_group()


def _timed(ways: dict[str, Callable[[Any], Any]], data: Any) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    calls = max(1, _CALLS // dist.get_world_size())
    for block in range(_BLOCKS + 1):
        for name, gather in ways.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                gather(data)
            spent = time.perf_counter() - start
            if block:
                times[name].append(spent / calls * 1000)
    return times


def _gather_object(library: str, accelerator: Any) -> Callable[[Any], Any]:
    if library == "accelerate":
        found: Callable[[Any], Any] = importlib.import_module("accelerate.utils").gather_object
        return found
    samples = importlib.import_module("accel_runtime.collectives.metrics")
    return lambda objects: samples.gather_object(objects, accelerator._backend)  # noqa: SLF001


def _bare_objects(objects: list[Any]) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, objects)
    return [item for own in everyone for item in own]


def _bare(data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One collective a tensor, as one writes it by hand."""
    gathered = {}
    for key, tensor in data.items():
        everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, tensor)
        gathered[key] = torch.cat(everyone)
    return gathered


main()
