"""Scripts that destroy their process group right after a collective end without a hang under `accel launch`."""

from __future__ import annotations

from support.processes.commands import run_accel

SCRIPT = """
import faulthandler, os, sys
import torch
import torch.distributed as dist

faulthandler.dump_traceback_later(60, exit=True)

def train(number):
    address = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store-{number}", **address)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    model(torch.randn(2, 8)).sum().backward()
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()  # and the last reference to the group is that of the model

for number in range(40):
    train(number)
if os.environ["RANK"] == "0":
    print(number + 1, "groups")
"""


def test_a_script_that_destroys_its_group_before_its_model_does_not_hang(script):
    script(SCRIPT)
    done = run_accel(
        "launch", "--no-profile", "-q", "--cpu", "--nproc-per-node", "2", "train.py", teardown=True
    )
    assert (done.returncode, done.stdout) == (0, "40 groups\n"), done.stderr
