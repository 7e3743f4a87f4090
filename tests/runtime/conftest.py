"""Tests of the runtime use the CPU."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _on_the_cpu(on_the_cpu):
    """Use the CPU in every test here."""
