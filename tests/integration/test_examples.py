"""The examples do what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_weighted_tokens_give_the_same_losses_on_one_and_on_two_processes(accel):
    printed = []
    for size in (1, 2):
        options = ("--cpu", "--nproc-per-node", size)
        done = accel("launch", *options, EXAMPLES / "token_weights.py", "--epochs", 3)
        assert done.returncode == 0, done.stderr
        printed.append([line for line in done.stdout.splitlines() if "loss" in line])
    assert len(printed[0]) == 3
    assert printed[0] == printed[1]
