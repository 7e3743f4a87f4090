"""Rank and world size, from the variables of a launcher."""

from __future__ import annotations

import pytest

from accel_runtime.environment.topology import Topology, TopologyError

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
