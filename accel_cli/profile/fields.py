"""What a section of a profile is made of: checked, frozen fields, each with the question that fills it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from accel_cli.planning.machine import Machine

__all__ = ["Agree", "Answers", "Choice", "Offers", "Question", "Section", "question_of"]

Answers = Mapping[str, Any]
"""What was answered so far in this section."""
Agree = Callable[[str, str], bool]
"""Shows a text, asks a question about it, and returns whether the answer was yes."""


class Section(BaseModel):
    """A part of a profile: unknown keys are errors, values are not converted, nothing changes later."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)


@dataclass(frozen=True)
class Choice:
    """One answer to pick, with what it means."""

    value: Any
    title: str
    offered: Callable[[Machine, Answers], bool] = lambda *_: True
    """Whether it can be picked, on this machine and after these answers."""
    make: Callable[[Answers, Agree], Any] | None = None
    """What brings its value into being once it is picked, after a yes; None from it is a no, and asks again."""


@dataclass(frozen=True)
class Offers:
    """What somebody else says can be picked: a service, or another tool's configuration."""

    choices: Sequence[Choice] = ()
    """The first is what Enter answers, unless the profile said something before."""
    note: str = ""
    """Why there are fewer than could be."""


@dataclass(frozen=True)
class Question:
    """How the wizard asks for a field; it stands in the field's `Annotated`."""

    text: str
    """The question, as a person reads it."""
    suggest: Callable[[Machine, Answers], Any]
    """The answer that Enter gives: right for this machine, and always one that launches."""
    choices: Sequence[Choice] = ()
    """What can be picked; none lets the person type."""
    offers: Callable[[Machine, Answers], Offers] | None = None
    """What can be picked or typed, looked up when the question comes, and never without one who is asked."""
    complete: Callable[[], Sequence[str]] | None = None
    """Words that are completed while they are typed."""
    doubt: Callable[[Any], str | None] | None = None
    """What is wrong with an answer that the field itself would take."""
    when: Callable[[Answers], bool] = lambda _: True
    """Whether to ask at all."""
    further: bool = False
    """Whether it comes only for those who want to be asked more."""
    hint: str = ""
    """One line of help under the question."""


def question_of(section: type[Section], field: str) -> Question | None:
    """The question beside a field, if it has one."""
    metadata = section.model_fields[field].metadata
    return next((item for item in metadata if isinstance(item, Question)), None)
