"""Wall time of batches of a stream that rank 0 reads for all ranks, with a library and bare: `dispatch.py LIBRARY`."""

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


class RepeatedSample(IterableDataset[Any]):
    """Stream of one sample, which takes almost no time to read."""

    def __init__(self, sample: Any, count: int) -> None:
        self._sample, self._count = sample, count

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._count):
            yield self._sample


def main() -> None:
    """Print microseconds per batch, by block: `{measurement: {"bare": [...], "library": [...]}}`."""
    name = sys.argv[1]
    library = importlib.import_module(name)
    options = library if name == "accel_runtime" else importlib.import_module("accelerate.utils")
    configuration = options.DataLoaderConfiguration(dispatch_batches=True)
    accelerator = library.Accelerator(cpu=True, dataloader_config=configuration)
    samples = {
        "a small tensor": torch.arange(4.0),
        "a dict of 5 tensors": {f"column {i}": torch.full((4,), float(i)) for i in range(5)},
    }
    times = {name: _measure(accelerator, sample) for name, sample in samples.items()}
    if dist.get_rank() == 0:
        print(json.dumps(times))
    # The exit would abort while threads of gloo release the last tensors.
    time.sleep(0.1)
    dist.destroy_process_group()


def _measure(accelerator: Any, sample: Any) -> dict[str, list[float]]:
    count = _STEPS * _SIZE * dist.get_world_size()
    bare, prepared = (DataLoader(RepeatedSample(sample, count), batch_size=_SIZE) for _ in range(2))
    prepared = accelerator.prepare(prepared)
    iterate: dict[str, Callable[[], Iterator[Any]]] = {
        "bare": lambda: _scatter(bare),
        "library": lambda: iter(prepared),
    }
    times: dict[str, list[float]] = {name: [] for name in iterate}
    for block in range(_BLOCKS + 1):
        for name, start_epoch in iterate.items():
            dist.barrier()
            start = time.perf_counter()
            steps = sum(1 for _ in start_epoch())
            seconds = time.perf_counter() - start
            assert steps == _STEPS, f"{name}: {steps} batches"
            if block:
                times[name].append(seconds / _STEPS * 1e6)
    return times


def _scatter(loader: DataLoader[Any]) -> Iterator[Any]:
    """Iterate over batches that rank 0 sends with `scatter_object_list`, one per rank and step."""
    world_size, is_first = dist.get_world_size(), dist.get_rank() == 0
    iterator = iter(loader) if is_first else iter(())
    while True:
        batches = list(islice(iterator, world_size)) if is_first else []
        received: list[Any] = [None]
        dist.scatter_object_list(received, (batches or [None] * world_size) if is_first else None, src=0)
        if received[0] is None:
            return
        yield received[0]


main()
