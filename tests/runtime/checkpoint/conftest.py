"""The harnesses of the checkpoint tests, for test modules and for the processes they ship functions to."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import cloudpickle
import failing_disk
import pytest
import recorded_runs

cloudpickle.register_pickle_by_value(failing_disk)
cloudpickle.register_pickle_by_value(recorded_runs)


@pytest.fixture
def memory():
    """A directory in memory, where there is one: what is saved hundreds of times need not wear a disk."""
    shm = Path("/dev/shm")  # noqa: S108 - a directory in it has a name of its own
    folder = Path(tempfile.mkdtemp(prefix="accel-test-", dir=shm if shm.is_dir() else None))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(autouse=True, scope="module")
def _by_value(request):
    """What a test module defines travels with the functions it ships."""
    cloudpickle.register_pickle_by_value(request.module)


@pytest.fixture(params=[1, 2], ids=["1 process", "2 processes"])
def some(request, clusters):
    """One process and two in turn."""
    return clusters[request.param]
