"""Microseconds of a handshake without data, by slots and by summary, in alternating blocks: `handshake.py BLOCKS CALLS`."""

from __future__ import annotations

import json
import statistics
import sys
import time

from accel_runtime import Accelerator
from accel_runtime.collectives import handshake


def main() -> None:
    """Print the median and the minimum of the blocks, as JSON on rank 0."""
    blocks, calls = int(sys.argv[1]), int(sys.argv[2])
    backend = Accelerator(cpu=True)._backend  # noqa: SLF001 - a barrier without the checks of the Accelerator
    limits = {"slots": backend.topology.world_size, "summary": 1}
    times: dict[str, list[float]] = {name: [] for name in limits}
    for block in range(blocks + 1):
        for name, limit in limits.items():
            handshake.SUMMARY_WORLD_SIZE = limit
            start = time.perf_counter()
            for _ in range(calls):
                backend.barrier()
            if block:
                times[name].append((time.perf_counter() - start) / calls * 1e6)
    if backend.topology.rank == 0:
        print(json.dumps({name: [statistics.median(values), min(values)] for name, values in times.items()}))


main()
