"""Training programs that run on one process, with DDP, with `fully_shard`, and with each stage of ZeRO."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType

import torch
from support.runs.sharded_runs import set_settings
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from accel_runtime import Accelerator, DataLoaderConfiguration

INPUTS, HIDDEN, BATCH = 3, 5, 12
LAYOUTS = {
    "replicated": {},
    "fully_shard": {"parallel_dp_shard": "auto"},
    "stage 0": {"deepspeed_stage": 0},
    "stage 1": {"deepspeed_stage": 1},
    "stage 1, offload": {"deepspeed_stage": 1, "deepspeed_offload_optimizer": "cpu"},
    "stage 2": {"deepspeed_stage": 2},
    "stage 2, small buckets": {"deepspeed_stage": 2, "deepspeed_reduce_bucket_size": 20},
    "stage 2, offload": {"deepspeed_stage": 2, "deepspeed_offload_optimizer": "cpu"},
    "stage 3": {"deepspeed_stage": 3, "deepspeed_param_persistence_threshold": 1},
    "stage 3, persistent": {"deepspeed_stage": 3},
    "stage 3, small buckets": {
        "deepspeed_stage": 3,
        "deepspeed_param_persistence_threshold": 6,
        "deepspeed_prefetch_bucket_size": 20,
        "deepspeed_reduce_bucket_size": 20,
    },
    "stage 3, offload": {
        "deepspeed_stage": 3,
        "deepspeed_param_persistence_threshold": 1,
        "deepspeed_offload_optimizer": "cpu",
        "deepspeed_offload_param": "cpu",
    },
    "stage 3, offload of the optimizer": {"deepspeed_stage": 3, "deepspeed_offload_optimizer": "cpu"},
}
"""Settings of each layout. ZeRO stage 3 does not shard small parameters, unless the threshold is lowered."""


def connect(layout, settings=MappingProxyType({}), **arguments):
    """Return an Accelerator with the layout and other settings."""
    with set_settings(LAYOUTS[layout] | dict(settings)):
        return Accelerator(**arguments)


@dataclass(frozen=True)
class Program:
    """A training script."""

    accumulate: int = 1
    rows: int = 4 * BATCH
    weighted: bool = False
    clip: float | None = None
    clips_always: bool = False
    """`clip_grad_norm_` is called in every micro-batch, and clips in the last one of a cycle."""
    schedule: bool = False
    losses: str = "one"
    """`one`, or two whose order of passes it names."""
    clear: str = "after"
    """Place of `zero_grad`: `after` the step, `before` the forward pass, or between that and `backward`."""
    skips: str = "nothing"
    """Micro-batches that a layer is not used in: `nothing`, `odd steps`, or the `first` of each cycle."""
    optimizer: str = "adamw"
    groups: bool = False
    tied: bool = False
    frozen: bool = False
    checkpointing: str = "no"
    mixed_precision: str = "no"


class Net(nn.Module):
    """Layers whose sizes no world size divides, one that a pass may skip, and a parameter smaller than the world size."""

    def __init__(self, program):
        super().__init__()
        self.first, self.sometimes = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.inner = nn.Linear(HIDDEN, HIDDEN)
        self.gain = nn.Parameter(torch.ones(1))
        self.head, self.other = nn.Linear(HIDDEN, 1), nn.Linear(HIDDEN, 2)
        self.checkpointing = program.checkpointing
        if program.tied:
            self.inner.weight = self.sometimes.weight
        if program.frozen:
            self.first.weight.requires_grad_(requires_grad=False)
            self.inner.requires_grad_(requires_grad=False)

    def run_block(self, x):
        return x + torch.tanh(self.inner(x)) * self.gain

    def forward(self, x, *, skips=False):
        """Return two outputs, `[rows, 1]` and `[rows, 2]`."""
        x = torch.tanh(self.first(x))
        if not skips:
            x = torch.tanh(self.sometimes(x))
        if self.checkpointing == "no":
            x = self.run_block(x)
        else:
            x = checkpoint(self.run_block, x, use_reentrant=self.checkpointing == "reentrant")
        return self.head(x), self.other(x)


def build_model(program, seed=0):
    """Return a model that is equal in all processes."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(program)


def build_optimizer(model, program):
    """Return an optimizer of the parameters that are trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = trained
    if program.groups:
        groups = [{"params": trained[::2], "lr": 0.03, "weight_decay": 0.2}, {"params": trained[1::2]}]
    if program.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)
    # Adam makes a whole step of a gradient that is rounding errors, unless it is small beside eps.
    return torch.optim.AdamW(groups, lr=0.02, eps=1e-3)


def build_loader(program):
    """Return a loader of rows, targets and counts."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(program.rows, INPUTS, generator=generator)
    counts = torch.randint(1, 5, (program.rows,), generator=generator)
    return DataLoader(TensorDataset(rows, counts), batch_size=BATCH)


def connect_program(program, layout, **arguments):
    """Return the Accelerator, model, optimizer, scheduler and loader of a program."""
    accelerator = connect(
        layout,
        mixed_precision=program.mixed_precision,
        gradient_accumulation_steps=program.accumulate,
        dataloader_config=DataLoaderConfiguration(split_batches=True, even_batches=False),
        **arguments,
    )
    model = build_model(program)
    optimizer = build_optimizer(model, program)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, optimizer, scheduler, build_loader(program)
    )
    return accelerator, model, optimizer, scheduler, loader


def run_backward(accelerator, program, model, batch, number):
    """Run the forward and backward passes of a micro-batch."""
    rows, counts = batch
    cycle, place = divmod(number, program.accumulate)
    skips = {"nothing": False, "odd steps": cycle % 2 == 1, "first": place == 0}[program.skips]
    weight = int(counts.sum()) if program.weighted else None

    def compute(which):
        each = (model(rows, skips=skips)[which] - rows.sum(1, keepdim=True)).float().square().mean(1)
        return (each * counts).sum() / counts.sum() if program.weighted else each.mean()

    if program.losses == "one":
        accelerator.backward(compute(0), weight=weight)
    elif program.losses == "sum":
        accelerator.backward(compute(0) + 0.5 * compute(1), weight=weight)
    elif program.losses == "forward, backward, forward, backward":
        for which in (0, 1):
            accelerator.backward(compute(which), weight=weight)
    elif program.losses == "forward, forward, backward, backward":
        for loss in [compute(0), compute(1)]:
            accelerator.backward(loss, weight=weight)
    elif program.losses == "forward, backward, backward":
        outputs = model(rows, skips=skips)
        means = [
            ((output - rows.sum(1, keepdim=True)).float().square().mean(1) * counts).sum() / counts.sum()
            if program.weighted
            else (output - rows.sum(1, keepdim=True)).float().square().mean()
            for output in outputs
        ]
        accelerator.backward(means[0], weight=weight, retain_graph=True)
        accelerator.backward(means[1], weight=weight)
    elif program.losses == "no_sync":
        with accelerator.no_sync(model):
            accelerator.backward(compute(0), weight=weight)
        accelerator.backward(compute(1), weight=weight)
    else:
        raise AssertionError(program.losses)


def run_step(accelerator, program, objects, batch, number):
    """Run a micro-batch; return the norm if it has one."""
    model, optimizer, scheduler = objects
    norm = None
    with accelerator.accumulate(model) if program.accumulate > 1 else nullcontext():
        if program.clear == "before":
            optimizer.zero_grad()
        run_backward(accelerator, program, model, batch, number)
        if program.clip is not None and (accelerator.sync_gradients or program.clips_always):
            total = accelerator.clip_grad_norm_(model.parameters(), program.clip).item()
            norm = total if accelerator.sync_gradients else None
        optimizer.step()
        if program.schedule:
            scheduler.step()
        if program.clear == "after":
            optimizer.zero_grad()
    return norm


def to_full(value):
    """Return the full tensor of a DTensor; return other values unchanged."""
    return value.full_tensor() if hasattr(value, "device_mesh") else value


def read_state(accelerator, model, optimizer):
    """Return the weights, and the groups and states of the optimizer, in full."""
    state = optimizer.state_dict()
    states = {
        number: {key: torch.as_tensor(to_full(value)) for key, value in each.items()}
        for number, each in state["state"].items()
    }
    groups = [{k: v for k, v in group.items() if k != "foreach"} for group in state["param_groups"]]
    return accelerator.get_state_dict(model, everywhere=True), groups, states


def run_and_save(program, layout, folder, at, *, async_save=False):
    """Run a program that saves a checkpoint after `at` micro-batches; return its state at its end."""
    accelerator, model, optimizer, scheduler, loader = connect_program(program, layout)
    for number, batch in enumerate(loader):
        if number == at:
            accelerator.save_state(folder, async_save=async_save)
        run_step(accelerator, program, (model, optimizer, scheduler), batch, number)
    accelerator.wait_for_checkpoint()
    return read_state(accelerator, model, optimizer)


def run_from(program, layout, folder, at):
    """Run the rest of a program from its checkpoint; return its state at its end."""
    accelerator, model, optimizer, scheduler, loader = connect_program(program, layout)
    accelerator.load_state(folder)
    batches = accelerator.skip_first_batches(loader, at)
    for number, batch in enumerate(batches, start=at):
        run_step(accelerator, program, (model, optimizer, scheduler), batch, number)
    return read_state(accelerator, model, optimizer)


def load(program, layout, folder):
    """Return the state of a program after its checkpoint was loaded."""
    accelerator, model, optimizer, *_ = connect_program(program, layout)
    accelerator.load_state(folder)
    return read_state(accelerator, model, optimizer)


def run_program(program, layout):
    """Return the norms of a program, the learning rates at its end, and the parameters."""
    accelerator, model, optimizer, scheduler, loader = connect_program(program, layout)
    norms = [
        run_step(accelerator, program, (model, optimizer, scheduler), batch, number)
        for number, batch in enumerate(loader)
    ]
    rates = [group["lr"] for group in optimizer.param_groups]
    return [n for n in norms if n is not None], rates, accelerator.get_state_dict(model, everywhere=True)
