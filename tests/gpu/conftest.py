"""Tests marked `gpu`: where they run, their time limits, and their report."""

from __future__ import annotations

import gc
import json
import os
import platform
import signal
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from support.cases.gpu_rehearsal import REHEARSAL
from support.processes.ranks import Cluster

import accel_runtime
from accel_runtime.backends import distributed, set_current_backend

COUNT = torch.cuda.device_count()
DEVICE = torch.device("cpu") if REHEARSAL else torch.device("cuda", 0)
COMMANDS_NEED = ("platformdirs", "pydantic", "questionary", "rich", "typer", "yaml")
LIMIT_S = 60
STARTED = time.monotonic()


class GpuCluster(Cluster):
    """Two ranks: on one GPU over gloo, or on two over NCCL; in a rehearsal on the CPU."""

    def __init__(self, carrier):
        device = "cpu" if REHEARSAL else "cuda"
        settings = {
            "ACCEL_DEVICE": device,
            "ACCEL_PROCESS_GROUP_BACKEND": carrier,
            "RANK_WARNINGS": "default",
        }
        super().__init__(2, settings=settings)
        self.carrier = carrier
        self.kind = "MULTI_CPU" if REHEARSAL else "MULTI_GPU"

    @staticmethod
    def device(rank):
        return "cpu" if REHEARSAL else f"cuda:{rank % COUNT}"


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu(2))])
def ranks(request):
    """Two ranks over gloo, which may share a GPU, and over NCCL."""
    cluster = GpuCluster(request.param)
    yield cluster
    cluster.close()


@pytest.fixture
def sharing(cuda):
    """Two ranks that use NCCL on one GPU, which it rejects."""
    if COUNT > 1:
        pytest.skip("needs a single GPU")
    cluster = GpuCluster("nccl")
    yield cluster
    cluster.close()


@pytest.fixture
def device():
    """The device on which the accelerator computes."""
    return DEVICE


@pytest.fixture
def cuda():
    """CUDA itself; tests with this fixture are skipped in a rehearsal."""
    if REHEARSAL:
        pytest.skip("needs a GPU")
    return torch.cuda


@pytest.fixture
def busy():
    """Keep the current stream busy for about the given seconds, without waiting."""

    def keep(seconds):
        if not REHEARSAL:
            torch.cuda._sleep(int(seconds * 1.7e9))

    return keep


@pytest.fixture
def commands():
    """Skip a test that runs `accel` if a package for it is missing."""
    if missing := [name for name in COMMANDS_NEED if find_spec(name) is None]:
        pytest.skip(f"needs {', '.join(missing)}")


@pytest.fixture(autouse=True)
def _fresh(home, monkeypatch):
    """Start every test without a process group, and with the memory of the GPU free."""
    if REHEARSAL:
        monkeypatch.setenv("ACCEL_DEVICE", "cpu")
    torch.manual_seed(0)
    set_current_backend(None)
    yield
    if torch.distributed.is_initialized():
        distributed._destroy_process_group()
    set_current_backend(None)
    gc.collect()
    if COUNT:
        torch.cuda.empty_cache()


def limit_of(item):
    """Return the time limit of a test in seconds."""
    mark = item.get_closest_marker("limit")
    return mark.args[0] if mark else LIMIT_S


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fail a test that exceeds its limit; one that cannot be interrupted ends the run with a traceback."""
    seconds = limit_of(item)

    def late(*_):
        raise TimeoutError(f"{item.nodeid} took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def pytest_runtest_setup(item):
    """Skip a test that needs more GPUs than exist, or more time than is left."""
    if "gpu" not in item.keywords:
        return
    expected = max((mark.args[0] for mark in item.iter_markers("gpu") if mark.args), default=1)
    if expected > COUNT and not (REHEARSAL and expected == 1):
        pytest.skip("needs a GPU" if expected == 1 else "needs two GPUs")
    if time.monotonic() - STARTED + limit_of(item) > float(os.environ.get("GPU_TESTS_S", "inf")):
        pytest.skip("the time for this run is used up")


class Report:
    """The tests that passed, failed and were skipped, by feature; written after every test.

    Args:
        path: The file.
    """

    def __init__(self, path):
        self._path = path
        self._features = {}
        self._of = {}
        gpu = torch.cuda.get_device_name(0) if COUNT else "none"
        self._about = {
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "gpu": gpu,
            "gpus": COUNT,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "accel": accel_runtime.__version__,
        }

    def pytest_collection_modifyitems(self, items):
        for item in items:
            mark = item.get_closest_marker("feature")
            name = mark.args[0] if mark else "not named"
            if item.path.stem == "test_two_processes":
                carried = getattr(item, "callspec", None) and item.callspec.params.get("ranks")
                name += ", over NCCL" if carried == "nccl" else ", over gloo"
            self._of[item.nodeid] = name
            self._features.setdefault(name, {"passed": [], "failed": {}, "skipped": {}})

    def pytest_runtest_logreport(self, report):
        if report.nodeid not in self._of or (report.when != "call" and report.passed):
            return
        feature, name = self._features[self._of[report.nodeid]], report.nodeid.removeprefix("tests/gpu/")
        if report.passed:
            feature["passed"].append(name)
        elif report.skipped:
            feature["skipped"][name] = report.longrepr[2].removeprefix("Skipped: ")
        else:
            crash = getattr(report.longrepr, "reprcrash", None)
            feature["failed"][name] = crash.message if crash else str(report.longrepr)[-2000:]
            if name in feature["passed"]:
                feature["passed"].remove(name)
        text = json.dumps(self._about | {"features": self._features}, indent=1)
        self._path.write_text(f"{text}\n", encoding="utf-8")


def pytest_configure(config):
    """Write a report if the run has a path for it."""
    if path := os.environ.get("GPU_TESTS_REPORT"):
        config.pluginmanager.register(Report(Path(path)), "gpu-report")
