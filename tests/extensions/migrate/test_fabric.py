"""Each call of Lightning Fabric becomes one of the Accelerator, or the script stays as it is."""

from __future__ import annotations

import pytest

from accel_cli.extensions.migrate.conversion import migrate_script

IMPORTS = "import torch\nfrom lightning.fabric import Fabric\n"
STRATEGIES = "from lightning.fabric.strategies import DDPStrategy\nfrom lightning.fabric.strategies import FSDPStrategy\n"
HEAD = (
    f"{IMPORTS}fabric = Fabric()\nmodel = torch.nn.Linear(2, 2)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "loader = torch.utils.data.DataLoader(torch.randn(8, 2))\nx = torch.ones(2)\n"
)
CREATIONS = {
    "Fabric()": "Accelerator()",
    "Fabric(accelerator='auto', devices=1, num_nodes=1, strategy='ddp', callbacks=None, loggers=[])": "Accelerator()",
    "Fabric(accelerator='cpu')": "Accelerator(cpu=True)",
    "Fabric(precision='bf16-mixed')": 'Accelerator(mixed_precision="bf16")',
    "Fabric(precision=16)": 'Accelerator(mixed_precision="fp16")',
    "Fabric(precision='32-true')": "Accelerator()",
    "Fabric(strategy=DDPStrategy())": "Accelerator()",
    "Fabric(strategy=DDPStrategy(find_unused_parameters=True))": "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])",
    "Fabric(strategy='ddp_find_unused_parameters_true')": "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])",
}
NOTED = {
    "Fabric(devices=4)": "accel launch --nproc-per-node 4",
    "Fabric(devices=count)": "accel launch --nproc-per-node N",
    "Fabric(devices=[0, 2])": "accel launch --gpu-ids 0,2",
    "Fabric(num_nodes=2)": "accel launch --nnodes 2",
    "Fabric(accelerator=kind)": "accel launch --cpu",
    "Fabric(strategy=FSDPStrategy(auto_wrap_policy={torch.nn.Linear}))": "--set parallel.dp_shard=auto",
    "Fabric(strategy='fsdp')": "--set parallel.dp_shard=auto",
}
LINES = {
    "fabric.launch()": "",
    "model, optimizer = fabric.setup(model, optimizer)": "model, optimizer = accelerator.prepare(model, optimizer)",
    "model = fabric.setup(module=model, move_to_device=True)": "model = accelerator.prepare(model)",
    "model = fabric.setup_module(model)": "model = accelerator.prepare(model)",
    "optimizer = fabric.setup_optimizers(optimizer)": "optimizer = accelerator.prepare(optimizer)",
    "loader, other = fabric.setup_dataloaders(loader, other)": "loader, other = accelerator.prepare(loader, other)",
    "fabric.backward(loss, model=model, retain_graph=True)": "accelerator.backward(loss, retain_graph=True)",
    "fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=1)": "accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)",
    "fabric.clip_gradients(model, optimizer, clip_val=0.5)": "accelerator.clip_grad_value_(model.parameters(), 0.5)",
    "with fabric.no_backward_sync(model): pass": "with accelerator.no_sync(model): pass",
    "with fabric.no_backward_sync(model, enabled=i % 2 == 0): pass": "with accelerator.no_sync(model) if i % 2 == 0 else nullcontext(): pass",
    "with fabric.autocast(): pass": "with accelerator.autocast(): pass",
    "with fabric.init_module(): pass": "with accelerator.device: pass",
    "with fabric.init_module(empty_init=False): pass": "with accelerator.device: pass",
    "with fabric.rank_zero_first(): pass": "with accelerator.main_process_first(): pass",
    "with fabric.rank_zero_first(local=True): pass": "with accelerator.local_main_process_first(): pass",
    "fabric.print(1, end='')": "accelerator.print(1, end='')",
    "fabric.log('loss', loss, step=3)": "accelerator.log({'loss': loss}, step=3)",
    "fabric.log_dict({'loss': loss}, step=3)": "accelerator.log({'loss': loss}, step=3)",
    "fabric.barrier('end')": "accelerator.wait_for_everyone()",
    "x = fabric.broadcast(x, src=1)": "x = broadcast_object_list([x], from_process=1)[0]",
    "y = fabric.all_reduce(x)": 'y = accelerator.reduce(x, "mean")',
    "fabric.all_reduce(x, reduce_op='sum')": 'x = accelerator.reduce(x, "sum")',
    "y = fabric.all_reduce(3.0)": 'y = accelerator.reduce(torch.as_tensor(3.0, device=accelerator.device), "mean")',
    "y = fabric.all_gather(x).mean()": "y = accelerator.gather(x).mean()",
    "y = fabric.all_gather(x.sum().item()).sum()": "y = accelerator.gather(torch.as_tensor(x.sum().item(), device=accelerator.device)).sum()",
    "y = fabric.to_device([x])": "y = send_to_device([x], accelerator.device)",
    "y = x.to(fabric.device)": "y = x.to(accelerator.device)",
    "print(fabric.global_rank, fabric.local_rank, fabric.world_size)": "print(accelerator.process_index, accelerator.local_process_index, accelerator.num_processes)",
    "if fabric.is_global_zero: pass": "if accelerator.is_main_process: pass",
    "fabric.seed_everything(3)": "set_seed(3)",
    "fabric.save('a', {'model': model, 'optimizer': optimizer, 'step': 3})": "accelerator.save({'model': accelerator.get_state_dict(model), 'optimizer': optimizer.state_dict(), 'step': 3}, 'a')",
    "fabric.save('a', model.state_dict())": "accelerator.save(model.state_dict(), 'a')",
    "y = fabric.load('a')": "y = torch.load('a', map_location=\"cpu\")",
}  # fmt: skip
REPORTED = [
    "fabric.node_rank",
    "fabric.seed_everything()",
    "fabric.load('a', state())",
    "def save(net):\n    fabric.save('a', {'net': net})",
    "if x: fabric.save('runs/a', model.state_dict())",
    "fabric.clip_gradients(model, a, max_norm=1)\nfabric.clip_gradients(model, b, max_norm=1)",
    "rows = fabric.all_gather(x)[0]",
    "fabric = Fabric(strategy=DDPStrategy(bucket_cap_mb=5))",
    "fabric = Fabric(precision=p)",
]


def body(text):
    """Return the lines of a script without its imports."""
    return [line for line in text.splitlines() if not line.startswith(("import", "from"))]


@pytest.mark.parametrize(("before", "after"), CREATIONS.items())
def test_a_fabric_becomes_an_accelerator(before, after):
    imports = IMPORTS + (STRATEGIES if "Strategy" in before else "")
    result = migrate_script(f"{imports}fabric = {before}\n")
    assert not result.findings
    assert body(result.text) == [f"accelerator = {after}"]
    assert "from lightning" not in result.text.replace(STRATEGIES.split("\n")[1], "")


@pytest.mark.parametrize(("before", "note"), NOTED.items())
def test_an_argument_for_the_launch_is_removed_with_a_note(before, note):
    result = migrate_script(f"{IMPORTS}{STRATEGIES}count, kind = 2, 'cpu'\nfabric = {before}\n")
    assert body(result.text)[-1] == "accelerator = Accelerator()"
    assert [note in one.text for one in result.notes] == [True]


@pytest.mark.parametrize(("before", "after"), LINES.items())
def test_a_call_of_fabric_is_converted(before, after):
    text = f"{HEAD}loss = plan = other = None\ni = 0\n{before}\n"
    result = migrate_script(text)
    assert not result.findings
    assert body(result.text)[-1] == (after or "i = 0")
    assert migrate_script(result.text).text == result.text
    compile(result.text, "train.py", "exec")


@pytest.mark.parametrize("line", REPORTED)
def test_a_script_with_a_call_without_an_equivalent_stays(line):
    text = f"{STRATEGIES}{HEAD}{line}\n"
    result = migrate_script(text)
    assert result.text == text
    assert all("is not converted" in one.text for one in result.findings)


def test_a_fabric_without_a_name_launches_a_function():
    text = f"{IMPORTS}def main(fabric):\n    print(fabric.device)\nFabric(accelerator='cpu').launch(main)\n"
    assert body(migrate_script(text).text)[-1] == "main(Accelerator(cpu=True))"


@pytest.mark.parametrize(
    ("imports", "name"),
    [
        ("from lightning.fabric import Fabric", "Fabric"),
        ("from lightning.fabric.fabric import Fabric", "Fabric"),
        ("from lightning import Fabric", "Fabric"),
        ("import lightning as L", "L.Fabric"),
        ("import lightning", "lightning.Fabric"),
        ("import lightning.fabric", "lightning.fabric.Fabric"),
        ("from lightning_fabric import Fabric as F", "F"),
        ("import lightning_fabric as lf", "lf.Fabric"),
    ],
)
def test_every_form_of_the_import_is_known(imports, name):
    result = migrate_script(
        f"{imports}\n\n\ndef main(fabric: {name}):\n    fabric.print(1)\n\n\nmain({name}())\n"
    )
    assert [one.text[:26] for one in result.findings] == []
    assert (
        "def main(accelerator: Accelerator):\n    accelerator.print(1)\n\n\nmain(Accelerator())\n"
        in result.text
    )
    assert "from lightning" not in result.text.replace(STRATEGIES.split("\n")[1], "")


def test_the_name_of_the_variable_stays_if_accelerator_is_taken():
    result = migrate_script(
        f"{IMPORTS}accelerator = 'cpu'\nfabric = Fabric(accelerator=accelerator)\nfabric.barrier()\n"
    )
    assert body(result.text)[1:] == ["fabric = Accelerator()", "fabric.wait_for_everyone()"]


def test_state_in_a_variable_is_saved_and_loaded_in_place():
    text = f"{HEAD}state = {{'model': model, 'step': 0}}\nfabric.save('a', state)\nrest = fabric.load('a', state)\n"
    assert body(migrate_script(text).text)[-6:] == [
        "state = {'model': model, 'step': 0}",
        "accelerator.save({**state, 'model': accelerator.get_state_dict(state['model'])}, 'a')",
        "accelerator.wait_for_everyone()",
        "rest = torch.load('a', map_location=\"cpu\")",
        "state['model'].load_state_dict(rest.pop('model'))",
        "state['step'] = rest.pop('step')",
    ]


def test_samples_of_an_evaluation_are_gathered_without_padding():
    text = (
        f"{HEAD}hits = total = 0\nfor inputs, targets in loader:\n    found = model(inputs).argmax(1)\n"
        "    found, targets = fabric.all_gather((found, targets))\n    hits += (found == targets).sum().item()\n    total += targets.numel()\n"
    )
    result = migrate_script(text)
    assert not result.findings
    assert "    found, targets = accelerator.gather_for_metrics((found, targets))" in result.text.splitlines()


EVALUATION = "    for x in loader:\n        {}\n    return total\ntotal = validate(fabric, model, loader)\n"


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("total += model(x).sum()", 1),
        ("y = model(x); y = fabric.all_gather(y); total += y.sum()", 0),
        ("y = fabric.all_gather(model(x)).sum(); total += y", 1),
        ("model(x)", 0),
    ],
)
def test_an_evaluation_that_counts_padding_has_a_note(line, count):
    head = HEAD.replace(
        "fabric = Fabric()\n", "def load(fabric, data):\n    return fabric.setup_dataloaders(data)\n"
    )
    text = f"{head}fabric = Fabric()\nloader = load(fabric, loader)\ndef validate(fabric, model, loader):\n    total = 0\n"
    result = migrate_script(text + EVALUATION.format(line))
    assert not result.findings
    assert ["accelerator.gather_for_metrics" in one.text for one in result.notes] == [True] * count


@pytest.mark.parametrize(
    "imports",
    [
        "import lightning as L",
        "import lightning",
        "from lightning.fabric.loggers import CSVLogger",
        "import lightning.pytorch as pl",
    ],
)
def test_an_unused_import_of_lightning_is_removed(imports):
    text = f"import os\n\n{imports}\n{IMPORTS}\n\ndef main():\n    {imports}\n    fabric = Fabric()\n    print('L', 'lightning')\n"
    result = migrate_script(text)
    assert "lightning" not in result.text.replace("'lightning'", "")
    assert result.text.startswith("import os\n\nimport torch\nfrom accel_runtime import Accelerator\n")


@pytest.mark.parametrize("annotation", ["Fabric", '"Fabric"', "Optional[Fabric]", "Fabric | None"])
def test_a_parameter_with_an_annotation_is_a_fabric(annotation):
    text = f"from typing import Optional\n{IMPORTS}def end(fabric: {annotation}):\n    fabric.barrier()\n"
    result = migrate_script(text)
    assert not result.findings
    after = annotation.replace("Fabric", "Accelerator")
    assert f"def end(accelerator: {after}):\n    accelerator.wait_for_everyone()\n" in result.text


def test_every_argument_without_an_equivalent_is_found():
    text = f"{IMPORTS}fabric = Fabric(\n    strategy='xla',\n    precision='64-true',\n    plugins=[1],\n)\n"
    assert [one.line for one in migrate_script(text).findings] == [4, 5, 6]


def test_a_conversion_that_is_not_valid_is_a_finding():
    text = f"{IMPORTS}def end(x: Fabric, y: Fabric):\n    x.barrier()\n    y.barrier()\n"
    result = migrate_script(text)
    assert result.text == text
    assert "would not be valid: duplicate argument" in result.findings[0].text


@pytest.mark.parametrize(
    ("path", "is_created"), [("'a.ckpt'", False), ("'runs/a.ckpt'", True), ("path", True)]
)
def test_the_folder_of_a_saved_file_is_created(path, is_created):
    result = migrate_script(f"{HEAD}path = 'a'\nfabric.save({path}, model.state_dict())\n")
    lines = body(result.text)
    line = f"Path({path}).parent.mkdir(parents=True, exist_ok=True)"
    assert lines[-1] == f"accelerator.save(model.state_dict(), {path})"
    assert (lines[-2] == line) == is_created
    assert ("from pathlib import Path\n" in result.text) == is_created
