"""One training program, on ranks with an `Accelerator` and on one process without: both must have the same gradients.

A `Training` describes the program apart from the number of processes. `train_on_ranks` runs it on prepared objects, and may save
within an accumulation cycle or continue from such a save. `train_on_one_process` is the oracle: plain PyTorch in float64, over
the global batches of the unprepared loader.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from support.runs.sharded_runs import build_accelerator, to_full
from support.training.data_sets import SizedStream
from support.training.models import PartlyUsedNet, TwoLayerNet
from support.training.numerics import relative_error
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accel_runtime import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
)

BARS = {"no": 1e-12, "fp16": 4e-3, "bf16": 3e-2}
"""Relative errors of gradients and parameters; without mixed precision, models are float64."""
ITEMS = {
    "none": None,
    "unequal": lambda at, _: 1 + at % 3 if at % 5 else 24,
    "none on the last ranks": lambda at, batch: 0 if at % batch >= batch // 2 else 1 + 5 * at % 24,
    "few batches": lambda at, batch: 24 if at // batch > 1 and at % batch * 4 // batch == 1 else 0,
}
"""Items of sample `at`, whose losses have a common mean; "none": losses have no weights."""
SOURCES = ("shuffled", "stream", "dispatched", "dispatched stream")
"""Kinds of loaders; the default, a list in order, is a part of most tests."""
STRATEGIES = {
    "replicated": ({}, {}),
    "sharded as one": ({"dp_shard": "auto"}, {"wrap": "none"}),
    "sharded by layers": ({"dp_shard": "auto"}, {"wrap": "Linear", "reshard_after_forward": False}),
    "checkpointed": ({"dp_shard": "auto"}, {"wrap": "Linear", "activation_checkpointing": True}),
    "tensor parallel": ({"tp": 2}, {}),
    "tensor parallel, sharded": ({"tp": 2, "dp_shard": 2}, {}),
    "tensor parallel, replicated": ({"tp": 2, "dp_replicate": 2}, {}),
    "tensor parallel by four": ({"tp": 4}, {}),
    "hybrid": ({"dp_replicate": 2, "dp_shard": 2}, {}),
}
WEIGHTS = {
    "int": int,
    "tensor": lambda weight: weight.float().reshape(1),
    "large": lambda weight: 4096.0 * float(weight),
    "unknown": int,
}
"""Forms of a weight. A large one is a multiple of the items, and an unknown one is not read, as on an accelerator."""
Loop = Literal["accumulate", "no_sync", "backward"]
"""How the script forms cycles: with `accumulate`, `no_sync`, or backward passes that all average."""


@dataclass(frozen=True)
class Training:
    """A training program."""

    samples: int = 31
    batch: int = 12
    """Samples of a global batch, of which each rank has a part."""
    epochs: int = 2
    steps: int = 1
    """Micro-batches of an accumulation cycle."""
    items: str = "none"
    weight: str = "int"
    source: str = "list"
    even: bool = False
    split: bool = False
    """`split_batches`: the script's batch is the global one."""
    loop: Loop = "accumulate"
    each: bool = False
    """`sync_each_batch`."""
    strategy: str = "replicated"
    ddp: dict[str, Any] = field(default_factory=dict, hash=False)
    model: Literal["layers", "partly used", "sparse"] = "layers"
    precision: Literal["no", "fp16", "bf16"] = "no"
    clip: float | None = None
    to_none: bool = True
    """`zero_grad(set_to_none=...)`."""

    @property
    def num_batches(self) -> int:
        """Return the number of global batches of an epoch."""
        return -(-self.samples // self.batch)

    def ends_cycle(self, number: int) -> bool:
        """Return whether the n-th micro-batch, from 0, is the last of its cycle: the last one of an epoch is."""
        at = number % self.num_batches
        return (at + 1) % self.steps == 0 or at + 1 == self.num_batches

    def build_model(self) -> nn.Module:
        """Return the model, with the same parameters in all processes."""
        torch.manual_seed(3)
        model = TwoLayerNet() if self.model == "layers" else PartlyUsedNet(sparse=self.model == "sparse")
        model.tp_plan = {"first": "colwise", "second": "rowwise"}
        if self.strategy != "replicated":
            model.register_forward_hook(lambda _, __, output: output.clone())  # FSDP warns of views
        return model.double() if self.precision == "no" else model

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer. With weight decay, a gradient of zeros is not None; a sparse one allows none."""
        options = {} if self.model == "sparse" else {"momentum": 0.9, "weight_decay": 0.1}
        return torch.optim.SGD(model.parameters(), lr=0.05, **options)

    def build_loader(self, batch: int) -> DataLoader[Any]:
        """Return the unprepared loader."""
        samples = Samples(self)
        if "stream" in self.source:
            return DataLoader(SizedStream(len(samples), samples.__getitem__), batch)
        return DataLoader(samples, batch, shuffle=self.source in {"shuffled", "dispatched"})

    def compute_losses(self, model: nn.Module, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        """Return the loss of each sample of micro-batch `number`; `[batch]`."""
        x, token, *_ = batch
        if self.model == "layers":
            x = x if self.precision == "no" else x.float()
            return (model(x) - x.sum(1, keepdim=True)).square().squeeze(1)
        return nn.functional.cross_entropy(model(token, number % 2), token % 3, reduction="none")


class Samples(Dataset):
    """Rows of numbers, a token, the number of items, and the index of a sample."""

    def __init__(self, training: Training):
        self.training = training
        generator = torch.Generator().manual_seed(training.samples)
        self.x = torch.randn(training.samples, 4, generator=generator, dtype=torch.float64)
        self.tokens = torch.randint(7, (training.samples,), generator=generator)
        self.count = ITEMS[training.items] or (lambda *_: 1)

    def __len__(self):
        return self.training.samples

    def __getitem__(self, index):
        if index >= len(self):
            raise IndexError(index)
        return self.x[index], self.tokens[index], torch.tensor(self.count(index, self.training.batch)), index


@dataclass
class Result:
    """What a training has done, by the number of the micro-batch at the end of a cycle, from 0."""

    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    """Norms before clipping."""
    samples: list[int] = field(default_factory=list)
    parameters: torch.Tensor | None = None

    def record(self, number, model, norm):
        """Record the gradients of a model before an optimizer step; None counts as zeros."""
        self.norms[number] = float(norm)
        self.gradients[number] = _flatten(
            p.new_zeros(p.shape) if p.grad is None else p.grad for p in model.parameters()
        )

    def compare(self, expected: Result, bar: float, after: int = 0) -> None:
        """Compare with the part of another result from micro-batch `after` on; bit for bit if `bar` is 0."""
        assert list(self.gradients) == [number for number in expected.gradients if number >= after]
        for number, gradient in self.gradients.items():
            error = relative_error(gradient, expected.gradients[number])
            assert error <= bar, f"gradients after micro-batch {number} differ by {error}"
            assert abs(self.norms[number] - expected.norms[number]) <= bar * max(1, expected.norms[number])
        assert relative_error(self.parameters, expected.parameters) <= bar, "parameters differ"


def _flatten(tensors):
    """Return the values of tensors, full ones of shards, in float64."""
    full = [to_full(tensor.detach()) for tensor in tensors]
    return torch.cat([(t.to_dense() if t.is_sparse else t).flatten().double() for t in full])


def _clip(training, clip, model):
    """Clip the gradients, and return their norm; torch has no norm of sparse gradients."""
    return 0 if training.model == "sparse" else clip(model.parameters(), training.clip or 1e9)


def train_on_one_process(training: Training, *, padded: bool = False) -> Result:
    """Train in plain PyTorch. With `padded`, the last global batch is padded from the start of its epoch."""
    result = Result()
    exact = Training(**{**vars(training), "precision": "no", "strategy": "replicated"})
    model = exact.build_model()
    optimizer = exact.build_optimizer(model)
    loader = exact.build_loader(training.batch)
    torch.manual_seed(5)
    divisor = training.steps if training.loop == "accumulate" else 1
    number = 0
    for _ in range(training.epochs):
        batches = list(loader)
        result.samples += [index for batch in batches for index in batch[3].tolist()]
        if padded:
            rows = [torch.cat(parts) for parts in zip(*batches, strict=True)]
            start = training.batch * (len(batches) - 1)
            at = torch.arange(start, start + training.batch) % training.samples
            batches[-1] = [part[at] for part in rows]
        total = count = 0
        for batch in batches:
            losses = exact.compute_losses(model, batch, number)
            if training.items == "none":
                total, count = total + losses.mean() / divisor, 1
            else:
                total, count = total + (losses * batch[2]).sum(), count + batch[2].sum()
            if training.ends_cycle(number):
                # Without an item the gradients are zeros.
                (total / count if count else total * 0).backward()
                result.record(number, model, _clip(training, nn.utils.clip_grad_norm_, model))
                optimizer.step()
                optimizer.zero_grad(set_to_none=training.to_none)
                total = count = 0
            number += 1
    result.parameters = _flatten(model.parameters())
    return result


def train_on_ranks(
    training: Training, folder: str = "", *, save_after: int | None = None, resume_from: int | None = None
) -> Result:
    """Train with an `Accelerator` on this rank.

    Args:
        training: The program.
        folder: The checkpoint to save or load.
        save_after: Number of micro-batches after which to save.
        resume_from: Number of micro-batches before the checkpoint to continue from.
    """
    run = TrainingRun(training)
    torch.manual_seed(5)
    number, result = 0, run.result
    if resume_from is not None:
        torch.manual_seed(99)
        run.pollute()
        run.accelerator.resume(folder)
        number = resume_from
    for _ in range(run.loader.epoch, training.epochs):
        for batch in run.loader:
            run.train_micro_batch(batch, number)
            result.samples += run.accelerator.gather_for_metrics(batch[3]).tolist()
            number += 1
            if number == save_after:
                run.accelerator.save_state(folder)
    result.parameters = _flatten(run.accelerator.unwrap_model(run.model).parameters())
    return result


class TrainingRun:
    """The prepared objects of a rank."""

    def __init__(self, training: Training):
        self.training, self.result = training, Result()
        sizes, options = STRATEGIES[training.strategy]
        ddp = {} if training.model == "layers" else {"find_unused_parameters": True}
        self.accelerator = build_accelerator(
            sizes,
            options,
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                training.steps if training.loop == "accumulate" else 1, sync_each_batch=training.each
            ),
            dataloader_config=DataLoaderConfiguration(
                even_batches=training.even,
                split_batches=training.split,
                dispatch_batches="dispatched" in training.source or None,
            ),
            kwargs_handlers=[
                DistributedDataParallelKwargs(**ddp | training.ddp),
                GradScalerKwargs(init_scale=8.0),
            ],
            mixed_precision=training.precision,
        )
        model = training.build_model()
        num_parts = 1 if training.split else self.accelerator.num_processes // sizes.get("tp", 1)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model, training.build_optimizer(model), training.build_loader(training.batch // num_parts)
        )

    def pollute(self) -> None:
        """Run a backward pass, whose gradients `resume` replaces."""
        x, token, *_ = Samples(self.training)[0]
        losses = self.training.compute_losses(self.model, [x[None], token[None]], 0)
        self.accelerator.backward(losses.mean())

    def train_micro_batch(self, batch: list[torch.Tensor], number: int) -> None:
        """Run the backward pass of a micro-batch, and the optimizer step at the end of a cycle."""
        training, accelerator, model = self.training, self.accelerator, self.model
        ends_cycle = training.ends_cycle(number)
        with self._open_cycle(ends_cycle):
            self._run_backward(training.compute_losses(model, batch, number), batch[2])
            if training.loop == "accumulate":
                assert accelerator.sync_gradients == ends_cycle
            if ends_cycle:
                accelerator.unscale_gradients()
                norm = _clip(training, accelerator.clip_grad_norm_, model)
                self.result.record(number, accelerator.unwrap_model(model), norm)
            if training.loop == "accumulate" or ends_cycle:
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=training.to_none)

    def _open_cycle(self, ends_cycle):
        if self.training.loop == "accumulate":
            return self.accelerator.accumulate(self.model)
        if self.training.loop == "no_sync" and not ends_cycle:
            return self.accelerator.no_sync(self.model)
        return contextlib.nullcontext()

    def _run_backward(self, losses, items):
        if self.training.items == "none":
            self.accelerator.backward(losses.mean())
            return
        loss = (losses * items).sum() / items.sum()  # nan without an item
        weight = WEIGHTS[self.training.weight](items.sum())
        runtime = self.accelerator._run.backend.runtime
        # Weights on an accelerator are not read.
        before, runtime.static_shapes = runtime.static_shapes, self.training.weight == "unknown"
        try:
            self.accelerator.backward(loss, weight=weight)
        finally:
            runtime.static_shapes = before
