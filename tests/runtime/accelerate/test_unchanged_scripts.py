"""Scripts of Accelerate 1.15 run after a change of their import; `test_differences.py` and `test_public_surface.py` compare the names."""

from __future__ import annotations

import importlib
import re
import sys

import pytest
import torch
from torch.utils.data import DataLoader

import accel_runtime
from accel_runtime import Accelerator, utils
from accel_runtime.accelerate.package import PACKAGE_NAMES
from accel_runtime.data_loader import DataLoaderShard
from accel_runtime.optimizer import AcceleratedOptimizer
from accel_runtime.scheduler import AcceleratedScheduler

SETTABLE = "autocast_handler dataloader_config ddp_handler even_batches gradient_accumulation_steps profile_handler step sync_gradients"
REFUSED = "megatron_lm_plugin torch_tp_plugin"

PLACEHOLDER = "MegatronLMDummyScheduler"
"""A class that scripts import for Megatron-LM."""


def test_the_members_of_the_accelerator_can_be_read_and_assigned():
    accelerator = Accelerator()
    states = accelerator.state, accelerator.gradient_state, accel_runtime.PartialState()
    for facade in (accelerator, *states):
        for name in dir(facade):
            if not name.startswith("_"):
                getattr(facade, name)
    for name in SETTABLE.split():
        setattr(accelerator, name, getattr(accelerator, name))


def test_a_dummy_of_megatron_can_be_imported_and_names_its_replacement():
    with pytest.raises(
        NotImplementedError, match=rf"{PLACEHOLDER}\(...\) .*Create the scheduler in the script"
    ):
        getattr(utils, PLACEHOLDER)([torch.ones(1)], lr=0.1)


@pytest.mark.parametrize("name", [*REFUSED.split(), "mixed_percision", "fp32"])
def test_an_argument_without_effect_is_rejected_by_name(name):
    with pytest.raises(TypeError, match=name):
        Accelerator(**{name: None})


@pytest.mark.parametrize("path", PACKAGE_NAMES)
def test_a_name_that_accel_lacks_is_that_of_the_installed_accelerate(path):
    theirs = importlib.import_module(path)
    ours = importlib.import_module(path.replace("accelerate", "accel_runtime", 1))
    for name in PACKAGE_NAMES[path]:
        assert getattr(ours, name) is getattr(theirs, name)
        assert name not in dir(ours)
    assert not hasattr(ours, "nosuch")


def test_a_name_of_accelerate_without_the_package_is_an_import_error_with_the_installation(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "accelerate"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    with pytest.raises(ImportError, match=r"part of Accelerate, which is not installed\. Run: .*accelerate"):
        from accel_runtime.hooks import remove_hook_from_module  # noqa: F401


def test_a_name_that_the_installed_accelerate_lacks_is_an_import_error_with_its_version(monkeypatch):
    monkeypatch.delattr("accelerate.hooks.add_hook_to_module")
    with pytest.raises(
        ImportError, match=r"Accelerate 1\.\S+ does not have it\. Run: .*--upgrade.*accelerate"
    ):
        from accel_runtime.hooks import add_hook_to_module  # noqa: F401


def test_prepared_objects_are_instances_of_the_classes_of_accelerate():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    *_, optimizer, loader, schedule = Accelerator().prepare(model, optimizer, DataLoader(range(3)), schedule)
    assert isinstance(optimizer, AcceleratedOptimizer)
    assert isinstance(schedule, AcceleratedScheduler)
    assert isinstance(loader, DataLoaderShard)


# Whole scripts ---------------------------------------------------------------------------

EARLY_SCRIPT = """
import argparse
import torch
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator, DistributedDataParallelKwargs, DistributedType
from accelerate.utils import set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--cpu", action="store_true")
args = parser.parse_args()

handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)]
accelerator = Accelerator(True, fp16=args.fp16, cpu=args.cpu, rng_types=["generator"], kwargs_handlers=handlers)
set_seed(42)
x = torch.linspace(-1, 1, 37)[:, None]
data = TensorDataset(x, (x > 0).long().squeeze(1))
train = DataLoader(data, shuffle=True, batch_size=8, drop_last=True)
evaluation = DataLoader(data, shuffle=False, batch_size=8)
model = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
model = model.to(accelerator.device)
optimizer = torch.optim.AdamW(params=model.parameters(), lr=0.05)
model, optimizer, train, evaluation = accelerator.prepare(model, optimizer, train, evaluation)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 100))
if accelerator.distributed_type == DistributedType.TPU:
    raise SystemExit("no such machine")
steps = 1
for epoch in range(8):
    model.train()
    for step, (inputs, labels) in enumerate(train):
        inputs, labels = inputs.to(accelerator.device), labels.to(accelerator.device)
        loss = torch.nn.functional.cross_entropy(model(inputs), labels) / steps
        accelerator.backward(loss)
        if step % steps == 0:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.eval()
    right, seen = 0, 0
    for inputs, labels in evaluation:
        with torch.no_grad():
            predictions = model(inputs).argmax(dim=-1)
        predictions = accelerator.pad_across_processes(predictions, dim=0, pad_index=-1)
        predictions, labels = accelerator.gather(predictions), accelerator.gather(labels)
        right += int((predictions == labels).sum())
        seen += len(labels)
accelerator.wait_for_everyone()
unwrapped = accelerator.unwrap_model(model)
accelerator.save(unwrapped.state_dict(), "model.bin")
accelerator.wait_for_everyone()
if accelerator.is_local_main_process:
    assert set(torch.load("model.bin", weights_only=True)) == set(unwrapped.state_dict())
assert not accelerator.use_fp16
accelerator.print(f"on {accelerator.num_processes}: {'good' if right / seen > 0.9 else right / seen}")
"""
RECENT_SCRIPT = """
import logging
import torch
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.logging import get_logger
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import DistributedType, ProjectConfiguration, find_executable_batch_size, set_seed, tqdm

logging.basicConfig(level=logging.INFO, format="%(message)s")
logger = get_logger(__name__, log_level="INFO")


class Lines(GeneralTracker):
    name = "lines"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.values = []

    @property
    def tracker(self):
        return self.values

    @on_main_process
    def store_init_configuration(self, values):
        self.values.append(sorted(values))

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.values.append((step, sorted(values)))


def main():
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        mixed_precision="no",
        log_with=Lines(),
        project_config=ProjectConfiguration(project_dir=".", logging_dir="logs"),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    logger.info(accelerator.state, main_process_only=False)
    set_seed(7)
    accelerator.init_trackers("project", config={"lr": 0.05})
    with accelerator.main_process_first():
        x = torch.linspace(-1, 1, 37)[:, None]
        data = TensorDataset(x, (x > 0).long().squeeze(1))

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size):
        accelerator.free_memory()
        model = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, 100)
        model, optimizer, loader, evaluation, schedule = accelerator.prepare(
            model, optimizer, DataLoader(data, batch_size, shuffle=True), DataLoader(data, batch_size), schedule
        )
        total = 0
        for epoch in range(12):
            model.train()
            active = skip_first_batches(loader, 1) if epoch == 0 else loader
            bar = tqdm(active, disable=not accelerator.is_local_main_process)
            for inputs, labels in bar:
                with accelerator.accumulate(model):
                    with accelerator.autocast():
                        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                        total += 1
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            assert not accelerator.optimizer_step_was_skipped
            mean = accelerator.reduce(loss.detach(), reduction="mean").item()
            accelerator.log({"loss": mean, "rate": schedule.get_last_lr()[0]}, step=total)
        model.eval()
        right, seen = 0, []
        for inputs, labels in evaluation:
            with torch.inference_mode():
                predictions = model(inputs).argmax(dim=-1)
            predictions, labels, inputs = accelerator.gather_for_metrics((predictions, labels, inputs))
            right += int((predictions == labels).sum())
            seen += inputs.flatten().tolist()
        assert torch.tensor(seen).equal(x.flatten()), seen
        return right / len(seen), accelerator.get_state_dict(model)

    accuracy, weights = train()
    accelerator.save(weights, "model.safetensors", safe_serialization=True)
    lines = accelerator.get_tracker("lines", unwrap=True)
    if accelerator.is_main_process:
        assert lines[0] == ["lr"] and len(lines) == 13, lines
    assert accelerator.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU)
    accelerator.print(f"on {accelerator.num_processes}: {'good' if accuracy > 0.9 else accuracy}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "processes"),
    [
        pytest.param(EARLY_SCRIPT, 1, id="an early script-1", marks=pytest.mark.full),
        pytest.param(EARLY_SCRIPT, 2, id="an early script-2", marks=pytest.mark.full),
        pytest.param(RECENT_SCRIPT, 2, id="a recent script-2"),
    ],
)
def test_a_script_runs_after_a_change_of_its_import(accel, script, text, processes):
    path = script(re.sub(r"\bfrom accelerate\b", "from accel_runtime", text))
    process = accel("launch", "--cpu", "--nproc-per-node", processes, path)
    assert process.returncode == 0, process.stderr
    assert f"on {processes}: good" in process.stdout
