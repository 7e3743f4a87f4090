"""Name, role, bucket and image of a job, if the profile leaves them open: looked up in AWS, or assumed offline."""

from __future__ import annotations

from datetime import datetime
from importlib.metadata import PackageNotFoundError, version

from accel_cli.errors import UsageError
from accel_cli.extensions.sagemaker import images, s3
from accel_cli.extensions.sagemaker.aws import NAME_IN_USE_TEXT, Account, find_job
from accel_cli.extensions.sagemaker.request import SageMakerJobPlan, Submission, name_job
from accel_cli.extensions.sagemaker.roles import resolve_role
from accel_runtime.environment.accelerate.sagemaker import SMDDP_TYPES
from accel_runtime.environment.settings import variable_name

__all__ = [
    "assume_submission",
    "fill_placeholders",
    "resolve_submission",
]

_ACCOUNT, _ROLE = "<account>", "<role>"
"""Placeholders for what only AWS knows."""
_PARTITIONS = {"cn-": "aws-cn", "us-gov-": "aws-us-gov"}


def resolve_submission(account: Account, job: SageMakerJobPlan, now: datetime) -> Submission:
    """Look up in AWS what a job needs; nothing is changed there."""
    section, region = job.section, account.region
    image = _choose_image(job, region)
    with account.translate_errors("identify the caller"):
        caller = account.client("sts").get_caller_identity()
    owner, name = str(caller["Account"]), _choose_name(job, now)
    if section.job_name and find_job(account, name) is not None:
        raise UsageError(f"Cannot use job name {name!r}: {NAME_IN_USE_TEXT}")
    default = f"sagemaker-{region}-{owner}"
    bucket = section.bucket or default
    exists = s3.check_bucket(account, bucket, owner)
    if section.bucket and not exists:
        raise UsageError(
            f"Bucket not found: {bucket} (launcher.bucket). Remove the key to use {default}, or create it: "
            f"aws s3 mb s3://{bucket} --region {region}"
        )
    return Submission(
        name=name,
        region=region,
        account=owner,
        role_arn=resolve_role(account, section.role),
        bucket=bucket,
        image_uri=image,
        caller=str(caller["Arn"]),
        bucket_exists=exists,
    )


def assume_submission(account: Account, job: SageMakerJobPlan, now: datetime) -> Submission:
    """Return the same without a call to AWS, with the placeholders `<account>` and `<role>`."""
    section, region = job.section, account.region
    partition = next((name for start, name in _PARTITIONS.items() if region.startswith(start)), "aws")
    role = section.role or _ROLE
    return Submission(
        name=_choose_name(job, now),
        region=region,
        account=_ACCOUNT,
        role_arn=role if role.startswith("arn:") else f"arn:{partition}:iam::{_ACCOUNT}:role/{role}",
        bucket=section.bucket or f"sagemaker-{region}-{_ACCOUNT}",
        image_uri=_choose_image(job, region),
    )


def fill_placeholders(text: str) -> str:
    """Replace the placeholders of an assumed submission by values of the right form."""
    return text.replace(_ACCOUNT, "0" * 12).replace(_ROLE, "role")


def _choose_name(job: SageMakerJobPlan, now: datetime) -> str:
    section = job.section
    return section.job_name or name_job(section.base_job_name, job.run["target"], now)


def _choose_image(job: SageMakerJobPlan, region: str) -> str:
    """Return the image of a job; raise UsageError if its instances cannot do what the settings ask for."""
    section, settings = job.section, job.run["settings"]
    instance_type = section.instance_type
    images.check_type(instance_type, allow_unknown=section.allow_unknown_instance)
    backend = settings[variable_name("process_group_backend")]
    device = settings[variable_name("device")]
    if backend == "smddp" and instance_type not in SMDDP_TYPES:
        raise UsageError(
            f"process_group_backend: smddp needs launcher.instance_type {' or '.join(SMDDP_TYPES)}, got "
            f"{instance_type!r}. Choose one of these types, or remove the setting."
        )
    if not images.has_gpu(instance_type) or device == "cpu":
        reason = "device: cpu uses none" if device == "cpu" else f"{instance_type} has none"
        if device == "cuda":
            raise UsageError(
                f"device: cuda needs GPUs, and launcher.instance_type {reason}. Use cpu or auto, or another type."
            )
        if backend in {"nccl", "smddp"}:
            raise UsageError(f"process_group_backend: {backend} needs GPUs, and {reason}. Use gloo or auto.")
        if settings[variable_name("mixed_precision")] == "fp16":
            raise UsageError(f"mixed_precision: fp16 needs GPUs, and {reason}. Use bf16 or no.")
    if section.image_uri:
        return str(section.image_uri)
    try:
        # Of the installed torch, which is not imported.
        pytorch_version = section.pytorch_version or version("torch")
    except PackageNotFoundError:
        raise UsageError(
            "Cannot choose an image: torch is not installed here. Set launcher.pytorch_version to one of "
            f"{', '.join(images.list_versions())}, or set launcher.image_uri."
        ) from None
    return images.find_image(pytorch_version, region, instance_type)
