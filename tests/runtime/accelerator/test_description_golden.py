"""`describe()` returns the lines and the data of the golden files, for runs of every kind."""

from __future__ import annotations

from pprint import pformat

import pytest
import torch
from support.cases import golden
from support.training.data_sets import RangeStream
from support.training.models import ResidualNet
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, CosineAnnealingWarmRestarts, StepLR
from torch.utils.data import DataLoader

from accel_runtime import (
    Accelerator,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ParallelismConfig,
)

COMPRESSED = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)


def build_model():
    return ResidualNet(8, 32, 4, depth=3, norm=nn.LayerNorm, bias=False)


def build_attention():
    return nn.TransformerEncoderLayer(8, 4, 16, batch_first=True)


def prepare_run(
    loaders=lambda: [DataLoader(range(10), 2)], optimizer=SGD, schedule=StepLR, make=build_model, **options
):
    """Prepare a model, its optimizer and scheduler, and loaders."""
    accelerator = Accelerator(
        **{name: value() if callable(value) else value for name, value in options.items()}
    )
    model = make()
    optimizer = optimizer(model.parameters(), lr=0.1)
    objects = [model, optimizer, schedule(optimizer, 10), *loaders()]
    return accelerator, accelerator.prepare(*objects)


def prepare_weighted_run(**options):
    """Compute a weighted loss, so that gradients are means over items."""
    accelerator, objects = prepare_run(**options)
    accelerator.backward(objects[0](torch.ones(2, 8)).sum(), weight=2)
    return accelerator, objects


def prepare_two_models(**options):
    """Prepare a trained model, a frozen one, and one in another dtype."""
    accelerator = Accelerator(**options)
    models = [
        build_model(),
        nn.Linear(3, 2).requires_grad_(requires_grad=False),
        nn.Linear(3, 2, dtype=torch.float64),
    ]
    optimizers = [SGD(models[0].parameters(), lr=0.1), AdamW(models[2].parameters())]
    schedules = [StepLR(optimizers[0], 5), CosineAnnealingLR(optimizers[1], 5)]
    return accelerator, accelerator.prepare(*models, *optimizers, *schedules)


def prepare_nothing(**options):
    return Accelerator(**options), ()


def build_loaders():
    """Return loaders whose epochs end in different ways."""
    return [
        DataLoader(range(10), 2, drop_last=True),
        DataLoader(range(17), 4, shuffle=True),
        DataLoader(range(9), batch_sampler=[[0, 1, 2], [3, 4], [5, 6, 7, 8]]),
        DataLoader(RangeStream(5), 2),
        DataLoader(RangeStream(5), 2, num_workers=1),
        DataLoader(range(3), batch_size=None),
    ]


def describe_run(run, options):
    """Return the description of a run as lines and as data."""
    torch.manual_seed(0)
    accelerator, objects = run(**options)
    description = accelerator.describe()
    del objects
    return str(description), description.as_dict()


RUNS = {
    "one": (1, prepare_run, {}),
    "one-bf16-accumulation": (1, prepare_run, {"mixed_precision": "bf16", "gradient_accumulation_steps": 4}),
    "one-fp16": (
        1,
        prepare_run,
        {"mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs(init_scale=8.0)]},
    ),
    "one-loaders": (1, prepare_run, {"loaders": build_loaders}),
    "one-nothing": (1, prepare_nothing, {}),
    "two": (2, prepare_run, {}),
    "two-bf16-accumulation": (
        2,
        prepare_run,
        {
            "mixed_precision": "bf16",
            "kwargs_handlers": [COMPRESSED],
            "gradient_accumulation_plugin": GradientAccumulationPlugin(
                num_steps=4, sync_with_dataloader=False
            ),
        },
    ),
    "two-compiled": (2, prepare_run, {"dynamo_backend": "eager"}),
    "two-dispatched": (
        2,
        prepare_run,
        {
            "loaders": build_loaders,
            "dataloader_config": DataLoaderConfiguration(dispatch_batches=True),
        },
    ),
    "two-loaders": (2, prepare_run, {"loaders": build_loaders}),
    "two-models": (2, prepare_two_models, {"gradient_accumulation_steps": 2}),
    "two-schedule-of-its-own": (
        2,
        prepare_run,
        {"schedule": CosineAnnealingWarmRestarts, "step_scheduler_with_optimizer": False},
    ),
    "two-split-batches": (2, prepare_run, {"dataloader_config": DataLoaderConfiguration(split_batches=True)}),
    "two-uneven": (
        2,
        prepare_run,
        {"loaders": build_loaders, "dataloader_config": DataLoaderConfiguration(even_batches=False)},
    ),
    "two-weighted": (2, prepare_weighted_run, {}),
    "two-fully-sharded": (
        2,
        prepare_run,
        {"optimizer": AdamW, "parallelism_config": ParallelismConfig(dp_shard_size=2)},
    ),
    "two-fully-sharded-bf16": (
        2,
        prepare_run,
        {
            "mixed_precision": "bf16",
            "fsdp_plugin": lambda: FullyShardedDataParallelPlugin(
                activation_checkpointing=True, ignored_modules="blocks.*.norm", reshard_after_forward=False
            ),
        },
    ),
    "two-tensor-parallel": (2, prepare_run, {"parallelism_config": ParallelismConfig(tp_size=2)}),
    "two-sequence-parallel": (
        2,
        prepare_run,
        {"make": build_attention, "parallelism_config": ParallelismConfig(sp_size=2)},
    ),
    "two-context-parallel": (2, prepare_run, {"parallelism_config": ParallelismConfig(cp_size=2)}),
    "apart": (3, prepare_run, {"gradient_accumulation_steps": 2}),
}
"""The number of processes of a run, the function that prepares it, and its options."""


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_described_as_in_its_golden_file(clusters, name):
    size, run, options = RUNS[name]
    ranks = clusters["apart" if name == "apart" else size].run(describe_run, run, options)
    lines = [f"rank {rank}\n\n{text}\n" for rank, (text, _) in enumerate(ranks)]
    data = ranks[0][1]
    data["options"] = {
        key: option for key, option in data["options"].items() if option["origin"] != "default"
    }
    data = pformat(data, width=110, sort_dicts=False)
    golden.check(f"describe/{name}.txt", "\n".join([*lines, "as_dict() of rank 0\n", data]) + "\n")


def test_options_from_the_environment_are_described_as_in_the_golden_file(monkeypatch):
    for variable, value in {
        "ACCEL_LOG_LEVEL": "warning",
        "ACCEL_PROCESS_GROUP_TIMEOUT": "60",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3",
    }.items():
        monkeypatch.setenv(variable, value)
    text, data = describe_run(prepare_run, {"cpu": True})
    options = pformat(data["options"], width=110, sort_dicts=False)
    golden.check("describe/one-variables.txt", f"{text}\n\n{options}\n")


def test_every_golden_file_belongs_to_a_run():
    assert golden.names("describe") == {*RUNS, "one-variables"}
