"""The role with which a job runs: those that SageMaker may assume, and the one that a profile names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from accel_cli.errors import AccelError, UsageError
from accel_cli.extensions.sagemaker.aws import Account, format_hint, get_error_code

__all__ = ["list_roles", "resolve_role"]

_SERVICE = "sagemaker.amazonaws.com"
_TRUST = {"Effect": "Allow", "Principal": {"Service": _SERVICE}, "Action": "sts:AssumeRole"}
"""The statement of a trust policy that lets SageMaker assume the role."""
_ASSUME = frozenset({"sts:AssumeRole", "sts:*", "*"})
_MAX_LISTED = 20


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
