"""The record of a run: its facts, events and memory, the line at its end, and the hint about a run without output."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from accel_cli.planning.plan import LaunchDetails, Plan
from accel_cli.runner.output import SilenceHint
from accel_cli.runs import recorder
from accel_cli.runs.recorder import RunRecorder, build_record
from accel_cli.runs.run_dir import RunFolder
from accel_cli.runs.usage import read_gpu_usage
from accel_runtime.observe.nvml import load_nvml


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path, "train.py", {})


def read_lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def start_rank(run, rank):
    """Start a process that waits, registered as a rank of the run."""
    folder = run.get_rank(0, rank)
    folder.path.mkdir(parents=True)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    folder.pid.write_text(str(process.pid))
    return process


def fake_pynvml(processes):
    """Return a fake of the module `pynvml` on a node with two GPUs, from the memory of processes by GPU."""
    return SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetComputeRunningProcesses=lambda device: [
            SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in processes.get(device, {}).items()
        ],
        nvmlDeviceGetUtilizationRates=lambda device: SimpleNamespace(gpu=(40, 90)[device]),
    )


@pytest.fixture
def driver(monkeypatch):
    """Installs the fake of `pynvml`."""

    def install(processes):
        monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml(processes))
        load_nvml.cache_clear()

    yield install
    load_nvml.cache_clear()


def test_events_are_appended_with_their_time(run):
    recorder = RunRecorder(run, time.monotonic())
    before = time.time()
    recorder.record("start", attempt=0, world_size=2, ranks=[0, 1])
    recorder.record("end", exit_code=3)
    start, end = read_lines(run.path / "events.jsonl")
    assert before <= start.pop("time") <= end.pop("time") <= time.time()
    assert start == {"event": "start", "attempt": 0, "world_size": 2, "ranks": [0, 1]}
    assert end == {"event": "end", "exit_code": 3}


def test_a_removed_folder_does_not_end_the_run(run):
    recorder = RunRecorder(run, time.monotonic())
    (run.path / "run.json").unlink()
    run.path.rmdir()
    recorder.record("stall", seconds=1.0, text="x")
    recorder._next_sample = 0.0
    recorder.sample_memory(0)


def test_the_record_has_the_facts_of_the_launch_without_secrets():
    plan = Plan(
        launcher="torchrun",
        argv=(
            "python",
            "worker.py",
            "script",
            "train.py",
            "--lr",
            "0.1",
            "--api-key",
            "abc",
            "--hf_token=abc",
            "x",
        ),
        env={},
        device="cpu",
        target="train.py",
        nproc_per_node=2,
        details=LaunchDetails(
            ("--lr", "0.1", "--api-key", "abc", "--hf_token=abc", "x"), "headline", {"launcher.ranks": 0}
        ),
    )
    record = build_record(plan, "2.9", time.monotonic())
    assert record["arguments"] == ["--lr", "0.1", "--api-key", "***", "--hf_token=***", "x"]
    assert record["argv"] == ["python", "worker.py", "script", "train.py", *record["arguments"]]
    assert record["versions"]["torch"] == "2.9"
    assert (record["target"], record["nproc_per_node"], record["headline"]) == ("train.py", 2, "headline")
    assert Plan.from_json(plan.to_json()).details.profile == {"launcher.ranks": 0}


def test_the_memory_of_running_ranks_is_sampled(run):
    recorder = RunRecorder(run, time.monotonic())
    ranks = [start_rank(run, rank) for rank in (0, 3)]
    try:
        recorder.sample_memory(0)
        assert not (run.path / "memory.jsonl").exists(), "not before the interval has passed"
        recorder._next_sample = 0.0
        recorder.sample_memory(0)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    recorder._next_sample = 0.0
    recorder.sample_memory(0)
    (sample,) = read_lines(run.path / "memory.jsonl")
    assert (sample["attempt"], set(sample["rss"])) == (0, {"0", "3"})
    assert all(0 < size < 2**30 for size in sample["rss"].values())


def test_the_samples_of_the_memory_are_limited_and_cover_the_whole_run(run, monkeypatch):
    """Also at 10,000 samples the file has at most 1,024 lines, evenly spaced from the first on."""
    folder = run.get_rank(0, 0)
    folder.path.mkdir(parents=True)
    folder.pid.write_text(str(os.getpid()))
    clock = [0.0]
    monkeypatch.setattr(recorder, "time", SimpleNamespace(monotonic=lambda: clock[0], time=lambda: clock[0]))
    samples = RunRecorder(run, time.monotonic())
    sizes = set()
    for second in range(0, 50_000, 5):
        clock[0] = float(second)
        samples.sample_memory(0)
        if second % 1000 == 0 and second:
            sizes.add(len(read_lines(run.path / "memory.jsonl")))
    assert max(sizes) <= 1024
    times = [sample["time"] for sample in read_lines(run.path / "memory.jsonl")]
    assert times[0] == 5.0
    assert len({later - earlier for earlier, later in itertools.pairwise(times)}) == 1
    assert times[-1] > 49_000


def test_gpu_memory_is_added_to_the_samples_if_a_driver_exists(run, driver):
    process = start_rank(run, 1)
    driver({0: {process.pid: 3 << 30, 1: 1 << 30}, 1: {process.pid: None}})
    try:
        assert read_gpu_usage({process.pid, 999_999}) == {process.pid: (3 << 30, 90)}
        recorder = RunRecorder(run, time.monotonic())
        recorder._next_sample = 0.0
        recorder.sample_memory(0)
    finally:
        process.kill()
        process.wait()
    assert read_lines(run.path / "memory.jsonl")[0]["gpu"] == {"1": 3 << 30}


def test_a_gpu_that_is_lost_or_has_no_utilisation_does_not_hide_the_others(driver, monkeypatch):
    driver({0: {7: 1 << 30}, 1: {8: 2 << 30}})

    def fail(device):
        raise sys.modules["pynvml"].NVMLError("not supported")

    utilization = sys.modules["pynvml"].nvmlDeviceGetUtilizationRates
    monkeypatch.setattr(
        sys.modules["pynvml"],
        "nvmlDeviceGetUtilizationRates",
        lambda device: utilization(device) if device else fail(device),
    )
    assert read_gpu_usage({7, 8}) == {7: (1 << 30, 0), 8: (2 << 30, 90)}
    monkeypatch.setattr(
        sys.modules["pynvml"], "nvmlDeviceGetHandleByIndex", lambda index: index or fail(index)
    )
    assert read_gpu_usage({7, 8}) == {8: (2 << 30, 90)}


def test_no_gpu_usage_is_reported_without_a_driver():
    """The package is installed; its library finds no driver on a machine without GPU."""
    pytest.importorskip("pynvml")
    load_nvml.cache_clear()
    assert read_gpu_usage({os.getpid()}) == {}


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (0, "2 processes finished in 0.0 s, exit code 0"),
        (143, "2 processes ended after 0.0 s with exit code 143"),
    ],
)
def test_the_end_of_a_run_is_recorded_and_described(run, code, line):
    recorder = RunRecorder(run, time.monotonic())
    recorder.end(code)
    assert recorder.format_end("2 processes", code) == line
    status = run.read_status()
    assert (status.record["exit_code"], status.state) == (code, f"exit code {code}")
    assert abs(status.ended - time.time()) < 60


def test_a_run_lasts_from_the_start_of_the_command(run):
    """Before its folder, the command has imported torch, which took half of a short run."""
    begin = time.monotonic() - 40
    record = build_record(Plan(launcher="torchrun", argv=("python",), env={}, device="cpu"), "2.9", begin)
    assert record["started"] < time.time() - 39
    folder = RunFolder.create(run.path.parent, "train.py", record)
    assert folder.read_status().record["started"] == record["started"]
    line = RunRecorder(folder, begin).format_end("2 processes", 0)
    assert float(line.split()[4]) >= 40


def test_the_hint_is_given_once_after_a_silent_time(capsys):
    hint = SilenceHint()
    hint.check((time.monotonic() - 599, -math.inf))
    assert capsys.readouterr().err == ""
    for _ in range(2):
        hint.check((time.monotonic() - 601, -math.inf))  # before the start of the machine, perhaps
    assert capsys.readouterr().err == (
        "accel: no output for 10 min. Watch the run with accel top, show its stacks with accel stacks, or set "
        "--stall-timeout to detect stalls.\n"
    )


def test_the_hint_names_the_option_for_stalls_only_if_it_is_not_set(capsys):
    SilenceHint(seconds=1.0, detects_stalls=True).check([-math.inf])
    assert capsys.readouterr().err == (
        "accel: no output for 1 s. Watch the run with accel top, or show its stacks with accel stacks.\n"
    )
