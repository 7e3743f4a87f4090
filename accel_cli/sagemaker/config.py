"""The `launcher:` section of a profile that runs scripts as training jobs of Amazon SageMaker."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from typing_extensions import Self, override

from accel_cli.errors import UsageError
from accel_cli.launchers import torchrun
from accel_cli.launchers.base import DETACH, JOB_NAME, Launcher, LaunchSpec, Plan
from accel_cli.planning.machine import Machine
from accel_cli.planning.options import LaunchOption
from accel_cli.profile.sections import Answers, Choice, CountOrAuto, Question, Section
from accel_cli.sagemaker import images, wizard
from accel_cli.sagemaker.request import CHANNEL, SageMakerJobPlan, build_job_spec
from accel_runtime.env import ProcessGroupBackend, Settings

if TYPE_CHECKING:
    from accel_cli.sagemaker.jobs import SageMakerJobs

__all__ = ["InputChannel", "SageMaker"]

_DAY_S = 86400
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": _DAY_S}
_TIME = re.compile(r"(\d{1,9})([smhd])")
_TIME_HINT = "seconds, or for example 90m, 2h or 1d"


def _parse_seconds(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    match = _TIME.fullmatch(value.strip())
    if not match:
        raise ValueError("expected seconds, or text such as 90m, 2h or 1d")
    return int(match[1]) * _UNITS_S[match[2]]


def _refuse_number(value: Any) -> Any:
    if isinstance(value, float):
        raise ValueError("expected text in quotes such as '2.9', since YAML reads 2.10 as 2.1")  # noqa: TRY004
    return value


def _check_folder(value: str | None) -> str | None:
    path = Path(value or ".")
    if value is not None and (path.is_absolute() or ".." in path.parts or not path.parts):
        raise ValueError("expected a folder below the working directory of the script, such as runs")
    return value


def _check_patterns(value: list[str]) -> list[str]:
    for text in value:
        if not text.strip("./") or ".." in text.split("/") or text.startswith(("!", "~")):
            raise ValueError(
                "expected a pattern of files in launcher.source_dir, such as data/*.csv or **/*.ckpt, without .., ! or ~"
            )
    return value


def _match(pattern: str, expected: str) -> AfterValidator:
    """Return a validator that accepts None and text that matches a pattern."""

    def check(value: str | None) -> str | None:
        if value is not None and not re.fullmatch(pattern, value):
            raise ValueError(f"expected {expected}")
        return value

    return AfterValidator(check)


def _match_keys(pattern: str, expected: str) -> AfterValidator:
    """Return a validator that accepts mappings whose keys match a pattern."""

    def check(value: dict[str, Any]) -> dict[str, Any]:
        for key in value:
            if not re.fullmatch(pattern, key):
                raise ValueError(f"expected {expected} as the key, got {key!r}")
        return value

    return AfterValidator(check)


_Seconds = BeforeValidator(_parse_seconds, json_schema_input_type=Annotated[int, Field(ge=1)] | str)
_S3Uri = Annotated[str, _match(r"s3://[^/\s]+(/.*)?", "an address in S3 such as s3://bucket/folder")]
_JOB_NAME = _match(
    r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}",
    "at most 63 letters, digits and hyphens, with no hyphen at the start or end",
)


class InputChannel(Section):
    """Data that a job reads, and how it gets them."""

    uri: _S3Uri
    input_mode: Literal["File", "FastFile"] = "File"
    """`File` copies everything before the script starts; `FastFile` reads files from S3 as they are opened."""
    distribution: Literal["FullyReplicated", "ShardedByS3Key"] = "FullyReplicated"
    """Whether every instance gets all files, or a part of them."""


class SageMaker(Launcher):
    """A training job of Amazon SageMaker, with the elastic agent in the container of every instance."""

    title: ClassVar[str] = "A training job on Amazon SageMaker"
    location = "job"
    launch_options = (
        DETACH,
        JOB_NAME,
        LaunchOption(
            "--offline",
            "Print the request to SageMaker as JSON, without connecting to AWS.",
            only_prints=True,
        ),
    )
    job_keys = ("region", "aws_profile")
    process_group_backends: ClassVar[frozenset[ProcessGroupBackend]] = frozenset(
        get_args(ProcessGroupBackend)
    )
    key_aliases: ClassVar[dict[str, str]] = {"launcher.nnodes": "launcher.instance_count"}
    advanced_title: ClassVar[str] = "image, inputs, metrics, secrets, folders of the script"

    kind: Literal["sagemaker"] = Field(
        "sagemaker",
        description="Run as an Amazon SageMaker training job: `accel launch` uploads the folder and follows the job.",
    )
    aws_profile: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Profile of the AWS configuration; unset takes the default of AWS's tools.",
        ),
        Question(
            "Which AWS profile?",
            suggest=wizard.suggest_none,
            offers=wizard.offer_profiles,
            hint="Enter = the default of AWS's tools",
        ),
    ] = None
    region: Annotated[
        str | None,
        Field(
            pattern=r"^[a-z]{2,4}(-[a-z]+)+-\d$",
            description="AWS region; unset takes that of the AWS configuration.",
        ),
        Question(
            "Which region?",
            suggest=wizard.suggest_none,
            offers=wizard.offer_regions,
            hint="Enter = from the AWS configuration",
        ),
    ] = None
    role: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Name or ARN of the role of the job; unset takes the only role that SageMaker may assume.",
        ),
        Question(
            "Which role does the job use?",
            suggest=wizard.suggest_none,
            offers=wizard.offer_roles,
            hint="name or ARN; Enter = the only role that SageMaker may assume",
        ),
    ] = None
    instance_type: Annotated[
        str,
        _match(r"ml\.[a-z0-9-]+\.[a-z0-9-]+", "an instance type such as ml.g5.xlarge"),
        Field(description="Instance type."),
        Question(
            "Which instance type?",
            suggest=lambda *_: "ml.g5.xlarge",
            complete=wizard.complete_instance_types,
            check=wizard.find_type_error,
            hint="Tab completes",
        ),
    ] = "ml.g5.xlarge"
    instance_count: Annotated[
        int,
        Field(ge=1, description="Number of instances."),
        Question("How many instances?", suggest=lambda *_: 1),
    ] = 1
    nproc_per_node: Annotated[
        CountOrAuto,
        Field(description="Processes per instance; `auto` starts one for each GPU, or 1 without GPUs."),
    ] = "auto"
    spot: Annotated[
        bool,
        Field(
            description="Use spot instances, which are cheaper and may be interrupted; the job then starts again with the "
            "files of its checkpoint folder."
        ),
        Question(
            "On demand, or spot?",
            suggest=lambda *_: False,
            choices=(
                Choice(False, "on demand"),
                Choice(True, "spot: cheaper, may be interrupted; the script should save checkpoints"),
            ),
        ),
    ] = False
    max_run: Annotated[
        int,
        Field(
            ge=1,
            description="Seconds after which the job is stopped; also text such as `90m`, `2h` or `1d`.",
        ),
        _Seconds,
        Question("How long may it run?", suggest=lambda *_: _DAY_S, hint=_TIME_HINT),
    ] = _DAY_S
    max_wait: Annotated[
        int | None,
        Field(
            ge=1,
            description="With `spot`, seconds for waiting and running together; unset adds a day to `max_run`.",
        ),
        _Seconds,
        wizard.advanced_question(
            "How long may it wait and run in total?",
            f"{_TIME_HINT}; Enter = a day of waiting",
            when=wizard.is_spot,
        ),
    ] = None
    keep_alive: Annotated[
        int | None,
        Field(
            ge=1,
            le=21600,
            description="Seconds to keep the instances for another job, at full price; it then starts at once.",
        ),
        _Seconds,
        Question(
            "Keep the instances warm after the job?",
            suggest=wizard.suggest_none,
            when=wizard.is_on_demand,
            hint="for example 30m; billed at full price; Enter = no",
        ),
    ] = None
    image_uri: Annotated[
        str | None,
        Field(min_length=1, description="Container image; unset takes AWS's image for `pytorch_version`."),
        wizard.advanced_question("Which image?", "Enter = AWS's image"),
    ] = None
    pytorch_version: Annotated[
        str | None,
        Field(
            pattern=r"^\d+\.\d+",
            description="torch version of AWS's image, such as `'2.9'`; unset takes the version installed here.",
        ),
        BeforeValidator(_refuse_number),
        wizard.advanced_question(
            "Which torch version in AWS's image?",
            "for example 2.9",
            when=wizard.has_aws_image,
            offers=wizard.offer_versions,
        ),
    ] = None
    requirements: Annotated[
        str | None,
        Field(min_length=1, description="Requirements file that pip installs before the script starts."),
        Question(
            "Which requirements file?",
            suggest=lambda *_: "requirements.txt" if Path("requirements.txt").is_file() else None,
            hint="installed by pip; Enter = none",
        ),
    ] = None
    inputs: Annotated[
        dict[str, _S3Uri | InputChannel],
        _match_keys(
            rf"(?!{CHANNEL}$)[A-Za-z0-9.\-_]+",
            f"letters, digits, dots, hyphens and underscores, but not {CHANNEL}",
        ),
        Field(
            description="Input data by channel: `train: s3://bucket/folder` becomes `/opt/ml/input/data/train`; or "
            "`{uri: ..., input_mode: FastFile, distribution: ShardedByS3Key}`."
        ),
        wizard.advanced_question(
            "Which data does it read?", "train=s3://bucket/folder, test=s3://...; Enter = none"
        ),
    ] = Field(default_factory=dict)
    metrics: Annotated[
        dict[str, str],
        Field(description="Metrics that SageMaker reads from the log, by name: `loss: 'loss ([0-9.]+)'`."),
        wizard.advanced_question(
            "Which metrics does SageMaker read from the log?", "loss=loss ([0-9.]+), ...; Enter = none"
        ),
    ] = Field(default_factory=dict)
    secrets: Annotated[
        dict[str, str],
        _match_keys(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable"),
        Field(
            description="Environment variables whose values the job reads from Secrets Manager: "
            "`WANDB_API_KEY: name-or-arn`."
        ),
        wizard.advanced_question(
            "Which variables are in Secrets Manager?",
            "NAME=secret, with the name or ARN of the secret, not its value; Enter = none",
        ),
    ] = Field(default_factory=dict)
    source_dir: str = Field(
        ".", min_length=1, description="Folder that is sent, with the script and the modules it imports."
    )
    include: Annotated[list[str], AfterValidator(_check_patterns)] = Field(
        default_factory=list, description="Patterns of files to send although git ignores them."
    )
    exclude: Annotated[list[str], AfterValidator(_check_patterns)] = Field(
        default_factory=list, description="Patterns of files not to send."
    )
    max_upload_size: int = Field(
        200, ge=1, description="Maximum size of the files that are sent, in megabytes."
    )
    model_dir: Annotated[
        str | None,
        AfterValidator(_check_folder),
        Field(description="Folder of the script that is kept as the model, besides `/opt/ml/model`."),
        wizard.advanced_question("To which folder does the script write its model?", "Enter = /opt/ml/model"),
    ] = None
    checkpoint_dir: Annotated[
        str | None,
        AfterValidator(_check_folder),
        Field(
            description="Folder of the script that is kept in S3 while it runs, and restored after a spot interruption, "
            "besides `/opt/ml/checkpoints`."
        ),
        wizard.advanced_question("To which folder does it write checkpoints?", "Enter = /opt/ml/checkpoints"),
    ] = None
    checkpoint_uri: _S3Uri | None = Field(
        None,
        description="Address of checkpoints in S3; that of an earlier job continues from its checkpoints.",
    )
    job_name: Annotated[str | None, _JOB_NAME] = Field(
        None,
        description="Name of the job, which cannot be reused; unset combines `base_job_name` and the time.",
    )
    base_job_name: Annotated[str | None, _JOB_NAME] = Field(
        None, description="Start of job names; unset takes the script's name."
    )
    tags: dict[str, str] = Field(default_factory=dict, description="Tags of the job: `team: vision`.")
    volume_size: int = Field(30, ge=1, description="Gigabytes of disk for instances without a local disk.")
    subnets: list[str] = Field(
        default_factory=list, description="Subnets of a VPC, to reach what is not public."
    )
    security_group_ids: list[str] = Field(default_factory=list, description="Security groups in that VPC.")
    network_isolation: bool = Field(False, description="Give the container no network except to its peers.")
    encrypt_traffic: bool = Field(
        False, description="Encrypt the traffic between instances, which is slower."
    )
    volume_kms_key: str | None = Field(None, min_length=1, description="KMS key for the disks.")
    output_kms_key: str | None = Field(None, min_length=1, description="KMS key for the output in S3.")
    bucket: Annotated[
        str | None,
        _match(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", "the name of a bucket, without s3:// and folder"),
    ] = Field(
        None,
        description="Bucket of the job; unset takes `sagemaker-REGION-ACCOUNT`, and creates it if needed.",
    )
    output_dir: str = Field(
        ".",
        min_length=1,
        description="Local folder for results; they are downloaded to a subfolder with the job's name.",
    )
    download: bool = Field(True, description="Download the results when a followed job has completed.")
    allow_unknown_instance: bool = Field(
        False, description="Accept an instance type that the installed boto3 does not know."
    )
    model_parallel: dict[str, Any] = Field(
        default_factory=dict,
        description="Parameters for SageMaker's model parallel library v2, passed on unchanged.",
    )
    max_restarts: torchrun.MaxRestarts = 0
    ranks: torchrun.Ranks = 0
    shutdown_timeout: torchrun.ShutdownTimeout = 110
    stall_timeout: torchrun.StallTimeout = None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.max_wait is not None and not self.spot:
            raise ValueError("max_wait: only spot jobs wait; set spot: true, or remove max_wait")
        if self.max_wait is not None and self.max_wait < self.max_run:
            raise ValueError(
                f"max_wait: expected at least max_run, {self.max_run}, which it includes, got {self.max_wait}"
            )
        if self.spot and self.keep_alive:
            raise ValueError("keep_alive: spot instances cannot be kept; remove spot or keep_alive")
        if bool(self.subnets) != bool(self.security_group_ids):
            raise ValueError(
                "security_group_ids: subnets and security_group_ids need each other; expected both, or none"
            )
        if self.network_isolation and (self.secrets or self.requirements):
            key = "secrets" if self.secrets else "requirements"
            raise ValueError(f"network_isolation: {key} need a network; remove one of the two")
        return self

    @classmethod
    @override
    def get_missing_requirement(cls) -> str:
        return wizard.find_missing_extra()

    @classmethod
    @override
    def prefers_bf16(cls, machine: Machine) -> bool:
        return True

    @classmethod
    @override
    def may_start_several(cls, answers: Answers) -> bool:
        return answers.get("instance_count", 1) != 1 or images.count_gpus(answers.get("instance_type")) != 1

    @property
    def total_limit(self) -> int | None:
        """Seconds for waiting and running together; None for jobs on demand."""
        return (self.max_wait or self.max_run + _DAY_S) if self.spot else None

    @property
    def _may_have_gpus(self) -> bool:
        return self.allow_unknown_instance or images.has_gpu(self.instance_type)

    @override
    def get_world_sizes(self, spec: LaunchSpec, plan: Plan) -> Sequence[int]:
        each = images.count_gpus(self.instance_type) if plan.process_description else plan.nproc_per_node
        each = 1 if spec.settings.device == "cpu" and self.nproc_per_node == "auto" else each
        return (self.instance_count * each,) if each else ()

    @override
    def check_layout(self, settings: Settings) -> None:
        if self.model_parallel and not settings.parallel.plain:
            raise UsageError(
                "launcher.model_parallel and parallel: both shard the model. Remove one of them."
            )

    @override
    def plan(self, spec: LaunchSpec) -> Plan:
        if spec.settings.device not in {"auto", "cpu", "cuda"}:
            raise UsageError(
                f"device: {spec.settings.device} is not available on SageMaker. Use auto, cuda or cpu."
            )
        run = build_job_spec(self, spec)
        return Plan(
            launcher=self.kind,
            argv=(spec.target, *spec.args),
            env=run["env"],
            device=self.instance_type,
            target=spec.target,
            nnodes=self.instance_count,
            nproc_per_node=1 if self.nproc_per_node == "auto" else self.nproc_per_node,
            process_description="a process for each GPU"
            if self.nproc_per_node == "auto" and self._may_have_gpus
            else "",
            job=SageMakerJobPlan(
                section=self,
                run=run,
                # Targets of accel itself are in its own archive.
                source=None if spec.is_builtin else self.source_dir,
                output_dir=self.output_dir,
                detach="detach" in spec.option_values,
                jobs_options=spec.jobs_options,
            ),
        )

    @override
    def run(self, plan: Plan) -> int:
        from accel_cli.sagemaker import submit  # noqa: PLC0415 - imports boto3

        return submit.submit(plan)

    @classmethod
    @override
    def open_jobs(cls, values: Mapping[str, Any]) -> SageMakerJobs:
        from accel_cli.sagemaker.aws import Account  # noqa: PLC0415 - imports boto3
        from accel_cli.sagemaker.jobs import SageMakerJobs  # noqa: PLC0415 - imports boto3

        return SageMakerJobs(Account(values.get("launcher.region"), values.get("launcher.aws_profile")))

    @override
    def preview(self, plan: Plan, options: Mapping[str, Any]) -> str:
        from accel_cli.sagemaker import submit  # noqa: PLC0415 - loads what a job is sent with

        return submit.preview(plan, offline="offline" in options)
