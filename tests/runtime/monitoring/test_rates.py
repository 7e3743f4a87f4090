"""The throughput that `Accelerator.log` adds to logged values."""

import json
import os
import time
from types import SimpleNamespace

import pytest
import torch
from support.processes.rank_hooks import forget_progress
from torch.utils.data import DataLoader

from accel_runtime import Accelerator
from accel_runtime.monitoring.rates import RateMeter

ROWS = [{"ids": torch.zeros(5, dtype=torch.long), "x": torch.ones(2)} for _ in range(8)]


@pytest.fixture(autouse=True)
def _without_progress():
    """The progress is that of the process; without a launcher there is none."""
    with forget_progress():
        yield


def train(directory, **options):
    """Train for two epochs of two steps, and log after each; return the logged lines."""
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=directory, **options)
    accelerator.init_trackers("run")
    model = torch.nn.Linear(2, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(ROWS, 4 // accelerator.num_processes)
    )
    for epoch in range(2):
        for batch in loader:
            accelerator.backward(model(batch["x"]).sum())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.log({"loss": 1.0}, step=epoch)
    accelerator.end_training()
    file = directory / "run.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line["values"] for line in lines if "values" in line]


def test_rates_are_logged_if_they_are_asked_for(tmp_path):
    for values in train(tmp_path, throughput="ids"):
        assert values["loss"] == 1.0
        assert values["throughput/tokens_per_s"] == pytest.approx(5 * values["throughput/samples_per_s"])
        assert set(values) == {"loss", "throughput/samples_per_s", "throughput/tokens_per_s"}


@pytest.mark.parametrize("throughput", [True, lambda batch: 2 * len(batch["x"])])
def test_tokens_are_those_of_input_ids_or_of_a_function(tmp_path, throughput):
    for values in train(tmp_path, throughput=throughput):
        assert ("throughput/tokens_per_s" in values) == callable(throughput)
        if callable(throughput):
            assert values["throughput/tokens_per_s"] == pytest.approx(2 * values["throughput/samples_per_s"])


def test_nothing_is_added_otherwise(tmp_path):
    assert train(tmp_path) == [{"loss": 1.0}, {"loss": 1.0}]


def test_all_ranks_count_the_samples_of_all(pair, tmp_path):
    def run(path):
        rank = os.environ["RANK"]
        (path / rank).mkdir()
        return train(path / rank, throughput="ids")

    lines, others = pair.run(run, tmp_path)
    assert not others
    for values in lines:
        assert values["throughput/tokens_per_s"] == pytest.approx(5 * values["throughput/samples_per_s"])


def test_another_argument_is_refused():
    with pytest.raises(TypeError, match="Invalid throughput 3: expected True, the key"):
        Accelerator(cpu=True, throughput=3)


def test_operations_count_for_all_ranks_and_mfu_for_one(monkeypatch):
    clock = iter((10.0, 12.0, 12.0))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    progress = SimpleNamespace(count_trained=lambda: (0, 0), steps=5, step_flops=10**9, peak_flops=10**10)
    meter = RateMeter(progress, world_size=4)
    progress.steps = 13
    assert meter.measure() == {"throughput/flops_per_s": 16e9, "throughput/mfu": 0.4}
    assert meter.measure() == {}, "no time has passed"
