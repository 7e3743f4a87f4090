"""An AWS account: its session, its clients, and the translation of their errors."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from accel_cli import console
from accel_cli.errors import AccelError, UsageError
from accel_cli.launchers.job_service import UnreachableError
from accel_runtime.environment.installation import format_install
from accel_runtime.environment.settings import find_nearest

__all__ = [
    "NAME_IN_USE",
    "NAME_IN_USE_TEXT",
    "Account",
    "find_job",
    "format_console_url",
    "format_hint",
    "get_error_code",
    "import_sdk",
    "is_unknown_job",
    "list_regions",
    "load_service_model",
]

_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S = 10, 60
_SESSION_VARIABLES = {
    # boto3 reads the second variable only; Lambda, CodeBuild and newer SDKs set the first.
    "region": ("region", ["AWS_REGION", "AWS_DEFAULT_REGION"], None, None),
    "retry_mode": ("retry_mode", "AWS_RETRY_MODE", "standard", None),
    "max_attempts": ("max_attempts", "AWS_MAX_ATTEMPTS", 8, int),
}
"""Where botocore reads its settings: name in the configuration, variables, default, type."""
_NO_REGION = (
    "No AWS region is set. Set launcher.region (for example --set launcher.region=us-east-1) or AWS_REGION, or run "
    "aws configure."
)
_CONSOLES = {"cn-": "console.amazonaws.cn", "us-gov-": "console.amazonaws-us-gov.com"}
"""Consoles of the regions that do not use `console.aws.amazon.com`."""
_QUIET_S = 30.0
"""Seconds in which another retry is not reported."""
_MAX_TEXT = 400
"""Characters of AWS's own text in a message; some texts list every instance type."""
_SERVER_ERROR, _TOO_MANY_REQUESTS = 500, 429
_THROTTLED = frozenset({
    "ProvisionedThroughputExceededException", "RequestLimitExceeded", "RequestThrottled", "SlowDown", "ThrottledException",
    "Throttling", "ThrottlingException", "TooManyRequestsException",
})  # fmt: skip
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"})
_UNKNOWN_KEY = frozenset(
    {"InvalidClientTokenId", "UnrecognizedClientException", "InvalidAccessKeyId", "AuthFailure"}
)
_WRONG_SECRET = frozenset({"SignatureDoesNotMatch", "InvalidSignatureException", "IncompleteSignature"})
_DENIED = frozenset({"403", "AccessDenied", "AccessDeniedException", "Forbidden", "UnauthorizedOperation"})
_QUOTA = frozenset({"ResourceLimitExceeded", "ServiceQuotaExceededException"})
NAME_IN_USE = frozenset({"ResourceInUse", "ResourceInUseException"})
"""Codes of errors for a job name that exists."""
NAME_IN_USE_TEXT = (
    "a training job of this name exists already, and names cannot be reused. Choose another --job-name, or leave it out to name "
    "the job for the time."
)
_LOGIN_ERRORS = ("SSOError", "LoginError", "TokenRetrievalError", "NoAuthTokenError")
"""Names of botocore's errors for a login that is missing or has expired."""


class Account:
    """An AWS account in one region.

    Args:
        region: The region; None takes it from the AWS configuration.
        aws_profile: A profile of the AWS configuration; None takes the one AWS's own tools take.
        max_attempts: How often a call is tried; None takes it from the AWS configuration.
    """

    def __init__(
        self, region: str | None = None, aws_profile: str | None = None, *, max_attempts: int | None = None
    ) -> None:
        self.aws_profile = aws_profile
        self._retries = {"total_max_attempts": max_attempts, "mode": "standard"} if max_attempts else None
        self._region = region
        self._clients: dict[str, Any] = {}
        self._last_note = -_QUIET_S

    @property
    def region(self) -> str:
        """The region of the profile, else of the environment, else of the AWS configuration."""
        region = self._region or self.session.region_name
        if not region:
            raise UsageError(_NO_REGION)
        return str(region)

    @cached_property
    def session(self) -> Any:
        """The boto3 session."""
        boto3, botocore = _import("boto3"), _import("botocore.session")
        config = _import("botocore.config").config.Config(
            connect_timeout=_CONNECT_TIMEOUT_S, read_timeout=_READ_TIMEOUT_S, retries=self._retries
        )
        with self.translate_errors("read the AWS configuration"):
            session = botocore.session.Session(session_vars=_SESSION_VARIABLES)
            session.set_default_client_config(config)
            session.register("request-created", self._note_retry)
            return boto3.Session(
                botocore_session=session, region_name=self._region, profile_name=self.aws_profile
            )

    def client(self, name: str) -> Any:
        """Return boto3's client of a service; it retries where that may help, and reports it."""
        if name not in self._clients:
            session, region = self.session, self.region
            with self.translate_errors(f"reach {name}"):
                try:
                    self._clients[name] = session.client(name, region_name=region)
                except ValueError as error:
                    # A number or an address in a variable or file; botocore has no error of its own for these.
                    raise UsageError(f"Invalid AWS configuration: {error}.") from None
        return self._clients[name]

    def _note_retry(self, request: Any, operation_name: str, **_: Any) -> None:
        now = time.monotonic()
        if request.context.get("retries", {}).get("attempt", 1) > 1 and now - self._last_note >= _QUIET_S:
            console.note(f"AWS is busy or does not answer ({operation_name}); trying again")
            self._last_note = now

    @contextmanager
    def translate_errors(self, action: str) -> Iterator[None]:
        """Turn errors of boto3 and botocore into `UsageError`, or `UnreachableError` if AWS does not answer.

        `action` follows "Cannot" in the message: `start the job`.
        """
        try:
            yield
        except Exception as error:
            if not type(error).__module__.startswith(("botocore.", "boto3.")):
                raise
            raise self._translate(error, action) from error

    def _translate(self, error: Exception, action: str) -> AccelError:
        exceptions = _import("botocore.exceptions").exceptions
        # boto3's transfers wrap an error of botocore, and show its text only.
        inner = error.__cause__ or error.__context__
        if type(error).__module__.startswith("boto3.") and isinstance(inner, Exception):
            return self._translate(inner, action)
        if isinstance(error, exceptions.ClientError):
            return self._translate_response(error, action)
        network = (exceptions.ConnectionError, exceptions.HTTPClientError, exceptions.IncompleteReadError)
        if isinstance(error, network):
            # A region that does not exist has no address either.
            regions = list_regions()
            if self._region and self._region not in regions:
                hint = format_hint(self._region, regions)
                return UsageError(f"SageMaker is not known to be in region {self._region!r}.{hint}")
            return UnreachableError(f"Cannot {action}: AWS does not answer: {_shorten(str(error))}.")
        message, option = f"Cannot {action}: {_shorten(str(error))}.", self._format_option()
        if isinstance(error, exceptions.NoRegionError):
            message = _NO_REGION
        elif isinstance(error, exceptions.NoCredentialsError):
            message = (
                f"No AWS credentials found. Run aws configure{option} or aws configure sso{option}, or set "
                "launcher.aws_profile to a profile that has some."
            )
        elif isinstance(error, exceptions.ProfileNotFound):
            session = _import("botocore.session").session.Session(session_vars=_SESSION_VARIABLES)
            profile = self.aws_profile or session.get_config_variable("profile")
            known = list(session.available_profiles)
            message = (
                f"The AWS configuration has no profile {profile!r}: it has {', '.join(known) or 'none'}."
                f"{format_hint(profile, known)} Set launcher.aws_profile or AWS_PROFILE, or run aws configure."
            )
        elif isinstance(error, tuple(getattr(exceptions, name) for name in _LOGIN_ERRORS)):
            message = self._explain_expired()
        return UsageError(message)

    def _translate_response(self, error: Any, action: str) -> AccelError:
        code, operation = get_error_code(error), error.operation_name
        text = _shorten(str(error.response["Error"].get("Message") or code))
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code in _EXPIRED:
            return UsageError(self._explain_expired())
        if cause := self._explain_code(code):
            return UsageError(f"Cannot {action}: {cause}")
        if code in _DENIED:
            return UsageError(
                f"Cannot {action}: AWS denied {operation}: {text}. Ask an administrator for the permission."
            )
        if code in _QUOTA:
            link = format_console_url(self.region, "servicequotas/home/services/sagemaker/quotas")
            return UsageError(
                f"Cannot {action}: {text}. Request a higher quota at {link}, or choose another launcher.instance_type or "
                "region."
            )
        if code in _THROTTLED or status == _TOO_MANY_REQUESTS or status >= _SERVER_ERROR:
            return UnreachableError(
                f"Cannot {action}: AWS is too busy or has a problem ({operation}: {status} {code}), after several "
                "attempts. Try again later; https://health.aws.amazon.com reports larger problems."
            )
        return UsageError(f"Cannot {action}: AWS refused {operation} with {code}: {text}.")

    def _explain_expired(self) -> str:
        return f"The AWS credentials have expired. Run aws sso login{self._format_option()}, or renew them the way you got them."

    def _explain_code(self, code: str) -> str:
        """Return why AWS rejects a name, or the keys themselves, and what to do; empty for other codes."""
        if code in NAME_IN_USE:
            return NAME_IN_USE_TEXT
        if code not in _UNKNOWN_KEY | _WRONG_SECRET:
            return ""
        option, region = self._format_option(), self.region
        source = f"profile {self.aws_profile}" if self.aws_profile else "the default of AWS's tools"
        if code in _WRONG_SECRET:
            return (
                f"the secret key of {source} does not belong to its access key, or the clock of this machine is wrong ({code}). Run "
                f"aws configure{option}, and compare the clock."
            )
        return (
            f"AWS does not know the access key of {source} ({code}): it was deleted or deactivated, is temporary and lacks its "
            f"AWS_SESSION_TOKEN, or belongs to another partition than region {region}. Run aws configure{option} or aws sso "
            f"login{option}, unset AWS_ACCESS_KEY_ID if it is outdated, and check with aws sts get-caller-identity{option}."
        )

    def _format_option(self) -> str:
        return f" --profile {self.aws_profile}" if self.aws_profile else ""


def find_job(account: Account, name: str) -> Mapping[str, Any] | None:
    """Return SageMaker's description of a training job, or None if no job has this name."""
    sagemaker = account.client("sagemaker")
    with account.translate_errors(f"look up job {name}"):
        try:
            job: Mapping[str, Any] = sagemaker.describe_training_job(TrainingJobName=name)
        except sagemaker.exceptions.ClientError as error:
            if not is_unknown_job(error):
                raise
            return None
    return job


def is_unknown_job(error: Any) -> bool:
    """Return True if SageMaker's response is that no training job has the name, for which it has no code."""
    text = str(error.response["Error"].get("Message"))
    return get_error_code(error) == "ValidationException" and bool(re.search("not f(ou|i)nd", text))


def get_error_code(error: BaseException | None) -> str:
    """Return the code of AWS's response, such as `NoSuchEntity`; empty if there was no response."""
    # An error of the network has the attribute too, and it is None.
    response: dict[str, Any] = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def list_regions() -> list[str]:
    """Return every region that has SageMaker, as far as the installed botocore knows."""
    session = _import("botocore.session").session.Session()
    return [
        region
        for partition in session.get_available_partitions()
        for region in session.get_available_regions("sagemaker", partition)
    ]


def format_hint(name: str, known: list[str]) -> str:
    """Return a question that names the nearest known name, with a space before it; empty if none is near."""
    nearest = find_nearest(name, known)
    return f" Did you mean {nearest}?" if nearest else ""


def format_console_url(region: str, path: str) -> str:
    """Return the address of a page of AWS's console."""
    host = next((host for start, host in _CONSOLES.items() if region.startswith(start)), None)
    return f"https://{host or 'console.aws.amazon.com'}/{path}?region={region}"


def import_sdk(module: str) -> Any:
    """Import a module of `sagemaker.core`, which takes more than a second."""
    _refuse_old_sdk()
    try:
        return importlib.import_module(f"sagemaker.core.{module}")
    except ImportError as error:
        raise UsageError(
            f"launcher.kind: sagemaker needs sagemaker-core, which cannot be imported ({error}). Run: {_format_install()}"
        ) from None


def _refuse_old_sdk() -> None:
    """Raise if version 2 of the SageMaker SDK is installed, which sagemaker-core 2 breaks; pip prints only a conflict.

    Raises:
        UsageError: It is installed.
    """
    try:
        installed = version("sagemaker")
    except PackageNotFoundError:
        return
    if installed.startswith("2."):
        raise UsageError(
            f"launcher.kind: sagemaker cannot run beside the SageMaker SDK {installed}: it needs sagemaker-core 2, with which import "
            "sagemaker.estimator fails, since the SDK 2 needs the module sagemaker_core of sagemaker-core 1. Install accel in an "
            "environment without the SDK, or update the SDK to version 3."
        )


@lru_cache(maxsize=1)
def load_service_model() -> Any:
    """Return botocore's model of SageMaker: names, types, limits and patterns of requests, without a call to AWS."""
    loaders, model = _import("botocore.loaders"), _import("botocore.model")
    # A session would read the user's configuration, and fail if that names a profile that does not exist.
    return model.model.ServiceModel(
        loaders.loaders.Loader().load_service_model("sagemaker", "service-2"), "sagemaker"
    )


def _import(module: str) -> Any:
    """Import a module of boto3 or botocore, and return its top package."""
    try:
        importlib.import_module(module)
        return importlib.import_module(module.partition(".")[0])
    except ImportError as error:
        raise UsageError(
            f"launcher.kind: sagemaker needs boto3, which cannot be imported ({error}). Run: {_format_install()}"
        ) from None


def _format_install() -> str:
    return format_install("boto3", "sagemaker-core", extra="sagemaker")


def _shorten(text: str) -> str:
    """Return a text as one line of limited length."""
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= _MAX_TEXT else f"{line[:_MAX_TEXT]}..."
