"""`join_uneven_inputs` with different numbers of batches."""

from __future__ import annotations

import contextlib

import pytest
import torch
from support.training.data_sets import RangeStream
from torch import nn
from torch.utils.data import DataLoader

from accel_runtime import Accelerator


def test_ranks_with_different_numbers_of_batches_train_with_join_uneven_inputs(several):
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


def test_join_uneven_inputs_has_no_effect_with_even_batches(ranks):
    def entered():
        with Accelerator().join_uneven_inputs(["nothing to join"], even_batches=True):
            return True

    assert all(ranks.run(entered))


def test_join_uneven_inputs_works_on_one_process(alone):
    with Accelerator().join_uneven_inputs([nn.Linear(1, 1)], even_batches=False):
        pass


def test_a_stream_rejects_an_override_of_even_batches():
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(RangeStream(3)))
    for even in (True, False):
        with (
            pytest.raises(ValueError, match=f"even_batches={even} for this loader"),
            accelerator.join_uneven_inputs([], even_batches=even),
        ):
            pass
    del loader


def test_even_batches_is_overridden_only_within_the_block(several):
    def sizes():
        accelerator = Accelerator()
        loader = accelerator.prepare(DataLoader(range(5), batch_size=4))
        with accelerator.join_uneven_inputs([], even_batches=False):
            inside = [len(batch) for batch in loader]
        return inside, [len(batch) for batch in loader]

    for rank, (inside, outside) in enumerate(several.run(sizes)):
        assert inside == [5 // several.size + (rank < 5 % several.size)]
        assert outside == [4]


def test_prepared_loaders_override_even_batches_only_within_the_block():
    accelerator = Accelerator()
    overrides = []

    class Loader:
        @contextlib.contextmanager
        def override_even_batches(self, *, even_batches):
            overrides.append(even_batches)
            yield
            overrides.append("over")

    loader = Loader()
    accelerator._run.prepared.add_loader(loader)
    with accelerator.join_uneven_inputs([], even_batches=False):
        assert overrides == [False]
    assert overrides == [False, "over"]
    with accelerator.join_uneven_inputs([]):
        pass
    assert overrides == [False, "over"]
    del loader
