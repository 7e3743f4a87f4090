"""Clusters for the tests of collectives, in which three ranks run on three simulated nodes."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[1, 2, "apart"], ids=["1 process", "2 processes", "3 machines"])
def ranks(request, clusters):
    """Return one rank, then two on one node, then three on three nodes."""
    return clusters[request.param]


@pytest.fixture(params=[2, "apart"], ids=["2 processes", "3 machines"])
def several(request, clusters):
    """Return two ranks on one node, then three on three nodes."""
    return clusters[request.param]
