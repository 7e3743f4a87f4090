"""What single keys of the section may be: checks that say what was expected."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from accel_cli.launchers.sagemaker.patterns import parsed
from accel_cli.profile.fields import Section

__all__ = [
    "Channel", "Uri", "bucket", "channels", "inside", "instance", "name", "patterns", "processes", "s3", "seconds", "variables",
    "version",
]  # fmt: skip

_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")
_INSTANCE = re.compile(r"ml\.[a-z0-9-]+\.[a-z0-9-]+")
_CHANNEL = re.compile(r"[A-Za-z0-9.\-_]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_S3 = re.compile(r"s3://[^/\s]+(/.*)?")
_OURS = "accel"
"""The channel by which the job's own files come."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_TIME = re.compile(r"(\d{1,9})([smhd])")


def name(value: str | None) -> str | None:
    """What SageMaker takes for a name."""
    if value is not None and not _NAME.fullmatch(value):
        raise ValueError("expected at most 63 letters, digits and hyphens, none of them at an end")
    return value


def instance(value: str) -> str:
    """Text of the form of an instance type; which there are is checked where a job is submitted."""
    if not _INSTANCE.fullmatch(value):
        raise ValueError("expected an instance type like ml.g5.xlarge")
    return value


def s3(value: str | None) -> str | None:
    """A place in S3."""
    if value is not None and not _S3.fullmatch(value):
        raise ValueError("expected a place in S3 like s3://bucket/folder")
    return value


def inside(value: str | None) -> str | None:
    """A folder of the source, from where the script starts."""
    if value is not None and (
        Path(value).is_absolute() or ".." in Path(value).parts or not Path(value).parts
    ):
        raise ValueError("expected a folder below the one the script starts in, like runs")
    return value


def bucket(value: str | None) -> str | None:
    """The name of a bucket."""
    if value is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", value):
        raise ValueError("expected the name of a bucket, without s3:// and without a folder")
    return value


def channels(value: dict[str, Any]) -> dict[str, Any]:
    """Inputs with names that can be those of channels."""
    for name in value:
        if not _CHANNEL.fullmatch(name) or name == _OURS:
            raise ValueError(
                f"{name!r} is no name for a channel: letters, digits, . - and _, and not {_OURS}"
            )
    return value


def variables(value: dict[str, str]) -> dict[str, str]:
    """A mapping whose names can be those of environment variables."""
    for name in value:
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"{name!r} is no name of an environment variable")
    return value


def patterns(value: list[str]) -> list[str]:
    """Patterns of files, as in a .gitignore."""
    for text in value:
        parsed(text)
    return value


def version(value: Any) -> Any:
    """Text that YAML takes for a number where it has no quotes."""
    if isinstance(value, float):
        raise ValueError(  # noqa: TRY004 - pydantic makes a finding of no other
            "expected text in quotes, as '2.9': without them 2.10 is the number 2.1"
        )
    return value


def processes(value: int | str) -> int | str:
    """A number of processes, or the word for all."""
    if isinstance(value, int) and value < 1:
        raise ValueError("expected a whole number of at least 1, or auto")
    return value


def seconds(value: Any) -> Any:
    """Seconds, where text like `90m`, `2h` or `1d` says how many."""
    if not isinstance(value, str):
        return value
    matched = _TIME.fullmatch(value.strip())
    if not matched:
        raise ValueError("expected seconds, or text like 90m, 2h or 1d")
    return int(matched[1]) * _UNITS[matched[2]]


Uri = Annotated[str, AfterValidator(s3)]


class Channel(Section):
    """Data that a job reads, with how they come to it."""

    uri: Uri
    input_mode: Literal["File", "FastFile"] = "File"
    """`File` copies everything before the script starts; `FastFile` reads it from S3 as it is opened."""
    distribution: Literal["FullyReplicated", "ShardedByS3Key"] = "FullyReplicated"
    """Whether every host has all files, or a part of them."""
