"""The request that starts a training job, its check against botocore's model, and `job.json` for its hosts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from accel_cli.console import mask_secrets
from accel_cli.errors import UsageError
from accel_cli.extensions.sagemaker.aws import format_hint, load_service_model
from accel_cli.extensions.sagemaker.fields import CHANNEL, InputChannel, SageMakerSection
from accel_cli.launchers import job_launcher, torchrun
from accel_cli.launchers.launcher import LaunchSpec
from accel_cli.launchers.manifest import PatchRules, merge_patch
from accel_cli.launchers.node_launch import build_node_options
from accel_cli.planning.plan import JobPlan, name_target

__all__ = [
    "SageMakerJobPlan",
    "Submission",
    "build_job_spec",
    "build_request",
    "check_request",
    "name_job",
]

_CHECKPOINTS = "/opt/ml/checkpoints"
_COMMAND = f"exec $(command -v python3 || command -v python) /opt/ml/input/data/{CHANNEL}/entry.py"
"""The container's command; `exec` makes Python process 1, which gets the SIGTERM."""
_FILE_SYSTEMS = {"efs": "EFS", "fsx": "FSxLustre"}
_MAX_NAME = 63
_MAX_VALUE, _MAX_VARIABLES = 512, 100
_COPIED_KEYS = {
    "ResourceConfig.InstanceType": "instance_type",
    "ResourceConfig.InstanceCount": "instance_count",
    "ResourceConfig.VolumeSizeInGB": "volume_size",
    "ResourceConfig.VolumeKmsKeyId": "volume_kms_key",
    "ResourceConfig.KeepAlivePeriodInSeconds": "keep_alive",
    "ResourceConfig.TrainingPlanArn": "training_plan",
    "RetryStrategy.MaximumRetryAttempts": "max_retries",
    "TensorBoardOutputConfig.S3OutputPath": "tensorboard_uri",
    "StoppingCondition.MaxRuntimeInSeconds": "max_run",
    "StoppingCondition.MaxWaitTimeInSeconds": "max_wait",
    "EnableManagedSpotTraining": "spot",
    "EnableNetworkIsolation": "network_isolation",
    "EnableInterContainerTrafficEncryption": "encrypt_traffic",
    "OutputDataConfig.KmsKeyId": "output_kms_key",
    "VpcConfig.Subnets": "subnets",
    "VpcConfig.SecurityGroupIds": "security_group_ids",
}
"""Members of the request, and the keys of the profile whose values they have."""
_KEYS = _COPIED_KEYS | {
    "AlgorithmSpecification.MetricDefinitions": "metrics",
    "AlgorithmSpecification.TrainingImage": "image_uri",
    "AlgorithmSpecification.TrainingImageConfig": "registry_credentials",
    "CheckpointConfig": "checkpoint_uri",
    "InputDataConfig": "inputs",
    "OutputDataConfig.CompressionType": "compress_output",
    "OutputDataConfig.S3OutputPath": "bucket",
    "RemoteDebugConfig": "remote_debug",
    "RoleArn": "role",
    "Tags": "tags",
    "TrainingJobName": "job_name",
}
"""The same, with the members that are derived from a key of the profile."""
_REQUEST = PatchRules(
    "launcher.request",
    {"InputDataConfig": "ChannelName", "Tags": "Key", "MetricDefinitions": "Name"},
    reserved={
        **{path: f"Set launcher.{key}." for path, key in _KEYS.items() if path not in {"InputDataConfig", "Tags"}},
        f"InputDataConfig[{CHANNEL}]": "Use another name for the channel.",
        "AlgorithmSpecification.AlgorithmName": "Set launcher.image_uri.",
        "AlgorithmSpecification.TrainingInputMode": "Set input_mode of a channel in launcher.inputs.",
        "AlgorithmSpecification.ContainerEntrypoint": "Pass the script to accel launch.",
        "AlgorithmSpecification.ContainerArguments": "Pass the arguments of the script to accel launch.",
        "Environment": "Set env in the profile.",
        "ResourceConfig.InstanceGroups": "A run has one instance type; set launcher.instance_type.",
    },
)  # fmt: skip
"""The rules of the patch `launcher.request`."""
_CLASSES = {r"\p{L}": r"\w", r"\p{N}": r"\d", r"\p{Z}": r"\s", r"\p{Alnum}": "a-zA-Z0-9"}
"""Character classes in patterns of SageMaker, and what comes next to them in Python."""
_MAX_SHOWN = 80
_MAX_ARGUMENT = 131_071
"""Bytes of an argument or a variable that Linux accepts."""
_VARIABLE = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class SageMakerJobPlan(JobPlan):
    """A training job of SageMaker."""

    section: SageMakerSection
    """The launcher's section of the profile."""
    run: Mapping[str, Any]
    """The content of `job.json`, for the hosts."""
    source: str | None
    """The folder to send; None sends only accel itself."""


@dataclass(frozen=True)
class Submission:
    """A job that is to be submitted, with everything that the profile leaves to AWS and to this machine."""

    name: str
    region: str
    account: str
    """Number of the account."""
    role_arn: str
    bucket: str
    image_uri: str
    caller: str = ""
    """ARN of the identity that submits."""
    bucket_exists: bool = True

    @property
    def prefix(self) -> str:
        """The folder of the job in the bucket."""
        return f"accel/{self.name}"

    @property
    def uri(self) -> str:
        """The address of that folder."""
        return f"s3://{self.bucket}/{self.prefix}"


def name_job(base: str | None, target: str, now: datetime) -> str:
    """Return a job name that begins with a base, or with the script's name, and ends with the time in UTC."""
    stem = re.sub(r"[^a-zA-Z0-9]+", "-", base or name_target(target)).strip("-") or "accel"
    time = now.strftime("-%Y%m%d-%H%M%S-") + f"{now.microsecond // 1000:03d}"
    return stem[: _MAX_NAME - len(time)].rstrip("-") + time


def build_request(job: SageMakerJobPlan, submission: Submission) -> dict[str, Any]:
    """Return the arguments of CreateTrainingJob; variables that do not fit it travel in `job.json` only."""
    section = job.section
    metrics = [{"Name": name, "Regex": regex} for name, regex in section.metrics.items()]
    # Everyone who may describe the job sees them.
    variables = [
        (name, value)
        for name, value in job.run["env"].items()
        if _VARIABLE.fullmatch(name) and max(len(name), len(value)) <= _MAX_VALUE
    ]
    request: dict[str, Any] = {
        "TrainingJobName": submission.name,
        "RoleArn": submission.role_arn,
        "AlgorithmSpecification": {
            "TrainingImage": submission.image_uri,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["/bin/sh", "-c"],
            "ContainerArguments": [_COMMAND],
            **({"MetricDefinitions": metrics} if metrics else {}),
            **_build_image_config(section),
        },
        "InputDataConfig": [
            _build_channel(CHANNEL, f"{submission.uri}/bundle/"),
            *(_build_channel(name, source) for name, source in section.inputs.items()),
        ],
        "OutputDataConfig": {
            "S3OutputPath": f"{submission.uri}/output",
            **({} if section.compress_output else {"CompressionType": "NONE"}),
        },
        "CheckpointConfig": {
            "S3Uri": section.checkpoint_uri or f"{submission.uri}/checkpoints",
            "LocalPath": _CHECKPOINTS,
        },
        "Environment": dict(variables[:_MAX_VARIABLES]),
        "RemoteDebugConfig": {"EnableRemoteDebug": True} if section.remote_debug else {},
        "Tags": [{"Key": key, "Value": value} for key, value in section.tags.items()],
    }
    for path, key in _COPIED_KEYS.items():
        value = section.total_limit if key == "max_wait" else getattr(section, key)
        parent, _, member = path.rpartition(".")
        if value not in (None, []):
            (request.setdefault(parent, {}) if parent else request)[member] = value
    request = {key: value for key, value in request.items() if value not in ({}, [])}
    merged: dict[str, Any] = merge_patch(request, section.request, _REQUEST)
    return merged


def check_request(request: Mapping[str, Any]) -> None:
    """Raise UsageError, with everything that is wrong, if SageMaker would refuse a request.

    boto3 checks types and required members before it sends a request, but not what is checked here: the limits and
    patterns of the same model.
    """
    from botocore.validate import ParamValidator  # noqa: PLC0415 - it is a package of the extra

    shape = load_service_model().operation_model("CreateTrainingJob").input_shape
    problems = (
        list(_find_unknown(shape, request, ""))
        or ParamValidator().validate(request, shape).generate_report().splitlines()
        or list(_find_problems(shape, request, ""))
    )
    if problems:
        raise UsageError("\n".join(["SageMaker would refuse this job; nothing was sent:", *problems]))


def _find_unknown(shape: Any, value: Any, path: str) -> Iterator[str]:
    """Yield the members that SageMaker does not have, as far as the installed boto3 knows."""
    if shape.type_name == "structure" and isinstance(value, Mapping):
        for name, item in value.items():
            inner = f"{path}.{name}" if path else str(name)
            if name in shape.members:
                yield from _find_unknown(shape.members[name], item, inner)
            else:
                yield f"{_describe_member(inner)}: unknown member.{format_hint(str(name), list(shape.members))}"
    elif shape.type_name == "list" and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _find_unknown(shape.member, item, f"{path}[{index}]")


def _find_problems(shape: Any, value: Any, path: str) -> Iterator[str]:
    """Yield what exceeds a limit or does not match a pattern; instance types are checked by `images.check_type`."""
    size, unit = value, ""
    if shape.type_name == "structure":
        for name, item in value.items():
            yield from _find_problems(shape.members[name], item, f"{path}.{name}" if path else name)
        return
    if shape.type_name == "map":
        size, unit = len(value), " entries"
        for name, item in value.items():
            yield from _find_problems(shape.key, name, f"{path}.{name}")
            yield from _find_problems(shape.value, item, f"{path}.{name}")
    elif shape.type_name == "list":
        size, unit = len(value), " entries"
        for index, item in enumerate(value):
            yield from _find_problems(shape.member, item, f"{path}[{index}]")
    elif shape.type_name == "string":
        size, unit = len(value), " characters"
        pattern = shape.metadata.get("pattern")
        if pattern and not _matches_pattern(pattern, value):
            yield f"{_describe_member(path)}: expected text that matches {pattern}, got {_format_value(path, value)}"
    most = shape.metadata.get("max")
    if most is not None and size > most:
        yield f"{_describe_member(path)}: expected at most {most:,}{unit}, got {size:,}"


def _matches_pattern(pattern: str, text: str) -> bool:
    is_ascii = r"\p{" not in pattern
    for java, python in _CLASSES.items():
        pattern = pattern.replace(java, python)
    try:
        return re.fullmatch(pattern, text, re.ASCII if is_ascii else 0) is not None
    except re.error:
        return True  # a newer botocore may have another class of Java; SageMaker checks it


def _describe_member(path: str) -> str:
    """Return a member of the request for a message, with the key of the profile that it comes from."""
    keys = (key for start, key in _KEYS.items() if re.match(rf"{re.escape(start)}(\.|\[|$)", path))
    key = next((f"launcher.{key}" for key in keys), "env" if path.startswith("Environment") else "")
    return f"{key} ({path})" if key else f"launcher.request.{path}"


def _format_value(path: str, value: str) -> str:
    """Return a value for a message, without secrets."""
    text = repr(mask_secrets(path.rpartition(".")[2], value))
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def _build_image_config(section: SageMakerSection) -> dict[str, Any]:
    """Return how SageMaker reads an image outside ECR: from the VPC of the job, with the login of a Lambda function."""
    if not section.has_private_registry:
        return {}
    config: dict[str, Any] = {"TrainingRepositoryAccessMode": "Vpc"}
    if section.registry_credentials:
        config["TrainingRepositoryAuthConfig"] = {
            "TrainingRepositoryCredentialsProviderArn": section.registry_credentials
        }
    return {"TrainingImageConfig": config}


def _build_channel(name: str, source: str | InputChannel) -> dict[str, Any]:
    channel = source if isinstance(source, InputChannel) else InputChannel(uri=source)
    if channel.file_system:
        kind, file_system, folder = channel.file_system
        mounted = {
            "FileSystemId": file_system,
            "FileSystemType": _FILE_SYSTEMS[kind],
            "DirectoryPath": folder,
            "FileSystemAccessMode": channel.access,
        }
        return {"ChannelName": name, "DataSource": {"FileSystemDataSource": mounted}}
    return {
        "ChannelName": name,
        "InputMode": channel.input_mode,
        "DataSource": {
            "S3DataSource": {
                "S3DataType": "S3Prefix",
                "S3Uri": channel.uri,
                "S3DataDistributionType": channel.distribution,
            }
        },
    }


def build_job_spec(section: SageMakerSection, spec: LaunchSpec) -> dict[str, Any]:
    """Return the content of `job.json`, which every host reads."""
    if spec.settings.process_group_backend == "smddp" and not section.image_uri:
        raise UsageError(
            "process_group_backend: smddp needs an image with SageMaker's library, whose newest release is for torch 2.4, and no image "
            "of AWS for torch 2.9 and newer has it. Remove the setting: NCCL over EFA takes its place."
        )
    if name := job_launcher.find_exposed_secret(spec.env, section.secrets):
        raise UsageError(
            f"env.{name} looks like a secret, and everyone who may describe the job would see it. Store the value in AWS "
            f"Secrets Manager, and its name in the profile: --set 'launcher.secrets={{{name}: NAME-OR-ARN}}'"
        )
    _check_lengths(spec)
    return {
        "kind": spec.kind,
        "args": list(spec.args),
        **_locate_source(section, spec),
        "options": _build_options(section, spec),
        "settings": spec.settings.to_env(),
        "env": dict(spec.env),
        "secrets": section.secrets,
        "model_dir": section.model_dir,
        "checkpoint_dir": section.checkpoint_dir,
    }


def _build_options(section: SageMakerSection, spec: LaunchSpec) -> list[str]:
    """Return the options of `accel launch` on a host."""
    values = {
        "nproc_per_node": section.nproc_per_node,
        # One host may still build packages that another has built already.
        "rdzv_timeout": 1800,
        "max_restarts": section.max_restarts,
        "ranks": section.ranks,
        "shutdown_timeout": section.shutdown_timeout,
        **section.model_dump(include={*torchrun.PASSED_KEYS}),
    }
    return ["--no-profile", *spec.target_options, *build_node_options(values)]


def _locate_source(section: SageMakerSection, spec: LaunchSpec) -> dict[str, Any]:
    """Return the script, the working directory and the requirements, by their paths in the source."""
    if spec.is_builtin:
        return {"target": spec.target, "cwd": ".", "requirements": None}
    source, target, requirements = Path(section.source_dir).resolve(), spec.target, section.requirements
    if spec.kind == "script":
        _find_in_source(Path(target), source, f"The script {target}")
        if (path := Path(target)).is_absolute():
            # A link keeps its own name: it is sent as it is.
            target = os.path.relpath(path.parent.resolve() / path.name)
    if requirements and not Path(requirements).is_file():
        raise UsageError(f"File not found: {requirements} (launcher.requirements).")
    return {
        "target": target,
        "cwd": _find_in_source(Path.cwd(), source, "The current directory"),
        "requirements": requirements
        and _find_in_source(Path(requirements), source, f"launcher.requirements {requirements}"),
    }


def _find_in_source(path: Path, source: Path, what: str) -> str:
    """Return the path of a file from the source folder on."""
    # A link may lead out of the folder, and is sent as it is; the folder may have been reached by a link.
    for candidate in (path.resolve(), Path(os.path.normpath(Path.cwd() / path))):
        if candidate.is_relative_to(source):
            return str(candidate.relative_to(source))
    raise UsageError(
        f"{what} is not in {source}, the folder that is sent. Launch from that folder, or set launcher.source_dir."
    )


def _check_lengths(spec: LaunchSpec) -> None:
    arguments = [(f"Argument {number} of the script", text) for number, text in enumerate(spec.args, 1)]
    variables = [(f"env.{name}", f"{name}={value}") for name, value in spec.env.items()]
    for what, text in (*arguments, *variables):
        size = len(os.fsencode(text))
        if size > _MAX_ARGUMENT:
            raise UsageError(
                f"{what} is too long: {size:,} bytes, and Linux accepts {_MAX_ARGUMENT:,}. Pass it in a file."
            )
