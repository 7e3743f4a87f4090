"""The questions that fill a profile, in order; without a terminal, what Enter on each of them gives."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Union, get_args, get_origin

from pydantic import ValidationError

from accel_cli.errors import ProfileError
from accel_cli.launchers import LAUNCHERS, suggest
from accel_cli.launchers.base import Launcher
from accel_cli.planning.machine import Machine
from accel_cli.profile import yaml_io
from accel_cli.profile.fields import Answers, Choice, Offers, Question, Section, question_of
from accel_cli.profile.layers import nested
from accel_cli.profile.schema import DIVIDING, Profile
from accel_cli.profile.validation_errors import explain

__all__ = [
    "NONE",
    "Step",
    "format_answer",
    "is_optional",
    "next_step",
    "parse_answer",
    "profile_from",
    "suggested",
    "suggested_values",
    "told",
    "values_from",
]


_KIND = "launcher.kind"
_MORE = "more"
"""Where the answer to whether to ask on is kept; it is no key of a profile."""


@dataclass(frozen=True)
class Step:
    """One question, with where its answer goes."""

    key: str
    """The dotted key that the answer fills."""
    question: Question
    annotation: Any = str
    """The type of the field."""

    def suggestion(self, machine: Machine, answers: Mapping[str, Any], before: Mapping[str, Any]) -> Any:
        """What Enter answers: what the profile said before, else what suits the machine.

        Args:
            machine: What was found.
            answers: The answers so far, by dotted key.
            before: What the profile said, by dotted key.
        """
        picked = [choice.value for choice in self.choices(machine, answers)]
        said = before.get(self.key)
        if self.key in before and (not picked or said in picked) and not self._misfits(said, answers):
            return said
        return self.question.suggest(machine, _local(answers))

    def choices(self, machine: Machine, answers: Mapping[str, Any]) -> list[Choice]:
        """What can be picked on this machine after these answers."""
        local = _local(answers)
        return [choice for choice in self.question.choices if choice.offered(machine, local)]

    def offers(self, machine: Machine, said: Answers) -> Offers:
        """What others say can be picked; it may ask a service.

        Args:
            machine: What was found.
            said: What `told` gives.
        """
        return self.question.offers(machine, said) if self.question.offers else Offers()

    @property
    def may_be_none(self) -> bool:
        """Whether nothing is an answer."""
        return is_optional(self.annotation)

    def read(self, text: str) -> Any:
        """The value of what was typed.

        Raises:
            ValueError: It cannot be read as a value.
        """
        try:
            return parse_answer(text, self.annotation)
        except ProfileError:
            raise ValueError("this cannot be read as a value") from None

    def problem(self, value: Any, answers: Mapping[str, Any]) -> str | None:
        """What is wrong with an answer, given those before it; None if nothing is."""
        doubt = self.question.doubt(value) if self.question.doubt else None
        return doubt or self._misfits(value, answers)

    def _misfits(self, value: Any, answers: Mapping[str, Any]) -> str | None:
        try:
            Profile.model_validate(_profile({**answers, self.key: value}))
        except ValidationError as error:
            # What does not fit together names the field first that came last.
            own = f"{self.key.rpartition('.')[2]}: "
            return next(
                (
                    found.expected.removeprefix(own)
                    for found in explain(error, {})
                    if found.key == self.key or found.expected.startswith(own)
                ),
                None,
            )
        return None


def next_step(answers: Mapping[str, Any]) -> Step | None:
    """The first question that these answers leave open, or None when all is said."""
    return next((step for step in _steps(answers) if step.key not in answers), None)


def told(answers: Mapping[str, Any], before: Mapping[str, Any]) -> Answers:
    """What is said of the launcher so far: the answers, and what the profile said of it that was not asked yet."""
    same = before.get(_KIND) == answers.get(_KIND)
    return _local({**(before if same else {}), **answers})


def suggested(machine: Machine, before: Mapping[str, Any] | None = None) -> Profile:
    """The profile that Enter on every question gives, where nobody else is asked what there is."""
    return Profile.model_validate(_profile(suggested_values(machine, before)))


def suggested_values(machine: Machine, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The values that Enter on every question gives, by dotted key, where nobody else is asked what there is."""
    answers: dict[str, Any] = {}
    while step := next_step(answers):
        answers[step.key] = step.suggestion(machine, answers, before or {})
    return values_from(answers, before or {})


def profile_from(answers: Mapping[str, Any], before: Mapping[str, Any]) -> Profile:
    """The profile of these answers, as `values_from` has it."""
    return Profile.model_validate(_profile(values_from(answers, before)))


def values_from(answers: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """What a profile says with these answers, by dotted key; what was never asked stays as it was.

    Args:
        answers: The answers, by dotted key.
        before: What the profile said, by dotted key.

    Raises:
        ProfileError: An answer does not fit what stays.
    """
    kept = {
        key: value
        for key, value in before.items()
        if (not key.startswith("launcher.") or before.get(_KIND) == answers[_KIND])
        and (not key.startswith("parallel.") or LAUNCHERS[answers[_KIND]].several(_local(answers)))
    }
    open_ = {step.key for step in _all(answers) if step.key not in answers and not _stays(step, answers)}
    values = {**{key: value for key, value in kept.items() if key not in open_}, **answers}
    try:
        profile = Profile.model_validate(_profile(values))
        for key in profile.fully_shard.settings.idle(profile.parallel.settings):
            del values[f"fully_shard.{key}"]
        Profile.model_validate(_profile(values))
    except ValidationError as error:
        raise ProfileError(explain(error, {"": "these answers"})) from None
    return {key: value for key, value in values.items() if key != _MORE and value not in (None, {}, [])}


def _profile(values: Mapping[str, Any]) -> dict[str, Any]:
    """The nested data of dotted keys, without what is no value of a profile."""
    return nested({key: value for key, value in values.items() if value is not None and key != _MORE})


def _stays(step: Step, answers: Mapping[str, Any]) -> bool:
    """Whether what the profile says stays, since nobody wanted to be asked."""
    return step.question.further and not answers.get(_MORE) and step.question.when(_local(answers))


def _steps(answers: Mapping[str, Any]) -> Iterator[Step]:
    """The questions in order: how to run, what every one is asked, what only those are who want to, and the profile's."""
    yield Step(_KIND, _kind())
    if _KIND not in answers:
        return
    launcher = LAUNCHERS[answers[_KIND]]
    own = [step for step in _of(launcher, "launcher.") if step.question.when(_local(answers))]
    yield from (step for step in own if not step.question.further)
    if launcher.further:
        yield Step(_MORE, _more(launcher.further))
    if answers.get(_MORE):
        yield from (step for step in own if step.question.further)
    yield from (step for step in _of(Profile, "") if step.question.when(_local(answers)))


def _all(answers: Mapping[str, Any]) -> list[Step]:
    """Every question of the chosen launcher and of the profile itself."""
    return [*_of(LAUNCHERS[answers[_KIND]], "launcher."), *_of(Profile, "")]


def _of(section: type[Section], prefix: str) -> Iterator[Step]:
    for name, field in section.model_fields.items():
        if name in DIVIDING and not prefix:
            yield from _of(DIVIDING[name], f"{name}.")
        elif question := question_of(section, name):
            yield Step(f"{prefix}{name}", question, field.annotation)


def _local(answers: Mapping[str, Any]) -> dict[str, Any]:
    return {key.rpartition(".")[2]: value for key, value in answers.items()}


def _offered(launcher: type[Launcher], machine: Machine, _: Answers) -> bool:
    return launcher.offered(machine)


def _more(what: str) -> Question:
    return Question(
        f"More? {what}",
        suggest=lambda *_: False,
        choices=(Choice(False, "no, that is enough"), Choice(True, "yes, ask on")),
    )


def _kind() -> Question:
    return Question(
        "How should scripts run?",
        suggest=lambda machine, _: suggest(machine),
        choices=tuple(
            Choice(kind, _title(launcher), partial(_offered, launcher))
            for kind, launcher in LAUNCHERS.items()
        ),
    )


def _title(launcher: type[Launcher]) -> str:
    return f"{launcher.title} (needs {launcher.lacks()})" if launcher.lacks() else launcher.title


NONE = "-"
"""What is typed to have nothing where something is suggested."""
_NEXT = re.compile(r",\s*(?=[^\s,=]+\s*=)")
"""A comma before another `name=`: a value may have commas of its own."""


def parse_answer(text: str, annotation: Any) -> Any:
    """The value of what was typed, for a field of this type.

    Args:
        text: What was typed, and is not empty.
        annotation: The field's type; only one that takes no text is read as YAML would read it.

    Raises:
        ValueError: Names and their values were expected, and came otherwise.
        ProfileError: It is no YAML.
    """
    text = text.strip()
    if text == NONE and is_optional(annotation):
        return None
    if get_origin(annotation) is dict:
        return _mapping(text)
    if get_origin(annotation) is list:
        return [part for part in re.split(r"[,\s]+", text) if part]
    return text if _is_text(annotation) else yaml_io.scalar(text, "answer")


def format_answer(value: Any) -> str:
    """A value as it would be typed."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_inner(each)}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def is_optional(annotation: Any) -> bool:
    """Whether a field of this type may have nothing."""
    return get_origin(annotation) in {dict, list} or types.NoneType in _members(annotation)


def _is_text(annotation: Any) -> bool:
    """Whether a field takes text, and nothing that YAML has another word for."""
    return set(_members(annotation)) <= {str, types.NoneType}


def _members(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) in {Union, types.UnionType}:
        yield from get_args(annotation)
    else:
        yield annotation


def _mapping(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in _NEXT.split(text.rstrip(", ")):
        name, equals, value = part.partition("=")
        name = name.strip()
        if not (name and equals and value.strip()):
            raise ValueError(f"expected name=value, with a comma before the next name; {part!r} is none")
        if name in found:
            raise ValueError(f"{name} comes twice")
        found[name] = value.strip()
    return found


def _inner(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    return "{" + ", ".join(f"{name}: {each}" for name, each in value.items()) + "}"
