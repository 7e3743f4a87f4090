"""A file with one JSON object a line: the tracker that needs no package."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any, TextIO

from typing_extensions import override

from accel_runtime.tracking.base import Provided, on_main_process
from accel_runtime.tracking.values import plain

__all__ = ["JSONLTracker"]

_NAMES = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


class JSONLTracker(Provided):
    """Appends to `<logging_dir>/<run_name>.jsonl`, and flushes every line.

    A line is `{"time": ..., "step": ..., "values": {...}}`, or `{"time": ..., "config": {...}}` where a run
    begins; `time` is in seconds since 1970. What JSON has no number for is the text `NaN`, `Infinity` or
    `-Infinity`.

    Args:
        run_name: The project's name.
        logging_dir: The folder; it is made if need be.
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str) -> None:
        super().__init__()
        self.path = Path(logging_dir) / f"{run_name}.jsonl"
        self._file: TextIO | None = None

    @override
    @on_main_process
    def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torn = _torn(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        self._file.write("\n" if torn else "")

    @property
    def tracker(self) -> TextIO | None:
        """The open file; None before the start."""
        return self._file

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._write({"config": self._kept(values)})

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None) -> None:  # type: ignore[override]
        self._write({"step": step, "values": self._kept(values)})

    @override
    @on_main_process
    def finish(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps({"time": time.time(), **line}, allow_nan=False) + "\n")
        self._file.flush()

    def _kept(self, values: dict[str, Any]) -> dict[str, Any]:
        kept, left = {}, {}
        for key, value in values.items():
            try:
                kept[str(key)] = _data(value)
            except TypeError:
                left[str(key)] = value
        self.leave_out(left)
        return kept


def _data(value: Any) -> Any:
    """What JSON can hold of a value."""
    value = plain(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _NAMES[str(value)]
    if isinstance(value, dict):
        return {str(key): _data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_data(item) for item in value]
    if callable(getattr(value, "tolist", None)):
        return _data(value.tolist())
    if isinstance(value, Path):
        return str(value)
    raise TypeError(value)


def _torn(path: Path) -> bool:
    """Whether a run that was killed has left the last line unfinished."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
