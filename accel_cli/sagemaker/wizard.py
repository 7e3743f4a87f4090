"""Choices of the wizard for SageMaker: values from the AWS configuration and the account."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from accel_cli.errors import AccelError
from accel_cli.planning.machine import Machine
from accel_cli.profile.sections import Answers, Choice, Offers, Question

if TYPE_CHECKING:
    from accel_cli.sagemaker.aws import Account

__all__ = [
    "advanced_question",
    "complete_instance_types",
    "find_missing_extra",
    "find_type_error",
    "has_aws_image",
    "is_on_demand",
    "is_spot",
    "offer_profiles",
    "offer_regions",
    "offer_roles",
    "offer_versions",
    "suggest_none",
]

_ATTEMPTS = 2
"""Attempts of a call while the user waits, who can also type the answer."""
_EXTRA = "accel-runtime[sagemaker]"
_DEFAULT_REGION = "us-east-1"


def suggest_none(*_: object) -> None:
    """Suggest to leave a key unset."""


def is_on_demand(answers: Answers) -> bool:
    """Return whether the instances are on demand."""
    return not answers.get("spot")


def is_spot(answers: Answers) -> bool:
    """Return whether the instances are spot instances."""
    return bool(answers.get("spot"))


def has_aws_image(answers: Answers) -> bool:
    """Return whether the image is one of AWS."""
    return not answers.get("image_uri")


def advanced_question(text: str, hint: str, **options: Any) -> Question:
    """Return an advanced question; Enter leaves its key unset."""
    return Question(text, suggest=suggest_none, hint=hint, advanced=True, **options)


def find_missing_extra() -> str:
    """Return what has to be installed before AWS can be asked; empty if nothing is missing."""
    return "" if find_spec("boto3") and find_spec("sagemaker") else _EXTRA


def offer_profiles(_: Machine, answers: Answers) -> Offers:  # noqa: ARG001 - they do not depend on answers
    """Offer the profiles of the AWS configuration."""
    try:
        session = _create_account({}).session
    except AccelError as error:
        return _explain_no_offers(error)
    default = Choice(None, f"the default of AWS's tools ({session.profile_name})")
    return Offers([default, *(Choice(name, name) for name in session.available_profiles)])


def offer_regions(_: Machine, answers: Answers) -> Offers:
    """Offer the region of the AWS configuration, then all others that have SageMaker."""
    try:
        session = _create_account(answers).session
        configured = session.region_name
        partition = session.get_partition_for_region(configured) if configured else "aws"
        regions = session.get_available_regions("sagemaker", partition)
    except AccelError as error:
        return _explain_no_offers(error)
    first = [Choice(configured, f"{configured} (from the AWS configuration)")] if configured else []
    default = [_DEFAULT_REGION] if _DEFAULT_REGION in regions else []
    others = [name for name in dict.fromkeys([*default, *sorted(regions)]) if name != configured]
    return Offers([*first, *(Choice(name, name) for name in others)])


def offer_roles(_: Machine, answers: Answers) -> Offers:
    """Offer the roles that SageMaker may assume."""
    from accel_cli.sagemaker.resolve import list_roles  # noqa: PLC0415 - it needs boto3

    try:
        return Offers([Choice(role.arn, role.name) for role in list_roles(_create_account(answers))])
    except AccelError as error:
        return _explain_no_offers(error, "roles")


def offer_versions(machine: Machine, answers: Answers) -> Offers:
    """Offer the torch version of this machine, then every version that has an image of AWS."""
    from accel_cli.sagemaker.images import list_versions  # noqa: PLC0415 - it needs sagemaker-core

    same = Choice(None, f"the version of the machine that launches (here: {machine.torch or 'no torch'})")
    try:
        versions = reversed(list_versions(answers.get("region")))
    except AccelError as error:
        return _explain_no_offers(error, "versions")
    return Offers([same, *(Choice(version, version) for version in versions)])


def complete_instance_types() -> Sequence[str]:
    """Return the instance types that the installed boto3 knows."""
    from accel_cli.sagemaker.images import list_types  # noqa: PLC0415 - it needs boto3

    return [] if find_missing_extra() else list_types()


def find_type_error(instance_type: Any) -> str | None:
    """Return what is wrong with an instance type, or None if it is known, or cannot be checked without boto3."""
    from accel_cli.sagemaker.images import check_type  # noqa: PLC0415 - it needs boto3

    if find_missing_extra():
        return None
    try:
        check_type(str(instance_type))
    except AccelError as error:
        return str(error)
    return None


def _create_account(answers: Answers) -> Account:
    from accel_cli.sagemaker.aws import Account  # noqa: PLC0415 - it needs boto3

    return Account(answers.get("region"), answers.get("aws_profile"), max_attempts=_ATTEMPTS)


def _explain_no_offers(error: AccelError, what: str = "choices") -> Offers:
    if find_missing_extra():
        # The wizard shows the same note once, however many questions have it.
        return Offers(
            note=f'boto3 is not installed, so nothing can be listed. Type the answers, or run pip install "{_EXTRA}".'
        )
    return Offers(note=f"The {what} cannot be listed; type the answer. {error}")
