"""The warning about losses that are NaN at the end."""

import subprocess

import pytest
import torch
from support.processes.children import ForkedProcess
from support.processes.commands import INTERPRETER
from support.processes.waits import limit

from accel_runtime.checks import losses as loss_check
from accel_runtime.checks.losses import LossCheck
from accel_runtime.training.accumulation import Accumulation

NAN = float("nan")


@pytest.fixture(autouse=True)
def _without_exit(monkeypatch):
    monkeypatch.setattr(loss_check.atexit, "register", lambda function: function)


def record(losses, weights=None, *, is_active=True):
    """Return the check after a backward pass of each loss."""
    accumulation = Accumulation(1)
    check = LossCheck(accumulation, is_active=is_active)
    for loss, weight in zip(losses, weights or [None] * len(losses), strict=True):
        accumulation.begin_backward(weighted=False)
        if accumulation.num_backward >= check.next_pass:
            check.sample(torch.tensor(loss), weight)
    return check


@pytest.mark.parametrize(
    ("losses", "weights", "text"),
    [
        ([NAN] * 300, None, "NaN or infinite in all sampled backward passes, 1 to 256"),
        ([1.0] * 20 + [NAN] * 300, None, "the first such loss was in backward pass 17 to 32 of 320"),
        ([NAN] * 3 + [1.0], None, None),
        ([1.0, 1.0, 1.0, NAN], [1, 1, 1, 0], None),
        ([1.0, NAN], [torch.tensor(2), torch.tensor(1)], "backward pass 2 to 2 of 2"),
        ([], None, None),
    ],
)
def test_losses_that_are_not_finite_at_the_end_are_described(losses, weights, text):
    description = record(losses, weights).describe()
    assert text in description if text else description is None


def test_another_rank_than_the_first_samples_nothing():
    assert record([NAN], is_active=False).describe() is None


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["", "raise ValueError"])
def test_one_line_at_the_end_of_a_script_reports_losses_that_are_nan(tmp_path, ending):
    """A script that fails has its own error."""
    (tmp_path / "train.py").write_text(
        "import torch\nfrom accel_runtime import Accelerator\n"
        "accelerator = Accelerator(cpu=True)\nmodel = accelerator.prepare(torch.nn.Linear(1, 1))\n"
        "for _ in range(3):\n    accelerator.backward(model(torch.ones(1, 1)).sum() * float('nan'))\n"
        f"{ending}\n"
    )
    with ForkedProcess(INTERPRETER, str(tmp_path / "train.py"), stderr=subprocess.PIPE, text=True) as process:
        _, errors = process.communicate(timeout=limit(60))
    assert process.returncode == bool(ending), errors
    assert ("The loss was NaN or infinite" in errors) is not bool(ending)
