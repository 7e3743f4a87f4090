"""The request that starts a training job: a pure function of the profile and of what AWS has said."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

__all__ = ["CHANNEL", "CHECKPOINTS", "ENTRY", "Facts", "named", "training_job"]

CHANNEL = "accel"
"""The input channel by which the job's own files come."""
CHECKPOINTS = "/opt/ml/checkpoints"
ENTRY = f"exec $(command -v python3 || command -v python) /opt/ml/input/data/{CHANNEL}/entry.py"
"""What the container runs; `exec` makes Python the first process, which is the one that is told of an end."""
_LONGEST_NAME = 63
_LONGEST_VALUE, _MOST_VARIABLES = 512, 100
_VARIABLE = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(frozen=True)
class Facts:
    """What a request needs and no profile says."""

    name: str
    """The job's."""
    region: str
    account: str
    partition: str
    """`aws`, or that of another AWS, as `aws-cn`."""
    role_arn: str
    bucket: str
    image_uri: str
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """Channels, those of a file among them."""
    metrics: Mapping[str, str] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """Where everything of the job is in the bucket."""
        return f"accel/{self.name}"

    @property
    def home(self) -> str:
        """The same as an address."""
        return f"s3://{self.bucket}/{self.prefix}"


def named(base: str | None, target: str, now: datetime) -> str:
    """A name for a job that no other has: what it starts with, and the time in UTC to the millisecond."""
    stem = re.sub(r"[^a-zA-Z0-9]+", "-", base or Path(target).stem).strip("-") or "accel"
    time = now.strftime("-%Y%m%d-%H%M%S-") + f"{now.microsecond // 1000:03d}"
    return stem[: _LONGEST_NAME - len(time)].rstrip("-") + time


def training_job(said: Mapping[str, Any], env: Mapping[str, str], facts: Facts) -> dict[str, Any]:
    """The arguments of CreateTrainingJob.

    Args:
        said: The launcher's section of the profile.
        env: The profile's variables for the processes. Those that do not fit a request travel with the files only.
        facts: What else there is to say.
    """
    parts = {
        "TrainingJobName": facts.name,
        "RoleArn": facts.role_arn,
        "AlgorithmSpecification": _algorithm(facts),
        "InputDataConfig": [
            _channel(CHANNEL, f"{facts.home}/bundle/"),
            *(_channel(name, where) for name, where in facts.inputs.items()),
        ],
        "OutputDataConfig": _filled(S3OutputPath=f"{facts.home}/output", KmsKeyId=said["output_kms_key"]),
        "ResourceConfig": _filled(
            InstanceType=said["instance_type"],
            InstanceCount=said["instance_count"],
            VolumeSizeInGB=said["volume_size"],
            VolumeKmsKeyId=said["volume_kms_key"],
            KeepAlivePeriodInSeconds=said["keep_alive"],
        ),
        "StoppingCondition": _filled(
            MaxRuntimeInSeconds=said["max_run"], MaxWaitTimeInSeconds=said["max_wait"]
        ),
        "CheckpointConfig": {
            "S3Uri": said["checkpoint_uri"] or f"{facts.home}/checkpoints",
            "LocalPath": CHECKPOINTS,
        },
        "EnableManagedSpotTraining": said["spot"],
        "EnableNetworkIsolation": said["network_isolation"],
        "EnableInterContainerTrafficEncryption": said["encrypt_traffic"],
        "Environment": _fitting(env),
        "Tags": [{"Key": key, "Value": value} for key, value in said["tags"].items()],
        "VpcConfig": _vpc(said),
        "HyperParameters": _parameters(said["model_parallel"]),
    }
    return {key: value for key, value in parts.items() if value not in ({}, [], None)}


def _algorithm(facts: Facts) -> dict[str, Any]:
    metrics = [{"Name": name, "Regex": regex} for name, regex in facts.metrics.items()]
    return {
        "TrainingImage": facts.image_uri,
        "TrainingInputMode": "File",
        "ContainerEntrypoint": ["/bin/sh", "-c"],
        "ContainerArguments": [ENTRY],
        **({"MetricDefinitions": metrics} if metrics else {}),
    }


def _channel(name: str, where: Any) -> dict[str, Any]:
    said = where if isinstance(where, Mapping) else {"uri": where}
    return {
        "ChannelName": name,
        "InputMode": said.get("input_mode", "File"),
        "DataSource": {
            "S3DataSource": {
                "S3DataType": "S3Prefix",
                "S3Uri": said["uri"],
                "S3DataDistributionType": said.get("distribution", "FullyReplicated"),
            }
        },
    }


def _fitting(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that a request can hold, for who looks at the job; all of them are in `job.json`."""
    fit = [
        (name, value)
        for name, value in env.items()
        if _VARIABLE.fullmatch(name) and len(value) <= _LONGEST_VALUE and len(name) <= _LONGEST_VALUE
    ]
    return dict(fit[:_MOST_VARIABLES])


def _vpc(said: Mapping[str, Any]) -> dict[str, Any]:
    if not said["subnets"]:
        return {}
    return {"Subnets": list(said["subnets"]), "SecurityGroupIds": list(said["security_group_ids"])}


def _parameters(model_parallel: Mapping[str, Any]) -> dict[str, str]:
    if not model_parallel:
        return {}
    import json  # noqa: PLC0415 - few jobs have it

    return {"mp_parameters": json.dumps(model_parallel, sort_keys=True)}


def _filled(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
