"""Rates of a training between two calls of `Accelerator.log`, for trackers."""

from __future__ import annotations

import time

from accel_runtime.observe.progress import Progress

__all__ = ["RateMeter"]


class RateMeter:
    """Measures the samples, tokens and floating-point operations per second of all ranks.

    Args:
        progress: The counts of this process.
        world_size: The number of ranks, each of which executes as many operations as this one.
    """

    def __init__(self, progress: Progress, world_size: int) -> None:
        self._progress, self._world_size = progress, world_size
        self._last = self._read_counts()

    def measure(self) -> dict[str, float]:
        """Return the rates since the last call by name; without those that are 0 or unknown."""
        last, self._last = self._last, self._read_counts()
        seconds, samples, tokens, steps = (now - before for now, before in zip(self._last, last, strict=True))
        if seconds <= 0:
            return {}
        flops = self._progress.step_flops * steps / seconds
        peak = self._progress.peak_flops
        rates = {
            "throughput/samples_per_s": samples / seconds,
            "throughput/tokens_per_s": tokens / seconds,
            "throughput/flops_per_s": self._world_size * flops,
            "throughput/mfu": flops / peak if peak else 0.0,
        }
        return {name: rate for name, rate in rates.items() if rate}

    def _read_counts(self) -> tuple[float, int, int, int]:
        progress = self._progress
        return time.perf_counter(), *progress.count_trained(), progress.steps
