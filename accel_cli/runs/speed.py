"""Speed of a run: throughput, the parts of a step, and ranks or nodes that are slower than the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median_low
from typing import Any

from accel_cli.runs.heartbeats import Beat, Totals
from accel_cli.runs.run_dir import format_ranks
from accel_cli.runs.run_files import read_json

__all__ = [
    "MIN_SAMPLES",
    "MIN_STEPS",
    "PARTS",
    "RankSpeed",
    "Throughput",
    "describe_global_batch",
    "describe_part",
    "describe_slow_rank",
    "describe_throughput",
    "find_slowest",
    "format_number",
    "format_step_time",
]

MIN_STEPS = 20
"""The steps from which the speed of a rank is shown."""
MIN_SAMPLES = 10
"""The measured steps from which the parts of a step are shown, which says nothing of the number of steps in between."""
_LONG_RUN_S, _SHORT_RUN_S = 60.0, 10.0
"""The time of steps from which a slow rank is named at the end, and the throughput: first steps and other load decide shorter ones."""
_SLOWER, _MIN_SHARE = 1.1, 0.02
"""The slowest rank exceeds the median own time by this factor, and by this share of the time of a step."""
PARTS: Mapping[str, str] = {
    "data": "waiting for data",
    "forward": "in forward passes",
    "backward": "in backward passes",
    "update": "in updates (clipping, optimizer step)",
    "rest": "between steps",
}
"""The parts of own time, and how they are named in a sentence."""
_MIN_EXCESS = 0.5
"""The share of the additional own time of a slow rank from which a part of it is named."""


@dataclass(frozen=True)
class Throughput:
    """Throughput of all ranks per second; None if it is not known."""

    samples: float | None = None
    tokens: float | None = None
    flops: float | None = None
    """Floating-point operations."""
    mfu: float | None = None
    """Those of a rank divided by what its device can execute."""

    @classmethod
    def combine(cls, ranks: Iterable[RankSpeed], world_size: int | None) -> Throughput:
        """Return the throughput of a run by the speeds of the ranks of a node; each has counted the samples of all ranks."""
        speeds = [rank for rank in ranks if rank.steps_per_s]
        if not speeds:
            return cls()
        flops = [rank.flops * rank.steps_per_s for rank in speeds if rank.flops]
        shares = [
            rank.flops * rank.steps_per_s / rank.peak_flops
            for rank in speeds
            if rank.flops and rank.peak_flops
        ]
        return cls(
            samples=median_low(rank.means.samples * rank.steps_per_s for rank in speeds) or None,
            tokens=median_low(rank.means.tokens * rank.steps_per_s for rank in speeds) or None,
            flops=fmean(flops) * (world_size or len(speeds)) if flops else None,
            mfu=fmean(shares) if shares else None,
        )

    def to_json(self) -> dict[str, float | None]:
        """Return the numbers as JSON data."""
        return {
            "samples_per_s": self.samples,
            "tokens_per_s": self.tokens,
            "flops_per_s": self.flops,
            "mfu": self.mfu,
        }

    def format(self) -> str:
        """Return the known numbers as text; empty without one."""
        parts = [
            f"{_format_rate(self.samples)} samples/s" if self.samples else "",
            f"{_format_rate(self.tokens)} tokens/s" if self.tokens else "",
            f"{_format_flops(self.flops)}FLOP/s" if self.flops else "",
            f"MFU {self.mfu:.1%}" if self.mfu else "",
        ]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class RankSpeed:
    """Speed of a rank over some steps."""

    steps: int
    seconds: float
    """The time of these steps."""
    means: Totals
    """Times, samples and tokens per step."""
    steps_per_s: float
    flops: int = 0
    """The floating-point operations of a step."""
    peak_flops: int = 0
    host: str = ""

    @classmethod
    def measure(cls, beat: Beat, first: int, rate: float | None = None, host: str = "") -> RankSpeed | None:
        """Return the speed since an entry of the history; None without steps since then.

        Args:
            beat: The heartbeat.
            first: The number of the entry.
            rate: Steps per second; None is that of these steps.
            host: The node of the rank.
        """
        if first >= len(beat.history):
            return None
        start = beat.history[first]
        steps, seconds = round(beat.totals.steps - start.steps), beat.totals.time - start.time
        if steps <= 0 or seconds <= 0:
            return None
        means = beat.totals.average_since(start)
        return cls(steps, seconds, means, rate or steps / seconds, beat.flops, beat.peak_flops, host)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankSpeed:
        """Return the speed that `to_json` wrote."""
        return cls(**{**data, "means": Totals(*data["means"])})

    def to_json(self) -> dict[str, Any]:
        """Return the speed as JSON data."""
        return {**asdict(self), "means": list(self.means)}


def find_slowest(own_times: Mapping[int, float], step_time: float) -> int | None:
    """Return the rank with the largest own time per step, if it is clearly slower than most; None if no rank is."""
    if len(own_times) < 2:  # noqa: PLR2004 - a rank is slower than another
        return None
    rank = max(own_times, key=own_times.__getitem__)
    own, median = own_times[rank], median_low(own_times.values())
    return rank if own > _SLOWER * median and own - median > _MIN_SHARE * step_time else None


def describe_throughput(speeds: Mapping[int, RankSpeed], world_size: int | None) -> str:
    """Return the throughput of a whole run; empty for a short one."""
    long = [speed for speed in speeds.values() if speed.seconds >= _SHORT_RUN_S]
    return Throughput.combine(long, world_size).format()


def describe_slow_rank(speeds: Mapping[int, RankSpeed]) -> str:
    """Return which rank or node was clearly slower than the others over a whole run; empty if none was, or the run was short.

    Own time leaves out the time in collectives, in which the others wait for that rank.
    """
    speeds = {rank: speed for rank, speed in speeds.items() if speed.means.own and speed.steps >= MIN_STEPS}
    if max((speed.seconds for speed in speeds.values()), default=0.0) < _LONG_RUN_S:
        return ""
    step_time = max(speed.means.time for speed in speeds.values())
    own_times = {rank: speed.means.own for rank, speed in speeds.items()}
    slowest = find_slowest(own_times, step_time)
    if slowest is None:
        return ""
    host = speeds[slowest].host
    nodes: dict[str, list[int]] = {}
    for rank, speed in speeds.items():
        nodes.setdefault(speed.host, []).append(rank)
    others = [own_times[rank] for rank in speeds if speeds[rank].host != host]
    ranks, name = [slowest], f"rank {slowest}{f' on {host}' if len(nodes) > 1 else ''}"
    if (
        len(nodes[host]) > 1
        and others
        and min(own_times[rank] for rank in nodes[host]) > _SLOWER * median_low(others)
    ):
        ranks, name = nodes[host], f"node {host} ({format_ranks(nodes[host])})"
    own = median_low(own_times[rank] for rank in ranks)
    median = median_low(others if len(ranks) > 1 else own_times.values())
    cause = describe_part([speeds[rank].means for rank in ranks], [speed.means for speed in speeds.values()])
    return (
        f"{name} was slower than the others: {format_step_time(own)} of own time per step, {own / median - 1:.0%} above the "
        f"median of {format_step_time(median)}{cause}"
    )


def describe_part(slow: Sequence[Totals], every: Sequence[Totals]) -> str:
    """Return the part of a step that has most of the additional own time of slow ranks, as the end of a sentence.

    Args:
        slow: The means of the slow ranks.
        every: Those of all ranks, whose medians they are compared with.
    """

    def compare(name: str) -> tuple[float, float]:
        return median_low(getattr(means, name) for means in slow), median_low(
            getattr(means, name) for means in every
        )

    def get_excess(name: str) -> float:
        own, median = compare(name)
        return own - median

    # Without backward passes that are seen, the rest is the whole step.
    seen = [name for name in PARTS if name != "rest" or all(means.backward for means in slow)]
    name = max(seen, key=get_excess)
    if get_excess(name) < _MIN_EXCESS * get_excess("own"):
        return "; no single part of its steps explains it"
    own, median = compare(name)
    # Without batches that are seen, this part begins at the last step.
    has_batches = name != "forward" or all(means.data for means in slow)
    text = PARTS[name] if has_batches else "before backward passes"
    return f"; mostly {text}: {format_step_time(own)} instead of {format_step_time(median)}"


def format_number(value: float) -> str:
    """Return a number with three digits, or more before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"  # noqa: PLR2004 - three digits


def format_step_time(seconds: float) -> str:
    """Return a time of a step in seconds or milliseconds."""
    return f"{format_number(seconds)} s" if seconds >= 1 else f"{format_number(1000 * seconds)} ms"


def _format_rate(rate: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if rate >= 10 * size:
            return f"{rate / size:.3g}{unit}"
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"  # noqa: PLR2004 - three digits


def _format_flops(flops: float) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if flops >= size:
            return f"{flops / size:.3g} {unit}"
    return f"{flops:.3g} "


def describe_global_batch(description: Path) -> str:
    """Describe the global batch of the first prepared loader that differs from the batch in the script because of the number of ranks.

    The text is empty if there is none, or if the file does not describe it.

    Args:
        description: The description of the run, as the main process writes it.
    """
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        for loader in read_json(description)["data"]["loaders"]:
            size, parts, batch = loader["script_batch_size"], loader["parts"], loader["global_batch"]
            if loader.get("counts_samples"):
                steps, ranks = loader["micro_batches"], "rank" if parts == 1 else "ranks"
                return (
                    f"an optimizer step has {loader['samples_a_step']:,} samples on any number of processes: here up to {size:,} on each of "
                    f"{parts:,} {ranks} in {steps:,} micro-batch{'' if steps == 1 else 'es'}"
                )
            if size and batch != size:
                return (
                    f"the global batch is {batch:,} samples: {size:,} of the script on each of {parts:,} "
                    f"{'ranks' if loader['ranks_a_part'] == 1 else 'groups of ranks'}. The learning rate is that of the script"
                )
    return ""
