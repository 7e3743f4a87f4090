"""Checkpoints of ZeRO continue bitwise on the same ranks, and load in any stage, in any number of ranks, and without ZeRO."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.runs.zero_runs import BATCH, Program, run_and_save, run_from

pytest.importorskip("deepspeed", reason="deepspeed is in an environment of its own: make test-deepspeed")

STAGES = ("stage 1", "stage 2", "stage 3")
PROGRAM = Program(rows=8 * BATCH, accumulate=2, schedule=True, skips="odd steps", groups=True, losses="sum")
WHOLE = 4
"""Number of micro-batches after which no cycle is unfinished."""


def assert_equal(actual, expected, bar=0.0):
    """Compare states of all ranks with one state."""
    for each in actual:
        torch.testing.assert_close(each, expected, atol=bar, rtol=bar)


def full(*values):
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("stage 1", {}),
        ("stage 2", {"mixed_precision": "bf16"}),
        ("stage 3", {"mixed_precision": "bf16"}),
        ("stage 3, offload", {}),
        full("stage 1", {"mixed_precision": "bf16"}),
        full("stage 2", {}),
        full("stage 3", {}),
        full("stage 3, persistent", {"optimizer": "sgd"}),
        full("stage 3, small buckets", {"weighted": True}),
        full("stage 2, offload", {"mixed_precision": "bf16"}),
        full("stage 1, offload", {"tied": True}),
        full("stage 3, offload", {"mixed_precision": "bf16", "frozen": True}),
    ],
)
@pytest.mark.parametrize("at", [WHOLE, WHOLE + 1])
def test_a_run_continues_bitwise_on_the_same_ranks(clusters, tmp_path, layout, changes, at):
    program = replace(PROGRAM, **changes)
    expected = clusters[2].run(run_and_save, program, layout, tmp_path / "saved", at)
    assert_equal(clusters[2].run(run_from, program, layout, tmp_path / "saved", at), expected[0])
