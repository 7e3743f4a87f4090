"""Replicas of torch_xla's CPU device, started once and shared by all tests of it."""

import pytest


@pytest.fixture(scope="session")
def clusters(replicas):
    """The replicas of each number; `run(function, *args)` calls a function of a test on every one."""
    return replicas
