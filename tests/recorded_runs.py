"""Small trainings that say everything they see, so that two runs of one can be compared with ==."""

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
    """What a training consists of; a test changes what it is about."""

    options: Callable[[], dict[str, Any]] = dict
    """Arguments of the Accelerator."""
    model: Callable[[], nn.Module] = lambda: nn.Linear(3, 1)
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = lambda o: torch.optim.lr_scheduler.StepLR(
        o, 2, 0.9
    )
    loader: Callable[[Any], DataLoader[Any]] = lambda data: DataLoader(data, batch_size=2, shuffle=True)
    dataset: Callable[[], Any] = lambda: Samples(COUNT)
    step: Callable[[Any, Any], Any] = lambda run, batch: learn(run, batch)  # noqa: PLW0108 - it stands below
    """Trains on a batch, and returns what it saw."""
    more: Callable[[Any], None] = lambda _: None
    """Is called with everything prepared, before anything is loaded."""


class Samples(torch.utils.data.Dataset):
    """So many points of a line, each with its number."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return point(index)


def point(index):
    """A sample: its number, inputs, a target."""
    inputs = torch.tensor([index / 10, (index * 7 % 11) / 5 - 1, (index * 3 % 5) / 3])
    return index, inputs, inputs.sum(0, keepdim=True) * 0.3 + index % 3


@dataclass
class Training:
    """One process's objects of a run."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    scheduler: Any
    loader: Any
    kept: dict[str, Any] = field(default_factory=dict)


def begun(script: Script, seed: int) -> Training:
    """Fresh objects."""
    warnings.filterwarnings("ignore", "This DataLoader will create")
    set_seed(seed, device_specific=True)
    accelerator = Accelerator(**script.options())
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # ranks have one model
        model = script.model()
    optimizer = script.optimizer([p for p in model.parameters() if p.requires_grad])
    loader = script.loader(script.dataset())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    scheduler = script.scheduler and accelerator.prepare(script.scheduler(optimizer))
    run = Training(accelerator, model, optimizer, scheduler, loader)
    script.more(run)
    return run


def learn(run, batch):
    """One ordinary step."""
    _, inputs, targets = batch
    with run.accelerator.accumulate(run.model):
        loss = nn.functional.mse_loss(run.model(inputs), targets)
        run.accelerator.backward(loss)
        run.optimizer.step()
        if run.scheduler:
            run.scheduler.step()
        run.optimizer.zero_grad()
    return loss.item()


def row(run, batch, seen):
    """All that can be seen after a step."""
    return (
        run.loader.epoch,
        batch[0].tolist() if isinstance(batch, (list, tuple)) else batch.tolist(),
        seen,
        [float(group["lr"]) for group in run.optimizer.param_groups],
        numbers(
            {name: value for name, value in run.kept.items() if isinstance(value, (torch.Tensor, float))}
        ),
        run.accelerator.sync_gradients,
        run.accelerator.save_iteration,
        (torch.rand(()).item(), random.random(), float(np.random.rand())),  # noqa: NPY002
    )


def walked(script: Script, run: Training, after: Callable[[int, bool], None] = lambda *_: None):
    """Train to the end; `after(number, over)` is called after every step, and once more after the last of an epoch."""
    rows, number = [], itertools.count(1)
    at = 0
    for _ in range(run.loader.epoch, EPOCHS):
        for batch in run.loader:
            rows.append(row(run, batch, script.step(run, batch)))
            at = next(number)
            after(at, False)
        after(at, True)
    return rows, weights(run)


def weights(run):
    """The model's state at the end, as numbers."""
    return numbers(dict(run.accelerator.unwrap_model(run.model).state_dict()))


def numbers(value):
    """Any state as what == compares."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().to_dense().to(torch.complex128 if value.is_complex() else torch.float64)
        return str(value.dtype), plain.tolist()
    if isinstance(value, dict):
        return {key: numbers(one) for key, one in value.items()}
    return [numbers(one) for one in value] if isinstance(value, (list, tuple)) else value


def uninterrupted(script: Script, folder: str, points: Sequence[int] | None = None, *, quiet: bool = False):
    """The whole run, with a checkpoint at some steps, all by default: what is seen, and where each was taken."""
    run = begun(script, 5)
    places = {}

    def save(number: int, over: bool) -> None:
        if quiet or (points is not None and number not in points):
            return
        name = f"{number}{'-over' if over else ''}"
        places[name] = number
        run.accelerator.save_state(Path(folder) / name)

    rows, end = walked(script, run, save)
    return rows, end, places


def resumed(script: Script, folder: str, name: str, before: Callable[[Training], None] = lambda _: None):
    """What fresh objects see after loading."""
    run = begun(script, 77)
    before(run)
    run.accelerator.resume(Path(folder) / name)
    return walked(script, run)


def skip_after_load(script: Script, checkpoint: Path, first_epoch: int, done: int, way: str):
    """Return the rows and weights of fresh objects that load a state, and skip what was trained on as scripts do.

    Args:
        script: The training.
        checkpoint: What is loaded.
        first_epoch: The epoch to begin with.
        done: How many steps of it had been taken.
        way: `skip_first_batches`, or `continue` in the loop.
    """
    run = begun(script, 77)
    run.accelerator.load_state(checkpoint)
    rows = []
    for epoch in range(first_epoch, EPOCHS):
        skip = done if epoch == first_epoch else 0
        loader = run.loader
        if way == "skip_first_batches" and skip:
            loader, skip = run.accelerator.skip_first_batches(loader, skip), 0
        for step, batch in enumerate(loader):
            if step < skip:
                continue
            rows.append(row(run, batch, script.step(run, batch)))
    return rows, weights(run)


def every_point(
    script: Script, folder: str, points: Sequence[int] | None = None, ways: Sequence[str] = ("resume",)
):
    """Return the resumes of this rank that differ: (way, checkpoint, step, came, expected); and the number of each."""
    rows, end, places = uninterrupted(script, folder, points)
    wrong = []
    for way, (name, number) in itertools.product(ways, places.items()):
        if way == "resume":
            again, finally_ = resumed(script, folder, name)
        else:
            first_epoch, done = divmod(number, len(rows) // EPOCHS)
            again, finally_ = skip_after_load(script, Path(folder) / name, first_epoch, done, way)
        if again != rows[number:]:
            pairs = itertools.zip_longest(again, rows[number:])
            at, (came, should) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
            wrong.append((way, name, at, came, should))
        elif finally_ != end:
            differences = {key: (finally_[key], end[key]) for key in end if finally_[key] != end[key]}
            wrong.append((way, name, differences))
    return wrong, len(places), len(rows)


def continues(
    ranks,
    script: Script,
    folder: Path,
    points: Sequence[int] | None = None,
    ways: Sequence[str] = ("resume",),
):
    """Every resume is the uninterrupted run."""
    for wrong, count, steps in ranks.run(every_point, script, str(folder), points, ways):
        assert not wrong, wrong[:2]
        assert count >= (steps if points is None else 1)
