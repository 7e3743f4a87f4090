"""The environment variables between launcher and script."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_runtime.environment.layouts import STYLES
from accel_runtime.environment.settings import (
    EARLY_FP16,
    HOME,
    PREFIX,
    PROFILE,
    Device,
    FullyShard,
    LogLevel,
    MixedPrecision,
    Number,
    Parallel,
    ProcessGroupBackend,
    Settings,
    SettingsError,
    flatten_settings,
    is_placed_by_device,
    variable_name,
)

sizes = st.integers(1, 99)
names = st.from_regex(r"[A-Za-z_*][A-Za-z0-9_.*]*", fullmatch=True)
numbers = st.sampled_from(get_args(Number))
every_parallel = st.builds(
    lambda form, size, **others: Parallel(**{form: size}, **others),
    st.sampled_from(["cp", "sp"]),
    sizes,
    dp_replicate=sizes,
    dp_shard=sizes | st.just("auto"),
    tp=sizes,
    tp_plan=st.lists(st.tuples(names, st.sampled_from(STYLES)), max_size=3).map(tuple),
)
every_fully_shard = st.builds(
    FullyShard,
    wrap=st.sampled_from(["auto", "none", "1", "100000000", "Block", "Block,Größe_2"]),
    reshard_after_forward=st.booleans() | st.integers(2, 99),
    param_dtype=numbers,
    reduce_dtype=numbers,
    output_dtype=numbers,
    cast_forward_inputs=st.booleans(),
    cpu_offload=st.booleans(),
    activation_checkpointing=st.booleans(),
    ignore=st.lists(names, max_size=3).map(tuple),
)
every_settings = st.builds(
    Settings,
    device=st.sampled_from(get_args(Device)),
    mixed_precision=st.sampled_from(get_args(MixedPrecision)),
    process_group_backend=st.sampled_from(get_args(ProcessGroupBackend)),
    process_group_timeout=st.integers(min_value=1),
    log_level=st.sampled_from(get_args(LogLevel)),
    spmd=st.booleans(),
    resume=st.booleans(),
    shared_files=st.booleans(),
    node_dir=st.sampled_from(["", "/local/checkpoints"]),
    store_every=st.integers(min_value=1),
    store_timeout=st.integers(min_value=1),
    parallel=every_parallel,
    fully_shard=every_fully_shard,
)


@given(every_settings)
def test_settings_are_equal_after_writing_and_reading(settings):
    assert Settings.from_env(settings.to_env()) == settings


@given(every_settings)
def test_each_setting_is_written_to_a_variable_with_the_prefix(settings):
    written = settings.to_env()
    assert len(written) == len(flatten_settings(settings))
    assert all(name.startswith(PREFIX) for name in written)


@given(every_settings)
def test_the_launcher_overrides_the_early_fp16_variable(settings):
    assert Settings.from_env(settings.to_env() | {EARLY_FP16: "yes"}) == settings


@given(every_settings)
def test_each_setting_has_its_own_variable(settings):
    names = [variable_name(name) for name, _ in flatten_settings(settings)]
    assert len({*names}) == len(names)
    assert {"ACCEL_PARALLEL_TP_PLAN", "ACCEL_FULLY_SHARD_WRAP"} <= {*names}


def test_a_setting_without_a_variable_keeps_its_default():
    assert Settings.from_env({}) == Settings()
    assert Settings.from_env({"ACCEL_DEVICE": "cpu"}) == Settings(device="cpu")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ACCEL_DEVICE", "gpu"),
        ("ACCEL_DEVICE", "CPU"),
        ("ACCEL_DEVICE", ""),
        ("ACCEL_MIXED_PRECISION", "fp8"),
        ("ACCEL_LOG_LEVEL", "loud"),
        ("ACCEL_PROCESS_GROUP_BACKEND", "mpi"),
        ("ACCEL_PROCESS_GROUP_TIMEOUT", "0"),
        ("ACCEL_PROCESS_GROUP_TIMEOUT", "-5"),
        ("ACCEL_PROCESS_GROUP_TIMEOUT", "1.5"),
        ("ACCEL_PROCESS_GROUP_TIMEOUT", "ten"),
        ("ACCEL_PROCESS_GROUP_TIMEOUT", "\u0663"),  # a digit, but not one of ours
        ("ACCEL_PARALLEL_TP", "0"),
        ("ACCEL_PARALLEL_TP", "auto"),
        ("ACCEL_PARALLEL_DP_SHARD", "all"),
        ("ACCEL_PARALLEL_TP_PLAN", "colwise"),
        ("ACCEL_PARALLEL_TP_PLAN", "a=b,=c"),
        ("ACCEL_FULLY_SHARD_WRAP", "0"),
        ("ACCEL_FULLY_SHARD_WRAP", ""),
        ("ACCEL_FULLY_SHARD_WRAP", "Block, Other"),
        ("ACCEL_FULLY_SHARD_WRAP", "Block,auto"),
        ("ACCEL_FULLY_SHARD_PARAM_DTYPE", "float32"),
        ("ACCEL_FULLY_SHARD_CPU_OFFLOAD", "cpu"),
        ("ACCEL_FULLY_SHARD_RESHARD_AFTER_FORWARD", "-2"),
        ("USE_FP16", "perhaps"),
    ],
)
def test_an_invalid_value_is_an_error_with_the_variable_and_the_value(name, value):
    with pytest.raises(SettingsError, match=f"^Invalid {name} ") as caught:
        Settings.from_env({name: value})
    assert value.split(",")[-1] in str(caught.value)


@pytest.mark.parametrize(
    "name", [*(variable_name(name) for name, _ in flatten_settings(Settings())), HOME, PROFILE]
)
def test_a_misspelled_variable_is_rejected_with_a_suggestion(name):
    misspelled = name[:-2] + name[-2] + name[-2:]
    with pytest.raises(SettingsError, match=rf"{misspelled} is not .* did you mean {name}\?"):
        Settings.from_env({misspelled: "cpu"})


@pytest.mark.parametrize("name", ["ACCEL_FOO", "ACCEL_MODE", "ACCEL_RUN_NAME", "ACCELERATE_DEVIC", "DEVIC"])
def test_variables_of_other_programs_are_ignored(name):
    assert Settings.from_env({name: "x"}) == Settings()


def test_variables_that_only_the_launcher_reads_are_ignored():
    assert Settings.from_env({HOME: "/somewhere", PROFILE: "work"}) == Settings()


@pytest.mark.parametrize(("text", "means"), [("1", "fp16"), ("True", "fp16"), ("no", "no"), ("", "no")])
def test_the_early_fp16_variable_enables_fp16(text, means):
    assert Settings.from_env({EARLY_FP16: text}).mixed_precision == means


@pytest.mark.parametrize(
    ("environ", "device"),
    [
        ({"PJRT_DEVICE": "TPU"}, "xla"),
        ({"PJRT_DEVICE": "TPU", "ACCEL_DEVICE": "auto"}, "xla"),
        ({"PJRT_DEVICE": "TPU", "ACCEL_DEVICE": "cpu"}, "cpu"),
        ({"PJRT_DEVICE": ""}, "auto"),
        ({"ACCEL_DEVICE": "xla"}, "xla"),
        ({}, "auto"),
    ],
)
def test_the_variable_of_torch_xla_selects_xla_unless_a_device_is_set(environ, device):
    assert Settings.from_env(environ).device == device
    assert is_placed_by_device(environ) is (device == "xla")
