"""The tables of all keys of an Accelerate config file: one row a key, with its rule.

`take` renames a key, `same` answers that accel does that anyway, and `drop` answers why no profile has the key. The
other rows name the function that converts the key, because the result depends on other keys too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from accel_cli.accelerate.config import (
    DEEPSPEED_FILE,
    LOCAL,
    SAGEMAKER,
    AccelerateConfig,
    InvalidValueError,
    Parser,
    choice,
    format_value,
    integer,
    keep,
    normalize,
    pairs,
    parse_bool,
    parse_class_names,
    parse_distributed_type,
    parse_gpu_ids,
    parse_host,
    parse_instance_type,
    parse_mapping,
    parse_or,
    parse_precision,
    parse_strategy,
    parse_text,
    parse_texts,
)
from accel_cli.console import is_secret
from accel_cli.launchers import LAUNCHERS
from accel_cli.profile.validation_errors import did_you_mean
from accel_runtime.environment.settings import find_nearest

__all__ = ["CLUSTER_KEYS", "SAGEMAKER_KEYS", "SECTIONS", "Answer", "Rule", "dropped", "find_rule"]


@dataclass(frozen=True)
class Answer:
    """The result of converting a key."""

    text: str
    """The keys of the profile that it becomes, or the reason why it becomes none."""
    is_applied: bool = True
    """False if accel does not do what the key asks for."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The values that it sets, by dotted key of the profile."""


@dataclass(frozen=True)
class Rule:
    """A row of a table: how a key is converted."""

    convert: Callable[[Any, AccelerateConfig], Answer]
    """Returns the answer for a parsed value."""
    parse: Parser = keep
    off: tuple[str, ...] = ()
    """The normalized values that ask for nothing."""
    target: str = ""
    """The dotted key of the profile, if the key is only renamed."""

    def apply(self, value: Any, config: AccelerateConfig) -> Answer:
        """Return the answer for a value of the file.

        Raises:
            InvalidValueError: The key does not accept the value.
        """
        if value is None:
            return Answer("not set")
        if normalize(value) in self.off:
            return OFF
        parsed = self.parse(value)
        return OFF if normalize(parsed) in self.off else self.convert(parsed, config)


OFF = Answer("off in accel as well")
_EMPTY = ("", "false", "[]", "{}")


def take(target: str, parse: Parser, *off: str) -> Rule:
    """Return the rule of a key that the profile has under another name."""
    return Rule(lambda value, _: sets({target: value}), parse, (*_EMPTY, *off), target)


def same(text: str, *values: Any, parse: Parser = keep) -> Rule:
    """Return the rule of a key that asks for what accel does anyway; with values, only if it has one of them."""
    return Rule(
        lambda value, _: Answer(text, is_applied=not values or value in values),
        parse,
        () if values else _EMPTY,
    )


def drop(reason: str, *off: str, parse: Parser = keep) -> Rule:
    """Return the rule of a key that no profile has."""
    return Rule(lambda *_: dropped(reason), parse, (*_EMPTY, *off))


def dropped(reason: str) -> Answer:
    """Return the answer for a key that is left out."""
    return Answer(reason, is_applied=False)


def sets(values: Mapping[str, Any], note: str = "") -> Answer:
    """Return the answer for a key that sets values of the profile."""
    text = ", ".join(f"{key}: {format_value(key, value)}" for key, value in values.items())
    return Answer(f"{text} ({note})" if note else text, values=values)


# Launch settings, with `compute_environment: LOCAL_MACHINE`.

_NO_MEGATRON = "Megatron-LM is not in this version of accel"
_COMPILE = "call torch.compile in the script"
_POD = "use accel tpu-pod NAME, which starts the script on all hosts of a TPU pod"
_SECTION = Rule(lambda *_: OFF, parse_mapping)


def _convert_distributed_type(kind: str, config: AccelerateConfig) -> Answer:
    parallel = {f"parallel.{name}": size for name, size in config.parallel.items()}
    values = {"launcher.kind": config.launcher, "device": config.device, **parallel}
    text = sets({key: value for key, value in values.items() if (key, value) != ("device", "auto")}).text
    if kind == "MEGATRON_LM":
        text = f"{text} ({_NO_MEGATRON})"
    elif kind in {"FSDP", "DEEPSPEED"} and not parallel:
        text += ", and models are replicated on every process (DDP)"
    return Answer(text, kind != "MEGATRON_LM", {**values, "mixed_precision": config.precision})


def _convert_num_processes(number: int, config: AccelerateConfig) -> Answer:
    if config.is_tpu:  # Accelerate starts one on every core too, whatever the number.
        return sets({"launcher.replicas": 1 if number == config.num_machines == 1 else "all"})
    if config.is_multi_process:
        return sets({"launcher.nproc_per_node": "auto" if number == -1 else number // config.num_machines})
    return Answer(config.explain_single_process(), is_applied=number <= 1)


def _convert_num_machines(number: int, config: AccelerateConfig) -> Answer:
    if config.is_tpu:
        return dropped(_POD) if number > 1 else Answer("one host of a TPU")
    if config.is_multi_process:
        return sets({"launcher.nnodes": number})
    return Answer(config.explain_single_process(), is_applied=number == 1)


def _convert_rendezvous(value: Any, config: AccelerateConfig) -> Answer:
    """Convert `main_process_ip` or `main_process_port`."""
    if config.needs_rendezvous:
        return sets({"launcher.rdzv_endpoint": str(config.endpoint)})
    reason = _POD if config.num_machines > 1 and config.is_tpu else "not needed on one node"
    return Answer(reason, is_applied=value == 0)


def _convert_fp16(_: bool, config: AccelerateConfig) -> Answer:
    if config.precision == "fp16":
        return Answer("mixed_precision: fp16")
    return dropped("mixed_precision takes precedence, as in Accelerate")


def _convert_gpu_ids(ids: str, config: AccelerateConfig) -> Answer:
    if ids.lower() == "all":
        return Answer("accel uses all GPUs")
    if config.device in {"cpu", "mps", "xla"}:
        return dropped(f"no GPUs to select on device: {config.device}")
    has_key = "gpu_ids" in LAUNCHERS[config.launcher].model_fields
    if has_key and all(name.isdecimal() for name in ids.split(",")):
        return sets({"launcher.gpu_ids": ids})
    return sets({"env.ZE_AFFINITY_MASK" if config.device == "xpu" else "env.CUDA_VISIBLE_DEVICES": ids})


def _convert_function(name: str, config: AccelerateConfig) -> Answer:
    if config.is_tpu and name:
        return sets({"launcher.main_training_function": name})
    return Answer("accel runs the script, not a function of it", is_applied=name in {"", "main"})


def _convert_tpu_env(entries: list[str], config: AccelerateConfig) -> Answer:
    if not config.is_tpu:
        return dropped("used only on TPUs")
    if any(not re.fullmatch(r"[^=\0]+=[^\0]*", entry, re.DOTALL) for entry in entries):
        raise InvalidValueError("expected a list of NAME=VALUE")
    variables = {f"env.{name}": value for name, _, value in (entry.partition("=") for entry in entries)}
    return Answer(", ".join(variables), values=variables)


_COMMON_KEYS: Mapping[str, Rule] = {
    "mixed_precision": replace(take("mixed_precision", parse_precision), off=()),
    "fp16": Rule(_convert_fp16, parse_bool, _EMPTY),
    "use_cpu": Rule(lambda _, config: Answer(f"device: {config.device}"), parse_bool),
    "gpu_ids": Rule(_convert_gpu_ids, parse_gpu_ids),
    "debug": drop("accel has no option for checks of collectives", parse=parse_bool),
    "enable_cpu_affinity": drop("accel does not bind processes to processor cores", parse=parse_bool),
    "dynamo_backend": drop(_COMPILE, parse=parse_text),
    "dynamo_config": _SECTION,
}
_parse_environment = choice(LOCAL, SAGEMAKER)
CLUSTER_KEYS: Mapping[str, Rule] = {
    **_COMMON_KEYS,
    "compute_environment": Rule(lambda *_: Answer("accel runs on this machine"), _parse_environment),
    "distributed_type": Rule(_convert_distributed_type, parse_distributed_type),
    "num_processes": Rule(_convert_num_processes, integer(1, auto=-1)),
    "num_machines": Rule(_convert_num_machines, integer(1)),
    "machine_rank": same("not needed: every node runs the same command", 0, parse=integer(0)),
    "main_process_ip": Rule(_convert_rendezvous, parse_host),
    "main_process_port": Rule(_convert_rendezvous, integer(0, 65535)),
    "same_network": same("nodes may be on any network", parse=parse_bool),
    "rdzv_backend": same("accel always uses c10d", "static", "c10d", "", parse=parse_text),
    "main_training_function": Rule(_convert_function, parse_text),
    "tpu_env": Rule(_convert_tpu_env, parse_texts, _EMPTY),
    "tpu_name": drop("use accel tpu-pod NAME", parse=parse_text),
    "tpu_zone": drop("use accel tpu-pod NAME --zone ZONE", parse=parse_text),
    "tpu_use_cluster": drop("accel tpu-pod NAME runs the command on every worker of a pod", parse=parse_bool),
    "tpu_use_sudo": drop("use sudo in accel tpu-pod NAME --setup COMMAND", parse=parse_bool),
    "tpu_vm": drop("accel tpu-pod NAME starts all workers of the pod", parse=parse_texts),
    "commands": drop("use accel tpu-pod NAME --setup COMMAND for each command", parse=parse_texts),
    "command_file": drop(
        "use accel tpu-pod NAME --setup COMMAND for each line of the file", parse=parse_text
    ),
    "downcast_bf16": drop("mixed_precision: bf16 keeps weights in full precision", parse=parse_bool),
    **dict.fromkeys(("deepspeed_config", "fp8_config", "fsdp_config", "ipex_config"), _SECTION),
    **dict.fromkeys(("megatron_lm_config", "mpirun_config", "parallelism_config", "tp_config"), _SECTION),
}
"""The keys of a file of `compute_environment: LOCAL_MACHINE`."""


# FSDP.

_META_DEVICE = "create the model with init_empty_weights(), and call accelerator.load_model() after prepare()"
_GATHERS_EARLY = "fully_shard always gathers the next module early"
_SHARDED_CHECKPOINTS = "checkpoints are always sharded; use accelerator.save_model() for full weights"


def _convert_strategy(strategy: str, config: AccelerateConfig) -> Answer:
    """Convert `sharding_strategy` of FSDP1 or `reshard_after_forward` of FSDP2."""
    if strategy != config.fsdp_strategy:
        return dropped("sharding_strategy or reshard_after_forward takes precedence")
    if strategy == "NO_SHARD":
        return Answer("models are replicated")
    is_hybrid = strategy.startswith("HYBRID") and config.num_machines > 1
    note = f"parallel.dp_replicate: {config.num_machines}, one replica for each node" if is_hybrid else ""
    reshard = strategy not in {"SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"}
    return sets({"fully_shard.reshard_after_forward": reshard}, note)


def _convert_wrap_policy(policy: str, config: AccelerateConfig) -> Answer:
    if policy == "NO_WRAP":
        return sets({"fully_shard.wrap": "none"})
    key, default = _WRAP_KEYS[policy]
    wrap = parse_or(_FSDP[key].parse, config.fsdp.get(key), default) or "auto"
    return sets({"fully_shard.wrap": wrap}, "_no_split_modules of the model" if wrap == "auto" else "")


def _wrap_with(policy: str, parse: Parser) -> Rule:
    """Return the rule of a key that Accelerate uses with one policy of wrapping only."""

    def convert(value: Any, config: AccelerateConfig) -> Answer:
        if normalize(config.fsdp.get("fsdp_auto_wrap_policy")) == policy.lower():
            return sets({"fully_shard.wrap": value})
        return dropped(f"Accelerate uses it with {policy} only")

    return Rule(convert, parse, _EMPTY)


def _convert_ignored_modules(value: Any, _: AccelerateConfig) -> Answer:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidValueError("expected names of modules, or a regular expression")
    if not all(re.fullmatch(r"[\w.]+", name) for name in names):
        return dropped("regular expressions are not supported: list names or patterns in fully_shard.ignore")
    return sets({"fully_shard.ignore": names})


_WRAP_KEYS: Mapping[str, tuple[str, Any]] = {
    "SIZE_BASED_WRAP": ("fsdp_min_num_params", 100_000_000),  # Accelerate's default
    "TRANSFORMER_BASED_WRAP": ("fsdp_transformer_layer_cls_to_wrap", []),
}
_parse_wrap_policy = choice(*_WRAP_KEYS, "NO_WRAP")
_parse_state_dict = choice("SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT")
_parse_prefetch = choice(
    "BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", aliases={"1": "BACKWARD_PRE", "2": "BACKWARD_POST"}
)
_FSDP: Mapping[str, Rule] = {
    "fsdp_version": Rule(lambda *_: Answer("accel uses FSDP2 (fully_shard)"), integer(1, 2)),
    "fsdp_sharding_strategy": Rule(_convert_strategy, parse_strategy),
    "fsdp_reshard_after_forward": Rule(_convert_strategy, parse_strategy),
    "fsdp_offload_params": take("fully_shard.cpu_offload", parse_bool),
    "fsdp_auto_wrap_policy": Rule(_convert_wrap_policy, _parse_wrap_policy),
    "fsdp_transformer_layer_cls_to_wrap": _wrap_with("TRANSFORMER_BASED_WRAP", parse_class_names),
    "fsdp_min_num_params": _wrap_with("SIZE_BASED_WRAP", integer(1)),
    "fsdp_backward_prefetch": same(_GATHERS_EARLY, "BACKWARD_PRE", parse=_parse_prefetch),
    "fsdp_forward_prefetch": same(_GATHERS_EARLY),
    "fsdp_state_dict_type": same(_SHARDED_CHECKPOINTS, "SHARDED_STATE_DICT", parse=_parse_state_dict),
    "fsdp_use_orig_params": same("parameters always keep their names and shapes", True, parse=parse_bool),
    "fsdp_cpu_ram_efficient_loading": drop(_META_DEVICE),
    "fsdp_sync_module_states": same("every process ends up with the parameters of the first one"),
    "fsdp_activation_checkpointing": take("fully_shard.activation_checkpointing", parse_bool),
    "fsdp_activation_checkpointing_offload": drop("accel keeps checkpointed activations on the device"),
    "fsdp_ignored_modules": Rule(_convert_ignored_modules, off=_EMPTY),
}


# DeepSpeed: the section, and the JSON file that it may name.

_ZERO_3 = 3


def _convert_zero_stage(stage: int, config: AccelerateConfig) -> Answer:
    if stage == 0:
        return Answer("models are replicated")
    if stage < _ZERO_3:
        note = "parameters are sharded between steps too"
        return sets({"fully_shard.reshard_after_forward": False}, note)
    return sets({"fully_shard.reshard_after_forward": config.hpz_size if config.hpz_size > 1 else True})


def _convert_offload(device: str, _: AccelerateConfig) -> Answer:
    to_disk, to_host = "accel does not offload to disks", "parameters, gradients and optimizer state"
    note = to_disk if device == "nvme" else to_host
    return replace(sets({"fully_shard.cpu_offload": True}, note), is_applied=device == "cpu")


def _convert_deepspeed_file(_: str, config: AccelerateConfig) -> Answer:
    if config.deepspeed_file is not None:
        return Answer("its keys are listed below")
    return dropped("file not found; ZeRO-3 is assumed, which needs the least memory")


def _enables(precision: str) -> Rule:
    """Return the rule of `enabled` in a section of the JSON file that is named after a number format."""

    def convert(_: bool, config: AccelerateConfig) -> Answer:
        if config.precision == precision:
            return Answer(f"mixed_precision: {precision}")
        return dropped("mixed_precision of the config takes precedence")

    return Rule(convert, parse_bool, _EMPTY)


def _convert_hpz(number: int, config: AccelerateConfig) -> Answer:
    if config.zero_stage != _ZERO_3:
        return dropped("used only with ZeRO-3")
    return sets({"fully_shard.reshard_after_forward": number})


_ACCUMULATION = "set it in the script: Accelerator(gradient_accumulation_steps=...)"
_CLIPPING = "clip in the script: accelerator.clip_grad_norm_()"
_MICS = "set parallel.dp_shard to this size, and parallel.dp_replicate to the number of such groups"
_SAVE_MODEL = "use accelerator.save_model()"
_PINNED = same("shards in host memory are pinned")
_BATCH_SIZE = drop("set it in the DataLoader of the script")
_DISK = drop("accel does not offload to disks", "none")
_MULTI_NODE = drop("not needed: every node runs the same command")
_ZERO_STAGE = Rule(_convert_zero_stage, integer(0, 3))
_parse_reduce_dtype = choice("fp32", "fp16", "bf16", aliases={"bfp16": "bf16"})
_OFFLOAD = Rule(_convert_offload, choice("none", "cpu", "nvme"), (*_EMPTY, "none"))
_DEEPSPEED: Mapping[str, Rule] = {
    "zero_stage": _ZERO_STAGE,
    "offload_optimizer_device": _OFFLOAD,
    "offload_param_device": _OFFLOAD,
    "offload_optimizer_nvme_path": _DISK,
    "offload_param_nvme_path": _DISK,
    "gradient_accumulation_steps": drop(_ACCUMULATION, "1", "auto"),
    "gradient_clipping": drop(_CLIPPING, "0", "auto", "none"),
    "zero3_init_flag": drop(_META_DEVICE),
    "zero3_save_16bit_model": drop(_SAVE_MODEL),
    "deepspeed_moe_layer_cls_names": drop("list the classes of experts in fully_shard.wrap"),
    "deepspeed_config_file": Rule(_convert_deepspeed_file),
    "deepspeed_multinode_launcher": _MULTI_NODE,
    "deepspeed_hostfile": _MULTI_NODE,
    "deepspeed_exclusion_filter": _MULTI_NODE,
    "deepspeed_inclusion_filter": _MULTI_NODE,
}
_DEEPSPEED_FILE: Mapping[str, Rule] = {
    "zero_optimization.stage": _ZERO_STAGE,
    "zero_optimization.offload_optimizer.device": _OFFLOAD,
    "zero_optimization.offload_param.device": _OFFLOAD,
    "zero_optimization.offload_optimizer.pin_memory": _PINNED,
    "zero_optimization.offload_param.pin_memory": _PINNED,
    "zero_optimization.zero_hpz_partition_size": Rule(_convert_hpz, integer(1), ("1",)),
    "zero_optimization.mics_shard_size": drop(_MICS, "-1", "1", parse=integer(1, auto=-1)),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": drop(_SAVE_MODEL),
    "bf16.enabled": _enables("bf16"),
    "bfloat16.enabled": _enables("bf16"),
    "fp16.enabled": _enables("fp16"),
    "fp16": drop("set it in the script: GradScalerKwargs", "0"),
    "communication_data_type": take("fully_shard.reduce_dtype", _parse_reduce_dtype),
    "gradient_accumulation_steps": drop(_ACCUMULATION, "1"),
    "gradient_clipping": drop(_CLIPPING, "0"),
    "optimizer": drop("create an optimizer of torch in the script instead of DummyOptim", "0"),
    "scheduler": drop("create a scheduler of torch in the script instead of DummyScheduler", "0"),
    "train_batch_size": _BATCH_SIZE,
    "train_micro_batch_size_per_gpu": _BATCH_SIZE,
    "activation_checkpointing": drop("set fully_shard.activation_checkpointing: true instead", "0"),
    "*": drop("specific to DeepSpeed; accel does not have this option", "0"),
}
"""Keys of DeepSpeed's JSON file; a key with no row has that of its section."""


# Other sections.


def _mesh_size(name: str) -> Rule:
    def convert(size: int, config: AccelerateConfig) -> Answer:
        reason = config.explain_single_process()
        return dropped(reason) if reason else Answer(f"parallel.{name}: {size}")

    return Rule(convert, integer(1), ("1",))


_SEQUENCE_PARALLEL = drop("sequence parallelism of DeepSpeed is not supported; use parallel.cp", "1")


# Amazon SageMaker: the file, and the arguments of SageMaker's estimator in it.


_OLDEST_TORCH = (2, 9)


def _convert_sagemaker_type(kind: str, config: AccelerateConfig) -> Answer:
    values = {"launcher.kind": "sagemaker", "device": config.device, "mixed_precision": config.precision}
    if kind == "NO" and not config.additional_args.get("distribution"):
        return Answer("launcher.nproc_per_node: 1", values={**values, "launcher.nproc_per_node": 1})
    if kind == "NO":
        return Answer("launcher.kind: sagemaker", values=values)
    reason = (
        "no AWS image with torch 2.9 or newer has SageMaker's model-parallel library; set parallel instead"
    )
    if kind == "DATA_PARALLEL" and not (reason := config.explain_no_smddp()):
        return Answer("process_group_backend: smddp", values={**values, "process_group_backend": "smddp"})
    return Answer(reason, is_applied=False, values=values)


def _convert_torch_version(version: str, config: AccelerateConfig) -> Answer:
    if config.has_image:
        return dropped("launcher.image_uri determines the version of torch")
    if (match := re.match(r"(\d+)\.(\d+)", version)) and (int(match[1]), int(match[2])) >= _OLDEST_TORCH:
        return sets({"launcher.pytorch_version": version})
    oldest = ".".join(map(str, _OLDEST_TORCH))
    return dropped(f"accel needs torch {oldest} or newer; the image matches the torch of this machine")


def _convert_distribution(value: Mapping[str, Any], _: AccelerateConfig) -> Answer:
    is_torchrun = isinstance(value, Mapping) and value.keys() <= {"torch_distributed", "pytorchddp"}
    return Answer("accel starts the processes of every host with torchrun", is_applied=is_torchrun)


def _variable(name: str) -> Rule:
    """Return the rule of an environment variable."""
    if is_secret(name):
        reason = f"a secret: store it in AWS Secrets Manager, and write its name in launcher.secrets.{name}"
        return drop(reason, parse=parse_text)
    return Rule(lambda value, _: sets({f"env.{name}": value}), parse_text)


_COUNT = integer(0)
_INSTANCE_TYPE = take("launcher.instance_type", parse_instance_type)
_TORCH_VERSION = Rule(_convert_torch_version, parse_text, _EMPTY, "launcher.pytorch_version")
_PY_VERSION = drop("the image determines the version of Python", parse=parse_text)
_TRANSFORMERS_VERSION = drop("list transformers in the file of launcher.requirements", parse=parse_text)
_BUCKET = drop("accel puts everything of a job below s3://BUCKET/accel: launcher.bucket")
_WITHOUT_SETTING = """
    debugger_hook_config enable_infra_check enable_remote_debug enable_sagemaker_metrics enable_session_tag_chaining
    instance_groups max_retry_attempts profiler_config rules tensorboard_output_config training_plan
    training_repository_access_mode"""
SAGEMAKER_KEYS: Mapping[str, Rule] = {
    **_COMMON_KEYS,
    "compute_environment": Rule(lambda *_: Answer("launcher.kind: sagemaker"), _parse_environment),
    "distributed_type": Rule(_convert_sagemaker_type, choice("NO", "DATA_PARALLEL", "MODEL_PARALLEL")),
    "base_job_name": take("launcher.base_job_name", parse_text),
    "ec2_instance_type": _INSTANCE_TYPE,
    "iam_role_name": take("launcher.role", parse_text),
    "image_uri": take("launcher.image_uri", parse_text),
    "num_machines": take("launcher.instance_count", integer(1)),
    "profile": take("launcher.aws_profile", parse_text),
    "pytorch_version": _TORCH_VERSION,
    "region": take("launcher.region", parse_text),
    "sagemaker_inputs_file": drop(
        "write its channels in launcher.inputs: {train: s3://bucket/folder}", parse=parse_text
    ),
    "sagemaker_metrics_file": drop(
        "write its metrics in launcher.metrics: {loss: 'loss ([0-9.]+)'}", parse=parse_text
    ),
    "transformers_version": _TRANSFORMERS_VERSION,
    "py_version": _PY_VERSION,
    "additional_args": _SECTION,
}
"""The keys of a file of `compute_environment: AMAZON_SAGEMAKER`."""
_ARGUMENTS: Mapping[str, Rule] = {
    "base_job_name": take("launcher.base_job_name", parse_text),
    "checkpoint_s3_uri": take("launcher.checkpoint_uri", parse_text),
    "enable_network_isolation": take("launcher.network_isolation", parse_bool),
    "encrypt_inter_container_traffic": take("launcher.encrypt_traffic", parse_bool),
    "framework_version": _TORCH_VERSION,
    "image_uri": take("launcher.image_uri", parse_text),
    "instance_count": take("launcher.instance_count", _COUNT),
    "instance_type": _INSTANCE_TYPE,
    "keep_alive_period_in_seconds": take("launcher.keep_alive", _COUNT, "0"),
    "max_run": take("launcher.max_run", _COUNT),
    "max_wait": take("launcher.max_wait", _COUNT, "0"),
    "metric_definitions": take("launcher.metrics", pairs("Name", "Regex")),
    "output_kms_key": take("launcher.output_kms_key", parse_text),
    "pytorch_version": _TORCH_VERSION,
    "role": take("launcher.role", parse_text),
    "security_group_ids": take("launcher.security_group_ids", parse_texts),
    "source_dir": take("launcher.source_dir", parse_text),
    "subnets": take("launcher.subnets", parse_texts),
    "tags": take("launcher.tags", pairs("Key", "Value")),
    "use_spot_instances": take("launcher.spot", parse_bool),
    "volume_kms_key": take("launcher.volume_kms_key", parse_text),
    "volume_size": take("launcher.volume_size", _COUNT),
    "environment": _SECTION,
    "checkpoint_local_path": same("accel always uses /opt/ml/checkpoints", "/opt/ml/checkpoints"),
    "container_log_level": same("accel does not use SageMaker's toolkit", "20", parse=normalize),
    "input_mode": same("set it for each channel in launcher.inputs", "file", parse=normalize),
    "code_location": _BUCKET,
    "output_path": _BUCKET,
    "dependencies": drop("accel sends launcher.source_dir only; copy the dependencies into it"),
    "distribution": Rule(_convert_distribution, off=_EMPTY),
    "entry_point": drop("use accel launch SCRIPT"),
    "git_config": drop("accel sends the files of this machine; check the repository out here"),
    "hyperparameters": drop("pass them to the script: accel launch SCRIPT --name value"),
    "inputs": drop("write them in launcher.inputs"),
    "model_dir": drop("write it in launcher.model_dir"),
    "py_version": _PY_VERSION,
    "transformers_version": _TRANSFORMERS_VERSION,
    "disable_profiler": same("accel does not use SageMaker's profiler", "true", "1", parse=normalize),
    **dict.fromkeys(_WITHOUT_SETTING.split(), drop("a job of accel does not have this setting")),
}
"""The arguments in `additional_args`."""
SECTIONS: Mapping[str, Mapping[str, Rule]] = {
    "fsdp_config": _FSDP,
    "deepspeed_config": _DEEPSPEED,
    DEEPSPEED_FILE: _DEEPSPEED_FILE,
    "parallelism_config": {
        "parallelism_config_dp_replicate_size": _mesh_size("dp_replicate"),
        "parallelism_config_dp_shard_size": _mesh_size("dp_shard"),
        "parallelism_config_tp_size": _mesh_size("tp"),
        "parallelism_config_cp_size": _mesh_size("cp"),
        "parallelism_config_cp_backend": same("accel uses torch's too"),
        "parallelism_config_cp_comm_strategy": same("torch always uses allgather", "allgather"),
        "parallelism_config_sp_size": _SEQUENCE_PARALLEL,
        "parallelism_config_sp_backend": _SEQUENCE_PARALLEL,
        "parallelism_config_sp_seq_length": _SEQUENCE_PARALLEL,
        "parallelism_config_sp_seq_length_is_variable": _SEQUENCE_PARALLEL,
        "parallelism_config_sp_attn_implementation": _SEQUENCE_PARALLEL,
    },
    "tp_config": {"tp_size": _mesh_size("tp")},
    "dynamo_config": {"dynamo_mode": drop(_COMPILE, "default"), "*": drop(_COMPILE)},
    "megatron_lm_config": {"megatron_lm_gradient_clipping": drop(_CLIPPING), "*": drop(_NO_MEGATRON)},
    "mpirun_config": {"*": drop("accel starts the processes itself, without mpirun", "0")},
    "fp8_config": {"*": drop("fp8 is not in this version of accel")},
    "ipex_config": {"*": drop("accel does not use IPEX")},  # of early releases
    "additional_args": _ARGUMENTS,
}
"""The keys of each section; `*` is any other key."""
_OPTIONAL_PREFIXES = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_"}
"""Accelerate adds the prefix to keys without it."""


def find_rule(section: str, names: tuple[str, ...]) -> Rule:
    """Return the rule of a key in a section, by the names that lead to it."""
    rules, key = SECTIONS[section], names[0]
    if (section, key) == ("additional_args", "environment") and len(names) > 1:
        return _variable(names[1])
    prefix = _OPTIONAL_PREFIXES.get(section, "")
    for name in (".".join(names), key, prefix + key, "*"):
        if name in rules:
            return rules[name]
    if section == "additional_args" and is_secret(key):
        return drop("credentials stay with AWS's tools; launcher.aws_profile names a profile of theirs")
    known = [*rules, *(name.removeprefix(prefix) for name in rules)]
    nearest = find_nearest(key, known) or next((name for name in rules if name.endswith(f"_{key}")), None)
    unknown = "Accelerate" if section != "additional_args" else "accel"
    hint = f" ({did_you_mean(nearest)})" if nearest else ""
    return Rule(lambda *_: dropped(f"{unknown} does not know this key{hint}"))
