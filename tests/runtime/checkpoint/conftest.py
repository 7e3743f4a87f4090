"""Fixtures of the checkpoint tests; helper modules are pickled by value, so that ranks can import them."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import cloudpickle
import pytest
from support.runs import recorded_runs

cloudpickle.register_pickle_by_value(recorded_runs)


@contextmanager
def _create_folder():
    shm = Path("/dev/shm")  # noqa: S108 - a directory in it has a name of its own
    folder = Path(tempfile.mkdtemp(prefix="accel-test-", dir=shm if shm.is_dir() else None))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def memory():
    """Return a temporary directory, in memory if /dev/shm exists: some tests save hundreds of times."""
    with _create_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def module_memory():
    """Return a temporary directory that the tests of a module share, in memory if /dev/shm exists."""
    with _create_folder() as folder:
        yield folder


@pytest.fixture(autouse=True, scope="module")
def _by_value(request):
    """Pickle the definitions of the test module by value, since ranks cannot import it."""
    cloudpickle.register_pickle_by_value(request.module)


@pytest.fixture(params=[1, 2], ids=["1 process", "2 processes"])
def some(request, clusters):
    """Return a cluster of 1 rank, then of 2."""
    return clusters[request.param]
