"""A training program with `global_batch_size`, on any sequence of world sizes with an `Accelerator`, and on one process without.

`train_on_one_process` is the oracle: plain PyTorch in float64, whose loader has the global batch. `train_on_ranks` runs a part
of the same epochs with any micro-batch, and may begin from a checkpoint and end with one, also within a global batch.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from itertools import chain

import torch
from support.runs.sharded_runs import build_accelerator, to_full
from support.runs.training_oracle import STRATEGIES
from support.training.models import TwoLayerNet
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from accel_runtime import DataLoaderConfiguration

SOURCES = (
    "list",
    "shuffled",
    "batches",
    "stream",
    "stream, worker",
    "split stream",
    "dispatched",
    "dispatched stream",
)
"""Kinds of loaders."""


@dataclass(frozen=True)
class Program:
    """A training program, apart from the number of processes and the batch size of its loader."""

    source: str = "list"
    samples: int = 23
    global_batch: int = 6
    epochs: int = 2
    drop_last: bool = False
    tokens: bool = False
    """If true, losses are means over tokens, and `backward` has their number as the weight."""
    accumulate: bool = True
    """If false, the script has no `accumulate`."""
    strategy: str = "replicated"
    momentum: float = 0.9

    def build_model(self):
        """Return the model, with the same parameters in all processes."""
        torch.manual_seed(3)
        model = TwoLayerNet().double()
        model.tp_plan = {"first": "colwise", "second": "rowwise"}
        model.register_forward_hook(lambda _, __, output: output.clone())  # FSDP warns of views
        return model

    def build_optimizer(self, model):
        """Return an optimizer and a schedule that counts its steps."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=self.momentum, weight_decay=0.01)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)

    def build_loader(self, batch_size):
        """Return a loader of this batch size."""
        samples = Samples(self.samples)
        if "split" in self.source:
            return DataLoader(SplitStream(samples), batch_size, num_workers=2, drop_last=self.drop_last)
        if "stream" in self.source:
            workers = int("worker" in self.source)
            return DataLoader(Stream(samples), batch_size, num_workers=workers, drop_last=self.drop_last)
        if self.source == "batches":
            return DataLoader(samples, batch_sampler=UnequalBatches(self.samples))
        return DataLoader(samples, batch_size, shuffle="shuffled" in self.source, drop_last=self.drop_last)


class Samples(Dataset):
    """Samples with a number, an input, a target and a number of tokens."""

    def __init__(self, count):
        self._count = count
        inputs = torch.Generator().manual_seed(7)
        self._inputs = torch.randn(count, 4, generator=inputs, dtype=torch.float64)

    def __len__(self):
        return self._count

    def __getitem__(self, index):
        return index, self._inputs[index], 1 + index * 5 % 7


class Stream(IterableDataset):
    """The samples as a stream of unknown length."""

    def __init__(self, samples):
        self._samples = samples

    def __iter__(self):
        return (self._samples[index] for index in range(len(self._samples)))


class SplitStream(Stream):
    """A stream whose workers have a part each."""

    def __iter__(self):
        info = get_worker_info()
        return (self._samples[index] for index in range(info.id, len(self._samples), info.num_workers))


class UnequalBatches(Sampler):
    """Batches of one to three samples, each sample once."""

    def __init__(self, count):
        self._count = count

    def __iter__(self):
        start, size = 0, 1
        while start < self._count:
            yield list(range(start, min(start + size, self._count)))
            start, size = start + size, 1 + size % 3


@dataclass
class Record:
    """Optimizer steps of a training."""

    steps: list[list[int]] = field(default_factory=list)
    """Samples of each step, sorted."""
    losses: list[float] = field(default_factory=list)
    """Mean loss of each step."""
    rates: list[float] = field(default_factory=list)
    """Learning rate of each step."""
    parameters: torch.Tensor | None = None
    """Parameters at the end."""
    ended: bool = False
    """True if all epochs are complete."""


def compute_losses(model, inputs):
    """Return the loss of each sample."""
    return (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean(1)


def _flatten(model):
    return torch.cat([to_full(parameter.detach()).flatten().double() for parameter in model.parameters()])


def _merge(batches):
    return [torch.cat(parts) for parts in zip(*batches, strict=True)]


def list_global_batches(program: Program):
    """Return the global batches of an epoch of the unprepared loader; whole batches are joined if it has no batch size."""
    if program.source != "batches":
        return list(program.build_loader(program.global_batch))
    joined, open_batches = [], []
    for batch in program.build_loader(1):
        open_batches.append(batch)
        if sum(len(each[0]) for each in open_batches) >= program.global_batch:
            joined.append(_merge(open_batches))
            open_batches = []
    return joined + ([_merge(open_batches)] if open_batches else [])


def train_on_one_process(program: Program) -> Record:
    """Train in plain PyTorch, one global batch a step."""
    record, model = Record(ended=True), program.build_model()
    optimizer, schedule = program.build_optimizer(model)
    torch.manual_seed(5)
    for _ in range(program.epochs):
        for numbers, inputs, tokens in list_global_batches(program):
            losses = compute_losses(model, inputs)
            loss = (losses * tokens).sum() / tokens.sum() if program.tokens else losses.mean()
            loss.backward()
            record.steps.append(sorted(numbers.tolist()))
            record.losses.append(loss.item())
            record.rates.append(schedule.get_last_lr()[0])
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    record.parameters = _flatten(model)
    return record


def train_on_ranks(
    program: Program, batch_size: int, *, resume: str = "", save: str = "", stop_after: int | None = None
) -> tuple[Record, Record]:
    """Train on this rank, from a checkpoint and up to a number of micro-batches, after which one is saved.

    Returns:
        The complete optimizer steps, and what belongs to the incomplete one: its samples, and the sums of losses and of weights.
    """
    sizes, options = STRATEGIES[program.strategy]
    accelerator = build_accelerator(
        sizes,
        options,
        global_batch_size=program.global_batch,
        dataloader_config=DataLoaderConfiguration(dispatch_batches="dispatched" in program.source or None),
    )
    model = program.build_model()
    optimizer, schedule = program.build_optimizer(model)
    model, optimizer, schedule, loader = accelerator.prepare(
        model, optimizer, schedule, program.build_loader(batch_size)
    )
    torch.manual_seed(5)
    if resume:
        torch.manual_seed(99)
        accelerator.resume(resume)
    record, rest, count = Record(), Record(), 0
    for _ in range(loader.epoch, program.epochs):
        for numbers, inputs, tokens in loader:
            with accelerator.accumulate(model) if program.accumulate else contextlib.nullcontext():
                losses = compute_losses(model, inputs)
                weights = tokens.double() if program.tokens else torch.ones_like(losses)
                loss = (losses * weights).sum() / weights.sum()
                accelerator.backward(loss, weight=weights.sum().item() if program.tokens else None)
                rest.steps.append(accelerator.gather_for_metrics(numbers).tolist())
                pairs = accelerator.gather_for_metrics(torch.stack([losses.detach() * weights, weights], 1))
                rest.losses += pairs[:, 0].tolist()
                rest.rates += pairs[:, 1].tolist()
                if accelerator.sync_gradients:
                    record.steps.append(sorted(chain.from_iterable(rest.steps)))
                    record.losses.append(sum(rest.losses) / sum(rest.rates))
                    record.rates.append(schedule.get_last_lr()[0])
                    rest = Record()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            count += 1
            if count == stop_after:
                accelerator.save_state(save)
                return record, rest
    record.ended, record.parameters = True, _flatten(accelerator.unwrap_model(model))
    return record, rest


def join(parts: list[tuple[Record, Record]]) -> Record:
    """Return the record of a training from those of its parts."""
    result, rest = Record(), Record()
    for record, following in parts:
        if record.steps and rest.steps:
            record.steps[0] = sorted([*chain.from_iterable(rest.steps), *record.steps[0]])
            record.losses[0] = None  # its sums are those of two runs
            rest = Record()
        result.steps += record.steps
        result.losses += record.losses
        result.rates += record.rates
        rest.steps += following.steps
        result.parameters, result.ended = record.parameters, record.ended
    return result


def compare(result: Record, expected: Record, bar: float = 1e-9) -> None:
    """Compare a training with the oracle."""
    assert result.ended
    assert result.steps == expected.steps
    assert result.rates == expected.rates
    for got, want in zip(result.losses, expected.losses, strict=True):
        assert got is None or abs(got - want) <= bar * max(1, abs(want))
    error = (result.parameters - expected.parameters).norm() / expected.parameters.norm()
    assert error <= bar, f"parameters differ by {error}"


__all__ = [
    "SOURCES",
    "Program",
    "Record",
    "compare",
    "join",
    "train_on_one_process",
    "train_on_ranks",
]
