"""The harnesses of the checkpoint tests, for test modules and for the processes they ship functions to."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

import cloudpickle
import pytest


def _shipped(name):
    """A module beside this one that travels with the functions of tests."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)


_shipped("faults")
_shipped("played")


@pytest.fixture
def memory():
    """A directory in memory, where there is one: what is saved hundreds of times need not wear a disk."""
    shm = Path("/dev/shm")
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
