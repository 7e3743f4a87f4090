"""Runs of scripts that do not use accel: their steps are seen by `accel top`, `accel report` and `--stall-timeout`."""

import json

import pytest
from support.processes.commands import run_accel

RAW = """
import importlib.util, os, sys, time
assert importlib.util.find_spec("torch")  # as libraries ask what is installed
import torch
import torch.distributed as dist
from torch import nn

model = nn.Linear(4, 1)
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for step in range(30):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.1)  # so that each step is measured
    if step == 24 and os.environ.get("RANK") == "1" and "--stall" in sys.argv:
        time.sleep(8)
    elif step > 24 and "--stall" in sys.argv:
        time.sleep(0.5)  # longer than the launcher needs to see that it goes on
if dist.is_initialized():
    dist.destroy_process_group()
"""


@pytest.fixture
def raw(script):
    """A training loop of torch alone."""
    script(RAW)


def read_ranks(home):
    """Return the ranks of the newest run, as `accel top --json` prints them."""
    (run,) = (home / "runs").iterdir()
    shown = run_accel("top", run.name, "--json")
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout)["ranks"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--nproc-per-node", 2),
        pytest.param(("--nproc-per-node", 2, "--set", "launcher.start_method=exec"), marks=pytest.mark.full),
    ],
    ids=["single", "fork server", "exec"],
)
def test_the_steps_of_a_script_of_torch_are_counted(raw, home, options):
    done = run_accel("launch", "--cpu", *options, "train.py")
    assert done.returncode == 0, done.stderr
    for rank in read_ranks(home):
        assert (rank["steps"], rank["state"]) == (30, "ended")
        assert rank["steps_per_s_mean"] > 0
        assert rank["forward_time_s"] > 0.09, "without a loader, from the last step on"
        # A single process waits for no other.
        assert (rank["wait_time_s"] > 0) == bool(options)


@pytest.mark.slow
def test_a_stall_of_a_script_of_torch_is_reported_with_the_steps_and_lines_of_its_ranks(raw):
    done = run_accel(
        "launch", "-q", "--cpu", "--nproc-per-node", 2, "--stall-timeout", 3, "train.py", "--stall"
    )
    assert done.returncode == 0, done.stderr
    assert "no process on this machine has made progress for " in done.stderr
    assert "0     25     0" in done.stderr
    assert 'train.py", line 19 in <module>' in done.stderr
    assert "progress resumed after" in done.stderr


@pytest.mark.slow
def test_a_script_without_optimizer_steps_has_no_progress(script, home):
    script("import torch\nprint(torch.ones(2).sum().item())\n")
    done = run_accel("launch", "-q", "--cpu", "--nproc-per-node", 2, "train.py")
    assert (done.returncode, done.stdout.strip()) == (0, "2.0")
    assert [(rank["steps"], rank["steps_per_s"]) for rank in read_ranks(home)] == [(0, None)] * 2
