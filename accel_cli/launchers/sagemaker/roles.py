"""The role a job runs as: those that SageMaker may assume, the one that is meant, and a new one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import unquote

from accel_cli.errors import UsageError
from accel_cli.launchers.sagemaker.aws import Account, code
from accel_cli.launchers.sagemaker.rights import TRUST, policy
from accel_runtime.env import find_nearest

__all__ = ["TRUST", "Role", "create", "find", "policy", "trusted"]

_SERVICE, _ASSUME = "sagemaker.amazonaws.com", "sts:AssumeRole"
_ARN = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/.+")
_NAME = re.compile(r"[\w+=,.@-]{1,64}", re.ASCII)
_POLICY = "accel-training"
_DENIED = frozenset({"AccessDenied", "AccessDeniedException"})
_MANY = 20
_CREATE = (
    "make one with accel config, or in the IAM console: a role for the service SageMaker, with the rights that "
    "the docs of accel show"
)


@dataclass(frozen=True)
class Role:
    """A role of the account."""

    name: str
    arn: str


def trusted(iam: Any) -> list[Role]:
    """The roles that SageMaker may assume, by name; errors of boto3 are for `Account.speaking`.

    Args:
        iam: boto3's client.
    """
    pages = iam.get_paginator("list_roles").paginate()
    roles = [role for page in pages for role in page["Roles"]]
    found = [Role(role["RoleName"], role["Arn"]) for role in roles if _fits(role)]
    return sorted(found, key=lambda role: role.name.lower())


def find(account: Account, said: str | None) -> str:
    """The ARN of the role a job runs as.

    Args:
        account: Whose role it is.
        said: Its ARN or name; None takes the only one there is.

    Raises:
        UsageError: There is none, or several and none was said, or SageMaker may not assume it.
    """
    if said is None:
        return _only(account)
    if said.startswith("arn:"):
        return _by_arn(account, said)
    return _by_name(account, said)


def create(iam: Any, name: str, bucket: str, **more: Any) -> Role:
    """Make a role with the rights of `policy`; whole, or not at all. Errors of boto3 are for `Account.speaking`.

    Args:
        iam: boto3's client.
        name: The role's; no other may have it.
        bucket: As for `policy`.
        more: As for `policy`.

    Raises:
        UsageError: There is such a role already, or it is no name for one.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is no name for a role: at most 64 letters, digits and +=,.@_- are what IAM takes"
        )
    rights = json.dumps(policy(bucket, **more))
    role = Role(name, _make(iam, name))
    try:
        iam.put_role_policy(RoleName=name, PolicyName=_POLICY, PolicyDocument=rights)
    except BaseException:
        _undo(iam, name)
        raise
    return role


def _make(iam: Any, name: str) -> str:
    try:
        made = iam.create_role(
            RoleName=name,
            AssumeRolePolicyDocument=json.dumps(TRUST),
            Description="Training jobs that accel starts",
        )
    except iam.exceptions.EntityAlreadyExistsException:
        raise UsageError(
            f"there is a role {name} already, and it is left as it is: choose another name, or set launcher.role to it"
        ) from None
    return str(made["Role"]["Arn"])


def _undo(iam: Any, name: str) -> None:
    # The answer may have been lost, and not the question.
    for call, more in ((iam.delete_role_policy, {"PolicyName": _POLICY}), (iam.delete_role, {})):
        with suppress(iam.exceptions.NoSuchEntityException):
            call(RoleName=name, **more)


def _only(account: Account) -> str:
    try:
        with account.speaking("look for the role that SageMaker may assume"):
            found = trusted(account.client("iam"))
    except UsageError as error:
        raise _with_a_way_out(error) from None
    if len(found) == 1:
        return found[0].arn
    if not found:
        raise UsageError(f"launcher.role: the account has no role that SageMaker may assume; {_CREATE}")
    names = ", ".join(role.name for role in found[:_MANY])
    more = f" and {len(found) - _MANY} more" if len(found) > _MANY else ""
    raise UsageError(
        f"launcher.role: SageMaker may assume several roles, so say which: {names}{more}; "
        f"as --set launcher.role={found[0].name}"
    )


def _by_arn(account: Account, arn: str) -> str:
    if not _ARN.fullmatch(arn):
        raise UsageError(
            f"launcher.role: expected an ARN like arn:aws:iam::123456789012:role/name, or a name, got {arn}"
        )
    try:
        role = _asked(account, arn.rpartition("/")[2])
    except UsageError as error:
        if not _denied(error):
            raise
        return arn  # AWS says at submission whether it is one
    if role is None:
        raise UsageError(_missing(account, arn.rpartition("/")[2], arn))
    if role["Arn"] != arn:
        raise UsageError(f"launcher.role: there is no {arn}; the role of that name here is {role['Arn']}")
    return _checked(role)


def _by_name(account: Account, name: str) -> str:
    try:
        role = _asked(account, name.rpartition("/")[2])
    except UsageError as error:
        raise _with_a_way_out(error) from None
    if role is None:
        raise UsageError(_missing(account, name, name))
    return _checked(role)


def _asked(account: Account, name: str) -> Mapping[str, Any] | None:
    """A role as IAM knows it; None where it knows none of that name."""
    if not _NAME.fullmatch(name):
        return None
    found: Mapping[str, Any] | None = None
    with account.speaking(f"look at the role {name}"):
        iam = account.client("iam")
        with suppress(iam.exceptions.NoSuchEntityException):
            found = iam.get_role(RoleName=name)["Role"]
    return found


def _denied(error: UsageError) -> bool:
    """Whether AWS does not let us look."""
    return code(error.__cause__) in _DENIED


def _with_a_way_out(error: UsageError) -> UsageError:
    return UsageError(f"{error}, or set launcher.role to the role's ARN") if _denied(error) else error


def _missing(account: Account, name: str, said: str) -> str:
    try:
        there = [role.name for role in trusted(account.client("iam"))]
    except Exception:  # noqa: BLE001 - the names are a help, and the answer is known without them
        there = []
    meant = find_nearest(name, there)
    hint = f"; did you mean {meant}?" if meant else ""
    known = f" SageMaker may assume {', '.join(there[:_MANY])}" if there else ""
    return f"launcher.role: the account has no role {said}{hint}{known and '.' + known}"


def _checked(role: Mapping[str, Any]) -> str:
    if not _fits(role):
        line = json.dumps(TRUST["Statement"][0])
        raise UsageError(
            f"launcher.role: SageMaker may not assume {role['RoleName']}; add this statement to its trust policy, "
            f"or name another role: {line}"
        )
    return str(role["Arn"])


def _fits(role: Mapping[str, Any]) -> bool:
    # Roles that AWS's services keep for themselves cannot be handed over.
    if str(role.get("Path", "/")).startswith("/aws-service-role/"):
        return False
    met = {str(said["Effect"]) for said in _statements(role.get("AssumeRolePolicyDocument")) if _meets(said)}
    return met == {"Allow"}


def _statements(document: Any) -> Iterator[Mapping[str, Any]]:
    """The statements of a policy, which is data or text, and holds one or several."""
    if isinstance(document, str):
        document = json.loads(unquote(document))
    found = (document or {}).get("Statement", [])
    yield from [found] if isinstance(found, Mapping) else found


def _meets(statement: Mapping[str, Any]) -> bool:
    """Whether a statement speaks of SageMaker that assumes the role."""
    principal = statement.get("Principal", {})
    services = principal.get("Service", []) if isinstance(principal, Mapping) else principal
    patterns = [pattern.lower() for pattern in _list(statement.get("Action", []))]
    assumes = any(fnmatchcase(_ASSUME.lower(), pattern) for pattern in patterns)
    return assumes and bool({_SERVICE, "*"} & set(_list(services)))


def _list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
