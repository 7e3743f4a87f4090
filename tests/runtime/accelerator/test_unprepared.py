"""Objects that `prepare` returns as they are, and its warnings about them."""

from __future__ import annotations

import pytest
import torch
from support.cases.log_messages import collect_messages
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accel_runtime import Accelerator


class Stream(IterableDataset):
    """Stream that yields batches, as webdataset's `WebLoader` does, which is an `IterableDataset` too."""

    def __iter__(self):
        yield from torch.arange(4.0).view(2, 2)


class ForeignLoader:
    """Loader of another library."""

    batch_size = 2

    def __iter__(self):
        return iter([])


class ForeignOptimizer:
    param_groups = ()

    def step(self):
        """Do nothing."""


class ForeignScheduler:
    def step(self, epoch):
        """Do nothing."""

    def step_update(self, num_updates):
        """Do nothing."""


UNPREPARED = {
    "stream": (Stream, "Pass DataLoader(dataset, batch_size=...), with batch_size=None if it yields batches"),
    "dataset": (lambda: TensorDataset(torch.ones(2)), "Pass DataLoader(dataset, batch_size=...)."),
    "generator": (lambda: (x for x in [1]), "Put it into a torch.utils.data.IterableDataset"),
    "iterator": (lambda: iter(DataLoader([1])), "Put it into a torch.utils.data.IterableDataset"),
    "foreign loader": (ForeignLoader, "Put it into a torch.utils.data.IterableDataset"),
    "foreign optimizer": (ForeignOptimizer, "it is not a torch.optim.Optimizer"),
    "foreign scheduler": (ForeignScheduler, "it is not a torch.optim.lr_scheduler.LRScheduler"),
    "scaler": (lambda: torch.amp.GradScaler("cpu"), "accel scales losses itself"),
}


@pytest.mark.parametrize("name", UNPREPARED)
def test_prepare_warns_of_an_object_that_is_used_like_one_of_those_that_it_prepares(name):
    make, cure = UNPREPARED[name]
    item = make()
    with collect_messages("accel_runtime.accelerator.preparation") as messages:
        assert Accelerator().prepare({"x": [item]})["x"][0] is item
    (message,) = messages
    assert f"returns the {type(item).__name__} as it is" in message
    assert "test_unprepared.py" in message
    assert cure in message


def test_prepare_returns_other_objects_without_a_warning():
    items = ["text", None, 1, torch.ones(2), {"a": (1, [])}, len, int, b"x", range(2), {1}]
    with collect_messages("accel_runtime.accelerator.preparation") as messages:
        assert Accelerator().prepare(*items) == tuple(items)
    assert not messages


def test_prepare_data_loader_rejects_other_objects():
    accelerator = Accelerator()
    with pytest.raises(
        TypeError, match=r"Cannot prepare the Stream: it is not a torch.utils.data.DataLoader, so each"
    ):
        accelerator.prepare_data_loader(Stream())
    with pytest.raises(
        TypeError, match=r"Cannot prepare the list: it is not a torch.utils.data.DataLoader. Pass one"
    ):
        accelerator.prepare_data_loader([1])


def test_a_stream_of_batches_is_prepared_as_the_warning_says(several):
    def read(data):
        accelerator = Accelerator()
        loader = accelerator.prepare_data_loader(DataLoader(Stream(), batch_size=None), data=data)
        return [accelerator.gather_for_metrics(batch).tolist() for batch in loader]

    whole = [0.0, 1.0, 2.0, 3.0]
    for batches in several.run(lambda: read("global")):
        assert [number for batch in batches for number in batch] == whole
    for batches in several.run(lambda: read("sharded")):
        assert batches == [[0.0, 1.0] * several.size, [2.0, 3.0] * several.size]


def test_forward_backward_takes_a_model_that_was_compiled_before_it_was_prepared():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.compile(nn.Linear(2, 1), backend="eager"))
    rows = torch.ones(3, 2)
    loss = accelerator.forward_backward(model, rows, torch.zeros(3, 1), nn.functional.mse_loss)
    torch.testing.assert_close(loss, model(rows).square().mean().detach())
    assert all(parameter.grad is not None for parameter in model.parameters())
