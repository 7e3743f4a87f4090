"""Findings and conversions of `accel migrate`, by short scripts: what is converted, what is left, and what is said of it.

Each finding has a script of which it is true, and a near miss of which it must not be said.
"""

from __future__ import annotations

import ast
import cProfile
import functools
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import accel_cli.extensions.migrate
from accel_cli.extensions.migrate.conversion import migrate_script
from accel_cli.extensions.migrate.shell import migrate_shell
from accel_runtime import Accelerator

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


# Conversions -----------------------------------------------------------------------------

UNSAFE = {
    "training in another file": ("import torch\nfrom engine import fit\noptimizer = torch.optim.SGD([], lr=0.1)\nfit(optimizer)\n", "If another file or a library trains with it"),
}  # fmt: skip
FOUND = {
    "a loss that another one is added to": (HEAD + LOOP.replace("    loss.backward()", "    loss += model(x).abs().mean()\n    loss.backward()"), None),
    "inputs that the loop changes": (HEAD + LOOP.replace("    loss =", "    x[0] = x[0] + 1\n    loss ="), None),
    "a factor of the loss that the loop changes": ("k = 0.5\n" + HEAD + LOOP.replace("model(x.to(device)).mean()", "model(x.to(device)).mean() * k") + "    k = k + model(x).mean().item()\n", None),
    "a condition of a loss that ends the job": ("import sys\n" + HEAD + LOOP + "    if loss > 9:\n        sys.exit(1)\n", None),
    "a condition of patience": ("patience = 9\n" + HEAD + LOOP + "    if patience == 0:\n        break\n", None),
    "a test of another file": ("from engine import evaluate\n" + TEST + LOOP + "evaluate(model, test)\n", None),
    "condition of a step": (HEAD + LOOP.replace("    optimizer.step()", "    if i > 3:\n        optimizer.step()"), None),
    "a condition of drawn batches": (DDP + LOOP.replace("for i, x in enumerate(loader):", "torch.manual_seed(7 + rank)\nwhile True:\n    x = torch.randn(4, 8)\n    best = x.max()") + "    if best > 2:\n        break\n", None),
    "a condition of a count of steps": (DDP + LOOP.replace("for i, x in enumerate(loader):", "torch.manual_seed(7 + rank)\nsteps = 0\nwhile True:\n    x = torch.randn(4, 8)\n    steps += 1") + "    if steps > 2:\n        break\n", None),
    "a length in a dataset": ("from torch.utils.data import Dataset\nclass Blocks(Dataset):\n    def __len__(self):\n        return len(self.data) // self.batch_size\n" .replace("from", "import torch\nfrom", 1) + HEAD + LOOP, None),
    "scheduler at the last batch": (HEAD + "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n" + LOOP + "    if i == len(loader) - 1:\n        scheduler.step()\n", None),
}  # fmt: skip
MAIN_OF_COMMAND = "def main(device):\n" + "".join(
    f"    {one}\n"
    for one in (
        HEAD.split("DataLoader\n\n")[1].replace(
            'device = torch.device("cuda" if torch.cuda.is_available() else "cpu")\n', ""
        )
        + LOOP
        + "y = torch.ones(1, device=device)\n"
    ).splitlines()
)
COMMAND = "import torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader\n"
CONVERTED = {
    "an optimizer of a tensor that exists under a condition": (HEAD + "if tune:\n    alpha = torch.zeros(1, requires_grad=True)\n    other = torch.optim.SGD([alpha], lr=0.1)\n" + LOOP + "    if tune:\n        other.step()\n", "other = accelerator.prepare(other)"),
    "an optimizer of another package": ("from lion_pytorch import Lion\n" + HEAD.replace("torch.optim.SGD", "Lion") + LOOP, "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"),
    "an optimizer of another package that a function steps": ("from lion_pytorch import Lion\n" + HEAD.replace("torch.optim.SGD", "Lion") + "def step(one):\n    one.step()\n    one.zero_grad()\n" + LOOP.replace("    optimizer.step()\n    optimizer.zero_grad()\n", "    step(optimizer)\n"), "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"),
    "a loader of torch_geometric": ("from torch_geometric.loader import NeighborLoader\n" + HEAD.replace("= DataLoader(torch.randn(32, 8)", "= NeighborLoader([1]") + LOOP, "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"),
    "an optimizer that exists under a condition": (HEAD.replace("optimizer =", "if use:\n    optimizer =") + LOOP.replace("    optimizer.step()\n    optimizer.zero_grad()", "    if use and i:\n        optimizer.step()"), "optimizer = accelerator.prepare(optimizer)"),
    "a loader that exists under a condition": (HEAD.replace("model =", "if test:\n    other = DataLoader(torch.randn(8, 8))\nmodel =") + LOOP + "if test:\n    for x in other:\n        model(x)\n", "other = accelerator.prepare(other)"),
    "an optimizer of one of two branches": (HEAD.replace("optimizer =", "if use:\n    optimizer = torch.optim.Adam(model.parameters())\nelif other:\n    optimizer =") + LOOP, "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"),
    "a device of a command of click": ("import click\n" + COMMAND + "@click.command()\n@click.option('--device')\n" + MAIN_OF_COMMAND + "main()\n", "y = torch.ones(1, device=accelerator.device)"),
    "a device of a command of typer": ("import typer\n" + COMMAND + MAIN_OF_COMMAND.replace("device)", "*, device: str = 'cuda:0')", 1) + "typer.run(main)\n", "y = torch.ones(1, device=accelerator.device)"),
    "a device of a command of fire": ("import fire\n" + COMMAND + MAIN_OF_COMMAND + "fire.Fire(main)\n", "model = nn.Linear(8, 2)"),
    "a generator over a loader": (CYCLED.replace("CYCLE", "it = cycle(loader)") + NEXT, "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"),
    "a number of devices": (HEAD + "num_devices = 2\nprint(num_devices)\n" + LOOP, "accelerator.print(num_devices)"),
    "a number in a device": (HEAD.replace('torch.device("cuda" if torch.cuda.is_available() else "cpu")', "0") + LOOP + "y = torch.ones(1).to(torch.device('cuda', device))\n", "y = torch.ones(1).to(accelerator.device)"),
    "a second name for the model of DDP": (DDP.replace("model = DDP(model)", "ddp_model = DDP(model)").replace("model.parameters()", "ddp_model.parameters()") + LOOP.replace("model(x", "ddp_model(x"), "ddp_model = model"),
    "a rank that is read before the function of the Accelerator": ("import os\nimport torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader\ndef train(gpu):\n" + "".join(f"    {one}\n" for one in (HEAD.split("DataLoader\n\n")[1] + LOOP).splitlines()) + "def main():\n    rank = int(os.environ['RANK'])\n    train(rank)\nmain()\n", "rank = int(os.environ['RANK'])"),
    "a log of the main process": ("import wandb\n" + DDP + "is_main = rank == 0\nif is_main:\n    wandb.init(project='x')\n" + LOOP, "wandb.init(project='x')"),
    "a model that is loaded after the training": (HEAD + LOOP + "model = torch.load('a.pt')\n", "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"),
    "a trainer in a file of its own": ("import torch\nfrom torch.utils.data import DataLoader\nclass Trainer:\n    def __init__(self, model, data):\n        self.model = model\n        self.data = data\n    def run(self):\n        optimizer = self.model.configure_optimizers()\n        loader = DataLoader(self.data)\n        for x in loader:\n            loss = self.model(x)\n            loss.backward()\n            optimizer.step()\n", "optimizer, loader = self.accelerator.prepare(optimizer, loader)"),
    "batches by next": (HEAD + "it = iter(loader)\nwhile True:\n    loss = model(next(it).to(device)).mean()\n    loss.backward()\n    optimizer.step()\n", "loss = model(next(it)).mean()"),
    "a closure": (HEAD + "for x in loader:\n    def closure():\n        loss = model(x.to(device)).mean()\n        loss.backward()\n        return loss\n    optimizer.step(closure)\n", "optimizer.step(closure)"),
    "autocast around some calls": (HEAD + LOOP.replace("    loss = ", "    with torch.autocast('cuda'):\n        model(x)\n    loss = "), "with torch.autocast('cuda'):"),
    "autocast of a variable with its scaler": (HEAD + "kind = 'half'\nctx = torch.autocast('cuda')\nscaler = torch.amp.GradScaler(enabled=kind == 'half')\n" + LOOP.replace("    loss = ", "    with ctx:\n        loss = ").replace("loss.backward()", "scaler.scale(loss).backward()").replace("optimizer.step()", "scaler.step(optimizer)\n    scaler.update()"), "accelerator.backward(scaler.scale(loss))"),
    "the accelerator of torch": (HEAD.replace('torch.device("cuda" if torch.cuda.is_available() else "cpu")', 'torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"') + LOOP, "accelerator = Accelerator()"),
    "the accelerator of torch in a variable of this name": (HEAD.replace('device = torch.device("cuda" if torch.cuda.is_available() else "cpu")', "accelerator = torch.accelerator.current_accelerator()").replace("to(device)", "to(accelerator)") + LOOP.replace("to(device)", "to(accelerator)"), "loss = model(x).mean()"),
    "the type of the accelerator of torch": (HEAD.replace('torch.device("cuda" if torch.cuda.is_available() else "cpu")', "torch.accelerator.current_accelerator().type") + LOOP + "text = 'on ' + device\n", "text = 'on ' + accelerator.device.type"),
    "a number in a variable for the device": (HEAD.replace('torch.device("cuda" if torch.cuda.is_available() else "cpu")', "0") + LOOP + "y = torch.ones(1).to(device)\n", "y = torch.ones(1).to(accelerator.device)"),
    "a device of the local rank": (DDP.replace('torch.device("cuda" if torch.cuda.is_available() else "cpu")', 'f"cuda:{dist.get_rank()}"') + LOOP + "y = torch.ones(1).to(device)\n", "y = torch.ones(1).to(accelerator.device)"),
    "a move to the device of the local rank": (DDP + LOOP.replace("x.to(device)", "x.to(f'cuda:{rank}')") + "y = torch.ones(1, device=f'cuda:{rank}')\n", "y = torch.ones(1, device=accelerator.device)"),
    "an image": ("from torchvision.utils import save_image\n" + HEAD + LOOP + "    save_image(x.cpu(), 'a.png')\n", "if accelerator.is_main_process:"),
    "a file with one object": (HEAD + LOOP + "with open('a.pt', 'wb') as f:\n    torch.save(model.state_dict(), f)\n", "accelerator.save(accelerator.get_state_dict(model), 'a.pt')"),
    "a file that is read after it is written": (HEAD + LOOP + "torch.save(model.state_dict(), 'a.pt')\nwith open('a.pt', 'rb') as f:\n    state = torch.load(f)\n", "accelerator.wait_for_everyone()"),
    "a file of a function": ("import torch\ndef main():\n" + "".join(f"    {one}\n" for one in (HEAD + LOOP).splitlines()) + "    keep({'model': model.state_dict()})\n\ndef keep(state):\n    torch.save(state, 'a.pt')\n\nmain()\n", "accelerator.save(state, 'a.pt')"),
    "a model that the script updates": (HEAD.replace("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n", "") + LOOP.replace("    optimizer.step()\n    optimizer.zero_grad()\n", "    for p in model.parameters():\n        p.data.add_(p.grad, alpha=-0.1)\n    model.zero_grad()\n"), "model, loader = accelerator.prepare(model, loader)"),
    "an optimizer that a class creates": (HEAD.replace("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n", "") + "class Trainer:\n    def __init__(self, model):\n        self.model = model\n        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n    def fit(self, loader):\n        for x in loader:\n            loss = self.model(x).mean()\n            loss.backward()\n            self.optimizer.step()\n            self.optimizer.zero_grad()\nTrainer(model).fit(loader)\n", "self.optimizer = accelerator.prepare(self.optimizer)"),
    "the number of batches of a list": (HEAD + LOOP + "n = len(list(loader))\n", "n = len(list(loader))"),
    "an average of a class that is reduced": (DDP + "class Meter:\n    def __init__(self):\n        self.sum = 0\n    def update(self, value):\n        self.sum += value\n    def total(self):\n        both = torch.tensor([self.sum])\n        dist.all_reduce(both, async_op=False)\n        return both\n" + LOOP + "meter = Meter()\ntest = DataLoader(torch.randn(8, 8))\nfor x in test:\n    meter.update(model(x).sum().item())\n", "both = torch.tensor([self.sum])"),
    "autocast in an evaluation": (TEST + "with torch.autocast('cuda'):\n    for x in test:\n        model(x)\n", "with torch.autocast('cuda'):"),
    "a model that is copied": (HEAD.replace("optimizer =", "import copy\ntarget = copy.deepcopy(model)\noptimizer =") + LOOP, "model = nn.Linear(8, 2).to(accelerator.device)"),
    "a device that is compared": (HEAD.replace('torch.device("cuda" if torch.cuda.is_available() else "cpu")', '"cuda"') + LOOP + "if device == 'cuda':\n    pass\n", "if accelerator.device.type == 'cuda':"),
    "a device that is joined": (HEAD.replace('torch.device("cuda" if torch.cuda.is_available() else "cpu")', '"cuda"') + LOOP + "text = 'device ' + device\n", "text = 'device ' + accelerator.device.type"),
    "a file that one rank saves": (DDP + "def save():\n    torch.save(model.module.state_dict(), 'a')\ndef end():\n    save()\n" + LOOP + "if rank == 0:\n    end()\n", "torch.save(accelerator.unwrap_model(model).state_dict(), 'a')"),
    "a function that calls itself": ("def move(x):\n    if isinstance(x, list):\n        return move(x[0])\n    return move(x)\n" + HEAD + LOOP.replace("x.to(device)", "move(x)"), "accelerator.backward(loss)"),
    "a mean over the processes": (DDP + LOOP + "mean = loss.detach().clone()\ndist.all_reduce(mean, op=dist.ReduceOp.AVG)\n", 'mean = accelerator.reduce(mean, "mean")'),
    "a process group that may be absent": (DDP + LOOP + "if dist.is_initialized():\n    pass\n", "if accelerator.use_distributed:"),
    "a rank that may be absent": ("import os\nddp = int(os.environ.get('RANK', -1)) != -1\n" + DDP + LOOP, "ddp = accelerator.use_distributed"),
    "a module of progress bars": ("import tqdm\n" + HEAD + LOOP.replace("enumerate(loader)", "enumerate(tqdm.tqdm(loader))"), "for i, x in enumerate(tqdm(loader)):"),
    "autocast by a flag": (HEAD.replace("device =", "amp = True\ndevice =") + LOOP.replace("    loss = ", "    with torch.autocast('cuda', enabled=amp):\n        loss = "), 'accelerator = Accelerator(mixed_precision="fp16" if amp else "no")'),
    "a part of a loss": (HEAD + LOOP.replace("    loss.backward()", "    other = model.weight.norm()\n    loss = loss + 0.1 * other\n    loss.backward()\n    print(other.item())"), 'accelerator.print(accelerator.reduce(other.detach(), "mean").item())'),
    "a mean of losses": (HEAD + LOOP + "    both = (loss + loss) / 2\n    print(both.item())\n", 'accelerator.print(accelerator.reduce(both.detach(), "mean").item())'),
    "a loss of one rank in a cycle": (DDP + LOOP.replace("    optimizer.step()\n    optimizer.zero_grad()", "    if (i + 1) % 4 == 0:\n        optimizer.step()\n        optimizer.zero_grad()\n    if rank == 0:\n        print(loss.item() * 4)").replace("mean()", "mean() / 4"), "print(loss.item())"),
    "a number from the index of a batch": (TEST + "for i, x in enumerate(test):\n    n = i + 1\n    total += model(x).sum().item()\n    print(n)\n", "outputs = accelerator.gather_for_metrics(outputs)"),
    "an average of the weights": (HEAD.replace("optimizer =", "import copy\nclass EMA:\n    def __init__(self, model):\n        self.model = copy.deepcopy(model)\nema = EMA(model)\noptimizer =") + LOOP, "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"),
    "an optimizer that the model creates": (HEAD.replace("model = nn.Linear(8, 2)", "class Net(nn.Linear):\n    def configure_optimizers(self, lr):\n        return torch.optim.SGD(self.parameters(), lr=lr)\nmodel = Net(8, 2)").replace("torch.optim.SGD(model.parameters(), lr=0.1)", "model.configure_optimizers(0.1)") + LOOP, "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"),
    "a sampler of DDP only": (DDP.replace("loader = DataLoader(torch.randn(32, 8), batch_size=8)", "from torch.utils.data import DistributedSampler\nsampler = DistributedSampler([]) if rank else None\nloader = DataLoader([], shuffle=(sampler is None), sampler=sampler)") + LOOP, "loader = DataLoader([], shuffle=True)"),
    "gradients that are not averaged": (DDP + LOOP.replace("    loss = ", "    model.require_backward_grad_sync = True\n    loss = "), "for i, x in enumerate(loader):"),
    "a number format that depends on the GPU": (HEAD + "kind = 'bfloat16' if torch.cuda.is_available() else 'float16'\nformats = {'bfloat16': 1, 'float16': 2}[kind]\n" + LOOP, "formats = {'bfloat16': 1, 'float16': 2}[kind]"),
    "steps under a condition": (HEAD + CYCLE, "accelerator.backward(loss)"),
    "a loss that is not divided": (HEAD + LOOP.replace("    optimizer.step()\n    optimizer", "    if (i + 1) % 4 == 0:\n        optimizer.step()\n        optimizer"), "if (i + 1) % 4 == 0:"),
    "autocast of a format that is set later": (HEAD + "amp = True\n" + LOOP.replace("    loss = ", "    with torch.autocast('cuda', enabled=amp):\n        loss = "), "with torch.autocast('cuda', enabled=amp):"),
    "a scaler that is read": (HEAD + "scaler = torch.amp.GradScaler()\n" + LOOP.replace("    loss = ", "    with torch.autocast('cuda'):\n        loss = ").replace("loss.backward()", "scaler.scale(loss).backward()").replace("optimizer.step()", "scaler.step(optimizer)\n    scale = scaler.get_scale()"), "accelerator.backward(scaler.scale(loss))"),
    "batches without an average": (DDP + LOOP.replace("    loss.backward()", "    with model.no_sync():\n        loss.backward()"), "with accelerator.no_sync(model):"),
    "uneven batches": (DDP + "with model.join():\n" + "".join(f"    {one}\n" for one in LOOP.splitlines()), "with accelerator.join_uneven_inputs([model]):"),
    "options of DDP": (DDP.replace("DDP(model", "DDP(model, broadcast_buffers=False, bucket_cap_mb=50, static_graph=False, device_ids=[rank]") + LOOP, "accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, bucket_cap_mb=50)])"),
    "a function that prints before the training": ("def load():\n    print(1)\nload()\n" + HEAD + LOOP, "print(1)"),
    "a device of the settings that is printed first": (MAIN, "print(args.device)"),
    "a member that gives a part of the input": (HEAD.replace("model = nn.Linear(8, 2)", "class Net(nn.Linear):\n    def get_size(self):\n        return 8\nmodel = Net(8, 2)") + LOOP.replace("model(x.to(device))", "model(x[:, : model.get_size()].to(device))"), "loss = model(x[:, : model.get_size()]).mean()"),
    "an assigned sum": (TEST + "for x in test:\n    total = total + model(x).sum().item()\n", "outputs = accelerator.gather_for_metrics(outputs)"),
}  # fmt: skip


# Findings of libraries and shell scripts -------------------------------------------------

_FOLDER = Path(accel_cli.extensions.migrate.__file__).parent
_NO_SENTENCE = re.compile(r"""\(\?|\$|\\n|^["'][\w ]+["']$""")
"""Regular expressions, templates of code, and lists of names."""


@dataclass(frozen=True)
class Pair:
    """A finding, by a part of its text, with a script on which it is true and the near miss."""

    finding: str
    script: str
    near_miss: str


@functools.cache
def convert(script):
    """Return the text of a script after its conversion, and the texts of its findings and notes; one with `#!` is a shell script."""
    if script.startswith("#!"):
        text, findings = migrate_shell(script)
        return text, tuple(one.text for one in findings)
    result = migrate_script(script)
    return result.text, tuple(one.text for one in (*result.findings, *result.notes))


def list_unsaid(module, said):
    """Return the sentences of a module of `accel_cli/extensions/migrate` that are not in the texts of findings."""
    tree = ast.parse((_FOLDER / f"{module}.py").read_text())
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Constant, ast.JoinedStr))
        and id(node) not in documentation | inner
        and not _NO_SENTENCE.search(ast.unparse(node))
        and len(re.findall(r"\\ [a-z]{2}", pattern := _build_pattern(node))) > 2
        and not re.search(pattern, said, re.DOTALL)
    ]


def _build_pattern(node):
    """Return a regular expression for the texts of a string or f-string; empty for other constants."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(
        ".+?"
        if not isinstance(part, ast.Constant)
        else re.escape(part.value)
        if isinstance(part.value, str)
        else ""
        for part in parts
    )


FABRIC = (
    "import torch\nfrom lightning.fabric import Fabric\nfabric = Fabric()\nmodel = torch.nn.Linear(2, 2)\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nloader = torch.utils.data.DataLoader(torch.randn(8, 2))\n"
    "x = torch.ones(2)\n"
)
ACCELERATE = "from accelerate import Accelerator\naccelerator = Accelerator()\n"
FABRIC_EVALUATION = FABRIC + "loader = fabric.setup_dataloaders(loader)\ntotal = 0\nfor x in loader:\n"


def create_fabric(code, imports=""):
    """Return a script that creates a Fabric."""
    return f"from lightning.fabric import Fabric\n{imports}kind, path = 'cpu', 'a'\nfabric = {code}\n"


def write_shell(command):
    """Return a shell script."""
    return f"#!/bin/bash\n{command}\n"


LIBRARY_PAIRS = [
    # Fabric: calls and members
    Pair("This call of all_gather is not converted. Write accelerator.gather(tensor), which concatenates", FABRIC + "rows = fabric.all_gather(x)\nprint(rows.shape)\n", FABRIC + "print(fabric.all_gather(x).mean())\n"),
    Pair("This call of all_gather is not converted", FABRIC_EVALUATION + "    out = model(x)\n    rows = fabric.all_gather(out)\n    total += rows[0].sum()\n", FABRIC_EVALUATION + "    out = model(x)\n    rows = fabric.all_gather(out)\n    total += rows.sum()\n"),
    Pair("This call of init_module is not converted. Write with accelerator.device:", FABRIC + "with fabric.init_module(empty_init=True):\n    pass\n", FABRIC + "with fabric.init_module(empty_init=False):\n    pass\n"),
    Pair("This call of save is not converted. Write accelerator.save(state_dict, path)", FABRIC + "fabric.save('a', state())\n", FABRIC + "fabric.save('a', model.state_dict())\n"),
    Pair("This call of setup_dataloaders is not converted. Write accelerator.prepare(loader)", FABRIC + "loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)\n", FABRIC + "loader = fabric.setup_dataloaders(loader, use_distributed_sampler=True)\n"),
    Pair("This call of setup is not converted. See the table", FABRIC + "model, plan = fabric.setup(model, scheduler=plan)\n", FABRIC + "model = fabric.setup(model, move_to_device=True)\n"),
    Pair("This call of backward is not converted", FABRIC + "fabric.backward(x, x)\n", FABRIC + "fabric.backward(x.sum(), model=model)\n"),
    Pair("This call of clip_gradients is not converted", FABRIC + "model, a, b = fabric.setup(model, optimizer, optimizer)\nfabric.clip_gradients(model, a, max_norm=1)\n", FABRIC + "fabric.clip_gradients(model, optimizer, max_norm=1)\n"),
    Pair("This call of all_reduce is not converted", FABRIC + "fabric.all_reduce(x, reduce_op=name)\n", FABRIC + "fabric.all_reduce(x, reduce_op='max')\n"),
    Pair("This call of launch is not converted", FABRIC + "fabric.launch(function=print)\n", FABRIC + "fabric.launch()\n"),
    Pair("fabric.call is not converted. Call the functions of the callbacks", FABRIC + "fabric.call('on_end')\n", FABRIC + "fabric.print('on_end')\n"),
    Pair("fabric.logger is not converted. Use accelerator.get_tracker(name)", FABRIC + "fabric.logger.log_metrics({})\n", FABRIC + "fabric.log_dict({})\n"),
    Pair("fabric.strategy is not converted. The profile selects", FABRIC + "print(fabric.strategy)\n", FABRIC + "print(fabric.device)\n"),
    Pair("mark_forward_method is not converted", FABRIC + "model = fabric.setup(model)\nmodel.mark_forward_method('loss')\n", FABRIC + "model = fabric.setup(model)\nmodel.requires_grad_(True)\n"),
    Pair("The gradients are not averaged over the processes in training_step", FABRIC + "model = fabric.setup(model)\nfabric.backward(model.training_step(x))\n", FABRIC + "class Steps:\n    def training_step(self, x):\n        return model(x)\nmodel = fabric.setup(model)\nfabric.backward(Steps().training_step(x))\n"),
    Pair("A class derived from Fabric is not converted", create_fabric("Mine()", "class Mine(Fabric):\n    pass\n"), create_fabric("Fabric()", "class Mine:\n    kind = Fabric\n")),
    Pair("rank_zero_only before the Accelerator is created is not converted. Remove it", "from lightning.fabric.utilities import rank_zero_only\n@rank_zero_only\ndef log():\n    pass\n" + FABRIC, "from lightning.fabric.utilities import rank_zero_only\n" + FABRIC + "@rank_zero_only\ndef log():\n    pass\n"),
    # Fabric: arguments
    Pair("An argument without its name is not converted", create_fabric("Fabric(*options)"), create_fabric("Fabric(callbacks=None)")),
    Pair("The argument callbacks is not converted", create_fabric("Fabric(callbacks=[path])"), create_fabric("Fabric(callbacks=[])")),
    Pair("The argument loggers is not converted. Write Accelerator(log_with=", create_fabric("Fabric(loggers=path)"), create_fabric("Fabric(loggers=None)")),
    Pair("The argument precision is not converted. Write Accelerator(mixed_precision=...)", create_fabric("Fabric(precision='bf16-true')"), create_fabric("Fabric(precision='bf16-mixed')")),
    Pair("The argument strategy is not converted. The profile selects", create_fabric("Fabric(strategy='deepspeed')"), create_fabric("Fabric(strategy='ddp')")),
    Pair("The number of processes is an option of the launch: accel launch --nproc-per-node 4", create_fabric("Fabric(devices=4)"), create_fabric("Fabric(devices=1)")),
    Pair("The number of processes is an option of the launch: accel launch --nproc-per-node N", create_fabric("Fabric(devices=count())"), create_fabric("Fabric(devices='auto')")),
    Pair("The choice of GPUs is an option of the launch: accel launch --gpu-ids 0,2", create_fabric("Fabric(devices=[0, 2])"), create_fabric("Fabric(devices=2)")),
    Pair("The device is an option of the launch: accel launch --cpu", create_fabric("Fabric(accelerator=kind)"), create_fabric("Fabric(accelerator='cpu')")),
    Pair("The number of nodes is an option of the launch: accel launch --nnodes 2", create_fabric("Fabric(num_nodes=2)"), create_fabric("Fabric(num_nodes=1)")),
    Pair("Sharding is an option of the launch: accel launch --set parallel.dp_shard=auto", create_fabric("Fabric(strategy='fsdp')"), create_fabric("Fabric(strategy='auto')")),
    # Fabric: what differs after the conversion
    Pair("Fabric stops at gradients that are infinite or nan", FABRIC + "fabric.clip_gradients(model, optimizer, max_norm=1)\n", FABRIC + "fabric.clip_gradients(model, optimizer, max_norm=1, error_if_nonfinite=False)\n"),
    Pair("engine.fit gets an Accelerator instead of a Fabric", "import engine\n" + FABRIC + "engine.fit(fabric, model)\n", "import engine\n" + FABRIC + "engine.fit(fabric.device, model)\n"),
    Pair("the last batch is padded with repeated ones, and this counts them", FABRIC_EVALUATION + "    total += model(x).sum()\n", FABRIC_EVALUATION + "    out = model(x)\n    out = fabric.all_gather(out)\n    total += out.sum()\n"),
    # Accelerate
    Pair("accel has no accelerate.utils.FP8RecipeKwargs", ACCELERATE + "from accelerate.utils import FP8RecipeKwargs\n", ACCELERATE + "try:\n    from accelerate.utils import FP8RecipeKwargs\nexcept ImportError:\n    FP8RecipeKwargs = None\n"),
    Pair("accel has no accelerate.utils.FP8RecipeKwargs", ACCELERATE + "import accelerate\naccelerate.utils.FP8RecipeKwargs()\n", ACCELERATE + "import accelerate\naccelerate.utils.ProfileKwargs()\n"),
    Pair("accel has no accelerate.utils.transformer_engine", ACCELERATE + "import accelerate.utils.transformer_engine\n", ACCELERATE + "import accelerate.utils.operations\n"),
    Pair("accel has no Accelerator.lomo_backward", ACCELERATE + "accelerator.lomo_backward(1)\n", ACCELERATE + "class Own:\n    def lomo_backward(self, x):\n        accelerator.backward(x)\nOwn().lomo_backward(1)\n"),
    Pair("accel has no argument megatron_lm_plugin of Accelerator", "from accelerate import Accelerator\naccelerator = Accelerator(megatron_lm_plugin=None)\n", "from accelerate import Accelerator\naccelerator = Accelerator(fsdp_plugin=None)\n"),
    Pair("accel has no counterpart of accelerate.test_utils.training.mocked_dataloaders. This import stays", "import os\n" + ACCELERATE + "if os.environ.get('TEST'):\n    from accelerate.test_utils.training import mocked_dataloaders\n", "import os\n" + ACCELERATE + "if os.environ.get('TEST'):\n    from accelerate.utils import set_seed\n"),
    # Shell scripts
    Pair("This command is in a text and is not converted", write_shell('write_shell "torchrun --nproc_per_node 2 t.py"'), write_shell('bash -c "torchrun --nproc_per_node 2 t.py"')),
    Pair("--fancy. accel launch has no such option", write_shell("torchrun --fancy 3 t.py"), write_shell("torchrun --nproc_per_node 3 t.py --fancy 3")),
    Pair("--start_method. Use --set launcher.start_method", write_shell("torchrun --start_method spawn t.py"), write_shell("torchrun --monitor_interval 5 t.py")),
    Pair("it is the number on all nodes, and must be a multiple of their number", write_shell("accelerate launch --num_processes 3 --num_machines 2 t.py"), write_shell("accelerate launch --num_processes 4 --num_machines 2 t.py")),
]  # fmt: skip


# Findings of objects, devices, ranks and processes ---------------------------------------


def indent(text):
    """Return code as the body of a function."""
    return "".join(f"    {line}\n" for line in text.splitlines())


IMPORTS, BODY = HEAD.split("\n\n", 1)
IMPORTS += "\n"
TRAIN = BODY + LOOP
MADE = TRAIN.split("for i")[0]
"""The creation of the objects in `TRAIN`."""
DATA = "loader = DataLoader(torch.randn(32, 8), batch_size=8)\n"
FIT = "def fit(model, optimizer, loader, device):\n" + indent(LOOP)
IN_MAIN = "def main():\n" + indent(TRAIN) + "main()\n"
SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
TENSOR = "def tune():\n    w = torch.zeros(1, requires_grad=True)\n    other = torch.optim.SGD([w], lr=0.1)\n    w.mean().backward()\n    other.step()\n"
ALL_DATA = "if rank == 0:\n    for x in loader:\n        model(x)\n"
TEST_DATA = "test = DataLoader(torch.randn(8, 8))\n"
STEPLR = "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n"
GPU = "print(torch.ones(1).to({}))\n"
HOLDER = "class Holder:\n    def __init__(self, model):\n        self.model = {}\nholder = Holder(model)\n"
HELD_MODEL = HEAD.split("optimizer", 1)[0] + HOLDER + "optimizer" + HEAD.split("optimizer", 1)[1] + LOOP
DISTRIBUTED = "from torch.utils.data import DistributedSampler\nsampler = DistributedSampler(x){}\n"
SAMPLED = DDP + DISTRIBUTED + "loader = DataLoader(x, sampler=sampler)\n" + LOOP
USED = HEAD.replace("optimizer =", "if {}:\n    optimizer =") + LOOP.replace(
    "    optimizer.step()\n    optimizer.zero_grad()", "    if {}:\n        optimizer.step()"
)
SPAWN = "import torch.multiprocessing as mp\nimport torch.distributed as dist\n" + IMPORTS
WORKER = "def main(rank, size):\n    dist.init_process_group(rank=rank, world_size=size)\n" + indent(TRAIN)
NOT_REACHED = 'Write device = torch.device("cuda") below the imports'

OBJECT_PAIRS = [
    # collectives
    Pair("all_gather works as before on several processes", DDP + LOOP + "dist.all_gather([], loss)\n", DDP + LOOP + "if dist.get_world_size() > 1:\n    dist.all_gather([], loss)\n"),
    Pair("Write gather_object([obj])", DDP + LOOP + "dist.all_gather_object([], loss)\n", DDP + LOOP + "def share(x):\n    if not dist.is_initialized():\n        return\n    dist.all_gather_object([], x)\nshare(loss)\n"),
    Pair("Write tensor = broadcast(tensor)", DDP + LOOP + "dist.broadcast(loss, 0)\n", DDP + LOOP + "def share(x):\n    dist.broadcast(x, 0)\nif args.distributed:\n    share(loss)\n"),
    Pair("Write broadcast_object_list", DDP + LOOP + "dist.broadcast_object_list([loss])\n", DDP + "import torch.distributed.checkpoint as dcp\n" + LOOP + "dcp.save({}, checkpoint_id='a')\n"),
    Pair("Guard it with if accelerator.num_processes > 1:", DDP + LOOP + "dist.all_reduce(loss, group=None)\n", DDP + LOOP + "dist.all_reduce(loss, async_op=False)\n"),
    Pair("Guard it with", DDP + LOOP + "dist.new_group([0])\n", DDP + LOOP + "dist.barrier(group)\n"),
    Pair("Guard it with", DDP + LOOP + "def total(x):\n    dist.all_reduce(x)\ntotal(loss)\n", DDP + LOOP + "def total(x):\n    both = x.clone()\n    dist.all_reduce(both)\n    return both\ntotal(loss)\n"),
    Pair("torch.distributed.nn.functional.all_gather", DDP + "from torch.distributed.nn.functional import all_gather\n" + LOOP.replace("    loss.backward()", "    loss = loss + all_gather(loss)[0]\n    loss.backward()"), DDP + "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing\napply_activation_checkpointing(model)\n" + LOOP),
    Pair("fully_shard. Remove it, and set parallel: {dp_shard: auto}", "from torch.distributed.fsdp import fully_shard\n" + HEAD + "fully_shard(model)\n" + LOOP, "from torch.distributed.fsdp import fully_shard\n" + HEAD + LOOP),
    Pair("set parallel: {tp: N}", "from torch.distributed.tensor import distribute_tensor\n" + HEAD + "distribute_tensor(model.weight)\n" + LOOP, "from torch.distributed.device_mesh import init_device_mesh\n" + DDP + "mesh = init_device_mesh('cpu', (2,))\n" + LOOP),
    Pair("Create its optimizer_class instead", "from torch.distributed.optim import ZeroRedundancyOptimizer\n" + HEAD + "optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)\n" + LOOP, "from torch.distributed.optim import ZeroRedundancyOptimizer\n" + HEAD + "print(isinstance(optimizer, ZeroRedundancyOptimizer))\n" + LOOP),
    Pair("accel has no counterpart", "import torch.distributed.rpc as rpc\nrpc.init_rpc('a')\n" + HEAD + LOOP, "import rpc\nrpc.init_rpc('a')\n" + HEAD + LOOP),
    # conversion
    Pair("If another file or a library trains with it", "import torch\nfrom engine import fit\nmodel = torch.nn.Linear(8, 2)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nfit(optimizer)\n", HEAD + LOOP),
    Pair("would not be valid: duplicate argument", "from lightning.fabric import Fabric\nfabric = Fabric()\ndef end(x: Fabric, y: Fabric):\n    x.barrier()\n    y.barrier()\n", "from lightning.fabric import Fabric\nfabric = Fabric()\ndef end(x: Fabric):\n    x.barrier()\n"),
    Pair("is used already. Rename it", "accelerator = None\n" + HEAD + LOOP, HEAD.replace("device", "accelerator").replace("torch.accelerator", "torch.device") + LOOP.replace("device", "accelerator")),
    Pair("The conversion removes sampler", SAMPLED.replace("{}", "") + "print(len(sampler))\n", DDP + DISTRIBUTED.replace("{}", "") + LOOP + "print(len(sampler))\n"),
    # devices
    Pair("All processes use the device 0 here", IMPORTS + GPU.format(0) + HEAD + LOOP, HEAD + LOOP + GPU.format(0)),
    Pair("All processes use the device 'cuda:0' here", IMPORTS + "torch.set_default_device('cuda:0')\n" + HEAD + LOOP, IMPORTS + "torch.set_default_device('cuda')\n" + HEAD + LOOP),
    Pair("The parameter device has no effect", "import click\n" + IMPORTS + "@click.command()\n@click.option('--device')\ndef main(device):\n" + indent(TRAIN.replace(TRAIN.splitlines()[1] + "\n", "")) + "main()\n", IMPORTS + "def main(device):\n" + indent(TRAIN.replace(TRAIN.splitlines()[1] + "\n", "")) + "main('cuda')\n"),
    Pair("The option --device was removed", MAIN.replace("print(args.device)\n", "parser.add_argument('--device')\nargs = parser.parse_args()\n"), MAIN.replace("print(args", "parser.add_argument('--device')\nargs = parser.parse_args()\nprint(args")),
    Pair("The visible GPUs are chosen by the script", "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'\n" + HEAD + LOOP, "import os\nos.environ['CUDA_DEVICE_ORDER'] = 'PCI_BUS_ID'\nprint(os.environ['CUDA_VISIBLE_DEVICES'])\n" + HEAD + LOOP),
    # distributed
    Pair("DistributedDataParallelKwargs(comm_hook=...)", DDP + "model.register_comm_hook(None, print)\n" + LOOP, DDP + "model.register_forward_hook(print)\n" + LOOP),
    Pair("The argument bucket_cap_mb of DistributedDataParallel is dropped", DDP.replace("DDP(model", "DDP(model, bucket_cap_mb=int(rank)") + LOOP, DDP.replace("DDP(model", "DDP(model, [rank], process_group=None, bucket_cap_mb=9") + LOOP),
    Pair("and the script reduces the count itself", DDP + LOOP + "test = DataLoader(torch.randn(8, 8))\nbatches = torch.zeros(1)\nfor x in test:\n    batches += model(x).mean()\ndist.all_reduce(batches)\n", DDP + LOOP + "test = DataLoader(torch.randn(8, 8))\nhits = torch.zeros(2)\nfor x in test:\n    hits[0] += model(x).sum()\ndist.all_reduce(hits)\n"),
    Pair("A loader is read on some ranks only", DDP + TEST_DATA + LOOP + ALL_DATA.replace("loader", "test"), DDP + TEST_DATA + LOOP + ALL_DATA.replace("loader", "test").replace("rank == 0", "rank != -1")),
    Pair("A loader is read on some ranks only", DDP + TEST_DATA + LOOP + ALL_DATA.replace("loader", "test"), DDP + "if rank == 0:\n    test = DataLoader(torch.randn(8, 8))\n" + LOOP),
    Pair("A loader is read on some ranks only", EVALUATE + "if rank == 0:\n    end(model, loader)\n", EVALUATE + "end(model, loader)\nif rank == 0:\n    print(1)\n"),
    Pair("A loader is read on some ranks only", EVALUATE + "is_main = rank == 0\nif is_main:\n    end(model, loader)\n", EVALUATE + "is_set = rank >= 0\nif is_set:\n    end(model, loader)\n"),
    Pair("A loader is read on some ranks only", EVALUATE + "rank == 0 and end(model, loader)\n", EVALUATE + "rank is not None and end(model, loader)\n"),
    Pair("A loader is read on some ranks only", EVALUATE + "def main():\n    if rank:\n        return\n    end(model, loader)\nmain()\n", EVALUATE + "def main():\n    if rank:\n        print(1)\n    end(model, loader)\nmain()\n"),
    Pair("The sampler is not a DistributedSampler in every case", SAMPLED.replace("{}", " if rank else None"), SAMPLED.replace("{}", " if rank else None").replace("DataLoader(x, s", "DataLoader(x, shuffle=(sampler is None), s")),
    # preparation
    Pair("No model of this file with an optimizer was found for this backward pass", IMPORTS + "from other import model, optimizer\n" + DATA + LOOP, HEAD + LOOP),
    Pair("Processes that share a model train it", "import torch.multiprocessing as mp\n" + IMPORTS + "def fit(model, data):\n    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n    loader = DataLoader(data)\n    for x in loader:\n        model(x).mean().backward()\n        optimizer.step()\nmodel = nn.Linear(8, 2)\nmodel.share_memory()\nmp.Process(target=fit, args=(model, [])).start()\n", "import torch.multiprocessing as mp\n" + HEAD + LOOP + "model.share_memory()\nmp.Process(target=print, args=(model,)).start()\n"),
    Pair("The model creates its own optimizer", IMPORTS + "class Net(nn.Module):\n    def fit(self):\n" + indent(indent(TRAIN)) + "Net().fit()\n", IMPORTS + "class Net:\n    def __init__(self):\n" + indent(indent(TRAIN)) + "Net()\n"),
    Pair("This setting of the device has no effect", HEAD.replace("model =", "exec('rate = 1')\nmodel =") + LOOP, HEAD + LOOP + "exec('rate = 1')\n"),
    Pair("This setting of the device has no effect", HEAD.replace("torch.cuda.is_available()", "args.cuda") + LOOP, DDP.replace('"cuda" if torch.cuda.is_available()', 'f"cuda:{rank}" if args.cuda') + LOOP),
    Pair("optimizer is created in several loops or functions", HEAD + LOOP + "def reset():\n    global optimizer\n    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)\n", HEAD.replace("optimizer =", "if x:\n    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)\nelse:\n    optimizer =") + LOOP),
    Pair("The model of this optimizer was not found", HEAD + TENSOR + LOOP, HEAD + TENSOR.replace("def tune():", "if True:") + LOOP),
    Pair("The model of this optimizer was not found", HEAD + TENSOR + LOOP, IMPORTS + "def fit(net, loader):\n    net = nn.DataParallel(net)\n    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n" + indent(LOOP.replace("model", "net")) + MADE.replace(SGD, "") + "fit(model, loader)\n"),
    Pair("The optimizer of this scheduler was not found", HEAD + "from other import find\ndef tune():\n    scheduler = torch.optim.lr_scheduler.StepLR(find(), 1)\n" + indent(LOOP + "    scheduler.step()\n") + "tune()\n", HEAD + STEPLR + "def tune():\n" + indent(LOOP + "    scheduler.step()\n") + "tune()\n"),
    Pair("loader has different meanings", CYCLED.replace("CYCLE", "loader = cycle(loader)") + NEXT.replace("it)", "loader)"), CYCLED.replace("CYCLE", "it = cycle(loader)") + NEXT),
    Pair("The optimizer is not assigned to a variable", HEAD.replace("optimizer = ", "optimizers = [").replace("lr=0.1)", "lr=0.1)]") + LOOP, HEAD.replace("optimizer = ", "optimizer, rate = ").replace("lr=0.1)", "lr=0.1), 0.1") + LOOP),
    Pair("The loader is not assigned to a variable", HEAD + LOOP.replace("enumerate(loader)", "enumerate(DataLoader(torch.randn(8, 8)))"), HEAD + LOOP + "for x in DataLoader(torch.randn(8, 8)):\n    model(x)\n"),
    Pair("The loader is not assigned to a variable", HEAD + LOOP.replace("enumerate(loader)", "enumerate(DataLoader(torch.randn(8, 8)))"), HEAD + LOOP + "print(next(iter(DataLoader(torch.randn(8, 8)))))\n"),
    Pair("loader is replaced by what Prefetcher makes of it", "from other import Prefetcher\n" + CYCLED.replace("CYCLE", "loader = Prefetcher(loader)") + NEXT.replace("it)", "loader)"), "from other import Prefetcher\n" + CYCLED.replace("CYCLE", "it = Prefetcher(loader)") + NEXT),
    Pair("for _ in range(accelerator.num_processes): scheduler.step()", HEAD + STEPLR + CYCLE_END + "    scheduler.step()\n", HEAD + STEPLR + CYCLE_END + "        scheduler.step()\n"),
    Pair("optimizer exists under a condition only", USED.format("find()", "find()"), USED.format("use", "use and i")),
    Pair("Training begins before the last", HEAD + LOOP + "model = nn.Linear(8, 2)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n" + LOOP, HEAD + LOOP + "other = nn.Linear(8, 2)\nsgd = torch.optim.SGD(other.parameters(), lr=0.1)\n" + LOOP.replace("model", "other").replace("optimizer", "sgd")),
    Pair("Training begins before the last", HEAD + "if True:\n    val = DataLoader(torch.randn(8, 8))\n" + indent(LOOP) + "    val = DataLoader(torch.randn(4, 8))\n", IMPORTS + DATA + "if __name__ == '__main__':\n" + indent(TRAIN.replace(DATA, ""))),
    Pair("Create it after the last of them", HELD_MODEL.format("model"), HELD_MODEL.format("copy.deepcopy(model)").replace("import", "import copy\nimport", 1)),
    # raw
    Pair(NOT_REACHED, IMPORTS + FIT + "def main():\n" + indent(MADE) + "    for run in [fit]:\n        run(model, optimizer, loader, device)\nmain()\n", IMPORTS + FIT + "def main():\n" + indent(MADE) + "    fit(model, optimizer, loader, device)\nmain()\n"),
    Pair(NOT_REACHED, "import torch.distributed as dist\n" + IMPORTS + IN_MAIN.replace("def main():\n", "def main():\n    dist.init_process_group()\n") + "dist.barrier()\n", "import torch.distributed as dist\n" + IMPORTS + IN_MAIN.replace("def main():\n", "def main():\n    dist.init_process_group()\n").replace("main()\n", "    dist.barrier()\nmain()\n").replace("def     dist.barrier()\n", "def ")),
    # spawn
    Pair("This use of mp.spawn is not understood", SPAWN + WORKER + "mp.spawn(main, args=find(), nprocs=2)\n", SPAWN + WORKER + "args = (2,)\nmp.spawn(main, args=args, nprocs=2)\n"),
    Pair("This use of mp.spawn is not understood", SPAWN + WORKER + "mp.spawn(main, args=(2, 3), nprocs=2)\n", SPAWN + WORKER + "mp.spawn(main, (2,), 2)\n"),
    Pair("This use of mp.spawn is not understood", SPAWN + WORKER + "x = mp.spawn(main, args=(2,), nprocs=2)\n", SPAWN + WORKER + "mp.spawn(fn=main, args=(2,), nprocs=2)\n"),
    Pair("This use of mp.spawn is not understood", SPAWN + WORKER + "mp.spawn(print, nprocs=2)\n", "import pool as mp\n" + SPAWN.split("\n", 1)[1] + TRAIN + "mp.spawn(print, nprocs=2)\n"),
    Pair("This use of mp.spawn is not understood", SPAWN + WORKER + "mp.spawn(main, args=(2,), nprocs=2, join=False)\n", SPAWN + WORKER + "mp.spawn(main, args=(2,), nprocs=2, join=True)\n"),
]  # fmt: skip
HOST = (
    HEAD
    + LOOP
    + TEST_DATA
    + "total = 0\nseen = []\nfor x, y in test:\n    found = model(x.to(device)).argmax(1)"
)
CONVERTED_OBJECTS = {
    "a number of a GPU": (HEAD + "gpu = 0\n" + LOOP.replace("to(device)", "to(gpu)"), "loss = model(x).mean()"),
    "a number of a GPU in a class": (HEAD + "class Mover:\n    def __init__(self, gpu):\n        self.gpu = gpu\n    def move(self, x):\n        return x.to(self.gpu)\ngpu = 0\nmover = Mover(gpu)\n" + LOOP.replace("x.to(device)", "mover.move(x)"), "return x"),
    "the name of a GPU": (HEAD + LOOP + "y = torch.ones(1, device='cuda:0')\n", "y = torch.ones(1, device=accelerator.device)"),
    "a default device": (HEAD + "torch.set_default_device('cuda:0')\n" + LOOP, "torch.set_default_device(accelerator.device)"),
    "a device of a dictionary": (HEAD + "cfg = {'device': 'cuda'}\n" + LOOP.replace("to(device)", "to(cfg['device'])"), "loss = model(x).mean()"),
    "a device of a class of settings": (HEAD.replace("device =", "class Config:\n    DEVICE =") + LOOP.replace("device", "Config.DEVICE") + "print(torch.ones(1).to(Config.DEVICE))\n", "accelerator.print(torch.ones(1).to(accelerator.device))"),
    "a device of a loop": (IMPORTS + "for seed in range(2):\n" + indent(TRAIN), "accelerator = Accelerator()"),
    "targets on the CPU": (HOST + ".cpu()\n    total += (found == y).sum().item()\n", "total += (found == y.cpu()).sum().item()"),
    "targets of NumPy": (HOST + ".cpu()\n    seen.append(y.numpy())\n    total += found.sum()\n", "seen.append(y.cpu().numpy())"),
    "targets on the device": (HOST + "\n    total += (found == y).sum().item()\n", "total += (found == y).sum().item()"),
    "a loader of one rank": (DDP + "if rank == 0:\n    test = DataLoader(torch.randn(8, 8))\n" + LOOP, "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"),
    "a sampler without a loader": (DDP + DISTRIBUTED.replace("{}", "") + LOOP + "sampler.set_epoch(1)\n", "sampler.set_epoch(1)"),
    "a process group that ends in a function": (DDP + LOOP + "import atexit\natexit.register(lambda: dist.destroy_process_group())\n", "atexit.register(lambda: None)"),
    "arguments of a spawned function in a variable": (SPAWN + WORKER + "args = (2,)\nmp.spawn(main, args=args, nprocs=2)\n", "main()"),
    "a model with a base of another file": ("from zoo import Base\nclass Net(Base):\n    def __init__(self):\n        super().__init__()\n" + HEAD.replace("nn.Linear(8, 2)", "Net()") + LOOP, "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"),
    "a name of a batch that is used for a sample": (HEAD + LOOP + "x = torch.ones(1, 8)\nx = x.to(device)\n", "x = x.to(accelerator.device)"),
    "a device in a tuple of targets": (HEAD.replace("model = nn.Linear", "class Net(nn.Linear):\n    def __init__(self, device):\n        super().__init__(8, 2)\n        self.size, self.device = 2, device\nmodel = Net").replace("Net(8, 2)", "Net(device)") + LOOP, "self.size, self.device = 2, device"),
    "an optimizer of a class of the script": ("import torch\nclass Plain(torch.optim.Optimizer):\n    def __init__(self, params, lr):\n        super().__init__(params, {'lr': lr})\n" + HEAD.replace("torch.optim.SGD", "Plain") + LOOP, "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"),
    "a model whose weights an optimizer of the script may copy": ("import torch\nclass Plain(torch.optim.Optimizer):\n    def __init__(self, params, lr):\n        super().__init__(params, {'lr': lr})\n" + HEAD.replace("torch.optim.SGD", "Plain") + LOOP, "model = nn.Linear(8, 2).to(accelerator.device)"),
    "a device of flags": (HEAD.replace("device =", "FLAGS =") + LOOP.replace("device", "FLAGS.device"), "loss = model(x).mean()"),
    "a step that gets a part of the batches": ("import itertools\n" + HEAD + "def step(x):\n" + indent(LOOP.split("\n", 1)[1].replace("    ", "")) + "for x in itertools.islice(itertools.cycle(loader), 9):\n    step(x)\n", "loss = model(x).mean()"),
    "samples of a seed that gets the rank": (DDP + "def fit(seed):\n    torch.manual_seed(seed)\n    for i in range(3):\n        x = torch.randn(4, 8)\n" + indent(LOOP.split("\n", 1)[1]) + "fit(7 + rank)\n", "accelerator.backward(loss)"),
    "settings that the script executes after the training": (HEAD + LOOP + "exec('rate = 1')\n", "accelerator = Accelerator()"),
}  # fmt: skip

# Findings of values ----------------------------------------------------------------------

STEP = LOOP.partition("\n")[2]
"""The body of the loop."""
DRAWS = "for i in range(4):\n    x = torch.randn(4, 8)\n"
EVALUATION = TEST + LOOP + "for x in test:\n    out = model(x)\n"
SCHEDULE = "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)\n"
HELD = "from losses import Perceptual\n" + HEAD.replace(
    "optimizer =", "criterion = Perceptual(model)\noptimizer ="
)
OWN_HEAD = HELD.replace("model.parameters()", "[*model.parameters(), *criterion.parameters()]")
EPISODES = (
    "import env\n" + HEAD + "def act(x):\n    return model(x).argmax().item()\n"
    "def learn(x):\n    loss = model(x).mean()\n    loss.backward()\n    optimizer.step()\n"
    "total = 0\nwhile True:\n    for i in range(9):\n        total += env.step(act(torch.ones(8)))\n    learn(x)\n"
)
IN_FUNCTION = "import torch\ndef main():\n" + "".join(f"    {one}\n" for one in (HEAD + LOOP).splitlines())


def compute(code, head=HEAD):
    """Return a script whose loss is computed by an expression."""
    return head + LOOP.replace("model(x.to(device)).mean()", code)


def split(loader):
    """Return a training with a split of its dataset."""
    head = HEAD.replace("torch.manual_seed(0)\n", "").replace("torch.randn(32, 8)", "train")
    code = (
        f"from torch.utils.data import random_split\ntrain, test = random_split(list(range(40)), {loader})\n"
    )
    return head.replace("loader =", f"{code}loader =") + LOOP


VALUE_PAIRS = [
    # batches
    Pair("not read from a prepared DataLoader", HEAD + LOOP.replace("enumerate(loader)", "enumerate(torch.randn(8, 4, 8))"), HEAD + LOOP),
    Pair("not read from a prepared DataLoader", HEAD + "loss = model(torch.ones(4, 8)).mean()\nloss.backward()\noptimizer.step()\n", "from itertools import islice\n" + HEAD + LOOP.replace("enumerate(loader)", "enumerate(islice(loader, 9))")),
    Pair("x.chunk(accelerator.num_processes)[accelerator.process_index]", DDP + "def draw():\n    return torch.randn(4, 8)\nx = draw()\nfor i in range(3):\n" + STEP, DDP + "import utils\nlogger = utils.Logger()\n" + LOOP.replace("enumerate(loader)", "logger.log_every(loader, 9)").replace("i, x", "x")),
    Pair("Pass a DataLoader of another file to accelerator.prepare", "from data import build\n" + HEAD.replace("DataLoader(torch.randn(32, 8), batch_size=8)", "build()") + LOOP, HEAD + "other = DataLoader(torch.randn(32, 8), batch_size=8)\n" + LOOP.replace("i, x in enumerate(loader)", "x, y in zip(loader, other)")),
    Pair("Pass a DataLoader of another file to accelerator.prepare", HEAD.partition("loader =")[0] + "def fit(loader):\n" + "".join(f"    {one}\n" for one in LOOP.splitlines()), HEAD + "def fit(loader):\n" + "".join(f"    {one}\n" for one in LOOP.splitlines()) + "fit(loader)\n"),
    Pair("if accelerator.num_processes > 1: set_seed(7, device_specific=True)", HEAD.replace("torch.manual_seed(0)", "torch.manual_seed(7)") + DRAWS + STEP, DDP.replace("torch.manual_seed(0)\n", "torch.manual_seed(7 + rank)\n") + DRAWS + STEP),
    Pair("its seed makes them equal on every process", HEAD + DRAWS + STEP, HEAD.replace("torch.manual_seed(0)\n", "") + DRAWS + STEP),
    Pair("its seed makes them equal on every process", HEAD + DRAWS + STEP, "def main(seed):\n    torch.manual_seed(seed)\n" + DDP.replace("torch.manual_seed(0)\n", "main(7 + rank)\n") + DRAWS + STEP),
    Pair("The script sets no seed", HEAD.replace("torch.manual_seed(0)\n", "") + LOOP, HEAD + LOOP),
    Pair("The script sets no seed", HEAD.replace("torch.manual_seed(0)\n", "") + LOOP, HEAD.replace("torch.manual_seed(0)\n", "").replace("torch.randn(32, 8)", "list(range(32))").replace("model = nn.Linear(8, 2)", "class Net(nn.Linear):\n    def forward(self, x):\n        return super().forward(x + torch.randn(8))\nmodel = Net(8, 2)") + LOOP),
    Pair("The script sets no seed", split("[32, 8]"), split("[32, 8], generator=torch.Generator().manual_seed(0)")),
    # lengths
    Pair("Multiply it by accelerator.num_processes", HEAD + SCHEDULE.replace("decay", "lambda step: 1 - step / len(loader)") + LOOP + "    scheduler.step()\n", HEAD + "steps = len(loader)\n" + SCHEDULE.replace("decay", "lambda step: 1 - step / steps") + LOOP + "    scheduler.step()\n"),
    Pair("Multiply it by accelerator.num_processes", HEAD + "def decay(step):\n    return 1 - step / len(loader)\n" + SCHEDULE + LOOP + "    scheduler.step()\n", HEAD + "steps = max(1, 3 * len(loader) // 2)\ndef decay(step):\n    return 1 - step / steps\n" + SCHEDULE + LOOP + "    scheduler.step()\n"),
    Pair("Use len(loader) after accelerator.prepare", HEAD + "steps = 3 * len(loader)\nscheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n" + LOOP + "    optimizer.param_groups[0]['lr'] = 1 - i / steps\n    scheduler.step()\n", HEAD + "steps = 3 * len(loader)\n" + LOOP + "    optimizer.param_groups[0]['lr'] = 1 - i / steps\n"),
    Pair("Several processes take fewer steps", HEAD + "batch_size = 8\nsteps = 3 * (len(loader.dataset) // batch_size)\n" + LOOP + "    if i == steps - 1:\n        print('end')\n", HEAD + "data = [1] * 8\ntest = data[: len(data) // 4]\nhalf = data[len(data) // 2 :]\n" + LOOP + "    if i == len(loader) - 1:\n        print('end')\n"),
    # loop
    Pair("Pass a scalar loss to accelerator.backward", HEAD + LOOP.replace("backward()", "backward(torch.ones(()))"), HEAD + LOOP.replace("backward()", "backward(retain_graph=True)")),
    Pair("has no argument error_if_nonfinite", HEAD + LOOP.replace("    optimizer.step()", "    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)\n    optimizer.step()"), HEAD + LOOP.replace("    optimizer.step()", "    nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)\n    optimizer.step()")),
    Pair("after each batch, and not once in a cycle", HEAD + CYCLE, HEAD + CYCLE_END),
    Pair("after each batch, and not once in a cycle", HEAD + CYCLE, HEAD + LOOP + "    if i % 4 == 0:\n        print(i)\n"),
    Pair("the last cycle of an epoch now also ends with", HEAD + CYCLE_END, HEAD + CYCLE_END.replace("% 4 == 0", "% 4 == 0 or i + 1 == len(loader)")),
    # metrics
    Pair("The loader that trains is read in a way that is not understood", HEAD + "for one in (loader,):\n    next(iter(one))\n" + LOOP, HEAD + "print(next(iter(loader)), len(list(loader)))\n" + LOOP),
    Pair("The loader that trains is read in a way that is not understood", HEAD + "def fit(batch):\n    loss = model(batch).mean()\n    loss.backward()\n    optimizer.step()\nprint(list(loader))\nfor x in loader:\n    fit(x)\n", HEAD + LOOP.replace("enumerate(loader)", "enumerate(zip(loader, loader))")),
    Pair("not only read in for loops by its own name", TEST + LOOP + "for name, one in {'test': test}.items():\n    for x in one:\n        model(x)\n", TEST + LOOP + "for name in ('test',):\n    for x in test:\n        model(x)\n"),
    Pair("This evaluates the samples of one process", HEAD + LOOP + "print(sum(model(x).sum() for x in loader))\n", TEST + LOOP + "print(sum(model(x).sum() for x in test))\n"),
    Pair("This evaluates the samples of one process", HEAD + LOOP + "print(sum(model(x).sum() for x in loader))\n", HEAD + LOOP + "print([x.shape for x in loader])\n"),
    Pair("the script exchanges values between processes", TEST + LOOP + "import torch.distributed as dist\nn = sum(model(x).sum() for x in test)\ndist.all_reduce(n)\n", TEST + LOOP + "n = sum(model(x).sum() for x in test)\n"),
    Pair("This evaluates the samples of one process", "from engine import evaluate\n" + HEAD + LOOP + "evaluate(model, loader)\n", "from engine import fit\n" + HEAD + LOOP + "fit(model, optimizer, loader)\n"),
    Pair("This evaluates the samples of one process", "from engine import evaluate\n" + HEAD + LOOP + "evaluate(model, loader)\n", "import itertools\n" + HEAD + LOOP + "other = itertools.chain(loader, loader)\n"),
    Pair("Every process evaluates all samples here", EVALUATION + "    total += out.loss.item()\n", EVALUATION + "    total += out.sum().item()\n"),
    Pair("Every process evaluates all samples here", EVALUATION.replace("    out =", "    n = len(x)\n    out =") + "    total += out.sum().item() * n\n", EVALUATION + "    total += out.sum().item() * len(x)\n"),
    Pair("Every process evaluates all samples here", EVALUATION.replace("    out =", "    targets.append(x)\n    out =") + "    total += out.sum().item()\n", EVALUATION + "    targets.append(x)\n    total += out.sum().item()\n"),
    Pair("Every process evaluates all samples here", EVALUATION.replace("out =", "out, mean =") + "    total += mean.item()\n", EVALUATION.replace("out =", "out, top =") + "    total += top.sum().item()\n"),
    Pair("Every process evaluates all samples here", EVALUATION + "    total += out.view(8, 1, 2).sum().item()\n", EVALUATION + "    total += out.view(x.size(0), 1, 2).sum().item() + out.view(-1).sum().item()\n"),
    Pair("Every process evaluates all samples here", EVALUATION.replace("model(x)", "model(x).mean(0)") + "    total += (out == x).sum().item()\n", EVALUATION.replace("model(x)", "model(x).mean(1)") + "    total += (out == x).sum().item()\n"),
    Pair("Every process evaluates all samples here", EVALUATION.replace("DataLoader(torch.randn(8, 8))", "DataLoader(torch.randn(8, 8), collate_fn=pad)") + "    total += out.sum().item()\n", EVALUATION.replace("DataLoader(torch.randn(8, 8))", "DataLoader(torch.randn(8, 8), collate_fn=None)") + "    total += out.sum().item()\n"),
    Pair("Every process evaluates all samples here", EVALUATION + "    total += nn.functional.mse_loss(out, x).item()\ntotal /= len(test.dataset)\n", EVALUATION + "    total += nn.functional.mse_loss(out, x).item()\ntotal /= len(test)\n"),
    Pair("Every process evaluates all samples here", EVALUATION + "    total += nn.functional.mse_loss(out, x).item()\ntotal /= len(test.dataset)\n", EVALUATION + "    total += nn.functional.mse_loss(out, x, reduction='sum').item()\ntotal /= len(test.dataset)\n"),
    Pair("Every process evaluates all samples here", TEST + LOOP + "def move(b):\n    return b\nfor batch in test:\n    x, y = [move(b) for b in batch]\n    total += (model(x) - y).sum().item()\n", TEST + LOOP + "for i, x in enumerate(test):\n    n = i + 1\n    total += model(x).sum().item()\n    print(n)\n"),
    # output
    Pair("Every process prints this, since the function has no Accelerator", IN_FUNCTION + "    report(1)\ndef report(x):\n    print(x)\nmain()\n", IN_FUNCTION.replace("main():", "main(gpu):\n    print(gpu)") + "main(0)\n"),
    Pair("Every process writes this log", "from torch.utils.tensorboard import SummaryWriter\n" + HEAD + "writer = SummaryWriter()\n" + LOOP, "import wandb\n" + DDP + "if rank == 0:\n    wandb.init(project='x')\n" + LOOP),
    Pair("Gradients are averaged over the processes, and this loss is a sum", compute("nn.functional.mse_loss(model(x), x, reduction='sum')"), compute("nn.functional.mse_loss(model(x), x, reduction='mean')") + "with torch.no_grad():\n    for x in loader:\n        nn.functional.mse_loss(x, x, reduction='sum')\n"),
    Pair("this loss is a sum", "def get_loss(out, x):\n    return nn.functional.mse_loss(out, x, reduction='sum', weight=None)\n" + compute("get_loss(model(x), x)"), "def get_loss(out, x):\n    return nn.functional.mse_loss(out, x, reduction='sum', weight=None)\n" + HEAD + LOOP + "get_loss(torch.ones(8), torch.ones(8))\n"),
    Pair("The seed of the script makes these random numbers equal", compute("model(x + torch.randn_like(x)).mean()"), compute("model(x + torch.randn_like(x)).mean()", DDP.replace("torch.manual_seed(0)", "torch.manual_seed(rank)"))),
    Pair("The seed of the script makes these random numbers equal", compute("model(x + torch.randn_like(x)).mean()"), HEAD + LOOP + "print(torch.randn(4))\n"),
    Pair("All processes exchange values here at each step", "total = 0\n" + HEAD + LOOP + "    total += loss.item()\n", HEAD + LOOP + "    if i % 100 == 0:\n        print(loss.item())\n"),
    Pair("All processes exchange values here at each step", "total = 0\n" + HEAD + LOOP + "    total += loss.item()\n", HEAD + LOOP + "print(loss.item())\n"),
    Pair("This is not converted, since the script uses accel already", "from accel_runtime import Accelerator\n" + HEAD + LOOP, "from accel_runtime import Accelerator\naccelerator = Accelerator()\n" + HEAD + LOOP.replace("loss.backward()", "accelerator.backward(loss)")),
    # saving
    Pair("Use accelerator.save(object, path)", HEAD + LOOP + "torch.save(model.state_dict(), 'a.pt', pickle_protocol=4)\n", DDP + LOOP + "if rank == 0:\n    torch.save(model.state_dict(), 'a.pt', pickle_protocol=4)\n"),
    Pair("Every process creates this folder", "import os\n" + HEAD + "os.mkdir('a')\n" + LOOP, "import os\n" + HEAD + "os.makedirs('a', exist_ok=True)\n" + LOOP),
    Pair("os.makedirs('a', exist_ok=True)", "import os\n" + HEAD + "os.makedirs('a', exist_ok=False)\n" + LOOP, "import os\n" + DDP + "if rank == 0:\n    os.makedirs('a')\n" + LOOP),
    Pair("Every process downloads these files", "from torchvision.datasets import MNIST\n" + HEAD + "data = MNIST('a', train=True, download=True, transform=None)\n" + LOOP, "from torchvision.datasets import MNIST\n" + HEAD + "data = MNIST('a', True, None, None, download=False)\n" + LOOP),
    Pair("Every process downloads these files", "from torchvision.datasets import MNIST\n" + HEAD + "data = MNIST('a', True, None, None, True)\n" + LOOP, "from torchvision.datasets import MNIST\n" + HEAD + "data = MNIST('a', True, None, None, False)\n" + LOOP),
    Pair("Every process writes this file", HEAD + LOOP + "with open('log.txt', 'w') as file:\n    file.write('end')\n", HEAD + LOOP + "with open('log.txt', 'r') as file:\n    file.read()\n"),
    Pair("Every process writes this file", HEAD + LOOP + "import json, pathlib\nwith pathlib.Path('a').open('w') as file:\n    json.dump({}, file)\n", HEAD + LOOP + "with open('a.pt', 'wb') as file:\n    torch.save({}, file)\n"),
    Pair("Every process writes this file", "import numpy as np\n" + HEAD + LOOP + "np.save('a.npy', [1])\n", "import numpy as np\n" + HEAD + LOOP + "np.load('a.npy')\n"),
    Pair("Every process writes this file", "from torchvision.utils import save_image\n" + HEAD + LOOP + "    save_image(model(x), 'a.png')\n", "from torchvision.utils import save_image\n" + HEAD + LOOP + "    save_image(x.cpu(), 'a.png')\n"),
    # training_metrics
    Pair("This is counted from the samples of one process", "total = {}\n" + HEAD + LOOP + "    share = model(x).mean()\n    total['x'] = total['x'] + share\n", "total = 0\n" + HEAD + LOOP + "    total += loss.item() * x.size(0)\n"),
    Pair("This is counted from the samples of one process", "total = 0\n" + compute("model(x).mean()") + "    total = total + (model(x) > 0).sum().item()\n", "seen = 0\n" + HEAD + LOOP.replace("    loss =", "    n = len(x)\n    seen += n\n    loss =")),
    Pair("This is counted from the samples of one process", "hits = 0\n" + compute("out.mean()").replace("    loss", "    out = model(x)\n    hits += (out > 0).sum().item()\n    loss", 1), "hits = 0\n" + compute("out.mean()").replace("    loss", "    out = model(x)\n    loss", 1) + "    hits += (out > 0).sum().item()\n"),
    Pair("This is counted from the samples of one process", "hits = 0\n" + compute("out.mean()").replace("    loss", "    out = model(x)\n    hits += (out > 0).sum().item()\n    loss", 1), "kept = {}\n" + compute("out.mean()").replace("    loss", "    out = model(x)\n    kept['x'] = out\n    loss", 1)),
    Pair("This condition may differ between processes", HEAD + LOOP + "    if loss < 0.1:\n        break\n", "best = 9\n" + HEAD + LOOP + "    if loss < best:\n        best = loss\n"),
    Pair("This condition may differ between processes", HEAD + LOOP + "    share = model(x).mean().item()\n    if share > 0.9:\n        break\n", HEAD + LOOP + "    value = loss.item()\n    if value < 0.1:\n        break\n"),
    Pair("This condition may differ between processes", HEAD + LOOP.replace("    loss.backward()", "    kl = model.measure(x).mean()\n    if kl > 1:\n        break\n    loss.backward()"), HEAD + LOOP + "    if loss < 1:\n        for one in (1, 2):\n            break\n"),
    Pair("This condition may differ between processes", EPISODES + "    if total > 9:\n        break\n", EPISODES.replace("total += env", "env") + "    total += 1\n    if total > 9:\n        break\n"),
    Pair("This condition may differ between processes", HEAD + "loss = torch.ones(1)\nwhile loss > 0.1:\n    x = next(iter(loader))\n" + STEP, HEAD + "steps = 0\nwhile steps < 9:\n    steps += 1\n    x = next(iter(loader))\n" + STEP),
    Pair("This condition may differ between processes", HEAD + LOOP + "    if model(x).mean() < 0.1:\n        break\n", "best = 0\n" + TEST + "for epoch in range(9):\n" + "".join(f"    {one}\n" for one in LOOP.splitlines()) + "    hits = 0\n    for x in test:\n        hits += model(x).argmax(1).sum().item()\n    if hits < best:\n        break\n"),
    # wrappers
    Pair("since the loss is computed by encode, and not by calling the model", compute("model.encode(x).mean()"), compute("model(x).mean() + model.norm(x)")),
    Pair("since the loss is computed by encode, and not by calling the model", compute("model.decode(model.encode(x)).mean()"), compute("model.decode(model(x)).mean()")),
    Pair("since the loss is computed by encode, and not by calling the model", compute("model.encode(x).mean()"), HEAD + LOOP.replace("    loss =", "    with torch.no_grad():\n        x = model.encode(x)\n    loss =") + "for x in loader:\n    model.encode(x)\n"),
    Pair("since the loss is computed by inner, and not by calling the model", "from meta import Meta\n" + compute("inner(x).mean()", HEAD.replace("model = nn.Linear(8, 2)", "inner = nn.Linear(8, 2)\nmodel = Meta(inner)")), "from meta import Meta\n" + compute("model(inner(x)).mean()", HEAD.replace("model = nn.Linear(8, 2)", "inner = nn.Linear(8, 2)\nmodel = Meta(inner)"))),
    Pair("Each process reads its own shards only if WebDataset gets nodesplitter", "import webdataset\n" + HEAD.replace("DataLoader(torch.randn(32, 8), batch_size=8)", "webdataset.WebLoader(webdataset.WebDataset('a.tar'), batch_size=8)") + LOOP, "import webdataset\nprint(webdataset.__version__)\n" + HEAD + LOOP),
    Pair("since the loss is computed by functional_call, and not by calling the model. Leave the model out", "from torch.func import functional_call, vmap\n" + HEAD.replace("loader =", "def measure(params, x):\n    return functional_call(model, params, (x,)).mean()\nloader =") + LOOP.replace("model(x.to(device)).mean()", "vmap(measure, (None, 0))(dict(model.named_parameters()), x).mean()"), "from torch.func import functional_call, vmap\n" + HEAD + LOOP + "    with torch.no_grad():\n        print(functional_call(model, dict(model.named_parameters()), (x,)).shape)\n"),
    Pair("the statistics of BatchNorm from the samples of one process", "from torch.optim.swa_utils import AveragedModel, update_bn\n" + HEAD + LOOP + "average = AveragedModel(model)\nupdate_bn(loader, average)\n", "from torch.optim.swa_utils import AveragedModel, update_bn\n" + HEAD + LOOP + "average = AveragedModel(model)\nupdate_bn(torch.randn(4, 8, 8), average)\n"),
    Pair("The script divides these samples over the ranks itself", DDP.replace("torch.randn(32, 8)", "torch.randn(32, 8)[rank::dist.get_world_size()]") + LOOP, DDP.replace("batch_size=8", "batch_size=8 // dist.get_world_size(), num_workers=rank") + LOOP),
    Pair("criterion holds a model as it is before accelerator.prepare", compute("criterion(x)", HELD), compute("criterion(x) + model(x).mean()", HELD)),
    Pair("The gradients of criterion and model are not averaged", compute("criterion.compute(x)", OWN_HEAD), compute("criterion(x)", OWN_HEAD)),
]  # fmt: skip


# Pairs -----------------------------------------------------------------------------------

PAIRS = [*LIBRARY_PAIRS, *OBJECT_PAIRS, *VALUE_PAIRS]
MODULES = [
    "accelerate",
    "batches",
    "collectives",
    "conversion",
    "devices",
    "distributed",
    "fabric",
    "fabric_uses",
    "lengths",
    "loop",
    "metrics",
    "output",
    "preparation",
    "raw",
    "saving",
    "shell",
    "spawn",
    "training_metrics",
    "wrappers",
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.finding)
def test_a_finding_is_said_of_its_script_and_not_of_the_near_miss(pair):
    _, found = convert(pair.script)
    text, silent = convert(pair.near_miss)
    assert any(pair.finding in one for one in found), found
    assert not any(pair.finding in one for one in silent), silent
    assert text != pair.near_miss or "accel_runtime" in pair.near_miss


def test_each_sentence_of_the_modules_is_said_of_some_script():
    said = "\n".join(text for pair in PAIRS for text in convert(pair.script)[1])
    unsaid = [text for module in MODULES for text in list_unsaid(module, said)]
    assert [text for text in unsaid if ". " in text or text.endswith((".'", ":'"))] == []


@pytest.mark.parametrize("pair", [one for one in OBJECT_PAIRS if one.finding == NOT_REACHED])
def test_a_device_at_the_top_makes_the_accelerator_known_everywhere(pair):
    result = migrate_script(pair.script.replace(IMPORTS, IMPORTS + 'device = torch.device("cuda")\n'))
    assert not any(NOT_REACHED in one.text for one in result.findings)
    assert "accelerator.backward(loss)" in result.text


# Converted scripts -----------------------------------------------------------------------

CONVERSIONS = CONVERTED | CONVERTED_OBJECTS


@pytest.mark.parametrize(("text", "line"), CONVERSIONS.values(), ids=CONVERSIONS)
def test_a_place_of_one_process_is_converted(text, line):
    result = migrate_script(text)
    assert not result.findings
    assert line in [one.strip() for one in result.text.splitlines()], result.text


def test_settings_that_a_command_line_changes_by_exec_stay_and_the_accelerator_is_created_after_them():
    setting = 'device = "cuda"\n'
    text = HEAD.replace('device = torch.device("cuda" if torch.cuda.is_available() else "cpu")\n', setting)
    before, _, after = text.partition(setting)
    result = migrate_script(f"{before}{setting}exec('rate = 0.2')\n{after}{LOOP}")
    assert f"{setting}exec('rate = 0.2')\naccelerator = Accelerator()\n" in result.text
    assert ["has no effect" in one.text for one in result.notes] == [True]
    assert not result.findings


@pytest.mark.parametrize(("text", "message"), UNSAFE.values(), ids=UNSAFE)
def test_a_script_that_is_not_understood_stays_as_it_is(text, message):
    result = migrate_script(text)
    assert result.text == text
    assert any(message in finding.text for finding in result.findings), result.findings


@pytest.mark.parametrize(("text", "message"), FOUND.values(), ids=FOUND)
def test_a_doubtful_place_is_a_finding_of_a_converted_script(text, message):
    result = migrate_script(text)
    assert "accelerator.backward(loss)" in result.text
    if message is None:
        assert not result.findings
        return
    assert any(message in finding.text for finding in result.findings), (result.findings, result.text)


@pytest.mark.parametrize(
    ("dataset", "loader", "prepared"),
    [
        ("wds.WebDataset('a.tar')", "wds.WebLoader(build(), batch_size=8)\nloader = loader.unbatched().batched(4)", "DataLoader(loader, batch_size=None)"),
        ("wds.WebDataset('a.tar').decode()", "DataLoader(data, batch_size=8)", "loader"),
    ],
)  # fmt: skip
def test_a_loader_of_webdataset_is_not_prepared_and_gets_the_code_for_its_shards(dataset, loader, prepared):
    head = f"import webdataset as wds\ndef build():\n    return {dataset}\ndata = build()\n" + HEAD
    result = migrate_script(head.replace("DataLoader(torch.randn(32, 8), batch_size=8)", loader) + LOOP)
    assert "\nmodel, optimizer = accelerator.prepare(model, optimizer)\n" in result.text
    [finding] = result.findings
    assert f'loader = accelerator.prepare_data_loader({prepared}, data="sharded")' in finding.text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# accel_runtime\n",
        '"""\nimport accelerate from torch\n"""\n',
        "x = 1\n",
        "import torch\nprint(torch.ones(1))\n",
        "# loss.backward()\n",
    ],
)
def test_other_scripts_stay_without_a_finding(text):
    result = migrate_script(text)
    assert (result.text, result.findings, result.notes) == (text, (), ())


def test_every_member_of_the_accelerator_is_known():
    members = [name for name in dir(Accelerator) if not name.startswith("_")]
    uses = "".join(f"accelerator.{name}\n" for name in members)
    result = migrate_script(f"from accelerate import Accelerator\naccelerator = Accelerator()\n{uses}")
    assert not result.findings


def test_imports_of_accelerate_are_renamed():
    before = (
        "import accelerate\nfrom accelerate import Accelerator  # the facade\nfrom accelerate.utils import set_seed\n"
        "assert accelerate.__version__ >= '0.16'\naccelerator = Accelerator()\nif accelerator.is_main_process():\n    pass\n"
    )
    after = (
        "import accel_runtime\nfrom accel_runtime import Accelerator  # the facade\nfrom accel_runtime.utils import set_seed\n"
        "assert accel_runtime.accelerate_version >= '0.16'\naccelerator = Accelerator()\nif accelerator.is_main_process:\n    pass\n"
    )
    assert migrate_script(before).text == after


def test_a_loader_that_is_created_after_the_training_is_prepared_on_its_own():
    text = HEAD + LOOP + "test = DataLoader(torch.randn(8, 8))\nfor x in test:\n    model(x)\n"
    lines = migrate_script(text).text.splitlines()
    assert "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)" in lines
    assert (
        lines[lines.index("test = DataLoader(torch.randn(8, 8))") + 1] == "test = accelerator.prepare(test)"
    )


def test_ranks_samplers_and_options_of_ddp_are_converted():
    text = DDP.replace("DDP(model", "DDP(model, find_unused_parameters=True").replace(
        "batch_size=8)", "batch_size=8, shuffle=False, sampler=DistributedSampler(data))"
    )
    text = f"import os\nfrom torch.utils.data import DistributedSampler\ndata = None\n{text}{LOOP}    if int(os.environ['LOCAL_RANK']) != 0:\n        print(rank, dist.get_world_size())\n"
    result = migrate_script(text)
    assert not result.findings
    lines = [line.strip() for line in result.text.splitlines()]
    kwargs = "DistributedDataParallelKwargs(find_unused_parameters=True)"
    assert f"accelerator = Accelerator(kwargs_handlers=[{kwargs}])" in lines
    assert "loader = DataLoader(torch.randn(32, 8), batch_size=8, shuffle=True)" in lines
    assert "if not accelerator.is_local_main_process:" in lines
    assert "print(accelerator.process_index, accelerator.num_processes)" in lines
    assert "dist" not in result.text.replace("DistributedDataParallelKwargs", "")


def test_objects_that_a_function_returns_are_prepared_where_it_is_called():
    text = (
        "import torch\nfrom torch.utils.data import DataLoader\n\n\ndef build():\n    model = torch.nn.Linear(8, 2)\n"
        "    return model, torch.optim.SGD(model.parameters(), lr=0.1)\n\n\nmodel, optimizer = build()\n"
        f"device = 'cpu'\ntorch.manual_seed(0)\nloader = DataLoader(torch.randn(32, 8), batch_size=8)\n{LOOP}"
    )
    result = migrate_script(text)
    assert not result.findings
    lines = result.text.splitlines()
    assert "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)" in lines


@pytest.mark.parametrize("loop", ["enumerate(tqdm(loader))", "tqdm(enumerate(loader), total=4)"])
def test_a_loop_with_a_progress_bar_is_one_over_the_loader(loop):
    result = migrate_script("from tqdm import tqdm\n" + HEAD + LOOP.replace("enumerate(loader)", loop))
    assert not result.findings
    lines = result.text.splitlines()
    assert f"for i, x in {loop}:" in lines
    assert "    loss = model(x).mean()" in lines
    assert "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)" in lines


def test_a_sum_over_gathered_samples_is_not_reduced_again():
    counts = "hits = torch.zeros(1)\nfor x in test:\n    hits += model(x).sum()\ndist.all_reduce(hits)\nprint(hits)\n"
    test = "test = DataLoader(torch.randn(8, 8))\n"
    result = migrate_script(DDP + test + LOOP + counts)
    assert not result.findings
    assert "gather_for_metrics" in result.text
    assert "reduce(hits" not in result.text
    divided = counts.replace("print(hits)", "print(hits / dist.get_world_size())")
    result = migrate_script(DDP + test + LOOP + divided)
    assert 'hits = accelerator.reduce(hits, "sum")' in result.text
    assert "accelerator.gather_for_metrics" not in result.text
    assert ["the script reduces the count itself" in one.text for one in result.findings] == [True]


def test_places_of_a_script_with_spawn_have_its_lines():
    body = "".join(f"    {line}\n" for line in (HEAD + LOOP).splitlines())
    text = (
        "import torch.multiprocessing as mp\nimport torch.distributed as dist\n\n\ndef main(rank, size):\n"
        f"    dist.init_process_group('gloo', rank=rank, world_size=size)\n{body}    open('log.txt', 'w').close()\n\n\n"
        "if __name__ == '__main__':\n    mp.spawn(main, args=(2,), nprocs=2)\n"
    )
    result = migrate_script(text)
    line = next(number for number, line in enumerate(text.splitlines(), 1) if "log.txt" in line)
    assert [finding.line for finding in result.findings] == [line]
    assert "if __name__ == '__main__':\n    main()\n" in result.text
    assert "def main():" in result.text


def test_the_lines_of_a_notebook_stay_in_order():
    magic = "get_ipython().run_line_magic('matplotlib', 'inline')\n"
    result = migrate_script(f"{magic}get_ipython().system('pip install torch')\n{HEAD}{LOOP}")
    head = HEAD.partition("\n\n")[0]
    assert (
        f"{magic}get_ipython().system('pip install torch')\n{head}\nfrom accel_runtime import" in result.text
    )


def test_a_blank_line_before_a_removed_statement_stays():
    text = f"{HEAD}x = 1\n\nmodel.to(device)\ny = 2\nif x:\n    z = 3\n{LOOP}"
    assert (
        "x = 1\n\ny = 2\nif x:\n    z = 3\n"
        in migrate_script(text.replace("nn.Linear(8, 2).to(device)", "nn.Linear(8, 2)")).text
    )


OPTIONAL = (
    "try:\n    from accelerate.test_utils import torch_device\nexcept ImportError:\n    torch_device = None\n"
)


def test_an_import_that_may_fail_does_not_make_a_raw_script_one_for_accelerate():
    result = migrate_script(OPTIONAL + HEAD + LOOP)
    assert not result.findings
    assert OPTIONAL in result.text
    assert "accelerator.backward(loss)" in result.text


def test_an_import_that_may_fail_stays_in_a_script_for_accelerate():
    text = OPTIONAL + "from accelerate import Accelerator\naccelerator = Accelerator()\n"
    result = migrate_script(text)
    assert not result.findings
    assert result.text == text.replace("from accelerate import", "from accel_runtime import")
    unguarded = migrate_script(
        text.replace("try:\n    ", "").replace("except ImportError:\n    torch_device = None\n", "")
    )
    assert any("accel has no accelerate.test_utils" in one.text for one in unguarded.findings)


@pytest.mark.parametrize(
    ("size", "code"),
    [
        ("count * args.nodes", 'count = int(os.environ.get("LOCAL_WORLD_SIZE", 1))'),
        ("count", "args.batch_size // accelerator.num_processes"),
    ],
)
def test_the_processes_that_spawn_starts_are_those_of_a_node_unless_they_are_the_world_size(size, code):
    train = HEAD.split("DataLoader\n\n")[1] + LOOP
    text = (
        "import torch\nimport torch.distributed as dist\nimport torch.multiprocessing as mp\nfrom torch import nn\n"
        "from torch.utils.data import DataLoader\n\n"
        "def work(gpu, count, args):\n    rank = args.node * count + gpu\n"
        f"    dist.init_process_group('nccl', rank=rank, world_size={size})\n    size = args.batch_size // count\n"
        + "".join(f"    {line}\n" for line in train.splitlines())
        + "    print(rank)\n\nmp.spawn(work, nprocs=args.gpus, args=(args.gpus, args))\n"
    )
    changed = migrate_script(text).text
    assert code in changed
    assert "accelerator.print(accelerator.process_index)" in changed


@pytest.mark.parametrize(
    "line",
    ["from accelerate.test_utils.training import mocked", "from accelerate.utils import FP8RecipeKwargs"],
)
def test_an_import_under_a_condition_stays_and_the_rest_of_a_script_for_accelerate_is_converted(line):
    text = f"import os\nfrom accelerate import Accelerator\nif os.environ.get('TEST') == '1':\n    {line}\na = Accelerator()\n"
    migration = migrate_script(text)
    assert migration.text == text.replace("from accelerate import", "from accel_runtime import")
    assert [one.line for one in migration.findings] == [4]
    assert (
        migrate_script(text.replace("os.environ.get('TEST') == '1'", "__name__ == '__main__'")).text
        != migration.text
    )


DISTRIBUTED_LOOP = """\
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
# parts
for (x,) in loader:
    loss = model(x).mean()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "part",
    [
        pytest.param("def f{i}(a):\n    print(a)\n    return f{j}(a) * {i}\n", id="functions"),
        pytest.param(
            "if rank == {i}:\n    y{i} = model(torch.ones(1))\nprint({i})\n", id="conditions of ranks"
        ),
    ],
)
def test_the_work_of_a_conversion_grows_with_the_length_of_the_script(part):
    """Counted in calls, not in seconds: quadratic work would be twice as many per line."""

    def count_calls(number):
        parts = "".join(part.format(i=i, j=max(i - 1, 0)) for i in range(number))
        profile = cProfile.Profile()
        profile.runcall(migrate_script, DISTRIBUTED_LOOP.replace("# parts\n", parts))
        return sum(entry.callcount for entry in profile.getstats())

    base, few, many = map(count_calls, (0, 10, 60))
    assert (many - base) / 60 < 1.5 * (few - base) / 10
