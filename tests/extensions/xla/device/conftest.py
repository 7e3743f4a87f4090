"""Replicas of torch_xla's CPU device, started once and shared by the tests here."""

from __future__ import annotations

import cloudpickle
import pytest
from support.cases.modules import load_test_module
from support.processes.ranks import Alone, Cluster


@pytest.fixture(scope="session")
def replicas(replicas):
    """Clusters of replicas, also by their size; `run(function, *args)` calls a function of a test on each."""
    return replicas | {size: replicas[f"xla {size}"] for size in (1, 2, 4)}


@pytest.fixture(scope="session")
def clusters(replicas):
    """The same clusters, with the fixture name of the tests of all backends."""
    return replicas


@pytest.fixture(scope="session")
def gloo():
    """Clusters of processes that use gloo, by their size."""
    sizes = {1: Alone(), 2: Cluster(2)}
    yield sizes
    for gloo_cluster in sizes.values():
        gloo_cluster.close()


@pytest.fixture(autouse=True, scope="module")
def _by_value(request):
    """Pickle the definitions of a test module with the functions sent to replicas."""
    cloudpickle.register_pickle_by_value(request.module)


@pytest.fixture(scope="session")
def exactness():
    """The module with the loaders of the exactness tests."""
    return load_test_module("runtime/test_exactness.py")
