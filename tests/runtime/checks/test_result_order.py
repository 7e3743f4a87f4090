"""Results of `prepare` that a script assigns in another order than that of the arguments."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_runtime import Accelerator


def build():
    """Return a model, an optimizer, and two loaders."""
    model = nn.Linear(2, 1)
    loaders = (DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2) for _ in range(2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), *loaders


def test_a_loader_and_an_optimizer_that_are_exchanged_are_refused_with_the_line_to_write():
    model, optimizer, loader, _ = build()
    accelerator = Accelerator()
    with pytest.raises(ValueError, match="Write model, optimizer, loader = "):
        model, loader, optimizer = accelerator.prepare(model, optimizer, loader)
    # Nothing was prepared.
    assert accelerator.describe().models == ()


def test_loaders_that_are_exchanged_are_refused_although_they_would_train():
    model, optimizer, train, test = build()
    with pytest.raises(ValueError, match="Write model, optimizer, train, test = "):
        model, optimizer, test, train = Accelerator().prepare(
            model,
            optimizer,
            train,
            test,
        )


def test_attributes_count_by_their_names():
    model, optimizer, loader, _ = build()
    trainer = SimpleNamespace()
    with pytest.raises(ValueError, match=r"Write trainer\.model, trainer\.optimizer, trainer\.loader = "):
        trainer.optimizer, trainer.model, trainer.loader = Accelerator().prepare(model, optimizer, loader)


def test_assignments_in_order_and_to_other_names_are_not_refused():
    model, optimizer, loader, other = build()
    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loader, evaluated = accelerator.prepare(other, loader)
    first, second = accelerator.prepare(model, optimizer)
    pair = model, optimizer
    optimizer, model = accelerator.prepare(*reversed(pair))
    assert model is first
    assert optimizer is second
    assert evaluated is not loader
