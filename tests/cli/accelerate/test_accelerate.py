from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_cli.accelerate import config_conversion
from accel_cli.accelerate.config_conversion import Imported, convert
from accel_cli.errors import ProfileError
from accel_cli.extensions.sagemaker.accelerate_rules import SETTINGS
from accel_cli.profile import yaml_io
from accel_cli.profile.schema import Profile, known_keys
from accel_cli.profile.store import is_accelerate_config
from accel_runtime.environment.accelerate import launch

MULTI_GPU = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
enable_cpu_affinity: false
gpu_ids: all
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
MACHINES = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
gpu_ids: all
machine_rank: 1
main_process_ip: 10.0.0.7
main_process_port: 29501
mixed_precision: fp16
num_machines: 2
num_processes: 16
rdzv_backend: c10d
same_network: false
"""
FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 2
  transformer_layer_cls_to_wrap: LlamaDecoderLayer
mixed_precision: bf16
num_machines: 1
num_processes: 4
parallelism_config:
  parallelism_config_dp_shard_size: 4
  parallelism_config_tp_size: 1
"""
DEEPSPEED = """
compute_environment: LOCAL_MACHINE
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: none
  offload_param_device: cpu
  zero3_init_flag: false
  zero_stage: 3
distributed_type: DEEPSPEED
num_machines: 1
num_processes: 2
"""
MEGATRON = """
distributed_type: MEGATRON_LM
megatron_lm_config:
  megatron_lm_gradient_clipping: 1.0
  megatron_lm_pp_degree: 1
  megatron_lm_tp_degree: 2
num_processes: 2
"""
MULTI_CPU = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
downcast_bf16: 'no'
ipex_config:
  ipex: true
machine_rank: 0
main_process_ip: 10.0.0.7
main_process_port: 29500
mixed_precision: no
mpirun_config:
  mpirun_ccl: '1'
  mpirun_hostfile: /home/user/hostfile
num_machines: 4
num_processes: 16
rdzv_backend: static
same_network: yes
use_cpu: yes
"""
LEGACY = """
{
  "compute_environment": "LOCAL_MACHINE",
  "distributed_type": "MULTI_GPU",
  "dynamo_backend": "INDUCTOR",
  "fp16": true,
  "machine_rank": 0,
  "main_process_ip": null,
  "main_process_port": null,
  "main_training_function": "main",
  "num_machines": 1,
  "num_processes": 2
}
"""
ONE_GPU = """
distributed_type: 'NO'
fsdp_config: {}
gpu_ids: 0,1
mixed_precision: false
num_processes: 1
"""
TPU = """
commands:
- huggingface-cli login --token hf_secret
compute_environment: LOCAL_MACHINE
distributed_type: XLA
downcast_bf16: 'no'
main_training_function: train
num_machines: 1
num_processes: 8
tpu_env:
- WANDB_API_KEY=secret
tpu_name: pod
tpu_use_cluster: true
tpu_vm: ['']
"""
LOCAL = [MULTI_GPU, MACHINES, FSDP, DEEPSPEED, MEGATRON, MULTI_CPU, LEGACY, ONE_GPU, TPU]

SECTIONS = {
    "deepspeed_config": """
        deepspeed_config_file zero_stage offload_optimizer_device offload_param_device offload_param_nvme_path
        offload_optimizer_nvme_path gradient_accumulation_steps gradient_clipping zero3_init_flag
        zero3_save_16bit_model deepspeed_moe_layer_cls_names deepspeed_multinode_launcher deepspeed_hostfile
        deepspeed_exclusion_filter deepspeed_inclusion_filter""",
    "dynamo_config": """
        dynamo_backend dynamo_mode dynamo_use_fullgraph dynamo_use_dynamic dynamo_use_regional_compilation
        backend use_dynamic""",
    "fp8_config": """
        backend use_autocast_during_eval margin interval fp8_format amax_history_len amax_compute_algo
        override_linear_precision opt_level enable_fsdp_float8_all_gather pad_inner_dim amax_history_length
        amax_compute_algorithm optimization_level fp8_backend""",
    "fsdp_config": """
        fsdp_version fsdp_reshard_after_forward fsdp_sharding_strategy fsdp_offload_params fsdp_auto_wrap_policy
        fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params fsdp_backward_prefetch fsdp_forward_prefetch
        fsdp_state_dict_type fsdp_use_orig_params fsdp_cpu_ram_efficient_loading fsdp_sync_module_states
        fsdp_activation_checkpointing fsdp_activation_checkpointing_offload fsdp_ignored_modules offload_params""",
    "ipex_config": "ipex use_xpu",
    "megatron_lm_config": """
        megatron_lm_tp_degree megatron_lm_pp_degree megatron_lm_num_micro_batches
        megatron_lm_sequence_parallelism megatron_lm_recompute_activations megatron_lm_use_distributed_optimizer
        megatron_lm_gradient_clipping megatron_lm_use_custom_fsdp megatron_lm_no_load_optim
        megatron_lm_no_save_optim megatron_lm_eod_mask_loss megatron_lm_overlap_cpu_optimizer_d2h_h2d
        megatron_lm_optimizer_cpu_offload megatron_lm_use_precision_aware_optimizer
        megatron_lm_decoder_last_pipeline_num_layers megatron_lm_recompute_granularity
        megatron_lm_recompute_method megatron_lm_recompute_num_layers megatron_lm_attention_backend
        megatron_lm_expert_model_parallel_size megatron_lm_context_parallel_size megatron_lm_attention_dropout
        megatron_lm_hidden_dropout megatron_lm_attention_softmax_in_fp32 megatron_lm_expert_tensor_parallel_size
        megatron_lm_calculate_per_token_loss megatron_lm_use_rotary_position_embeddings""",
    "mpirun_config": "mpirun_hostfile mpirun_ccl",
    "parallelism_config": """
        parallelism_config_dp_replicate_size parallelism_config_dp_shard_size parallelism_config_tp_size
        parallelism_config_cp_size parallelism_config_cp_backend parallelism_config_cp_comm_strategy
        parallelism_config_sp_size parallelism_config_sp_backend parallelism_config_sp_seq_length
        parallelism_config_sp_seq_length_is_variable parallelism_config_sp_attn_implementation""",
    "tp_config": "tp_size",
}
BOTH = "compute_environment distributed_type mixed_precision fp16 use_cpu debug gpu_ids num_machines dynamo_backend"
ONLY_CLUSTER = """
    num_processes machine_rank main_process_ip main_process_port rdzv_backend same_network main_training_function
    enable_cpu_affinity downcast_bf16 tpu_name tpu_zone tpu_use_cluster tpu_use_sudo command_file commands tpu_vm
    tpu_env"""
ONLY_JOB = """
    ec2_instance_type iam_role_name image_uri profile region base_job_name pytorch_version transformers_version
    py_version sagemaker_inputs_file sagemaker_metrics_file additional_args dynamo_config enable_cpu_affinity"""
CLUSTER = [*BOTH.split(), *ONLY_CLUSTER.split(), *SECTIONS]
JOB = [*BOTH.split(), *ONLY_JOB.split()]


def import_config(text: str) -> Imported:
    return convert(yaml_io.parse(text, "config.yaml").data, "config.yaml")


def import_and_fail(text: str) -> ProfileError:
    with pytest.raises(ProfileError) as caught:
        import_config(text)
    return caught.value


def list_keys(lines: tuple[tuple[str, str], ...]) -> list[str]:
    return [line.partition(": ")[0] for line, _ in lines]


def map_reasons(lines: tuple[tuple[str, str], ...]) -> dict[str, str]:
    return {line.partition(": ")[0]: text for line, text in lines}


def list_convertible_keys(data: dict[str, Any], *above: str) -> list[str]:
    """List the keys that must be converted or reported: in sections, and environment variables."""
    names = []
    for key, value in data.items():
        is_section = not above or (*above, key) == ("additional_args", "environment")
        names += (
            list_convertible_keys(value, *above, key)
            if is_section and isinstance(value, dict) and value
            else [".".join((*above, key))]
        )
    return names


# Conversion of files.


def test_a_plain_multi_gpu_file_is_converted_completely():
    result = import_config(MULTI_GPU)
    assert result.left == ()
    assert result.data["launcher"]["kind"] == "torchrun"
    assert result.data["launcher"]["nproc_per_node"] == 8
    assert result.data["launcher"]["nnodes"] == 1
    assert (result.data["device"], result.data["mixed_precision"]) == ("cuda", "bf16")
    assert ("num_processes: 8", "launcher.nproc_per_node: 8") in result.mapped
    assert ("debug: false", "off in accel as well") in result.mapped


def test_schema_version_is_the_first_key_of_the_profile():
    assert next(iter(import_config(MULTI_GPU).data.items())) == ("schema_version", 1)


def test_nodes_share_the_processes_and_use_the_main_process_as_rendezvous():
    result = import_config(MACHINES)
    assert result.data["launcher"]["nnodes"] == 2
    assert result.data["launcher"]["nproc_per_node"] == 8
    assert result.data["launcher"]["rdzv_endpoint"] == "10.0.0.7:29501"
    assert result.data["mixed_precision"] == "fp16"
    assert result.left == (("machine_rank: 1", "not needed: every node runs the same command"),)


def test_the_default_rendezvous_port_is_that_of_accelerate():
    result = import_config(MACHINES.replace("main_process_port: 29501\n", ""))
    assert result.data["launcher"]["rdzv_endpoint"] == "10.0.0.7:29500"


def test_an_ipv6_address_gets_brackets():
    result = import_config(MACHINES.replace("10.0.0.7", "'fd00::7'"))
    assert result.data["launcher"]["rdzv_endpoint"] == "[fd00::7]:29501"


def test_the_rendezvous_address_is_omitted_on_one_node():
    text = (
        "distributed_type: MULTI_GPU\nmain_process_ip: 10.0.0.7\nmain_process_port: 29501\nnum_processes: 2\n"
    )
    result = import_config(text)
    assert "rdzv_endpoint" not in result.data["launcher"]
    assert set(map_reasons(result.left).values()) == {"not needed on one node"}
    assert list_keys(result.left) == ["main_process_ip", "main_process_port"]


def test_disabled_options_of_a_section_are_not_reported_as_unused():
    mapped = map_reasons(import_config(FSDP).mapped)
    assert mapped["fsdp_config.fsdp_offload_params"] == "off in accel as well"
    assert mapped["parallelism_config.parallelism_config_tp_size"] == "off in accel as well"


def test_options_of_megatron_are_not_converted():
    result = import_config(MEGATRON)
    assert list_keys(result.left) == [
        "distributed_type",
        "megatron_lm_config.megatron_lm_gradient_clipping",
        "megatron_lm_config.megatron_lm_pp_degree",
        "megatron_lm_config.megatron_lm_tp_degree",
    ]


def test_several_cpu_processes_are_converted_without_mpirun():
    result = import_config(MULTI_CPU)
    assert result.data["device"] == "cpu"
    assert result.data["launcher"]["nproc_per_node"] == 4
    assert result.data["launcher"]["nnodes"] == 4
    assert result.data["launcher"]["rdzv_endpoint"] == "10.0.0.7:29500"
    assert "without mpirun" in map_reasons(result.left)["mpirun_config.mpirun_hostfile"]
    assert "ipex_config.ipex" in list_keys(result.left)


def test_the_early_fp16_switch_becomes_mixed_precision():
    result = import_config(LEGACY)
    assert result.data["mixed_precision"] == "fp16"
    assert ("fp16: true", "mixed_precision: fp16") in result.mapped
    assert result.data["compile"] == {"backend": "inductor"}
    assert "main_process_ip: null" in dict(result.mapped)


def test_mixed_precision_overrides_the_early_fp16_switch():
    result = import_config("distributed_type: NO\nfp16: true\nmixed_precision: bf16\n")
    assert result.data["mixed_precision"] == "bf16"
    assert list_keys(result.left) == ["fp16"]


@pytest.mark.parametrize("no", ["no", "'no'", "NO", "false", "off"])
def test_no_parsed_as_false_is_understood(no):
    result = import_config(f"distributed_type: {no}\nmixed_precision: {no}\n")
    assert result.data["launcher"] == {"kind": "single"}
    assert result.data["mixed_precision"] == "no"


def test_a_profile_contains_only_values_of_the_file():
    result = import_config("distributed_type: MULTI_CPU\nnum_processes: 2\n")
    assert result.data == {
        "schema_version": 1,
        "launcher": {"kind": "torchrun", "nnodes": 1, "nproc_per_node": 2},
        "device": "cpu",
        "mixed_precision": "no",
    }


def test_gpu_ids_become_a_key_of_the_launcher():
    result = import_config(ONE_GPU)
    assert result.data["launcher"]["gpu_ids"] == "0,1"
    assert "env" not in result.data
    assert ("gpu_ids: 0,1", "launcher.gpu_ids: 0,1") in result.mapped


def test_gpu_uuids_become_an_environment_variable():
    result = import_config("distributed_type: MULTI_GPU\ngpu_ids: GPU-7f, GPU-a0\nnum_processes: 2\n")
    assert "gpu_ids" not in result.data["launcher"]
    assert result.data["env"] == {"CUDA_VISIBLE_DEVICES": "GPU-7f,GPU-a0"}


def test_ids_of_intel_gpus_become_a_key_of_the_launcher():
    result = import_config("distributed_type: MULTI_XPU\ngpu_ids: '0, 2'\nnum_processes: 2\n")
    assert (result.data["device"], result.data["launcher"]["gpu_ids"]) == ("xpu", "0,2")


def test_gpu_ids_are_omitted_with_use_cpu():
    result = import_config("distributed_type: NO\ngpu_ids: 0\nuse_cpu: true\n")
    assert result.data["launcher"] == {"kind": "single"}
    assert result.data["device"] == "cpu"
    assert "env" not in result.data
    assert list_keys(result.left) == ["gpu_ids"]


@pytest.mark.parametrize("line", ["", "num_processes: -1\n", "num_processes: null\n"])
def test_an_unset_number_of_processes_becomes_auto(line):
    result = import_config(f"distributed_type: MULTI_GPU\n{line}")
    assert result.data["launcher"]["nproc_per_node"] == "auto"


def test_several_processes_are_omitted_with_distributed_type_no():
    result = import_config("distributed_type: NO\nnum_processes: 4\nnum_machines: 2\n")
    assert result.data["launcher"] == {"kind": "single"}
    assert list_keys(result.left) == ["num_processes", "num_machines"]


def test_a_rendezvous_backend_other_than_c10d_is_omitted():
    result = import_config("distributed_type: MULTI_GPU\nrdzv_backend: etcd\n")
    assert result.left == (("rdzv_backend: etcd", "accel always uses c10d"),)


def test_unsupported_enabled_options_are_omitted_with_a_reason():
    text = "distributed_type: NO\ndebug: true\nenable_cpu_affinity: true\nmain_training_function: f\ntpu_name: t\n"
    result = import_config(text)
    assert list_keys(result.left) == ["debug", "enable_cpu_affinity", "main_training_function", "tpu_name"]
    assert all(reason for _, reason in result.left)


def test_an_unknown_key_of_a_section_is_reported_with_a_suggestion():
    result = import_config("distributed_type: FSDP\nfsdp_config:\n  fsdp_verson: 2\n")
    expected = "Accelerate does not know this key (did you mean fsdp_version?)"
    assert map_reasons(result.left)["fsdp_config.fsdp_verson"] == expected


def test_secrets_are_masked():
    text = "distributed_type: NO\ntpu_env: [HF_TOKEN=hf_secret, A=1]\ncommands: [login --token hf_secret]\n"
    result = import_config(text)
    assert "hf_secret" not in str(result)
    assert "tpu_env: [***, A=1]" in dict(result.left)


@pytest.mark.parametrize("kind", ["XLA", "TPU"])
def test_a_tpu_file_becomes_launcher_xla(kind):
    result = import_config(TPU.replace("XLA", kind))
    launcher = result.data["launcher"]
    assert (launcher["kind"], launcher["replicas"], launcher["main_training_function"]) == (
        "xla",
        "all",
        "train",
    )
    assert (result.data["device"], result.data["env"]) == ("xla", {"WANDB_API_KEY": "secret"})
    mapped, omitted = map_reasons(result.mapped), map_reasons(result.left)
    assert mapped["num_processes"] == "launcher.replicas: all"
    assert mapped["main_training_function"] == "launcher.main_training_function: train"
    assert mapped["tpu_env"] == "env.WANDB_API_KEY"
    assert omitted["tpu_name"] == "use accel xla pod NAME"
    assert "every worker of a pod" in omitted["tpu_use_cluster"]
    assert omitted["commands"] == "use accel xla pod NAME --setup COMMAND for each command"
    assert "secret" not in str([*result.mapped, *result.left]).lower().replace("hf_secret", "").replace(
        "***", ""
    )


@pytest.mark.parametrize(
    ("line", "replicas"),
    [("num_processes: 1", 1), ("num_processes: -1", "all"), ("num_processes: 4", "all"), ("", "all")],
)
def test_one_process_on_a_tpu_becomes_one_replica_and_other_numbers_all(line, replicas):
    assert import_config(f"distributed_type: XLA\n{line}\n").data["launcher"]["replicas"] == replicas


def test_the_hosts_of_a_pod_are_omitted_with_a_reason():
    text = "distributed_type: XLA\nnum_machines: 2\nmachine_rank: 1\nmain_process_ip: 10.0.0.1\nnum_processes: 1\n"
    result = import_config(text)
    launcher = Profile.model_validate(result.data).launcher
    assert (launcher.nnodes, launcher.replicas) == (1, "all")
    assert list_keys(result.left) == ["num_machines", "machine_rank", "main_process_ip"]
    omitted = map_reasons(result.left)
    assert all("accel xla pod" in omitted[key] for key in ("num_machines", "main_process_ip"))


def test_downcast_bf16_is_omitted_with_a_replacement():
    omitted = map_reasons(
        import_config("distributed_type: XLA\ndowncast_bf16: 'yes'\nmixed_precision: bf16\n").left
    )
    assert "mixed_precision: bf16 keeps weights in full precision" in omitted["downcast_bf16"]


def test_main_training_function_is_converted_only_for_a_tpu():
    on_gpus = import_config("distributed_type: MULTI_GPU\nmain_training_function: train\n")
    assert list_keys(on_gpus.left) == ["main_training_function"]
    on_tpu = import_config("distributed_type: XLA\nmain_training_function: main\n")
    assert on_tpu.data["launcher"]["main_training_function"] == "main"
    assert on_tpu.left == ()


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("mixed_precision: fp16", "mixed_precision"),
        ("fp16: true", "fp16"),
        ("use_cpu: true", "use_cpu"),
        ("tpu_env: [A=1, B]", "tpu_env"),
        ("tpu_env: ['=1']", "tpu_env"),
    ],
)
def test_options_that_a_tpu_does_not_support_are_problems_of_their_keys(line, key):
    error = import_and_fail(f"distributed_type: XLA\n{line}\n")
    assert [problem.key for problem in error.problems] == [key]


@pytest.mark.parametrize("text", LOCAL)
def test_every_sample_becomes_a_valid_profile_and_each_key_is_reported(text):
    result = import_config(text)
    Profile.model_validate(result.data)
    keys = sorted([*list_keys(result.mapped), *list_keys(result.left)])
    assert keys == sorted(list_convertible_keys(yaml_io.parse(text, "config.yaml").data))


# Errors.


@pytest.mark.parametrize("device", ["NPU", "MLU", "SDAA", "MUSA", "HPU", "NEURON"])
def test_unsupported_devices_are_an_error(device):
    error = import_and_fail(f"distributed_type: MULTI_{device}\nnum_processes: 2\n")
    assert [problem.key for problem in error.problems] == ["distributed_type"]
    assert "cpu, cuda, mps, xla, xpu" in str(error)


def test_all_mistakes_are_reported_at_once():
    text = "distributed_type: MULTI_GPUS\nnum_procceses: 8\nmixed_precision: fp8\nuse_cpu: maybe\nfsdp_config: 3\n"
    error = import_and_fail(text)
    reported = {problem.key: str(problem) for problem in error.problems}
    assert reported["distributed_type"].endswith("got 'MULTI_GPUS' (did you mean MULTI_GPU?)")
    assert reported["num_procceses"] == (
        "config.yaml: num_procceses: Accelerate does not know this key (did you mean num_processes?)"
    )
    assert reported["mixed_precision"] == (
        "config.yaml: mixed_precision: fp8 is not in this version of accel; expected no, bf16 or fp16, got 'fp8'"
    )
    assert reported["use_cpu"] == "config.yaml: use_cpu: expected true or false, got 'maybe'"
    assert reported["fsdp_config"] == "config.yaml: fsdp_config: expected keys and values, got 3"
    assert len(error.problems) == 5


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("num_processes: 15", "num_processes"),
        ("main_process_ip: null", "main_process_ip"),
        ("main_process_port: 0", "main_process_port"),
        ("main_process_port: 65536", "main_process_port"),
        ("main_process_ip: 10.0.0.7:29500", "main_process_ip"),
        ("main_process_ip: 127.0.0.1", "main_process_ip"),
        ("main_process_ip: localhost", "main_process_ip"),
        ("main_process_ip: beef:29500", "main_process_ip"),
        ("num_processes: 0", "num_processes"),
        ("num_processes: -2", "num_processes"),
        ("num_processes: true", "num_processes"),
        ("num_machines: two", "num_machines"),
        ("machine_rank: -1", "machine_rank"),
        ("use_cpu: true", "use_cpu"),
        ("gpu_ids: [0, 1]", "gpu_ids"),
        ("gpu_ids: 0;1", "gpu_ids"),
        ("tpu_vm: {a: 1}", "tpu_vm"),
        ("compute_environment: AMAZON_SAGEMAKR", "compute_environment"),
        ("ec2_instance_type: ml.p3.2xlarge", "ec2_instance_type"),
        ("aws_secret_access_key: abc", "aws_secret_access_key"),
        ("deepspeed_config_file: ds.json", "deepspeed_config_file"),
        ("deepspeed_config_file: {zero_stage: 2}", "deepspeed_config_file"),
    ],
)
def test_an_invalid_value_is_a_problem_of_its_key(line, key):
    data = yaml_io.parse(MACHINES, "config.yaml").data | yaml_io.parse(line, "config.yaml").data
    with pytest.raises(ProfileError) as caught:
        convert(data, "config.yaml")
    assert [problem.key for problem in caught.value.problems] == [key]


def test_expected_values_are_listed_as_for_a_profile():
    error = import_and_fail("compute_environment: CLOUD\ndistributed_type: NO\nmixed_precision: fp32\n")
    reported = {problem.key: problem.expected for problem in error.problems}
    assert reported == {
        "compute_environment": "expected LOCAL_MACHINE or AMAZON_SAGEMAKER",
        "mixed_precision": "expected no, bf16 or fp16",
    }


def test_distributed_type_is_required():
    error = import_and_fail("compute_environment: LOCAL_MACHINE\n")
    assert [problem.key for problem in error.problems] == ["distributed_type"]


def test_accelerate_files_and_profiles_are_distinguished():
    assert is_accelerate_config({"distributed_type": "NO"})
    assert is_accelerate_config({"compute_environment": "LOCAL_MACHINE"})
    assert not is_accelerate_config({"schema_version": 1, "launcher": {"kind": "single"}})


# Properties of any file.

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
TRUTH = st.sampled_from([True, False, "yes", "no", None])
WORD = st.text() | st.none()
WORDS = st.lists(st.text(), max_size=3) | st.none()
TYPES = ["NO", False, "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "MPS", "XLA"]
SIZE = st.sampled_from([1, 2, "2", None])
COMPILER = st.sampled_from(["NO", "INDUCTOR", "aot_eager", None])
DIVIDING = {
    "fsdp_config": {
        "fsdp_version": st.sampled_from([1, 2, "2"]),
        "fsdp_sharding_strategy": st.sampled_from(
            ["FULL_SHARD", "shard_grad_op", 3, "4", "HYBRID_SHARD_ZERO2"]
        ),
        "fsdp_reshard_after_forward": TRUTH | st.just("NO_SHARD"),
        "offload_params": TRUTH,
        "fsdp_auto_wrap_policy": st.sampled_from(
            ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "no_wrap", None]
        ),
        "fsdp_transformer_layer_cls_to_wrap": st.sampled_from(["Block", "A, B", ["A"], "", None]),
        "fsdp_min_num_params": st.sampled_from([1, 1e8, "2000", None]),
        "fsdp_backward_prefetch": st.sampled_from(["BACKWARD_PRE", "NO_PREFETCH", None]),
        "fsdp_state_dict_type": st.sampled_from(["SHARDED_STATE_DICT", "FULL_STATE_DICT"]),
        "fsdp_activation_checkpointing": TRUTH,
        "fsdp_use_orig_params": TRUTH,
        "fsdp_ignored_modules": st.sampled_from(["lm_head", ["a.b"], "model.*", [], None]),
        "typo": ANYTHING,
    },
    "deepspeed_config": {
        "zero_stage": st.integers(0, 3) | st.sampled_from(["2", None]),
        "offload_optimizer_device": st.sampled_from(["none", "cpu", "nvme", None]),
        "offload_param_device": st.sampled_from(["none", "cpu", "nvme"]),
        "offload_param_nvme_path": WORD,
        "deepspeed_config_file": st.just("none") | st.none(),
        "gradient_clipping": ANYTHING,
        "typo": ANYTHING,
    },
    "parallelism_config": {
        **{
            f"parallelism_config_{name}_size": SIZE for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
        },
        "parallelism_config_cp_comm_strategy": st.sampled_from(["allgather", "alltoall"]),
        "tp_size": ANYTHING,
    },
    "tp_config": {"tp_size": SIZE},
    "dynamo_config": {
        "dynamo_backend": COMPILER,
        "dynamo_mode": st.sampled_from(["default", "max-autotune"]),
        **dict.fromkeys(["dynamo_use_fullgraph", "use_dynamic", "dynamo_use_regional_compilation"], TRUTH),
    },
}
GOOD = {
    "dynamo_backend": COMPILER,
    "compute_environment": st.just("LOCAL_MACHINE"),
    "mixed_precision": st.sampled_from(["no", "fp16", "bf16", False, "BF16"]),
    "gpu_ids": st.sampled_from(["all", "0,1", 0, "1, 2", None]),
    "machine_rank": st.integers(0, 7),
    "main_process_port": st.integers(1, 65535) | st.none(),
    "same_network": TRUTH,
    "fp16": TRUTH,
    "debug": TRUTH,
    "enable_cpu_affinity": TRUTH,
    "downcast_bf16": TRUTH,
    "tpu_use_cluster": TRUTH,
    "tpu_use_sudo": TRUTH,
    "commands": WORDS,
    "tpu_vm": WORDS,
    "tpu_env": WORDS,
    **dict.fromkeys(["rdzv_backend", "main_training_function", "tpu_name", "tpu_zone"], WORD),
    "command_file": WORD,
    **{
        section: st.dictionaries(
            st.sampled_from(names.split()) | st.from_regex("[a-z]{1,9}", fullmatch=True), ANYTHING
        )
        for section, names in SECTIONS.items()
        if section not in DIVIDING
    },
    **{section: st.fixed_dictionaries({}, optional=DIVIDING[section]) for section in DIVIDING},
}


def convert_or_empty(file: dict[str, Any]) -> dict[str, Any]:
    try:
        return convert(file, "config.yaml").data
    except ProfileError:
        return {}


@st.composite
def good_files(draw):
    machines, each = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    kind = draw(st.sampled_from(TYPES))
    # fp16 is no number format of a TPU, and text is no variable.
    tpu = {"mixed_precision": "bf16", "tpu_env": ["A=1", "B="]} if kind == "XLA" else {}
    good = draw(st.fixed_dictionaries({}, optional=GOOD))
    sized = "parallelism_config" in good or "tp_config" in good
    return {
        **good,
        "distributed_type": kind,
        "num_machines": machines,
        "num_processes": -1 if sized else draw(st.sampled_from([-1, machines * each])),
        "main_process_ip": draw(st.sampled_from(["node-1", "10.0.0.1", "fd00::1"])),
        "use_cpu": draw(TRUTH) if kind in {"NO", "MULTI_CPU", "FSDP"} else False,
        **tpu,
    }


@given(good_files())
def test_every_key_is_reported_exactly_once(data):
    result = convert(data, "config.yaml")
    reported = [line.split(": ")[0] for line, _ in (*result.mapped, *result.left)]
    assert sorted(reported) == sorted(key.split(": ")[0] for key in list_convertible_keys(data))
    assert all(text for _, text in (*result.mapped, *result.left))


@given(good_files())
def test_a_converted_profile_is_equal_after_writing(data):
    result = convert(data, "config.yaml")
    profile = Profile.model_validate(result.data)
    assert Profile.model_validate(profile.data()) == profile
    assert yaml_io.parse(yaml_io.dump(result.data), "accel.yaml").data == result.data


@given(
    st.dictionaries(st.sampled_from(CLUSTER), ANYTHING, max_size=6),
    st.sampled_from([*TYPES, "TPU", "MULTI_HPU"]),
)
def test_any_value_of_a_known_key_is_converted_or_a_problem(data, kind):
    for file in (data, {"distributed_type": kind, **data}):
        Profile.model_validate(convert_or_empty(file))


@pytest.mark.parametrize(
    ("key", "form"), [*((key, "cluster") for key in CLUSTER), *((key, "job") for key in JOB)]
)
def test_every_key_of_accelerate_is_known(key, form):
    environment = "AMAZON_SAGEMAKER" if form == "job" else "LOCAL_MACHINE"
    with pytest.raises(ProfileError) as caught:
        convert({"compute_environment": environment, "typo": 1, key: {"a": 1}}, "config.yaml")
    unknown = [problem.key for problem in caught.value.problems if "does not know" in problem.expected]
    assert unknown == ["typo"]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_of_a_section_is_known(section):
    names = SECTIONS[section].split()
    try:
        left = convert({"distributed_type": "NO", section: dict.fromkeys(names, "x")}, "config.yaml").left
    except ProfileError as error:  # the other values are not accepted
        left = tuple((f"{problem.key}: x", problem.expected) for problem in error.problems)
    assert not [name for name in names if "know this key" in map_reasons(left).get(f"{section}.{name}", "")]


def test_every_key_has_a_meaning_in_the_vocabulary_or_a_function():
    settings = [setting for setting in [*launch.list_settings(), *SETTINGS] if setting.key]
    without = [
        setting.key
        for setting in settings
        if not (setting.reason or setting.profile_key or setting in config_conversion._CONVERTED)
    ]
    assert not without
    targets = {
        rule.target
        for keys in (config_conversion.CLUSTER_KEYS, *config_conversion.JOB_KEYS.values())
        for rule in keys.values()
    }
    assert targets - {""} <= set(known_keys())
