"""Findings about Fabric, Accelerate and shell scripts: each is said of a script of which it is true, and not of a similar one."""

from __future__ import annotations

import pytest
from support.findings import Pair, list_texts, list_unsaid

from accel_cli.extensions.migrate.conversion import migrate_script
from accel_cli.extensions.migrate.shell import migrate_shell

FABRIC = (
    "import torch\nfrom lightning.fabric import Fabric\nfabric = Fabric()\nmodel = torch.nn.Linear(2, 2)\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nloader = torch.utils.data.DataLoader(torch.randn(8, 2))\n"
    "x = torch.ones(2)\n"
)
ACCELERATE = "from accelerate import Accelerator\naccelerator = Accelerator()\n"
EVALUATION = FABRIC + "loader = fabric.setup_dataloaders(loader)\ntotal = 0\nfor x in loader:\n"


def create(code, imports=""):
    """Return a script that creates a Fabric."""
    return f"from lightning.fabric import Fabric\n{imports}kind, path = 'cpu', 'a'\nfabric = {code}\n"


def run(command):
    """Return a shell script."""
    return f"#!/bin/bash\n{command}\n"


PAIRS = [
    # Fabric: calls and members
    Pair("This call of all_gather is not converted. Write accelerator.gather(tensor), which concatenates", FABRIC + "rows = fabric.all_gather(x)\nprint(rows.shape)\n", FABRIC + "print(fabric.all_gather(x).mean())\n"),
    Pair("This call of all_gather is not converted", EVALUATION + "    out = model(x)\n    rows = fabric.all_gather(out)\n    total += rows[0].sum()\n", EVALUATION + "    out = model(x)\n    rows = fabric.all_gather(out)\n    total += rows.sum()\n"),
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
    Pair("A class derived from Fabric is not converted", create("Mine()", "class Mine(Fabric):\n    pass\n"), create("Fabric()", "class Mine:\n    kind = Fabric\n")),
    Pair("rank_zero_only before the Accelerator is created is not converted. Remove it", "from lightning.fabric.utilities import rank_zero_only\n@rank_zero_only\ndef log():\n    pass\n" + FABRIC, "from lightning.fabric.utilities import rank_zero_only\n" + FABRIC + "@rank_zero_only\ndef log():\n    pass\n"),
    # Fabric: arguments
    Pair("An argument without its name is not converted", create("Fabric(*options)"), create("Fabric(callbacks=None)")),
    Pair("The argument callbacks is not converted", create("Fabric(callbacks=[path])"), create("Fabric(callbacks=[])")),
    Pair("The argument loggers is not converted. Write Accelerator(log_with=", create("Fabric(loggers=path)"), create("Fabric(loggers=None)")),
    Pair("The argument precision is not converted. Write Accelerator(mixed_precision=...)", create("Fabric(precision='bf16-true')"), create("Fabric(precision='bf16-mixed')")),
    Pair("The argument strategy is not converted. The profile selects", create("Fabric(strategy='deepspeed')"), create("Fabric(strategy='ddp')")),
    Pair("The number of processes is an option of the launch: accel launch --nproc-per-node 4", create("Fabric(devices=4)"), create("Fabric(devices=1)")),
    Pair("The number of processes is an option of the launch: accel launch --nproc-per-node N", create("Fabric(devices=count())"), create("Fabric(devices='auto')")),
    Pair("The choice of GPUs is an option of the launch: accel launch --gpu-ids 0,2", create("Fabric(devices=[0, 2])"), create("Fabric(devices=2)")),
    Pair("The device is an option of the launch: accel launch --cpu", create("Fabric(accelerator=kind)"), create("Fabric(accelerator='cpu')")),
    Pair("The number of nodes is an option of the launch: accel launch --nnodes 2", create("Fabric(num_nodes=2)"), create("Fabric(num_nodes=1)")),
    Pair("Sharding is an option of the launch: accel launch --set parallel.dp_shard=auto", create("Fabric(strategy='fsdp')"), create("Fabric(strategy='auto')")),
    # Fabric: what differs after the conversion
    Pair("Fabric stops at gradients that are infinite or nan", FABRIC + "fabric.clip_gradients(model, optimizer, max_norm=1)\n", FABRIC + "fabric.clip_gradients(model, optimizer, max_norm=1, error_if_nonfinite=False)\n"),
    Pair("engine.fit gets an Accelerator instead of a Fabric", "import engine\n" + FABRIC + "engine.fit(fabric, model)\n", "import engine\n" + FABRIC + "engine.fit(fabric.device, model)\n"),
    Pair("the last batch is padded with repeated ones, and this counts them", EVALUATION + "    total += model(x).sum()\n", EVALUATION + "    out = model(x)\n    out = fabric.all_gather(out)\n    total += out.sum()\n"),
    # Accelerate
    Pair("accel has no accelerate.utils.FP8RecipeKwargs", ACCELERATE + "from accelerate.utils import FP8RecipeKwargs\n", ACCELERATE + "try:\n    from accelerate.utils import FP8RecipeKwargs\nexcept ImportError:\n    FP8RecipeKwargs = None\n"),
    Pair("accel has no accelerate.utils.FP8RecipeKwargs", ACCELERATE + "import accelerate\naccelerate.utils.FP8RecipeKwargs()\n", ACCELERATE + "import accelerate\naccelerate.utils.ProfileKwargs()\n"),
    Pair("accel has no accelerate.utils.transformer_engine", ACCELERATE + "import accelerate.utils.transformer_engine\n", ACCELERATE + "import accelerate.utils.operations\n"),
    Pair("accel has no Accelerator.lomo_backward", ACCELERATE + "accelerator.lomo_backward(1)\n", ACCELERATE + "class Own:\n    def lomo_backward(self, x):\n        accelerator.backward(x)\nOwn().lomo_backward(1)\n"),
    Pair("accel has no argument megatron_lm_plugin of Accelerator", "from accelerate import Accelerator\naccelerator = Accelerator(megatron_lm_plugin=None)\n", "from accelerate import Accelerator\naccelerator = Accelerator(fsdp_plugin=None)\n"),
    Pair("accel has no counterpart of accelerate.test_utils.training.mocked_dataloaders. This import stays", "import os\n" + ACCELERATE + "if os.environ.get('TEST'):\n    from accelerate.test_utils.training import mocked_dataloaders\n", "import os\n" + ACCELERATE + "if os.environ.get('TEST'):\n    from accelerate.utils import set_seed\n"),
    # Shell scripts
    Pair("This command is in a text and is not converted", run('run "torchrun --nproc_per_node 2 t.py"'), run('bash -c "torchrun --nproc_per_node 2 t.py"')),
    Pair("--fancy. accel launch has no such option", run("torchrun --fancy 3 t.py"), run("torchrun --nproc_per_node 3 t.py --fancy 3")),
    Pair("--start_method. Use --set launcher.start_method", run("torchrun --start_method spawn t.py"), run("torchrun --monitor_interval 5 t.py")),
    Pair("it is the number on all nodes, and must be a multiple of their number", run("accelerate launch --num_processes 3 --num_machines 2 t.py"), run("accelerate launch --num_processes 4 --num_machines 2 t.py")),
]  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.finding)
def test_a_finding_is_said_of_a_script_of_which_it_is_true_and_not_of_a_similar_one(pair):
    assert any(pair.finding in text for text in list_texts(pair.script)), list_texts(pair.script)
    assert not any(pair.finding in text for text in list_texts(pair.near_miss))


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.finding)
def test_the_similar_script_is_converted(pair):
    script = pair.near_miss
    after = migrate_shell(script)[0] if script.startswith("#!") else migrate_script(script).text
    assert after != script


@pytest.mark.parametrize("module", ["accelerate.py", "fabric.py", "fabric_uses.py", "shell.py"])
def test_every_sentence_of_a_module_is_said_of_some_script(module):
    assert list_unsaid(module, PAIRS) == []
