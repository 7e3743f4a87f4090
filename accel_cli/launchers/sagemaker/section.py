"""The `launcher:` section of a profile that runs scripts as training jobs of Amazon SageMaker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from typing_extensions import Self, override

from accel_cli.errors import UsageError
from accel_cli.launchers import elastic
from accel_cli.launchers.base import Job, Launcher, Plan
from accel_cli.launchers.sagemaker import asking, instances, keys, running
from accel_cli.planning.machine import Machine
from accel_cli.profile.fields import Answers, Choice, Question
from accel_runtime.env import ProcessGroupBackend, Settings

__all__ = ["SageMaker"]

_DAY_S = 86400
_TIMES = "seconds, or like 90m, 2h, 1d"
_Seconds = BeforeValidator(keys.seconds, json_schema_input_type=Annotated[int, Field(ge=1)] | str)


class SageMaker(Launcher):
    """A training job of Amazon SageMaker: the elastic agent in the container of every instance."""

    title: ClassVar[str] = "A training job on Amazon SageMaker"
    runs = "job"
    found_by = ("region", "aws_profile")
    carriers: ClassVar[frozenset[ProcessGroupBackend]] = frozenset(get_args(ProcessGroupBackend))
    words: ClassVar[dict[str, str]] = {"launcher.nnodes": "launcher.instance_count"}
    further: ClassVar[str] = "image, inputs, metrics, tags, VPC, volume, KMS, secrets"

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
        Question(
            "Which AWS profile?",
            suggest=asking.nothing,
            offers=asking.profiles,
            hint="Enter for the one AWS tools take",
        ),
    ] = None
    region: Annotated[
        str | None,
        Field(
            pattern=r"^[a-z]{2,4}(-[a-z]+)+-\d$",
            description="AWS region; unset is the one of the AWS configuration.",
        ),
        Question(
            "Which region?",
            suggest=asking.nothing,
            offers=asking.regions,
            hint="Enter for that of the AWS configuration",
        ),
    ] = None
    role: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Name or ARN of the role the job runs as; unset is the only one SageMaker may assume.",
        ),
        Question(
            "Which role does the job run as?",
            suggest=asking.nothing,
            offers=asking.roles,
            hint="a name or an ARN; Enter for the only one SageMaker may assume",
        ),
    ] = None
    instance_type: Annotated[
        str,
        AfterValidator(keys.instance),
        Field(description="Type of the instances."),
        Question(
            "Which instance type?",
            suggest=lambda *_: "ml.g5.xlarge",
            complete=asking.instances,
            doubt=asking.misspelt,
            hint="Tab completes",
        ),
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
        AfterValidator(keys.processes),
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
        Field(
            ge=1,
            description="Seconds the job may run, then it is stopped; text like `90m`, `2h` or `1d` too.",
        ),
        _Seconds,
        Question("How long may it run?", suggest=lambda *_: _DAY_S, hint=_TIMES),
    ] = _DAY_S
    max_wait: Annotated[
        int | None,
        Field(
            ge=1,
            description="With `spot`, seconds for waiting and running together; unset is `max_run` and a day.",
        ),
        _Seconds,
        asking.further(
            "How long may it wait and run together?",
            f"{_TIMES}; Enter for a day of waiting",
            when=asking.on_spot,
        ),
    ] = None
    keep_alive: Annotated[
        int | None,
        Field(
            ge=1,
            le=21600,
            description="Seconds the instances wait for a next job, at full price; it then starts at once.",
        ),
        _Seconds,
        Question(
            "How long do instances wait for a next job?",
            suggest=asking.nothing,
            when=asking.on_demand,
            hint=f"{_TIMES}, at full price; Enter for not at all",
        ),
    ] = None
    image_uri: Annotated[
        str | None,
        Field(min_length=1, description="Container image; unset is AWS's own for `pytorch_version`."),
        asking.further("Which image?", "Enter for AWS's own, with the torch that comes next"),
    ] = None
    pytorch_version: Annotated[
        str | None,
        Field(pattern=r"^\d+\.\d+", description="torch of the image, like `'2.9'`; unset is this machine's."),
        BeforeValidator(keys.version),
        asking.further(
            "Which torch in AWS's image?", "like 2.9", when=asking.without_image, offers=asking.versions
        ),
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
        dict[str, keys.Uri | keys.Channel],
        AfterValidator(keys.channels),
        Field(
            description="Data the job reads, by channel: `train: s3://bucket/folder` is `/opt/ml/input/data/train` in "
            "the job; or `{uri: ..., input_mode: FastFile, distribution: ShardedByS3Key}`."
        ),
        asking.further("Which data does it read?", "train=s3://bucket/folder, test=s3://...; Enter for none"),
    ] = Field(default_factory=dict)
    inputs_file: str | None = Field(
        None,
        min_length=1,
        description="File of `channel_name` and `data_location`, with a tab between: more inputs.",
    )
    metrics: Annotated[
        dict[str, str],
        Field(description="Numbers that SageMaker reads from the log, by name: `loss: 'loss ([0-9.]+)'`."),
        asking.further(
            "Which numbers does SageMaker read from the log?", "loss=loss ([0-9.]+), ...; Enter for none"
        ),
    ] = Field(default_factory=dict)
    metrics_file: str | None = Field(
        None,
        min_length=1,
        description="File of `metric_name` and `metric_regex`, with a tab between: more metrics.",
    )
    secrets: Annotated[
        dict[str, str],
        AfterValidator(keys.variables),
        Field(
            description="Variables of the processes whose values are in Secrets Manager, read in the job: "
            "`WANDB_API_KEY: name-or-arn`."
        ),
        asking.further(
            "Which variables are in Secrets Manager?",
            "NAME=secret, the name or ARN and never the value; Enter for none",
        ),
    ] = Field(default_factory=dict)
    source_dir: str = Field(
        ".", min_length=1, description="Folder that is sent; the script, and what it imports, is in it."
    )
    include: Annotated[list[str], AfterValidator(keys.patterns)] = Field(
        default_factory=list, description="Patterns of files that are sent although git ignores them."
    )
    exclude: Annotated[list[str], AfterValidator(keys.patterns)] = Field(
        default_factory=list, description="Patterns of files that are not sent."
    )
    max_upload_size: int = Field(200, ge=1, description="Megabytes that may be sent.")
    model_dir: Annotated[
        str | None,
        AfterValidator(keys.inside),
        Field(
            description="Folder of the script's that comes home when it ends; unset is `/opt/ml/model` only."
        ),
        asking.further("Into which folder does the script write its model?", "Enter for /opt/ml/model"),
    ] = None
    checkpoint_dir: Annotated[
        str | None,
        AfterValidator(keys.inside),
        Field(
            description="Folder of the script's that is kept in S3 while it runs, and there again after a spot "
            "interruption; unset is `/opt/ml/checkpoints` only."
        ),
        asking.further("Into which folder does it write checkpoints?", "Enter for /opt/ml/checkpoints"),
    ] = None
    checkpoint_uri: Annotated[
        str | None,
        AfterValidator(keys.s3),
        Field(description="Where checkpoints are kept; that of an earlier job goes on from there."),
    ] = None
    job_name: Annotated[
        str | None,
        AfterValidator(keys.name),
        Field(
            description="Name of the job, which no other may have had; unset is `base_job_name` and the time."
        ),
    ] = None
    base_job_name: Annotated[
        str | None,
        AfterValidator(keys.name),
        Field(description="What names of jobs start with; unset is the script's name."),
    ] = None
    tags: Annotated[
        dict[str, str],
        Field(description="Tags of the job: `team: vision`."),
        asking.further("Which tags?", "team=vision, ...; Enter for none"),
    ] = Field(default_factory=dict)
    volume_size: Annotated[
        int,
        Field(ge=1, description="Gigabytes of disk for each instance that has none of its own."),
        Question("How many gigabytes of disk?", suggest=lambda *_: 30, further=True),
    ] = 30
    subnets: Annotated[
        list[str],
        Field(description="Subnets of a VPC, for what is not public."),
        asking.further("Which subnets of a VPC?", "subnet-1a2b, subnet-3c4d; Enter for no VPC"),
    ] = Field(default_factory=list)
    security_group_ids: Annotated[
        list[str],
        Field(description="Security groups in that VPC."),
        asking.further("Which security groups?", "sg-1a2b, ...", when=asking.in_vpc),
    ] = Field(default_factory=list)
    network_isolation: bool = Field(
        False, description="Whether the container has no network but that to its peers."
    )
    encrypt_traffic: bool = Field(
        False, description="Whether traffic between instances is encrypted; slower."
    )
    volume_kms_key: Annotated[
        str | None,
        Field(min_length=1, description="KMS key for the disks."),
        asking.further("Which KMS key for the disks?", "Enter for none of yours"),
    ] = None
    output_kms_key: Annotated[
        str | None,
        Field(min_length=1, description="KMS key for what the job leaves in S3."),
        asking.further("Which KMS key for what it leaves in S3?", "Enter for none of yours"),
    ] = None
    bucket: Annotated[
        str | None,
        AfterValidator(keys.bucket),
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
            raise ValueError(
                "security_group_ids: subnets and security_group_ids go together; expected both, or none"
            )
        if self.network_isolation and (self.secrets or self.requirements):
            other = "secrets are read from" if self.secrets else "requirements are fetched from"
            raise ValueError(f"network_isolation: {other} the network, which the container then has not")
        return self

    @classmethod
    @override
    def lacks(cls) -> str:
        return asking.missing()

    @classmethod
    @override
    def suits_bf16(cls, machine: Machine) -> bool:
        return True

    @classmethod
    @override
    def several(cls, answers: Answers) -> bool:
        return answers.get("instance_count", 1) != 1 or instances.gpus(answers.get("instance_type")) != 1

    @property
    def longest(self) -> int | None:
        """Seconds for waiting and running together; None where nothing waits."""
        return (self.max_wait or self.max_run + _DAY_S) if self.spot else None

    @property
    def _may_have_gpus(self) -> bool:
        return self.allow_unknown_instance or instances.has_gpu(self.instance_type)

    @override
    def worlds(self, job: Job, plan: Plan) -> Sequence[int]:
        each = instances.gpus(self.instance_type) if plan.counted else plan.nproc_per_node
        each = 1 if job.settings.device == "cpu" and self.nproc_per_node == "auto" else each
        return (self.instance_count * each,) if each else ()

    @override
    def check_layout(self, settings: Settings) -> None:
        if self.model_parallel and not settings.parallel.plain:
            raise UsageError(
                "launcher.model_parallel has SageMaker's library divide models, and parallel: has torch do it; take one out"
            )

    @override
    def plan(self, job: Job) -> Plan:
        if job.settings.device not in {"auto", "cpu", "cuda"}:
            raise UsageError(
                f"device: {job.settings.device} is on no instance of SageMaker that accel knows; use auto, cuda or cpu"
            )
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
            nproc_per_node=1 if self.nproc_per_node == "auto" else self.nproc_per_node,
            counted="a process for each GPU" if self.nproc_per_node == "auto" and self._may_have_gpus else "",
            request={
                "profile": {**self.model_dump(), "max_wait": self.longest},
                "run": run,
                # What runs as a whole is accel's own, and travels anyway.
                "source": None if job.as_a_whole else self.source_dir,
            },
            output_dir=self.output_dir,
        )
