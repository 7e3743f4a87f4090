"""The tab-separated files of inputs and metrics that Accelerate's SageMaker profiles name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from accel_cli.errors import UsageError
from accel_cli.launchers.sagemaker.request import CHANNEL

__all__ = ["inputs", "metrics"]

_CHANNEL = re.compile(r"[A-Za-z0-9.\-_]{1,64}")
_PLACE = re.compile(r"s3://(arn:[^\s/]+/|[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/|$)).*")
_LONGEST_NAME, _LONGEST_REGEX = 255, 500

_Check = Callable[[str, str], str]
"""What is wrong with the two cells of a line, or nothing."""


def inputs(path: str | Path) -> dict[str, str]:
    """Where the data of every channel are.

    Args:
        path: A file with a line `channel_name<TAB>data_location`, then one for each channel.

    Raises:
        UsageError: Every line that cannot be used, with its number; or the file cannot be read.
    """
    return _table(Path(path), ("channel_name", "data_location"), _channel)


def metrics(path: str | Path) -> dict[str, str]:
    """The expression that finds every metric in the log.

    Args:
        path: A file with a line `metric_name<TAB>metric_regex`, then one for each metric.

    Raises:
        UsageError: Every line that cannot be used, with its number; or the file cannot be read.
    """
    return _table(Path(path), ("metric_name", "metric_regex"), _metric)


def _table(path: Path, header: tuple[str, str], check: _Check) -> dict[str, str]:
    first, *below = _lines(path)
    if tuple(cell.strip() for cell in first.split("\t")) != header:
        raise UsageError(
            f"{path}:1: expected the line {header[0]}, a tab, {header[1]}, and below it a line for each; got {first!r}"
        )
    rows: dict[str, str] = {}
    wrong = []
    for number, line in enumerate(below, start=2):
        cells = [cell.strip() for cell in line.split("\t")]
        problem = (
            _line(cells, header) or check(*cells) or ("" if cells[0] not in rows else "is there already")
        )
        if problem:
            wrong.append(f"{path}:{number}: {_subject(cells)}{problem}")
        else:
            rows[cells[0]] = cells[1]
    if not rows and not wrong:
        wrong.append(f"{path}: expected at least one line below {header[0]}, {header[1]}")
    if wrong:
        raise UsageError("\n".join(wrong))
    return rows


def _lines(path: Path) -> list[str]:
    """The lines, without empty ones at the end; a file of Windows, or with a mark of its encoding, is one too."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: expected text in UTF-8; the byte at {error.start} is none of it") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    # Not at every separator of Unicode, some of which an expression may hold.
    return text.rstrip().split("\n")


def _line(cells: list[str], header: tuple[str, str]) -> str:
    expected = f"expected {header[0]}, a tab, {header[1]}"
    if len(cells) == len(header) and all(cells):
        return ""
    if not any(cells):
        return f"{expected}; the line is empty"
    missing = [name for name, cell in zip(header, [*cells, ""], strict=False) if not cell]
    return (
        f"{expected}; {missing[0]} is missing" if missing else f"{expected}; there are {len(cells)} columns"
    )


def _subject(cells: list[str]) -> str:
    return f"{cells[0]!r} " if len(cells) == 2 and all(cells) else ""  # noqa: PLR2004 - a name and its value


def _channel(name: str, place: str) -> str:
    if not _CHANNEL.fullmatch(name):
        return "is no name for a channel: expected at most 64 letters, digits, dots, hyphens and underscores"
    if name == CHANNEL:
        return "is the channel of accel's own files; choose another name"
    return (
        "" if _PLACE.fullmatch(place) else f"is at {place!r}: expected a place in S3 like s3://bucket/folder"
    )


def _metric(name: str, regex: str) -> str:
    if len(name) > _LONGEST_NAME:
        return f"is too long: expected at most {_LONGEST_NAME} characters"
    too_long = len(regex) > _LONGEST_REGEX
    return f"has too long an expression: expected at most {_LONGEST_REGEX} characters" if too_long else ""
