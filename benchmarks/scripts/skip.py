"""Wall time to the first batch of an epoch, and to a batch in its middle: `skip.py LIBRARY`."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

_BATCHES = 100_000
_SIZE = 32
_SAMPLES = (_BATCHES + 10) * _SIZE
_REPEATS = 5


class Numbers(Dataset[int]):
    """Dataset of its indices, which takes almost no time to read."""

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class StatefulStream(IterableDataset[int]):
    """Stream of numbers with a state."""

    def __init__(self) -> None:
        self.offset = 0

    def __iter__(self) -> Iterator[int]:
        while self.offset < _SAMPLES:
            self.offset += 1
            yield self.offset - 1
        self.offset = 0

    def state_dict(self) -> dict[str, int]:
        """Return the offset."""
        return {"offset": self.offset}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from the offset."""
        self.offset = state["offset"]


def main() -> None:
    """Print milliseconds of each repetition: `{measurement: {"fresh": [...], "skipped": [...]}}`."""
    torch.set_num_threads(1)
    name = sys.argv[1]
    library = importlib.import_module(name)
    accelerator = library.Accelerator(cpu=True)
    module = "accel_runtime.data.loader" if name == "accel_runtime" else name
    skip: Callable[..., Any] = importlib.import_module(module).skip_first_batches

    def create_loader(*, shuffle: bool) -> Any:
        torch.manual_seed(0)
        data = DataLoader(Numbers(), batch_size=_SIZE, shuffle=shuffle)
        return accelerator.prepare(data)

    def create_skipped(*, shuffle: bool) -> Any:
        return skip(create_loader(shuffle=shuffle), _BATCHES)

    measured = {
        "in order": _measure(lambda: create_loader(shuffle=False), lambda: create_skipped(shuffle=False)),
        "shuffled": _measure(
            lambda: create_loader(shuffle=True), lambda: create_skipped(shuffle=True), is_shuffled=True
        ),
        "stream": _measure_stream(accelerator, skip, resumes=name == "accel_runtime"),
    }
    print(json.dumps(measured | {"floor": _measure_permutations()}))


def _measure_stream(accelerator: Any, skip: Callable[..., Any], *, resumes: bool) -> dict[str, list[float]]:
    def create() -> Any:
        return accelerator.prepare(DataLoader(StatefulStream(), batch_size=_SIZE))

    if not resumes:
        return _measure(create, lambda: skip(create(), _BATCHES), repeats=1)
    state = _read_state(create())

    def resume() -> Any:
        loader = create()
        loader.load_state_dict(state)
        return loader

    return _measure(create, resume)


def _read_state(loader: Any) -> Any:
    """Return the state of a loader after the batches to skip."""
    for count, _ in enumerate(loader, 1):
        if count == _BATCHES:
            return loader.state_dict()
    raise AssertionError


def _measure(
    fresh: Callable[[], Any],
    skipped: Callable[[], Any],
    repeats: int = _REPEATS,
    *,
    is_shuffled: bool = False,
) -> dict[str, list[float]]:
    """Return the milliseconds to the first batch of both loaders, measured alternately."""
    times: dict[str, list[float]] = {"fresh": [], "skipped": []}
    for _ in range(repeats):
        for name, create, first in (("fresh", fresh, 0), ("skipped", skipped, _BATCHES * _SIZE)):
            start = time.perf_counter()
            batch = next(iter(create()))
            times[name].append((time.perf_counter() - start) * 1000)
            assert len(batch) == _SIZE, "the batch is not full"
            assert is_shuffled or batch[0] == first, f"the {name} iteration begins with {batch[0]}"
    return times


def _measure_permutations() -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"randperm": [], "randperm and tolist": []}
    for _ in range(_REPEATS):
        for name, draw in (
            ("randperm", lambda: torch.randperm(_SAMPLES)),
            ("randperm and tolist", lambda: torch.randperm(_SAMPLES).tolist()),
        ):
            start = time.perf_counter()
            draw()
            times[name].append((time.perf_counter() - start) * 1000)
    return times


main()
