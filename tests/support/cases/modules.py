"""Import test modules whose cases other tests run too."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]


def load_test_module(name):
    """Import a module of the tests by its path below `tests/`, such as `runtime/test_collectives.py`."""
    spec = importlib.util.spec_from_file_location(f"cases_of_{Path(name).stem}", TESTS / name)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
