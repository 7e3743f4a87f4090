"""Output and profiles of `accel config import` for files and pairs of options, compared with golden files."""

import itertools
import json

import pytest
from support.cases import golden
from support.cases.pairs import select_pairs
from support.processes.commands import call_accel

from accel_cli.accelerate.config_conversion import convert
from accel_cli.errors import ProfileError
from accel_cli.profile import yaml_io
from tests.cli.accelerate import test_accelerate as cluster
from tests.cli.accelerate import test_accelerate_dividing as dividing
from tests.cli.accelerate import test_accelerate_jobs as jobs

DEEPSPEED_FILE = """
deepspeed_config:
  deepspeed_config_file: ds.json
  zero3_init_flag: true
distributed_type: DEEPSPEED
num_machines: 1
num_processes: 4
"""
FSDP1 = """
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_backward_prefetch: NO_PREFETCH
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: true
  fsdp_min_num_params: 1e8
  fsdp_offload_params: true
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: false
  fsdp_verson: 1
main_process_ip: node0
main_process_port: 29501
num_machines: 2
num_processes: 8
"""
MISTAKES = """
distributed_type: MULTI_GPUS
num_procceses: 8
mixed_precision: fp8
use_cpu: maybe
fsdp_config: 3
gpu_ids: 0;1
"""
JOB_MISTAKES = """
compute_environment: AMAZON_SAGEMAKER
distributed_type: 'NO'
num_processes: 4
regoin: x
additional_args: {max_run: long, tags: Team, environment: {A: [1]}}
"""
SAMPLES = {
    "multi-gpu": cluster.MULTI_GPU,
    "machines": cluster.MACHINES,
    "fsdp": cluster.FSDP,
    "fsdp1": FSDP1,
    "deepspeed": cluster.DEEPSPEED,
    "deepspeed-file": DEEPSPEED_FILE,
    "megatron": cluster.MEGATRON,
    "multi-cpu": cluster.MULTI_CPU,
    "legacy": cluster.LEGACY,
    "one-gpu": cluster.ONE_GPU,
    "tpu": cluster.TPU,
    "sagemaker": jobs.WRITTEN,
    "mistakes": MISTAKES,
    "sagemaker-mistakes": JOB_MISTAKES,
    "empty": "",
    "broken": "distributed_type: [\n",
}
ZERO_2 = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True},
    "bf16": {"enabled": True},
    "gradient_clipping": "auto",
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
}
PAIRS = {
    "start": {
        "distributed_type": ["NO", "MULTI_GPU", "MULTI_CPU", "MPS", "MULTI_XPU", "MEGATRON_LM", "XLA", "FSDP", "DEEPSPEED"],
        "num_processes": [1, 4, -1],
        "num_machines": [1, 2],
        "main_process_ip": [None, "node0"],
        "main_process_port": [None, 0, 29501],
        "gpu_ids": ["all", "0,1", "GPU-7f"],
    },
    "other": {
        "distributed_type": ["NO", "MULTI_GPU", "XLA", "DEEPSPEED"],
        "mixed_precision": [None, "bf16", "fp16"],
        "fp16": [True, False],
        "use_cpu": [True, False],
        "machine_rank": [0, 1],
        "rdzv_backend": ["static", "etcd"],
        "main_training_function": ["main", "train"],
        "tpu_name": ["", "pod"],
    },
    "fsdp": {
        "distributed_type": ["FSDP", "MULTI_GPU"],
        "fsdp_config.fsdp_version": [1, 2],
        "fsdp_config.fsdp_sharding_strategy": [None, "FULL_SHARD", 3, "HYBRID_SHARD", "OTHER"],
        "fsdp_config.fsdp_reshard_after_forward": [True, False, "NO_SHARD"],
        "fsdp_config.fsdp_auto_wrap_policy": [None, "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"],
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap": [None, "A, B"],
        "fsdp_config.min_num_params": [None, 1e8],
        "fsdp_config.fsdp_offload_params": [True, False],
    },
    "deepspeed": {
        "distributed_type": ["DEEPSPEED", "MULTI_GPU"],
        "deepspeed_config.zero_stage": [None, 0, 1, 2, 3, 4],
        "deepspeed_config.offload_optimizer_device": ["none", "cpu", "nvme"],
        "deepspeed_config.offload_param_device": ["none", "cpu", "disk"],
        "deepspeed_config.gradient_clipping": [0, 1.0, "auto"],
        "deepspeed_config.zero3_init_flag": [True, False],
        "deepspeed_config.deepspeed_config_file": [None, "gone.json"],
    },
    "mesh": {
        "distributed_type": ["FSDP", "MULTI_GPU", "NO", "XLA"],
        "num_processes": [-1, 4],
        "parallelism_config.parallelism_config_dp_shard_size": [1, 2],
        "parallelism_config.parallelism_config_tp_size": [1, 2, 0],
        "parallelism_config.parallelism_config_cp_size": [1, 2],
        "parallelism_config.parallelism_config_cp_comm_strategy": ["allgather", "alltoall"],
        "parallelism_config.parallelism_config_sp_size": [1, 2],
        "tp_config.tp_size": [None, 4],
    },
    "sagemaker": {
        "compute_environment": ["AMAZON_SAGEMAKER"],
        "distributed_type": ["NO", "DATA_PARALLEL", "MODEL_PARALLEL"],
        "ec2_instance_type": [None, "ml.p4d.24xlarge", "ml.p4dn.24xlarge", "ml.g5.xlarge"],
        "image_uri": [None, "me/image:1"],
        "pytorch_version": [None, "2.13", "1.10.2"],
        "additional_args.instance_type": [None, "ml.g5.12xlarge"],
        "additional_args.distribution": [None, {"torch_distributed": {"enabled": True}}],
        "additional_args.environment": [None, {"HF_HOME": "/x", "HF_TOKEN": "secret"}],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_the_output_and_profile_of_a_file_equal_the_golden_file(name, tmp_path, monkeypatch, capfd):
    check_import(name, SAMPLES[name], [], tmp_path, monkeypatch, capfd)


@pytest.mark.parametrize("name", ["deepspeed", "deepspeed-file", "json"])
@pytest.mark.parametrize("section", ["fully_shard", "deepspeed"])
def test_deepspeed_becomes_the_section_of_the_option(name, section, tmp_path, monkeypatch, capfd):
    options = ["--sharding", section]
    if name == "json":
        options.insert(0, "ds.json")
    check_import(
        f"sharding/{name}-{section}", SAMPLES.get(name, ""), options, tmp_path, monkeypatch, capfd, ZERO_2
    )


def check_import(name, text, options, tmp_path, monkeypatch, capfd, file=dividing.FILE):  # noqa: PLR0913, PLR0917 - fixtures
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "config.yaml").write_text(text.lstrip("\n"))
    (tmp_path / "ds.json").write_text(json.dumps(file))
    files = [] if "ds.json" in options else ["config.yaml"]
    result = call_accel(capfd, "config", "import", *files, "--project", *options)
    written = tmp_path / "accel.yaml"
    lines = written.read_text().splitlines(keepends=True) if written.exists() else ["(no profile)\n"]
    profile = "".join(line for line in lines if not line.lstrip().startswith("#"))
    text = f"{result.stdout}---\n{result.stderr}---\n{profile}--- exit code {result.returncode}\n"
    golden.check(f"import/{name}.txt", text.replace(str(tmp_path), "FOLDER"))


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_options_are_converted_as_in_the_golden_file(name):
    cases = [tuple(case) for case in itertools.product(*(range(len(each)) for each in PAIRS[name].values()))]
    chosen = sorted(select_pairs(cases))
    golden.check(f"import/pairs-{name}.txt", "\n".join(_describe(PAIRS[name], case) for case in chosen))


def _describe(factors, case, sharding="fully_shard"):
    data = {}
    for (key, values), index in zip(factors.items(), case, strict=True):
        section, dot, name = key.rpartition(".")
        if values[index] is not None:
            (data.setdefault(section, {}) if dot else data)[name] = values[index]
    return f"{yaml_io.inline(data)}\n{_convert(data, sharding)}"


@pytest.mark.parametrize("name", ["deepspeed"])
def test_pairs_of_options_that_keep_deepspeed_are_converted_as_in_the_golden_file(name):
    factors = {**PAIRS[name], "deepspeed_config.offload_optimizer_nvme_path": ["none", "/nvme"]}
    del factors["deepspeed_config.deepspeed_config_file"]
    cases = [tuple(case) for case in itertools.product(*(range(len(each)) for each in factors.values()))]
    chosen = sorted(select_pairs(cases))
    text = "\n".join(_describe(factors, case, sharding="deepspeed") for case in chosen)
    golden.check(f"import/sharding/pairs-{name}.txt", text)


def _convert(data, section="fully_shard"):
    try:
        result = convert(data, "config.yaml", section=section)
    except ProfileError as error:
        return "".join(f"  ! {problem}\n" for problem in error.problems)
    lines = [f"  + {line} -> {text}" for line, text in result.mapped]
    lines += [f"  - {line} -> {text}" for line, text in result.left]
    return "\n".join([*lines, f"  = {yaml_io.inline(result.data)}", ""])
