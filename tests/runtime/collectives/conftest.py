"""Here three processes are on a machine each: how bytes travel is what these tests are about."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[1, 2, "apart"], ids=["1 process", "2 processes", "3 machines"])
def ranks(request, clusters):
    """One process, two on one machine, and three machines in turn."""
    return clusters[request.param]


@pytest.fixture(params=[2, "apart"], ids=["2 processes", "3 machines"])
def several(request, clusters):
    """Two processes on one machine, and three machines in turn."""
    return clusters[request.param]
