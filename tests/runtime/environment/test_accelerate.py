"""Variables of Accelerate's launcher are applied, rejected, or reported as variables without effect."""

from __future__ import annotations

import os
from unittest.mock import patch

import pytest
from support.cases.log_messages import collect_messages
from torch import nn

from accel_runtime import Accelerator, GradientAccumulationPlugin, TorchDynamoPlugin
from accel_runtime.accelerator.description import OptionFacts
from accel_runtime.environment.settings import Settings, SettingsError, accelerate_variables, flatten_settings

USUAL = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_USE_CPU": "False",
    "ACCELERATE_DEBUG_MODE": "false",
    "ACCELERATE_CPU_AFFINITY": "0",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
}
"""Variables that `accelerate launch` always sets."""
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "1",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_AUTO_WRAP_POLICY": "None",
    "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_FORWARD_PREFETCH": "False",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "False",
    "FSDP_SYNC_MODULE_STATES": "True",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
}
"""Variables that it sets for FSDP with default options."""
SIZES = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
    "PARALLELISM_CONFIG_TP_SIZE": "1",
    "PARALLELISM_CONFIG_CP_SIZE": "1",
    "PARALLELISM_CONFIG_CP_BACKEND": "torch",
    "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "allgather",
    "PARALLELISM_CONFIG_SP_SIZE": "1",
    "PARALLELISM_CONFIG_SP_BACKEND": "deepspeed",
}
SHARDED = {"parallel_dp_shard": "auto"}
TWO_NODES = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}


def read_changed_settings(environ):
    """Return the settings that differ from the defaults."""
    usual = dict(flatten_settings(Settings()))
    return {
        name: value for name, value in flatten_settings(Settings.from_env(environ)) if value != usual[name]
    }


@pytest.mark.parametrize(
    ("environ", "settings"),
    [
        ({}, {}),
        (USUAL, {}),
        (USUAL | {"ACCELERATE_MIXED_PRECISION": "bf16"}, {"mixed_precision": "bf16"}),
        ({"ACCELERATE_MIXED_PRECISION": "FP16", "USE_FP16": "0"}, {"mixed_precision": "fp16"}),
        ({"ACCELERATE_USE_CPU": "yes"}, {"device": "cpu"}),
        ({"ACCELERATE_TORCH_DEVICE": "cuda"}, {"device": "cuda"}),
        ({"ACCELERATE_LOG_LEVEL": "INFO"}, {"log_level": "info"}),
        (FSDP, SHARDED),
        (FSDP | {"ACCELERATE_USE_FSDP": "false"}, {}),
        (FSDP | {"FSDP_SHARDING_STRATEGY": "2"}, SHARDED | {"fully_shard_reshard_after_forward": False}),
        (FSDP | {"FSDP_SHARDING_STRATEGY": "NO_SHARD"}, {}),
        (FSDP | {"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, SHARDED),
        (
            FSDP | TWO_NODES | {"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD_ZERO2"},
            SHARDED | {"parallel_dp_replicate": 2, "fully_shard_reshard_after_forward": False},
        ),
        (
            FSDP | {"FSDP_RESHARD_AFTER_FORWARD": "SHARD_GRAD_OP"},
            SHARDED | {"fully_shard_reshard_after_forward": False},
        ),
        (FSDP | {"FSDP_SHARDING_STRATEGY": "NO_SHARD", "FSDP_RESHARD_AFTER_FORWARD": "SHARD_GRAD_OP"}, {}),
        (
            FSDP | {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"},
            SHARDED | {"fully_shard_reshard_after_forward": False},
        ),
        (FSDP | {"FSDP_OFFLOAD_PARAMS": "true"}, SHARDED | {"fully_shard_cpu_offload": True}),
        (
            FSDP | {"FSDP_ACTIVATION_CHECKPOINTING": "true"},
            SHARDED | {"fully_shard_activation_checkpointing": True},
        ),
        (FSDP | {"FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}, SHARDED | {"fully_shard_wrap": "none"}),
        (FSDP | {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}, SHARDED | {"fully_shard_wrap": "100000000"}),
        (FSDP | {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}, SHARDED),
        (
            FSDP
            | {
                "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
                "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block, Head",
            },
            SHARDED | {"fully_shard_wrap": "Block,Head"},
        ),
        (
            FSDP | {"FSDP_IGNORED_MODULES": "layers.*.norm"},
            SHARDED | {"fully_shard_ignore": ("layers.*.norm",)},
        ),
        (
            FSDP | {"FSDP_IGNORED_MODULES": "lm_head|model.norm"},
            SHARDED | {"fully_shard_ignore": ("lm_head", "model.norm")},
        ),
        (SIZES, {"parallel_dp_shard": 2}),
        (FSDP | SIZES | {"PARALLELISM_CONFIG_TP_SIZE": "2"}, {"parallel_dp_shard": 2, "parallel_tp": 2}),
        (
            FSDP | SIZES | {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "1", "PARALLELISM_CONFIG_CP_SIZE": "2"},
            SHARDED | {"parallel_cp": 2},
        ),
        (
            SIZES | {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "1", "PARALLELISM_CONFIG_CP_SIZE": "2"},
            {"parallel_cp": 2},
        ),
    ],
)
def test_a_supported_variable_of_accelerate_changes_its_setting(environ, settings):
    assert read_changed_settings(environ) == settings
    assert accelerate_variables(environ).idle == () or environ.get("ACCELERATE_USE_FSDP") == "false"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"ACCELERATE_MIXED_PRECISION": "fp8"},
            "'fp8': expected one of no, bf16, fp16. Set ACCEL_MIXED_PRECISION to bf16",
        ),
        ({"ACCELERATE_TORCH_DEVICE": "cuda:1"}, "Choose one of several devices with CUDA_VISIBLE_DEVICES"),
        ({"ACCELERATE_LOG_LEVEL": "loud"}, "Invalid ACCELERATE_LOG_LEVEL 'loud': expected one of debug"),
        ({"ACCELERATE_USE_FSDP": "maybe"}, "Invalid ACCELERATE_USE_FSDP 'maybe': expected one of 1, true"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "set ACCEL_PARALLEL_TP"),
        (
            # As a launch with a config file of Ulysses sets them.
            SIZES
            | {
                "ACCELERATE_USE_DEEPSPEED": "true",
                "PARALLELISM_CONFIG_SP_SIZE": "2",
                "ACCEL_DEEPSPEED_STAGE": "no",
                "ACCEL_PARALLEL_DP_SHARD": "1",
            },
            "PARALLELISM_CONFIG_SP_SIZE=2 is not supported",
        ),
        ({"ACCELERATE_DOWNCAST_BF16": "true"}, "set ACCEL_MIXED_PRECISION=bf16"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "four"}, "'four': expected a whole number"),
        (
            FSDP | {"FSDP_SHARDING_STRATEGY": "SOME"},
            "Invalid FSDP_SHARDING_STRATEGY 'SOME': expected one of FULL_SHARD, SHARD_GRAD_OP, ",
        ),
        (
            FSDP | {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "SOME"},
            "Invalid FSDP_RESHARD_AFTER_FORWARD 'SOME': expected true, false or one of FULL_SHARD, ",
        ),
        (
            FSDP | {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "a b"},
            "^Invalid FSDP_TRANSFORMER_CLS_TO_WRAP 'a b'",
        ),
        (FSDP | {"FSDP_IGNORED_MODULES": r"(norm|head)$"}, "list the names in ACCEL_FULLY_SHARD_IGNORE"),
        (SIZES | {"PARALLELISM_CONFIG_SP_SIZE": "2"}, "PARALLELISM_CONFIG_SP_SIZE=2 is not supported"),
    ],
)
def test_an_unsupported_variable_is_rejected_with_the_variable_to_set_instead(environ, message):
    with pytest.raises(SettingsError, match=message):
        Settings.from_env(environ)


@pytest.mark.parametrize("name", ["ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"])
def test_an_engine_of_accelerate_is_refused_under_a_launch_that_shards_nothing(name):
    with pytest.raises(SettingsError, match=f"{name}=true is not supported"):
        Settings.from_env({**Settings().to_env(), name: "true"})


@pytest.mark.parametrize(
    ("environ", "settings", "idle"),
    [
        (
            {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCEL_MIXED_PRECISION": "no"},
            {},
            "ACCELERATE_MIXED_PRECISION=bf16 has no effect: accel's own variable for mixed_precision is 'no'",
        ),
        (
            {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCEL_MIXED_PRECISION": "bf16"},
            {"mixed_precision": "bf16"},
            "",
        ),
        (
            {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCEL_MIXED_PRECISION": "no"},
            {},
            "ACCELERATE_MIXED_PRECISION=fp8",
        ),
        (FSDP | {"ACCEL_PARALLEL_DP_SHARD": "1"}, {}, "ACCELERATE_USE_FSDP, FSDP_"),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCEL_PARALLEL_DP_SHARD": "auto"},
            {"parallel_dp_shard": "auto"},
            "ACCELERATE_USE_DEEPSPEED: no effect",
        ),
    ],
)
def test_variables_of_accel_take_precedence_and_the_unused_ones_are_reported(environ, settings, idle):
    assert read_changed_settings(environ) == settings
    assert " ".join(accelerate_variables(environ).idle).startswith(idle)


@pytest.mark.parametrize(
    ("environ", "idle"),
    [
        (
            {"ACCELERATE_USE_CPU": "1", "ACCELERATE_TORCH_DEVICE": "cuda"},
            "ACCELERATE_TORCH_DEVICE: no effect here.",
        ),
        (
            {"FSDP_SHARDING_STRATEGY": "FULL_SHARD", "ACCELERATE_CPU_AFFINITY": "1"},
            "ACCELERATE_CPU_AFFINITY, FSDP_SHARDING",
        ),
        (
            FSDP | {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"},
            "FSDP_CPU_RAM_EFFICIENT_LOADING=true has no effect",
        ),
        (
            FSDP | {"FSDP_BACKWARD_PREFETCH": "NO_PREFETCH"},
            "FSDP_BACKWARD_PREFETCH=NO_PREFETCH has no effect",
        ),
        (
            SIZES | {"PARALLELISM_CONFIG_CP_SIZE": "2", "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "alltoall"},
            "PARALLELISM_CONFIG_CP_COMM",
        ),
        (
            {"ACCELERATE_NEW": "1", "FSDP_OF_SOMETHING_ELSE": "1", "ACCELERATE_ENABLE_RICH": "1"},
            "ACCELERATE_NEW: no effect here.",
        ),
    ],
)
def test_a_variable_without_effect_is_reported(environ, idle):
    assert " ".join(accelerate_variables(environ).idle).startswith(idle)


def test_the_command_line_ignores_variables_of_accelerate():
    assert Settings.from_env({"ACCELERATE_MIXED_PRECISION": "bf16"}, accelerate=False) == Settings()


# In a script -------------------------------------------------------------------------------


def list_origins(accelerator):
    return {
        name: (option.value, option.origin)
        for name, option in accelerator.describe().options.items()
        if option.origin.startswith(("ACCELERATE", "FSDP"))
    }


def test_the_profile_accumulates_and_compiles_unless_the_script_says_otherwise(monkeypatch):
    for name, value in {
        "ACCEL_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCEL_COMPILE_BACKEND": "eager",
        "ACCEL_COMPILE_MODE": "max-autotune",
        "ACCEL_COMPILE_REGIONAL": "1",
    }.items():
        monkeypatch.setenv(name, value)
    accelerator = Accelerator()
    assert accelerator.gradient_accumulation_steps == 4
    plugin = TorchDynamoPlugin("eager", "max-autotune", use_regional_compilation=True)
    assert accelerator._run.options.dynamo == plugin
    options = accelerator.describe().options
    assert options["gradient_accumulation_steps"] == OptionFacts(4, "ACCEL_GRADIENT_ACCUMULATION_STEPS")
    assert options["compile_regional"] == OptionFacts(True, "ACCEL_COMPILE_REGIONAL")
    accelerator = Accelerator(gradient_accumulation_steps=2, dynamo_backend="no")
    assert (accelerator.gradient_accumulation_steps, accelerator._run.options.dynamo.name) == (2, "no")
    options = accelerator.describe().options
    assert options["gradient_accumulation_steps"] == OptionFacts(2, "argument")
    assert options["compile_backend"] == OptionFacts("no", "argument")


def test_describe_names_the_variable_as_the_origin_of_an_option(monkeypatch):
    for name, value in {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_DYNAMO_BACKEND": "EAGER",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "True",
    }.items():
        monkeypatch.setenv(name, value)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("bf16", 4)
    assert accelerator._run.options.dynamo == TorchDynamoPlugin("eager", dynamic=True)
    assert list_origins(accelerator) == {
        "mixed_precision": ("bf16", "ACCELERATE_MIXED_PRECISION"),
        "gradient_accumulation_steps": ("4", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
        "compile_backend": ("eager", "ACCELERATE_DYNAMO_BACKEND"),
        "compile_dynamic": (True, "ACCELERATE_DYNAMO_USE_DYNAMIC"),
    }
    assert "gradient_accumulation_steps = 4 (ACCELERATE_GRADIENT_ACCUMULATION_STEPS)" in str(
        accelerator.describe()
    )
    accelerator = Accelerator(
        mixed_precision="no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(3),
        dynamo_backend="no",
    )
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("no", 3)
    assert accelerator._run.options.dynamo.name == "no"
    assert list_origins(accelerator) == {}


def test_the_first_process_reports_a_variable_without_effect_once(pair):
    def collect_reports():
        environ = patch.dict(os.environ, {"ACCELERATE_FOR_THIS_TEST": "1"})
        with collect_messages("accel_runtime.environment") as messages, environ:
            Accelerator(), Accelerator()
        return messages

    assert pair.run(collect_reports) == [["ACCELERATE_FOR_THIS_TEST: no effect here."], []]


def test_fsdp_variables_of_accelerate_launch_shard_the_model(pair):
    def shard_model():
        with patch.dict(os.environ, FSDP | {"ACCELERATE_MIXED_PRECISION": "no"}):
            accelerator = Accelerator()
            model = accelerator.prepare(nn.Linear(4, 4))
            return (
                accelerator.is_fsdp2,
                list_origins(accelerator)["parallel_dp_shard"],
                model.weight.to_local().shape[0],
            )

    assert pair.run(shard_model) == [(True, ("auto", "ACCELERATE_USE_FSDP"), 2)] * 2
