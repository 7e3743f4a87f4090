"""Parts of short training scripts for the tests of `accel migrate`."""

HEAD = """\
import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Linear(8, 2).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(torch.randn(32, 8), batch_size=8)
"""
LOOP = """\
for i, x in enumerate(loader):
    loss = model(x.to(device)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
DDP = (
    "import torch.distributed as dist\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n"
    "dist.init_process_group()\nrank = dist.get_rank()\n"
    + HEAD.replace("optimizer =", "model = DDP(model)\noptimizer =")
)
CYCLE = """\
for i, x in enumerate(loader):
    if i % 4 == 0:
        optimizer.zero_grad()
    loss = model(x.to(device)).mean() / 4
    loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
"""
CYCLE_END = """\
for i, x in enumerate(loader):
    loss = model(x.to(device)).mean() / 4
    loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
TRAINER = """\
class Trainer:
    def __init__(self, model, loader):
        self.model, self.loader = model, loader
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def fit(self):
        for x in self.loader:
            loss = self.model(x).mean()
            loss.backward()
            self.optimizer.step()
"""
MAIN = (
    "import argparse\nparser = argparse.ArgumentParser()\nargs = parser.parse_args()\nprint(args.device)\n"
    + HEAD.replace('torch.device("cuda" if torch.cuda.is_available() else "cpu")', "args.device")
    + LOOP
)
EVALUATE = (
    "def evaluate(model, loader):\n    for x in loader:\n        model(x)\ndef end(model, loader):\n    evaluate(model, loader)\n"
    + DDP
    + LOOP
)
TEST = HEAD + LOOP + "test = DataLoader(torch.randn(8, 8))\ntotal = 0\n"
CYCLED = (
    "def cycle(loader):\n    while True:\n        for x in loader:\n            yield x\n\n"
    + HEAD.partition("model")[0]
    + "loader = DataLoader(torch.randn(32, 8), batch_size=8)\nCYCLE\n"
    + "model"
    + HEAD.partition("model")[2].partition("loader =")[0]
)
NEXT = "for i in range(4):\n    loss = model(next(it)).mean()\n    loss.backward()\n    optimizer.step()\n"
