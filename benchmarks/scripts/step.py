"""Measure loops with libraries, a block whenever the parent asks for one: `step.py ADDRESS LIBRARY...`."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

_RANK, _WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
_ITERATIONS = 256 // _WORLD_SIZE
_BATCH_SIZE = 32


def main() -> None:
    """Answer each line `LIBRARY LOOP` with microseconds of CPU time of this thread for one iteration."""
    address, *libraries = sys.argv[1:]
    loops = {library: _build_loops(library) for library in dict.fromkeys(["torch", *libraries])}
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
        with client.makefile("rw") as parent:
            for line in parent:
                library, loop = line.strip().split(" ", 1)
                is_bare = library == "bare"
                blocks = loops["torch" if is_bare else library]
                # Blocks of other processes were before: a launcher measures the first steps after a pause.
                blocks["step"]()
                with _without_launcher() if is_bare else nullcontext():
                    start = time.thread_time_ns()
                    blocks[loop]()
                    elapsed = time.thread_time_ns() - start
                print(elapsed / _ITERATIONS / 1000, file=parent, flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
        # A model in DDP still holds the group. Freed while a thread of gloo waits for the GIL, it would wait for that thread.
        os._exit(0)


@contextmanager
def _without_launcher() -> Iterator[None]:
    """Remove what `accel launch` has in torch's functions inside the context, in which it looks at no step."""
    # torch.optim hides the name of the module, and torch has no function that removes all hooks.
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks  # noqa: SLF001
    observer = sys.modules.get("accel_runtime.observe.heartbeat")
    progress = None if observer is None else observer.heartbeat()
    removed = dict(hooks)
    hooks.clear()
    if progress is not None:
        progress.look = lambda: None
    try:
        yield
    finally:
        hooks.update(removed)
        if progress is not None:
            del progress.look


def _build_loops(library: str) -> dict[str, Callable[[], None]]:
    """Return functions that run a block of each loop, on a model and a loader of their own."""
    torch.manual_seed(_RANK)
    model: Any = nn.Linear(4, 4)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    count = _BATCH_SIZE * _ITERATIONS * _WORLD_SIZE
    data = TensorDataset(torch.randn(count, 4), torch.randn(count, 4))
    loader: Any = DataLoader(data, batch_size=_BATCH_SIZE, shuffle=True)
    if library != "torch":
        accelerator = importlib.import_module(library).Accelerator(cpu=True)
        backward = accelerator.backward
        model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    else:
        backward = torch.Tensor.backward
        if _WORLD_SIZE > 1:
            if not dist.is_initialized():
                dist.init_process_group("gloo")
            model = DistributedDataParallel(model)
            loader = DataLoader(data, batch_size=_BATCH_SIZE, sampler=DistributedSampler(data))
    batches = [(torch.randn(_BATCH_SIZE, 4), torch.randn(_BATCH_SIZE, 4))] * _ITERATIONS

    def train(batches: Iterable[Any]) -> None:
        for x, y in batches:
            loss = nn.functional.mse_loss(model(x), y)
            backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    def read() -> None:
        for _ in loader:
            pass

    return {
        "step": lambda: train(batches),
        "step with a loader": lambda: train(loader),
        "batch": read,
    }


main()
