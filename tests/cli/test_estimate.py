"""A layout in the words of a profile and of a person."""

import pytest

from accel_cli.commands.estimate import (
    EstimateRequest,
    _build_profile_keys,
    _compute_layouts,
    _describe_layout,
    _format_no_fit,
)
from accel_cli.errors import AccelError

LAYOUT = {
    "dp_replicate": 1, "dp_shard": 4, "tp": 1, "devices": 4, "sharded": True, "wrapped": True,
    "reshard_after_forward": True, "activation_checkpointing": False,
}  # fmt: skip


def test_shards_are_said_with_their_options():
    assert _describe_layout(LAYOUT) == "dp_shard 4, reshard"
    assert _build_profile_keys(LAYOUT, "Block,Head") == {
        "parallel.dp_replicate": 1, "parallel.dp_shard": 4, "parallel.tp": 1, "parallel.cp": None, "parallel.tp_plan": None,
        "fully_shard.wrap": "Block,Head", "fully_shard.reshard_after_forward": True,
        "fully_shard.activation_checkpointing": False,
    }  # fmt: skip
    assert _build_profile_keys(LAYOUT, "1000000")["fully_shard.wrap"] == 1000000


def test_one_device_shards_over_itself_to_have_its_activations_checkpointed():
    alone = LAYOUT | {"dp_shard": 1, "devices": 1, "activation_checkpointing": True}
    assert _describe_layout(alone) == "dp_shard auto, checkpointing, reshard"
    assert _build_profile_keys(alone, "auto")["parallel.dp_shard"] == "auto"


def test_whole_models_take_every_option_of_shards_out():
    whole = LAYOUT | {"dp_replicate": 4, "dp_shard": 1, "sharded": False, "wrapped": False}
    found = _build_profile_keys(whole, "auto")
    assert {key for key, value in found.items() if value is None} >= {
        "fully_shard.wrap",
        "fully_shard.cpu_offload",
    }
    assert _describe_layout(whole) == "dp_replicate 4"
    assert _describe_layout(whole | {"dp_replicate": 1}) == "full model"


def test_divided_layers_keep_their_plan_and_may_be_checkpointed():
    divided = LAYOUT | {
        "dp_shard": 1, "tp": 4, "sharded": False, "wrapped": False, "activation_checkpointing": True
    }  # fmt: skip
    found = _build_profile_keys(divided, "auto")
    assert "parallel.tp_plan" not in found
    assert (found["fully_shard.activation_checkpointing"], found["fully_shard.reshard_after_forward"]) == (
        True,
        None,
    )
    assert _describe_layout(divided) == "tp 4, checkpointing"


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
    assert cure in _format_no_fit(found)


def test_a_child_without_an_answer_is_an_error(monkeypatch):
    monkeypatch.setattr("sys.executable", "false")
    with pytest.raises(AccelError, match="Cannot estimate m:f: the child process ended with exit code 1"):
        _compute_layouts(EstimateRequest(target="m:f"))
