"""Sections of a profile: checked, frozen fields, with the questions and choices of the wizard."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from accel_cli.planning.machine import Machine

__all__ = [
    "Answers",
    "Choice",
    "CountOrAuto",
    "ExpandedPath",
    "ItemError",
    "Offers",
    "Question",
    "Section",
    "match",
]

Answers = Mapping[str, Any]
"""The answers so far in this section, by field."""
CountOrAuto = Annotated[int, Field(ge=1)] | Literal["auto"]


def _expand_path(text: str | None) -> str | None:
    """Return a path of this machine with its home and variables expanded, as a shell does."""
    if text is None:
        return None
    for reference in re.findall(r"\$(?:\{[^/}]*\}?|\w+)", text):
        found = re.fullmatch(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))", reference)
        if not found:
            raise ValueError(f"expected a path with variables as $NAME or ${{NAME}}, got {reference}")
        if (name := found[1] or found[2]) not in os.environ:
            raise ValueError(f"expected a path whose variables are set; {name} is not")
    path = os.path.expanduser(os.path.expandvars(text))  # noqa: PTH111 - a `~` that stays is no exception
    if path.startswith("~"):
        raise ValueError(
            f"expected a path; {path.partition('/')[0]} names no home directory. Write ./~ for a folder whose name begins so"
        )
    return path


ExpandedPath = AfterValidator(_expand_path)
"""Metadata of a field that is a path of this machine: `~`, `$NAME` and `${NAME}` are expanded, or refused."""


class Section(BaseModel):
    """A part of a profile: unknown keys are errors, values are not converted, nothing changes later."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)


@dataclass(frozen=True)
class Choice:
    """An answer to choose, with its meaning."""

    value: Any
    title: str
    available: Callable[[Machine, Answers], bool] = lambda *_: True
    """Returns True if it can be chosen on this machine and after these answers."""


@dataclass(frozen=True)
class Offers:
    """Choices that a service or another tool's configuration offers."""

    choices: Sequence[Choice] = ()
    """The first is the default, unless the profile already has a value."""
    note: str = ""
    """The reason if the list is incomplete."""


@dataclass(frozen=True)
class Question:
    """The wizard's question for a field, in the field's `Annotated`."""

    text: str
    """The text of the question."""
    suggest: Callable[[Machine, Answers], Any] = lambda *_: None
    """Returns the default answer: suits this machine, and can always be launched. None leaves the key unset."""
    choices: Sequence[Choice] = ()
    """The fixed choices; if empty, the answer is typed."""
    offers: Callable[[Machine, Answers], Offers] | None = None
    """Looks up choices when the question is shown; never called without a user."""
    complete: Callable[[], Sequence[str]] | None = None
    """Returns completions for typed answers."""
    check: Callable[[Any], str | None] = lambda _: None
    """Returns the problem of an answer that the field itself accepts, or None."""
    when: Callable[[Answers], bool] = lambda _: True
    """Returns True if the question applies."""
    advanced: bool = False
    """True if the question is asked only on request."""
    hint: str = ""
    """One line of help under the question."""


class ItemError(ValueError):
    """An invalid part of the value of a field, such as an item of a list."""

    def __init__(self, expected: str, actual: str) -> None:
        super().__init__(f"{expected}, got {actual}")
        self.expected = expected
        self.actual = actual


def match(pattern: str, expected: str) -> AfterValidator:
    """Return a validator of text, a number, the items of a list or the keys of a mapping; None is valid."""

    def check(value: Any) -> Any:
        is_one = not isinstance(value, (list, dict))
        for item in [value] if is_one else value:
            if item is not None and not re.fullmatch(pattern, str(item)):
                raise (
                    ValueError(f"expected {expected}")
                    if is_one
                    else ItemError(f"expected {expected}", repr(item))
                )
        return value

    return AfterValidator(check)
