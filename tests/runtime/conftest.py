"""One, two and three processes, started once and shared by all tests of the runtime."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent.parent


def _loaded(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cluster = _loaded("cluster", TESTS / "cluster.py")
xla = _loaded("xla_cluster", TESTS / "xla" / "cluster.py")


@pytest.fixture(autouse=True)
def _on_the_cpu(home, monkeypatch):
    """The machine's accelerator is not what these tests are about; every test starts unseeded by others."""
    monkeypatch.setenv("ACCEL_DEVICE", "cpu")
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def clusters():
    """The cluster of each size; `run(function, *args)` calls a function of a test on every rank.

    `apart`, three are told that each is alone on its machine: they talk to each other in another way.
    """
    torch.set_num_threads(1)
    sizes = {
        1: cluster.Alone(),
        2: cluster.Cluster(2),
        3: cluster.Cluster(3),
        4: cluster.Cluster(4),
        "apart": cluster.Cluster(3, apart=True),
        "xla 1": xla.Replicas(1),
        "xla 2": xla.Replicas(2),
        "xla 4": xla.Replicas(4),
        "spmd 4": xla.Replicas(1, devices=4),
    }
    yield sizes
    for some in sizes.values():
        some.close()


@pytest.fixture(params=[1, 2, 3], ids=["1 process", "2 processes", "3 processes"])
def ranks(request, clusters):
    """One, two and three processes in turn."""
    return clusters[request.param]


@pytest.fixture(params=[2, 3], ids=["2 processes", "3 processes"])
def several(request, clusters):
    """Two and three processes in turn."""
    return clusters[request.param]


@pytest.fixture
def alone(clusters):
    """This process only."""
    return clusters[1]


@pytest.fixture
def pair(clusters):
    """Two processes."""
    return clusters[2]


@pytest.fixture
def four(clusters):
    """Four processes; a machine with fewer cores takes its time over them, so such a test is marked slow."""
    return clusters[4]
