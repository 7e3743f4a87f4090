"""Files and functions of a library that its calls enter, on rank 0 of 2: `calls.py LIBRARY`."""

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


class Entered:
    """Counts the Python functions of a package that are called, in all threads."""

    def __init__(self, package: str) -> None:
        self._folder = f"{Path(package).parent}/"
        self.counts: dict[str, tuple[int, int]] = {}
        """Files and functions, by the name of the call."""

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Count what is entered while the body runs."""
        entered = set()

        def note(frame: FrameType, event: str, _: Any) -> None:
            code = frame.f_code
            # The body of a class is optimized by no compiler; a comprehension and a module have names in brackets.
            is_function = code.co_flags & inspect.CO_OPTIMIZED and code.co_name[0] != "<"
            if event != "call" or not is_function or not code.co_filename.startswith(self._folder):
                return
            if not _is_import(frame):
                entered.add((code.co_filename, code.co_firstlineno, code.co_name))

        threading.setprofile(note)
        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        self.counts[name] = len({file for file, *_ in entered}), len(entered)


def _is_import(frame: FrameType | None) -> bool:
    """Return True if a module is being imported: what its body calls is not part of the call."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def main() -> None:
    """Print `{call: [files, functions]}`."""
    library = importlib.import_module(sys.argv[1])
    assert library.__file__
    entered = Entered(library.__file__)
    data = TensorDataset(torch.arange(11.0).unsqueeze(1), torch.ones(11, 1))
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(data, batch_size=2)
    with entered.during("Accelerator()"):
        accelerator = library.Accelerator(cpu=True)
    with entered.during("prepare"):
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        with entered.during("backward and step"):
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        with entered.during("gather_for_metrics"):
            accelerator.gather_for_metrics(inputs)
    folder = [tempfile.mkdtemp() if accelerator.is_main_process else ""]
    dist.broadcast_object_list(folder)
    with entered.during("save_state"):
        accelerator.save_state(f"{folder[0]}/state")
    accelerator.wait_for_everyone()  # Accelerate returns on the other ranks before the main process has written
    with entered.during("load_state"):
        accelerator.load_state(f"{folder[0]}/state")
    if accelerator.is_main_process:
        print(json.dumps(entered.counts))
    accelerator.end_training()


main()
