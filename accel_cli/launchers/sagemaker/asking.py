"""How the wizard asks about SageMaker, and what it offers: what the AWS configuration and the account itself say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from accel_cli import console
from accel_cli.errors import AccelError
from accel_cli.planning.machine import Machine
from accel_cli.profile.fields import Agree, Answers, Choice, Offers, Question

if TYPE_CHECKING:
    from accel_cli.launchers.sagemaker.aws import Account

__all__ = [
    "further",
    "in_vpc",
    "instances",
    "missing",
    "misspelt",
    "nothing",
    "on_demand",
    "on_spot",
    "profiles",
    "regions",
    "roles",
    "versions",
    "without_image",
]

_ROLE = "accel-training"
_ATTEMPTS = 2
"""A person waits, and can type what nobody answers."""
_UNKNOWN = "the installed boto3 knows no such type; a newer one may: pip install -U boto3"
_USUAL = "us-east-1"
"""The region that comes first where nothing says another one."""


def nothing(*_: object) -> None:
    """Suggest to leave a key unset."""


def on_demand(answers: Answers) -> bool:
    """Whether the instances are not spot ones."""
    return not answers.get("spot")


def on_spot(answers: Answers) -> bool:
    """Whether the instances are spot ones."""
    return bool(answers.get("spot"))


def in_vpc(answers: Answers) -> bool:
    """Whether a subnet was named."""
    return bool(answers.get("subnets"))


def without_image(answers: Answers) -> bool:
    """Whether the image is AWS's."""
    return not answers.get("image_uri")


def further(text: str, hint: str, **how: Any) -> Question:
    """A question for those who want to be asked more; Enter leaves its key unset."""
    return Question(text, suggest=nothing, hint=hint, further=True, **how)


def missing() -> str:
    """What has to be installed before AWS can be asked anything; empty if nothing has."""
    return "" if find_spec("boto3") else "accel[sagemaker]"


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
    account = _account(answers)
    try:
        with account.speaking("list the roles of the account"):
            there = of_iam.trusted(account.client("iam"))
    except AccelError as error:
        return _none(error, "roles")
    return Offers([*(Choice(role.arn, role.name) for role in there), new])


def instances() -> Sequence[str]:
    """The instance types there are, as far as the installed boto3 knows."""
    from accel_cli.launchers.sagemaker import instances as types  # noqa: PLC0415 - it needs boto3

    return [] if missing() else types.known()


def misspelt(instance_type: Any) -> str | None:
    """What is wrong with an instance type, on one line; None where it is known, and where nobody knows."""
    from accel_cli.launchers.sagemaker import instances as types  # noqa: PLC0415 - it needs boto3

    there = instances()
    if not there:
        return None
    if instance_type not in there:
        meant = " or ".join(types.nearby(str(instance_type), there)[:2])
        return f"there is no {instance_type}; did you mean {meant}?" if meant else _UNKNOWN
    try:
        types.processor(instance_type)
    except AccelError as error:
        return str(error).removeprefix("launcher.instance_type: ")
    return None


def versions(machine: Machine, answers: Answers) -> Offers:
    """The torch of this machine, then every one of which AWS has an image."""
    from accel_cli.launchers.sagemaker import images  # noqa: PLC0415 - it is a table that few need

    here = Choice(None, f"as on the machine of the launch; here {machine.torch or 'torch is not there'}")
    known = reversed(images.known_versions(answers.get("region")))
    return Offers([here, *(Choice(version, version) for version in known)])


def _create(answers: Answers, agree: Agree) -> str | None:
    """A new role, after its rights were shown; None where the person does not want it."""
    from accel_cli.launchers.sagemaker import roles as of_iam  # noqa: PLC0415 - it needs boto3

    account = _account(answers)
    rights = _rights(account, answers)
    policy = of_iam.policy(**rights)
    question = f"Make the role {_ROLE}, that SageMaker may assume, with these rights?"
    if not agree(_shown(policy), question):
        return None
    with account.speaking(f"make the role {_ROLE}"):
        made = of_iam.create(account.client("iam"), _ROLE, **rights)
    console.note(f"the role {made.name} is made; it stays, also if no profile is written")
    return made.arn


def _rights(account: Account, answers: Answers) -> dict[str, Any]:
    """What `policy` and `create` of roles are told."""
    from accel_cli.launchers.sagemaker import buckets  # noqa: PLC0415 - it needs boto3

    bucket = answers.get("bucket")
    if not bucket:
        with account.speaking("ask which account this is"):
            number = account.client("sts").get_caller_identity()["Account"]
        bucket = buckets.default(account.region, number)
    inputs = [
        said["uri"] if isinstance(said, Mapping) else said for said in (answers.get("inputs") or {}).values()
    ]
    return {
        "bucket": bucket,
        "partition": _partition(account.session, account.region),
        "reads": sorted({uri.removeprefix("s3://").partition("/")[0] for uri in inputs} - {bucket}),
        "secrets": sorted((answers.get("secrets") or {}).values()),
        "vpc": bool(answers.get("subnets")),
    }


def _shown(policy: Mapping[str, Any]) -> str:
    """A policy as JSON, with a line for each statement."""
    statements = ",\n".join(f"  {json.dumps(statement)}" for statement in policy["Statement"])
    return f'{{"Version": {json.dumps(policy["Version"])}, "Statement": [\n{statements}\n]}}'


def _account(answers: Answers) -> Account:
    from accel_cli.launchers.sagemaker.aws import Account  # noqa: PLC0415 - it needs boto3

    return Account(answers.get("region"), answers.get("aws_profile"), attempts=_ATTEMPTS)


def _partition(session: Any, region: str | None) -> str:
    """The AWS that a region is in: China and the US government have their own."""
    return str(session.get_partition_for_region(region)) if region else "aws"


def _none(error: AccelError, what: str = "choices") -> Offers:
    if missing():
        # The same for every question, and so said once.
        return Offers(
            note='boto3 is not installed, so AWS is not asked, and you type: pip install "accel[sagemaker]"'
        )
    return Offers(note=f"no {what} can be offered here, so you type: {error}")
