"""Healthy runs that make no steps for longer than the stall timeout are left alone: each of them is a launch.

They run at the same time, since they mostly wait. Each imports what it needs before its first step: afterwards a rank that is
short of a processor would look like one that hangs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
from support.processes.commands import Accel, run_together
from support.processes.waits import limit, wait_until

from accel_cli.runner.guard import list_processes

QUIET_S = 9
TRAINS = f"""
import os, subprocess, sys, time
import torch, torch.distributed as dist

rank, quiet = int(os.environ["RANK"]), {QUIET_S}
print("start", rank, flush=True)
parameter = torch.nn.Parameter(torch.zeros(4))
optimizer = torch.optim.SGD([parameter], 0.1)
def step():
    parameter.grad = torch.ones(4)
    optimizer.step()
def moments():
    end = time.monotonic() + quiet
    while time.monotonic() < end:
        yield
for _ in range(5):
    step()
"""
CREATES = """
from accel_runtime import Accelerator
accelerator = Accelerator()
"""
SAVES = """
class Large:
    def state_dict(self):
        time.sleep(quiet if rank in RANKS else 0)
        return {"a": 1}
    def load_state_dict(self, state):
        pass
accelerator.register_for_checkpointing(Large())
accelerator.save_state("checkpoint")
"""
PROGRAMS = {
    "finishing": "if rank == 0: time.sleep(quiet)",
    "saving": SAVES.replace("RANKS", "(0, 1)"),
    "saving on one rank": SAVES.replace("RANKS", "(0,)"),
    "a download behind a barrier": """
if rank == 0:
    time.sleep(quiet)
accelerator.wait_for_everyone()
""",
    "a download behind a barrier of torch": """
dist.init_process_group("gloo")
if rank == 0:
    time.sleep(quiet)
dist.barrier()
""",
    "collectives of torch": """
dist.init_process_group("gloo")
value = torch.zeros(1)
while value[0] == 0:
    time.sleep(0.05)
    value[0] = float(rank == 0 and time.monotonic() > globals().setdefault("end", time.monotonic() + quiet))
    dist.all_reduce(value)
""",
    "accumulation by backward": """
for _ in moments():
    (torch.ones(4, requires_grad=True) * 2).sum().backward()
    time.sleep(0.5)
""",
    "batches without steps": """
loader = torch.utils.data.DataLoader(range(10**6))
for _, _ in zip(moments(), loader):
    time.sleep(0.5)
""",
    "output": """
for _ in moments():
    print("working", flush=True)
    time.sleep(0.5)
""",
    "an export that computes": """
dist.init_process_group("gloo")
if rank == 0:
    for _ in moments():
        pass
dist.all_reduce(torch.ones(1))
""",
    "a child process that computes": """
subprocess.run([sys.executable, "-c", f"import time; end = time.monotonic() + {quiet}\\nwhile time.monotonic() < end: pass"])
""",
}
OPTIONS = ("launch", "--no-profile", "--cpu", "--nproc-per-node", 2, "--ranks", "all", "--shutdown-timeout", 1,
           "--stall-timeout", 4, "--stall-action", "restart", "--max-restarts", 1, "train.py")  # fmt: skip


@pytest.mark.slow
def test_no_healthy_run_without_steps_is_restarted(script, cwd):
    for program, text in PROGRAMS.items():
        before = CREATES if "accelerator." in text else ""
        script(f"{before}{TRAINS}{text}\nstep()\nprint('done', rank, flush=True)\n", f"{program}/train.py")
    results = run_together({cwd / program: OPTIONS for program in PROGRAMS})
    for folder, done in results.items():
        assert done.returncode == 0, (folder.name, done.stderr)
        assert (done.stdout.count("start"), done.stdout.count("done")) == (2, 2), (folder.name, done.stderr)
        assert "accel: restart " not in done.stderr, folder.name


STEPS = (
    TRAINS
    + """
for _ in range(80):
    step()
    print("step", flush=True)
    time.sleep(0.1)
print("done", rank, flush=True)
"""
)


def find_descendants(pid):
    """Return the ids of the processes that a process has started, and of theirs."""
    processes = list_processes()
    found = {pid}
    for _ in processes:
        found |= {process.pid for process in processes if process.parent in found}
    return found


@pytest.mark.parametrize(
    "whole", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["all processes", "the launcher"]
)
def test_a_run_that_was_frozen_and_continued_is_not_restarted(script, cwd, whole):
    """As by `docker pause` or `scontrol suspend`, and by Ctrl-Z, which stops the launcher only."""
    script(STEPS)
    out, err = cwd / "out", cwd / "err"
    with (
        out.open("wb") as stdout,
        err.open("wb") as stderr,
        Accel(*OPTIONS, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr) as process,
    ):
        wait_until(lambda: b"step" in out.read_bytes())
        stopped = find_descendants(process.pid) if whole else {process.pid}
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(10)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        assert process.wait(limit(60)) == 0
    output = out.read_text()
    assert (output.count("start"), output.count("done")) == (2, 2), err.read_text()
