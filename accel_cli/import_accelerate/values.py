"""Values of an Accelerate config file: how they are shown, and what they mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from accel_cli.console import mask_secrets
from accel_cli.import_accelerate.ways import NO_DEVICE, WAYS
from accel_cli.profile.validation_errors import did_you_mean, one_of
from accel_runtime.env import Device, MixedPrecision, find_nearest

__all__ = [
    "Read",
    "Refused",
    "choice",
    "distributed_type",
    "host",
    "ids",
    "job_type",
    "plain",
    "precision",
    "processes",
    "section",
    "shown",
    "text",
    "texts",
    "truth",
    "whole",
    "without_secrets",
]

# Accelerate reads YAML 1.1, so a truth value may be a word here.
_TRUE = ("true", "yes", "on")
_FALSE = ("false", "no", "off")
_HOST = re.compile(r"[A-Za-z0-9_.-]+|[0-9a-fA-F]*:[0-9a-fA-F]*:[0-9a-fA-F:]*")
_IDS = re.compile(r"[A-Za-z0-9_.:/-]+(\s*,\s*[A-Za-z0-9_.:/-]+)*")


@dataclass(frozen=True)
class Refused:
    """A value that cannot be understood."""

    expected: str
    hint: str = ""


Read = Callable[[Any], Any]
"""Makes a value what it means, or `Refused`."""


def shown(name: str, value: object) -> str:
    """A value on one line, as YAML has it, without secrets."""
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(f"{key}: {shown(f'{name}.{key}', inner)}" for key, inner in value.items()) + "}"
        )
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(shown(name, item) for item in value) + "]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    words = without_secrets(name, str(value))
    return words if words and words.isprintable() else repr(words)


def without_secrets(name: str, value: str) -> str:
    """The text, or stars where it holds a secret."""
    # A command or an assignment names its secret itself.
    words = re.split(r"[=\s]+", value)
    seen = [mask_secrets(each, value) for each in (name, *(words if len(words) > 1 else ()))]
    return "***" if "***" in seen else seen[0]


def plain(value: Any) -> Any:
    """Text in lower case; the words for true and false as what they mean."""
    if not isinstance(value, str):
        return value
    word = value.strip().lower()
    return word in _TRUE if word in (*_TRUE, *_FALSE) else word


def truth(value: Any) -> bool | Refused:
    """Reads true or false, also as words or as 1 and 0."""
    meant = bool(value) if type(value) is int and value in {0, 1} else plain(value)
    return meant if isinstance(meant, bool) else Refused("expected true or false")


def whole(words: str, least: int, most: int | None = None) -> Read:
    """Reads a whole number between two; `words` say what was expected."""

    def read(value: Any) -> int | Refused:
        if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value):
            value = int(value)
        good = type(value) is int and value >= least and (most is None or value <= most)
        return value if good else Refused(words)

    return read


def processes(value: Any) -> int | Refused:
    """Reads a number of processes, where -1 leaves it open."""
    words = "expected a whole number of at least 1, or -1"
    number: int | Refused = whole(words, -1)(value)
    return number or Refused(words)


def text(value: Any) -> str | Refused:
    """Reads text, also where it looks like a number."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return str(value) if number or isinstance(value, str) else Refused("expected text")


def texts(value: Any) -> list[str] | Refused:
    """Reads a list of texts, or one, without the empty ones."""
    entries = value if isinstance(value, list) else [value]
    wrong = any(isinstance(entry, (Mapping, list, bool)) for entry in entries)
    return Refused("expected a list of texts") if wrong else [str(entry) for entry in entries if entry]


def section(value: Any) -> Mapping[str, Any] | Refused:
    """Reads keys and values, which stay as they are."""
    return value if isinstance(value, Mapping) else Refused("expected keys and values")


def host(value: Any) -> str | Refused:
    """Reads the name or address of a machine, without brackets."""
    name = value.strip().strip("[]") if isinstance(value, str) else ""
    return name if _HOST.fullmatch(name) else Refused("expected a name or address of a machine")


def ids(value: Any) -> str | Refused:
    """Reads which devices to use: all, or ids with commas between."""
    listed = str(value).strip() if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
    if not _IDS.fullmatch(listed):
        return Refused("expected all, or ids such as 0,1")
    return "".join(listed.split())


def precision(value: Any) -> str | Refused:
    """Reads a number format."""
    word = "no" if plain(value) is False else plain(value)
    choices = one_of(get_args(MixedPrecision))
    if word == "fp8":
        return Refused(f"fp8 is not in this version of accel; {choices}")
    return word if word in get_args(MixedPrecision) else Refused(choices)


def choice(*words: str) -> Read:
    """Reads one of these words."""

    def read(value: Any) -> str | Refused:
        if value in words:
            return str(value)
        meant = find_nearest(value, list(words)) if isinstance(value, str) else None
        return Refused(one_of(words), did_you_mean(meant))

    return read


def distributed_type(value: Any) -> str | Refused:
    """Reads how the processes train together."""
    if value in NO_DEVICE:
        known = ", ".join(name for name in get_args(Device) if name != "auto")
        return Refused(f"accel does not know this device; it computes on {known}")
    # An unquoted NO is false in YAML 1.1.
    return "NO" if plain(value) is False else choice(*WAYS)(value)


def job_type(value: Any) -> str | Refused:
    """Reads how the processes of a SageMaker job train together."""
    return "NO" if plain(value) is False else choice("NO", "DATA_PARALLEL", "MODEL_PARALLEL")(value)
