"""The device mesh of the processes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_runtime import Accelerator
from accel_runtime.env import Parallel, SettingsError
from accel_runtime.parallel.dtensor import DIMENSIONS, MeshSizes, ProcessMesh
from accel_runtime.topology import Topology

few = st.integers(min_value=1, max_value=4)


@given(few, few, few, few)
def test_neighbouring_ranks_share_a_batch_and_all_batches_have_equally_many_ranks(replicate, shard, cp, tp):
    world = replicate * shard * cp * tp
    sizes = MeshSizes.of(Parallel(replicate, shard, tp=tp, cp=cp), world)
    places = [sizes.data_rank(rank) for rank in range(world)]
    assert [place.rank for place in places] == [
        part for part in range(world // (cp * tp)) for _ in range(cp * tp)
    ]
    assert {(place.world_size, place.model_parallel_size) for place in places} <= {
        (replicate * shard, cp * tp),
        (world, 1),
    }
    assert all(
        places[rank].of(other) == places[other].rank for rank in range(world) for other in range(world)
    )


@given(few, few, few, few)
def test_parameter_dimensions_cover_all_ranks(replicate, shard, cp, tp):
    world = replicate * shard * cp * tp
    copies, shards, layers = MeshSizes.of(Parallel(replicate, shard, tp=tp, cp=cp), world).parameters
    assert copies * shards * layers == world


def test_auto_shards_over_the_remaining_ranks():
    sizes = MeshSizes.of(Parallel(dp_replicate=2, dp_shard="auto", tp=2), 16)
    assert (sizes.dp_replicate, sizes.dp_shard, sizes.tp) == (2, 4, 2)
    assert sizes.description == "dp_replicate 2 x dp_shard 4 x tp 2"


def test_sizes_that_do_not_match_the_world_size_are_rejected():
    with pytest.raises(SettingsError, match="6"):
        MeshSizes.of(Parallel(dp_shard=3, tp=2), 4)


def build_meshes(**asked):
    accelerator = Accelerator()
    rank, size = accelerator.process_index, accelerator.num_processes
    mesh = ProcessMesh(MeshSizes.of(Parallel(**asked), size), torch.device("cpu"), Topology(rank, size))
    groups = {
        name: some.mesh.tolist()
        for name, some in (("shard", mesh.shard), ("tp", mesh.tp))
        if some is not None
    }
    return groups | {"whole": mesh.full.mesh_dim_names}


def test_the_innermost_dimension_is_tensor_parallel(four):
    found = four.run(lambda: build_meshes(dp_shard=2, tp=2))
    assert [one["tp"] for one in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [one["shard"] for one in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert found[0]["whole"] == ("dp_shard", "tp")


def test_replicas_are_the_outermost_dimension(four):
    found = four.run(lambda: build_meshes(dp_replicate=2, dp_shard=2))
    assert [one["shard"] for one in found] == [[[0, 1], [2, 3]]] * 4


def test_context_parallel_ranks_shard_parameters(four):
    assert [one["shard"] for one in four.run(lambda: build_meshes(dp_shard=2, cp=2))] == [[0, 1, 2, 3]] * 4
    assert [one["shard"] for one in four.run(lambda: build_meshes(dp_replicate=2, cp=2))] == [
        [[0], [1], [2], [3]]
    ] * 4


def test_dimension_names_are_those_of_accelerate():
    assert DIMENSIONS == ("dp_replicate", "dp_shard", "cp", "tp")


def test_equal_layouts_share_process_groups(four):
    def same():
        accelerator = Accelerator()
        rank, size = accelerator.process_index, accelerator.num_processes
        made = [
            ProcessMesh(
                MeshSizes.of(Parallel(dp_shard=2, tp=2), size), torch.device("cpu"), Topology(rank, size)
            ).shard
            for _ in range(2)
        ]
        return made[0].get_group() is made[1].get_group()

    assert four.run(same) == [True] * 4
