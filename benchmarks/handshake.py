"""Time of the handshake before a collective, by the number of ranks: measured on this machine, computed for more."""

from __future__ import annotations

import json
import math

from accel_runtime.collectives.transport import SLOT, SUMMARY_VALUES
from benchmarks.bench import SCRIPTS, Bench
from benchmarks.report import NONE, Table, number

__all__ = ["measure", "rounds", "sent_bytes"]

MEASURED = (2, 4, 8, 16, 32)
COMPUTED = (64, 256, 1024, 4096)
_TEXT = """\
One handshake without data, as before a barrier or a reduction of large tensors: microseconds of wall time,
median (minimum) of blocks that alternate in the same processes, over Unix sockets. All ranks share the cores of
this machine. With more ranks than cores, the times show the number of messages and not the latency of a
network. Bytes and rounds are computed from the schedule. *Slots* is 4096 bytes of each rank to all others.
*Summary* is 64 bytes a round; with more than 32 ranks it comes first, and slots follow only if a rank differs
or has data to send."""


def rounds(world_size: int) -> int:
    """Return the number of rounds of a handshake."""
    return math.ceil(math.log2(world_size))


def sent_bytes(world_size: int) -> tuple[int, int]:
    """Return the bytes that a rank sends in a handshake by slots, and by a summary."""
    return (world_size - 1) * SLOT, rounds(world_size) * SUMMARY_VALUES * 8


def measure(bench: Bench) -> Table:
    """Measure small worlds, and compute the traffic of large ones."""
    rows = []
    for world_size in (*MEASURED, *COMPUTED):
        times: tuple[str, ...] = ("", "")
        if world_size in MEASURED:
            blocks, calls = str(2 * bench.repeats + 1), str(max(20, 800 // world_size))
            command = (
                f"{bench.accel}/torchrun",
                "--nproc-per-node",
                str(world_size),
                str(SCRIPTS / "handshake.py"),
            )
            found = json.loads(bench.run(*command, blocks, calls)().output.splitlines()[-1])
            times = tuple(f"{number(median)} ({number(least)})" for median, least in found.values())
        slots, summary = sent_bytes(world_size)
        rows.append(
            (
                str(world_size),
                str(rounds(world_size)),
                _format_bytes(slots),
                _format_bytes(summary),
                *(time or NONE for time in times),
            )
        )
    header = (
        "Ranks",
        "Rounds",
        "Slots: sent by a rank",
        "Summary: sent by a rank",
        "Slots, µs",
        "Summary, µs",
    )
    return Table("The handshake before a collective, by number of ranks", _TEXT, header, rows)


def _format_bytes(count: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{number(count / size)} {unit}"
    return f"{count} B"
