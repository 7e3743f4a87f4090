"""The variables of Accelerate say what the settings of a launch say, and the user's own variables stay."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_runtime.environment.accelerate import encode_variables
from accel_runtime.environment.accelerate.export import build_export, read_user_variables
from accel_runtime.environment.layouts import FullyShard, Parallel
from accel_runtime.environment.settings import (
    EXPORTED,
    Compile,
    Settings,
    accelerate_variables,
    flatten_settings,
)
from accel_runtime.extensions.deepspeed.settings import DeepSpeed

SHARDED = Settings(parallel=Parallel(dp_shard="auto"))
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
}


def export(settings, device="cuda", world_size=4, environ=None):
    return build_export(settings, device, world_size, environ or {}, read_user_variables(environ or {}))


@pytest.mark.parametrize(
    ("settings", "device", "variables"),
    [
        (Settings(), "cuda", {}),
        (Settings(), "cpu", {"ACCELERATE_USE_CPU": "true"}),
        (Settings(mixed_precision="bf16"), "cuda", {"ACCELERATE_MIXED_PRECISION": "bf16"}),
        (Settings(log_level="debug"), "cuda", {"ACCELERATE_LOG_LEVEL": "debug"}),
        (
            Settings(gradient_accumulation_steps=8),
            "cuda",
            {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8"},
        ),
        (
            Settings(compile=Compile("inductor", "max-autotune", dynamic=False, regional=True)),
            "cuda",
            {
                "ACCELERATE_DYNAMO_BACKEND": "inductor",
                "ACCELERATE_DYNAMO_MODE": "max-autotune",
                "ACCELERATE_DYNAMO_USE_FULLGRAPH": "false",
                "ACCELERATE_DYNAMO_USE_DYNAMIC": "false",
                "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true",
            },
        ),
        (SHARDED, "cuda", FSDP2),
        (
            replace(
                SHARDED,
                fully_shard=FullyShard(
                    wrap="Block,Head",
                    reshard_after_forward=False,
                    cpu_offload=True,
                    activation_checkpointing=True,
                    ignore=("embed.*.weight", "head"),
                ),
            ),
            "cuda",
            FSDP2
            | {
                "FSDP_RESHARD_AFTER_FORWARD": "false",
                "FSDP_OFFLOAD_PARAMS": "true",
                "FSDP_ACTIVATION_CHECKPOINTING": "true",
                "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block,Head",
                "FSDP_IGNORED_MODULES": r"embed\.[^.]*\.weight|head",
            },
        ),
        (
            replace(SHARDED, fully_shard=FullyShard(wrap="1000")),
            "cuda",
            FSDP2 | {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "1000"},
        ),
        (
            replace(SHARDED, fully_shard=FullyShard(wrap="none")),
            "cuda",
            FSDP2 | {"FSDP_AUTO_WRAP_POLICY": "NO_WRAP"},
        ),
        (
            Settings(parallel=Parallel(dp_shard="auto", tp=2)),
            "cuda",
            FSDP2
            | {
                "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
                "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1",
                "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
                "PARALLELISM_CONFIG_TP_SIZE": "2",
                "PARALLELISM_CONFIG_CP_SIZE": "1",
            },
        ),
    ],
)
def test_each_setting_becomes_the_variables_of_accelerate(settings, device, variables):
    assert export(settings, device).variables == variables


SETTINGS = st.builds(
    Settings,
    mixed_precision=st.sampled_from(["no", "bf16", "fp16"]),
    log_level=st.sampled_from(["auto", "debug"]),
    compile=st.builds(
        Compile, st.just("inductor"), dynamic=st.sampled_from(["auto", True]), fullgraph=st.booleans()
    )
    | st.just(Compile()),
    parallel=st.builds(Parallel, dp_shard=st.sampled_from([1, "auto"]), dp_replicate=st.sampled_from([1, 2])),
)


def count_processes(settings):
    return 4 if settings.parallel.shards else settings.parallel.dp_replicate


@given(SETTINGS)
def test_the_exported_variables_mean_the_same_settings(settings):
    exported = export(settings, world_size=count_processes(settings))
    user = read_user_variables(exported.variables)
    names = user.names
    found, expected, default = (
        dict(flatten_settings(each)) for each in (user.settings, settings, Settings())
    )
    changed = {name for name, value in expected.items() if value != default[name]}
    assert changed <= names.keys() | {"parallel_dp_shard"}
    # With a mesh, the number of shards is counted.
    assert all(found[name] == expected[name] for name in names if name != "parallel_dp_shard")
    assert (user.settings.parallel.shards) == settings.parallel.shards


@given(SETTINGS)
def test_our_own_runtime_ignores_the_variables_of_its_launcher(settings):
    variables = export(settings, world_size=count_processes(settings)).variables
    environ = {**settings.to_env(), **variables, EXPORTED: encode_variables(variables)}
    translation = accelerate_variables(environ)
    assert (translation.settings, translation.arguments, translation.idle) == ({}, {}, ())
    assert Settings.from_env(environ) == settings


def test_a_value_that_the_script_changes_is_its_own():
    variables = export(Settings(gradient_accumulation_steps=8)).variables
    environ = {**variables, EXPORTED: encode_variables(variables)}
    assert accelerate_variables(environ).arguments == {}
    environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "2"
    assert accelerate_variables(environ).arguments["gradient_accumulation_steps"].text == "2"


@pytest.mark.parametrize(
    ("environ", "settings"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "BF16"}, Settings(mixed_precision="bf16")),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, Settings()),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
            Settings(engines=(DeepSpeed("3", zero3_init=True),)),
        ),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "FULL_SHARD"},
            SHARDED,
        ),
    ],
    ids=["precision", "fp8", "DeepSpeed", "FSDP1"],
)
def test_variables_of_the_user_that_mean_the_settings_stay_as_they_are(environ, settings):
    assert export(settings, environ=environ).variables == {}


def test_an_option_that_replaces_a_variable_of_the_user_is_reported():
    exported = export(Settings(), environ={"ACCELERATE_MIXED_PRECISION": "bf16"})
    assert exported.variables == {"ACCELERATE_MIXED_PRECISION": "no"}
    assert exported.replaced == ("ACCELERATE_MIXED_PRECISION=bf16 of the environment is replaced by 'no'.",)


def test_a_launch_inside_a_launch_replaces_the_variables_of_the_outer_one_silently():
    outer = export(Settings(mixed_precision="bf16"), "cpu").variables
    exported = export(Settings(), environ={**outer, EXPORTED: encode_variables(outer)})
    assert exported.variables == {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "false"}
    assert exported.replaced == ()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(parallel=Parallel(tp=4, tp_plan=(("a", "colwise"),))), "parallel.tp_plan has no effect"),
        (Settings(process_group_timeout=60), "process_group_timeout: 60 has no effect"),
        (Settings(process_group_backend="gloo"), "process_group_backend: gloo has no effect"),
        (Settings(parallel=Parallel(cp=4)), "Set parallel.dp_shard: auto"),
        (Settings(parallel=Parallel(sp=4)), "parallel.sp: 4 has no effect"),
        (Settings(parallel=Parallel(sp=4, tp=2)), "the section parallel has no effect"),
        (
            replace(SHARDED, fully_shard=FullyShard(reduce_dtype="bf16")),
            "fully_shard.reduce_dtype: bf16 has no effect",
        ),
        (replace(SHARDED, fully_shard=FullyShard(reshard_after_forward=2)), "is true in Accelerate"),
        (replace(SHARDED, fully_shard=FullyShard(cast_forward_inputs=False)), "cast_forward_inputs: false"),
    ],
)
def test_a_value_that_accelerate_does_not_have_is_a_limit(settings, words):
    (sentence,) = export(settings).limits
    assert words in sentence
    assert export(Settings()).report == ""


def test_a_resume_has_no_effect_unless_the_trainer_has_the_callback():
    exported = export(Settings(resume=True))
    assert "resume: true has no effect" in exported.resume_limit
    assert "AccelCallback" in exported.resume_limit
    assert exported.limits == ()
    assert json.loads(exported.report)["resume_limit"] == exported.resume_limit


def test_a_mesh_whose_size_is_known_only_when_the_processes_run_is_a_limit():
    exported = export(Settings(parallel=Parallel(dp_shard="auto", tp=2)), world_size=None)
    assert "PARALLELISM_CONFIG_TP_SIZE" not in exported.variables
    assert "the number of processes is not known in advance" in exported.limits[0]


def test_sharding_on_the_cpu_is_refused_and_not_exported():
    exported = export(SHARDED, "cpu")
    assert exported.variables == {"ACCELERATE_USE_CPU": "true"}
    assert exported.refusal.startswith("Cannot shard models on the CPU with Accelerate")


def test_variables_of_the_profile_are_never_changed():
    fsdp1 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1", "ACCELERATE_MIXED_PRECISION": "fp8"}
    user = read_user_variables(fsdp1, frozenset(fsdp1))
    exported = build_export(Settings(), "cuda", 2, fsdp1, user)
    assert (exported.variables, exported.replaced) == ({}, ())
    exported = build_export(Settings(), "cuda", 2, fsdp1, read_user_variables(fsdp1))
    assert exported.variables == {"ACCELERATE_USE_FSDP": "false"}
