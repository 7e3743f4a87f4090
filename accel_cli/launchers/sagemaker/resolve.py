"""Name, role, bucket and image of a job, if the profile leaves them open: looked up in AWS, or assumed offline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from accel_cli.errors import AccelError, UsageError
from accel_cli.launchers.sagemaker import images, s3
from accel_cli.launchers.sagemaker.aws import NAME_IN_USE_TEXT, Account, find_job, format_hint, get_error_code
from accel_cli.launchers.sagemaker.request import SageMakerJobPlan, Submission, name_job
from accel_runtime.env import variable_name

__all__ = [
    "assume_submission",
    "fill_placeholders",
    "list_roles",
    "resolve_role",
    "resolve_submission",
]

_ACCOUNT, _ROLE = "<account>", "<role>"
"""Placeholders for what only AWS knows."""
_PARTITIONS = {"cn-": "aws-cn", "us-gov-": "aws-us-gov"}
_SERVICE = "sagemaker.amazonaws.com"
_TRUST = {"Effect": "Allow", "Principal": {"Service": _SERVICE}, "Action": "sts:AssumeRole"}
"""The statement of a trust policy that lets SageMaker assume the role."""
_ASSUME = frozenset({"sts:AssumeRole", "sts:*", "*"})
_MAX_LISTED = 20


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
    if backend == "smddp" and instance_type not in images.SMDDP_TYPES:
        raise UsageError(
            f"process_group_backend: smddp needs launcher.instance_type {' or '.join(images.SMDDP_TYPES)}, got "
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


def list_roles(account: Account) -> dict[str, str]:
    """Return the ARNs of the roles that SageMaker may assume, by name."""
    iam = account.client("iam")
    with account.translate_errors("list the roles that SageMaker may assume"):
        roles = [role for page in iam.get_paginator("list_roles").paginate() for role in page["Roles"]]
    roles.sort(key=lambda role: role["RoleName"].lower())
    return {role["RoleName"]: role["Arn"] for role in roles if _trusts_sagemaker(role)}


def resolve_role(account: Account, role: str | None) -> str:
    """Return the ARN of a role by its name or ARN; None takes the only role that SageMaker may assume."""
    if role is None:
        return _find_only_role(account)
    is_arn = role.startswith("arn:")
    description: Mapping[str, Any] | None = None
    iam = account.client("iam")
    try:
        with account.translate_errors(f"read role {role}"), suppress(iam.exceptions.NoSuchEntityException):
            description = iam.get_role(RoleName=role.rpartition("/")[2])["Role"]
    except UsageError as error:
        if is_arn and _is_denied(error):
            return role  # AWS checks it when the job is submitted
        raise _add_cure(error) from None
    if description is None or (is_arn and description["Arn"] != role):
        names: list[str] = []
        with suppress(AccelError):  # the error is known without the names
            names = list(list_roles(account))
        known = f" SageMaker may assume {_join_names(names)}." if names else ""
        raise UsageError(
            f"The account has no role {role!r}.{format_hint(role.rpartition('/')[2], names)}{known}"
        )
    if not _trusts_sagemaker(description):
        raise UsageError(
            f"SageMaker may not assume role {description['RoleName']!r}. Add this statement to its trust policy, or choose "
            f"another launcher.role: {json.dumps(_TRUST)}"
        )
    return str(description["Arn"])


def _find_only_role(account: Account) -> str:
    try:
        roles = list_roles(account)
    except UsageError as error:
        raise _add_cure(error) from None
    if not roles:
        raise UsageError(
            "The account has no role that SageMaker may assume. Create one as the page SageMaker of the documentation shows, "
            "or in the IAM console for the service SageMaker."
        )
    if len(roles) > 1:
        names = list(roles)
        raise UsageError(
            f"SageMaker may assume several roles: {_join_names(names)}. Choose one, for example --set launcher.role={names[0]}."
        )
    return next(iter(roles.values()))


def _join_names(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def _is_denied(error: UsageError) -> bool:
    return get_error_code(error.__cause__).startswith("AccessDenied")


def _add_cure(error: UsageError) -> UsageError:
    return UsageError(f"{error} Or set launcher.role to the role's ARN.") if _is_denied(error) else error


def _trusts_sagemaker(role: Mapping[str, Any]) -> bool:
    """Return whether the trust policy of a role lets SageMaker assume it. AWS checks actions and conditions."""
    # Roles that AWS's services keep for themselves cannot be passed on.
    if role["Path"].startswith("/aws-service-role/"):
        return False
    statements = role["AssumeRolePolicyDocument"].get("Statement", [])
    statements = [statements] if isinstance(statements, Mapping) else statements
    matching = [item for item in statements if _names_sagemaker(item.get("Principal"))]
    is_denied = any(
        item["Effect"] == "Deny" and "Condition" not in item and _to_set(item.get("Action")) & _ASSUME
        for item in matching
    )
    return not is_denied and any(item["Effect"] == "Allow" for item in matching)


def _names_sagemaker(principal: Any) -> bool:
    services = principal.get("Service") if isinstance(principal, Mapping) else principal
    return bool(_to_set(services) & {_SERVICE, "*"})


def _to_set(value: str | list[str] | None) -> set[str]:
    return {value} if isinstance(value, str) else set(value or ())
