"""The step hook, which executes the recorded operations after a step unless a loader does."""

from __future__ import annotations

import pytest

from accel_runtime.extensions.xla.host import build_step_hook

pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.mark.parametrize(
    ("handed", "cuts"),
    [
        pytest.param([1, 2, 3], 0, id="a loader hands out a batch before each step, and cuts there"),
        pytest.param([0, 0, 0], 3, id="no loader hands out anything"),
        pytest.param([1, 1, 1], 2, id="several steps on one batch"),
        pytest.param([2, 4, 6], 0, id="several batches for each step"),
        pytest.param([1, 2, 2, 3], 1, id="one step more than batches"),
    ],
)
def test_operations_are_executed_once_a_step_by_the_loader_or_the_optimizer(handed, cuts):
    counts, calls = iter(handed), []
    after_step = build_step_hook(lambda: next(counts), lambda: calls.append(None))
    for _ in handed:
        after_step()
    assert len(calls) == cuts
