"""`notebook_launcher` and `debug_launcher` start a function on several processes."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import pdb  # noqa: T100 - the subject
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import popen_fork
from pathlib import Path

import pytest
import torch
from support.processes.children import Process
from support.processes.waits import limit, wait_until

from accel_runtime import (
    Accelerator,
    ParallelismConfig,
    PartialState,
    PrecisionType,
    debug_launcher,
    gather,
    notebook_launcher,
)
from accel_runtime import notebook as launchers
from accel_runtime.environment.settings import RANK_FOLDER
from accel_runtime.observe.heartbeat import heartbeat


def train_and_write(folder, *words):
    """Run a backward pass and a collective, and write a file for this rank."""
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(4, 4))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    everyone = gather(torch.tensor([accelerator.process_index])).tolist()
    facts = [everyone, accelerator.mixed_precision, str(accelerator.device), accelerator.local_process_index]
    (folder / str(accelerator.process_index)).write_text(repr([*facts, *words]))
    return lambda: None  # cannot be pickled, and need not be


def read_files(folder):
    return [file.read_text() for file in sorted(folder.iterdir())]


def test_debug_launcher_runs_a_function_on_real_cpu_processes(tmp_path):
    torch.nn.Linear(64, 64)(torch.ones(512, 64)).sum().backward()  # what a session did before
    debug_launcher(train_and_write, (tmp_path, "a"), num_processes=2)
    assert read_files(tmp_path) == [f"[[0, 1], 'no', 'cpu', {rank}, 'a']" for rank in range(2)]
    assert not multiprocessing.active_children()
    assert "RANK" not in os.environ


def test_a_session_inside_a_process_group_is_rejected(tmp_path):
    accelerator = Accelerator(parallelism_config=ParallelismConfig(dp_shard_size="auto"))
    with pytest.raises(RuntimeError, match="in a process group already"):
        debug_launcher(train_and_write, (tmp_path, "a"), num_processes=2)
    assert accelerator.num_processes == 1


@pytest.mark.parametrize("precision", ["bf16", PrecisionType.BF16], ids=["text", "member"])
@pytest.mark.parametrize("processes", [1, 2])
def test_mixed_precision_is_passed_to_the_accelerator(tmp_path, processes, precision):
    notebook_launcher(train_and_write, (tmp_path,), num_processes=processes, mixed_precision=precision)
    everyone = list(range(processes))
    assert read_files(tmp_path) == [f"[{everyone}, 'bf16', 'cpu', {rank}]" for rank in everyone]
    assert "ACCEL_MIXED_PRECISION" not in os.environ


def test_only_the_first_process_writes_the_heartbeat_of_the_session(tmp_path, monkeypatch):
    def record(folder):
        accelerator = Accelerator()
        (folder / str(accelerator.process_index)).write_text(type(heartbeat()).__name__)

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    heartbeat()  # that of the session, which nothing watches yet
    monkeypatch.setenv(RANK_FOLDER, str(tmp_path))
    debug_launcher(record, (tmp_path,), num_processes=2)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["Heartbeat", "Progress"]


def test_mixed_precision_defaults_to_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCEL_MIXED_PRECISION", "bf16")
    notebook_launcher(train_and_write, (tmp_path,), num_processes=2)
    assert all("'bf16'" in text for text in read_files(tmp_path))


def write_topology(folder):
    """Write the world size and the local rank."""
    accelerator = Accelerator()
    accelerator.wait_for_everyone()
    text = f"{accelerator.num_processes} {accelerator.local_process_index}"
    (folder / str(accelerator.process_index)).write_text(text)


def test_two_calls_of_notebook_launcher_form_two_nodes(tmp_path, port):
    """Call it in two processes, as on two nodes whose rendezvous is one port."""
    calls = [
        multiprocessing.get_context("fork").Process(
            target=notebook_launcher,
            args=(write_topology, (tmp_path,), 1),
            kwargs={"rdzv_endpoint": f"127.0.0.1:{port}", "node_rank": node, "num_nodes": 2},
        )
        for node in range(2)
    ]
    try:
        for call in calls:
            call.start()
        for call in calls:
            call.join(limit(200))
        assert [call.exitcode for call in calls] == [0, 0]
    finally:
        for call in calls:
            call.kill()
            call.join()
    assert read_files(tmp_path) == ["2 0", "2 0"]


def is_last_rank():
    """Return whether this is the last rank, after a barrier of all ranks."""
    state = PartialState()
    state.wait_for_everyone()
    return state.is_last_process


def fail_on_last_rank():
    if is_last_rank():
        raise ZeroDivisionError("no luck\nsecond line")
    time.sleep(600)


def kill_last_rank():
    if is_last_rank():
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def crash_on_last_rank():
    if is_last_rank():
        ctypes.string_at(0)
    time.sleep(600)


def exit_on_last_rank():
    if is_last_rank():
        sys.exit(3)
    time.sleep(600)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            fail_on_last_rank,
            r"rank 1 of 2 failed: ZeroDivisionError: no luck\nTraceback (.|\n)*in fail_on_last_rank(.|\n)*second line$",
        ),
        (kill_last_rank, "rank 1 of 2 was ended by SIGKILL"),
        (
            crash_on_last_rank,
            r"rank 1 of 2 was ended by SIGSEGV\nIts Python stack, most recent call first:\n.*in string_at\n.*in crash_on_last_rank$",
        ),
        (exit_on_last_rank, "rank 1 of 2 exited with code 3"),
    ],
)
def test_a_failure_is_raised_with_its_rank_and_leaves_no_process_or_file(
    function, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(launchers.LaunchError, match=message):
        debug_launcher(function)
    assert not multiprocessing.active_children()
    assert not list(tmp_path.iterdir())


class Garbage:
    """An object in a reference cycle, which writes a file when it is collected."""

    def __init__(self, folder):
        self.folder, self.cycle = folder, self

    def __del__(self):
        (self.folder / f"{os.getpid()}").touch()


def collect_garbage(folder):
    assert gc.isenabled()
    garbage_folder = Garbage(folder / "ranks").folder
    gc.collect()
    assert (garbage_folder / f"{os.getpid()}").exists()


def test_ranks_do_not_collect_the_garbage_of_the_session(tmp_path):
    (tmp_path / "ranks").mkdir()
    gc.disable()
    try:
        Garbage(tmp_path)
        gc.enable()
        debug_launcher(collect_garbage, (tmp_path,))
    finally:
        gc.enable()
    gc.collect()
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == [str(os.getpid())]
    assert len(list((tmp_path / "ranks").iterdir())) == 2


def fail_before_a_barrier():
    accelerator = Accelerator()
    if accelerator.is_last_process:
        raise ZeroDivisionError("no luck")
    accelerator.wait_for_everyone()


def test_only_the_first_failure_is_raised_with_frames_of_the_function():
    with pytest.raises(launchers.LaunchError) as caught:
        debug_launcher(fail_before_a_barrier)
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 1 of 2 failed: ZeroDivisionError: no luck"
    assert [line.split(", in ")[1] for line in lines if line.startswith("  File")] == [
        "fail_before_a_barrier"
    ]


def test_an_interrupt_during_start_leaves_no_process(monkeypatch):
    def interrupted(*_, **__):
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(launchers, "start_processes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        debug_launcher(print)
    assert not multiprocessing.active_children()


def interrupt_session_and_save(folder, after):
    """Interrupt the session on rank 0, save on each rank, and call a function."""
    if not is_last_rank():
        os.kill(os.getppid(), signal.SIGINT)
    try:
        while True:
            time.sleep(0.1)
    except KeyboardInterrupt:
        time.sleep(0.2)
        (folder / os.environ["RANK"]).touch()
        after()


def test_an_interrupt_of_the_session_leaves_time_to_save_on_every_rank(tmp_path, capfd):
    with pytest.raises(KeyboardInterrupt):
        debug_launcher(interrupt_session_and_save, (tmp_path, list))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0", "1"]
    assert capfd.readouterr().err.count("the processes have 30 s to exit") == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def interrupt_session_again():
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(600)


@pytest.mark.parametrize(
    ("after", "seconds", "end"),
    [
        (interrupt_session_again, 600, "was ended by SIGKILL"),
        (lambda: time.sleep(600), 0.5, "was ended by SIGTERM"),
        (lambda: 1 / 0, 600, "failed: ZeroDivisionError: division by zero"),
    ],
    ids=["second-interrupt", "late", "failure"],
)
def test_a_rank_that_does_not_end_in_order_after_an_interrupt_is_named(  # noqa: PLR0913, PLR0917 - the fixtures
    after, seconds, end, tmp_path, capfd, monkeypatch
):
    monkeypatch.setattr(launchers, "_SHUTDOWN_S", seconds)
    with pytest.raises(KeyboardInterrupt):
        debug_launcher(interrupt_session_and_save, (tmp_path, after))
    assert f"accel: after the interrupt, rank 1 of 2 {end}\n" in capfd.readouterr().err
    assert not multiprocessing.active_children()


def interrupt_last_rank():
    if is_last_rank():
        os.kill(os.getpid(), signal.SIGINT)


def test_the_interrupt_of_a_rank_is_raised():
    with pytest.raises(KeyboardInterrupt):
        debug_launcher(interrupt_last_rank)


def stop_in_debugger(folder):
    pdb.Pdb().set_trace()  # pytest replaces breakpoint()
    (folder / os.environ["RANK"]).touch()


def test_a_debugger_in_a_rank_names_the_way_to_debug_and_continues(tmp_path, capfd):
    debug_launcher(stop_in_debugger, (tmp_path,))
    assert len(list(tmp_path.iterdir())) == 2
    assert capfd.readouterr().err.count("Call notebook_launcher(..., num_processes=1)") == 2


def compute_on_two_threads():
    signal.alarm(int(limit(60)))  # a parallel loop that waits for the threads of the session would never end
    torch.set_num_threads(2)
    torch.sort(torch.randn(1_000_000))


def test_ranks_may_use_threads_after_the_session_has_used_its_own():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.sort(torch.randn(1_000_000))
        debug_launcher(compute_on_two_threads)
        torch.sort(torch.randn(1_000_000))
    finally:
        torch.set_num_threads(before)


SESSION = """
import os, time
from pathlib import Path
from accel_runtime import debug_launcher

def work():
    rank = os.environ["RANK"]
    Path("up" + rank).write_text(str(os.getpid()))
    Path("ready" + rank).touch()
    try:
        while True:
            time.sleep(0.1)
    finally:
        time.sleep(0.5)
        Path("saved" + rank).touch()
        time.sleep(600 if Path("stay").exists() else 0)

debug_launcher(work)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["interrupt of the group", "kill"])
def test_ranks_may_save_when_the_session_ends(tmp_path, end):
    (tmp_path / "cell.py").write_text(SESSION)
    if end == "kill":
        (tmp_path / "stay").touch()
    with Process(
        [sys.executable, "cell.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2)
        if end == "kill":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGINT)
        process.wait(limit(120))
        wait_until(lambda: len(list(tmp_path.glob("saved*"))) == 2)
        for path in tmp_path.glob("up*"):
            wait_until(lambda path=path: not Path("/proc", path.read_text()).exists(), 60)


@pytest.mark.slow
def test_an_interrupt_ends_all_processes(tmp_path):
    script = tmp_path / "cell.py"
    script.write_text(
        "import os, time\nfrom pathlib import Path\nfrom accel_runtime import debug_launcher\n"
        "def work():\n    Path('up' + os.environ['RANK']).write_text(str(os.getpid()))\n"
        "    Path('ready' + os.environ['RANK']).touch()\n    while True:\n        time.sleep(0.1)\n"
        "debug_launcher(work)\n"
    )
    with Process(
        [sys.executable, str(script)],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=limit(120))
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert errors.count("Traceback") == 1
    for path in tmp_path.glob("up*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_an_interrupt_while_processes_start_leaves_none_of_them(monkeypatch):
    def fork(popen, process):
        start(popen, process)
        forked.append(popen.pid)
        signal.raise_signal(signal.SIGINT)

    forked = []
    start = popen_fork.Popen.__init__
    monkeypatch.setattr(popen_fork.Popen, "__init__", fork)
    with pytest.raises(KeyboardInterrupt):
        notebook_launcher(time.sleep, (600,), num_processes=2)
    assert len(forked) == 2
    for pid in forked:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_exception_of_a_single_process_is_raised_unchanged():
    with pytest.raises(ZeroDivisionError):
        notebook_launcher(lambda: 1 / 0, num_processes=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Invalid num_processes="),
        ({"num_processes": 0}, "Invalid num_processes="),
        ({"num_processes": "2"}, "Invalid num_processes='2': expected an integer"),
        ({"num_processes": 2, "num_nodes": "2"}, "num_nodes='2': expected integers"),
        (
            {"num_processes": 2, "num_nodes": 2, "rdzv_backend": "c10d"},
            "rdzv_backend='c10d' is not supported",
        ),
        ({"num_processes": 2, "max_restarts": 1}, "max_restarts=1 is not supported"),
        ({"num_processes": 2, "rdzv_conf": {"timeout": 3}}, "rdzv_conf="),
        ({"num_processes": 2, "log_line_prefix_template": "x"}, "log_line_prefix_template='x'"),
        ({"num_processes": 2, "monitor_interval": 5}, "monitor_interval=5"),
        ({"num_processes": 2, "rdzv_id": "x"}, "rdzv_id='x'"),
        ({"num_processes": 2, "node_rank": 1}, "Invalid node_rank=1: expected 0 to 0"),
        (
            {"num_processes": 2, "mixed_precision": "fp9"},
            "Invalid mixed_precision 'fp9': expected one of no, bf16, fp16",
        ),
        ({"num_processes": 2, "use_port": "x"}, "use_port='x'"),
        ({"num_processes": 2, "rdzv_endpoint": "nowhere"}, "rdzv_endpoint='nowhere'"),
    ],
    ids=str,
)
def test_unsupported_arguments_of_notebook_launcher_are_rejected_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        notebook_launcher(fail_on_last_rank, **arguments)


def test_notebook_launcher_accepts_c10d_on_one_node(tmp_path):
    options = {"rdzv_backend": "c10d", "rdzv_conf": {"timeout": 3}, "rdzv_id": "job"}
    notebook_launcher(write_topology, (tmp_path,), num_processes=2, **options)
    assert read_files(tmp_path) == ["2 0", "2 1"]


def test_debug_launcher_needs_at_least_one_process():
    with pytest.raises(ValueError, match="at least 1"):
        debug_launcher(fail_on_last_rank, num_processes=0)


STAND_IN = """
class cuda:
    _lazy_init = is_initialized = lambda: False
"""
"""A stub of torch for the child process that imports packages: importing torch takes seconds."""


@pytest.mark.slow
def test_the_import_that_initialized_cuda_is_named(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(STAND_IN)
    (tmp_path / "poisoned.py").write_text("import torch\ntorch.cuda.is_initialized = lambda: True\n")
    (tmp_path / "harmless.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    only = {"harmless": None, "poisoned": None, "sys": None, "poisoned.part": None}
    assert launchers._find_cuda_import(only) == "'poisoned'"
    assert launchers._find_cuda_import({"harmless": None}) is None
    (tmp_path / "torch.py").unlink()
    (tmp_path / "poisoned.py").write_text(
        "import torch\ntorch.cuda.is_initialized = lambda: True\n"
        "try:\n    torch.cuda._lazy_init()\nexcept Exception:\n    pass\n"
    )
    assert launchers._find_cuda_import(only) == f"'poisoned' ({tmp_path / 'poisoned.py'}:4)"
    monkeypatch.setattr(launchers, "_find_cuda_import", lambda _: "'poisoned' (poisoned.py:4)")
    with pytest.raises(
        RuntimeError, match=r"CUDA is initialized .*by importing 'poisoned' \(poisoned.py:4\)"
    ):
        notebook_launcher(fail_on_last_rank, num_processes=2)
    monkeypatch.setattr(launchers, "_find_cuda_import", lambda _: None)
    with pytest.raises(RuntimeError, match="by a cell of this session"):
        notebook_launcher(fail_on_last_rank, num_processes=2)
