"""Wall time and memory of saving and loading a model with AdamW: `checkpoint.py METHOD MILLIONS FOLDER`.

METHOD is `accel`, `async` (accel with asynchronous saves), `accelerate`, `synced` (Accelerate, then fsync of all files),
or `torch` (one `torch.save`).
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

_WIDTH = 2048
_SAVES = 3
_LIBRARIES = {
    "accel": "accel_runtime",
    "async": "accel_runtime",
    "accelerate": "accelerate",
    "synced": "accelerate",
}

_Operation = Callable[[Path], Any]


def main() -> None:
    """Print seconds and bytes of each save: `{measurement: [...]}`."""
    method, millions, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    layers = round(millions * 1e6 / _WIDTH**2)
    model: nn.Module = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    accelerator = None
    if method in _LIBRARIES:
        library = importlib.import_module(_LIBRARIES[method])
        accelerator = _create_accelerator(library, async_save=method == "async")
        model, optimizer = accelerator.prepare(model, optimizer)
    before = _read_memory()
    _step(model, optimizer)
    if method == "async":
        before += sum(t.nbytes for state in optimizer.state.values() for t in state.values())
        seconds = _measure_async_saves(accelerator, folder, model, optimizer)
        print(json.dumps(seconds | {"memory": [_read_memory() - before]}))
        return
    save, load = _build_operations(accelerator, model, optimizer)
    if method == "synced":
        print(json.dumps({"save": _measure_saves(folder, _add_sync(save))}))
        return
    saves = _measure_saves(folder, save)
    save(folder / "last")
    loads = [_measure(load, folder / "last") for _ in range(_SAVES)]
    _remove(folder / "last")
    print(json.dumps({"save": saves, "load": loads}))


def _create_accelerator(library: Any, *, async_save: bool) -> Any:
    options = {"project_config": library.ProjectConfiguration(async_save=True)} if async_save else {}
    return library.Accelerator(cpu=True, **options)


def _measure_async_saves(
    accelerator: Any, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, list[float]]:
    """Return the seconds that the first save and the later ones block the script, and the seconds of complete saves."""
    time.sleep(3)  # a few steps of such a model, during which the memory is allocated
    blocked, complete = [], []
    for number in range(_SAVES + 1):
        path = folder / str(number)
        start = time.perf_counter()
        accelerator.save_state(path)
        blocked.append(time.perf_counter() - start)
        accelerator.wait_for_checkpoint()
        complete.append(time.perf_counter() - start)
        _remove(path)
        _step(model, optimizer)
    return {"first": blocked[:1], "later": blocked[1:], "complete": complete}


def _build_operations(
    accelerator: Any, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[_Operation, _Operation]:
    if accelerator is not None:
        return accelerator.save_state, accelerator.load_state

    def save(path: Path) -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

    def load(path: Path) -> None:
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return save, load


def _measure_saves(folder: Path, save: _Operation) -> list[float]:
    """Return the seconds of saves to new paths, without the first."""
    seconds = []
    for number in range(_SAVES + 1):
        seconds.append(_measure(save, folder / str(number)))
        _remove(folder / str(number))
    return seconds[1:]


def _add_sync(save: _Operation) -> _Operation:
    """Return a save that also flushes every file and directory of the checkpoint, and its name, to the disk."""

    def save_and_sync(folder: Path) -> None:
        save(folder)
        for path in [*folder.rglob("*"), folder, folder.parent]:
            opened = os.open(path, os.O_RDONLY)
            os.fsync(opened)
            os.close(opened)

    return save_and_sync


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _measure(operation: _Operation, path: Path) -> float:
    start = time.perf_counter()
    operation(path)
    return time.perf_counter() - start


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a step, which creates the state of the optimizer, and changes all parameters."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _read_memory() -> float:
    """Return the resident memory of this process in bytes, without mapped files."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return sum(float(fields[kind].split()[0]) for kind in ("RssAnon", "RssShmem")) * 1024


main()
