"""Metrics of a run for Prometheus, read from its folder at each request: progress, speed, restarts, stalls, memory, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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

__all__ = ["RunCollector", "serve_metrics"]

_COUNTERS: dict[str, tuple[str, Callable[[RankSnapshot], float | None]]] = {
    "accel_steps": ("Optimizer steps of this attempt.", lambda rank: rank.beat.steps if rank.beat else 0),
    "accel_batches": (
        "Batches of loaders in this attempt.",
        lambda rank: rank.beat.batches if rank.beat else 0,
    ),
}
_GAUGES: dict[str, tuple[str, Callable[[RankSnapshot], float | None]]] = {
    "accel_steps_per_second": ("Optimizer steps per second, over the last steps.", lambda rank: rank.rate),
    "accel_own_time_seconds": (
        "Time of a step in which the rank waits for no other.",
        lambda rank: rank.own_time,
    ),
    "accel_progress_age_seconds": (
        "Time since the last step, batch or collective.",
        lambda rank: rank.progress_age,
    ),
    "accel_epoch": ("Epoch, from 0.", lambda rank: rank.beat.epoch if rank.beat else None),
    "accel_eta_seconds": ("Time until the end of the epoch.", lambda rank: rank.eta),
    "accel_memory_bytes": ("Resident memory of the process.", lambda rank: rank.memory),
    "accel_gpu_memory_bytes": ("GPU memory of the process.", lambda rank: rank.gpu_memory),
    "accel_gpu_utilization_ratio": (
        "Utilization of the GPU of the process, from 0 to 1.",
        lambda rank: None if rank.gpu_percent is None else rank.gpu_percent / 100,
    ),
    "accel_rank_running": (
        "1 if the process runs.",
        lambda rank: float(rank.state in {"starting", "running"}),
    ),
}
"""The metrics of each rank: the help text, and the value; None if it is not known."""


_THROUGHPUT: dict[str, tuple[str, Callable[[Throughput], float | None]]] = {
    "accel_samples_per_second": ("Samples of all ranks per second.", lambda rates: rates.samples),
    "accel_tokens_per_second": ("Tokens of all ranks per second.", lambda rates: rates.tokens),
    "accel_flops_per_second": (
        "Floating-point operations of all ranks per second.",
        lambda rates: rates.flops,
    ),
    "accel_mfu_ratio": ("Model FLOP/s utilization, from 0 to 1.", lambda rates: rates.mfu),
}
"""The metrics of all ranks over the last steps; None if they are not known."""


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
        yield InfoMetricFamily("accel_run", "The run.", value=labels)
        yield from self._collect_run(snapshot)
        for name, (text, get) in _COUNTERS.items():
            yield _build(CounterMetricFamily, name, text, snapshot, get)
        for name, (text, get) in _GAUGES.items():
            yield _build(GaugeMetricFamily, name, text, snapshot, get)
        yield _build_parts(snapshot)
        for name, (text, value) in _THROUGHPUT.items():
            metric = GaugeMetricFamily(name, text)
            if (number := value(snapshot.throughput)) is not None:
                metric.add_metric([], number)
            yield metric
        logged = GaugeMetricFamily("accel_logged", "Last value of a logged metric.", labels=["name"])
        for series in snapshot.metrics:
            if isinstance(series.value, float):
                logged.add_metric([series.name], series.value)
        yield logged

    def _collect_run(self, snapshot: RunSnapshot) -> Iterator[Metric]:
        events = [event.get("event") for event in read_last_objects(self._run.path / "events.jsonl")]
        yield GaugeMetricFamily("accel_world_size", "Number of ranks on all nodes.", snapshot.world_size or 0)
        yield GaugeMetricFamily("accel_elapsed_seconds", "Time since the start.", snapshot.elapsed or 0.0)
        yield CounterMetricFamily("accel_restarts", "Restarts of all processes.", events.count("restart"))
        yield CounterMetricFamily("accel_stalls", "Stalls that stall_timeout found.", events.count("stall"))
        yield GaugeMetricFamily(
            "accel_stalled_seconds",
            "Time without progress of all ranks; 0 in progress.",
            snapshot.idle_time or 0.0,
        )
        goodput = measure_goodput(self._run, snapshot.started, snapshot.time, is_kept=True)
        if goodput:
            yield GaugeMetricFamily(
                "accel_goodput_ratio",
                "Share of the wall time that moved the newest kept step forward.",
                goodput.share,
            )
            lost = GaugeMetricFamily(
                "accel_lost_seconds", "Wall time that moved no kept step forward.", labels=["cause"]
            )
            for cause, seconds in goodput.causes.items():
                lost.add_metric([cause], seconds)
            yield lost
        saves = [save for save in read_checkpoints(self._run) if save.get("kind") != "load"]
        yield CounterMetricFamily("accel_checkpoints", "Checkpoints that were saved.", len(saves))
        if saves:
            yield GaugeMetricFamily(
                "accel_checkpoint_age_seconds",
                "Time since the last save.",
                max(0.0, snapshot.time - saves[-1]["time"]),
            )
            yield GaugeMetricFamily(
                "accel_checkpoint_duration_seconds", "Duration of the last save.", saves[-1]["seconds"]
            )


def _build(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    text: str,
    snapshot: RunSnapshot,
    get: Callable[[RankSnapshot], float | None],
) -> Metric:
    """Return a metric with the values of the ranks on this node that are known."""
    metric = kind(name, text, labels=["rank"])
    for rank in snapshot.ranks:
        value = get(rank)
        if value is not None:
            metric.add_metric([str(rank.rank)], value)
    return metric


def _build_parts(snapshot: RunSnapshot) -> Metric:
    """Return the times of the parts of a step of each rank."""
    metric = GaugeMetricFamily(
        "accel_step_part_seconds", "Time of a part of a step, over the last steps.", labels=["rank", "part"]
    )
    for rank in snapshot.ranks:
        for part in (*PARTS, "wait"):
            if rank.parts:
                metric.add_metric([str(rank.rank), part], getattr(rank.parts, part))
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
