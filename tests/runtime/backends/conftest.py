"""Clusters for the tests of backends, in which three ranks are each on a node of their own."""

from __future__ import annotations

import importlib.util

import pytest

GLOO = {1: "1 process", 2: "2 processes", "apart": "3 machines"}
XLA = {"xla 1": "1 replica", "xla 2": "2 replicas", "xla 4": "4 replicas", "spmd 4": "SPMD on 4 devices"}
# torch_xla is in an environment of its own, where `make test-xla` runs the same tests on its CPU device.
HERE = XLA if importlib.util.find_spec("torch_xla") else GLOO


@pytest.fixture(
    params=[
        pytest.param(ranks, id=name, marks=[pytest.mark.full] * (ranks == "xla 4"))
        for ranks, name in HERE.items()
    ]
)
def ranks(request, clusters):
    """Each cluster of one or several ranks, in turn."""
    return clusters[request.param]


@pytest.fixture(params=[2, "apart"], ids=["2 processes", "3 machines"])
def several(request, clusters):
    """Two ranks on one node, and three nodes, in turn."""
    return clusters[request.param]
