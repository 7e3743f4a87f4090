"""Wall time to a batch far inside an epoch, beyond that to the first of it: `skip.py LIBRARY`."""

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
_TIMES = 5


class Numbers(Dataset[int]):
    """The cheapest possible dataset: only the skipping takes time."""

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Counting(IterableDataset[int]):
    """A stream that can say where it stands, and be put there."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < _SAMPLES:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        """The position."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go there."""
        self.at = state["at"]


def main() -> None:
    """Print milliseconds, one number a time: `{what: {fresh: [], skipped: []}}`."""
    torch.set_num_threads(1)
    name = sys.argv[1]
    library = importlib.import_module(name)
    accelerator = library.Accelerator(cpu=True)
    home = "accel_runtime.data.loader" if name == "accel_runtime" else name
    skip: Callable[..., Any] = importlib.import_module(home).skip_first_batches

    def loader(*, shuffle: bool) -> Any:
        torch.manual_seed(0)
        data = DataLoader(Numbers(), batch_size=_SIZE, shuffle=shuffle)
        return accelerator.prepare(data)

    def skipped(*, shuffle: bool) -> Any:
        return skip(loader(shuffle=shuffle), _BATCHES)

    measured = {
        "in order": _compared(lambda: loader(shuffle=False), lambda: skipped(shuffle=False)),
        "shuffled": _compared(lambda: loader(shuffle=True), lambda: skipped(shuffle=True), drawn=True),
        "stream": _streams(accelerator, skip, resumes=name == "accel_runtime"),
    }
    print(json.dumps(measured | {"floor": _permutations()}))


def _streams(accelerator: Any, skip: Callable[..., Any], *, resumes: bool) -> dict[str, list[float]]:
    def fresh() -> Any:
        return accelerator.prepare(DataLoader(Counting(), batch_size=_SIZE))

    if not resumes:
        return _compared(fresh, lambda: skip(fresh(), _BATCHES), times=1)
    state = _walked(fresh())

    def resumed() -> Any:
        loader = fresh()
        loader.load_state_dict(state)
        return loader

    return _compared(fresh, resumed)


def _walked(loader: Any) -> Any:
    for count, _ in enumerate(loader, 1):
        if count == _BATCHES:
            break
    return loader.state_dict()


def _compared(
    fresh: Callable[[], Any], skipped: Callable[[], Any], times: int = _TIMES, *, drawn: bool = False
) -> dict[str, list[float]]:
    """Milliseconds to the first batch of either, in turn; of a shuffled epoch nothing is taken off."""
    found: dict[str, list[float]] = {"fresh": [], "skipped": []}
    for _ in range(times):
        for name, make, first in (("fresh", fresh, 0), ("skipped", skipped, _BATCHES * _SIZE)):
            start = time.perf_counter()
            batch = next(iter(make()))
            found[name].append((time.perf_counter() - start) * 1000)
            assert len(batch) == _SIZE, "not a whole batch"
            assert drawn or batch[0] == first, f"the {name} walk begins with {batch[0]}"
    return found


def _permutations() -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"randperm": [], "randperm and tolist": []}
    for _ in range(_TIMES):
        for name, draw in (
            ("randperm", lambda: torch.randperm(_SAMPLES)),
            ("randperm and tolist", lambda: torch.randperm(_SAMPLES).tolist()),
        ):
            start = time.perf_counter()
            draw()
            found[name].append((time.perf_counter() - start) * 1000)
    return found


main()
