"""Replicas of torch_xla's CPU device, started once and shared by the tests here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import cloudpickle
import pytest


def _loaded(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def replicas():
    """One, two and four replicas by their number; `run(function, *args)` calls a function of a test on every one."""
    found = _loaded("xla_cluster", Path(__file__).parent / "cluster.py")
    sizes = {size: found.Replicas(size) for size in (1, 2, 4)}
    yield sizes
    for some in sizes.values():
        some.close()


@pytest.fixture(scope="session")
def gloo():
    """Processes that talk through gloo, by their number."""
    found = _loaded("gloo_cluster", Path(__file__).parent.parent / "cluster.py")
    sizes = {1: found.Alone(), 2: found.Cluster(2)}
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
    return _loaded("exactness_of_processes", Path(__file__).parent.parent / "runtime" / "test_exactness.py")
