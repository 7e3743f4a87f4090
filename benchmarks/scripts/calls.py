"""Number of files and functions of a library that each call enters, on rank 0 of 2: `calls.py LIBRARY`."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset


class CallCounter:
    """Counts the Python functions of a package that are called, in all threads."""

    def __init__(self, package: str) -> None:
        self._folder = f"{Path(package).parent}/"
        self.counts: dict[str, tuple[int, int]] = {}
        """Number of files and of functions, by name of the call."""

    @contextmanager
    def count(self, name: str) -> Iterator[None]:
        """Count the functions that are called inside the context."""
        entered = set()

        def record(frame: FrameType, event: str, _: Any) -> None:
            code = frame.f_code
            # Bodies of classes are not optimized; comprehensions and modules have names in angle brackets.
            is_function = code.co_flags & inspect.CO_OPTIMIZED and code.co_name[0] != "<"
            if event != "call" or not is_function or not code.co_filename.startswith(self._folder):
                return
            if not _is_import(frame):
                entered.add((code.co_filename, code.co_firstlineno, code.co_name))

        threading.setprofile(record)
        sys.setprofile(record)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        self.counts[name] = len({file for file, *_ in entered}), len(entered)


def _is_import(frame: FrameType | None) -> bool:
    """Return True if a module is being imported; its body is not part of the call."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def main() -> None:
    """Print `{call: [files, functions]}`."""
    library = importlib.import_module(sys.argv[1])
    assert library.__file__
    counter = CallCounter(library.__file__)
    data = TensorDataset(torch.arange(11.0).unsqueeze(1), torch.ones(11, 1))
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(data, batch_size=2)
    with counter.count("Accelerator()"):
        accelerator = library.Accelerator(cpu=True)
    with counter.count("prepare"):
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        with counter.count("backward and step"):
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        with counter.count("gather_for_metrics"):
            accelerator.gather_for_metrics(inputs)
    folder = [tempfile.mkdtemp() if accelerator.is_main_process else ""]
    dist.broadcast_object_list(folder)
    with counter.count("save_state"):
        accelerator.save_state(f"{folder[0]}/state")
    accelerator.wait_for_everyone()  # Accelerate returns on other ranks before the main process has written
    with counter.count("load_state"):
        accelerator.load_state(f"{folder[0]}/state")
    if accelerator.is_main_process:
        print(json.dumps(counter.counts))
    accelerator.end_training()


main()
