"""Findings about losses, metrics, batches, files and steps are said where they are true, and not where they nearly are."""

from __future__ import annotations

import pytest
from support.findings import Pair, list_texts, list_unsaid
from support.training_scripts import CYCLE, CYCLE_END, DDP, HEAD, LOOP, TEST

from accel_cli.extensions.migrate.conversion import migrate_script

MODULES = "batches", "lengths", "loop", "metrics", "output", "saving", "training_metrics", "wrappers"
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


PAIRS = [
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


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.finding)
def test_a_finding_is_said_of_a_script_and_not_of_its_near_miss(pair):
    assert any(pair.finding in one for one in list_texts(pair.script)), list_texts(pair.script)
    assert not any(pair.finding in one for one in list_texts(pair.near_miss))
    assert migrate_script(pair.near_miss).text != pair.near_miss or "accel_runtime" in pair.near_miss


@pytest.mark.parametrize("module", MODULES)
def test_each_sentence_of_a_module_is_said_of_some_script(module):
    assert list_unsaid(f"{module}.py", PAIRS) == []
