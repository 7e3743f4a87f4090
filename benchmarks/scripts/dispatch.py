"""Wall time of a stream's batches that one rank reads for all, with a library and bare: `dispatch.py LIBRARY`."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

_BLOCKS = 5
_STEPS = 100
_SIZE = 4


class Same(IterableDataset[Any]):
    """The same sample over and over, so that reading costs next to nothing."""

    def __init__(self, sample: Any, count: int) -> None:
        self._sample, self._count = sample, count

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._count):
            yield self._sample


def main() -> None:
    """Print microseconds a batch, one number a block: `{what: {bare: [], library: []}}`."""
    name = sys.argv[1]
    library = importlib.import_module(name)
    options = library if name == "accel_runtime" else importlib.import_module("accelerate.utils")
    configuration = options.DataLoaderConfiguration(dispatch_batches=True)
    accelerator = library.Accelerator(cpu=True, dataloader_config=configuration)
    samples = {
        "a small tensor": torch.arange(4.0),
        "a dict of 5 tensors": {f"column {i}": torch.full((4,), float(i)) for i in range(5)},
    }
    times = {what: _timed(accelerator, sample) for what, sample in samples.items()}
    if dist.get_rank() == 0:
        print(json.dumps(times))
    # gloo's threads still drop the last tensors; leaving under them would abort.
    time.sleep(0.1)
    dist.destroy_process_group()


def _timed(accelerator: Any, sample: Any) -> dict[str, list[float]]:
    count = _STEPS * _SIZE * dist.get_world_size()
    bare, prepared = (DataLoader(Same(sample, count), batch_size=_SIZE) for _ in range(2))
    prepared = accelerator.prepare(prepared)
    ways: dict[str, Callable[[], Iterator[Any]]] = {
        "bare": lambda: _bare(bare),
        "library": lambda: iter(prepared),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for block in range(_BLOCKS + 1):
        for name, walk in ways.items():
            dist.barrier()
            start = time.perf_counter()
            steps = sum(1 for _ in walk())
            spent = time.perf_counter() - start
            assert steps == _STEPS, f"{name}: {steps} batches"
            if block:
                times[name].append(spent / _STEPS * 1e6)
    return times


def _bare(loader: DataLoader[Any]) -> Iterator[Any]:
    """One batch a rank and step by `scatter_object_list`, as one writes it by hand."""
    world, leads = dist.get_world_size(), dist.get_rank() == 0
    walk = iter(loader) if leads else iter(())
    while True:
        batches = list(islice(walk, world)) if leads else []
        received: list[Any] = [None]
        dist.scatter_object_list(received, (batches or [None] * world) if leads else None, src=0)
        if received[0] is None:
            return
        yield received[0]


main()
