"""Wall time and memory of saving and loading a model with AdamW: `checkpoint.py WHO MILLIONS FOLDER`.

WHO is `accel`, `background` (accel, which writes while the script goes on), `accelerate`, `synced` (Accelerate, whose
files are then synced), or `torch` for one bare `torch.save` of everything.
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
    "background": "accel_runtime",
    "accelerate": "accelerate",
    "synced": "accelerate",
}

_Way = Callable[[Path], Any]


def main() -> None:
    """Print seconds and bytes: `{what: [one number a save]}`."""
    who, millions, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    layers = round(millions * 1e6 / _WIDTH**2)
    model: nn.Module = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    accelerator = None
    if who in _LIBRARIES:
        accelerator = _accelerator(importlib.import_module(_LIBRARIES[who]), background=who == "background")
        model, optimizer = accelerator.prepare(model, optimizer)
    before = _memory()
    _step(model, optimizer)
    if who == "background":
        before += sum(t.nbytes for state in optimizer.state.values() for t in state.values())
        held = _background(accelerator, folder, model, optimizer)
        print(json.dumps(held | {"more": [_memory() - before]}))
        return
    save, load = _ways(accelerator, model, optimizer)
    if who == "synced":
        print(json.dumps({"save": _saves(folder, _add_sync(save))}))
        return
    times = _saves(folder, save)
    save(folder / "kept")
    loads = [_timed(load, folder / "kept") for _ in range(_SAVES)]
    _remove(folder / "kept")
    print(json.dumps({"save": times, "load": loads}))


def _accelerator(library: Any, *, background: bool) -> Any:
    options = {"project_config": library.ProjectConfiguration(async_save=True)} if background else {}
    return library.Accelerator(cpu=True, **options)


def _background(
    accelerator: Any, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, list[float]]:
    """Return the seconds that the first save and the others block the script, the total seconds, and the memory."""
    time.sleep(3)  # as long as a few steps of such a model; the memory is taken meanwhile
    held, whole = [], []
    for number in range(_SAVES + 1):
        path = folder / str(number)
        begun = time.perf_counter()
        accelerator.save_state(path)
        held.append(time.perf_counter() - begun)
        accelerator.wait_for_checkpoint()
        whole.append(time.perf_counter() - begun)
        _remove(path)
        _step(model, optimizer)
    return {"first": held[:1], "later": held[1:], "whole": whole}


def _ways(accelerator: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[_Way, _Way]:
    if accelerator is not None:
        return accelerator.save_state, accelerator.load_state

    def save(path: Path) -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

    def load(path: Path) -> None:
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return save, load


def _saves(folder: Path, save: _Way) -> list[float]:
    """Seconds of saves into new places, the first of which does not count."""
    times = []
    for number in range(_SAVES + 1):
        times.append(_timed(save, folder / str(number)))
        _remove(folder / str(number))
    return times[1:]


def _add_sync(save: _Way) -> _Way:
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


def _timed(act: _Way, path: Path) -> float:
    begun = time.perf_counter()
    act(path)
    return time.perf_counter() - begun


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer its state, and change everything."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _memory() -> float:
    """Bytes of this process that are in memory, files apart."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return sum(float(fields[kind].split()[0]) for kind in ("RssAnon", "RssShmem")) * 1024


main()
