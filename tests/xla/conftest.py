"""Replicas of torch_xla's CPU device, started once and shared by the tests here."""

from __future__ import annotations

import cloudpickle
import cluster
import pytest
from modules import load_test_module


@pytest.fixture(scope="session")
def replicas(replicas):
    """Replicas by their number too; `run(function, *args)` calls a function of a test on every one."""
    return replicas | {size: replicas[f"xla {size}"] for size in (1, 2, 4)}


@pytest.fixture(scope="session")
def clusters(replicas):
    """The same under the name that tests of all backends use."""
    return replicas


@pytest.fixture(scope="session")
def gloo():
    """Processes that talk through gloo, by their number."""
    sizes = {1: cluster.Alone(), 2: cluster.Cluster(2)}
    yield sizes
    for some in sizes.values():
        some.close()


@pytest.fixture(autouse=True, scope="module")
def _by_value(request):
    """What a test module defines travels with the functions it ships."""
    cloudpickle.register_pickle_by_value(request.module)


@pytest.fixture(scope="session")
def exactness():
    """The loaders that the tests of exactness walk, whose numbers are known."""
    return load_test_module("runtime/test_exactness.py")
