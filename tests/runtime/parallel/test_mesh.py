"""The device mesh of the processes."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_runtime import Accelerator, ParallelismConfig
from accel_runtime.environment.settings import Parallel, SettingsError
from accel_runtime.environment.topology import Topology
from accel_runtime.foundation.process_mesh import DIMENSIONS, MeshSizes, ProcessMesh

few = st.integers(min_value=1, max_value=4)


@given(few, few, few, few)
def test_neighbouring_ranks_share_a_batch_and_all_batches_have_equally_many_ranks(replicate, shard, cp, tp):
    world = replicate * shard * cp * tp
    sizes = MeshSizes.of(Parallel(replicate, shard, tp=tp, cp=cp), world)
    data_ranks = [sizes.data_rank(rank) for rank in range(world)]
    assert [data_rank.rank for data_rank in data_ranks] == [
        part for part in range(world // (cp * tp)) for _ in range(cp * tp)
    ]
    assert {(data_rank.world_size, data_rank.model_parallel_size) for data_rank in data_ranks} <= {
        (replicate * shard, cp * tp),
        (world, 1),
    }
    assert all(
        data_ranks[rank].of(other) == data_ranks[other].rank
        for rank in range(world)
        for other in range(world)
    )


@given(few, few, few, few)
def test_parameter_dimensions_cover_all_ranks(replicate, shard, cp, tp):
    world = replicate * shard * cp * tp
    replicas, shards, layers = MeshSizes.of(Parallel(replicate, shard, tp=tp, cp=cp), world).parameters
    assert replicas * shards * layers == world


def test_auto_shards_over_the_remaining_ranks():
    sizes = MeshSizes.of(Parallel(dp_replicate=2, dp_shard="auto", tp=2), 16)
    assert (sizes.dp_replicate, sizes.dp_shard, sizes.tp) == (2, 4, 2)
    assert sizes.description == "dp_replicate 2 x dp_shard 4 x tp 2"


def test_sizes_that_do_not_match_the_world_size_are_rejected():
    with pytest.raises(SettingsError, match="6"):
        MeshSizes.of(Parallel(dp_shard=3, tp=2), 4)


def build_meshes(**sizes_by_name):
    accelerator = Accelerator()
    rank, size = accelerator.process_index, accelerator.num_processes
    mesh = ProcessMesh(
        MeshSizes.of(Parallel(**sizes_by_name), size), torch.device("cpu"), Topology(rank, size)
    )
    groups = {
        name: dimension.mesh.tolist()
        for name, dimension in (("shard", mesh.shard), ("tp", mesh.tp))
        if dimension is not None
    }
    return groups | {"whole": mesh.full.mesh_dim_names}


def test_the_innermost_dimension_is_tensor_parallel(four):
    results = four.run(lambda: build_meshes(dp_shard=2, tp=2))
    assert [result["tp"] for result in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [result["shard"] for result in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert results[0]["whole"] == ("dp_shard", "tp")


def test_replicas_are_the_outermost_dimension(four):
    results = four.run(lambda: build_meshes(dp_replicate=2, dp_shard=2))
    assert [result["shard"] for result in results] == [[[0, 1], [2, 3]]] * 4


def test_context_parallel_ranks_shard_parameters(four):
    assert [result["shard"] for result in four.run(lambda: build_meshes(dp_shard=2, cp=2))] == [
        [0, 1, 2, 3]
    ] * 4
    assert [result["shard"] for result in four.run(lambda: build_meshes(dp_replicate=2, cp=2))] == [
        [[0], [1], [2], [3]]
    ] * 4


def test_dimension_names_are_those_of_accelerate():
    assert DIMENSIONS == ("dp_replicate", "dp_shard", "cp", "tp")


def test_equal_layouts_share_process_groups(four):
    def same():
        accelerator = Accelerator()
        rank, size = accelerator.process_index, accelerator.num_processes
        meshes = [
            ProcessMesh(
                MeshSizes.of(Parallel(dp_shard=2, tp=2), size), torch.device("cpu"), Topology(rank, size)
            ).shard
            for _ in range(2)
        ]
        return meshes[0].get_group() is meshes[1].get_group()

    assert four.run(same) == [True] * 4


@pytest.mark.parametrize(
    ("sizes", "dims"),
    [
        ({"dp_shard_size": 2}, {"dp_shard": 2, "dp": 2, "dp_shard_cp": 2, "dp_cp": 2}),
        ({"dp_shard_size": "auto", "tp_size": 2}, {"tp": 2}),
        ({"dp_replicate_size": 2, "dp_shard_size": "auto"}, {"dp_replicate": 2, "dp": 2, "dp_cp": 2}),
        ({}, None),
    ],
    ids=str,
)
def test_a_parallelism_config_builds_a_device_mesh(pair, sizes, dims):
    def build():
        Accelerator()
        mesh = ParallelismConfig(**sizes).build_device_mesh("cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates the names of combined dimensions
            return None if mesh is None else {name: mesh[name].size() for name in dims}

    assert pair.run(build) == [dims] * 2


def test_sizes_that_do_not_divide_the_processes_have_no_device_mesh(pair):
    def build():
        Accelerator()
        with pytest.raises(
            ValueError, match="2 processes are not a multiple of 3, the product of the other sizes"
        ):
            ParallelismConfig(dp_shard_size="auto", tp_size=3).build_device_mesh("cpu")

    pair.run(build)


def test_a_size_that_is_not_known_yet_has_no_device_mesh():
    with pytest.raises(ValueError, match="is known once processes are connected"):
        ParallelismConfig(dp_shard_size="auto").build_device_mesh("cpu")
