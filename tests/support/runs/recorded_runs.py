"""Small training runs that record their results, so that a resumed run can be compared with ==."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_runtime import Accelerator, set_seed

EPOCHS = 3
COUNT = 22


@dataclass
class Script:
    """The parts of a training script; a test replaces those that it tests."""

    options: Callable[[], dict[str, Any]] = dict
    """Returns the arguments of the Accelerator."""
    model: Callable[[], nn.Module] = lambda: nn.Linear(3, 1)
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = lambda o: torch.optim.lr_scheduler.StepLR(
        o, 2, 0.9
    )
    loader: Callable[[Any], DataLoader[Any]] = lambda data: DataLoader(data, batch_size=2, shuffle=True)
    dataset: Callable[[], Any] = lambda: Samples(COUNT)
    step: Callable[[Any, Any], Any] = lambda run, batch: train_batch(run, batch)  # noqa: PLW0108 - the function is defined below
    """Trains on a batch, and returns the result of the step."""
    setup: Callable[[Any], None] = lambda _: None
    """Is called after `prepare`, before a checkpoint is loaded."""


class Samples(torch.utils.data.Dataset):
    """A dataset of numbered points."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return point(index)


def point(index):
    """Return a sample: its index, inputs and target."""
    inputs = torch.tensor([index / 10, (index * 7 % 11) / 5 - 1, (index * 3 % 5) / 3])
    return index, inputs, inputs.sum(0, keepdim=True) * 0.3 + index % 3


@dataclass
class Training:
    """The objects of a run in one process."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    scheduler: Any
    loader: Any
    objects: dict[str, Any] = field(default_factory=dict)


def start_training(script: Script, seed: int) -> Training:
    """Create and prepare the objects of a run."""
    warnings.filterwarnings("ignore", "This DataLoader will create")
    set_seed(seed, device_specific=True)
    accelerator = Accelerator(**script.options())
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # the model is equal on all ranks
        model = script.model()
    optimizer = script.optimizer([p for p in model.parameters() if p.requires_grad])
    loader = script.loader(script.dataset())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    scheduler = script.scheduler and accelerator.prepare(script.scheduler(optimizer))
    run = Training(accelerator, model, optimizer, scheduler, loader)
    script.setup(run)
    return run


def train_batch(run, batch):
    """Train on a batch; return the loss."""
    _, inputs, targets = batch
    with run.accelerator.accumulate(run.model):
        loss = nn.functional.mse_loss(run.model(inputs), targets)
        run.accelerator.backward(loss)
        run.optimizer.step()
        if run.scheduler:
            run.scheduler.step()
        run.optimizer.zero_grad()
    return loss.item()


def record_step(run, batch, step_result):
    """Return the visible state after a step."""
    return (
        run.loader.epoch,
        batch[0].tolist() if isinstance(batch, (list, tuple)) else batch.tolist(),
        step_result,
        [float(group["lr"]) for group in run.optimizer.param_groups],
        to_numbers(
            {name: value for name, value in run.objects.items() if isinstance(value, (torch.Tensor, float))}
        ),
        run.accelerator.sync_gradients,
        run.accelerator.save_iteration,
        (torch.rand(()).item(), random.random(), float(np.random.rand())),  # noqa: NPY002
    )


def train_to_end(script: Script, run: Training, after: Callable[[int, bool], None] = lambda *_: None):
    """Train to the end; `after(step, over)` is called after each step, and with `over=True` after each epoch."""
    rows, steps = [], itertools.count(1)
    step = 0
    for _ in range(run.loader.epoch, EPOCHS):
        for batch in run.loader:
            rows.append(record_step(run, batch, script.step(run, batch)))
            step = next(steps)
            after(step, False)
        after(step, True)
    return rows, get_weights(run)


def get_weights(run):
    """Return the state of the model as numbers."""
    return to_numbers(dict(run.accelerator.unwrap_model(run.model).state_dict()))


def to_numbers(value):
    """Convert a state to values that == compares."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().to_dense().to(torch.complex128 if value.is_complex() else torch.float64)
        return str(value.dtype), plain.tolist()
    if isinstance(value, dict):
        return {key: to_numbers(item) for key, item in value.items()}
    return [to_numbers(item) for item in value] if isinstance(value, (list, tuple)) else value


def train_and_save(script: Script, folder: str, points: Sequence[int] | None = None, *, quiet: bool = False):
    """Train without interruption and save at some steps, by default at all; return the rows, weights and saved steps."""
    run = start_training(script, 5)
    saved_steps = {}

    def save(step: int, over: bool) -> None:
        if quiet or (points is not None and step not in points):
            return
        name = f"{step}{'-over' if over else ''}"
        saved_steps[name] = step
        run.accelerator.save_state(Path(folder) / name)

    rows, end = train_to_end(script, run, save)
    return rows, end, saved_steps


def resume_training(
    script: Script, folder: str, name: str, prepare_run: Callable[[Training], None] = lambda _: None
):
    """Resume with new objects; return the rows and weights of the rest."""
    run = start_training(script, 77)
    prepare_run(run)
    run.accelerator.resume(Path(folder) / name)
    return train_to_end(script, run)


def skip_after_load(script: Script, checkpoint: Path, first_epoch: int, done: int, method: str):
    """Return the rows and weights of new objects that load a state, and skip the trained batches as scripts do.

    Args:
        script: The training script.
        checkpoint: The checkpoint to load.
        first_epoch: The epoch of the checkpoint.
        done: The number of steps of that epoch before the checkpoint.
        method: `skip_first_batches`, or `continue` in the loop.
    """
    run = start_training(script, 77)
    run.accelerator.load_state(checkpoint)
    rows = []
    for epoch in range(first_epoch, EPOCHS):
        skip = done if epoch == first_epoch else 0
        loader = run.loader
        if method == "skip_first_batches" and skip:
            loader, skip = run.accelerator.skip_first_batches(loader, skip), 0
        for step, batch in enumerate(loader):
            if step < skip:
                continue
            rows.append(record_step(run, batch, script.step(run, batch)))
    return rows, get_weights(run)


def compare_resumes(
    script: Script, folder: str, points: Sequence[int] | None = None, methods: Sequence[str] = ("resume",)
):
    """Return the resumes of this rank that differ from the uninterrupted run, and the numbers of checkpoints and steps."""
    rows, end, saved_steps = train_and_save(script, folder, points)
    differences = []
    for method, (name, step) in itertools.product(methods, saved_steps.items()):
        if method == "resume":
            actual_rows, actual_end = resume_training(script, folder, name)
        else:
            first_epoch, done = divmod(step, len(rows) // EPOCHS)
            actual_rows, actual_end = skip_after_load(script, Path(folder) / name, first_epoch, done, method)
        if actual_rows != rows[step:]:
            pairs = itertools.zip_longest(actual_rows, rows[step:])
            index, (actual, expected) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
            differences.append((method, name, index, actual, expected))
        elif actual_end != end:
            changed_weights = {key: (actual_end[key], end[key]) for key in end if actual_end[key] != end[key]}
            differences.append((method, name, changed_weights))
    return differences, len(saved_steps), len(rows)


def assert_resumes_are_exact(
    ranks,
    script: Script,
    folder: Path,
    points: Sequence[int] | None = None,
    methods: Sequence[str] = ("resume",),
):
    """Assert that every resume equals the uninterrupted run on all ranks."""
    for differences, count, steps in ranks.run(compare_resumes, script, str(folder), points, methods):
        assert not differences, differences[:2]
        assert count >= (steps if points is None else 1)
