"""What the wizard offers for SageMaker: what this machine's AWS configuration and the account itself say."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from accel_cli.errors import AccelError
from accel_cli.fields import Agree, Answers, Choice, Offers
from accel_cli.machine import Machine

if TYPE_CHECKING:
    from accel_cli.launchers.sagemaker.aws import Account

__all__ = ["instances", "missing", "misspelt", "profiles", "regions", "roles"]

_USUAL = "us-east-1"
"""The region that comes first where nothing says another one."""


def missing() -> str:
    """What has to be installed before AWS can be asked anything; empty if nothing has."""
    return "" if find_spec("boto3") else 'boto3: pip install "accel[sagemaker]"'


def profiles(_: Machine, answers: Answers) -> Offers:  # noqa: ARG001 - what is offered does not hang on them
    """The profiles of the AWS configuration."""
    try:
        session = _account({}).session
    except AccelError as error:
        return _none(error)
    named = [Choice(name, name) for name in session.available_profiles]
    return Offers([Choice(None, f"the one AWS tools take here ({session.profile_name})"), *named])


def regions(_: Machine, answers: Answers) -> Offers:
    """The region of the AWS configuration, then all others that have SageMaker."""
    try:
        session = _account(answers).session
        own = session.region_name
        everywhere = session.get_available_regions("sagemaker", _partition(session, own))
    except AccelError as error:
        return _none(error)
    first = [Choice(own, f"{own}: that of the AWS configuration")] if own else []
    usual = [_USUAL] if _USUAL in everywhere else []
    rest = [name for name in dict.fromkeys([*usual, *sorted(everywhere)]) if name != own]
    return Offers([*first, *(Choice(name, name) for name in rest)])


def roles(_: Machine, answers: Answers) -> Offers:
    """The roles that SageMaker may assume, and one that is made for it."""
    from accel_cli.launchers.sagemaker import roles as of_iam  # noqa: PLC0415 - it needs boto3

    new = Choice(None, "a new one, that may do only what a job needs", make=_create)
    try:
        there = of_iam.trusted(_account(answers))
    except AccelError as error:
        return _none(error, "roles")
    return Offers([*(Choice(role.arn, role.name) for role in there), new])


def instances() -> Sequence[str]:
    """The instance types there are, as far as the installed boto3 knows."""
    from accel_cli.launchers.sagemaker import instances as types  # noqa: PLC0415 - it needs boto3

    return [] if missing() else types.known()


def misspelt(instance_type: Any) -> str | None:
    """What is wrong with an instance type; None where it is known, and where nobody knows."""
    from accel_cli.launchers.sagemaker import instances as types  # noqa: PLC0415 - as above

    if missing():
        return None
    try:
        types.check_known(instance_type)
    except AccelError as error:
        return str(error).removeprefix("launcher.instance_type: ")
    return None


def _create(answers: Answers, agree: Agree) -> str | None:
    """A new role, after its rights were shown; None where the person does not want it."""
    from accel_cli.launchers.sagemaker import roles as of_iam  # noqa: PLC0415 - it needs boto3

    account = _account(answers)
    raise NotImplementedError(of_iam, account, agree)


def _account(answers: Answers) -> Account:
    from accel_cli.launchers.sagemaker.aws import Account  # noqa: PLC0415 - it needs boto3

    return Account(answers.get("region"), answers.get("aws_profile"))


def _partition(session: Any, region: str | None) -> str:
    """The AWS that a region is in: China and the US government have their own."""
    return str(session.get_partition_for_region(region)) if region else "aws"


def _none(error: AccelError, what: str = "choices") -> Offers:
    return Offers(note=f"no {what} can be offered here, so you type: {error}")
