"""Processes with unequal numbers of batches."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accel_runtime import Accelerator


def test_a_process_with_fewer_batches_answers_for_the_others(several):
    def trained():
        accelerator = Accelerator()
        torch.manual_seed(0)
        model, frozen = accelerator.prepare(
            nn.Linear(1, 1), nn.Linear(1, 1).requires_grad_(requires_grad=False)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with accelerator.join_uneven_inputs([model, frozen], even_batches=False):
            for _ in range(1 + accelerator.process_index):
                model(torch.ones(2, 1)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        accelerator.wait_for_everyone()
        return [p.item() for p in model.parameters()]

    first, *others = several.run(trained)
    assert all(other == first for other in others)


def test_where_batches_are_even_nothing_is_joined(ranks):
    def entered():
        with Accelerator().join_uneven_inputs(["nothing to join"], even_batches=True):
            return True

    assert all(ranks.run(entered))


def test_one_process_has_nobody_to_join(alone):
    with Accelerator().join_uneven_inputs([nn.Linear(1, 1)], even_batches=False):
        pass


def test_a_loader_that_cannot_be_told_is_not_left_out_silently():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    accelerator = Accelerator()
    kept = accelerator.prepare(DataLoader(Stream()))
    for even in (True, False):
        with (
            pytest.raises(ValueError, match=f"even_batches={even} for this loader"),
            accelerator.join_uneven_inputs([], even_batches=even),
        ):
            pass
    del kept


def test_the_end_of_an_epoch_is_treated_otherwise_for_the_block(several):
    def sizes():
        accelerator = Accelerator()
        loader = accelerator.prepare(DataLoader(range(5), batch_size=4))
        with accelerator.join_uneven_inputs([], even_batches=False):
            inside = [len(batch) for batch in loader]
        return inside, [len(batch) for batch in loader]

    for rank, (inside, outside) in enumerate(several.run(sizes)):
        assert inside == [5 // several.size + (rank < 5 % several.size)]
        assert outside == [4]


def test_prepared_loaders_are_told_for_the_block():
    accelerator = Accelerator()
    told = []

    class Loader:
        @contextlib.contextmanager
        def override_even_batches(self, *, even_batches):
            told.append(even_batches)
            yield
            told.append("over")

    accelerator._loaders[0] = loader = Loader()
    with accelerator.join_uneven_inputs([], even_batches=False):
        assert told == [False]
    assert told == [False, "over"]
    with accelerator.join_uneven_inputs([]):
        pass
    assert told == [False, "over"]
    del loader
