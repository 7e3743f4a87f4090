"""Each key of DeepSpeed's JSON file is passed to its engine, honoured by accel, or refused; needs no deepspeed."""

from __future__ import annotations

import pytest
from torch import nn

from accel_runtime.extensions.deepspeed.configuration import (
    _PASSED,
    build_configuration,
    describe_configuration,
)
from accel_runtime.extensions.deepspeed.settings import (
    KEYS,
    REFUSED,
    SECTIONS,
    DeepSpeed,
    DeepSpeedConfig,
    resolve_deepspeed,
)

pytestmark = pytest.mark.usefixtures("on_the_cpu")

HONOURED = {
    "train_batch_size": "check_batch_sizes",
    "train_micro_batch_size_per_gpu": "check_batch_sizes",
    "gradient_accumulation_steps": "Accumulation",
    "gradient_clipping": "DeepSpeedStrategy.step",
    "steps_per_print": "nothing is printed: the launcher shows progress",
    "zero_allow_untested_optimizer": "refuse_optimizer",
    "fp16": "Precision and LossScale",
    "bf16": "Precision",
    "bfloat16": "bf16",
    "optimizer": "build_optimizer",
    "scheduler": "build_scheduler",
    "activation_checkpointing": "refused key by key; number_checkpoints alone has no effect",
}
"""Keys that accel honours itself, and where."""


def test_each_key_is_passed_to_deepspeed_or_honoured_by_accel():
    known = {path.partition(".")[0] for path in (*KEYS, *SECTIONS)}
    assert known == {*_PASSED, *HONOURED}
    assert not {*_PASSED} & {*HONOURED}
    assert not known & {*REFUSED}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_the_configuration_of_an_engine_has_no_clipping_accumulation_or_auto_values(stage, precision):
    values = {
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": "auto",
            "elastic_checkpoint": True,
            "overlap_comm": True,
        },
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": 4,
        "train_batch_size": "auto",
        "bf16": {"enabled": "auto", "check_grad_overflow": False},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "disable_python_gc": True,
    }
    found = build_configuration(DeepSpeedConfig(values), nn.Linear(1, 1), precision)
    assert (found["gradient_clipping"], found["gradient_accumulation_steps"]) == (0.0, 1)
    assert (found["train_micro_batch_size_per_gpu"], found["disable_python_gc"]) == (1, True)
    assert found["bf16"] == {"enabled": precision == "bf16", "check_grad_overflow": False}
    assert found["fp16"]["enabled"] == (precision == "fp16")
    assert found["zero_optimization"] == {"stage": stage, "overlap_comm": stage > 1}
    assert not {"optimizer", "train_batch_size"} & found.keys()
    in_fp32 = {"grad_accum_dtype": "fp32"} if precision != "no" and stage > 1 else None
    assert found.get("data_types") == in_fp32


def test_bucket_sizes_that_are_auto_are_those_of_accelerate():
    model = nn.Linear(1, 1)
    model.config = type("Config", (), {"hidden_size": 10})
    zero = dict.fromkeys(
        ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
    )
    found = build_configuration(DeepSpeedConfig({"zero_optimization": {"stage": 3, **zero}}), model, "no")
    assert [found["zero_optimization"][key] for key in zero] == [100, 90, 100]


def test_gradients_of_stage_1_cannot_have_another_number_format():
    file = {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}
    config = resolve_deepspeed(DeepSpeed("auto", "ds.json"), file)
    build_configuration(config, nn.Linear(1, 1), "no")
    with pytest.raises(
        ValueError, match=r"grad_accum_dtype is fp32 in ds.json, and ZeRO stage 1 .*Use stage 2"
    ):
        build_configuration(config, nn.Linear(1, 1), "bf16")


def test_an_option_without_effect_in_stage_1_is_described_as_such():
    file = {"zero_optimization": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 9}}
    facts = describe_configuration(resolve_deepspeed(DeepSpeed("auto", "ds.json"), file), {}, {})
    assert facts["zero_optimization.overlap_comm"] == (
        False,
        "True in ds.json: stage 1 reduces gradients once, when they are complete",
    )
    assert facts["zero_optimization.reduce_bucket_size"] == (9, "ds.json")
