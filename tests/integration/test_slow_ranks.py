"""`accel top` names the rank for which the others wait, and the part of its steps, in scripts of torch with their own collectives."""

import json

import pytest
from support.processes.commands import run_accel

SLEEPS = """
import sys, time, torch
import torch.distributed as dist

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(context, inputs):
        return inputs.clone()

    @staticmethod
    def backward(context, gradient):
        sleep("backward")
        return gradient

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        sleep("data")
        return torch.ones(4)

def sleep(place):
    if place == sys.argv[1] and dist.get_rank() == 1:
        before = time.monotonic()
        time.sleep(0.05)
        slept.append(time.monotonic() - before)

slept = []
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
start = time.monotonic()
for batch in torch.utils.data.DataLoader(Samples()):
    sleep("forward")
    loss = Slow.apply(model(batch)).sum()
    dist.all_reduce(loss.detach().clone())  # the mean loss, for a log
    loss.backward()
    sleep("update")
    optimizer.step()
    optimizer.zero_grad()
    sleep("rest")
    if dist.get_rank() == 1:
        time.sleep(0.001)  # a little slower between steps too
    is_over = torch.tensor(float(time.monotonic() - start > 3))
    dist.all_reduce(is_over)
    if is_over:
        break
if slept:
    with open("slept", "w") as file:
        print(sum(slept) / len(slept), file=file)
dist.destroy_process_group()
"""
NAMES = {
    "data": "waiting for data",
    "forward": "in forward passes",
    "backward": "in backward passes",
    "update": "in updates (clipping, optimizer step)",
    "rest": "between steps",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [pytest.param(place, marks=[pytest.mark.full] * (place not in {"forward", "rest"})) for place in NAMES],
)
def test_a_rank_that_sleeps_50_ms_a_step_is_named_within_3_seconds_with_the_part_in_which_it_sleeps(
    script, home, cwd, place
):
    script(SLEEPS)
    done = run_accel("launch", "-q", "--cpu", "--nproc-per-node", 2, "train.py", place)
    assert done.returncode == 0, done.stderr
    (run,) = (home / "runs").iterdir()
    shown = json.loads(run_accel("top", run.name, "--json").stdout)
    assert shown["slowest_rank"] == 1
    times = [rank[f"{place}_time_s"] for rank in shown["ranks"]]
    assert times[1] - times[0] == pytest.approx(float((cwd / "slept").read_text()), rel=0.1)
    text = " ".join(run_accel("top", run.name).stdout.split())
    assert "* slowest rank: 1, with " in text
    assert f"mostly {NAMES[place]}: " in text
