"""Fixtures of all tests: an empty `ACCEL_HOME`, and the real `accel` as a subprocess."""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from support.cases.lanes import build_scheduler, is_in_lane, read_marks
from support.processes.children import free_port
from support.processes.services import UnavailableError, prepare_services, skip_services
from support.processes.waits import limit

with contextlib.suppress(ImportError):  # a machine with a GPU may have none
    from hypothesis import HealthCheck, settings

    # Examples take long on a busy machine, so they have no deadline. They are the same each time, on any machine: by itself,
    # hypothesis selects the same ones in CI only.
    _patient = settings(
        settings.get_profile("default"),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        print_blob=True,
    )
    settings.register_profile("busy", _patient, derandomize=True, max_examples=60)
    # Of `make test-full`, which looks for others, and keeps those that fail.
    settings.register_profile("search", _patient)
    settings.load_profile("busy")

# A shell ignores these signals for background jobs, and every process of a test would inherit that.
if threading.current_thread() is threading.main_thread():
    for _number, _default_handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGQUIT, signal.SIG_DFL),
    ):
        if signal.getsignal(_number) is signal.SIG_IGN:
            signal.signal(_number, _default_handler)

ROOT = Path(__file__).parent.parent
_FOLDERS = itertools.count()
EXTENSIONS = ROOT / "tests" / "extensions"
_LOG_LEVEL, _QUIET = "TORCH_CPP_LOG_LEVEL", "ERROR"
_LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "NUM_NODES",
    "NNODES",
    "OMP_NUM_THREADS",
)
# Libraries write there as soon as they are imported, and a model of the user must not be found.
os.environ["HF_HOME"] = str(Path(tempfile.gettempdir(), f"accel-tests-huggingface-{os.getuid()}"))
# As in an activated environment: without `accel` on PATH, errors that name a command have another line.
os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{Path(sys.executable).parent}"
# On GitHub, typer writes colours into pipes otherwise.
os.environ["_TYPER_FORCE_DISABLE_TERMINAL"] = "1"


@pytest.fixture
def tmp_path(request, tmp_path_factory):
    """Return an empty folder. pytest's own fixture lists the folders of all tests before this one to number it."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    folder = tmp_path_factory.getbasetemp() / f"{name}-{next(_FOLDERS)}"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Return an empty `ACCEL_HOME`, and delete the variables of accel, of Accelerate and of launchers."""
    for name in os.environ:
        if name.startswith(("ACCEL_", "ACCELERATE_")) or name in (*_LAUNCHER_VARIABLES, "USE_FP16"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def _loggers():
    """Restore the levels and propagation of all loggers after a test."""
    loggers = [
        logging.root,
        *(entry for entry in logging.root.manager.loggerDict.values() if isinstance(entry, logging.Logger)),
    ]
    before = [(logger, logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, level, propagate in before:
        if logger.level != level:  # `setLevel` clears the cache of all loggers
            logger.setLevel(level)
        logger.propagate = propagate


@pytest.fixture(autouse=True)
def _process_group():
    """Destroy the process group of a test: a process forked later would collect it and wait for its threads."""
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
    """Change to an empty folder without a project file in any parent, and return it."""
    folder = tmp_path / "cwd"
    (folder / ".git").mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def accel(cwd):
    """Return a function that runs the real `accel` in an empty folder."""

    def run(*args, timeout=240, **options):
        command = [sys.executable, "-m", "accel_cli", *map(str, args)]
        options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "cwd": cwd} | options
        return subprocess.run(command, timeout=limit(timeout), check=False, **options)

    return run


@pytest.fixture
def script(cwd):
    """Return a function that writes a script into the working folder."""

    def write(text, name="train.py"):
        path = cwd / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def port():
    """Return a loopback port that stays free until the test listens on it."""
    with free_port() as free:
        yield free


@pytest.fixture(scope="session")
def handmade():
    """Return the module that writes (`write`) and damages (`flip`) checkpoints without a run."""
    from support.runs import checkpoint_writer

    return checkpoint_writer


@pytest.fixture(scope="session")
def replicas():
    """Return replicas of torch_xla's CPU device, and with SPMD; they start with the first call of a test."""
    from support.processes.xla_replicas import Replicas

    replicas_by_name = {f"xla {size}": Replicas(size) for size in (1, 2, 4)}
    replicas_by_name["spmd 4"] = Replicas(1, devices=4)
    yield replicas_by_name
    for cluster in replicas_by_name.values():
        cluster.close()


@pytest.fixture
def on_the_cpu(home, monkeypatch):
    """Use the CPU even if this machine has an accelerator, and start every test with the same seed."""
    import torch

    from accel_runtime.backends import distributed, set_current_backend

    monkeypatch.setenv("ACCEL_DEVICE", "cpu")
    # Not `torch.manual_seed`, which formats the stack for each kind of device.
    torch.default_generator.manual_seed(0)
    set_current_backend(None)
    yield
    if torch.distributed.is_initialized():
        # A model sharded on one process creates a group of one rank, which forked processes would inherit.
        distributed._destroy_process_group()


@pytest.fixture(scope="session")
def clusters(replicas):
    """The cluster of each size; `run(function, *args)` calls a function of a test on every rank.

    Each rank of the cluster `apart` is on its own node, and therefore uses another transport; `nodes` are two of two ranks.
    """
    import cloudpickle
    import torch
    from support.processes.ranks import Alone, Cluster
    from support.runs import sharded_runs

    # The helpers of the tests of sharding are pickled with their functions.
    cloudpickle.register_pickle_by_value(sharded_runs)
    torch.set_num_threads(1)
    sizes = {
        1: Alone(),
        2: Cluster(2),
        3: Cluster(3),
        4: Cluster(4),
        "apart": Cluster(3, per_node=1),
        "nodes": Cluster(4, per_node=2),
    }
    yield sizes | replicas
    for group in sizes.values():
        group.close()


TWO = pytest.param(2, id="2 processes", marks=pytest.mark.full)
"""Behaviour tested on one process and on three is tested on two only in `make test-full`."""
THREE = pytest.param(3, id="3 processes")


@pytest.fixture(params=[pytest.param(1, id="1 process"), TWO, THREE])
def ranks(request, clusters):
    """One, two and three processes in turn."""
    return clusters[request.param]


@pytest.fixture(params=[TWO, THREE])
def several(request, clusters):
    """Two and three processes in turn."""
    return clusters[request.param]


@pytest.fixture
def alone(clusters):
    """This process only."""
    return clusters[1]


@pytest.fixture
def pair(clusters):
    """Two processes."""
    return clusters[2]


@pytest.fixture
def two_nodes(clusters):
    """Four processes on two nodes; a test of them is marked slow."""
    return clusters["nodes"]


@pytest.fixture
def four(clusters):
    """Four processes; a test of them is marked slow, since machines with fewer cores run them slowly."""
    return clusters[4]


@contextlib.contextmanager
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


@pytest.fixture(scope="module")
def by_value(request):
    """Pickle the definitions of the test module by value, since ranks cannot import it."""
    import cloudpickle
    from support.runs import recorded_runs

    cloudpickle.register_pickle_by_value(recorded_runs)
    cloudpickle.register_pickle_by_value(request.module)


@pytest.fixture(params=[1, 2], ids=["1 process", "2 processes"])
def some(request, clusters):
    """Return a cluster of 1 rank, then of 2."""
    return clusters[request.param]


@pytest.fixture(scope="session")
def site():
    """Return the folder of the documentation, as `make check` has built it; build it if the sources have changed."""
    from docs.build_site import build_site

    return build_site()


@pytest.fixture(scope="session")
def slurm_cluster():
    """Start a Slurm cluster of two nodes once."""
    from support.hosts.slurm import SlurmCluster

    cluster = SlurmCluster().start()
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def aws_server(tmp_path_factory):
    """Start AWS on loopback once."""
    from aws.server import Aws

    server = Aws(tmp_path_factory.mktemp("aws"))
    yield server
    server.close()


@pytest.fixture
def aws(aws_server, monkeypatch):
    """Return an AWS on loopback, empty before and after the test."""
    aws_server.use(monkeypatch)
    yield aws_server
    aws_server.reset()


@pytest.fixture(scope="session", params=["moto", pytest.param("Ceph", marks=pytest.mark.service("Ceph"))])
def s3_server(request, tmp_path_factory):
    """Start an S3 server, once that of moto and once that of Ceph."""
    from support.object_stores.server import SERVERS

    server = SERVERS[request.param](tmp_path_factory.mktemp("s3") / "server").start()
    yield server
    server.close()


@pytest.fixture(scope="session")
def _s3_proxy(s3_server):
    from support.object_stores.fault_proxy import FaultProxy

    with FaultProxy(s3_server) as proxy:
        yield proxy


@pytest.fixture
def s3_proxy(_s3_proxy):
    """Return a proxy of faults in front of the S3 server, which has seen no request yet."""
    _s3_proxy.reset()
    yield _s3_proxy
    _s3_proxy.reset()


@pytest.fixture
def s3_url(s3_server):
    """Return the URL of a folder in an empty bucket."""
    return f"s3://{s3_server.create_bucket()}/run"


@pytest.fixture
def terminal(cwd):
    """Return a function that opens terminals with `accel config`; close those that a failed test left open."""
    from support.processes.terminal import Terminal

    terminals = []

    def open_terminal(*args, **size):
        terminals.append(Terminal(*args, **size))
        return terminals[-1]

    yield open_terminal
    for opened_terminal in terminals:
        opened_terminal.process.close(force=True)


@pytest.fixture
def read_profile(home):
    """Return a function that reads a profile that the wizard has written."""
    from accel_cli.profile.layers import read_file, resolve

    return lambda name="default": resolve([read_file(home / "profiles" / f"{name}.yaml", "file")]).profile


def pytest_addoption(parser):
    """Add the option of `make test-services`."""
    parser.addoption(
        "--services",
        action="store_true",
        help="install and use what tests need (support/processes/services.py)",
    )


def pytest_ignore_collect(collection_path, config):
    """Import no file of which a lane runs no test: each process would take seconds to import them all."""
    expression = config.getoption("markexpr")
    if not expression or not collection_path.match("test_*.py"):
        return None
    if collection_path in {(config.invocation_params.dir / arg.partition("::")[0]) for arg in config.args}:
        return None
    marks = read_marks(collection_path, is_extension=collection_path.is_relative_to(EXTENSIONS))
    return None if is_in_lane(expression, marks) else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark the tests of extensions, and skip those that need a service, before tests are selected by their marks."""
    for item in items:
        if item.path.is_relative_to(EXTENSIONS):
            item.add_marker("extension")
    skip_services(items, run=config.getoption("services"))
    for path, of_file in (
        {} if config.getoption("markexpr") else itertools.groupby(items, lambda item: item.path)
    ):
        marks = read_marks(path, is_extension=path.is_relative_to(EXTENSIONS)).items()
        for item in of_file:
            wrong = [mark for mark, is_set in marks if (item.get_closest_marker(mark) is not None) != is_set]
            assert not wrong, (
                f"{item.nodeid}: a lane would not find its marks {wrong}: see support/cases/lanes.py"
            )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give tests that share a service or an interpreter to one process: groups of xdist 3.8 have no effect with pytest 9.2."""
    return build_scheduler(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Install the services of a test. It fails where they cannot be had: a lane that skips its tests would prove nothing."""
    if item.config.getoption("services"):
        try:
            prepare_services(item)
        except UnavailableError as error:
            pytest.fail(str(error), pytrace=False)


def pytest_configure():
    """Restore the default action of SIGHUP, which nohup ignores, so that it ends the processes of tests."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # torch prints C++ stacks for connections that tests break on purpose. It reads the variable once, as it is imported.
    os.environ.setdefault(_LOG_LEVEL, _QUIET)
    # Imports make a million objects that stay, and no garbage that matters.
    gc.disable()


def pytest_collection_finish(session):
    """Exclude the million objects of imported tests from later garbage collections, and give processes torch's log level back."""
    if os.environ.get(_LOG_LEVEL) == _QUIET:
        del os.environ[_LOG_LEVEL]
    if "PYTEST_XDIST_WORKER" in os.environ and "torch" in sys.modules:
        # Nearly every worker imports them in some test, and then each collection of garbage would visit all their objects.
        for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"):
            importlib.import_module(name)
    for name, logger in logging.root.manager.loggerDict.items():
        # pytest captures these in any case: without propagation, by adding its handlers to each, several times a test.
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Exclude what the tests of a module have imported and cached from later garbage collections, as many tests collect garbage."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_sessionfinish():
    """End the interpreters that tests have forked from, and write no warnings of what tests have left behind."""
    logging.disable()
    for name in ("support.processes.ranks", "support.processes.commands"):
        if module := sys.modules.get(name):
            module.INTERPRETER.close()
