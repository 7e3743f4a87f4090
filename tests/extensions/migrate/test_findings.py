"""A script that cannot be converted as a whole stays as it is, with its reason; doubtful places are findings."""

from __future__ import annotations

import pytest
from support.training_scripts import (
    CYCLE,
    CYCLED,
    DDP,
    HEAD,
    LOOP,
    MAIN,
    NEXT,
    TEST,
)

from accel_cli.extensions.migrate.conversion import migrate_script
from accel_runtime import Accelerator

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


@pytest.mark.parametrize(("text", "line"), CONVERTED.values(), ids=CONVERTED)
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
    assert 'hits = accelerator.reduce(hits, "sum")' in migrate_script(DDP + test + LOOP + divided).text


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
