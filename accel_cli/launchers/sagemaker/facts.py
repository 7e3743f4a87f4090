"""What a request needs and no profile says: found out here and at AWS, before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from accel_cli.errors import UsageError
from accel_cli.launchers.sagemaker import buckets, images, instances, roles, tables
from accel_cli.launchers.sagemaker.aws import Account, is_no_job
from accel_cli.launchers.sagemaker.request import Facts, named
from accel_cli.planning.plan import Plan
from accel_runtime.env import variable_name

__all__ = ["ACCOUNT", "ROLE", "Found", "assumed", "filled", "gather", "is_taken"]

ACCOUNT, ROLE = "<account>", "<role>"
"""Stand for what only AWS knows, where it is not asked."""
_PARTITIONS = {"cn-": "aws-cn", "us-gov-": "aws-us-gov"}


@dataclass(frozen=True)
class Found:
    """What AWS has said."""

    facts: Facts
    who: str
    """The ARN of who asks."""
    has_bucket: bool
    """Whether the bucket is there already."""


def gather(account: Account, plan: Plan, now: datetime) -> Found:
    """What there is for a job; nothing is changed.

    Raises:
        UsageError: A job cannot run like this: what is asked for contradicts itself, or AWS does not have it.
        UnreachableError: AWS does not answer.
    """
    said = plan.request["profile"]
    local = _local(plan, account.region)
    with account.speaking("ask AWS who you are"):
        who = account.client("sts").get_caller_identity()
    number, name = str(who["Account"]), _name(plan, now)
    if said["job_name"] and is_taken(account, name):
        raise UsageError(
            f"there is a training job {name} already in {account.region}, and a name is never free again; choose "
            "another --job-name, or none, and the job is named for the time"
        )
    bucket = said["bucket"] or buckets.default(account.region, number)
    there = buckets.is_there(account, bucket, number)
    if said["bucket"] and not there:
        raise UsageError(
            f"launcher.bucket: there is no bucket {bucket}; leave it out, and {buckets.default(account.region, number)} "
            f"is made, or make it: aws s3 mb s3://{bucket} --region {account.region}"
        )
    role = roles.find(account, said["role"])
    partition = str(who["Arn"]).split(":")[1]
    facts = Facts(
        name, account.region, number, partition, role_arn=role, bucket=bucket, image_uri=_image(said, account.region),
        **local,
    )  # fmt: skip
    return Found(facts, str(who["Arn"]), there)


def assumed(account: Account, plan: Plan, now: datetime) -> Facts:
    """The same without asking AWS: what only it knows is `<account>` and `<role>`.

    Raises:
        UsageError: What is asked for contradicts itself.
    """
    said, region = plan.request["profile"], account.region
    partition = next((name for start, name in _PARTITIONS.items() if region.startswith(start)), "aws")
    role = said["role"] or ROLE
    if not role.startswith("arn:"):
        role = f"arn:{partition}:iam::{ACCOUNT}:role/{role}"
    bucket = said["bucket"] or buckets.default(region, ACCOUNT)
    return Facts(
        _name(plan, now), region, ACCOUNT, partition, role_arn=role, bucket=bucket, image_uri=_image(said, region),
        **_local(plan, region),
    )  # fmt: skip


def filled(text: str) -> str:
    """A text about assumed facts, with something that may be true in their places."""
    return text.replace(ACCOUNT, "0" * 12).replace(ROLE, "role")


def is_taken(account: Account, name: str) -> bool:
    """Whether there is a job of this name.

    Raises:
        UnreachableError: AWS does not answer.
    """
    with account.speaking(f"look for a job {name}"):
        sagemaker = account.client("sagemaker")
        try:
            sagemaker.describe_training_job(TrainingJobName=name)
        except sagemaker.exceptions.ClientError as error:
            if is_no_job(error):
                return False
            raise
        return True


def _name(plan: Plan, now: datetime) -> str:
    said = plan.request["profile"]
    return str(said["job_name"] or named(said["base_job_name"], plan.target, now))


def _local(plan: Plan, region: str) -> dict[str, Any]:
    """What files say, after all that can be refused without asking anybody."""
    said = plan.request["profile"]
    instances.check_known(said["instance_type"], allow_unknown=said["allow_unknown_instance"])
    _check_hardware(said["instance_type"], plan.request["run"]["settings"])
    if said["model_parallel"]:
        instances.check_model_parallel(said["instance_type"])
    _image(said, region)
    return {
        "inputs": _joined("inputs", said["inputs"], said["inputs_file"] and tables.inputs(said["inputs_file"])),
        "metrics": _joined("metrics", said["metrics"], said["metrics_file"] and tables.metrics(said["metrics_file"])),
    }  # fmt: skip


def _check_hardware(instance_type: str, settings: Mapping[str, str]) -> None:
    """Refuse what the instances cannot do.

    Raises:
        UsageError: They cannot.
    """
    backend = settings[variable_name("process_group_backend")]
    device = settings[variable_name("device")]
    if backend == "smddp":
        instances.check_smddp(instance_type)
    lacks = _lack(instance_type, device)
    if not lacks:
        return
    if device == "cuda":
        raise UsageError(f"device: cuda needs GPUs, and {lacks}; use cpu or auto, or another type")
    if backend in {"nccl", "smddp"}:
        raise UsageError(f"process_group_backend: {backend} needs GPUs, and {lacks}; use gloo or auto")
    if settings[variable_name("mixed_precision")] == "fp16":
        raise UsageError(f"mixed_precision: fp16 needs GPUs, and {lacks}; use bf16, or no")


def _lack(instance_type: str, device: str) -> str:
    """Why a job is without GPUs; empty where it has some."""
    if not instances.has_gpu(instance_type):
        return f"launcher.instance_type: {instance_type} has none"
    return "device: cpu uses none" if device == "cpu" else ""


def _image(said: Mapping[str, Any], region: str) -> str:
    if said["image_uri"]:
        return str(said["image_uri"])
    return images.image_uri(said["pytorch_version"] or _torch(), region, said["instance_type"])


def _torch() -> str:
    """The version of torch here, which is not imported for it."""
    try:
        return version("torch")
    except PackageNotFoundError:
        raise UsageError(
            "launcher.pytorch_version: torch is not installed here, so say which version the image should have: "
            f"{', '.join(images.known_versions())}; or set launcher.image_uri"
        ) from None


def _joined(key: str, said: Mapping[str, Any], listed: Mapping[str, Any] | None) -> dict[str, Any]:
    twice = sorted({*said} & {*(listed or {})})
    if twice:
        raise UsageError(f"launcher.{key} and launcher.{key}_file both have {', '.join(twice)}; say it once")
    return {**said, **(listed or {})}
