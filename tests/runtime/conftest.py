"""Process groups of one to four processes, started once and shared by all tests of the runtime."""

from __future__ import annotations

import cloudpickle
import pytest
import torch
from support.ranks import Alone, Cluster
from support.runs import sharded_runs

from accel_runtime.backends import distributed, set_current_backend

# The helpers of the tests of sharding are pickled with their functions.
cloudpickle.register_pickle_by_value(sharded_runs)


@pytest.fixture(autouse=True)
def _on_the_cpu(home, monkeypatch):
    """Use the CPU even if this machine has an accelerator, and start every test with the same seed."""
    monkeypatch.setenv("ACCEL_DEVICE", "cpu")
    torch.manual_seed(0)
    set_current_backend(None)
    yield
    if torch.distributed.is_initialized():
        # A model sharded on one process creates a group of one rank, which forked processes would inherit.
        distributed._destroy_process_group()


@pytest.fixture(scope="session")
def clusters(replicas):
    """The cluster of each size; `run(function, *args)` calls a function of a test on every rank.

    Each rank of the cluster `apart` is on its own node, and therefore uses another transport.
    """
    torch.set_num_threads(1)
    sizes = {
        1: Alone(),
        2: Cluster(2),
        3: Cluster(3),
        4: Cluster(4),
        "apart": Cluster(3, one_per_node=True),
    }
    yield sizes | replicas
    for group in sizes.values():
        group.close()


TWO = pytest.param(2, id="2 processes", marks=pytest.mark.full)
"""Behaviour tested on one process and on three is tested on two only in `make test-full`."""
THREE = pytest.param(3, id="3 processes")


@pytest.fixture(params=[pytest.param(1, id="1 process"), TWO, THREE])
def ranks(request, clusters):
    """One, two and three processes in turn."""
    return clusters[request.param]


@pytest.fixture(params=[TWO, THREE])
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
    """Four processes; a test of them is marked slow, since machines with fewer cores run them slowly."""
    return clusters[4]
