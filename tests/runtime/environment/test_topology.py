"""Rank and world size, from the variables of a launcher."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_runtime.environment.layouts import DIMENSION_NAMES, Parallel
from accel_runtime.environment.topology import ROLES, RankGrid, Topology, TopologyError

COMPLETE = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_all_variables_define_the_topology():
    assert Topology.from_env(COMPLETE) == Topology(5, 8, 1, 4, launched=True)


def test_a_launcher_can_start_a_single_process():
    variables = (
        COMPLETE
        | dict.fromkeys(("RANK", "LOCAL_RANK"), "0")
        | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
    )
    assert Topology.from_env(variables) == Topology(launched=True)


def test_a_process_without_variables_has_world_size_one():
    assert Topology.from_env({}) == Topology(0, 1, 0, 1, launched=False)


def test_the_address_alone_defines_no_rank():
    assert not Topology.from_env({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}).launched


@pytest.mark.parametrize("missing", COMPLETE)
@pytest.mark.parametrize("message", ["absent", "empty"])
def test_incomplete_variables_are_an_error_that_names_the_missing_one(missing, message):
    others = {name: value for name, value in COMPLETE.items() if name != missing}
    with pytest.raises(TopologyError, match=f"are incomplete: .*{missing}.* missing"):
        Topology.from_env(others if message == "absent" else others | {missing: ""})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("text", ["two", "-1", "1.0", "\u0663"])
def test_a_value_that_is_no_integer_is_an_error_that_names_the_variable(name, text):
    with pytest.raises(TopologyError, match=f"Invalid {name}='{text}': expected a whole number"):
        Topology.from_env(COMPLETE | {name: text})


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "8"}, "RANK=8: with WORLD_SIZE=8"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4: with LOCAL_WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9: it is larger than WORLD_SIZE=8"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0: with WORLD_SIZE=0"),
    ],
)
def test_a_rank_outside_the_world_size_is_an_error(variables, message):
    with pytest.raises(TopologyError, match=message):
        Topology.from_env(COMPLETE | variables)


small = st.integers(1, 3)
grids = st.builds(
    lambda order, sizes: RankGrid(tuple(zip(order, sizes, strict=True))),
    st.permutations(ROLES),
    st.lists(st.sampled_from([1, 2, 3]), min_size=3, max_size=3).map(lambda sizes: [*sizes, 1, 1, 1]),
)
"""Grids of all roles in any order, of which up to three have several ranks."""


@given(grids)
def test_the_groups_of_a_role_divide_the_ranks(grid):
    everyone = range(grid.world_size)
    for role in ROLES:
        groups = {grid.ranks_of(rank, role) for rank in everyone}
        assert sorted(itertools.chain(*groups)) == list(everyone)
        assert {len(group) for group in groups} == {grid.size(role)}
        for rank in everyone:
            assert grid.ranks_of(rank, role)[grid.coordinate(rank, role)] == rank


@given(grids)
def test_coordinates_and_ranks_correspond(grid):
    coordinates = [{role: grid.coordinate(rank, role) for role in ROLES} for rank in range(grid.world_size)]
    assert [grid.rank_of(each) for each in coordinates] == list(range(grid.world_size))
    assert len({tuple(each.items()) for each in coordinates}) == grid.world_size


@given(grids)
def test_ranks_that_differ_in_model_roles_only_have_the_same_data_rank(grid):
    count = grid.size("data", "shard", "expert")
    facts = [grid.data_rank(rank) for rank in range(grid.world_size)]
    for rank, fact in enumerate(facts):
        same = [other for other, each in enumerate(facts) if each.rank == fact.rank]
        assert same == sorted(grid.ranks_of(rank, "pipeline", "sequence", "tensor"))
    assert {(each.world_size, each.model_parallel_size) for each in facts} == {
        (count, grid.world_size // count)
    }
    assert [facts[rank].rank for rank in grid.first_ranks] == list(range(count))
    assert all(
        rank == min(grid.ranks_of(rank, "pipeline", "sequence", "tensor")) for rank in grid.first_ranks
    )


@given(grids, st.permutations(ROLES))
def test_ranks_can_be_arranged_by_any_order_of_roles(grid, order):
    ranks, sizes = grid.arrange(order[:2], order[2:])
    assert sorted(ranks) == list(range(grid.world_size))
    assert sizes == (grid.size(*order[:2]), grid.size(*order[2:]))
    rows = [ranks[start : start + sizes[1]] for start in range(0, len(ranks), sizes[1])]
    assert rows == [grid.ranks_of(row[0], *order[2:]) for row in rows]


@given(small, small, small, small)
def test_neighbouring_ranks_of_a_profile_share_a_batch(replicate, shard, cp, tp):
    world = replicate * shard * cp * tp
    parallel = Parallel(replicate, shard, tp=tp, cp=cp)
    grid = parallel.build_grid(world)
    copies = 1 if parallel.plain else cp * tp
    assert grid.data_ranks == tuple(rank // copies for rank in range(world))
    assert math.prod(grid.size(role) for role in DIMENSION_NAMES) == world


def test_tensor_parallel_ranks_may_be_the_outermost():
    grid = RankGrid((("tensor", 2), ("data", 3)))
    assert grid.data_ranks == (0, 1, 2, 0, 1, 2)
    assert grid.first_ranks == (0, 1, 2)
    assert grid.ranks_of(4, "tensor") == (1, 4)
    assert grid.ranks_of(4, "data") == (3, 4, 5)
    assert grid.roles == ("tensor", "data")


def test_a_role_that_is_not_named_has_one_rank():
    grid = RankGrid((("data", 2),))
    assert (grid.size("pipeline"), grid.coordinate(1, "pipeline"), grid.ranks_of(1, "pipeline")) == (
        1,
        0,
        (1,),
    )
    assert RankGrid().data_rank(0).world_size == RankGrid().world_size == 1
