"""JSON Lines tracker, which needs no package."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

from typing_extensions import override

from accel_runtime.foundation.logged_values import finite_or_text, to_number, with_text_names
from accel_runtime.monitoring.logging import find_topology
from accel_runtime.observe.recording import rank_recorder
from accel_runtime.tracking.base import BuiltInTracker, on_main_process

__all__ = ["JSONLTracker"]


class JSONLTracker(BuiltInTracker):
    """Append to `<logging_dir>/<run_name>.jsonl`, and flush every line.

    A line is `{"time": ..., "step": ..., "values": {...}}`, or `{"time": ..., "config": {...}}` at the start of a run;
    `time` is in seconds since 1970. Non-finite numbers become the text `NaN`, `Infinity` or `-Infinity`.

    Args:
        run_name: The name of the project.
        logging_dir: The directory, created if missing.
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str) -> None:
        super().__init__(run_name)
        self.path = Path(logging_dir) / f"{run_name}.jsonl"
        self._file: TextIO | None = None

    @override
    @on_main_process
    def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        incomplete = _is_last_line_incomplete(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        self._file.write("\n" if incomplete else "")
        if recorder := rank_recorder(find_topology().rank):
            recorder.record_tracker_file(self.path)

    @property
    def tracker(self) -> TextIO | None:
        """Return the open file; None before the start."""
        return self._file

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._write({"config": self._to_json(self.convert_configuration(values))})

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None) -> None:  # type: ignore[override]
        self._write({"step": step, "values": self._to_json(values)})

    @override
    @on_main_process
    def finish(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps({"time": time.time(), **line}, allow_nan=False) + "\n")
        self._file.flush()

    def _to_json(self, values: dict[str, Any]) -> dict[str, Any]:
        supported, others = {}, {}
        for key, value in with_text_names(values).items():
            try:
                supported[key] = _to_json_value(value)
            except TypeError:
                others[key] = value
        self.leave_out(others)
        return supported


def _to_json_value(value: Any) -> Any:
    """Convert a value to one that JSON supports, or raise TypeError."""
    value = to_number(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return finite_or_text(value)
    if isinstance(value, dict):
        return {key: _to_json_value(item) for key, item in with_text_names(value).items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_to_json_value(item) for item in value]
    if callable(getattr(value, "tolist", None)):
        return _to_json_value(value.tolist())
    if isinstance(value, Path):
        return str(value)
    raise TypeError(value)


def _is_last_line_incomplete(path: Path) -> bool:
    """Return whether a killed run has left the last line incomplete."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
