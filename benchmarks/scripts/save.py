"""Wall time and exchanges of `save_state` for a model of many small tensors: `save.py SAVES LAYERS FOLDER`, on each rank.

The states of all ranks are equal, and then differ in their random states and in the buffers of a BatchNorm.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_runtime import Accelerator
from accel_runtime.collectives.handshake import Handshake
from accel_runtime.utils import set_seed

_WIDTH = 16


class ExchangeRecord:
    """Sizes of the objects that this rank sends, by exchange."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        exchange = Handshake.exchange

        def record(handshake: Handshake, call: Any, size: int = 0, *args: Any, **options: Any) -> Any:
            self.sizes.append(size)
            return exchange(handshake, call, size, *args, **options)

        Handshake.exchange = record  # type: ignore[method-assign, assignment]

    def take(self) -> list[int]:
        """Return the sizes since the last call."""
        sizes, self.sizes = self.sizes, []
        return sizes


def main() -> None:
    """Print milliseconds and sizes of the exchanges, as JSON on rank 0."""
    saves, layers, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    record, accelerator = ExchangeRecord(), Accelerator(cpu=True)
    set_seed(1)
    model: nn.Module = nn.Sequential(
        *(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)), nn.BatchNorm1d(_WIDTH)
    )
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(4, _WIDTH)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    results = {"equal": _measure(accelerator, saves, folder / "equal", record)}
    set_seed(accelerator.process_index)
    for buffer in model.buffers():
        buffer.fill_(accelerator.process_index)
    results["different"] = _measure(accelerator, saves, folder / "different", record)
    if accelerator.is_main_process:
        print(json.dumps(results))


def _measure(accelerator: Any, saves: int, folder: Path, record: ExchangeRecord) -> dict[str, Any]:
    seconds = []
    for number in range(saves + 1):
        accelerator.wait_for_everyone()
        record.take()
        start = time.perf_counter()
        accelerator.save_state(folder / str(number))
        seconds.append(time.perf_counter() - start)
        sizes = record.take()
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            shutil.rmtree(folder / str(number))
    return {
        "milliseconds": [1000 * statistics.median(seconds[1:]), 1000 * min(seconds[1:])],
        "sizes": sizes,
    }


main()
