"""A mesh whose ranks are numbered in another order gives the same groups, batches and weights."""

from __future__ import annotations

import pytest
import torch
from support.runs.sharded_runs import (
    arrange_ranks,
    build_accelerator,
    build_model,
    gather_model_state,
    sum_in_group,
)
from torch.utils.data import DataLoader, TensorDataset

from accel_runtime import DataLoaderConfiguration
from accel_runtime.environment.topology import ROLES

PLAN = "blocks.*.up=colwise,blocks.*.down=rowwise"
USUAL = ("data", "shard", "sequence", "tensor")
ORDERS = [("tensor", "sequence", "shard", "data"), ("sequence", "data", "tensor", "shard")]


def describe_groups(roles, sizes):
    """Return the data rank of this rank, its coordinates, and the ranks and the sum of each of its groups."""
    with arrange_ranks(roles):
        accelerator = build_accelerator(sizes)
    backend = accelerator._run.backend
    groups = {role: sum_in_group(backend, role) for role in ROLES}
    for role, (ranks, total) in groups.items():
        assert total == sum(rank + 1 for rank in ranks), role
    dimensions = accelerator.torch_device_mesh.mesh_dim_names
    coordinates = (
        accelerator.data_parallel_rank,
        accelerator.data_parallel_shard_rank,
        accelerator.tensor_parallel_rank,
    )
    return coordinates, groups["shard"][0], groups["tensor"][0], dimensions


def test_tensor_parallel_ranks_may_be_far_apart(four):
    results = four.run(describe_groups, ("tensor", "shard"), {"dp_shard": 2, "tp": 2, "tp_plan": PLAN})
    assert [coordinates for coordinates, *_ in results] == [(0, 0, 0), (1, 1, 0), (0, 0, 1), (1, 1, 1)]
    assert [shard for _, shard, *_ in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [tensor for *_, tensor, _ in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert {dimensions for *_, dimensions in results} == {("tp", "dp_shard")}


def train(roles, sizes, dispatch):
    """Return the samples of each step, those that this rank read, and the weights after an epoch."""
    with arrange_ranks(roles):
        loaders = DataLoaderConfiguration(dispatch_batches=dispatch, use_seedable_sampler=True)
        torch.manual_seed(1)
        accelerator = build_accelerator(sizes, dataloader_config=loaders)
        model = build_model()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        data = TensorDataset(torch.arange(22), torch.arange(22) % type(model).rows)
        loader = DataLoader(data, batch_size=3, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        read, gathered = [], []
        for numbers, inputs in loader:
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            read.append(numbers.tolist())
            gathered.append(accelerator.gather_for_metrics(numbers).tolist())
        return (
            accelerator.data_parallel_rank,
            read,
            gathered,
            gather_model_state(accelerator.unwrap_model(model)),
        )


@pytest.mark.parametrize("roles", ORDERS, ids="-".join)
@pytest.mark.parametrize("dispatch", [False, True], ids=["each rank reads", "rank 0 reads"])
@pytest.mark.parametrize(
    "sizes", [{"dp_shard": 2, "tp": 2, "tp_plan": PLAN}, {"dp_replicate": 2, "cp": 2}], ids=["tp", "cp"]
)
def test_an_epoch_is_equal_in_any_order_of_the_ranks(four, roles, dispatch, sizes):
    usual, other = four.run(train, USUAL, sizes, dispatch), four.run(train, roles, sizes, dispatch)
    reads = dict(result[:2] for result in usual)
    assert [data_rank for data_rank, *_ in other] != [data_rank for data_rank, *_ in usual]
    for data_rank, read, gathered, weights in other:
        assert read == reads[data_rank]
        assert gathered == usual[0][2]
        for name, value in usual[0][3].items():
            torch.testing.assert_close(torch.tensor(weights[name]), torch.tensor(value), atol=1e-6, rtol=1e-5)
