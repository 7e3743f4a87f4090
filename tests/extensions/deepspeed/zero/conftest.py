"""Ranks that train with ZeRO on the CPU, started once and shared by the tests here."""

from __future__ import annotations

import cloudpickle
import pytest
import torch
from support.processes.ranks import Alone, Cluster
from support.runs import zero_runs

cloudpickle.register_pickle_by_value(zero_runs)


@pytest.fixture(autouse=True)
def _on_the_cpu(home, monkeypatch):
    """Use the CPU even if this machine has an accelerator."""
    monkeypatch.setenv("ACCEL_DEVICE", "cpu")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


@pytest.fixture(scope="session")
def clusters():
    """The cluster of each size; `run(function, *args)` calls a function of a test on every rank."""
    torch.set_num_threads(1)
    sizes = {1: Alone(), 2: Cluster(2), 3: Cluster(3)}
    yield sizes
    for cluster in sizes.values():
        cluster.close()


@pytest.fixture(autouse=True, scope="module")
def _by_value(request):
    """Pickle the definitions of a test module with the functions sent to ranks."""
    cloudpickle.register_pickle_by_value(request.module)
