"""Metrics of a run for Prometheus, read from its folder at each request: progress, speed, restarts, stalls, memory, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple

from prometheus_client import start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from accel_cli.errors import UsageError
from accel_cli.planning.network import Endpoint
from accel_cli.runs.goodput import measure_goodput, read_checkpoints
from accel_cli.runs.run_dir import RunFolder
from accel_cli.runs.run_files import read_last_objects
from accel_cli.runs.snapshot import RankSnapshot, RunSnapshot, read_snapshot
from accel_cli.runs.speed import PARTS, Throughput

__all__ = ["METRICS", "MetricKind", "RunCollector", "serve_metrics"]


class MetricKind(NamedTuple):
    """A metric of a run: its type, the help text, and the names of its labels."""

    family: type[CounterMetricFamily | GaugeMetricFamily]
    text: str
    labels: tuple[str, ...] = ()


_RANK = ("rank",)
METRICS: Mapping[str, MetricKind] = MappingProxyType({
    "accel_world_size": MetricKind(GaugeMetricFamily, "Number of ranks on all nodes."),
    "accel_elapsed_seconds": MetricKind(GaugeMetricFamily, "Time since the start."),
    "accel_restarts": MetricKind(CounterMetricFamily, "Restarts of all processes."),
    "accel_stalls": MetricKind(CounterMetricFamily, "Stalls that stall_timeout found."),
    "accel_stalled_seconds": MetricKind(GaugeMetricFamily, "Time without progress of all ranks; 0 in progress."),
    "accel_goodput_ratio": MetricKind(GaugeMetricFamily, "Share of the wall time that moved the newest kept step forward."),
    "accel_lost_seconds": MetricKind(GaugeMetricFamily, "Wall time that moved no kept step forward.", ("cause",)),
    "accel_checkpoints": MetricKind(CounterMetricFamily, "Checkpoints that were saved."),
    "accel_checkpoint_age_seconds": MetricKind(GaugeMetricFamily, "Time since the last save."),
    "accel_checkpoint_duration_seconds": MetricKind(GaugeMetricFamily, "Duration of the last save."),
    "accel_steps": MetricKind(CounterMetricFamily, "Optimizer steps of this attempt.", _RANK),
    "accel_batches": MetricKind(CounterMetricFamily, "Batches of loaders in this attempt.", _RANK),
    "accel_steps_per_second": MetricKind(GaugeMetricFamily, "Optimizer steps per second, over the last steps.", _RANK),
    "accel_own_time_seconds": MetricKind(GaugeMetricFamily, "Time of a step in which the rank waits for no other.", _RANK),
    "accel_progress_age_seconds": MetricKind(GaugeMetricFamily, "Time since the last step, batch or collective.", _RANK),
    "accel_epoch": MetricKind(GaugeMetricFamily, "Epoch, from 0.", _RANK),
    "accel_eta_seconds": MetricKind(GaugeMetricFamily, "Time until the end of the epoch.", _RANK),
    "accel_memory_bytes": MetricKind(GaugeMetricFamily, "Resident memory of the process.", _RANK),
    "accel_gpu_memory_bytes": MetricKind(GaugeMetricFamily, "GPU memory of the process.", _RANK),
    "accel_gpu_utilization_ratio": MetricKind(
        GaugeMetricFamily, "Utilization of the GPU of the process, from 0 to 1.", _RANK
    ),
    "accel_rank_running": MetricKind(GaugeMetricFamily, "1 if the process runs.", _RANK),
    "accel_step_part_seconds": MetricKind(
        GaugeMetricFamily, "Time of a part of a step, over the last steps.", ("rank", "part")
    ),
    "accel_samples_per_second": MetricKind(GaugeMetricFamily, "Samples of all ranks per second."),
    "accel_tokens_per_second": MetricKind(GaugeMetricFamily, "Tokens of all ranks per second."),
    "accel_flops_per_second": MetricKind(GaugeMetricFamily, "Floating-point operations of all ranks per second."),
    "accel_mfu_ratio": MetricKind(GaugeMetricFamily, "Model FLOP/s utilization, from 0 to 1."),
    "accel_logged": MetricKind(GaugeMetricFamily, "Last value of a logged metric.", ("name",)),
})  # fmt: skip
"""The metrics by name, beside the run itself (`accel_run_info`); a counter is served with `_total`."""
_OF_RANK: Mapping[str, Callable[[RankSnapshot], float | None]] = MappingProxyType({
    "accel_steps": lambda rank: rank.beat.steps if rank.beat else 0,
    "accel_batches": lambda rank: rank.beat.batches if rank.beat else 0,
    "accel_steps_per_second": lambda rank: rank.rate,
    "accel_own_time_seconds": lambda rank: rank.own_time,
    "accel_progress_age_seconds": lambda rank: rank.progress_age,
    "accel_epoch": lambda rank: rank.beat.epoch if rank.beat else None,
    "accel_eta_seconds": lambda rank: rank.eta,
    "accel_memory_bytes": lambda rank: rank.memory,
    "accel_gpu_memory_bytes": lambda rank: rank.gpu_memory,
    "accel_gpu_utilization_ratio": lambda rank: None if rank.gpu_percent is None else rank.gpu_percent / 100,
    "accel_rank_running": lambda rank: float(rank.state in {"starting", "running"}),
})  # fmt: skip
"""The values of the metrics of each rank; None if they are not known."""
_THROUGHPUT: Mapping[str, Callable[[Throughput], float | None]] = MappingProxyType({
    "accel_samples_per_second": lambda rates: rates.samples,
    "accel_tokens_per_second": lambda rates: rates.tokens,
    "accel_flops_per_second": lambda rates: rates.flops,
    "accel_mfu_ratio": lambda rates: rates.mfu,
})  # fmt: skip
"""The values of the metrics of all ranks over the last steps; None if they are not known."""


class RunCollector(Collector):
    """Collects the metrics of a run at each request.

    Args:
        run: The folder of the run.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = run

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        snapshot = read_snapshot(self._run)
        labels = {"run": snapshot.run, "script": snapshot.script}
        yield InfoMetricFamily("accel_run", "The run.", labels)
        yield from self._collect_run(snapshot)
        for name, get in _OF_RANK.items():
            values = [((str(rank.rank),), get(rank)) for rank in snapshot.ranks]
            yield _build(name, *((labels, value) for labels, value in values if value is not None))
        parts = [(rank.rank, part, rank.parts) for rank in snapshot.ranks for part in (*PARTS, "wait")]
        yield _build(
            "accel_step_part_seconds",
            *(((str(rank), part), getattr(times, part)) for rank, part, times in parts if times),
        )
        for name, read in _THROUGHPUT.items():
            number = read(snapshot.throughput)
            yield _build(name, *([] if number is None else [((), number)]))
        logged = [(each.name, each.value) for each in snapshot.metrics]
        yield _build(
            "accel_logged", *(((name,), value) for name, value in logged if isinstance(value, float))
        )

    def _collect_run(self, snapshot: RunSnapshot) -> Iterator[Metric]:
        events = [event.get("event") for event in read_last_objects(self._run.path / "events.jsonl")]
        yield _build("accel_world_size", ((), snapshot.world_size or 0))
        yield _build("accel_elapsed_seconds", ((), snapshot.elapsed or 0.0))
        yield _build("accel_restarts", ((), events.count("restart")))
        yield _build("accel_stalls", ((), events.count("stall")))
        yield _build("accel_stalled_seconds", ((), snapshot.idle_time or 0.0))
        goodput = measure_goodput(self._run, snapshot.started, snapshot.time, is_kept=True)
        if goodput:
            yield _build("accel_goodput_ratio", ((), goodput.share))
            yield _build("accel_lost_seconds", *(((cause,), lost) for cause, lost in goodput.causes.items()))
        saves = [save for save in read_checkpoints(self._run) if save.get("kind") != "load"]
        yield _build("accel_checkpoints", ((), len(saves)))
        if saves:
            yield _build("accel_checkpoint_age_seconds", ((), max(0.0, snapshot.time - saves[-1]["time"])))
            yield _build("accel_checkpoint_duration_seconds", ((), saves[-1]["seconds"]))


def _build(name: str, *values: tuple[tuple[str, ...], float]) -> Metric:
    """Return a metric of `METRICS` with its values by their labels."""
    kind = METRICS[name]
    metric = kind.family(name, kind.text, labels=kind.labels)
    for labels, value in values:
        metric.add_metric(labels, value)
    return metric


@contextmanager
def serve_metrics(run: RunFolder, address: str) -> Iterator[None]:
    """Serve the metrics of a run at `http://HOST:PORT/metrics` inside a `with` block.

    Raises:
        UsageError: The address cannot be used.
    """
    endpoint = Endpoint.parse(address)
    registry = CollectorRegistry()
    registry.register(RunCollector(run))
    try:
        server, thread = start_http_server(endpoint.port, endpoint.host, registry)
    except OSError as error:
        raise UsageError(
            f"Cannot serve metrics at {address}: {error.strerror or error}. Choose another one with --metrics-port."
        ) from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
