"""The harness of the checkpoint tests, for test modules and for the processes they ship functions to."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

import cloudpickle
import pytest

_SPEC = importlib.util.spec_from_file_location("faults", Path(__file__).parent / "faults.py")
faults = importlib.util.module_from_spec(_SPEC)
sys.modules["faults"] = faults
_SPEC.loader.exec_module(faults)
cloudpickle.register_pickle_by_value(faults)


@pytest.fixture
def memory():
    """A directory in memory, where there is one: what is saved hundreds of times need not wear a disk."""
    shm = Path("/dev/shm")  # noqa: S108 - a directory in it has a name of its own
    folder = Path(tempfile.mkdtemp(prefix="accel-test-", dir=shm if shm.is_dir() else None))
    yield folder
    shutil.rmtree(folder)
