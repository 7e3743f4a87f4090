"""What AWS refuses, in words: the one table from botocore's errors to what a person reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from accel_cli.errors import AccelError, UsageError
from accel_cli.jobs.base import UnreachableError
from accel_runtime.env import find_nearest

__all__ = ["NO_REGION", "Around", "translated", "trouble"]

NO_REGION = (
    "no AWS region is known: set launcher.region, as --set launcher.region=us-east-1, or AWS_REGION, "
    "or run aws configure"
)
_QUOTAS = "https://console.aws.amazon.com/servicequotas/home/services/sagemaker/quotas"
_LONGEST = 400
"""Of what AWS says; some of its texts list every instance type there is."""
_SERVER = 500
_TOO_MANY = 429


@dataclass(frozen=True)
class Around:
    """What an error's text is made of, beside the error."""

    doing: str
    """What was tried, as it follows on `cannot`."""
    region: str = ""
    aws_profile: str = ""
    profiles: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()

    @property
    def option(self) -> str:
        """How AWS's own commands are told which profile is meant."""
        return f" --profile {self.aws_profile}" if self.aws_profile else ""


@dataclass(frozen=True)
class _Answer:
    """A refusal of a service."""

    code: str
    text: str
    operation: str
    status: int


_Words = Callable[[Any, Around], AccelError]
"""From what was raised, or answered, to what is said."""


def translated(error: Exception, around: Around) -> AccelError:
    """What to raise in place of an error of boto3 or botocore."""
    answer = getattr(error, "response", None)
    if isinstance(answer, Mapping) and "Error" in answer:
        return _answered(_Answer(*_parts(error, answer)), around)
    # boto3's transfers wrap an error of botocore, and show its text only.
    within = error.__cause__ or error.__context__
    if type(error).__module__.startswith("boto3.") and isinstance(within, Exception):
        return translated(within, around)
    known = (_RAISED[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in _RAISED)
    return next(known, _unknown)(error, around)


def trouble(response: Any, raised: Exception | None) -> str:
    """Why an answer, or that none came, is worth another try; empty where it is not."""
    if raised is not None:
        names = {kind.__name__ for kind in type(raised).__mro__}
        return "AWS does not answer" if names & _NETWORK else ""
    status, said = response[0].status_code, response[1].get("Error", {})
    if _throttles(str(said.get("Code", "")), status):
        return "AWS asks to slow down"
    return f"AWS answers with an error of its own, {status}," if status >= _SERVER else ""


def _parts(error: Exception, answer: Mapping[str, Any]) -> tuple[str, str, str, int]:
    said = answer["Error"]
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    text = str(said.get("Message", "")).strip()
    return str(said.get("Code", "")), text, str(getattr(error, "operation_name", "")), status


def _answered(answer: _Answer, around: Around) -> AccelError:
    if answer.code in _CODES:
        return _CODES[answer.code](answer, around)
    if _throttles(answer.code, answer.status):
        return UnreachableError(f"cannot {around.doing}: AWS still asks to slow down ({answer.operation})")
    if answer.status >= _SERVER:
        return UnreachableError(
            f"cannot {around.doing}: AWS answers {answer.operation} with an error of its own, {answer.status} "
            f"{answer.code}, also after some tries; https://health.aws.amazon.com says whether it has more of them"
        )
    return AccelError(
        f"cannot {around.doing}: AWS answers {answer.operation} with {answer.code}: {_cut(answer.text)}"
    )


def _throttles(code: str, status: int) -> bool:
    return code in _SLOWLY or status == _TOO_MANY


def _unknown(error: Exception, around: Around) -> AccelError:
    return AccelError(f"cannot {around.doing}: {_cut(str(error))}")


def _no_credentials(_: Exception, around: Around) -> AccelError:
    return UsageError(
        f"there are no AWS credentials{_of(around)}: run aws configure{around.option}, or aws configure sso"
        f"{around.option}, or set launcher.aws_profile to a profile that has some"
    )


def _no_profile(error: Any, around: Around) -> AccelError:
    wanted = str(error.kwargs.get("profile", around.aws_profile))
    meant = find_nearest(wanted, list(around.profiles))
    there = ", ".join(around.profiles) or "none"
    hint = f"did you mean {meant}? " if meant else ""
    return UsageError(
        f"the AWS configuration has no profile {wanted}; {hint}there is: {there}. launcher.aws_profile or AWS_PROFILE "
        "names it, and aws configure writes one"
    )


def _expired(_: Any, around: Around) -> AccelError:
    return UsageError(
        f"the AWS credentials{_of(around)} have expired: run aws sso login{around.option}, or get new ones the way "
        "you got these"
    )


def _login(_: Any, around: Around) -> AccelError:
    return UsageError(f"the AWS login{_of(around)} has expired: run aws login{around.option}")


def _credentials(error: Exception, around: Around) -> AccelError:
    return UsageError(f"the AWS credentials{_of(around)} cannot be used: {_cut(str(error))}")


def _unfit(answer: _Answer, around: Around) -> AccelError:
    if "expired" in answer.text.lower() or "not yet current" in answer.text or "Skew" in answer.code:
        return UsageError(
            f"AWS refuses the time of this machine; set its clock. AWS says: {_cut(answer.text)}"
        )
    # A region that has to be enabled first knows nobody until then.
    region = f", or the account has not enabled region {around.region}" if around.region else ""
    return UsageError(
        f"AWS does not know the credentials{_of(around)} ({answer.code}): the access key is wrong or deleted{region}; "
        f"run aws configure{around.option}"
    )


def _configuration(error: Exception, _: Around) -> AccelError:
    return UsageError(f"the AWS configuration cannot be read: {_cut(str(error))}")


def _unreachable(error: Exception, around: Around) -> AccelError:
    # A region that there is not has no address either.
    if around.region and around.regions and around.region not in around.regions:
        meant = find_nearest(around.region, list(around.regions))
        hint = f"; did you mean {meant}?" if meant else ""
        return UsageError(
            f"region {around.region} is none that SageMaker is known to be in{hint} ({_cut(str(error))})"
        )
    return UnreachableError(f"cannot {around.doing}: AWS does not answer: {_cut(str(error))}")


def _denied(answer: _Answer, around: Around) -> AccelError:
    who = re.search(r"User: (\S+)", answer.text)
    what = re.search(r"not authorized to perform: ([\w-]+:\w+)", answer.text)
    why = "" if who and what else f". AWS says: {_cut(answer.text)}" if answer.text else ""
    you = f"{who[1]}" if who else "who you are for AWS"
    if what and what[1] == "iam:PassRole":
        return UsageError(
            f"cannot {around.doing}: {you} may not hand the role to SageMaker; somebody who may has to allow it "
            "iam:PassRole on that role"
        )
    action = what[1] if what else answer.operation
    return UsageError(
        f"cannot {around.doing}: {you} may not do {action}; somebody who may has to allow it{why}"
    )


def _limit(answer: _Answer, around: Around) -> AccelError:
    absent = re.search(r"resource training-job/(\S+) is not available", answer.text)
    if absent:
        return UsageError(
            f"launcher.instance_type: {absent[1]} is not available in {around.region}; take another type, or set "
            "launcher.region to another region"
        )
    quota = re.search(r"limit '(.+?)' is (\d+)", answer.text)
    said = f"your quota for {quota[1]} is {quota[2]}" if quota else _cut(answer.text)
    return UsageError(
        f"AWS gives no more of these in {around.region}: {said}. Ask for more at {_link(around.region)}, or take "
        "another launcher.instance_type"
    )


def _link(region: str) -> str:
    # China and GovCloud have consoles of their own, at addresses of their own.
    host = {"cn": "console.amazonaws.cn", "us-gov": "console.amazonaws-us-gov.com"}
    found = next((name for start, name in host.items() if region.startswith(f"{start}-")), None)
    start = _QUOTAS.replace("console.aws.amazon.com", found) if found else _QUOTAS
    return f"{start}?region={region}"


def _taken(_: _Answer, __: Around) -> AccelError:
    return UsageError(
        "there is a training job of this name already, and a name is never free again: choose another --job-name, or "
        "none, and the job is named for the time"
    )


def _invalid(answer: _Answer, around: Around) -> AccelError:
    for pattern, hint in _HINTS:
        if re.search(pattern, answer.text):
            return UsageError(f"cannot {around.doing}: {hint}. AWS says: {_cut(answer.text)}")
    return UsageError(f"cannot {around.doing}: AWS refuses what it is asked: {_cut(answer.text)}")


def _no_bucket(_: _Answer, around: Around) -> AccelError:
    return UsageError(f"cannot {around.doing}: there is no such bucket")


def _of(around: Around) -> str:
    return f" of AWS profile {around.aws_profile}" if around.aws_profile else ""


def _cut(text: str) -> str:
    """One line, and not a long one."""
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


_HINTS = (
    (
        r"[Cc]ould not assume role",
        (
            "SageMaker may not assume the role launcher.role; its trust policy has to let sagemaker.amazonaws.com do "
            "sts:AssumeRole, and a new role takes some seconds"
        ),
    ),
    (r"'resourceConfig\.(?:\d\.member\.)?instanceType'", "launcher.instance_type is not accepted"),
    (r"'resourceConfig\.instanceCount'", "launcher.instance_count is not accepted"),
    (r"'resourceConfig\.volumeSizeInGB'", "launcher.volume_size is not accepted"),
    (r"'resourceConfig\.volumeKmsKeyId'", "launcher.volume_kms_key is not accepted"),
    (r"[kK]eepAlivePeriod", "launcher.keep_alive is not accepted"),
    (r"[mM]axWaitTime", "launcher.max_wait is not accepted"),
    (r"[mM]axRuntime", "launcher.max_run is not accepted"),
    (r"'outputDataConfig\.kmsKeyId'", "launcher.output_kms_key is not accepted"),
    (r"'trainingJobName'", "the job's name, launcher.job_name, is not accepted"),
    (r"'roleArn'", "launcher.role is not accepted"),
    (r"'environment'", "a variable of env is not accepted"),
    (r"'tags\.|'tags'|[tT]ag (?:key|value)", "launcher.tags are not accepted"),
    (r"metricDefinitions", "launcher.metrics are not accepted"),
    (r"[sS]ubnet|[sS]ecurity ?[gG]roup", "launcher.subnets and security_group_ids are not accepted"),
    (r"S3 ?(?:URI|URL|objects)|inputDataConfig", "an input of launcher.inputs is not accepted"),
    (r"[tT]raining ?[iI]mage|\becr\b|ECR", "the image, launcher.image_uri, is not accepted"),
)
"""What AWS's text about a request says of the profile; the first that is found."""
_SLOWLY = frozenset({
    "BandwidthLimitExceeded", "PriorRequestNotComplete", "ProvisionedThroughputExceededException",
    "RequestLimitExceeded", "RequestThrottled", "RequestThrottledException", "SlowDown", "ThrottledException",
    "Throttling", "ThrottlingException", "TooManyRequestsException",
})  # fmt: skip
_NETWORK = frozenset({"ConnectionError", "HTTPClientError", "ConnectionClosedError", "IncompleteReadError"})
_RAISED: Mapping[str, _Words] = MappingProxyType({
    "NoRegionError": lambda *_: UsageError(NO_REGION),
    "NoCredentialsError": _no_credentials,
    "ProfileNotFound": _no_profile,
    "SSOError": _expired,
    "TokenRetrievalError": _expired,
    "NoAuthTokenError": _expired,
    "LoginError": _login,
    "PartialCredentialsError": _credentials,
    "CredentialRetrievalError": _credentials,
    "RefreshWithMFAUnsupportedError": _credentials,
    "UnknownCredentialError": _credentials,
    "InfiniteLoopConfigError": _configuration,
    "InvalidConfigError": _configuration,
    "ConfigParseError": _configuration,
    "ConfigNotFound": _configuration,
    "InvalidRegionError": _configuration,
    "InvalidRetryModeError": _configuration,
    "InvalidMaxRetryAttemptsError": _configuration,
    **dict.fromkeys(_NETWORK, _unreachable),
})  # fmt: skip
"""By the name of the class, so that botocore is not imported here."""
_CODES: Mapping[str, _Words] = MappingProxyType({
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"), _expired),
    **dict.fromkeys(
        ("AuthFailure", "IncompleteSignature", "InvalidAccessKeyId", "InvalidClientTokenId", "InvalidSignatureException",
         "InvalidToken", "MissingAuthenticationToken", "RequestTimeTooSkewed", "SignatureDoesNotMatch",
         "UnrecognizedClientException"), _unfit),
    **dict.fromkeys(
        ("403", "AccessDenied", "AccessDeniedException", "AuthorizationError", "Forbidden", "UnauthorizedOperation"),
        _denied),
    **dict.fromkeys(("ResourceLimitExceeded", "ServiceQuotaExceededException"), _limit),
    **dict.fromkeys(("ResourceInUse", "ResourceInUseException"), _taken),
    **dict.fromkeys(("ValidationException", "ValidationError"), _invalid),
    "NoSuchBucket": _no_bucket,
})  # fmt: skip
"""By AWS's own word in its answer."""
