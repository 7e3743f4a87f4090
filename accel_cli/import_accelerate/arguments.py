"""`additional_args` of an Accelerate file for SageMaker: the estimator's arguments, and what becomes of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from accel_cli.console import is_secret
from accel_cli.import_accelerate.fates import NOT_SET, OFF, Fate, left
from accel_cli.import_accelerate.values import Read, Refused, plain, section, shown, text, texts, truth, whole
from accel_cli.profile.validation_errors import did_you_mean
from accel_runtime.env import find_nearest

__all__ = ["NOT_HERE", "TAKEN", "Argument", "fate", "said", "variables", "wrong"]

Path = tuple[str, ...]
"""The names that lead to a value, from below `additional_args`."""


@dataclass(frozen=True)
class Argument:
    """An argument that a key of the launcher's section says."""

    key: str
    read: Read


def _pairs(name: str, value: str) -> Read:
    """Reads names and values: as keys, or as the list of entries that AWS's requests have."""

    def pair(entry: Any) -> tuple[Any, Any]:
        good = isinstance(entry, Mapping) and set(entry) == {name, value}
        return (entry[name], entry[value]) if good else (None, None)

    def read(given: Any) -> dict[str, str] | Refused:
        entries = (
            given.items()
            if isinstance(given, Mapping)
            else map(pair, given if isinstance(given, list) else [0])
        )
        found = [(text(key), text(each)) for key, each in entries]
        if any(isinstance(word, Refused) for both in found for word in both):
            return Refused(f"expected a list of entries with {name} and {value}")
        return {str(key): str(each) for key, each in found}

    return read


_NUMBER = whole("expected a whole number", 0)
TAKEN: Mapping[str, Argument] = {
    "base_job_name": Argument("base_job_name", text),
    "checkpoint_s3_uri": Argument("checkpoint_uri", text),
    "enable_network_isolation": Argument("network_isolation", truth),
    "encrypt_inter_container_traffic": Argument("encrypt_traffic", truth),
    "framework_version": Argument("pytorch_version", text),
    "image_uri": Argument("image_uri", text),
    "instance_count": Argument("instance_count", _NUMBER),
    "instance_type": Argument("instance_type", text),
    "keep_alive_period_in_seconds": Argument("keep_alive", _NUMBER),
    "max_run": Argument("max_run", _NUMBER),
    "max_wait": Argument("max_wait", _NUMBER),
    "metric_definitions": Argument("metrics", _pairs("Name", "Regex")),
    "output_kms_key": Argument("output_kms_key", text),
    "pytorch_version": Argument("pytorch_version", text),
    "role": Argument("role", text),
    "security_group_ids": Argument("security_group_ids", texts),
    "source_dir": Argument("source_dir", text),
    "subnets": Argument("subnets", texts),
    "tags": Argument("tags", _pairs("Key", "Value")),
    "use_spot_instances": Argument("spot", truth),
    "volume_kms_key": Argument("volume_kms_key", text),
    "volume_size": Argument("volume_size", _NUMBER),
}
"""The arguments that a profile says too."""
_ZERO_IS_OFF = ("keep_alive_period_in_seconds", "max_wait")
_ENVIRONMENT = "environment"
_SAME: Mapping[str, Any] = {
    "checkpoint_local_path": "/opt/ml/checkpoints",
    "container_log_level": 20,
    "input_mode": "file",
}
"""Arguments whose value may be what accel does anyway, in lower case."""
NOT_HERE: Mapping[str, str] = {
    "checkpoint_local_path": "accel keeps /opt/ml/checkpoints; launcher.checkpoint_dir names a folder of the script's",
    "code_location": "accel puts everything of a job below s3://BUCKET/accel: launcher.bucket",
    "container_log_level": "accel's jobs do not use SageMaker's toolkit, whose level this is",
    "dependencies": "accel sends the folder that launcher.source_dir names; what else is needed belongs into it",
    "distribution": "accel starts the processes of every host itself, with torchrun",
    "entry_point": "said at the launch: accel launch SCRIPT",
    "git_config": "accel sends the files of this machine; check the repository out here",
    "hyperparameters": "said at the launch, behind the script: accel launch SCRIPT --name value",
    "input_mode": "said for each channel, in launcher.inputs: {uri: ..., input_mode: FastFile}",
    "inputs": "launcher.inputs",
    "max_retry_attempts": "accel leaves it to SageMaker how often a job is tried again",
    "model_dir": "launcher.model_dir",
    "output_path": "accel puts everything of a job below s3://BUCKET/accel: launcher.bucket",
    "py_version": "the image says which Python there is",
    "transformers_version": "AWS's image of PyTorch has no transformers: name them in the file of launcher.requirements",
}
"""Arguments that a job of accel has not, and why, or what says the same."""
_TORCHRUN = (("distribution", "torch_distributed"), ("distribution", "pytorchddp"))
_OFF_IN_ACCEL = frozenset({
    "debugger_hook_config", "disable_profiler", "enable_infra_check", "enable_remote_debug",
    "enable_sagemaker_metrics", "enable_session_tag_chaining", "instance_groups", "profiler_config", "rules",
    "tensorboard_output_config", "training_plan", "training_repository_access_mode",
})  # fmt: skip
"""Arguments that a job of accel has not, and that may be off."""


def _off(name: str, value: Any) -> bool:
    """Whether a value asks for nothing."""
    return value is None or value is False or value in ("", [], {}) or (value == 0 and name in _ZERO_IS_OFF)


def said(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What the arguments say, by key of the launcher's section."""
    return {
        TAKEN[name].key: TAKEN[name].read(value)
        for name, value in arguments.items()
        if name in TAKEN and not _off(name, value)
    }


def variables(arguments: Mapping[str, Any]) -> dict[str, str]:
    """The variables of the processes, without those that hold a secret."""
    given = arguments.get(_ENVIRONMENT) or {}
    return {
        name: str(text(value)) for name, value in given.items() if value is not None and not is_secret(name)
    }


def wrong(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Arguments that cannot be understood: key, what was expected, what came."""
    for name, value in arguments.items():
        found = TAKEN[name].read(value) if name in TAKEN and not _off(name, value) else None
        if isinstance(found, Refused):
            yield f"additional_args.{name}", found.expected, shown(name, value)
    environment = arguments.get(_ENVIRONMENT)
    if environment is not None and isinstance(section(environment), Refused):
        yield f"additional_args.{_ENVIRONMENT}", "expected keys and values", shown(_ENVIRONMENT, environment)
        return
    for name, value in (environment or {}).items():
        if value is not None and isinstance(text(value), Refused):
            yield f"additional_args.{_ENVIRONMENT}.{name}", "expected text", shown(name, value)


def fate(path: Path, value: Any) -> Fate:
    """What becomes of an argument, or of a part of one."""
    if value is None:
        return NOT_SET
    if path[0] == _ENVIRONMENT:
        return _variable(path, value)
    if path[0] in TAKEN:
        key = ".".join([f"launcher.{TAKEN[path[0]].key}", *path[1:]])
        meant = TAKEN[path[0]].read(value) if len(path) == 1 else value
        return OFF if _off(path[0], value) else Fate(f"{key}: {shown(path[0], meant)}")
    return _anyway(path, value) or left(_reason(path[0]))


def _anyway(path: Path, value: Any) -> Fate | None:
    """The fate of an argument that asks for nothing, or for what accel does without it."""
    name = path[0]
    if _off(name, value) or (name in _OFF_IN_ACCEL and plain(value) is (name == "disable_profiler")):
        return OFF
    if path[:2] in _TORCHRUN:
        return Fate(NOT_HERE["distribution"])
    return Fate("the same in accel") if name in _SAME and plain(value) == _SAME[name] else None


def _reason(name: str) -> str:
    """Why an argument has no place in a profile."""
    if is_secret(name):
        return "credentials stay where AWS's tools keep them; launcher.aws_profile names a profile of theirs"
    if name in NOT_HERE:
        return NOT_HERE[name]
    if name in _OFF_IN_ACCEL:
        return "a job of accel has no such setting"
    meant = did_you_mean(find_nearest(name, [*TAKEN, *NOT_HERE, *_OFF_IN_ACCEL]))
    return f"accel does not know this argument of the SDK{f' ({meant})' if meant else ''}"


def _variable(path: Path, value: Any) -> Fate:
    if len(path) == 1:
        return OFF
    if is_secret(path[1]):
        return left(
            "a secret, which everyone who may look at the job would see: put it into AWS Secrets Manager, and its name "
            f"there into launcher.secrets.{path[1]}"
        )
    return Fate(f"env.{path[1]}: {shown(path[1], value)}")
