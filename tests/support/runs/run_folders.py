"""Write run folders like `accel launch` and `accel_runtime`, with the numbers of a test."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_cli.runs.heartbeats import Totals
from accel_runtime.environment import settings as env

__all__ = ["START", "RunWriter", "write_beat"]

START = 1_800_000_000.0
"""The start of a run in seconds since 1970."""


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
        others = [0.0] * len(env.BEAT_ENTRY)
        totals = [
            Totals._make([stride * number, *entry, *others][: len(others)])
            for number, entry in enumerate(history, start=1)
        ]
        write_beat(self.path / f"attempt_{attempt}" / f"rank_{rank}" / env.BEAT, totals, pid=100 + rank)


def write_beat(
    file: Path,
    history: Sequence[Totals] = (),
    *,
    clock: float = 5000.0,
    recent: Sequence[float] = (),
    text: str = "",
    **numbers: int,
) -> None:
    """Write a heartbeat as `accel_runtime` does; times are in seconds since the start of the rank.

    Args:
        file: The file.
        history: The totals at the end of measured steps.
        clock: The monotonic clock at the start.
        recent: The times of the last steps, 64 if there are as many; by default the time of the last totals alone.
        text: The newest collective and its line.
        numbers: Numbers of the file by name, which replace those that follow from the history.
    """
    start = _to_ns(clock)
    entries = [
        [
            start + _to_ns(total)
            if name == "sampled_ns"
            else _to_ns(total)
            if name.endswith("_ns")
            else round(total)
            for name, total in zip(env.BEAT_ENTRY, totals, strict=True)
        ]
        for totals in history
    ]
    last = dict(zip(env.BEAT_ENTRY, entries[-1], strict=True)) if entries else {}
    recent = recent or [totals.time for totals in history[-1:]]
    values = dict.fromkeys(env.BEAT_NUMBERS, 0) | {
        "pid": os.getpid(),
        "steps": last.get("sampled_steps", len(recent)),
        "changed_ns": start,
        "started_ns": start,
        "started_epoch_ns": _to_ns(START),
        "part": -1,
        "entries": len(entries),
        **last,
        **numbers,
    }
    values["timed_steps"] = values["steps"]
    data = bytearray(env.BEAT_SIZE)
    struct.pack_into(f"={len(values)}q", data, 0, *values.values())
    data[env.BEAT_TEXT_RANGE] = text.encode().ljust(
        env.BEAT_TEXT_RANGE.stop - env.BEAT_TEXT_RANGE.start, b"\0"
    )
    for step, time in zip(range(values["steps"] - len(recent), values["steps"]), recent, strict=True):
        slot = env.BEAT_RECENT_RANGE.start + 8 * (step % env.BEAT_RECENT)
        struct.pack_into("=q", data, slot, start + _to_ns(time))
    flat = [number for entry in entries for number in entry]
    struct.pack_into(f"={len(flat)}q", data, env.BEAT_HISTORY_RANGE.start, *flat)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)


def _to_ns(seconds: float) -> int:
    return round(seconds * 1e9)
