"""Conversion of FSDP, DeepSpeed and parallelism sections of Accelerate files."""

import json

import pytest

from accel_cli.accelerate.config_conversion import convert, read_engine_file
from accel_cli.errors import ProfileError
from accel_cli.launchers.launcher import LaunchSpec
from accel_cli.planning.machine import Machine
from accel_cli.profile import planner, yaml_io
from accel_cli.profile.schema import Profile
from tests.cli.accelerate.test_accelerate import DEEPSPEED, FSDP, map_reasons

GPUS = Machine(8, "cuda", ("H100",) * 4, bf16=True)


def import_config(kind, file=None, **sections):
    data = {"distributed_type": kind, "num_processes": 4, **sections}
    return convert(data, "config.yaml", file)


def get_sections(result):
    return result.data.get("parallel", {}), result.data.get("fully_shard", {})


def import_fsdp(**words):
    return import_config("FSDP", fsdp_config={f"fsdp_{name}": value for name, value in words.items()})


def import_zero(**words):
    return import_config("DEEPSPEED", deepspeed_config=words)


def build_plan(result):
    profile = Profile.model_validate(result.data)
    job = LaunchSpec("x.py", (), "script", profile.settings, {}, {}, GPUS, "python")
    return planner.build_plan(profile.launcher, job)


def test_an_fsdp2_file_is_converted_completely():
    result = convert(yaml_io.parse(FSDP, "x").data, "x")
    parallel, options = get_sections(result)
    assert (parallel, options) == ({"dp_shard": 4}, {"wrap": ["LlamaDecoderLayer"]})
    assert result.left == ()
    reported = map_reasons(result.mapped)
    assert reported["distributed_type"] == "launcher.kind: torchrun, parallel.dp_shard: 4"
    assert reported["fsdp_config.fsdp_auto_wrap_policy"] == "fully_shard.wrap: [LlamaDecoderLayer]"
    assert reported["fsdp_config.transformer_layer_cls_to_wrap"] == "fully_shard.wrap: [LlamaDecoderLayer]"
    assert reported["fsdp_config.fsdp_reshard_after_forward"] == "fully_shard.reshard_after_forward: true"
    assert reported["parallelism_config.parallelism_config_dp_shard_size"] == "parallel.dp_shard: 4"


@pytest.mark.parametrize(
    ("words", "parallel", "options"),
    [
        ({}, {"dp_shard": "auto"}, {}),
        ({"version": 1, "sharding_strategy": "FULL_SHARD"}, {"dp_shard": "auto"}, {}),
        ({"version": 1, "sharding_strategy": 2}, {"dp_shard": "auto"}, {"reshard_after_forward": False}),
        ({"version": 1, "reshard_after_forward": "SHARD_GRAD_OP"}, {"dp_shard": "auto"}, {"reshard_after_forward": False}),
        ({"version": 1, "sharding_strategy": "FULL_SHARD", "reshard_after_forward": "SHARD_GRAD_OP"}, {"dp_shard": "auto"}, {}),
        ({"sharding_strategy": 2, "reshard_after_forward": "FULL_SHARD"}, {"dp_shard": "auto"}, {"reshard_after_forward": False}),
        ({"version": 2, "reshard_after_forward": False}, {"dp_shard": "auto"}, {"reshard_after_forward": False}),
        ({"version": 2, "sharding_strategy": "NO_SHARD"}, {"dp_shard": "auto"}, {}),
        ({"sharding_strategy": "NO_SHARD", "offload_params": True}, {}, {}),
        ({"sharding_strategy": "HYBRID_SHARD"}, {"dp_shard": "auto"}, {}),
        ({"offload_params": "true", "activation_checkpointing": True}, {"dp_shard": "auto"}, {"cpu_offload": True, "activation_checkpointing": True}),
        ({"auto_wrap_policy": "NO_WRAP"}, {"dp_shard": "auto"}, {"wrap": "none"}),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP"}, {"dp_shard": "auto"}, {"wrap": 100_000_000}),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": "2000"}, {"dp_shard": "auto"}, {"wrap": 2000}),
        ({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, {"dp_shard": "auto"}, {}),
        ({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": "A, B"}, {"dp_shard": "auto"}, {"wrap": ["A", "B"]}),
        ({"ignored_modules": "lm_head"}, {"dp_shard": "auto"}, {"ignore": ["lm_head"]}),
        ({"ignored_modules": "lm_head|model.norm"}, {"dp_shard": "auto"}, {"ignore": ["lm_head", "model.norm"]}),
        ({"ignored_modules": ["lm_head", "model.norm"]}, {"dp_shard": "auto"}, {"ignore": ["lm_head", "model.norm"]}),
        ({"ignored_modules": False}, {"dp_shard": "auto"}, {}),
        ({"ignored_modules": {}}, {"dp_shard": "auto"}, {}),
    ],
)  # fmt: skip
def test_fsdp_options_become_fully_shard(words, parallel, options):
    assert get_sections(import_fsdp(**words)) == (parallel, options)


@pytest.mark.parametrize(
    ("words", "left", "version"),
    [
        ({"reshard_after_forward": False}, "reshard_after_forward", 2),
        ({"version": 1, "sharding_strategy": "FULL_SHARD", "reshard_after_forward": "NO_SHARD"}, "reshard_after_forward", 2),
        ({"version": 2, "sharding_strategy": "NO_SHARD"}, "sharding_strategy", 1),
        ({"version": 2, "sharding_strategy": "FULL_SHARD", "reshard_after_forward": False}, "sharding_strategy", 1),
    ],
)  # fmt: skip
def test_the_strategy_of_the_other_version_is_left_out(words, left, version):
    reason = f"Accelerate uses it with fsdp_version: {version} only"
    assert map_reasons(import_fsdp(**words).left) == {f"fsdp_config.fsdp_{left}": reason}


def test_hybrid_sharding_becomes_one_replica_for_each_node():
    there = {"num_machines": 2, "main_process_ip": "node0"}
    result = import_config("FSDP", fsdp_config={"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}, **there)
    assert get_sections(result) == (
        {"dp_replicate": 2, "dp_shard": "auto"},
        {"reshard_after_forward": False},
    )
    assert (
        "parallel.dp_replicate: 2, one replica for each node"
        in map_reasons(result.mapped)["fsdp_config.fsdp_sharding_strategy"]
    )


@pytest.mark.parametrize(
    ("word", "value", "why"),
    [
        ("backward_prefetch", "NO_PREFETCH", "always gathers the next module early"),
        ("state_dict_type", "FULL_STATE_DICT", "use accelerator.save_model() for full weights"),
        ("use_orig_params", False, "always keep their names"),
        ("cpu_ram_efficient_loading", True, "put from_pretrained() into `with accelerator.loading():`"),
        ("activation_checkpointing_offload", True, "on the device"),
        ("ignored_modules", "model.(a|b)", "regular expressions are not supported"),
        ("min_num_params", 5, "with SIZE_BASED_WRAP only"),
        ("transformer_layer_cls_to_wrap", "Block", "with TRANSFORMER_BASED_WRAP only"),
        ("verison", 2, "did you mean fsdp_version?"),
    ],
)
def test_an_unsupported_fsdp_option_is_omitted_with_a_reason(word, value, why):
    assert why in map_reasons(import_fsdp(**{word: value}).left)[f"fsdp_config.fsdp_{word}"]


@pytest.mark.parametrize(
    ("word", "value"),
    [("backward_prefetch", "BACKWARD_PRE"), ("sync_module_states", True), ("use_orig_params", True), ("version", 1), ("forward_prefetch", True)],
)  # fmt: skip
def test_fsdp_options_that_accel_always_uses_are_converted(word, value):
    assert import_fsdp(**{word: value}).left == ()


def test_options_of_sharding_are_reported_as_unused_without_sharding():
    result = import_fsdp(sharding_strategy="NO_SHARD", offload_params=True, backward_prefetch="BACKWARD_PRE")
    assert map_reasons(result.left) == {
        "fsdp_config.fsdp_offload_params": "not used, because the model is not sharded"
    }
    assert "models are replicated on every process (DDP)" in map_reasons(result.mapped)["distributed_type"]


def test_sections_that_accelerate_does_not_use_are_reported_as_unused():
    result = import_config(
        "MULTI_GPU", fsdp_config={"fsdp_offload_params": True}, deepspeed_config={"zero_stage": 7}
    )
    assert get_sections(result) == ({}, {})
    assert map_reasons(result.left) == {
        "fsdp_config.fsdp_offload_params": "used only with distributed_type: FSDP",
        "deepspeed_config.zero_stage": "used only with distributed_type: DEEPSPEED",
    }


@pytest.mark.parametrize(
    ("words", "parallel", "options"),
    [
        ({}, {"dp_shard": "auto"}, {}),
        ({"zero_stage": 0}, {}, {}),
        ({"zero_stage": 1}, {"dp_shard": "auto"}, {"reshard_after_forward": False}),
        ({"zero_stage": 2}, {"dp_shard": "auto"}, {"reshard_after_forward": False}),
        ({"zero_stage": "3"}, {"dp_shard": "auto"}, {}),
        ({"zero_stage": 3, "offload_optimizer_device": "cpu"}, {"dp_shard": "auto"}, {"cpu_offload": True}),
        ({"zero_stage": 3, "offload_param_device": "nvme"}, {"dp_shard": "auto"}, {"cpu_offload": True}),
    ],
)
def test_zero_stages_become_fully_shard(words, parallel, options):
    assert get_sections(import_zero(**words)) == (parallel, options)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_disk_for_parameters_is_left_out_below_stage_3(stage, tmp_path):
    words = {"offload_param_device": "nvme", "offload_param_nvme_path": "/x"}
    content = {"zero_optimization": {"stage": stage}}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(content))
    data = {"distributed_type": "DEEPSPEED", "num_processes": 4}
    in_section = {**data, "deepspeed_config": {"zero_stage": stage, **words}}
    in_file = {**data, "deepspeed_config": {"deepspeed_config_file": str(file), **words}}
    for result in (
        convert(in_section, "x", section="deepspeed"),
        convert(in_file, "x", content, engine_path=file, section="deepspeed"),
    ):
        assert map_reasons(result.left) == {
            "deepspeed_config.offload_param_device": f"DeepSpeed does not use it in ZeRO stage {stage}",
            "deepspeed_config.offload_param_nvme_path": "offload_param_device is not nvme, or the ZeRO stage is not 3",
        }
        assert not {"offload_param", "nvme_path"} & result.data["deepspeed"].keys()


@pytest.mark.parametrize("section", ["fully_shard", "deepspeed"])
@pytest.mark.parametrize("value", [0, "0", False, "no"])
def test_a_zero3_init_flag_that_is_off_is_off_in_accel_as_well(section, value):
    words = {"zero_stage": 3, "zero3_init_flag": value}
    data = {"distributed_type": "DEEPSPEED", "num_processes": 4, "deepspeed_config": words}
    result = convert(data, "x", section=section)
    assert result.left == ()
    assert map_reasons(result.mapped)["deepspeed_config.zero3_init_flag"] == "off in accel as well"
    assert "zero3_init" not in result.data.get("deepspeed", {})


def test_a_contradiction_is_a_problem_of_a_key_that_the_file_has():
    words = {"zero_stage": 3, "offload_param_device": "nvme", "offload_param_nvme_path": "none"}
    data = {"distributed_type": "DEEPSPEED", "num_processes": 4, "deepspeed_config": words}
    with pytest.raises(
        ProfileError, match=r"deepspeed_config\.offload_param_nvme_path: .*expected a directory"
    ):
        convert(data, "x", section="deepspeed")


def test_each_key_of_a_deepspeed_file_is_reported():
    result = convert(yaml_io.parse(DEEPSPEED, "x").data, "x")
    mapped, omitted = map_reasons(result.mapped), map_reasons(result.left)
    assert mapped["distributed_type"] == "launcher.kind: torchrun, parallel.dp_shard: auto"
    assert mapped["deepspeed_config.zero_stage"] == "fully_shard.reshard_after_forward: true"
    assert "fully_shard.cpu_offload: true" in mapped["deepspeed_config.offload_param_device"]
    assert mapped["deepspeed_config.gradient_accumulation_steps"] == "gradient_accumulation_steps: 4"
    assert "clip_grad_norm_" in omitted["deepspeed_config.gradient_clipping"]
    assert mapped["deepspeed_config.offload_optimizer_device"] == "off in accel as well"
    assert mapped["deepspeed_config.zero3_init_flag"] == "off in accel as well"


FILE = {
    "bf16": {"enabled": True},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "zero_hpz_partition_size": 2,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "communication_data_type": "bfp16",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "gradient_accumulation_steps": 4,
    "train_batch_size": "auto",
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}


def test_the_json_file_of_deepspeed_is_converted():
    result = import_config("DEEPSPEED", FILE, deepspeed_config={"deepspeed_config_file": "ds.json"})
    assert get_sections(result) == (
        {"dp_shard": "auto"},
        {"reshard_after_forward": 2, "reduce_dtype": "bf16", "cpu_offload": True},
    )
    assert result.data["mixed_precision"] == "bf16"
    mapped, omitted = map_reasons(result.mapped), map_reasons(result.left)
    at = "deepspeed_config_file"
    assert mapped[f"deepspeed_config.{at}"] == "its keys are listed below"
    assert mapped[f"{at}.bf16.enabled"] == "mixed_precision: bf16"
    assert mapped[f"{at}.zero_optimization.stage"] == "fully_shard.reshard_after_forward: 2"
    assert "filled in from the script" in mapped[f"{at}.train_batch_size"]
    assert mapped[f"{at}.wall_clock_breakdown"] == "off in accel as well"
    assert "specific to DeepSpeed" in omitted[f"{at}.zero_optimization.overlap_comm"]
    assert "an optimizer of torch" in omitted[f"{at}.optimizer.type"]
    assert mapped[f"{at}.gradient_accumulation_steps"] == "gradient_accumulation_steps: 4"
    assert "specific to DeepSpeed" in omitted[f"{at}.steps_per_print"]


def test_mixed_precision_of_the_config_overrides_that_of_the_json_file():
    config = {"deepspeed_config": {"deepspeed_config_file": "ds.json"}, "mixed_precision": "fp16"}
    result = import_config("DEEPSPEED", FILE, **config)
    assert result.data["mixed_precision"] == "fp16"
    assert "takes precedence" in map_reasons(result.left)["deepspeed_config_file.bf16.enabled"]


@pytest.mark.parametrize("section", ["fully_shard", "deepspeed"])
def test_a_missing_json_file_is_an_error(section):
    data = {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"deepspeed_config_file": "gone.json"},
    }
    with pytest.raises(ProfileError, match=r"path of a JSON file, which was not found, got 'gone\.json'"):
        convert(data, "config.yaml", section=section)


@pytest.mark.parametrize("name", ["none", None])
def test_no_json_file_leaves_the_stage_to_the_other_keys(name):
    result = import_zero(deepspeed_config_file=name, zero_stage=1)
    assert get_sections(result) == ({"dp_shard": "auto"}, {"reshard_after_forward": False})


def test_the_json_file_is_searched_in_the_working_and_the_config_folder(tmp_path, monkeypatch):
    folder, cwd = tmp_path / "conf", tmp_path / "cwd"
    folder.mkdir()
    cwd.mkdir()
    monkeypatch.chdir(cwd)
    data = {"deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    assert read_engine_file(data, folder) is None
    (folder / "ds.json").write_text(json.dumps({"a": 1}))
    assert read_engine_file(data, folder) == {"a": 1}
    (cwd / "ds.json").write_text("{")
    with pytest.raises(ProfileError, match=r"ds\.json: this is not JSON"):
        read_engine_file(data, folder)
    (cwd / "ds.json").write_text("[]")
    with pytest.raises(ProfileError, match="expected keys and values"):
        read_engine_file(data, folder)
    assert read_engine_file({"deepspeed_config": None}, folder) is None


@pytest.mark.parametrize(
    ("zero", "reshard"),
    [
        ({"stage": 3, "zero_hpz_partition_size": 2}, 2),
        ({"zero_hpz_partition_size": 2, "stage": 3}, 2),
        ({"stage": 3, "zero_hpz_partition_size": 1}, None),
        ({"stage": 2, "zero_hpz_partition_size": 2}, False),
    ],
)
def test_zero_hpz_partition_size_counts_only_with_zero_3(zero, reshard):
    file = {"zero_optimization": zero}
    result = import_config("DEEPSPEED", file, deepspeed_config={"deepspeed_config_file": "ds.json"})
    assert get_sections(result)[1].get("reshard_after_forward") == reshard


def test_a_key_with_and_without_prefix_is_an_error():
    with pytest.raises(ProfileError, match="fsdp_config: a key stands here with and without fsdp_"):
        import_config("FSDP", fsdp_config={"fsdp_offload_params": True, "offload_params": False})


def test_a_list_instead_of_a_single_value_is_a_problem():
    with pytest.raises(ProfileError, match="fsdp_version: expected a whole number"):
        import_config("FSDP", fsdp_config={"fsdp_version": [2]})


@pytest.mark.parametrize(
    ("kind", "mesh", "parallel"),
    [
        ("FSDP", {"dp_replicate": 2, "dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2}),
        ("FSDP", {"dp_shard": 2, "tp": "2"}, {"dp_shard": 2, "tp": 2}),
        ("MULTI_GPU", {"tp": 4}, {"tp": 4}),
        ("FSDP", {"cp": 4}, {"dp_shard": "auto", "cp": 4}),
        ("FSDP", {"dp_shard": 2, "cp": 2}, {"dp_shard": 2, "cp": 2}),
        ("MULTI_GPU", {"cp": 4}, {"cp": 4}),
        ("FSDP", {"dp_shard": 1}, {"dp_shard": "auto"}),
    ],
)
def test_a_parallelism_config_becomes_the_parallel_section(kind, mesh, parallel):
    sized = {f"parallelism_config_{name}_size": size for name, size in mesh.items()}
    result = import_config(kind, parallelism_config=sized, mixed_precision="bf16")
    assert get_sections(result)[0] == parallel
    assert build_plan(result).nproc_per_node == 4


@pytest.mark.parametrize(
    "words",
    [
        {"reshard_after_forward": False},
        {"offload_params": True},
        {"ignored_modules": ["lm_head"]},
        {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": "Block"},
    ],
)
@pytest.mark.parametrize("dimension", ["tp", "dp_replicate"])
def test_options_of_sharding_are_left_out_with_a_mesh_that_shards_nothing(words, dimension):
    options = {f"fsdp_{name}": value for name, value in words.items()}
    result = import_config(
        "FSDP",
        fsdp_config={"fsdp_version": 2, **options},
        parallelism_config={f"parallelism_config_{dimension}_size": 4},
    )
    assert get_sections(result) == ({dimension: 4}, {})
    reason = "not used, because the model is not sharded"
    assert map_reasons(result.left) == dict.fromkeys((f"fsdp_config.{name}" for name in options), reason)
    assert build_plan(result).nproc_per_node == 4


def test_the_tp_config_of_early_releases_is_converted():
    assert get_sections(import_config("MULTI_GPU", tp_config={"tp_size": 4}))[0] == {"tp": 4}


def test_other_keys_of_a_parallelism_config_are_reported():
    result = import_config(
        "FSDP",
        parallelism_config={
            "parallelism_config_dp_shard_size": 2,
            "parallelism_config_cp_size": 2,
            "parallelism_config_cp_comm_strategy": "alltoall",
            "parallelism_config_sp_size": 2,
            "tp_size": 2,
        },
    )
    omitted = map_reasons(result.left)
    assert "always uses allgather" in omitted["parallelism_config.parallelism_config_cp_comm_strategy"]
    assert "set parallel.sp" in omitted["parallelism_config.parallelism_config_sp_size"]
    assert "did you mean parallelism_config_tp_size" in omitted["parallelism_config.tp_size"]


def test_a_mesh_that_does_not_match_the_number_of_processes_is_an_error():
    with pytest.raises(ProfileError, match=r"parallelism_config: .*is 8, and there are 4 processes"):
        import_config("FSDP", parallelism_config={"parallelism_config_dp_shard_size": 8})


@pytest.mark.parametrize(
    ("kind", "sections", "key", "why"),
    [
        ("DEEPSPEED", {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "dynamo_config.dynamo_backend", "does not compile with"),
        ("DEEPSPEED", {"dynamo_backend": "INDUCTOR"}, "dynamo_backend", "does not compile with"),
        ("XLA", {"dynamo_backend": "INDUCTOR"}, "dynamo_backend", "does not compile with"),
        ("MULTI_GPU", {"dynamo_config": {"dynamo_mode": "max-autotune"}}, "dynamo_config.dynamo_mode", "nothing is compiled"),
        ("MULTI_CPU", {"parallelism_config": {"parallelism_config_tp_size": 4}}, "parallelism_config.parallelism_config_tp_size", "does not use it with"),
        ("MULTI_CPU", {"tp_config": {"tp_size": 4}}, "tp_config.tp_size", "does not use it with"),
    ],
)  # fmt: skip
def test_options_that_the_launcher_of_accelerate_does_not_pass_on_are_left_out(kind, sections, key, why):
    result = import_config(kind, **sections)
    assert why in map_reasons(result.left)[key]
    assert not {"compile", "fully_shard"} & result.data.keys()
    assert "tp" not in result.data.get("parallel", {})


@pytest.mark.parametrize(("kind", "why"), [("NO", "is one process"), ("XLA", "launcher.spmd: true")])
def test_parallel_sections_are_omitted_without_several_processes(kind, why):
    result = convert(
        {
            "distributed_type": kind,
            "fsdp_config": {"fsdp_offload_params": True},
            "parallelism_config": {"parallelism_config_tp_size": 2},
        },
        "x",
    )
    assert get_sections(result) == ({}, {})
    assert why in map_reasons(result.left)["parallelism_config.parallelism_config_tp_size"]
    assert "fsdp_config.fsdp_offload_params" in map_reasons(result.left)


@pytest.mark.parametrize(
    ("kind", "section", "expected"),
    [
        ("FSDP", {"fsdp_config": {"fsdp_version": 3}}, "fsdp_config.fsdp_version: expected a whole number from 1 to 2, got 3"),
        ("FSDP", {"fsdp_config": {"fsdp_sharding_strategy": "HALF"}}, "expected FULL_SHARD, SHARD_GRAD_OP, "),
        ("FSDP", {"fsdp_config": {"fsdp_sharding_strategy": True}}, "fsdp_config.fsdp_sharding_strategy: expected FULL_SHARD, "),
        ("FSDP", {"fsdp_config": {"fsdp_reshard_after_forward": "HALF"}}, "expected true, false, FULL_SHARD, "),
        ("FSDP", {"fsdp_config": {"fsdp_offload_params": "maybe"}}, "expected true or false, got 'maybe'"),
        ("FSDP", {"fsdp_config": {"fsdp_auto_wrap_policy": "BIG"}}, "expected SIZE_BASED_WRAP, "),
        ("FSDP", {"fsdp_config": {"fsdp_ignored_modules": 5}}, "fsdp_config.fsdp_ignored_modules: expected names of modules, or a regular expression, got 5"),
        ("FSDP", {"fsdp_config": {"fsdp_ignored_modules": True}}, "expected names of modules, or a regular expression, got true"),
        ("FSDP", {"fsdp_config": {"fsdp_ignored_modules": [1]}}, "expected names of modules, or a regular expression, got [1]"),
        ("FSDP", {"fsdp_config": {"fsdp_min_num_params": 0.5}}, "expected a whole number of at least 1, got 0.5"),
        ("DEEPSPEED", {"deepspeed_config": {"zero_stage": 4}}, "deepspeed_config.zero_stage: expected a whole number from 0 to 3, got 4"),
        ("DEEPSPEED", {"deepspeed_config": {"offload_param_device": "disk"}}, "expected none, cpu or nvme, got 'disk'"),
        ("FSDP", {"parallelism_config": {"parallelism_config_tp_size": 0}}, "parallelism_config_tp_size: expected a whole number"),
    ],
)  # fmt: skip
def test_an_invalid_value_is_reported_with_its_key(kind, section, expected):
    with pytest.raises(ProfileError) as caught:
        import_config(kind, **section)
    assert expected in str(caught.value)


def test_an_invalid_value_of_the_json_file_is_reported_with_its_path():
    config = {"deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    with pytest.raises(
        ProfileError,
        match=r"deepspeed_config_file\.zero_optimization\.stage: expected a whole number from 0 to 3",
    ):
        import_config("DEEPSPEED", {"zero_optimization": {"stage": 9}}, **config)
