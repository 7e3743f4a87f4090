"""The device mesh of the processes."""

from __future__ import annotations

import math
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_runtime import Accelerator, ParallelismConfig
from accel_runtime.environment.layouts import DIMENSION_NAMES, Parallel
from accel_runtime.foundation.process_mesh import ProcessMesh, build_mesh

few = st.integers(min_value=1, max_value=4)


@given(few, few, few, few, st.booleans())
def test_parameter_dimensions_cover_all_ranks(replicate, shard, cp, tp, shards):
    grid = Parallel(replicate, shard, tp=tp, cp=cp).build_grid(replicate * shard * cp * tp)
    dimensions = ProcessMesh(grid, "cpu", shards=shards).dimensions
    ranks, sizes = grid.arrange(*dimensions)
    assert sorted(ranks) == list(range(grid.world_size))
    assert math.prod(sizes) == grid.world_size


def test_a_description_names_the_sizes_above_one():
    grid = Parallel(dp_replicate=2, dp_shard="auto", tp=2).build_grid(16)
    assert ProcessMesh(grid, "cpu", shards=True).description == "dp_replicate 2 x dp_shard 4 x tp 2"
    assert ProcessMesh(Parallel().build_grid(1), "cpu", shards=True).description == "dp_shard 1"


def build_meshes(**sizes_by_name):
    parallel = Parallel(**sizes_by_name)
    grid = parallel.build_grid(Accelerator().num_processes)
    mesh = ProcessMesh(grid, "cpu", shards=parallel.shards)
    groups = {
        name: dimension.mesh.tolist()
        for name, dimension in (("shard", mesh.shard), ("tp", mesh.tp))
        if dimension is not None
    }
    return groups | {"whole": build_mesh(grid, "cpu").mesh_dim_names}


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


def test_ranks_that_exchange_heads_shard_parameters_in_a_dimension_of_another_name(four):
    results = four.run(lambda: build_meshes(dp_shard=2, sp=2))
    assert [result["shard"] for result in results] == [[0, 1, 2, 3]] * 4
    assert results[0]["whole"] == ("dp_shard", "sp")


def test_dimension_names_are_those_of_accelerate():
    assert tuple(DIMENSION_NAMES.values()) == ("dp_replicate", "dp_shard", "cp", "tp")


def test_equal_layouts_share_process_groups(four):
    def same():
        grid = Parallel(dp_shard=2, tp=2).build_grid(Accelerator().num_processes)
        groups = {ProcessMesh(grid, "cpu", shards=True).shard.get_group() for _ in range(2)}
        return groups == {build_mesh(grid, "cpu").get_group("dp_shard")}

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
