"""The harness of the data tests, for test modules and for the processes they ship functions to."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import cloudpickle

_SPEC = importlib.util.spec_from_file_location("walks", Path(__file__).parent / "walks.py")
walks = importlib.util.module_from_spec(_SPEC)
sys.modules["walks"] = walks
_SPEC.loader.exec_module(walks)
cloudpickle.register_pickle_by_value(walks)
