"""The fields of the `launcher:` section of a profile for training jobs of Amazon SageMaker, and the wizard's choices for them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from typing_extensions import override

from accel_cli.errors import AccelError
from accel_cli.extensions.sagemaker import images
from accel_cli.extensions.sagemaker.aws import Account
from accel_cli.launchers import torchrun
from accel_cli.launchers.launcher import DETACH, JOB_NAME, Launcher
from accel_cli.launchers.sections import (
    Answers,
    Choice,
    CountOrAuto,
    ExpandedPath,
    Offers,
    Question,
    Section,
    match,
)
from accel_cli.planning.launch_options import LaunchOption
from accel_cli.planning.machine import Machine
from accel_runtime.environment.installation import format_install
from accel_runtime.environment.settings import ProcessGroupBackend

__all__ = ["CHANNEL", "InputChannel", "SageMakerSection"]

CHANNEL = "accel"
"""The input channel that holds the bundle."""
_DAY_S = 86400
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": _DAY_S}
_TIME = re.compile(r"(\d{1,9})([smhd])")
_TIME_HINT = "seconds, or for example 90m, 2h or 1d"
_PACKAGES = {"boto3": "boto3", "sagemaker": "sagemaker-core"}
"""The packages that it needs, by the module of each."""
_ATTEMPTS = 2
"""Attempts of a call while the user of the wizard waits, who can also type the answer."""
_DEFAULT_REGION = "us-east-1"


def _ask_advanced(text: str, hint: str, **options: Any) -> Question:
    return Question(text, hint=hint, advanced=True, **options)


def _find_missing_extra() -> str:
    return ", ".join(package for module, package in _PACKAGES.items() if not find_spec(module))


def _open_account(answers: Answers) -> Account:
    return Account(answers.get("region"), answers.get("aws_profile"), max_attempts=_ATTEMPTS)


def _offer_profiles(_: Machine, answers: Answers) -> Offers:  # noqa: ARG001 - they do not depend on answers
    """Offer the profiles of the AWS configuration."""
    try:
        session = _open_account({}).session
    except AccelError as error:
        return _explain_no_offers(error)
    default = Choice(None, f"the default of AWS's tools ({session.profile_name})")
    return Offers([default, *(Choice(name, name) for name in session.available_profiles)])


def _offer_regions(_: Machine, answers: Answers) -> Offers:
    """Offer the region of the AWS configuration, then all others that have SageMaker."""
    try:
        session = _open_account(answers).session
        configured = session.region_name
        partition = session.get_partition_for_region(configured) if configured else "aws"
        regions = session.get_available_regions("sagemaker", partition)
    except AccelError as error:
        return _explain_no_offers(error)
    first = [Choice(configured, f"{configured} (from the AWS configuration)")] if configured else []
    default = [_DEFAULT_REGION] if _DEFAULT_REGION in regions else []
    others = [name for name in dict.fromkeys([*default, *sorted(regions)]) if name != configured]
    return Offers([*first, *(Choice(name, name) for name in others)])


def _offer_roles(_: Machine, answers: Answers) -> Offers:
    """Offer the roles that SageMaker may assume."""
    from accel_cli.extensions.sagemaker.roles import list_roles  # noqa: PLC0415 - only the wizard needs it here

    try:
        roles = list_roles(_open_account(answers))
        return Offers([Choice(arn, name) for name, arn in roles.items()])
    except AccelError as error:
        return _explain_no_offers(error, "roles")


def _offer_versions(machine: Machine, answers: Answers) -> Offers:
    """Offer the torch version of this machine, then every version that has an image of AWS."""
    same = Choice(None, f"the version of the machine that launches (here: {machine.torch or 'no torch'})")
    try:
        versions = reversed(images.list_versions(answers.get("region")))
    except AccelError as error:
        return _explain_no_offers(error, "versions")
    return Offers([same, *(Choice(version, version) for version in versions)])


def _explain_no_offers(error: AccelError, what: str = "choices") -> Offers:
    if _find_missing_extra():
        # The wizard shows the same note once, however many questions have it.
        return Offers(
            note="boto3 is not installed, so nothing can be listed. Type the answers, or install it: "
            f"{format_install(*_PACKAGES.values(), extra='sagemaker')}"
        )
    return Offers(note=f"The {what} cannot be listed; type the answer. {error}")


def _complete_types() -> Sequence[str]:
    return [] if _find_missing_extra() else images.list_types()


def _find_type_error(instance_type: Any) -> str | None:
    """Return what is wrong with an instance type, or None if it is known, or cannot be checked without boto3."""
    try:
        if not _find_missing_extra():
            images.check_type(str(instance_type))
    except AccelError as error:
        return str(error)
    return None


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


def _check_folder(value: str) -> str:
    path = Path(value)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError("expected a folder below the working directory of the script, such as runs")
    return value


def _check_pattern(value: str) -> str:
    if not value.strip("./") or ".." in value.split("/") or value.startswith(("!", "~")):
        raise ValueError(
            "expected a pattern of files in launcher.source_dir, such as data/*.csv or **/*.ckpt, without .., ! or ~"
        )
    return value


def _check_secret(value: str) -> str:
    # An ARN has seven parts; a key, a stage and a version follow it, as in a task of ECS.
    if value.startswith("arn:") and any(value.split(":")[8:]):
        raise ValueError("expected a name, an ARN or ARN:key::, since a stage or version is not supported")
    return value


_Text = Annotated[str, Field(min_length=1)]
_PARSE_SECONDS = BeforeValidator(_parse_seconds, json_schema_input_type=Annotated[int, Field(ge=1)] | str)
_Seconds = Annotated[int, Field(ge=1), _PARSE_SECONDS]
_Folder = Annotated[str, AfterValidator(_check_folder)]
_Patterns = list[Annotated[str, AfterValidator(_check_pattern)]]
_FILE_SYSTEM = r"(efs|fsx)://(fs-[0-9a-f]{8,})(/.*)?"
_ECR = r"[^.]+\.dkr[.-]ecr(\..+)?"
"""Registries that SageMaker reads without a VPC."""
_InputUri = Annotated[
    str,
    match(
        r"s3://[^/\s]+(/.*)?|efs://fs-[0-9a-f]{8,}(/.*)?|fsx://fs-[0-9a-f]{8,}/.+",
        "an address such as s3://bucket/folder, efs://fs-0123abcd/folder or fsx://fs-0123abcd/MOUNT-NAME/folder",
    ),
]
_S3Uri = Annotated[str, match(r"s3://[^/\s]+(/.*)?", "an address in S3 such as s3://bucket/folder")]
_JobName = Annotated[
    str,
    match(
        r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}",
        "at most 63 letters, digits and hyphens, with no hyphen at the start or end",
    ),
]


class InputChannel(Section):
    """Data that a job reads, and how it gets them."""

    uri: _InputUri
    """An address in S3, or a folder of a file system of EFS or FSx for Lustre, which is mounted."""
    access: Literal["ro", "rw"] = "ro"
    """`rw` mounts a file system so that the job can write to it."""
    input_mode: Literal["File", "FastFile"] = "File"
    """`File` copies everything before the script starts; `FastFile` reads files from S3 as they are opened."""
    distribution: Literal["FullyReplicated", "ShardedByS3Key"] = "FullyReplicated"
    """Whether every instance gets all files, or a part of them."""

    @property
    def file_system(self) -> tuple[str, str, str] | None:
        """The kind, the id and the folder of a file system; None for an address in S3."""
        found = re.fullmatch(_FILE_SYSTEM, self.uri)
        return (found[1], found[2], found[3] or "/") if found else None

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.file_system is None and self.access != "ro":
            raise ValueError("access: only a file system can be written; remove it for an address in S3")
        if self.file_system and (self.input_mode, self.distribution) != ("File", "FullyReplicated"):
            raise ValueError("input_mode and distribution are for S3; a file system is mounted as it is")
        return self


class SageMakerSection(Launcher):
    """The keys of a training job, and the checks of their combinations."""

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
    listed_packages: ClassVar[tuple[str, ...]] = ("boto3",)
    variables: ClassVar[tuple[str, ...]] = ("SM_",)
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
        _Text | None,
        Question("Which AWS profile?", hint="Enter = the default of AWS's tools", offers=_offer_profiles),
    ] = Field(None, description="Profile of the AWS configuration; unset takes the default of AWS's tools.")
    region: Annotated[
        str | None,
        Question("Which region?", hint="Enter = from the AWS configuration", offers=_offer_regions),
    ] = Field(
        None,
        pattern=r"^[a-z]{2,4}(-[a-z]+)+-\d$",
        description="AWS region; unset takes that of the AWS configuration.",
    )
    role: Annotated[
        _Text | None,
        Question(
            "Which role does the job use?",
            hint="name or ARN; Enter = the only role that SageMaker may assume",
            offers=_offer_roles,
        ),
    ] = Field(
        None,
        description="Name or ARN of the role of the job; unset takes the only role that SageMaker may assume.",
    )
    instance_type: Annotated[
        str,
        match(r"ml\.[a-z0-9-]+\.[a-z0-9-]+", "an instance type such as ml.g5.xlarge"),
        Question(
            "Which instance type?",
            suggest=lambda *_: "ml.g5.xlarge",
            complete=_complete_types,
            check=_find_type_error,
            hint="Tab completes",
        ),
    ] = Field("ml.g5.xlarge", description="Instance type.")
    instance_count: Annotated[int, Question("How many instances?", suggest=lambda *_: 1)] = Field(
        1, ge=1, description="Number of instances."
    )
    nproc_per_node: CountOrAuto = Field(
        "auto",
        description="Processes per instance; `auto` starts one for each GPU, or 1 without GPUs.",
    )
    spot: Annotated[
        bool,
        Question(
            "On demand, or spot?",
            suggest=lambda *_: False,
            choices=(
                Choice(False, "on demand"),
                Choice(True, "spot: cheaper, may be interrupted; the script should save checkpoints"),
            ),
        ),
    ] = Field(
        False,
        description="Use spot instances, which are cheaper and may be interrupted; the job then starts again with the "
        "files of its checkpoint folder.",
    )
    max_run: Annotated[
        _Seconds, Question("How long may it run?", suggest=lambda *_: _DAY_S, hint=_TIME_HINT)
    ] = Field(
        _DAY_S, description="Seconds after which the job is stopped; also text such as `90m`, `2h` or `1d`."
    )
    max_wait: Annotated[
        _Seconds | None,
        _ask_advanced(
            "How long may it wait and run in total?",
            f"{_TIME_HINT}; Enter = a day of waiting",
            when=lambda answers: bool(answers.get("spot")),
        ),
    ] = Field(
        None,
        description="With `spot`, seconds for waiting and running together; unset adds a day to `max_run`.",
    )
    max_retries: Annotated[int, Field(ge=1, le=30)] | None = Field(
        None,
        description="Number of times that SageMaker starts the job again after an error of its own; unset is none. It continues with "
        "the files of its checkpoint folder.",
    )
    training_plan: _Text | None = Field(
        None, description="ARN of the training plan whose reserved instances the job uses."
    )
    keep_alive: Annotated[
        Annotated[int, Field(ge=1, le=21600), _PARSE_SECONDS] | None,
        Question(
            "Keep the instances warm after the job?",
            hint="for example 30m; billed at full price; Enter = no",
            when=lambda answers: not answers.get("spot"),
        ),
    ] = Field(
        None,
        description="Seconds to keep the instances for another job, at full price; it then starts at once.",
    )
    image_uri: Annotated[_Text | None, _ask_advanced("Which image?", "Enter = AWS's image")] = Field(
        None, description="Container image; unset takes AWS's image for `pytorch_version`."
    )
    pytorch_version: Annotated[
        str | None,
        BeforeValidator(_refuse_number),
        _ask_advanced(
            "Which torch version in AWS's image?",
            "for example 2.9",
            when=lambda answers: not answers.get("image_uri"),
            offers=_offer_versions,
        ),
    ] = Field(
        None,
        pattern=r"^\d+\.\d+",
        description="torch version of AWS's image, such as `'2.9'`; unset takes the version installed here.",
    )
    requirements: Annotated[
        _Text | None,
        ExpandedPath,
        Question(
            "Which requirements file?",
            suggest=lambda *_: "requirements.txt" if Path("requirements.txt").is_file() else None,
            hint="installed by pip; Enter = none",
        ),
    ] = Field(None, description="Requirements file that pip installs before the script starts.")
    inputs: Annotated[
        dict[str, _InputUri | InputChannel],
        match(
            rf"(?!{CHANNEL}$)[A-Za-z0-9.\-_]+",
            f"letters, digits, dots, hyphens and underscores, but not {CHANNEL} as the key",
        ),
        _ask_advanced("Which data does it read?", "train=s3://bucket/folder, test=s3://...; Enter = none"),
    ] = Field(
        default_factory=dict,
        description="Input data by channel: `train: s3://bucket/folder` becomes `/opt/ml/input/data/train`, as do "
        "`efs://fs-ID/folder` and `fsx://fs-ID/MOUNT-NAME/folder`; or `{uri: ..., input_mode: FastFile, distribution: "
        "ShardedByS3Key}`, or `{uri: efs://..., access: rw}`.",
    )
    registry_credentials: (
        Annotated[str, match(r"arn:[\w-]+:lambda:[\w-]+:\d{12}:function:.+", "the ARN of a Lambda function")]
        | None
    ) = Field(
        None,
        description="ARN of the Lambda function that gives SageMaker the login of a private registry outside ECR.",
    )
    metrics: Annotated[
        dict[str, str],
        _ask_advanced(
            "Which metrics does SageMaker read from the log?", "loss=loss ([0-9.]+), ...; Enter = none"
        ),
    ] = Field(
        default_factory=dict,
        description="Metrics that SageMaker reads from the log, by name: `loss: 'loss ([0-9.]+)'`.",
    )
    secrets: Annotated[
        dict[str, Annotated[str, AfterValidator(_check_secret)]],
        match(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable as the key"),
        _ask_advanced(
            "Which variables are in Secrets Manager?",
            "NAME=secret, with the name or ARN of the secret, not its value; Enter = none",
        ),
    ] = Field(
        default_factory=dict,
        description="Environment variables whose values the job reads from Secrets Manager: "
        "`WANDB_API_KEY: name-or-arn`.",
    )
    source_dir: Annotated[_Text, ExpandedPath] = Field(
        ".", description="Folder that is sent, with the script and the modules it imports."
    )
    include: _Patterns = Field(
        default_factory=list,
        description="Patterns of files to send although git ignores them, they are data, or they may hold secrets.",
    )
    exclude: _Patterns = Field(default_factory=list, description="Patterns of files not to send.")
    max_upload_size: int = Field(
        200, ge=1, description="Maximum size of the files that are sent, in megabytes."
    )
    model_dir: Annotated[
        _Folder | None,
        _ask_advanced("To which folder does the script write its model?", "Enter = /opt/ml/model"),
    ] = Field(None, description="Folder of the script that is kept as the model, besides `/opt/ml/model`.")
    checkpoint_dir: Annotated[
        _Folder | None,
        _ask_advanced("To which folder does it write checkpoints?", "Enter = /opt/ml/checkpoints"),
    ] = Field(
        None,
        description="Folder of the script that is kept in S3 while it runs, and restored after a spot interruption, "
        "besides `/opt/ml/checkpoints`.",
    )
    checkpoint_uri: _S3Uri | None = Field(
        None,
        description="Address of checkpoints in S3; that of an earlier job continues from its checkpoints.",
    )
    job_name: _JobName | None = Field(
        None,
        description="Name of the job, which cannot be reused; unset combines `base_job_name` and the time.",
    )
    base_job_name: _JobName | None = Field(
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
    volume_kms_key: _Text | None = Field(None, description="KMS key for the disks.")
    output_kms_key: _Text | None = Field(None, description="KMS key for the output in S3.")
    bucket: (
        Annotated[
            str, match(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", "the name of a bucket, without s3:// and folder")
        ]
        | None
    ) = Field(
        None,
        description="Bucket of the job; unset takes `sagemaker-REGION-ACCOUNT`, and creates it if needed.",
    )
    output_dir: Annotated[_Text, ExpandedPath] = Field(
        ".", description="Local folder for results; they are downloaded to a subfolder with the job's name."
    )
    compress_output: bool = Field(
        True,
        description="Compress the model and the output in S3; large models are stored faster without it.",
    )
    tensorboard_uri: _S3Uri | None = Field(
        None,
        description="Address in S3 to which SageMaker copies what the script writes to `/opt/ml/output/tensorboard` while it runs.",
    )
    remote_debug: bool = Field(
        False, description="Allow shells in the containers of the job through AWS Systems Manager."
    )
    download: bool = Field(True, description="Download the results when a followed job has completed.")
    allow_unknown_instance: bool = Field(
        False, description="Accept an instance type that the installed boto3 does not know."
    )
    request: dict[str, Any] = Field(
        default_factory=dict,
        description="More members of the request CreateTrainingJob, merged into those that accel generates: "
        "`{InfraCheckConfig: {EnableInfraCheck: true}}`. Members that have a key of their own are refused.",
    )
    max_restarts: torchrun.MaxRestarts = 0
    ranks: torchrun.Ranks = 0
    shutdown_timeout: torchrun.ShutdownTimeout = 110
    progress_line: torchrun.ProgressLine = None
    stall_timeout: torchrun.StallTimeout = None
    stall_action: torchrun.StallActionKey = "report"
    startup_timeout: torchrun.StartupTimeout = None
    preflight: torchrun.Preflight = False
    start_method: torchrun.StartMethod = "auto"
    _check_stalls = model_validator(mode="after")(torchrun.check_stall_keys)

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
        uris = [source if isinstance(source, str) else source.uri for source in self.inputs.values()]
        if any(not uri.startswith("s3://") for uri in uris) and not self.subnets:
            raise ValueError(
                "subnets: a file system is mounted from a VPC; set subnets and security_group_ids that can reach it"
            )
        if self.has_private_registry and not self.subnets:
            raise ValueError(
                f"subnets: SageMaker reads {self.image_uri}, which is not in ECR, from a VPC; set subnets and security_group_ids "
                "that can reach the registry"
            )
        if self.registry_credentials and not self.has_private_registry:
            raise ValueError(
                "registry_credentials: only a registry outside ECR needs them; set image_uri, or remove it"
            )
        if self.network_isolation and (self.secrets or self.requirements):
            key = "secrets" if self.secrets else "requirements"
            raise ValueError(f"network_isolation: {key} need a network; remove one of the two")
        return self

    @classmethod
    @override
    def get_missing_requirement(cls) -> str:
        return _find_missing_extra()

    @classmethod
    @override
    def prefers_bf16(cls, machine: Machine) -> bool:
        return True

    @classmethod
    @override
    def may_start_several(cls, answers: Answers) -> bool:
        return answers.get("instance_count", 1) != 1 or images.count_gpus(answers.get("instance_type")) != 1

    @property
    def has_private_registry(self) -> bool:
        """True if the image is in a registry outside ECR."""
        registry, slash, _ = (self.image_uri or "").partition("/")
        return bool(slash and re.search(r"[.:]", registry)) and not re.fullmatch(_ECR, registry)

    @property
    def total_limit(self) -> int | None:
        """Seconds for waiting and running together; None for jobs on demand."""
        return (self.max_wait or self.max_run + _DAY_S) if self.spot else None
