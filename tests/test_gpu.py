"""The tests marked `gpu` where no GPU is."""

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

ROOT = Path(__file__).parent.parent
GPUS = torch.cuda.device_count()


def run(tmp_path, *arguments, **variables):
    """Run `make test-gpu`'s script; its output, and the report that it leaves."""
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "gpu" / "__main__.py", *arguments],
        env=os.environ | {"OUT": str(tmp_path / "out")} | variables,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    report = tmp_path / "out" / "gpu-report.json"
    return done, json.loads(report.read_text()) if report.exists() else None


@pytest.mark.skipif(GPUS > 0, reason="there is a GPU")
@pytest.mark.slow
def test_without_a_gpu_every_test_is_skipped_by_name_and_the_report_claims_nothing(tmp_path):
    done, report = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ skipped in ", done.stdout, re.MULTILINE)
    assert (report["gpus"], report["gpu"]) == (0, "none")
    for feature, own in report["features"].items():
        assert (own["passed"], own["failed"]) == ([], {}), feature
        assert set(own["skipped"].values()) <= {"needs a GPU", "needs two GPUs"}, feature
        assert f"{feature:45} {len(own['skipped'])} skipped" in done.stdout
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["gpu-report.json"]


@pytest.mark.skipif(GPUS > 0, reason="there is a GPU")
@pytest.mark.full
def test_what_needs_nothing_of_cuda_itself_passes_on_the_cpu(tmp_path):
    done, report = run(tmp_path, REHEARSE_GPU_TESTS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(len(own["passed"]) for own in report["features"].values()) > 80


def test_missing_packages_are_named_in_one_line_before_anything_runs(tmp_path):
    bare = "import runpy, sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]; "
    bare += f"sys.argv = ['x']; runpy.run_path({str(ROOT / 'tests' / 'gpu' / '__main__.py')!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-S", "-c", bare], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "")
    wanted = "torch, numpy, pytest, cloudpickle, safetensors, xxhash, typing_extensions"
    assert done.stdout == f"test-gpu: cannot run, for this Python lacks {wanted}\n"
    assert not list(tmp_path.iterdir())


def test_a_torch_that_is_too_old_is_named_in_one_line(tmp_path):
    code = "import importlib.metadata, runpy, sys; importlib.metadata.version = lambda _: '2.8.0+cu128'; "
    code += f"sys.argv = ['x']; runpy.run_path({str(ROOT / 'tests' / 'gpu' / '__main__.py')!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "")
    assert (
        done.stdout == "test-gpu: cannot run, for accel needs torch 2.9 or newer, and this is 2.8.0+cu128\n"
    )


@pytest.fixture
def gpu_page():
    """The script that writes docs/gpu.md."""
    spec = spec_from_file_location("gpu_page", ROOT / "docs" / "gpu_page.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(**features):
    """A report of a run on a GPU: by feature, how many tests passed, failed and were skipped."""
    own = {
        name.replace("_", " "): {
            "passed": [f"t{i}" for i in range(passed)],
            "failed": {f"f{i}": "wrong" for i in range(failed)},
            "skipped": {f"s{i}": "needs two GPUs" for i in range(skipped)},
        }
        for name, (passed, failed, skipped) in features.items()
    }
    about = {
        "date": "2027-01-02",
        "gpu": "A",
        "gpus": 1,
        "torch": "2.11",
        "cuda": "13",
        "python": "3.12",
        "accel": "0.1",
    }
    return about | {"features": own}


def rows(text):
    return dict(line.strip("| ").split(" | ", 1) for line in text.splitlines() if line.startswith("| "))


def test_the_page_is_made_from_the_report_that_is_kept_and_names_every_feature_of_a_test(gpu_page):
    kept = json.loads(gpu_page.KEPT.read_text()) if gpu_page.KEPT.exists() else {}
    assert gpu_page.PAGE.read_text() == gpu_page.render_page(kept), "run docs/gpu_page.py"
    names = gpu_page.list_features()
    assert {"Device placement", "fully_shard with fp16", "Two processes, over NCCL"} <= set(names)
    assert len(names) == len(set(names)) > 20
    told = rows(gpu_page.render_page({}))
    assert {told[name] for name in names} == {"not yet run on a GPU"}


def test_only_what_has_passed_is_claimed_and_a_later_failure_is_told(gpu_page):
    first = gpu_page.merge_report(
        {}, report(fully_shard=(3, 0, 1), torch=(0, 0, 2), gather_for_metrics=(1, 1, 0))
    )
    assert sorted(first) == ["fully shard", "gather for metrics"], "what was only skipped says nothing"
    assert first["gather for metrics"]["worked"] is None
    later = gpu_page.merge_report(first, report(fully_shard=(2, 1, 0)) | {"date": "2027-02-03"})
    assert later["fully shard"]["worked"]["date"] == "2027-01-02"
    assert later["fully shard"]["failed"]["tests"] == ["f0"]
    told = rows(gpu_page.render_page({"fully_shard": later["fully shard"]}))["fully_shard"]
    assert told.startswith("2027-01-02 (3 tests, 1 skipped); failed on 2027-02-03: f0 | 1 × A, torch 2.11")  # noqa: RUF001
    mended = gpu_page.merge_report(later, report(fully_shard=(4, 0, 0)) | {"date": "2027-03-04"})
    assert mended["fully shard"]["failed"] is None


def test_a_report_of_a_machine_without_a_gpu_is_refused(gpu_page, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report() | {"gpus": 0}))
    with pytest.raises(SystemExit, match="without a GPU"):
        gpu_page.main([str(path)])


@pytest.mark.slow
def test_every_benchmark_of_a_gpu_runs_with_tiny_sizes(tmp_path):
    page = tmp_path / "page.md"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--output", page],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
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


def test_benchmarks_that_the_time_does_not_suffice_for_are_named_in_the_page(
    gpu, tmp_path, capsys, monkeypatch
):
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


def test_a_benchmark_that_does_not_end_is_ended_with_the_page_written_and_its_files_removed(
    gpu, tmp_path, monkeypatch
):
    ended = threading.Event()
    codes = []
    monkeypatch.setattr(gpu.os, "_exit", lambda code: codes.append(code) or ended.set())
    page, seen = tmp_path / "page.md", []

    def hang(bench):
        assert bench.folder.is_dir()
        assert ended.wait(30)
        seen.append((bench.folder.exists(), page.read_text()))
        return gpu.Table("Hanging", "", ("",), [])

    monkeypatch.setattr(gpu, "SUBJECTS", {"hanging": hang, "later": hang})
    monkeypatch.setattr(gpu, "free_memory", lambda _: None)
    gpu.main(["--tiny", "--output", str(page), "--limit", "0.01", "--only", "hanging"])
    ((there, text),) = seen
    assert (codes, there) == ([1], False)
    assert "## hanging\n\nNot measured" in text


def test_fewer_blocks_are_measured_when_the_time_is_used_up(gpu, tmp_path):
    bench = gpu.Bench(torch.device("cpu"), tiny=True, folder=tmp_path, deadline=0.0)
    times = gpu.measure_blocks({"bare": lambda: None, "accel": lambda: None}, bench, blocks=9, count=1)
    for part in times:
        assert {name: len(own) for name, own in part.items()} == {"bare": 1, "accel": 1}


def test_saves_that_the_time_does_not_suffice_for_are_named_in_their_table(gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCEL_DEVICE", "cpu")
    bench = gpu.Bench(torch.device("cpu"), tiny=True, folder=tmp_path, deadline=math.inf)
    held, late = gpu._measure_save, []

    def once(*arguments):
        late.append(True)
        return held(*arguments)

    monkeypatch.setattr(gpu, "_measure_save", once)
    monkeypatch.setattr(gpu.Bench, "is_out_of_time", lambda _: bool(late))
    rows = {row[0]: row[1:] for row in gpu.measure_checkpoints(bench).rows}
    first, *rest = rows
    assert first == "accel, async_save=True"
    assert gpu.NONE not in rows[first][:2]
    assert "torch.save: not measured: the time of this run was used up" in rest
    assert {rows[name] for name in rest} == {(gpu.NONE,) * 3}


@pytest.mark.slow
def test_a_test_whose_own_limit_does_not_fit_the_time_is_skipped(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-rs", "-m", "gpu", "-W", "default",
         "-k", "compiled_model or clipping", "tests/gpu/test_training.py"],
        env=os.environ | {"REHEARSE_GPU_TESTS": "1", "GPU_TESTS_S": "140"},
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "1 passed, 2 skipped" in done.stdout, done.stdout + done.stderr
    assert "the time for this run is used up" in done.stdout
