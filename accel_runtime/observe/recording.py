"""Files that the main process writes for its launcher: logged values, the description of the run, checkpoints."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from accel_runtime.environment.settings import CHECKPOINTS, CONFIGURATION, DESCRIPTION, METRICS
from accel_runtime.foundation.logged_values import finite_or_text, mask_secrets, to_number, with_text_names
from accel_runtime.foundation.nested import has_dtensor
from accel_runtime.observe.heartbeat import Heartbeat, heartbeat

__all__ = ["BoundedLog", "RankRecorder", "rank_recorder"]

MAX_LINES = 4096
"""Lines of a file, which are thinned once it is full."""
_MAX_BYTES = 1 << 25
_MAX_SERIES = 256
"""Number of series that are thinned separately; further ones are thinned as one."""
_RETRY_S = 10.0
"""Seconds without an attempt to write after one has failed, on a full disk for instance."""
_MAX_TEXT = 1000
"""Characters of a logged text."""


@dataclass(eq=False)
class _Series:
    """Lines of one kind, of which every `stride`-th is kept."""

    calls: int = 0
    stride: int = 1


class BoundedLog:
    """JSON Lines file of bounded size; no method raises an error of the file system.

    Lines of a kind, such as values of the same names, form a series. Once the file is full, the longest series lose every
    second line, and only every second, fourth, ... of their lines is written from then on. So rare lines are kept while
    frequent ones are thinned.

    Args:
        path: A new file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._series: dict[Hashable, _Series] = {}
        self._lines: list[_Series] = []
        """Series of each line in the file."""
        self._size = 0
        self._retry_time = 0.0
        self._pid = os.getpid()
        # Background saves write in a thread. Reentrant: a signal handler of the script may log or save.
        self._lock = threading.RLock()

    def append(self, kind: Hashable, build: Callable[[], Mapping[str, Any]]) -> None:
        """Append the line that `build` returns, if it is one of those that are kept."""
        if os.getpid() != self._pid:  # a process that the script has forked
            return
        with self._lock:
            series = self._find_series(kind)
            number = series.calls
            series.calls += 1
            if number % series.stride or time.monotonic() < self._retry_time:
                return
            line = json.dumps(build(), allow_nan=False).encode("ascii") + b"\n"
            try:
                if len(self._lines) >= MAX_LINES or self._size + len(line) > _MAX_BYTES:
                    self._thin()
                if number % series.stride == 0 and self._size + len(line) <= _MAX_BYTES:
                    self._write(line, series)
            except OSError:
                self._retry_time = time.monotonic() + _RETRY_S

    def _find_series(self, kind: Hashable) -> _Series:
        if kind not in self._series and len(self._series) >= _MAX_SERIES:
            kind = None
        return self._series.setdefault(kind, _Series())

    def _write(self, line: bytes, series: _Series) -> None:
        with self._path.open("ab", buffering=0) as file:
            if file.write(line) != len(line):
                # A disk that became full took a part of the line.
                file.truncate(self._size)
                raise OSError
        self._lines.append(series)
        self._size += len(line)

    def _thin(self) -> None:
        """Drop every second line of long series: those with at least half the lines of the longest."""
        counts = Counter(self._lines)
        longest = max(counts.values(), default=0)
        halved = {series for series, count in counts.items() if count > 1 and 2 * count >= longest}
        if not halved:
            return
        kept, passed = [], Counter[_Series]()
        for series, line in zip(self._lines, self._path.read_bytes().splitlines(keepends=True), strict=False):
            if series not in halved or passed[series] % 2 == 0:
                kept.append((series, line))
            passed[series] += 1
        # Replaced, so that a reader never sees a part of it.
        new = self._path.with_suffix(".new")
        data = b"".join(line for _, line in kept)
        new.write_bytes(data)
        new.replace(self._path)
        self._lines, self._size = [series for series, _ in kept], len(data)
        for series in halved:
            series.stride *= 2


class RankRecorder:
    """Writes the files of the main process into its folder in the run folder of the launcher.

    Args:
        folder: The folder of the rank.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metrics = BoundedLog(folder / METRICS)
        self._checkpoints = BoundedLog(folder / CHECKPOINTS)

    def record_metrics(self, values: Mapping[str, Any], step: int | None) -> None:
        """Record the numbers and texts of a call of `Accelerator.log`; other values are left out."""
        self._metrics.append(
            tuple(map(str, values)),
            lambda: {"time": time.time(), "step": step, "values": _convert_values(values)},
        )

    def record_tracker_file(self, path: Path) -> None:
        """Record the file of the `jsonl` tracker, which has all logged values."""
        self._metrics.append(
            "tracker file", lambda: {"jsonl": os.fspath(path.absolute()), "time": time.time()}
        )

    def record_checkpoint(self, kind: Literal["save", "load"], path: str, seconds: float) -> None:
        """Record a checkpoint that was saved or loaded."""
        self._checkpoints.append(
            kind, lambda: {"time": time.time(), "path": path, "seconds": round(seconds, 3), "kind": kind}
        )

    def write_configuration(self, values: Mapping[Any, Any]) -> None:
        """Write the configuration of the trackers, with its secrets masked, in place of an earlier one."""
        with suppress(Exception):  # it may have any objects
            self._write(
                CONFIGURATION, json.dumps(mask_secrets(with_text_names(values)), default=str)[:_MAX_BYTES]
            )

    def write_description(self, text: str, data: Mapping[str, object]) -> None:
        """Write the description of the run, as text and as data, in place of an earlier one."""
        self._write(DESCRIPTION, json.dumps({"text": text, "data": data}, default=str))

    def _write(self, name: str, text: str) -> None:
        new = self._folder / f"{name}.new"
        with suppress(OSError):
            new.write_text(text, encoding="utf-8")
            new.replace(self._folder / name)


def rank_recorder(rank: int) -> RankRecorder | None:
    """Return the recorder of this process; None without a launcher that reads its files, and on other ranks than 0."""
    progress = heartbeat()
    return _create_recorder(progress.folder) if rank == 0 and isinstance(progress, Heartbeat) else None


@lru_cache(maxsize=1)
def _create_recorder(folder: Path) -> RankRecorder:
    return RankRecorder(folder)


def _convert_values(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Convert values to numbers and texts by name, those of a nested mapping to `name/key`."""
    converted: dict[str, Any] = {}
    for key, value in with_text_names(values).items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            converted |= _convert_values(value, f"{name}/")
            continue
        if has_dtensor([value]):  # its value would take a collective, which only this rank would enter
            continue
        # A tensor may have no value, such as one on the meta device.
        with suppress(Exception):
            item = to_number(value)
            if isinstance(item, (bool, int, float)):
                converted[name] = finite_or_text(item)
            elif isinstance(item, str):
                converted[name] = item[:_MAX_TEXT]
    return converted
