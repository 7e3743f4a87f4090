"""fp16 with sharded parameters: an overflow on one rank skips the step on all."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from accel_runtime import Accelerator
from accel_runtime.foundation.torch_internals import local_tensor
from accel_runtime.training.loss_scaler import LossScaler


def build_parameters(size):
    """Return parameters of every layout: replicated in one dimension only, sharded, and plain."""
    line = init_device_mesh("cpu", (size,), mesh_dim_names=("dp_shard",))
    square = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp_replicate", "tp"))
    layouts = [(line, [Shard(0)]), (square, [Replicate(), Shard(0)]), (square, [Shard(0), Replicate()])]
    layouts += [(square["tp"], [Shard(0)])]
    parameters = [nn.Parameter(distribute_tensor(torch.zeros(8), *layout)) for layout in layouts]
    parameters.append(nn.Parameter(torch.zeros(2)))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter) * 4
    return parameters


def run_step(size, kind, options, overflowing):
    """Run one step in which the gradient of one parameter overflows on one rank."""
    accelerator = Accelerator()
    scaler = LossScaler("cpu", init_scale=4.0)
    parameters = build_parameters(size)
    if overflowing is not None:
        rank, index = overflowing
        if accelerator.process_index == rank:
            local_tensor(parameters[index].grad)[0] = float("inf")
    optimizer = kind([{"params": [parameter]} for parameter in parameters], lr=1.0, **options)
    scaler.add_optimizer(optimizer)
    scaler.scale(torch.ones(()))
    stepped = scaler.step_unless_overflowed(optimizer)
    return stepped, scaler.get_scale(), [local_tensor(parameter).detach().clone() for parameter in parameters]


@pytest.mark.parametrize("index", range(4))
def test_an_overflow_on_one_rank_skips_the_step_on_all(index, pair):
    for stepped, scale, values in pair.run(run_step, 2, torch.optim.SGD, {"foreach": False}, (1, index)):
        assert not stepped
        assert scale == 2.0
        assert all((value == 0).all() for value in values)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "index"),
    [
        pytest.param(rank, index, marks=[pytest.mark.full] * (rank != index))
        for rank in range(4)
        for index in range(4)
    ],
)
def test_an_overflow_skips_the_step_on_all_ranks_of_a_two_dimensional_mesh(rank, index, four):
    results = four.run(run_step, 4, torch.optim.SGD, {"foreach": False}, (rank, index))
    assert [(stepped, scale) for stepped, scale, _ in results] == [(False, 2.0)] * 4


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {}], ids=str)
def test_gradients_without_overflow_are_unscaled_and_applied(options, pair):
    for stepped, scale, values in pair.run(run_step, 2, torch.optim.SGD, options, None):
        assert stepped
        assert scale == 4.0
        assert all((value == -1).all() for value in values)


@pytest.mark.parametrize("overflowing", [None, (1, 0)], ids=["fits", "overflows"])
def test_a_fused_optimizer_reads_the_overflow_of_any_rank(overflowing, pair):
    def fused(overflowing):
        results = []
        for kind in (torch.optim.AdamW, torch.optim.Adam):
            stepped, _, values = run_step(2, kind, {"fused": True}, overflowing)
            results.append((stepped, [bool((value != 0).all()) for value in values]))
        return results

    stepped = overflowing is None
    assert pair.run(fused, overflowing) == [[(stepped, [stepped] * 5)] * 2] * 2
