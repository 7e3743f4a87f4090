"""The questions that fill a profile, in order, and the parsing of typed answers."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ValidationError

from accel_cli.errors import ProfileError
from accel_cli.launchers import LAUNCHERS, suggest_launcher
from accel_cli.launchers.launcher import Launcher
from accel_cli.launchers.sections import Answers, Choice, Question, Section
from accel_cli.planning.machine import Machine
from accel_cli.profile import yaml_io
from accel_cli.profile.layers import nest
from accel_cli.profile.schema import SETTINGS_SECTIONS, Profile
from accel_cli.profile.validation_errors import explain
from accel_runtime.environment.engines import ENGINES, list_engines

__all__ = [
    "NONE",
    "Step",
    "build_values",
    "complete_suggestions",
    "format_answer",
    "is_optional",
    "next_step",
    "parse_answer",
    "strip_sections",
    "suggest_values",
]


_KIND = "launcher.kind"
_ENGINE_SECTIONS = tuple(f"{name}." for name in ENGINES.names)
"""Keys whose empty value is left out."""
_MORE = "more"
"""The key of the answer to the question for advanced options, which is not stored in the profile."""


@dataclass(frozen=True)
class Step:
    """One question and the key that its answer sets."""

    key: str
    """The dotted key."""
    question: Question
    annotation: Any = str
    """The type of the field."""

    def suggest(self, machine: Machine, answers: Mapping[str, Any], previous: Mapping[str, Any]) -> Any:
        """Return the answer for Enter: the previous value if it is still valid, else the default for the machine."""
        value = previous.get(self.key)
        values = [choice.value for choice in self.choices(machine, answers)]
        if self.key in previous and (not values or value in values) and not self._validate(value, answers):
            return value
        return self.question.suggest(machine, strip_sections(answers))

    def choices(self, machine: Machine, answers: Mapping[str, Any]) -> list[Choice]:
        """Return the choices on this machine after these answers."""
        local = strip_sections(answers)
        return [choice for choice in self.question.choices if choice.available(machine, local)]

    def find_problem(self, value: Any, answers: Mapping[str, Any]) -> str | None:
        """Return the problem of an answer after the earlier ones; None if it is valid."""
        return self.question.check(value) or self._validate(value, answers)

    def may_clear(self, machine: Machine, answers: Mapping[str, Any]) -> bool:
        """Return True if the key may have no value; a question whose default is a value needs one."""
        default = self.question.suggest(machine, strip_sections(answers))
        return is_optional(self.annotation) and not default and not self.find_problem(None, answers)

    def _validate(self, value: Any, answers: Mapping[str, Any]) -> str | None:
        try:
            Profile.model_validate(_nest({**answers, self.key: value}))
        except ValidationError as error:
            problems = explain(error, {})
            return next((problem.expected for problem in problems if problem.key == self.key), None)
        return None


def next_step(answers: Mapping[str, Any]) -> Step | None:
    """Return the first question without an answer; None if all are answered."""
    return next((step for step in _iter_steps(answers) if step.key not in answers), None)


def suggest_values(machine: Machine, previous: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the values of Enter on every question by dotted key, without querying remote services."""
    answers: dict[str, Any] = {}
    while step := next_step(answers):
        answers[step.key] = step.suggest(machine, answers, previous or {})
    return build_values(answers, previous or {})


def build_values(answers: Mapping[str, Any], existing: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the profile by dotted key: the answers, and existing values without a question.

    Raises:
        ProfileError: An answer conflicts with an existing value.
    """
    launcher, local = LAUNCHERS[answers[_KIND]], strip_sections(answers)
    steps = [*_iter_section(launcher, "launcher."), *_iter_section(Profile, "")]
    # Existing values of advanced questions stay if those were declined, but not of questions that no longer apply.
    dropped = {
        step.key
        for step in steps
        if not (step.question.advanced and not answers.get(_MORE) and step.question.when(local))
    }
    if existing.get(_KIND) != answers[_KIND]:
        dropped |= {key for key in existing if key.startswith("launcher.")}
    if not launcher.may_start_several(local):
        dropped |= {key for key in existing if key.startswith("parallel.")}
        # Of use with one process too, and not asked for.
        dropped -= {key for key in existing if key.startswith(_ENGINE_SECTIONS)}
    values = {**{key: value for key, value in existing.items() if key not in dropped}, **answers}
    values = _drop_other_library(values, answers)
    try:
        profile = Profile.model_validate(_nest(values))
        for key in profile.fully_shard.settings.idle(profile.parallel.settings):
            del values[f"fully_shard.{key}"]
        Profile.model_validate(_nest(values))
    except ValidationError as error:
        raise ProfileError(explain(error, {"": "these answers"})) from None
    return {key: value for key, value in values.items() if key != _MORE and value not in (None, {}, [])}


def _drop_other_library(values: Mapping[str, Any], answers: Mapping[str, Any]) -> dict[str, Any]:
    """Return values without the sections of the library that does not shard models, and without empty paths."""
    if _uses_engine(answers):
        other: tuple[str, ...] = ("parallel.", "fully_shard.")
    else:
        other = _ENGINE_SECTIONS if "parallel.dp_shard" in answers else ()
    return {
        key: value
        for key, value in values.items()
        if not key.startswith(other) and (value != "" or not key.startswith(_ENGINE_SECTIONS))
    }


def complete_suggestions(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a profile with an answer that only the wizard has: an engine shards models, too."""
    return {**values, **({"parallel.dp_shard": "auto"} if _uses_engine(values) else {})}


def _uses_engine(values: Mapping[str, Any]) -> bool:
    return any(values.get(engine.key, "no") != "no" for engine in list_engines())


def strip_sections(answers: Mapping[str, Any]) -> Answers:
    """Return the answers by the name of their field."""
    return {key.rpartition(".")[2]: value for key, value in answers.items()}


def _nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested data of dotted keys, without empty values and `_MORE`."""
    return nest({key: value for key, value in values.items() if value is not None and key != _MORE})


def _iter_steps(answers: Mapping[str, Any]) -> Iterator[Step]:
    """Yield the questions in order: the launcher, its options, its advanced options, and those of the profile."""
    yield Step(_KIND, _build_kind_question())
    if _KIND not in answers:
        return
    launcher, local = LAUNCHERS[answers[_KIND]], strip_sections(answers)
    steps = [step for step in _iter_section(launcher, "launcher.") if step.question.when(local)]
    yield from (step for step in steps if not step.question.advanced)
    if launcher.advanced_title:
        text = f"Configure advanced options ({launcher.advanced_title})?"
        yield Step(_MORE, Question(text, lambda *_: False, (Choice(False, "no"), Choice(True, "yes"))))
    if answers.get(_MORE):
        yield from (step for step in steps if step.question.advanced)
    yield from (step for step in _iter_section(Profile, "") if step.question.when(local))


def _iter_section(section: type[Section], prefix: str) -> Iterator[Step]:
    for name, field in section.model_fields.items():
        if name in SETTINGS_SECTIONS and not prefix:
            yield from _iter_section(SETTINGS_SECTIONS[name], f"{name}.")
        elif question := next((each for each in field.metadata if isinstance(each, Question)), None):
            yield Step(f"{prefix}{name}", question, field.annotation)


def _build_kind_question() -> Question:
    def is_available(launcher: type[Launcher], machine: Machine, _: Answers) -> bool:
        return launcher.is_available(machine)

    choices = []
    for kind, launcher in LAUNCHERS.items():
        missing = launcher.get_missing_requirement()
        facts = [f"needs {missing}"] if missing else []
        facts += [service] if (service := launcher.get_missing_service()) else []
        title = f"{launcher.title} ({'; '.join(facts)})" if facts else launcher.title
        choices.append(Choice(kind, title, partial(is_available, launcher)))
    return Question("How should scripts run?", lambda machine, _: suggest_launcher(machine), choices)


NONE = "-"
"""The text that clears an optional value."""
_NEXT = re.compile(r",\s*(?=[^\s,=]+\s*=)")
"""A comma before another `name=`, since values may contain commas."""


def parse_answer(text: str, annotation: Any) -> Any:
    """Parse a typed answer for a field of this type: as text if the field takes only strings, else as YAML.

    Raises:
        ValueError: The text is not `name=value, ...` for a mapping.
    """
    text = text.strip()
    if text == NONE and is_optional(annotation):
        return None
    if get_origin(annotation) is dict:
        return _parse_mapping(text)
    if get_origin(annotation) is list:
        return [part for part in re.split(r"[,\s]+", text) if part]
    if all(each in (str, types.NoneType) for each in _list_types(annotation)):
        return text
    try:
        return yaml_io.scalar(text, "answer")
    except ProfileError:
        return text  # the field rejects it


def format_answer(value: Any) -> str:
    """Return a value in the form in which it is typed."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_format_value(each)}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def is_optional(annotation: Any) -> bool:
    """Return whether a field of this type may be empty."""
    return get_origin(annotation) in {dict, list} or types.NoneType in _list_types(annotation)


def _list_types(annotation: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type itself."""
    is_union = get_origin(annotation) in {Union, types.UnionType}
    members = get_args(annotation) if is_union else (annotation,)
    return tuple(get_args(each)[0] if get_origin(each) is Annotated else each for each in members)


def _parse_mapping(text: str) -> dict[str, str]:
    mapping: dict[str, str] = {}
    for part in _NEXT.split(text.rstrip(", ")):
        name, _, value = (each.strip() for each in part.partition("="))
        if not (name and value):
            raise ValueError(f"invalid entry {part!r}: expected name=value, separated by commas")
        if name in mapping:
            raise ValueError(f"{name} is given twice")
        mapping[name] = value
    return mapping


def _format_value(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    return "{" + ", ".join(f"{name}: {each}" for name, each in value.items()) + "}"
