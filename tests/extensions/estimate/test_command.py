"""Layouts of an estimate as profile keys, as text, and advice if none fits."""

import pytest

from accel_cli.errors import AccelError
from accel_cli.extensions.estimate.command import (
    EstimateRequest,
    _build_profile_keys,
    _compute_layouts,
    _describe_layout,
    _format_no_fit,
)

LAYOUT = {
    "dp_replicate": 1, "dp_shard": 4, "tp": 1, "devices": 4, "sharded": True, "wrapped": True,
    "reshard_after_forward": True, "activation_checkpointing": False,
}  # fmt: skip


def test_a_sharded_layout_is_described_with_its_options():
    assert _describe_layout(LAYOUT) == "dp_shard 4, reshard"
    assert _build_profile_keys(LAYOUT, "Block,Head") == {
        "parallel.dp_replicate": 1, "parallel.dp_shard": 4, "parallel.tp": 1, "parallel.cp": None, "parallel.sp": None, "parallel.tp_plan": None,
        "fully_shard.wrap": "Block,Head", "fully_shard.reshard_after_forward": True,
        "fully_shard.activation_checkpointing": False,
    }  # fmt: skip
    assert _build_profile_keys(LAYOUT, "1000000")["fully_shard.wrap"] == 1000000


def test_activation_checkpointing_on_one_device_sets_dp_shard_to_auto():
    layout = LAYOUT | {"dp_shard": 1, "devices": 1, "activation_checkpointing": True}
    assert _describe_layout(layout) == "dp_shard auto, checkpointing, reshard"
    assert _build_profile_keys(layout, "auto")["parallel.dp_shard"] == "auto"


def test_a_replicated_layout_removes_all_options_of_sharding():
    layout = LAYOUT | {"dp_replicate": 4, "dp_shard": 1, "sharded": False, "wrapped": False}
    keys = _build_profile_keys(layout, "auto")
    assert {key for key, value in keys.items() if value is None} >= {
        "fully_shard.wrap",
        "fully_shard.cpu_offload",
    }
    assert _describe_layout(layout) == "dp_replicate 4"
    assert _describe_layout(layout | {"dp_replicate": 1}) == "full model"


def test_a_tensor_parallel_layout_keeps_its_plan_and_can_use_checkpointing():
    layout = LAYOUT | {
        "dp_shard": 1, "tp": 4, "sharded": False, "wrapped": False, "activation_checkpointing": True
    }  # fmt: skip
    keys = _build_profile_keys(layout, "auto")
    assert "parallel.tp_plan" not in keys
    assert (keys["fully_shard.activation_checkpointing"], keys["fully_shard.reshard_after_forward"]) == (
        True,
        None,
    )
    assert _describe_layout(layout) == "tp 4, checkpointing"


@pytest.mark.parametrize(
    ("largest", "advice"),
    [
        ("activations", "smaller --batch-size"),
        ("optimizer", "more devices, or an optimizer"),
        ("working", "--wrap CLASS"),
    ],
)
def test_advice_for_no_fitting_layout_depends_on_the_largest_part(largest, advice):
    sizes = dict.fromkeys(("parameters", "gradients", "optimizer", "working", "total"), 1) | {
        "activations": None,
        largest: 9,
    }
    estimate = {
        "layouts": [LAYOUT | {"bytes": sizes}],
        "leanest": 0,
        "devices": 4,
        "wrapped": [],
        "usable": 1,
        "memory": 2,
    }
    assert advice in _format_no_fit(estimate)


def test_a_failed_child_process_of_an_estimate_is_an_error(monkeypatch):
    monkeypatch.setattr("sys.executable", "false")
    with pytest.raises(AccelError, match="Cannot estimate m:f: the child process ended with exit code 1"):
        _compute_layouts(EstimateRequest(target="m:f"))
