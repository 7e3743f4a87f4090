"""The commands for tests and benchmarks on a GPU, on a machine without one."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
import threading
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from support.processes.waits import limit

ROOT = Path(__file__).parent.parent
GPUS = torch.cuda.device_count()


def run_gpu_tests(tmp_path, *arguments, **variables):
    """Run the script of `make test-gpu`; return the finished process and the report, None without one."""
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "gpu" / "__main__.py", *arguments],
        env=os.environ | {"OUT": str(tmp_path / "out")} | variables,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit(500), check=False,
    )  # fmt: skip
    report = tmp_path / "out" / "gpu-report.json"
    return done, json.loads(report.read_text()) if report.exists() else None


@pytest.mark.skipif(GPUS > 0, reason="there is a GPU")
@pytest.mark.full
def test_the_report_lists_every_test_as_skipped_without_a_gpu(tmp_path):
    done, report = run_gpu_tests(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ skipped in ", done.stdout, re.MULTILINE)
    assert (report["gpus"], report["gpu"]) == (0, "none")
    for feature, results in report["features"].items():
        assert (results["passed"], results["failed"]) == ([], {}), feature
        assert set(results["skipped"].values()) <= {
            "needs a GPU",
            "needs two GPUs",
            "deepspeed is not installed",
            "accelerate is not installed",
            "nvme needs libaio",
        }, feature
        assert f"{feature:45} {len(results['skipped'])} skipped" in done.stdout
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["gpu-report.json"]


@pytest.mark.skipif(GPUS > 0, reason="there is a GPU")
@pytest.mark.full
def test_gpu_tests_that_call_no_cuda_function_pass_on_the_cpu(tmp_path):
    done, report = run_gpu_tests(tmp_path, REHEARSE_GPU_TESTS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(len(results["passed"]) for results in report["features"].values()) > 80


def test_missing_packages_are_reported_in_one_line(tmp_path):
    code = "import runpy, sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]; "
    code += f"sys.argv = ['x']; runpy.run_path({str(ROOT / 'tests' / 'gpu' / '__main__.py')!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "")
    packages = "torch, numpy, pytest, cloudpickle, safetensors, xxhash, typing_extensions"
    assert (
        done.stdout
        == f"test-gpu: Cannot run: not installed: {packages}. Install them for {sys.executable}.\n"
    )
    assert not list(tmp_path.iterdir())


def test_an_old_version_of_torch_is_reported_in_one_line(tmp_path):
    code = "import importlib.metadata, runpy, sys; importlib.metadata.version = lambda _: '2.8.0+cu128'; "
    code += f"sys.argv = ['x']; runpy.run_path({str(ROOT / 'tests' / 'gpu' / '__main__.py')!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout == "test-gpu: Cannot run: torch is 2.8.0+cu128. Install torch 2.9 or newer.\n"


@pytest.fixture
def gpu_page():
    """The script that writes docs/gpu.md."""
    spec = spec_from_file_location("gpu_page", ROOT / "docs" / "gpu_page.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_report(**features):
    """Return the report of a run on a GPU, with the numbers of tests that passed, failed and were skipped by feature."""
    results = {
        name.replace("_", " "): {
            "passed": [f"t{i}" for i in range(passed)],
            "failed": {f"f{i}": "wrong" for i in range(failed)},
            "skipped": {f"s{i}": "needs two GPUs" for i in range(skipped)},
        }
        for name, (passed, failed, skipped) in features.items()
    }
    run = {
        "date": "2027-01-02",
        "gpu": "A",
        "gpus": 1,
        "torch": "2.11",
        "cuda": "13",
        "python": "3.12",
        "accel": "0.1",
    }
    return run | {"features": results}


def read_rows(text):
    """Return the rows of the table by their first cell."""
    return dict(line.strip("| ").split(" | ", 1) for line in text.splitlines() if line.startswith("| "))


def test_the_page_lists_every_feature_of_the_tests_with_its_last_report(gpu_page):
    kept = json.loads(gpu_page.KEPT.read_text()) if gpu_page.KEPT.exists() else {}
    assert gpu_page.PAGE.read_text() == gpu_page.render_page(kept), "run docs/gpu_page.py"
    names = gpu_page.list_features()
    assert {"Device placement", "fully_shard with fp16", "Two processes, over NCCL"} <= set(names)
    assert len(names) == len(set(names)) > 20
    rows = read_rows(gpu_page.render_page({}))
    assert {rows[name] for name in names} == {"not yet run on a GPU"}


def test_the_page_lists_the_last_success_and_a_later_failure(gpu_page):
    first = gpu_page.merge_report(
        {}, build_report(fully_shard=(3, 0, 1), torch=(0, 0, 2), gather_for_metrics=(1, 1, 0))
    )
    assert sorted(first) == ["fully shard", "gather for metrics"], "features whose tests were all skipped"
    assert first["gather for metrics"]["worked"] is None
    later = gpu_page.merge_report(first, build_report(fully_shard=(2, 1, 0)) | {"date": "2027-02-03"})
    assert later["fully shard"]["worked"]["date"] == "2027-01-02"
    assert later["fully shard"]["failed"]["tests"] == ["f0"]
    page = gpu_page.render_page({"fully_shard": later["fully shard"]})
    assert read_rows(page)["fully_shard"] == "2027-01-02 (3 tests, 1 skipped); failed on 2027-02-03: f0 | 1"
    assert "\nMachine 1: 1 × A, torch 2.11" in page  # noqa: RUF001
    passed = gpu_page.merge_report(later, build_report(fully_shard=(4, 0, 0)) | {"date": "2027-03-04"})
    assert passed["fully shard"]["failed"] is None


def test_a_report_without_a_gpu_is_rejected(gpu_page, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(build_report() | {"gpus": 0}))
    with pytest.raises(SystemExit, match="without a GPU"):
        gpu_page.main([str(path)])


@pytest.mark.full
def test_every_gpu_benchmark_runs_with_tiny_sizes(tmp_path):
    page = tmp_path / "page.md"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--output", page],
        cwd=ROOT, capture_output=True, text=True, timeout=limit(300), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    titles = re.findall(r"^## (.*)", page.read_text(), re.MULTILINE)
    assert titles == [
        "CPU time a step", "A training step", "Batches and copies", "fully_shard", "A compiled step", "Saving"
    ]  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]
    if not GPUS:
        refused = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert (refused.returncode, "no GPU that torch can use" in refused.stderr) == (2, True)


@pytest.fixture
def gpu(monkeypatch):
    """The module that `make bench-gpu` runs."""
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("benchmarks.gpu")


def test_the_page_names_benchmarks_that_exceed_the_time_limit(gpu, tmp_path, capsys, monkeypatch):
    done = []

    def measure(bench):
        done.append(bench.device.type)
        monkeypatch.setattr(gpu.Bench, "is_out_of_time", lambda _: True)
        return gpu.Table("First", "measured", ("",), [])

    monkeypatch.setattr(gpu, "SUBJECTS", {"one": measure, "two": measure, "three": measure})
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.delenv("OUT", raising=False)
    page = tmp_path / "docs" / "benchmarks-gpu.md"
    page.parent.mkdir()
    assert gpu.main(["--tiny"]) == 0
    assert len(done) == 1
    sections = page.read_text().split("## ")[1:]
    assert [section.splitlines()[0] for section in sections] == ["First", "two", "three"]
    assert all("Not measured: the time of this run was used up." in section for section in sections[1:])
    assert "bench-gpu: three: not measured" in capsys.readouterr().err


def test_a_benchmark_that_hangs_is_stopped_after_the_page_is_written(gpu, tmp_path, monkeypatch):
    ended = threading.Event()
    codes = []
    monkeypatch.setattr(gpu.os, "_exit", lambda code: codes.append(code) or ended.set())
    page, observed = tmp_path / "page.md", []

    def hang(bench):
        assert bench.folder.is_dir()
        assert ended.wait(limit(30))
        observed.append((bench.folder.exists(), page.read_text()))
        return gpu.Table("Hanging", "", ("",), [])

    monkeypatch.setattr(gpu, "SUBJECTS", {"hanging": hang, "later": hang})
    monkeypatch.setattr(gpu, "free_memory", lambda _: None)
    gpu.main(["--tiny", "--output", str(page), "--limit", "0.01", "--only", "hanging"])
    ((exists, text),) = observed
    assert (codes, exists) == ([1], False)
    assert "## hanging\n\nNot measured" in text


@pytest.mark.full
def test_fewer_blocks_are_measured_after_the_time_limit(gpu, tmp_path):
    bench = gpu.Bench(torch.device("cpu"), tiny=True, folder=tmp_path, deadline=0.0)
    times = gpu.measure_blocks({"bare": lambda: None, "accel": lambda: None}, bench, blocks=9, count=1)
    for by_name in times:
        assert {name: len(blocks) for name, blocks in by_name.items()} == {"bare": 1, "accel": 1}


def test_the_table_names_saves_that_exceed_the_time_limit(gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCEL_DEVICE", "cpu")
    bench = gpu.Bench(torch.device("cpu"), tiny=True, folder=tmp_path, deadline=math.inf)
    measure_save, calls = gpu._measure_save, []

    def measure_once(*arguments):
        calls.append(True)
        return measure_save(*arguments)

    monkeypatch.setattr(gpu, "_measure_save", measure_once)
    monkeypatch.setattr(gpu.Bench, "is_out_of_time", lambda _: bool(calls))
    rows = {row[0]: row[1:] for row in gpu.measure_checkpoints(bench).rows}
    first, *rest = rows
    assert first == "accel, async_save=True, first save"
    assert gpu.NONE not in rows[first][:2]
    assert "torch.save: not measured: the time of this run was used up" in rest
    assert {rows[name] for name in rest} == {(gpu.NONE,) * 3}


@pytest.mark.full
def test_a_test_is_skipped_if_its_limit_exceeds_the_time_left(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-rs", "-m", "gpu", "-W", "default",
         "-k", "compiled_model or clipping", "tests/gpu/test_training.py"],
        env=os.environ | {"REHEARSE_GPU_TESTS": "1", "GPU_TESTS_S": "140"},
        cwd=ROOT, capture_output=True, text=True, timeout=limit(120), check=False,
    )  # fmt: skip
    assert "1 passed, 2 skipped" in done.stdout, done.stdout + done.stderr
    assert "the time for this run is used up" in done.stdout
