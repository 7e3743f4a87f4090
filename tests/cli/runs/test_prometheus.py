"""Metrics for Prometheus: their values, the address, and the dashboard that shows them."""

from __future__ import annotations

import json
import re
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry
from support.cases import golden
from support.processes.children import free_port
from support.runs.run_folders import write_beat

from accel_cli.errors import UsageError
from accel_cli.runs.heartbeats import Totals
from accel_cli.runs.prometheus import RunCollector, serve_metrics
from accel_cli.runs.run_dir import RunFolder

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana" / "accel.json"


@pytest.fixture
def run(tmp_path):
    """The folder of a run with two ranks, of which the first has made steps, a restart, a stall and two checkpoints."""
    folder = RunFolder.create(tmp_path, "train.py", {"world_size": 2, "target": "train.py"})
    for rank in (0, 1):
        folder.get_rank(0, rank).path.mkdir(parents=True)
    # Steps of 1 s, of which 0.1 s is that of each part.
    history = [
        Totals(step, step, *(share * step for share in (0.6, 0.1, 0.1, 0.1, 0.1, 0.4)), 0, 0)
        for step in range(1, 41)
    ]
    write_beat(folder.get_rank(0, 0).beat, history)
    events = [{"time": 1.0, "event": event} for event in ("start", "stall", "restart", "start")]
    saves = [
        {"time": time, "path": "c", "seconds": 2.5, "kind": kind}
        for time, kind in ((5.0, "save"), (6.0, "load"))
    ]
    (folder.path / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    folder.get_rank(0, 0).checkpoints.write_text("".join(f"{json.dumps(save)}\n" for save in saves))
    return folder


def read(address):
    """Return the samples that are served, by name and labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_metrics_of_a_run_are_served_while_it_runs(run):
    with free_port() as port:
        pass
    address = f"127.0.0.1:{port}"
    with serve_metrics(run, address):
        samples = read(address)
    assert samples["accel_steps_total", "0"] == 40
    parts = {"data": 0.1, "forward": 0.1, "backward": 0.1, "update": 0.1, "rest": 0.2, "wait": 0.4}
    assert {part: samples["accel_step_part_seconds", part, "0"] for part in parts} == pytest.approx(parts)
    assert samples["accel_steps_total", "1"] == 0
    assert samples["accel_world_size",] == 2
    assert samples["accel_restarts_total",] == samples["accel_stalls_total",] == 1
    assert samples["accel_checkpoints_total",] == 1
    assert samples["accel_checkpoint_duration_seconds",] == 2.5
    assert samples["accel_checkpoint_age_seconds",] > 1e6
    assert ("accel_progress_age_seconds", "1") not in samples, "not known before the first step"
    with pytest.raises(urllib.error.URLError):
        read(address)


def test_the_names_texts_and_labels_of_the_metrics_are_the_golden_ones(run):
    registry = CollectorRegistry()
    registry.register(RunCollector(run))
    text = generate_latest(registry).decode()
    # The id of the run, and numbers of this moment and this process.
    text = re.sub(r'run="[^"]+"', 'run="RUN"', text)
    text = re.sub(
        r"^(accel_(?:elapsed|goodput|lost|stalled_seconds|checkpoint_age|progress_age|steps_per_second|memory)\S*) \S+$",
        r"\1 N",
        text,
        flags=re.MULTILINE,
    )
    golden.check("prometheus.txt", text)


def test_an_address_in_use_is_an_error_with_the_option(run):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with (
            pytest.raises(UsageError, match=rf"Cannot serve metrics at {address}: .*--metrics-port"),
            serve_metrics(run, address),
        ):
            pass


def test_the_dashboard_shows_each_metric_and_no_other(run):
    collected = {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in RunCollector(run).collect()
    }
    panels = json.loads(DASHBOARD.read_text())["panels"]
    shown = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"accel_\w+", target["expr"])
    }
    assert shown <= collected
    assert collected - shown == {
        "accel_run", "accel_elapsed_seconds", "accel_stalled_seconds", "accel_checkpoints_total", "accel_batches_total",
        "accel_epoch", "accel_eta_seconds", "accel_flops_per_second",
    }  # fmt: skip
