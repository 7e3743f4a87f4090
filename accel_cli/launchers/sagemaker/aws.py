"""An account of AWS as this machine's configuration gives it: clients that say when they try again, and errors in words."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from accel_cli import console
from accel_cli.errors import UsageError
from accel_cli.launchers.sagemaker import refusals

__all__ = ["Account", "code", "is_no_job"]

_ATTEMPTS = 8
_CONNECT_S, _READ_S = 10, 60
_BURST_S = 30.0
"""How long a service that has trouble is not spoken of again."""
_SESSION = {
    # boto3 knows the second only; the first is what Lambda, CodeBuild and the newer SDKs set.
    "region": ("region", ["AWS_REGION", "AWS_DEFAULT_REGION"], None, None),
    "retry_mode": ("retry_mode", "AWS_RETRY_MODE", "standard", None),
    "max_attempts": ("max_attempts", "AWS_MAX_ATTEMPTS", _ATTEMPTS, int),
}
"""What botocore reads where: name in its configuration, variables, default, type."""


class Account:
    """Who a command is for AWS, and where.

    Args:
        region: The profile's; None is that of the AWS configuration.
        aws_profile: A profile of the AWS configuration; None is the one that AWS tools take.
        attempts: How often it is tried to reach a service; None is as often as the AWS configuration says.
    """

    def __init__(
        self, region: str | None = None, aws_profile: str | None = None, *, attempts: int | None = None
    ) -> None:
        self.aws_profile = aws_profile
        self._retries = {"total_max_attempts": attempts, "mode": "standard"} if attempts else None
        self._region = region
        self._clients: dict[str, Any] = {}
        self._said: dict[str, float] = {}

    @property
    def region(self) -> str:
        """The profile's region, else that of the environment, else that of the AWS configuration.

        Raises:
            UsageError: There is none, or no such AWS profile.
        """
        found = self._region or self.session.region_name
        if not found:
            raise UsageError(refusals.NO_REGION)
        return str(found)

    @cached_property
    def session(self) -> Any:
        """boto3's session.

        Raises:
            UsageError: boto3 is not installed, or there is no such AWS profile.
        """
        boto3, botocore = _imported()
        with self.speaking("read the AWS configuration"), _readable():
            below = botocore.session.Session(session_vars=_SESSION)
            return boto3.session.Session(
                botocore_session=below, region_name=self._region, profile_name=self.aws_profile
            )

    def client(self, name: str) -> Any:
        """boto3's client of a service, made once; it tries again where that may help, and says so.

        Raises:
            UsageError: There is no region, or there are no credentials to be had.
        """
        if name not in self._clients:
            session, region = self.session, self.region
            from botocore.config import Config  # noqa: PLC0415 - boto3 may be missing, which `session` says

            with self.speaking(f"reach {name}"), _readable():
                made = session.client(
                    name,
                    region_name=region,
                    config=Config(connect_timeout=_CONNECT_S, read_timeout=_READ_S, retries=self._retries),
                )
            made.meta.events.register("needs-retry", self._say_trouble)
            self._clients[name] = made
        return self._clients[name]

    @contextmanager
    def speaking(self, doing: str) -> Iterator[None]:
        """Put what botocore raises into words.

        Args:
            doing: What is tried, as it follows on `cannot`: `start the job`.

        Raises:
            UsageError: AWS refuses, and a person can do something about it.
            UnreachableError: AWS does not answer now.
            AccelError: Anything else that AWS says.
        """
        try:
            yield
        except Exception as error:
            if not type(error).__module__.startswith(("botocore.", "boto3.")):
                raise
            raise refusals.translated(error, self._around(doing)) from error

    def _around(self, doing: str) -> refusals.Around:
        import botocore.session  # noqa: PLC0415 - it is here, since it has raised something

        # Not `self.session`, which may be what cannot be made.
        bare = botocore.session.Session(session_vars=_SESSION)
        profile = self.aws_profile or bare.get_config_variable("profile")
        bare.set_config_variable("profile", profile)
        return refusals.Around(
            doing=doing,
            region=self._region or _quietly(lambda: bare.get_config_variable("region")) or "",
            aws_profile=profile or "",
            profiles=tuple(_quietly(lambda: bare.available_profiles) or ()),
            regions=tuple(_quietly(lambda: _regions(bare)) or ()),
        )

    def _say_trouble(self, **event: Any) -> None:
        """Before botocore waits and tries again; it sends every answer here, the good ones too."""
        trouble = refusals.trouble(event["response"], event["caught_exception"])
        if not trouble or event["attempts"] > 1:
            return
        now = time.monotonic()
        if now - self._said.get(trouble, -_BURST_S) >= _BURST_S:
            console.note(f"{trouble} ({event['operation'].name}); trying again")
        self._said[trouble] = now


def code(error: BaseException | None) -> str:
    """AWS's own word for what an answer refuses, as `NoSuchEntity`; empty where there was no answer."""
    # An error of the network has a response too, which is None.
    answer: dict[str, Any] = getattr(error, "response", None) or {}
    return str(answer.get("Error", {}).get("Code", ""))


def is_no_job(error: BaseException) -> bool:
    """Whether SageMaker says that it knows no job of a name, for which it has no code of its own."""
    answer: dict[str, Any] = getattr(error, "response", None) or {}
    said = str(answer.get("Error", {}).get("Message", ""))
    missing = "not found" in said or "Could not find" in said
    return code(error).startswith("ResourceNotFound") or (code(error) == "ValidationException" and missing)


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        # A number or an address in a variable or file; botocore has no error of its own for these.
        raise UsageError(f"the AWS configuration cannot be used: {error}") from None


def _imported() -> tuple[Any, Any]:
    try:
        import boto3.session  # noqa: PLC0415 - only who reaches AWS needs it
        import botocore.session  # noqa: PLC0415
    except ImportError as error:
        raise UsageError(
            f'launcher.kind: sagemaker needs boto3, which cannot be loaded ({error}): pip install "accel[sagemaker]"'
        ) from None
    return boto3, botocore


def _regions(session: Any) -> list[str]:
    """Where SageMaker is, in every AWS there is, as far as the installed botocore knows."""
    return [
        region
        for partition in session.get_available_partitions()
        for region in session.get_available_regions("sagemaker", partition)
    ]


def _quietly(ask: Callable[[], Any]) -> Any:
    """An answer that an error's text is nicer with."""
    try:
        return ask()
    except Exception:  # noqa: BLE001 - there is an error to tell of already
        return None
