"""A hang in a collective of torch is explained: which one, who waits in it, and who has not come to which line."""

from __future__ import annotations

import json
import re

import pytest
from support.hosts.network import hosts
from support.processes.commands import run_accel
from support.processes.waits import limit

SCRIPT = """
import os, signal, sys, time
import torch
import torch.distributed as dist

kind = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x, step):
        if kind == "sleeps in forward" and step == 3 and rank == 1:
            time.sleep(1000)
        return self.layer(x)

model = torch.nn.parallel.DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(6):
    loss = model(torch.ones(4, 2), step).sum()
    try:
        if kind == "raises and catches" and step == 3 and rank == 1:
            raise ValueError
        if kind == "skips a backward pass" and step == 3 and rank == 1:
            dist.broadcast(torch.ones(5), 0)
        loss.backward()
    except ValueError:
        time.sleep(1000)
    optimizer.step()
    optimizer.zero_grad()
    if kind == "ends early" and step == 2 and rank == 1:
        time.sleep(1000)
    if kind == "is stopped" and step == 2 and rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
"""
WAITS = "rank 0 is in all_reduce of [3], collective "
KINDS = {
    "sleeps in forward": (WAITS, "train.py:17 (forward)"),
    "skips a backward pass": ("differs: rank 0: all_reduce of [3]; rank 1: broadcast of [5]", ""),
    "raises and catches": (WAITS, "train.py:31 (<module>)"),
    "ends early": (WAITS, "train.py:35 (<module>)"),
}
OPTIONS = (
    "-q",
    "--no-profile",
    "--cpu",
    "--nproc-per-node",
    2,
    "--shutdown-timeout",
    1,
    "--stall-timeout",
    2,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [name if name == "sleeps in forward" else pytest.param(name, marks=pytest.mark.full) for name in KINDS],
)
def test_a_hang_in_gradient_averaging_names_the_collective_and_the_missing_rank(script, home, kind):
    script(SCRIPT)
    done = run_accel("launch", *OPTIONS, "--stall-action", "fail", "train.py", kind)
    assert done.returncode == 124, done.stderr
    collective, place = KINDS[kind]
    assert collective in done.stderr
    if place:
        assert "rank 1 has not entered it: its last one is number " in done.stderr
        assert f"; it is at {place}" in done.stderr
    (run,) = (home / "runs").iterdir()
    record = json.loads((run / "attempt_0" / "rank_0" / "collectives.json").read_text())
    assert record["entries"], "the record stays in the folder of the run"
    assert not list((run / "attempt_0" / "rank_0").glob("*_request"))


TIMES_OUT = """
import datetime, time
import torch
import torch.distributed as dist

def load():
    time.sleep(1000)

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
for step in range(4):
    if step == 2 and dist.get_rank() == 1:
        load()
    model(torch.ones(4, 2)).sum().backward()
"""


@pytest.mark.slow
def test_a_time_out_names_the_rank_that_did_not_come_and_its_line(script):
    """It is still running when the other one fails, and is ended after the explanation."""
    script(TIMES_OUT)
    done = run_accel("launch", *OPTIONS[:-2], "train.py")
    assert done.returncode == 1
    assert "accel: rank 0 has timed out:\n  rank 0 is in all_reduce of [3], collective " in done.stderr
    assert "; it is at train.py:7 (load)" in done.stderr
    assert done.stderr.index("has not entered it") < done.stderr.index("accel: error: rank 0 of 2")


@pytest.mark.service("root")
def test_both_nodes_name_the_rank_that_has_not_come_and_its_line(script):
    """Each node has one rank, so that the one that waits and the one that is missing are on different machines."""
    script(SCRIPT)
    with hosts(2) as two:
        launched = two.launch(
            "-q", "--no-profile", "--cpu", "--nnodes", "2", "--rdzv-endpoint", "h0:29400", "--nproc-per-node", "1",
            "--stall-timeout", "3", "--stall-action", "fail", "--shutdown-timeout", "1", "train.py", "sleeps in forward",
        )  # fmt: skip
        outputs = [process.communicate(timeout=limit(90))[0] for process in launched]
    explained = [output for output in outputs if "has not entered it" in output]
    assert explained, outputs
    for output in explained:
        assert re.search(r"rank 0 is in all_reduce of \[3\], collective \d+ of the default group", output)
        assert re.search(r"rank 1 has not entered it: .*; it is at train\.py:17 \(forward\)", output)
    assert any(f"train.py:17 (forward) on h{number}" in output for output in outputs for number in range(2))


@pytest.mark.service("root")
def test_a_stopped_rank_is_named_by_the_machine_that_reports_the_hang(script):
    """Each machine asks the other one, which must not count the time of its answers as a pause."""
    script(SCRIPT)
    with hosts(2) as two:
        launched = two.launch(
            "-q", "--no-profile", "--cpu", "--nnodes", "2", "--rdzv-endpoint", "h0:29400", "--nproc-per-node", "1",
            "--stall-timeout", "3", "--stall-action", "fail", "--shutdown-timeout", "1", "train.py", "is stopped",
        )  # fmt: skip
        outputs = [process.communicate(timeout=limit(90))[0] for process in launched]
    text = "\n".join(outputs)
    assert re.search(r"^  rank 1: no answer: it is stopped", text, re.MULTILINE), text
    assert "error: The run has stalled: no progress for" in text
    assert "does not answer. It is a stall after" not in text
