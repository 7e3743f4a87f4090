"""`accel launch --config_file`: a config file of Accelerate for one launch."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from support.launchers import plans
from support.processes.commands import call_accel, run_accel

from accel_cli.accelerate.config_file import build_config
from accel_cli.errors import ProfileError, UsageError
from accel_cli.planning.launch_options import Request
from accel_cli.planning.machine import Machine
from accel_cli.profile import yaml_io
from accel_runtime.environment.accelerate.launch import FP8_OVERRIDES

FILES = json.loads(
    (Path(__file__).parents[2] / "data" / "accelerate-1.15.0" / "launch_files.json").read_text()
)
GPUS = Machine(16, "cuda", ("H100",) * 8, bf16=True)
XPUS = Machine(16, "xpu", ("Max",) * 8, bf16=True)
ZERO3 = "distributed_type: DEEPSPEED\nnum_processes: 2\nmixed_precision: bf16\ndeepspeed_config:\n  zero_stage: 3\n"
FSDP1 = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n"
FSDP2 = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n  fsdp_state_dict_type: FULL_STATE_DICT\n"
FP8 = "distributed_type: MULTI_CPU\nnum_processes: 2\nmixed_precision: fp8\nfp8_config:\n  backend: TE\n  margin: 2\n"
CONTEXT = (
    f"{FSDP2}  fsdp_activation_checkpointing: true\nparallelism_config:\n  parallelism_config_cp_size: 2\n"
)
ULYSSES = f"{ZERO3}parallelism_config:\n  parallelism_config_sp_size: 2\n"


class Difference(NamedTuple):
    """A variable that processes get otherwise than from Accelerate's launcher."""

    name: str
    own: str | None
    recorded: str | None
    of_accelerate: Mapping[str, str]
    """All variables of Accelerate's launcher."""

    @property
    def stage(self):
        return self.of_accelerate.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")


def list_differences(own, recorded):
    names = {*own, *recorded}
    found = [Difference(name, own.get(name), recorded.get(name), recorded) for name in sorted(names)]
    return [each for each in found if each.own != each.recorded]


INTENDED = {
    "A default of Accelerate itself": lambda each: (
        each[:3]
        in {
            ("ACCELERATE_USE_CPU", None, "False"),
            ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", None, "none"),
            ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", None, "none"),
            ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None, "auto"),
        }
    ),
    "An option of torch.compile, and nothing is compiled": lambda each: (
        "DYNAMO" in each.name and each.own is None and each.of_accelerate["ACCELERATE_DYNAMO_BACKEND"] == "NO"
    ),
    "Contradictions of DeepSpeed's JSON file are found before the launch": lambda each: (
        each.name == "ACCELERATE_CONFIG_DS_FIELDS" and each.own is None
    ),
    "One step is the default, and would replace the number of the script": lambda each: (
        each[:3] == ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None, "1")
    ),
    "DeepSpeed reads it in stage 3 only": lambda each: (
        each.name in {"ACCELERATE_DEEPSPEED_ZERO3_INIT", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"}
        and each.own is None
        and each.stage in {"1", "2"}
    ),
    "The default of stage 3, in words": lambda each: (
        each[:3] == ("ACCELERATE_DEEPSPEED_ZERO3_INIT", "true", None) and each.stage == "3"
    ),
    "Accelerate cannot save a model of stage 3 without it": lambda each: (
        each[:3] == ("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "true", None) and each.stage == "3"
    ),
    "Accelerate's launcher forgets the directory": lambda each: (
        each.name.endswith("_NVME_PATH") and each.recorded is None
    ),
    "Replicas of FSDP1 are not dimensions of a mesh": lambda each: (
        each[:3] == ("ACCELERATE_USE_PARALLELISM_CONFIG", "false", None)
        and each.of_accelerate.get("FSDP_VERSION") == "1"
    ),
    "Accelerate takes the characters of a text for values": lambda each: (
        each.name in FP8_OVERRIDES and each.own == "False" and each.recorded in set("(fa")
    ),
}
"""The differences that are meant, by reason."""


@pytest.fixture
def launch(script, capfd, tmp_path):
    script("raise SystemExit(7)")

    def run(text, *args):
        Path("config.yaml").write_text(text)
        return call_accel(capfd, "launch", "--config_file", "config.yaml", *args, "train.py")

    return run


def prepare(file, environ=(), **options):
    config = build_config(file, "config.yaml", Path())
    options = {key: value for key, value in {"no_profile": True, **options}.items() if value}
    request = Request("train.py", options=options, config_file=config)
    machine = XPUS if file.get("distributed_type") == "MULTI_XPU" else GPUS
    return plans.prepare(request, dict(environ), machine)


def get_variables(text, environ=(), **options):
    plan = prepare(yaml_io.parse(text, "x").data, environ, **options)[1]
    return select_variables(plan.env)


def select_variables(environ):
    names = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")
    return {name: value for name, value in environ.items() if name.startswith(names)}


@pytest.mark.parametrize("name", FILES)
def test_the_processes_of_every_public_file_get_what_the_launcher_of_accelerate_sets(name):
    file, recorded = FILES[name]["file"], FILES[name]["variables"]
    if "deepspeed_config_file" in (file.get("deepspeed_config") or {}):
        with pytest.raises(ProfileError, match="expected the path of a JSON file"):
            prepare(file)
        return
    _, plan = prepare(file)
    assert plan.nproc_per_node == file.get("num_processes", 8) // file.get("num_machines", 1) or (
        plan.launcher == "single"
    )
    found = list_differences(select_variables(plan.env), recorded)
    assert not [each[:3] for each in found if not any(is_meant(each) for is_meant in INTENDED.values())]


def test_every_intended_difference_exists():
    found = []
    for entry in FILES.values():
        with suppress(ProfileError):
            own = select_variables(prepare(entry["file"])[1].env)
            found += list_differences(own, entry["variables"])
    assert [reason for reason, is_meant in INTENDED.items() if not any(map(is_meant, found))] == []


@pytest.mark.parametrize(
    ("text", "key", "name", "value"),
    [
        ("FSDP2", "fully_shard.cpu_offload=true", "FSDP_OFFLOAD_PARAMS", "true"),
        ("FSDP2", "fully_shard.wrap=Block", "FSDP_TRANSFORMER_CLS_TO_WRAP", "Block"),
        ("CONTEXT", "fully_shard.activation_checkpointing=false", "FSDP_ACTIVATION_CHECKPOINTING", "false"),
    ],
)
def test_a_stronger_option_of_sharding_changes_the_variables_of_the_file(text, key, name, value):
    before = get_variables(globals()[text])
    variables = get_variables(globals()[text], set=(key,))
    assert before.get(name) != value
    assert variables[name] == value
    kept = ("ACCELERATE_USE_FSDP", "FSDP_VERSION", "FSDP_STATE_DICT_TYPE", "PARALLELISM_CONFIG_CP_SIZE")
    assert {each: variables.get(each) for each in kept} == {each: before.get(each) for each in kept}


def test_a_weaker_profile_that_shards_otherwise_is_in_effect_beside_the_file(script):
    script("")
    Path("accel.yaml").write_text(
        "schema_version: 1\nlauncher: {kind: torchrun}\nfully_shard: {cpu_offload: true}\n"
    )
    variables = get_variables(FSDP2.replace("FULL_", "SHARDED_"), no_profile=None)
    assert (variables["ACCELERATE_USE_FSDP"], variables["FSDP_OFFLOAD_PARAMS"]) == ("true", "true")


def test_a_variable_of_the_profile_replaces_itself_only(script):
    script("")
    variables = get_variables(FSDP2, set=("env.FSDP_MIN_NUM_PARAMS=7", "env.ACCELERATE_USE_FSDP=1"))
    assert variables == get_variables(FSDP2) | {"FSDP_MIN_NUM_PARAMS": "7", "ACCELERATE_USE_FSDP": "1"}


@pytest.mark.parametrize("text", ["FSDP2", "CONTEXT"])
def test_the_nodes_of_a_job_get_the_variables_of_the_file(text, script):
    script("")
    data = yaml_io.parse(globals()[text], "x").data
    job = prepare(data, set=("launcher.kind=slurm", "launcher.nproc_per_node=2"))[1]
    options = {"no_profile": True, "set": ("launcher.kind=torchrun",), "nproc_per_node": "2"}
    node = plans.prepare(Request("train.py", options=options), job.env, GPUS)[1]
    assert select_variables({**job.env, **node.env}) == get_variables(globals()[text])


def test_sharding_over_context_parallel_ranks_is_that_of_the_file_on_the_cpu_too():
    data = yaml_io.parse(CONTEXT, "x").data
    settings, plan = prepare(data, set=("device=cpu",))
    assert settings.profile.parallel.dp_shard == "auto"
    assert "ACCELERATE_USE_FSDP" not in plan.env
    assert "Cannot shard models on the CPU with Accelerate" in plan.env["ACCEL_ACCELERATE_LIMITS"]


def test_a_deepspeed_file_stays_deepspeed_and_names_its_source(launch):
    result = launch(ZERO3, "--explain")
    assert result.returncode == 0
    assert "ACCELERATE_DEEPSPEED_ZERO_STAGE=3" in result.stdout
    assert "layout: DeepSpeed ZeRO 3" in result.stdout
    assert "launcher.nproc_per_node: 2  [--config-file: config.yaml]" in result.stdout
    assert "deepspeed.stage: 3  [--config-file: config.yaml]" in result.stdout


@pytest.mark.slow
def test_the_processes_of_a_launch_get_the_variables_of_the_file(script):
    script("import os; print(os.environ['ACCELERATE_USE_FSDP'], os.environ['FSDP_VERSION'])")
    Path("config.yaml").write_text(FSDP1)
    result = run_accel(
        "launch",
        "--config_file",
        "config.yaml",
        "--cpu",
        "--num_processes",
        "2",
        "--ranks",
        "all",
        "train.py",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("true 1") == 2
    words = "--config-file config.yaml --cpu --ranks all --nproc-per-node 2"
    assert f"same as: accel launch {words}" in result.stderr


def test_options_beside_a_deepspeed_file_change_the_section(launch):
    result = launch(ZERO3, "--dry-run", "--zero_stage", "2")
    assert "ACCELERATE_DEEPSPEED_ZERO_STAGE=2" in result.stdout
    assert "--set deepspeed.stage=2 --set deepspeed.zero3_init=false" in result.stderr


def test_a_file_of_fsdp_is_sharded_by_the_profile_and_its_other_options_are_passed_on():
    resolved, plan = prepare(yaml_io.parse(FSDP2, "x").data)
    assert plan.layout == "dp_shard 2"
    assert resolved.profile.env["FSDP_STATE_DICT_TYPE"] == "FULL_STATE_DICT"
    assert "FSDP_OFFLOAD_PARAMS" not in resolved.profile.env


def test_a_file_of_fsdp1_stays_fsdp1_for_scripts_that_use_accelerate():
    variables = get_variables(FSDP1)
    assert variables["FSDP_VERSION"] == "1"
    assert variables["FSDP_RESHARD_AFTER_FORWARD"] == "true"
    assert variables["ACCELERATE_USE_PARALLELISM_CONFIG"] == "false"


def test_an_ulysses_file_is_passed_on_as_it_is():
    variables = get_variables(ULYSSES)
    assert variables["PARALLELISM_CONFIG_SP_SIZE"] == "2"
    assert variables["PARALLELISM_CONFIG_SP_BACKEND"] == "deepspeed"


def test_a_stronger_precision_replaces_the_one_that_is_passed_on():
    assert get_variables(FP8)["ACCELERATE_FP8_MARGIN"] == "2"
    for stronger in ({"mixed_precision": "bf16"}, {"set": ("mixed_precision=bf16",)}):
        variables = get_variables(FP8, **stronger)
        assert not [name for name in variables if "FP8" in name or variables[name] == "fp8"]
    variables = get_variables(FP8, {"ACCEL_MIXED_PRECISION": "bf16"})
    assert variables["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert not [name for name in variables if "FP8" in name]


def test_options_and_variables_override_the_file_and_the_file_overrides_profiles(launch, monkeypatch):
    Path("accel.yaml").write_text(
        "schema_version: 1\nlauncher: {kind: torchrun, nproc_per_node: 7}\nlog_level: info\n"
    )
    result = launch(ZERO3, "--explain", "--set", "process_group_timeout=9")
    assert "start: 2 processes" in result.stdout
    assert "log_level: info  [project" in result.stdout
    assert "start: 3 processes" in launch(ZERO3, "--explain", "--nproc-per-node", "3").stdout
    assert "start: 4 processes" in launch(ZERO3, "--dry-run", "--set", "launcher.nproc_per_node=4").stdout
    monkeypatch.setenv("ACCEL_MIXED_PRECISION", "fp16")
    result = launch(ZERO3, "--explain")
    assert "mixed_precision: fp16  [environment: ACCEL_MIXED_PRECISION]" in result.stdout
    assert "ACCELERATE_MIXED_PRECISION=fp16" in result.stdout


def test_a_variable_of_the_user_that_is_passed_on_is_never_overwritten():
    name = "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"
    text = f"{ZERO3}  zero3_save_16bit_model: true\n"
    assert get_variables(text)[name] == "true"
    assert name not in get_variables(text, {name: "false"})


@pytest.mark.parametrize("text", [ZERO3, FSDP1, ULYSSES])
def test_sharding_of_the_profile_is_refused_with_a_file_that_shards_otherwise(text):
    with pytest.raises(UsageError, match=r"Cannot use --set.*config.yaml.*(DEEPSPEED|fsdp_version: 1)"):
        get_variables(text, set=("parallel.dp_shard=auto",))
    with pytest.raises(UsageError, match="ACCEL_FULLY_SHARD_CPU_OFFLOAD"):
        get_variables(text, {"ACCEL_FULLY_SHARD_CPU_OFFLOAD": "1"})


def test_a_deepspeed_file_replaces_the_sharding_of_a_profile(launch):
    Path("accel.yaml").write_text(
        "schema_version: 1\nlauncher: {kind: torchrun, nproc_per_node: 2}\nparallel: {dp_shard: auto}\n"
    )
    assert "layout: DeepSpeed ZeRO 3" in launch(ZERO3, "--dry-run").stdout


def test_the_json_file_of_deepspeed_is_found_beside_the_config(tmp_path):
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}}')
    data = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "zero.json"}}
    values = build_config(data, "config.yaml", tmp_path).values
    assert values["deepspeed.config_file"] == str(tmp_path / "zero.json")
    assert values["deepspeed.stage"] == "auto"


def test_keys_without_effect_are_named_in_one_line(launch):
    result = launch("distributed_type: MULTI_CPU\nnum_processes: 2\nenable_cpu_affinity: true\n", "--dry-run")
    assert result.returncode == 0
    assert result.stderr == (
        "accel: config.yaml: 1 value(s) have no effect: enable_cpu_affinity: true (accel does not bind processes to "
        "processor cores)\n"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schema_version: 1\n", "it is not a config file of Accelerate"),
        ("distributed_type: MULTI_GPUS\n", "did you mean MULTI_GPU?"),
        ("distributed_type: [\n", "invalid YAML"),
        ("distributed_type: MULTI_CPU\nnum_procceses: 8\n", "num_processes"),
    ],
)
def test_an_invalid_file_is_refused_with_its_problem(launch, text, words):
    result = launch(text)
    assert (result.returncode, result.stdout) == (2, "")
    assert words in result.stderr


def test_a_missing_file_is_refused(capfd, script):
    script("")
    result = call_accel(capfd, "launch", "--config-file", "gone.yaml", "train.py")
    assert result.returncode == 2
    assert "Cannot read gone.yaml: No such file or directory." in result.stderr


def test_a_mistake_in_a_section_that_is_passed_on_is_an_error():
    with pytest.raises(ProfileError, match="zero_stage"):
        build_config({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 4}}, "x", Path())


def test_the_default_file_of_accelerate_is_named_if_there_is_no_profile(cwd, monkeypatch):
    from accel_cli.commands.plan_view import format_headline
    from accel_cli.planning.launch_options import Request
    from accel_cli.planning.machine import Machine

    monkeypatch.setenv("HF_HOME", str(cwd / "cache"))
    (cwd / "train.py").write_text("")
    resolved, plan = plans.prepare(Request("train.py"), {}, Machine(2))
    assert "detected defaults (accel config writes one)" in format_headline(plan, resolved)
    (cwd / "cache" / "accelerate").mkdir(parents=True)
    (cwd / "cache" / "accelerate" / "default_config.yaml").write_text("distributed_type: NO\n")
    assert "accel config import " in format_headline(plan, resolved)
