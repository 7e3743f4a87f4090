"""Write run folders like `accel launch` and `accel_runtime`, with the numbers of a test."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_runtime.environment import settings as env

__all__ = ["START", "RunWriter"]

START = 1_800_000_000.0
"""The start of a run in seconds since 1970."""
_CLOCK = 5000.0
"""The monotonic clock at the start of a run."""


class RunWriter:
    """Writes the files of a run below a folder; times are in seconds since the start of the run."""

    def __init__(self, base: Path, name: str = "20270115-080000-train-1", **record: Any) -> None:
        self.path = base / name
        self.path.mkdir(parents=True)
        fields = {
            "argv": ["accel", "launch", "train.py", "--epochs", "3"],
            "target": "train.py",
            "arguments": ["--epochs", "3"],
            "launcher": "torchrun",
            "device": "cpu",
            "nnodes": 1,
            "nproc_per_node": 2,
            "world_size": 2,
            "headline": "torchrun, 2 processes, cpu",
            "profile": {"launcher.kind": "torchrun", "mixed_precision": "no"},
            "versions": {"accel": "0.1.0", "torch": "2.9.0", "python": "3.11.0"},
            "pid": 1,
            "host": "node-1",
            "started": START,
            "ended": START + 100,
            "exit_code": 0,
        }
        self.write("run.json", json.dumps(fields | record))

    def write(self, name: str, text: str) -> Path:
        """Write a file below the folder."""
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file

    def lines(self, name: str, lines: Iterable[Mapping[str, Any]]) -> Path:
        """Write a file with one JSON object a line; `time` is in seconds since the start."""
        text = "".join(json.dumps({**line, "time": START + line.get("time", 0.0)}) + "\n" for line in lines)
        return self.write(name, text)

    def events(self, *events: tuple[float, str, dict[str, Any]]) -> None:
        """Write `events.jsonl`."""
        self.lines("events.jsonl", ({"time": at, "event": name, **fields} for at, name, fields in events))

    def metrics(
        self, values: Iterable[tuple[float, int | None, dict[str, Any]]], attempt: int = 0, rank: int = 0
    ) -> Path:
        """Write `metrics.jsonl` of a rank: time, step and values."""
        return self.lines(
            f"attempt_{attempt}/rank_{rank}/metrics.jsonl",
            ({"time": at, "step": step, "values": named} for at, step, named in values),
        )

    def beat(
        self, rank: int, history: Sequence[tuple[float, ...]], attempt: int = 0, stride: int = 1
    ) -> None:
        """Write the heartbeat of a rank, with totals after each `stride` steps: time, own time, and others, which are 0 by default.

        They are in the order of an entry of the history: times in seconds, samples, tokens.
        """
        width = len(env.BEAT_ENTRY)
        totals = [(*entry, *(0.0,) * (width - len(entry))) for entry in history]
        last = totals[-1] if totals else (0.0,) * width
        numbers = dict.fromkeys(env.BEAT_NUMBERS, 0) | {
            "pid": 100 + rank,
            "steps": len(history) * stride,
            "changed_ns": _to_ns(_CLOCK + last[0]),
            "started_ns": _to_ns(_CLOCK),
            "started_epoch_ns": _to_ns(START),
            "stride": stride,
            **{
                name: _to_number(name, total)
                for name, total in zip(env.BEAT_ENTRY[1:], last[1:], strict=True)
            },
        }
        data = bytearray(env.BEAT_SIZE)
        struct.pack_into(f"={len(numbers)}q", data, 0, *numbers.values())
        entries = [
            _to_number(name, total + (_CLOCK if name == "time_ns" else 0))
            for each in totals
            for name, total in zip(env.BEAT_ENTRY, each, strict=True)
        ]
        struct.pack_into(f"={len(entries)}q", data, env.BEAT_HISTORY_RANGE.start, *entries)
        slot = (len(history) * stride - 1) % env.BEAT_RECENT
        struct.pack_into("=q", data, env.BEAT_RECENT_RANGE.start + 8 * slot, numbers["changed_ns"])
        file = self.path / f"attempt_{attempt}" / f"rank_{rank}" / env.BEAT
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


def _to_number(name: str, total: float) -> int:
    return _to_ns(total) if name.endswith("_ns") else round(total)


def _to_ns(seconds: float) -> int:
    return round(seconds * 1e9)
