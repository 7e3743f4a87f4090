"""Times of single calls and of batches with a library and bare, in alternating blocks: `costs.py LIBRARY`.

One process prepares and reads, two reduce, and more evaluate.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

_BLOCKS = 4
_NUM_LAYERS = 10_000
_NUM_BATCHES = 500


def main() -> None:
    """Print times by block, on the first process: `{measurement: {"bare": [...], "library": [...]}}`."""
    accelerator = importlib.import_module(sys.argv[1]).Accelerator(cpu=True)
    size = accelerator.num_processes
    if size == 1:
        times = _measure_preparation(accelerator) | _measure_workers(accelerator)
    else:
        times = _measure_reduction(accelerator) if size == 2 else _measure_evaluation(accelerator)  # noqa: PLR2004
    if accelerator.is_main_process:
        print(json.dumps(times))
    if size > 1:
        accelerator.wait_for_everyone()
        dist.destroy_process_group()


def _measure_preparation(accelerator: Any) -> dict[str, Any]:
    loader = DataLoader(TensorDataset(torch.ones(64)), batch_size=4)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        accelerator.free_memory()  # here, as it collects garbage
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(_NUM_LAYERS)))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def prepare_again(prepare: Callable[[Any], Any]) -> None:
        for _ in range(100):
            prepare(loader)

    models = _measure(
        lambda objects: objects[0].to("cpu"), lambda objects: accelerator.prepare(*objects), build
    )
    loaders = _measure(lambda _: prepare_again(_rebuild), lambda _: prepare_again(accelerator.prepare))
    return {"20 000 parameters, ms": models, "a loader, 100 times, ms": loaders}


def _rebuild(loader: DataLoader[Any]) -> DataLoader[Any]:
    return DataLoader(loader.dataset, batch_size=loader.batch_size)


def _measure_workers(accelerator: Any) -> dict[str, Any]:
    def build() -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(_NUM_BATCHES)), batch_size=1, num_workers=2)

    bare, library = build(), accelerator.prepare(build())
    times = _measure(lambda _: _read(bare), lambda _: _read(library), clock=time.perf_counter)
    return {"500 batches of 2 workers, ms": times}


def _measure_reduction(accelerator: Any) -> dict[str, Any]:
    tensor = torch.ones(1 << 20)

    def reduce_bare(_: Any) -> None:
        for _ in range(10):
            dist.all_reduce(tensor.clone())

    def reduce(_: Any) -> None:
        for _ in range(10):
            accelerator.reduce(tensor)

    return {"`reduce` of 4 MB, 10 times, ms": _measure(reduce_bare, reduce, clock=time.perf_counter)}


def _measure_evaluation(accelerator: Any) -> dict[str, Any]:
    count = accelerator.num_processes
    data = TensorDataset(torch.ones(_NUM_BATCHES * count, 1))
    own = DataLoader(TensorDataset(torch.ones(_NUM_BATCHES, 1)))
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1)).eval()
    loader, prepared = accelerator.prepare(DataLoader(data), nn.Linear(1, 1))
    prepared.eval()
    times = _measure(lambda _: _read(own, model), lambda _: _read(loader, prepared))
    return {"500 batches of an evaluation, ms": times}


def _read(loader: Iterable[Any], model: Callable[[Any], Any] = lambda _: None) -> None:
    with torch.no_grad():
        for (batch,) in loader:
            model(batch)


def _measure(
    bare: Callable[[Any], Any],
    library: Callable[[Any], Any],
    build: Callable[[], Any] = lambda: None,
    clock: Callable[[], float] = time.thread_time,
) -> dict[str, list[float]]:
    """Return milliseconds of two functions of what `build` returns, by block."""
    times: dict[str, list[float]] = {"bare": [], "library": []}
    for block in range(_BLOCKS + 1):
        for name, function in (("bare", bare), ("library", library)):
            argument = build()
            if dist.is_initialized():
                dist.barrier()
            start = clock()
            function(argument)
            if block:
                times[name].append((clock() - start) * 1000)
    return times


main()
