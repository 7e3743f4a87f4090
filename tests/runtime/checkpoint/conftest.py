"""The scripts of the checkpoint tests, for test modules and for the processes they ship functions to."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import cloudpickle
import pytest

_SPEC = importlib.util.spec_from_file_location("played", Path(__file__).parent / "played.py")
played = importlib.util.module_from_spec(_SPEC)
sys.modules["played"] = played
_SPEC.loader.exec_module(played)
cloudpickle.register_pickle_by_value(played)


@pytest.fixture(autouse=True, scope="module")
def _by_value(request):
    """What a test module defines travels with the functions it ships."""
    cloudpickle.register_pickle_by_value(request.module)


@pytest.fixture(params=[1, 2], ids=["1 process", "2 processes"])
def some(request, clusters):
    """One process and two in turn."""
    return clusters[request.param]
