"""What a section of a profile is made of: checked, frozen fields, each with the question that fills it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from accel_cli.machine import Machine

__all__ = ["Answers", "Choice", "Question", "Section", "question_of"]

Answers = Mapping[str, Any]
"""What was answered so far in this section."""


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


@dataclass(frozen=True)
class Question:
    """How the wizard asks for a field; it stands in the field's `Annotated`."""

    text: str
    """The question, as a person reads it."""
    suggest: Callable[[Machine, Answers], Any]
    """The answer that Enter gives: right for this machine, and always one that launches."""
    choices: Sequence[Choice] = ()
    """What can be picked; none lets the person type."""
    when: Callable[[Answers], bool] = lambda _: True
    """Whether to ask at all."""
    hint: str = ""
    """One line of help under the question."""


def question_of(section: type[Section], field: str) -> Question | None:
    """The question beside a field, if it has one."""
    metadata = section.model_fields[field].metadata
    return next((item for item in metadata if isinstance(item, Question)), None)
