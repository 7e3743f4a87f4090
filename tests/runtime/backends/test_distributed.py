"""Start and end of a process group, in separate processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import pytest
import torch
from support.processes.children import free_port
from support.processes.ranks import run_script
from support.processes.waits import limit

from accel_runtime import Accelerator

INSPECT = """
import atexit, datetime, torch, torch.distributed as dist
from accel_runtime import Accelerator, InitProcessGroupKwargs

def seconds():
    group = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    return group.options._timeout.total_seconds()

atexit.register(lambda: print("is there" if dist.is_initialized() else "is gone"))
"""


@pytest.fixture
def run(tmp_path):
    """Run code in a process that a launcher started alone; return output, errors and exit code."""

    def run(code):
        script = tmp_path / "train.py"
        script.write_text(code)
        (result,) = run_script(script, [build_environ(0, 1, port=0)], teardown=True)
        return result

    return run


@pytest.fixture
def printed(run):
    """Return the lines that code prints."""

    def printed(code):
        out, errors, exit_code = run(code)
        assert exit_code == 0, errors
        return out.splitlines()

    return printed


def build_environ(rank, size, port):
    """Return the environment of a process that a launcher starts."""
    counts = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    return counts | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def test_a_process_group_has_the_timeout_of_the_settings_and_is_destroyed_at_exit(printed, monkeypatch):
    monkeypatch.setenv("ACCEL_PROCESS_GROUP_TIMEOUT", "90")
    assert printed(INSPECT + "Accelerator(); print(dist.get_backend(), seconds())") == [
        "gloo 90.0",
        "is gone",
    ]


def test_options_of_the_script_override_the_settings(printed):
    code = "kwargs = InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=7))\n"
    code += "Accelerator(kwargs_handlers=[kwargs]); print(seconds())"
    assert printed(INSPECT + code) == ["7.0", "is gone"]


def test_a_process_group_of_the_script_is_used_and_not_destroyed(printed):
    code = (
        "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=11)); ours = dist.group.WORLD\n"
    )
    code += "Accelerator().wait_for_everyone(); print(seconds(), dist.group.WORLD is ours)"
    assert printed(INSPECT + code) == ["11.0 True", "is there"]


ONLY_RANK = """
from torch import nn
model = nn.Linear(2, 1)
accelerator = Accelerator()
model = accelerator.prepare(model)
print(type(model).__name__, accelerator.distributed_type.value)
before = dist.group.WORLD._get_sequence_number_for_group()
with accelerator.accumulate(model), accelerator.join_uneven_inputs([model]):
    accelerator.backward(accelerator.gather(model(torch.ones(3, 2))).sum())
accelerator.wait_for_everyone()
print(dist.group.WORLD._get_sequence_number_for_group() - before, "collectives")
total, items = torch.ones(2), [None]
dist.barrier()
dist.all_reduce(total)
dist.all_gather_object(items, "item")
print(dist.get_rank(), dist.get_world_size(), dist.get_backend(), total.tolist(), items)
"""


def test_the_only_rank_of_a_launcher_trains_the_plain_model_and_has_a_process_group_without_a_port(run):
    # An address that no process could listen at.
    out, errors, _ = run("import os; os.environ['MASTER_ADDR'] = 'host.invalid'\n" + INSPECT + ONLY_RANK)
    assert (out.splitlines(), errors) == (
        ["Linear NO", "0 collectives", "0 1 gloo [1.0, 1.0] ['item']", "is gone"],
        "",
    )


def test_options_of_a_process_group_that_exists_are_reported(run):
    out, errors, _ = run(
        INSPECT
        + "short, long = (InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=s)) for s in (7, 900))\n"
        "for options in (short, short, long): Accelerator(kwargs_handlers=[options])\n"
        "print(seconds())"
    )
    assert out.splitlines() == ["7.0", "is gone"]
    assert errors.count("\n") == 1
    assert "timeout of InitProcessGroupKwargs has no effect: an earlier Accelerator" in errors


def test_a_process_group_of_the_script_with_other_ranks_is_refused(pair):
    def connect():
        Accelerator()
        with pytest.MonkeyPatch.context() as patch:
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
                patch.delenv(name)
            with pytest.raises(RuntimeError, match="Cannot connect the processes") as refused:
                Accelerator()
        return str(refused.value)

    messages = pair.run(connect)
    assert ["made this process rank 1 of 2, but no RANK" in message for message in messages] == [False, True]
    assert all("rank 0 of 1. Remove init_process_group()" in message for message in messages)


# A stub: SageMaker's library exists only in its images. It registers a backend with torch on import.
STAND_IN = """
import sys, types, torch.distributed as dist
def made(store, rank, size, timeout):
    print("asked for by rank", rank)
    return dist.ProcessGroupGloo(store, rank, size, timeout)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != "smdistributed":
            return None
        from importlib.machinery import ModuleSpec
        return ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        if module.__name__.endswith(".torch_smddp"):
            dist.Backend.register_backend("smddp", made, devices=["cpu", "cuda"])
sys.meta_path.insert(0, Finder())
"""
CONNECT = """
import os, torch, torch.distributed as dist
from accel_runtime.backends.device_runtime import DeviceRuntime
from accel_runtime.backends.distributed import DistributedBackend
from accel_runtime.environment.settings import Settings
from accel_runtime.environment.topology import Topology
backend = DistributedBackend(Topology.from_env(os.environ), DeviceRuntime(torch.device("cuda", 0)), Settings.from_env(os.environ), {})
print(dist.get_backend(), backend.all_reduce_async(torch.ones(2))().tolist(), backend.collective_backend)
"""


def test_the_smddp_library_is_imported_before_the_process_group_is_created(printed, monkeypatch):
    monkeypatch.setenv("ACCEL_PROCESS_GROUP_BACKEND", "smddp")
    assert printed(STAND_IN + CONNECT) == ["asked for by rank 0", "smddp [1.0, 1.0] smddp"]


def test_a_missing_smddp_library_is_one_message(run, monkeypatch):
    monkeypatch.setenv("ACCEL_PROCESS_GROUP_BACKEND", "smddp")
    for code, message in (
        (CONNECT, "which cannot be imported here (No module named 'smdistributed')"),
        (
            "import accel_runtime; accel_runtime.Accelerator(cpu=True)",
            "smddp needs NVIDIA GPUs, but the device is cpu",
        ),
    ):
        _, errors, exit_code = run(code)
        assert message in errors.splitlines()[-1]
        assert exit_code == 1


END = "import torch, accel_runtime; accel_runtime.Accelerator().gather(torch.ones(3))"


def run_launched(script, environs):
    """Start an interpreter for each process; return output, errors and exit codes."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environs_of_ranks = [{name: str(value) for name, value in environ.items()} for environ in environs]
    processes = [
        subprocess.Popen(
            [sys.executable, script], env=os.environ | {"OMP_NUM_THREADS": "1"} | rank_environ, **pipes
        )
        for rank_environ in environs_of_ranks
    ]
    return [(*process.communicate(timeout=limit(240)), process.returncode) for process in processes]


def test_an_accelerator_after_end_training_connects_while_another_rank_is_late(pair):
    """The rank in time must not read the addresses of the first group, and no thread of it stays."""

    def connect(delay_s):
        counts = []
        for _ in range(3):
            accelerator = Accelerator()
            assert accelerator.reduce(torch.ones(1)).item() == 2
            accelerator.end_training()
            counts.append(threading.active_count())
            time.sleep(delay_s * accelerator.process_index)
        return counts[-1] - counts[0]

    assert pair.run(connect, 0.3) == [0, 0]


@pytest.mark.full
@pytest.mark.parametrize("start", [run_script, pytest.param(run_launched, marks=pytest.mark.full)])
def test_processes_that_end_right_after_a_collective_exit_cleanly(tmp_path, start):
    """Threads of gloo may still run: without `_leave`, about one launched pair in ten aborts."""
    script = tmp_path / "train.py"
    script.write_text(END)
    with ExitStack() as ports:
        for _ in range(4):
            # Two pairs at once: load makes a failure more likely.
            pairs = [ports.enter_context(free_port()) for _ in range(2)]
            results = start(script, [build_environ(rank, 2, port) for port in pairs for rank in range(2)])
            assert results == [("", "", 0)] * 4
