"""Where a process stands, as the variables of a launcher say it."""

from __future__ import annotations

import pytest

from accel_runtime.topology import Topology, TopologyError

COMPLETE = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_all_variables_place_the_process():
    assert Topology.from_env(COMPLETE) == Topology(5, 8, 1, 4, launched=True)


def test_a_launcher_may_start_a_single_process():
    one = (
        COMPLETE
        | dict.fromkeys(("RANK", "LOCAL_RANK"), "0")
        | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
    )
    assert Topology.from_env(one) == Topology(launched=True)


def test_without_variables_the_process_is_alone():
    assert Topology.from_env({}) == Topology(0, 1, 0, 1, launched=False)


def test_the_address_alone_places_nobody():
    assert not Topology.from_env({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}).launched


@pytest.mark.parametrize("missing", COMPLETE)
@pytest.mark.parametrize("how", ["absent", "empty"])
def test_a_part_of_the_variables_is_an_error_that_names_the_missing_one(missing, how):
    others = {name: value for name, value in COMPLETE.items() if name != missing}
    with pytest.raises(TopologyError, match=f"are incomplete: .*{missing}.* missing"):
        Topology.from_env(others if how == "absent" else others | {missing: ""})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("text", ["two", "-1", "1.0", "\u0663"])
def test_what_is_no_whole_number_is_an_error_that_names_the_variable(name, text):
    with pytest.raises(TopologyError, match=f"Invalid {name}='{text}': expected a whole number"):
        Topology.from_env(COMPLETE | {name: text})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"RANK": "8"}, "RANK=8: with WORLD_SIZE=8"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4: with LOCAL_WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9: it is larger than WORLD_SIZE=8"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0: with WORLD_SIZE=0"),
    ],
)
def test_a_rank_outside_its_world_is_an_error(wrong, message):
    with pytest.raises(TopologyError, match=message):
        Topology.from_env(COMPLETE | wrong)
