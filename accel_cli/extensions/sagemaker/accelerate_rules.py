"""The keys of Accelerate's config file for training jobs of Amazon SageMaker, and their rules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from accel_cli.accelerate.config_values import (
    EMPTY,
    OFF,
    AccelerateConfig,
    Answer,
    JobRules,
    KeyRule,
    build_rule,
    drop,
    dropped,
    integer,
    normalize,
    pairs,
    parse_bool,
    parse_instance_type,
    parse_mapping,
    parse_or,
    parse_text,
    parse_texts,
    same,
    sets,
    take,
)
from accel_cli.console import is_secret
from accel_cli.extensions.sagemaker.images import SMDDP_TYPES
from accel_runtime.environment.accelerate import launch
from accel_runtime.environment.accelerate.setting import Choices, IntegerRange, Setting

__all__ = ["RULES", "SETTINGS"]

DISTRIBUTED_TYPE = Setting(
    launch.DISTRIBUTED_TYPE.key, values=Choices(("NO", "DATA_PARALLEL", "MODEL_PARALLEL"))
)
INSTANCE_TYPE = Setting("ec2_instance_type", values="instance type", profile_key="launcher.instance_type")
PYTORCH_VERSION = Setting("pytorch_version", values="text", profile_key="launcher.pytorch_version")
TRANSFORMERS_VERSION = Setting(
    "transformers_version", values="text", reason="list transformers in the file of launcher.requirements"
)
PY_VERSION = Setting("py_version", values="text", reason="the image determines the version of Python")
ADDITIONAL_ARGUMENTS = "additional_args"
"""The section with arguments of SageMaker's estimator."""
SETTINGS = (
    *launch.COMMON,
    launch.COMPUTE_ENVIRONMENT,
    DISTRIBUTED_TYPE,
    Setting("base_job_name", values="text", profile_key="launcher.base_job_name"),
    INSTANCE_TYPE,
    Setting("iam_role_name", values="text", profile_key="launcher.role"),
    Setting("image_uri", values="text", profile_key="launcher.image_uri"),
    Setting(launch.NUM_MACHINES.key, values=IntegerRange(1), profile_key="launcher.instance_count"),
    Setting("profile", values="text", profile_key="launcher.aws_profile"),
    PYTORCH_VERSION,
    Setting("region", values="text", profile_key="launcher.region"),
    Setting(
        "sagemaker_inputs_file",
        values="text",
        reason="write its channels in launcher.inputs: {train: s3://bucket/folder}",
    ),
    Setting(
        "sagemaker_metrics_file",
        values="text",
        reason="write its metrics in launcher.metrics: {loss: 'loss ([0-9.]+)'}",
    ),
    TRANSFORMERS_VERSION,
    PY_VERSION,
)
"""The keys of a file of `compute_environment: AMAZON_SAGEMAKER`, without its sections."""
_SECTION = KeyRule(lambda *_: OFF, parse_mapping)
_OLDEST_TORCH = (2, 9)


def _get_arguments(config: AccelerateConfig) -> Mapping[str, Any]:
    arguments = config.keys.get(ADDITIONAL_ARGUMENTS)
    return arguments if isinstance(arguments, Mapping) else {}


def _has_image(config: AccelerateConfig) -> bool:
    """Return True if the file names a container image."""
    return bool(_get_arguments(config).get("image_uri") or config.keys.get("image_uri"))


def _explain_no_smddp(config: AccelerateConfig) -> str:
    """Return why SageMaker's data-parallel library is not used; empty if it is."""
    # `additional_args` take precedence.
    name = _get_arguments(config).get("instance_type") or config.keys.get(INSTANCE_TYPE.key)
    if _has_image(config) and str(parse_or(INSTANCE_TYPE.values, name, "")) in SMDDP_TYPES:
        return ""
    needed = f"an image that contains it, and {' or '.join(SMDDP_TYPES)}"
    return f"torchrun trains on every GPU over NCCL; SageMaker's library (smddp) needs {needed}"


def _convert_type(kind: str, config: AccelerateConfig) -> Answer:
    values = {"launcher.kind": "sagemaker", "device": config.device, "mixed_precision": config.precision}
    if kind == "NO" and not _get_arguments(config).get("distribution"):
        return Answer("launcher.nproc_per_node: 1", values={**values, "launcher.nproc_per_node": 1})
    if kind == "NO":
        return Answer("launcher.kind: sagemaker", values=values)
    reason = (
        "no AWS image with torch 2.9 or newer has SageMaker's model-parallel library; set parallel instead"
    )
    if kind == "DATA_PARALLEL" and not (reason := _explain_no_smddp(config)):
        return Answer("process_group_backend: smddp", values={**values, "process_group_backend": "smddp"})
    return Answer(reason, is_applied=False, values=values)


def _convert_torch_version(version: str, config: AccelerateConfig) -> Answer:
    if _has_image(config):
        return dropped("launcher.image_uri determines the version of torch")
    if (match := re.match(r"(\d+)\.(\d+)", version)) and (int(match[1]), int(match[2])) >= _OLDEST_TORCH:
        return sets({"launcher.pytorch_version": version})
    oldest = ".".join(map(str, _OLDEST_TORCH))
    return dropped(f"accel needs torch {oldest} or newer; the image matches the torch of this machine")


def _convert_distribution(value: Mapping[str, Any], _: AccelerateConfig) -> Answer:
    is_torchrun = isinstance(value, Mapping) and value.keys() <= {"torch_distributed", "pytorchddp"}
    return Answer("accel starts the processes of every host with torchrun", is_applied=is_torchrun)


def _variable(name: str) -> KeyRule:
    """Return the rule of an environment variable."""
    if is_secret(name):
        reason = f"a secret: store it in AWS Secrets Manager, and write its name in launcher.secrets.{name}"
        return drop(reason, parse=parse_text)
    return KeyRule(lambda value, _: sets({f"env.{name}": value}), parse_text)


def _find_argument(names: tuple[str, ...]) -> KeyRule | None:
    """Return the rule of a variable in `environment`, or of credentials."""
    if names[0] == "environment" and len(names) > 1:
        return _variable(names[1])
    if names[0] not in _ARGUMENTS and is_secret(names[0]):
        return drop("credentials stay with AWS's tools; launcher.aws_profile names a profile of theirs")
    return None


CONVERTED: Mapping[Setting, KeyRule] = {
    DISTRIBUTED_TYPE: KeyRule(_convert_type),
    PYTORCH_VERSION: KeyRule(_convert_torch_version, off=EMPTY, target=PYTORCH_VERSION.profile_key),
}
"""The rules of keys whose result depends on other keys."""
_COUNT = integer(0)
_INSTANCE_TYPE = take("launcher.instance_type", parse_instance_type)
_TORCH_VERSION, _PY_VERSION, _TRANSFORMERS_VERSION = (
    build_rule(setting, CONVERTED) for setting in (PYTORCH_VERSION, PY_VERSION, TRANSFORMERS_VERSION)
)
_BUCKET = drop("accel puts everything of a job below s3://BUCKET/accel: launcher.bucket")
_WITHOUT_SETTING = """
    debugger_hook_config enable_infra_check enable_remote_debug enable_sagemaker_metrics enable_session_tag_chaining
    instance_groups max_retry_attempts profiler_config rules tensorboard_output_config training_plan
    training_repository_access_mode"""
_ARGUMENTS: Mapping[str, KeyRule] = {
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
    "distribution": KeyRule(_convert_distribution, off=EMPTY),
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
RULES = JobRules(
    launch.SAGEMAKER, "sagemaker", SETTINGS, CONVERTED, ADDITIONAL_ARGUMENTS, _ARGUMENTS, _find_argument
)
