"""When gradients synchronise."""

from __future__ import annotations

import pytest

from accel_runtime.accumulation import Accumulation


def windows(steps, micro_batches, epochs=1):
    """For every micro-batch, whether it completes a window."""
    accumulation = Accumulation(steps)
    epoch = range(1, micro_batches + 1)
    return [accumulation.advance(last=index == micro_batches) for _ in range(epochs) for index in epoch]


def test_without_any_micro_batch_the_optimizer_may_step():
    assert Accumulation(4).synced


def test_every_micro_batch_is_a_window_of_one():
    assert windows(1, 3) == [True, True, True]


def test_a_window_is_complete_after_its_steps():
    assert windows(2, 4) == [False, True, False, True]


def test_the_last_micro_batch_of_an_epoch_completes_its_window_and_the_next_epoch_begins_a_new_one():
    assert windows(3, 5, epochs=2) == [False, False, True, False, True] * 2


def test_synced_is_what_advance_said():
    accumulation = Accumulation(2)
    assert [accumulation.advance(last=False) == accumulation.synced for _ in range(5)] == [True] * 5


@pytest.mark.parametrize("steps", [0, -1])
def test_a_window_has_at_least_one_micro_batch(steps):
    with pytest.raises(ValueError, match=f"at least 1; it is {steps}"):
        Accumulation(steps)
