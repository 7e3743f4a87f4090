"""Ranks cannot import the test modules here, which are pickled by value."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _by_value(by_value):
    """Pickle the definitions of every test module here by value."""
