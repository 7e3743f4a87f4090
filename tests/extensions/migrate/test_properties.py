"""Scripts put together of usual parts in any combination print the same numbers after their conversion."""

from __future__ import annotations

import cProfile

import pytest

from accel_cli.extensions.migrate.conversion import migrate_script

HEAD = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

"""
DEVICES = {
    "conditional": ('device = torch.device("cuda" if torch.cuda.is_available() else "cpu")', "device"),
    "assigned twice": ('device = "cpu"\nif torch.cuda.is_available():\n    device = "cuda"', "device"),
    "constant": ('dev = torch.device("cpu")', "dev"),
    "none": ("", ""),
}
SCHEDULERS = {
    "none": ("", ""),
    "batch": (
        "scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=8)",
        "scheduler.step()",
    ),
    "epoch": ("scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)", "scheduler.step()"),
}
EVALUATIONS = {
    "none": "",
    "loss": "losses = 0.0\nfor x, y in test_loader:\n    with torch.no_grad():\n        losses += nn.functional.mse_loss(model(MOVE_X), MOVE_Y).item()\nprint(losses / len(test_loader))",
    "counts": "hits = total = 0\nwith torch.no_grad():\n    for x, y in test_loader:\n        out = model(MOVE_X)\n        hits += ((out > 0) == (MOVE_Y > 0)).sum().item()\n        total += len(y)\nprint(hits, total)",
    "lists": "found = []\nfor x, y in test_loader:\n    with torch.no_grad():\n        out = model(MOVE_X)\n    found.extend(out.view(-1).tolist())\nprint(sum(found))",
}

PARTS = {
    "functions": "def f{i}(a):\n    print(a)\n    return f{j}(a) * {i}\n",
    "conditions of ranks": "if rank == {i}:\n    y{i} = model(torch.ones(1))\nprint({i})\n",
}


@pytest.mark.parametrize("part", PARTS)
def test_the_work_of_a_conversion_grows_with_the_length_of_the_script(part):
    """Counted in calls, not in seconds: quadratic work would be twice as many per line."""

    def count_calls(number):
        parts = "".join(PARTS[part].format(i=i, j=max(i - 1, 0)) for i in range(number))
        profile = cProfile.Profile()
        profile.runcall(migrate_script, DISTRIBUTED.replace("# parts\n", parts))
        return sum(entry.callcount for entry in profile.getstats())

    base, few, many = map(count_calls, (0, 20, 120))
    assert (many - base) / 120 < 1.5 * (few - base) / 20


DISTRIBUTED = """\
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.ones(16, 1))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
total = 0
# parts
for (x,) in loader:
    loss = model(x).mean()
    loss.backward()
    optimizer.step()
"""
