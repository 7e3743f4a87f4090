"""A script for accel: type checkers must accept it in strict mode, with the types that it asserts."""

from __future__ import annotations

import json
from typing import Any, assert_type

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import DataLoader, TensorDataset

from accel_runtime import Accelerator, PartialState, find_executable_batch_size, gather, skip_first_batches
from accel_runtime.data_loader import DataLoaderShard
from accel_runtime.optimizer import AcceleratedOptimizer
from accel_runtime.scheduler import AcceleratedScheduler
from accel_runtime.utils import (
    broadcast,
    extract_model_from_parallel,
    pad_across_processes,
    reduce,
    send_to_device,
)

Rows = tuple[Tensor, ...]


class Net(nn.Module):
    """A model with a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def count_outputs(self) -> int:
        """Return the number of outputs."""
        return self.linear.out_features


def build() -> tuple[Net, SGD, DataLoader[Rows], DataLoader[Rows], StepLR]:
    """Return what a script prepares."""
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(8, 4))
    return model, optimizer, DataLoader(data, batch_size=2), DataLoader(data), StepLR(optimizer, 1)


def prepare(accelerator: Accelerator, raw: Any, maybe: LRScheduler | None) -> None:
    """Prepare one to five objects, and more, in the orders that scripts have."""
    model, optimizer, train, test, scheduler = build()
    assert_type(accelerator.prepare(model), Net)
    assert_type(accelerator.prepare(optimizer), AcceleratedOptimizer)
    assert_type(accelerator.prepare(train), DataLoaderShard[Rows])
    assert_type(accelerator.prepare(accelerator.prepare(train)), DataLoaderShard[Rows])
    assert_type(accelerator.prepare(scheduler), AcceleratedScheduler)
    accelerator.prepare(maybe)
    assert_type(accelerator.prepare([model, model]), list[Net])
    assert_type(accelerator.prepare(model, optimizer), tuple[Net, AcceleratedOptimizer])
    assert_type(accelerator.prepare(model, train), tuple[Net, DataLoaderShard[Rows]])
    assert_type(accelerator.prepare(model, model), tuple[Net, Net])
    assert_type(
        accelerator.prepare(model, optimizer, train, device_placement=[True, None, False]),
        tuple[Net, AcceleratedOptimizer, DataLoaderShard[Rows]],
    )
    assert_type(accelerator.prepare(model, model, model), tuple[Net, Net, Net])
    assert_type(
        accelerator.prepare(model, optimizer, scheduler, train),
        tuple[Net, AcceleratedOptimizer, AcceleratedScheduler, DataLoaderShard[Rows]],
    )
    assert_type(
        accelerator.prepare(model, model, optimizer, optimizer, train),
        tuple[Net, Net, AcceleratedOptimizer, AcceleratedOptimizer, DataLoaderShard[Rows]],
    )
    assert_type(accelerator.prepare(model, model, model, model, model), tuple[Net, Net, Net, Net, Net])
    objects: list[Any] = [model, optimizer]
    first, second = accelerator.prepare(*objects)
    first(second, accelerator.prepare(raw).of_any_kind)
    accelerator.prepare(model, optimizer, train, test, scheduler, model)


def train_model(accelerator: Accelerator) -> int:
    """Use results under the names of the arguments, as scripts do."""
    model, optimizer, train, test, scheduler = build()
    model, optimizer, train, test, scheduler = accelerator.prepare(model, optimizer, train, test, scheduler)
    assert_type(model.count_outputs(), int)
    assert_type(accelerator.unwrap_model(model), Net)
    assert_type(extract_model_from_parallel(model), Net)
    for _ in range(train.epoch, 2):
        for (x,) in skip_first_batches(train, 1):
            with accelerator.accumulate(model):
                loss = model(x).mean()
                accelerator.backward(loss)
                assert_type(accelerator.clip_grad_norm_(model.parameters(), 1.0), Tensor)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    with accelerator.autocast(), accelerator.main_process_first(), accelerator.no_sync(model):
        return optimizer.steps


class Trainer:
    """An object whose attributes are annotated with the classes of torch."""

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.scheduler: LRScheduler = accelerator.prepare(StepLR(optimizer, 1))
        self.loader: DataLoader[Rows] = accelerator.prepare(build()[2])
        with accelerator.gathered(build()[0]) as full:
            assert_type(full, Net)


def communicate(accelerator: Accelerator) -> None:
    """Collect results: each has the type of the argument."""
    tensor = torch.ones(1)
    assert_type(accelerator.gather(tensor), Tensor)
    assert_type(accelerator.gather({"loss": tensor}), dict[str, Tensor])
    assert_type(accelerator.gather_for_metrics((tensor, tensor)), tuple[Tensor, Tensor])
    assert_type(accelerator.gather_for_metrics(["a"], use_gather_object=True), list[str])
    assert_type(accelerator.reduce(tensor, "mean"), Tensor)
    assert_type(accelerator.pad_across_processes([tensor], dim=1), list[Tensor])
    assert_type(gather(tensor), Tensor)
    assert_type(reduce(tensor, "sum"), Tensor)
    assert_type(pad_across_processes(tensor), Tensor)
    assert_type(broadcast([tensor]), list[Tensor])
    assert_type(send_to_device({"x": tensor}, "cpu"), dict[str, Tensor])
    with accelerator.split_between_processes(["a", "b"]) as texts:
        assert_type(texts, list[str])


def decorate(accelerator: Accelerator) -> None:
    """Decorate functions: they keep their signatures."""

    @accelerator.on_main_process
    def on_main(epoch: int) -> None: ...

    @accelerator.on_process(process_index=0)
    def on_first(epoch: int) -> None: ...

    @accelerator.on_local_process(local_process_index=0)
    def on_local(epoch: int) -> None: ...

    @find_executable_batch_size(starting_batch_size=8)
    def run(batch_size: int, name: str) -> float:
        return batch_size / len(name)

    on_main(1)
    on_first(1)
    on_local(1)
    assert_type(run("a"), float)
    run(8, "a")  # type: ignore[arg-type, call-arg]  # the decorator passes the batch size
    accelerator.gather("text", foo=1)  # type: ignore[call-arg]
    accelerator.prepair(1)  # type: ignore[attr-defined]
    Accelerator(mixed_precision="bf17")  # type: ignore[arg-type]
    Accelerator(gradient_acumulation_steps=2)  # type: ignore[call-arg]


def record(accelerator: Accelerator) -> str:
    """Write facts about a process with a serialiser."""
    main: bool = accelerator.is_main_process
    assert_type(accelerator.is_local_main_process, bool)
    assert_type(PartialState().is_last_process, bool)
    accelerator.is_main_process()  # type: ignore[operator]
    return json.dumps({"main": main})
