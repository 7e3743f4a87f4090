"""The `launcher:` section of a profile that runs scripts as training jobs of Amazon SageMaker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import Self, override

from accel_cli.errors import UsageError
from accel_cli.fields import Answers, Choice, Question, Section
from accel_cli.launchers import elastic
from accel_cli.launchers.base import Job, Launcher, Plan
from accel_cli.launchers.sagemaker import running
from accel_cli.machine import Machine

__all__ = ["Channel", "SageMaker"]

_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")
_INSTANCE = re.compile(r"ml\.[a-z0-9-]+\.[a-z0-9-]+")
_CHANNEL = re.compile(r"[A-Za-z0-9.\-_]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_S3 = re.compile(r"s3://[^/\s]+(/.*)?")
_OURS = "accel"
"""The channel by which the job's own files come."""
_DAY_S = 86400


def _name(value: str | None) -> str | None:
    if value is not None and not _NAME.fullmatch(value):
        raise ValueError("expected at most 63 letters, digits and hyphens, none of them at an end")
    return value


def _instance(value: str) -> str:
    if not _INSTANCE.fullmatch(value):
        raise ValueError("expected an instance type like ml.g5.xlarge")
    return value


def _s3(value: str | None) -> str | None:
    if value is not None and not _S3.fullmatch(value):
        raise ValueError("expected a place in S3 like s3://bucket/folder")
    return value


def _inside(value: str | None) -> str | None:
    """A folder of the source, from where the script starts."""
    if value is not None and (
        Path(value).is_absolute() or ".." in Path(value).parts or not Path(value).parts
    ):
        raise ValueError("expected a folder below the one the script starts in, like runs")
    return value


def _bucket(value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", value):
        raise ValueError("expected the name of a bucket, without s3:// and without a folder")
    return value


def _channels(value: dict[str, Any]) -> dict[str, Any]:
    for name in value:
        if not _CHANNEL.fullmatch(name) or name == _OURS:
            raise ValueError(
                f"{name!r} is no name for a channel: letters, digits, . - and _, and not {_OURS}"
            )
    return value


def _variables(value: dict[str, str]) -> dict[str, str]:
    for name in value:
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"{name!r} is no name of an environment variable")
    return value


def _processes(value: int | str) -> int | str:
    if isinstance(value, int) and value < 1:
        raise ValueError("expected a whole number of at least 1, or auto")
    return value


def _on_demand(answers: Answers) -> bool:
    return not answers.get("spot")


class Channel(Section):
    """Data that a job reads, with how they come to it."""

    uri: Annotated[str, AfterValidator(_s3)]
    input_mode: Literal["File", "FastFile"] = "File"
    """`File` copies everything before the script starts; `FastFile` reads it from S3 as it is opened."""
    distribution: Literal["FullyReplicated", "ShardedByS3Key"] = "FullyReplicated"
    """Whether every host has all files, or a part of them."""


Uri = Annotated[str, AfterValidator(_s3)]


class SageMaker(Launcher):
    """A training job of Amazon SageMaker: the elastic agent in the container of every instance."""

    title: ClassVar[str] = "A training job on Amazon SageMaker"
    runs = "job"
    words: ClassVar[dict[str, str]] = {"launcher.nnodes": "launcher.instance_count"}

    kind: Literal["sagemaker"] = Field(
        "sagemaker",
        description="An Amazon SageMaker job: `accel launch` sends the folder, and follows the job.",
    )
    aws_profile: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Profile of the AWS configuration; unset is the one that AWS tools take.",
        ),
        Question("Which AWS profile?", suggest=lambda *_: None, hint="Enter for the one AWS tools take"),
    ] = None
    region: Annotated[
        str | None,
        Field(
            pattern=r"^[a-z]{2,4}(-[a-z]+)+-\d$",
            description="AWS region; unset is the one of the AWS configuration.",
        ),
        Question("Which region?", suggest=lambda *_: None, hint="Enter for that of the AWS configuration"),
    ] = None
    role: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Name or ARN of the role the job runs as; unset is the only one SageMaker may assume.",
        ),
        Question("Which role does the job run as?", suggest=lambda *_: None, hint="a name or an ARN"),
    ] = None
    instance_type: Annotated[
        str,
        AfterValidator(_instance),
        Field(description="Type of the instances."),
        Question("Which instance type?", suggest=lambda *_: "ml.g5.xlarge"),
    ] = "ml.g5.xlarge"
    instance_count: Annotated[
        int,
        Field(ge=1, description="Number of instances."),
        Question("How many instances?", suggest=lambda *_: 1),
    ] = 1
    nproc_per_node: Annotated[
        int | Literal["auto"],
        Field(
            union_mode="left_to_right",
            description="Number of processes on each instance; `auto` is one for each GPU, or 1.",
        ),
        Field(json_schema_extra={"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]}),
        AfterValidator(_processes),
    ] = "auto"
    spot: Annotated[
        bool,
        Field(
            description="Whether it runs on spare capacity: cheaper, and interrupted at times, after which the job "
            "starts again with what is in its checkpoint folder."
        ),
        Question(
            "On demand, or spot?",
            suggest=lambda *_: False,
            choices=(
                Choice(False, "on demand"),
                Choice(True, "spot: cheaper, and may be interrupted; the script should save checkpoints"),
            ),
        ),
    ] = False
    max_run: Annotated[
        int,
        Field(ge=1, description="Seconds the job may run, then it is stopped."),
        Question("How many seconds may it run?", suggest=lambda *_: _DAY_S),
    ] = _DAY_S
    max_wait: Annotated[
        int | None,
        Field(
            ge=1,
            description="With `spot`, seconds for waiting and running together; unset is `max_run` and a day.",
        ),
    ] = None
    keep_alive: Annotated[
        int | None,
        Field(
            ge=1,
            le=21600,
            description="Seconds the instances wait for a next job, at full price; it then starts at once.",
        ),
        Question(
            "How many seconds do instances wait for the next job?",
            suggest=lambda *_: None,
            when=_on_demand,
            hint="Enter for none; they cost while they wait",
        ),
    ] = None
    image_uri: Annotated[
        str | None,
        Field(min_length=1, description="Container image; unset is AWS's own for `pytorch_version`."),
        Question(
            "Which image?", suggest=lambda *_: None, hint="Enter for AWS's own with this machine's torch"
        ),
    ] = None
    pytorch_version: Annotated[
        str | None,
        Field(pattern=r"^\d+\.\d+", description="torch of the image, like `2.9`; unset is this machine's."),
    ] = None
    requirements: Annotated[
        str | None,
        Field(
            min_length=1, description="File for pip, installed before the script starts: `requirements.txt`."
        ),
        Question(
            "Which file names more packages?",
            suggest=lambda *_: "requirements.txt" if Path("requirements.txt").is_file() else None,
            hint="for pip; Enter for none",
        ),
    ] = None
    inputs: Annotated[
        dict[str, Uri | Channel],
        AfterValidator(_channels),
        Field(
            description="Data the job reads, by channel: `train: s3://bucket/folder` is `/opt/ml/input/data/train` in "
            "the job; or `{uri: ..., input_mode: FastFile, distribution: ShardedByS3Key}`."
        ),
    ] = Field(default_factory=dict)
    inputs_file: str | None = Field(
        None,
        min_length=1,
        description="File of `channel_name` and `data_location`, with a tab between: more inputs.",
    )
    metrics: dict[str, str] = Field(
        default_factory=dict,
        description="Numbers that SageMaker reads from the log, by name: `loss: 'loss ([0-9.]+)'`.",
    )
    metrics_file: str | None = Field(
        None,
        min_length=1,
        description="File of `metric_name` and `metric_regex`, with a tab between: more metrics.",
    )
    secrets: Annotated[
        dict[str, str],
        AfterValidator(_variables),
        Field(
            description="Variables of the processes whose values are in Secrets Manager, read in the job: "
            "`WANDB_API_KEY: name-or-arn`."
        ),
    ] = Field(default_factory=dict)
    source_dir: str = Field(
        ".", min_length=1, description="Folder that is sent; the script, and what it imports, is in it."
    )
    include: list[str] = Field(
        default_factory=list, description="Patterns of files that are sent although git ignores them."
    )
    exclude: list[str] = Field(default_factory=list, description="Patterns of files that are not sent.")
    max_upload_size: int = Field(200, ge=1, description="Megabytes that may be sent.")
    model_dir: Annotated[
        str | None,
        AfterValidator(_inside),
        Field(
            description="Folder of the script's that comes home when it ends; unset is `/opt/ml/model` only."
        ),
    ] = None
    checkpoint_dir: Annotated[
        str | None,
        AfterValidator(_inside),
        Field(
            description="Folder of the script's that is kept in S3 while it runs, and there again after a spot "
            "interruption; unset is `/opt/ml/checkpoints` only."
        ),
    ] = None
    checkpoint_uri: Annotated[
        str | None,
        AfterValidator(_s3),
        Field(description="Where checkpoints are kept; that of an earlier job goes on from there."),
    ] = None
    job_name: Annotated[
        str | None,
        AfterValidator(_name),
        Field(
            description="Name of the job, which no other may have had; unset is `base_job_name` and the time."
        ),
    ] = None
    base_job_name: Annotated[
        str | None,
        AfterValidator(_name),
        Field(description="What names of jobs start with; unset is the script's name."),
    ] = None
    tags: dict[str, str] = Field(default_factory=dict, description="Tags of the job: `team: vision`.")
    volume_size: int = Field(
        30, ge=1, description="Gigabytes of disk for each instance that has none of its own."
    )
    subnets: list[str] = Field(default_factory=list, description="Subnets of a VPC, for what is not public.")
    security_group_ids: list[str] = Field(default_factory=list, description="Security groups in that VPC.")
    network_isolation: bool = Field(
        False, description="Whether the container has no network but that to its peers."
    )
    encrypt_traffic: bool = Field(
        False, description="Whether traffic between instances is encrypted; slower."
    )
    volume_kms_key: str | None = Field(None, min_length=1, description="KMS key for the disks.")
    output_kms_key: str | None = Field(
        None, min_length=1, description="KMS key for what the job leaves in S3."
    )
    bucket: Annotated[
        str | None,
        AfterValidator(_bucket),
        Field(
            description="Bucket for everything; unset is `sagemaker-REGION-ACCOUNT`, made if it is not there."
        ),
    ] = None
    output_dir: str = Field(
        ".",
        min_length=1,
        description="Folder on this machine in which the model is put, in one with the job's name.",
    )
    download: bool = Field(
        True, description="Whether the model is brought here when a job that was followed is done."
    )
    allow_unknown_instance: bool = Field(
        False, description="Whether an instance type is taken that the installed boto3 does not know."
    )
    model_parallel: dict[str, Any] = Field(
        default_factory=dict,
        description="Parameters for SageMaker's model parallel library v2, passed on as they are.",
    )
    max_restarts: elastic.MaxRestarts = 0
    ranks: elastic.Ranks = 0
    shutdown_timeout: elastic.ShutdownTimeout = 110
    stall_timeout: elastic.StallTimeout = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_wait is not None and not self.spot:
            raise ValueError("max_wait: only spot jobs wait; set spot: true, or leave it out")
        if self.max_wait is not None and self.max_wait < self.max_run:
            raise ValueError(
                f"max_wait: {self.max_wait} counts waiting and running together: expected at least max_run, {self.max_run}"
            )
        if self.spot and self.keep_alive:
            raise ValueError(
                "keep_alive: instances of spot jobs cannot be kept; leave out spot or keep_alive"
            )
        if bool(self.subnets) != bool(self.security_group_ids):
            raise ValueError("subnets and security_group_ids go together: expected both, or none")
        if self.network_isolation and (self.secrets or self.requirements):
            other = "secrets are read from" if self.secrets else "requirements are fetched from"
            raise ValueError(f"network_isolation: {other} the network, which the container then has not")
        return self

    @classmethod
    @override
    def suits_bf16(cls, machine: Machine) -> bool:
        return True

    @property
    def longest(self) -> int | None:
        """Seconds for waiting and running together; None where nothing waits."""
        return (self.max_wait or self.max_run + _DAY_S) if self.spot else None

    @override
    def plan(self, job: Job) -> Plan:
        if job.settings.device not in {"auto", "cpu", "cuda"}:
            raise UsageError(
                f"device: {job.settings.device} is on no instance of SageMaker that accel knows; use auto, cuda or cpu"
            )
        self._check_libraries(job)
        each = "a process for each GPU" if self.nproc_per_node == "auto" else f"{self.nproc_per_node} on each"
        run = running.described(self, job)
        return Plan(
            launcher=self.kind,
            runner="accel_cli.launchers.sagemaker.submit:submit",
            look="accel_cli.launchers.sagemaker.submit:look",
            argv=(job.target, *job.args),
            env=run["env"],
            device=self.instance_type,
            target=job.target,
            nnodes=self.instance_count,
            counted="1 process" if self.nproc_per_node == 1 else each,
            request={
                "profile": {**self.model_dump(), "max_wait": self.longest},
                "run": run,
                # What runs as a whole is accel's own, and travels anyway.
                "source": None if job.as_a_whole else self.source_dir,
            },
            output_dir=self.output_dir,
        )

    def _check_libraries(self, job: Job) -> None:
        """Refuse SageMaker's own libraries where nothing says which image has them: AWS's newer ones do not."""
        if self.image_uri:
            return
        if job.settings.process_group_backend == "smddp":
            raise UsageError(
                "process_group_backend: smddp needs an image that has SageMaker's data parallel library, and AWS's "
                "images for torch 2.9 and newer have not: name yours in launcher.image_uri, or use auto"
            )
        if self.model_parallel:
            raise UsageError(
                "launcher.model_parallel needs an image that has SageMaker's model parallel library, and AWS's images "
                "for torch 2.9 and newer have not: name yours in launcher.image_uri"
            )
