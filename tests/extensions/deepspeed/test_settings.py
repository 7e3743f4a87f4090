"""The section `deepspeed` and DeepSpeed's JSON files: every value has a source, and what has no effect is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_runtime.environment.settings import (
    FullyShard,
    Parallel,
    Settings,
    SettingsError,
    find_engine_conflict,
)
from accel_runtime.extensions.deepspeed.settings import (
    _HARMLESS,
    KEYS,
    PATHS,
    REFUSED,
    SECTIONS,
    DeepSpeed,
    find_value,
    read_deepspeed_config,
    read_deepspeed_file,
    resolve_deepspeed,
    state_accumulation,
    state_precision,
)

pytestmark = pytest.mark.usefixtures("on_the_cpu")

ZERO_2 = DeepSpeed(stage="2")
FROM_FILE = DeepSpeed(stage="auto", config_file="ds.json")
OFF = [None, False, {}, {"enabled": False}, "none", "auto", 0, 1]


def write(folder, content):
    path = folder / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"stage": "4"}, "one of no, auto, 0, 1, 2, 3"),
        ({"stage": "auto"}, "config_file: expected the path"),
        ({"offload_param": "disk"}, "one of no, cpu, nvme"),
        ({"zero3_init": True}, "zero3_init has no effect with deepspeed.stage: no"),
        ({"stage": "3", "offload_param": "nvme"}, "nvme_path: expected a directory"),
        ({"stage": "3", "nvme_path": "/x"}, "nvme_path has no effect"),
        ({"stage": "3", "gradient_clipping": float("nan")}, "gradient_clipping"),
        ({"stage": "3", "gradient_clipping": -1.0}, "gradient_clipping"),
        ({"stage": "3", "config_file": "a\0b"}, "config_file"),
    ],
)
def test_a_section_without_effect_is_refused(values, word):
    with pytest.raises(SettingsError, match=word):
        DeepSpeed(**values)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("{", "line 1, column 2"),
        ("[]", "expected a JSON object"),
        ('{"a": 1, "a": 2}', "'a' occurs twice"),
        ('{"zero_optimization": {"stage": 1, "stage": 2}}', "'stage' occurs twice"),
        ({"zero_optimisation": {}}, "Did you mean zero_optimization"),
        ({"zero_optimization": {"stge": 2}}, "zero_optimization.stge is not a key.*Did you mean stage"),
        ({"zero_optimization": True}, "expected an object"),
        ({"zero_optimization": {"offload_optimizer": "cpu"}}, "expected an object"),
        (
            {"zero_optimization": {"offload_optimizer": {"devices": "cpu"}}},
            "offload_optimizer.devices.*Did you mean device",
        ),
        (
            {"zero_optimization": {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 2}},
            "occurs twice, once without stage3_",
        ),
        ({"bf16": {"enabled": True}, "bfloat16": {}}, "bf16 occurs twice"),
        ({"pipeline": {"stages": 2}}, "pipeline is not supported: .*ZeRO stage 3"),
        ({"zero_optimization": {"cpu_offload": True}}, "offload_optimizer with device: cpu"),
        ({"zero_optimization": {"mics_shard_size": 8}}, "dp_replicate"),
        ({"gradient_allreduce_op": "sum"}, "gradients are averaged"),
        ({"managed_gradient_accumulation": False}, "accel decides"),
        ({"zero_force_ds_cpu_optimizer": True}, "torch's fused optimizers"),
        ({"activation_checkpointing": {"partition_activations": True}}, "gradient_checkpointing_enable"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "kept in fp32"),
        ({"seq_parallel_communication_data_type": "bf16"}, "Ulysses"),
        ({"wall_clock_breakdown": True}, "accelerator.profile"),
    ],
)
def test_a_file_that_is_invalid_or_not_supported_is_refused_with_its_path(content, word, tmp_path):
    path = write(tmp_path, content)
    with pytest.raises(SettingsError, match=word) as caught:
        read_deepspeed_file(path)
    assert path in str(caught.value)


@pytest.mark.parametrize("name", ["gone.json", ".", "a\0b", "\ud800"])
def test_a_file_that_cannot_be_read_is_refused(name, tmp_path):
    with pytest.raises(SettingsError, match="Cannot read"):
        read_deepspeed_file(f"{tmp_path}/{name}")


def test_a_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "ds.json").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="not UTF-8"):
        read_deepspeed_file(tmp_path / "ds.json")


@given(st.sampled_from(sorted(REFUSED)), st.sampled_from(OFF))
def test_an_unsupported_key_that_is_off_is_left_out(tmp_path_factory, path, value):
    *section, key = path.split(".")
    if path in _HARMLESS:
        value = _HARMLESS[path][0]
    content = {section[0]: {key: value}} if section else {key: value}
    values = read_deepspeed_file(write(tmp_path_factory.mktemp("a"), content))
    assert find_value(values, path) is None


@pytest.mark.parametrize("path", [*KEYS, *(f"{name}.{key}" for name in SECTIONS for key in SECTIONS[name])])
def test_each_known_key_is_accepted_or_refused_by_name(path, tmp_path):
    value = {} if path in SECTIONS else 7
    for part in reversed(path.split(".")):
        value = {part: value}
    read_deepspeed_file(write(tmp_path, value))


@pytest.mark.parametrize("path", ["prescale_gradients", "gradient_predivide_factor"])
def test_factors_of_gradients_are_refused_where_deepspeed_cannot_use_them(path):
    for stage, scatters in ((1, True), (2, False), (3, False)):
        file = {"zero_optimization": {"stage": stage, "reduce_scatter": scatters}, path: 2}
        resolve_deepspeed(DeepSpeed("auto", "ds.json"), file)
    with pytest.raises(SettingsError, match=rf"{path} by ds.json cannot be used .* stage 2"):
        resolve_deepspeed(DeepSpeed("auto", "ds.json"), {"zero_optimization": {"stage": 2}, path: 2})


def test_other_names_of_keys_become_those_of_the_section(tmp_path):
    content = {"zero_optimization": {"param_persistence_threshold": 5}, "bfloat16": {"enabled": True}}
    values = read_deepspeed_file(write(tmp_path, content))
    assert values == {
        "zero_optimization": {"stage3_param_persistence_threshold": 5},
        "bf16": {"enabled": True},
    }


FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "offload_optimizer": st.just("cpu"),
        "offload_param": st.just("cpu"),
        "gradient_clipping": st.floats(0.1, 9),
        "reduce_bucket_size": st.integers(1, 10**9),
        "prefetch_bucket_size": st.integers(1, 10**9),
        "param_persistence_threshold": st.integers(1, 10**9),
    },
)


@given(FIELDS, st.sets(st.sampled_from(sorted(PATHS)), min_size=1))
def test_a_field_replaces_what_the_file_leaves_open_and_names_its_source(fields, names):
    """Those in `names` are `auto` in the file, the others missing."""
    section = DeepSpeed(stage="3", config_file="ds.json", **fields)
    file = {}
    for name in names:
        part = file
        *parents, key = PATHS[name].split(".")
        for parent in parents:
            part = part.setdefault(parent, {})
        part[key] = "auto"
    config = resolve_deepspeed(section, file)
    for name, value in {"stage": 3, **fields}.items():
        assert config.get(PATHS[name]) == value
        assert config.sources[PATHS[name]] == f"deepspeed.{name}"


@pytest.mark.parametrize(
    ("section", "file", "words"),
    [
        ({"stage": "3"}, {"zero_optimization": {"stage": 2}}, ("deepspeed.stage", "ds.json", "is 2", "3 by")),
        (
            {"stage": "2", "gradient_clipping": 1.0},
            {"gradient_clipping": 0.5},
            ("deepspeed.gradient_clipping", "ds.json"),
        ),
        (
            {"stage": "2", "offload_optimizer": "cpu"},
            {"zero_optimization": {"offload_optimizer": {"device": "none"}}},
            ("deepspeed.offload_optimizer", "ds.json"),
        ),
        ({}, {"zero_optimization": {"stage": "auto"}}, ("deepspeed.stage is auto too",)),
        ({}, {"zero_optimization": {"stage": 4}}, ("expected 0, 1, 2 or 3", "ds.json")),
        ({}, {"zero_optimization": {"stage": True}}, ("expected 0, 1, 2 or 3",)),
        (
            {},
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            ("no effect in ZeRO stage 2", "Use stage 3."),
        ),
        (
            {},
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            ("stage 0 by DeepSpeed's default", "Use stage 1 or higher."),
        ),
        (
            {"nvme_path": "/x"},
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
            ("nvme", "Use stage 3."),
        ),
        (
            {},
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            ("Set deepspeed.nvme_path",),
        ),
        ({"nvme_path": "/x"}, {"zero_optimization": {"stage": 3}}, ("deepspeed.nvme_path has no effect",)),
        ({}, {"bf16": {"enabled": True}, "fp16": {"enabled": True}}, ("Enable one of them",)),
        ({"stage": "2", "zero3_init": True}, {}, ("deepspeed.zero3_init", "Use stage 3, or leave it out")),
        ({"stage": "0", "reduce_bucket_size": 9}, {}, ("deepspeed.reduce_bucket_size", "stage 1 or higher")),
    ],
)
def test_a_contradiction_or_a_value_without_effect_names_both_places(section, file, words):
    section = DeepSpeed(**{"stage": "auto", "config_file": "ds.json", **section})
    with pytest.raises(SettingsError) as caught:
        resolve_deepspeed(section, file)
    assert all(word in str(caught.value) for word in words), caught.value


def test_equal_statements_agree_in_any_number_type():
    file = {
        "zero_optimization": {"stage": 2.0, "offload_optimizer": {"device": "cpu"}},
        "gradient_clipping": 1,
    }
    section = DeepSpeed("2", "ds.json", offload_optimizer="cpu", gradient_clipping=1.0)
    assert resolve_deepspeed(section, file).sources["gradient_clipping"] == "ds.json"


@pytest.mark.parametrize(
    ("file", "precision", "expected"),
    [
        ({}, "bf16", "bf16"),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, "fp16", "fp16"),
        ({"bf16": {"enabled": True}}, "bf16", "bf16"),
        ({"bf16": {"enabled": "auto"}}, "no", None),
        ({"bf16": {"enabled": True}}, "fp16", ""),
        ({"bf16": {"enabled": True}}, "no", ""),
        ({"fp16": {"enabled": False}}, "fp16", ""),
    ],
)
def test_a_number_format_agrees_with_the_file_or_contradicts_it(file, precision, expected):
    stated = state_precision(file, precision, "mixed_precision of the profile")
    if expected == "":
        with pytest.raises(SettingsError, match=r"ds\.json.*mixed_precision of the profile"):
            resolve_deepspeed(FROM_FILE, file, stated)
    else:
        assert resolve_deepspeed(FROM_FILE, file, stated).mixed_precision == expected


def test_another_number_of_accumulated_batches_is_refused():
    stated = state_accumulation(2, "the script")
    assert resolve_deepspeed(ZERO_2, None, stated).get("gradient_accumulation_steps") == 2
    with pytest.raises(SettingsError, match="the script"):
        resolve_deepspeed(FROM_FILE, {"gradient_accumulation_steps": 4}, stated)


def test_the_file_of_a_section_is_read_and_stays_as_it_is(tmp_path):
    path = write(tmp_path, {"zero_optimization": {"stage": 3}, "elasticity": {"enabled": False}})
    config = read_deepspeed_config(replace(FROM_FILE, config_file=path))
    assert (config.stage, config.values) == (3, {"zero_optimization": {"stage": 3}})
    assert config.summary == "DeepSpeed ZeRO 3"


def test_the_summary_names_the_devices_that_are_offloaded_to():
    section = DeepSpeed("3", offload_optimizer="nvme", offload_param="cpu", nvme_path="/x")
    assert resolve_deepspeed(section).summary == "DeepSpeed ZeRO 3 (optimizer on nvme, parameters on cpu)"


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (Settings(), None),
        (Settings(engines=(ZERO_2,), device="cuda"), None),
        (Settings(engines=(ZERO_2,), parallel=Parallel(dp_shard="auto")), "parallel.dp_shard"),
        (Settings(engines=(ZERO_2,), parallel=Parallel(tp=2)), "parallel.tp"),
        (Settings(engines=(ZERO_2,), fully_shard=FullyShard(cpu_offload=True)), "fully_shard.cpu_offload"),
        (Settings(engines=(ZERO_2,), spmd=True), "spmd"),
        (Settings(engines=(ZERO_2,), device="xla"), "device"),
        (Settings(engines=(ZERO_2,), device="mps"), "device"),
        (Settings(parallel=Parallel(dp_shard="auto"), device="xla"), None),
    ],
)
def test_deepspeed_excludes_other_sharding_and_devices(settings, key):
    conflict = find_engine_conflict(settings)
    assert (conflict and conflict.key) == key


def test_variables_that_exclude_each_other_are_refused_by_their_names():
    with pytest.raises(SettingsError, match=r"ACCEL_DEEPSPEED_STAGE 2 with ACCEL_PARALLEL_DP_SHARD auto"):
        Settings.from_env({"ACCEL_DEEPSPEED_STAGE": "2", "ACCEL_PARALLEL_DP_SHARD": "auto"})


@given(FIELDS, st.sampled_from(["0", "1", "2", "3"]))
def test_a_section_is_equal_after_the_environment(fields, stage):
    settings = Settings(engines=(DeepSpeed(stage=stage, **fields),))
    assert Settings.from_env(settings.to_env()) == settings
