"""Findings about objects, devices, ranks and processes are true of a script, and silent for one that looks like it."""

from __future__ import annotations

import pytest
from support.findings import Pair, list_texts, list_unsaid
from support.training_scripts import (
    CYCLE_END,
    CYCLED,
    DDP,
    EVALUATE,
    HEAD,
    LOOP,
    MAIN,
    NEXT,
)

from accel_cli.extensions.migrate.conversion import migrate_script


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
HELD = HEAD.split("optimizer", 1)[0] + HOLDER + "optimizer" + HEAD.split("optimizer", 1)[1] + LOOP
DISTRIBUTED = "from torch.utils.data import DistributedSampler\nsampler = DistributedSampler(x){}\n"
SAMPLED = DDP + DISTRIBUTED + "loader = DataLoader(x, sampler=sampler)\n" + LOOP
USED = HEAD.replace("optimizer =", "if {}:\n    optimizer =") + LOOP.replace(
    "    optimizer.step()\n    optimizer.zero_grad()", "    if {}:\n        optimizer.step()"
)
SPAWN = "import torch.multiprocessing as mp\nimport torch.distributed as dist\n" + IMPORTS
WORKER = "def main(rank, size):\n    dist.init_process_group(rank=rank, world_size=size)\n" + indent(TRAIN)
NOT_REACHED = 'Write device = torch.device("cuda") below the imports'

PAIRS = [
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
    Pair("Create it after the last of them", HELD.format("model"), HELD.format("copy.deepcopy(model)").replace("import", "import copy\nimport", 1)),
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
CONVERTED = {
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
MODULES = ["collectives", "conversion", "devices", "distributed", "preparation", "raw", "spawn"]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.finding)
def test_a_finding_is_of_its_script_and_not_of_the_near_miss(pair):
    assert any(pair.finding in text for text in list_texts(pair.script)), list_texts(pair.script)
    assert migrate_script(pair.near_miss).text != pair.near_miss, list_texts(pair.near_miss)
    assert not any(pair.finding in text for text in list_texts(pair.near_miss))


@pytest.mark.parametrize("module", MODULES)
def test_every_sentence_of_a_module_is_of_a_script(module):
    unsaid = list_unsaid(f"{module}.py", PAIRS)
    assert not [text for text in unsaid if ". " in text or text.endswith((".'", ":'"))]


@pytest.mark.parametrize(("text", "line"), CONVERTED.values(), ids=CONVERTED)
def test_objects_and_devices_of_one_process_are_converted(text, line):
    result = migrate_script(text)
    assert not result.findings
    assert line in [one.strip() for one in result.text.splitlines()], result.text


@pytest.mark.parametrize("pair", [one for one in PAIRS if one.finding == NOT_REACHED])
def test_a_device_at_the_top_makes_the_accelerator_known_everywhere(pair):
    result = migrate_script(pair.script.replace(IMPORTS, IMPORTS + 'device = torch.device("cuda")\n'))
    assert not any(NOT_REACHED in one.text for one in result.findings)
    assert "accelerator.backward(loss)" in result.text
