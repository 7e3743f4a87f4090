"""What tests share: a home of their own, and the real `accel` as a subprocess."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ports import free_port

with contextlib.suppress(ImportError):  # a machine with a GPU may have none
    from hypothesis import HealthCheck, settings

    # How long an example takes says nothing where a machine is busy. In CI hypothesis chooses the same examples each time.
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")

# A shell that runs the tests in the background has these ignored, which every process of a test would inherit.
if threading.current_thread() is threading.main_thread():
    for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        if signal.getsignal(_number) is signal.SIG_IGN:
            signal.signal(_number, _usual)

ROOT = Path(__file__).parent.parent
_LAUNCHED = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home without profiles, and no variable of accel, of Accelerate or of a launcher."""
    for name in os.environ:
        if name.startswith(("ACCEL_", "ACCELERATE_")) or name in (*_LAUNCHED, "USE_FP16"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def _loggers():
    """Loggers as they were, after a test that has set some."""
    known = [
        logging.root,
        *(one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)),
    ]
    before = [(logger, logger.level, logger.propagate) for logger in known]
    yield
    for logger, level, propagate in before:
        if logger.level != level:  # `setLevel` clears the cache of all loggers
            logger.setLevel(level)
        logger.propagate = propagate


@pytest.fixture(autouse=True)
def _process_group():
    """No process group of a test is left: a process that is forked later would collect it, and wait for its threads."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        from accel_runtime.backends import set_current_backend
        from accel_runtime.backends.distributed import _destroy_process_group

        set_current_backend(None)
        _destroy_process_group()
        gc.collect()


@pytest.fixture
def cwd(tmp_path, monkeypatch):
    """An empty working folder that no project file reaches."""
    folder = tmp_path / "cwd"
    (folder / ".git").mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def accel(cwd):
    """Runs the real `accel` in an empty folder."""

    def run(*args, timeout=240, **options):
        command = [sys.executable, "-m", "accel_cli", *map(str, args)]
        options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "cwd": cwd} | options
        return subprocess.run(command, timeout=timeout, check=False, **options)

    return run


@pytest.fixture
def script(cwd):
    """Writes a script into the working folder."""

    def write(text, name="train.py"):
        path = cwd / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def port():
    """A port of loopback that is free until something of the test listens there."""
    with free_port() as free:
        yield free


@pytest.fixture(scope="session")
def handmade():
    """Checkpoints made by hand, `write`, and damage, `flip`."""
    import checkpoint_writer

    return checkpoint_writer


@pytest.fixture(scope="session")
def replicas():
    """Replicas of torch_xla's CPU device, and its SPMD; they start when a test first calls them."""
    from xla_replicas import Replicas

    found = {f"xla {size}": Replicas(size) for size in (1, 2, 4)}
    found["spmd 4"] = Replicas(1, devices=4)
    yield found
    for some in found.values():
        some.close()


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The documentation, built as `make check` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="session")
def slurm_cluster():
    """A Slurm cluster of two nodes, made once; skipped by name where the machine cannot have one."""
    from debian import UnavailableError
    from slurm_cluster import SlurmCluster

    try:
        cluster = SlurmCluster().start()
    except UnavailableError as error:
        pytest.skip(f"no Slurm cluster: {error}")
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def aws_plane(tmp_path_factory):
    """A SageMaker of our own with the services around it, started once."""
    from aws.client import AwsPlane

    plane = AwsPlane(tmp_path_factory.mktemp("plane"))
    yield plane
    plane.close()


@pytest.fixture
def aws(aws_plane, monkeypatch):
    """The plane as this test's AWS: empty at its start and at its end; bundles run only after `settings(run=True)`."""
    aws_plane.use(monkeypatch)
    aws_plane.reset()  # tests of uploads use it by its port
    yield aws_plane
    aws_plane.reset()


@pytest.fixture
def terminal(cwd):
    """Opens terminals with `accel config` in them, and closes what a failed test left open."""
    from terminal import Terminal

    opened = []

    def open_(*args, **size):
        opened.append(Terminal(*args, **size))
        return opened[-1]

    yield open_
    for one in opened:
        one.process.close(force=True)


@pytest.fixture
def written(home):
    """The profile the wizard wrote."""
    from accel_cli.profile.layers import read_file, resolve

    return lambda name="default": resolve([read_file(home / "profiles" / f"{name}.yaml", "file")]).profile


def pytest_configure():
    """Have SIGHUP end the processes that tests start, also if pytest was started with nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish(session):
    """Leave what importing the tests made out of every later garbage collection: it is a million objects."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    """End the interpreters that tests have forked from."""
    for name in ("cluster", "fork_launch"):
        if module := sys.modules.get(name):
            module.INTERPRETER.close()
