"""The memory of ZeRO's stages follows from the number of elements; `tests/extensions/deepspeed/zero/test_memory.py` measures it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_runtime.extensions.estimate.zero import compute_zero

WIDTH = 1000


def compute(devices, *, half=False, build=torch.optim.AdamW):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    model[1].requires_grad_(requires_grad=False)
    optimizer = build([p for p in model.parameters() if p.requires_grad])
    before = [group["params"] for group in optimizer.param_groups]
    rows = {(row.stage, row.offload): row for row in compute_zero(optimizer, model, devices, half=half)}
    assert [group["params"] for group in optimizer.param_groups] == before
    assert not optimizer.state
    return rows


def test_each_stage_divides_more_and_frozen_parameters_have_no_state():
    n = WIDTH * WIDTH
    rows = compute(4, half=True)
    assert [rows[stage, "no"].parameters for stage in (1, 2, 3)] == [4 * n, 4 * n, n]
    assert [rows[stage, "no"].gradients for stage in (1, 2, 3)] == [2 * n, n, n]
    # Master weights and two moments; the count of steps has four bytes.
    assert {rows[stage, "no"].optimizer for stage in (1, 2, 3)} == {3 * n + 4}
    assert compute(1, build=lambda p: torch.optim.SGD(p, 0.1))[1, "no"].optimizer == 4 * n


@pytest.mark.parametrize("half", [False, True])
def test_offload_moves_bytes_to_the_cpu_and_loses_none(half):
    rows = compute(3, half=half)
    for (stage, offload), row in rows.items():
        plain = rows[stage, "no"]
        total = row.parameters + row.gradients + row.optimizer + row.cpu
        assert total == plain.parameters + plain.gradients + plain.optimizer
        assert (row.cpu == 0) == (offload == "no")


def test_small_parameters_stay_complete_in_stage_3():
    with torch.device("meta"):
        model = nn.Linear(10, 10)
    rows = compute_zero(torch.optim.AdamW(model.parameters()), model, 2, half=False)
    parameters = {(row.stage, row.offload): row.parameters for row in rows}
    assert parameters[3, "no"] == 4 * (110 + 55)
    assert parameters[3, "all"] == 4 * 110
