"""What the tests of divided models ship to the processes of the clusters."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import cloudpickle
import pytest

_SPEC = importlib.util.spec_from_file_location("divided", Path(__file__).parent.parent / "divided.py")
_divided = importlib.util.module_from_spec(_SPEC)
sys.modules["divided"] = _divided
_SPEC.loader.exec_module(_divided)
cloudpickle.register_pickle_by_value(_divided)


@pytest.fixture(autouse=True, scope="module")
def _by_value(request):
    """What a test module defines travels with the functions it ships."""
    cloudpickle.register_pickle_by_value(request.module)
