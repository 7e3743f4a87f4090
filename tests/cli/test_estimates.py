"""A layout in the words of a profile and of a person."""

import pytest

from accel_cli.errors import AccelError
from accel_cli.estimates import ask, left_out, none_fits, said, sections

LAYOUT = {
    "dp_replicate": 1, "dp_shard": 4, "tp": 1, "devices": 4, "sharded": True, "wrapped": True,
    "reshard_after_forward": True, "activation_checkpointing": False,
}  # fmt: skip


def test_shards_are_said_with_their_options():
    assert said(LAYOUT) == "dp_shard 4, reshard"
    assert sections(LAYOUT, "Block,Head") == {
        "parallel.dp_replicate": 1, "parallel.dp_shard": 4, "parallel.tp": 1, "parallel.cp": None, "parallel.tp_plan": None,
        "fully_shard.wrap": "Block,Head", "fully_shard.reshard_after_forward": True,
        "fully_shard.activation_checkpointing": False,
    }  # fmt: skip
    assert sections(LAYOUT, "1000000")["fully_shard.wrap"] == 1000000


def test_one_device_shards_over_itself_to_have_its_activations_checkpointed():
    alone = LAYOUT | {"dp_shard": 1, "devices": 1, "activation_checkpointing": True}
    assert said(alone) == "dp_shard auto, checkpointing, reshard"
    assert sections(alone, "auto")["parallel.dp_shard"] == "auto"


def test_whole_models_take_every_option_of_shards_out():
    whole = LAYOUT | {"dp_replicate": 4, "dp_shard": 1, "sharded": False, "wrapped": False}
    found = sections(whole, "auto")
    assert {key for key, value in found.items() if value is None} >= {
        "fully_shard.wrap",
        "fully_shard.cpu_offload",
    }
    assert said(whole) == "dp_replicate 4"
    assert said(whole | {"dp_replicate": 1}) == "one whole model"


def test_divided_layers_keep_their_plan_and_may_be_checkpointed():
    divided = LAYOUT | {
        "dp_shard": 1, "tp": 4, "sharded": False, "wrapped": False, "activation_checkpointing": True
    }  # fmt: skip
    found = sections(divided, "auto")
    assert "parallel.tp_plan" not in found
    assert (found["fully_shard.activation_checkpointing"], found["fully_shard.reshard_after_forward"]) == (
        True,
        None,
    )
    assert said(divided) == "tp 4, checkpointing"


@pytest.mark.parametrize(
    ("largest", "cure"),
    [
        ("activations", "smaller --batch-size"),
        ("optimizer", "more devices, or an optimizer"),
        ("working", "--wrap CLASS"),
    ],
)
def test_where_nothing_fits_the_largest_part_has_its_cure(largest, cure):
    sizes = dict.fromkeys(("parameters", "gradients", "optimizer", "working", "total"), 1) | {
        "activations": None,
        largest: 9,
    }
    found = {
        "layouts": [LAYOUT | {"bytes": sizes}],
        "leanest": 0,
        "devices": 4,
        "wrapped": [],
        "usable": 1,
        "memory": 2,
    }
    assert cure in none_fits(found, str)


def test_a_reason_is_said_once():
    found = {"left_out": [{"tp": n, "why": f"parallel.tp={n} does not divide n_heads=3"} for n in (2, 4)]}
    assert left_out(found) == ["no layout with tp 2, 4: this does not divide n_heads=3"]


def test_a_child_without_an_answer_is_an_error(monkeypatch):
    monkeypatch.setattr("sys.executable", "false")
    with pytest.raises(
        AccelError, match="m:f could not be estimated: the process that did it ended with exit code 1"
    ):
        ask(target="m:f")
