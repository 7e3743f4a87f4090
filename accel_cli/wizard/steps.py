"""The questions that fill a profile, in order; without a terminal, what Enter on each of them gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import ValidationError

from accel_cli.fields import Answers, Choice, Question, question_of
from accel_cli.launchers import LAUNCHERS, suggest
from accel_cli.launchers.base import Launcher
from accel_cli.machine import Machine
from accel_cli.profile.layers import nested
from accel_cli.profile.problems import explain
from accel_cli.profile.schema import Profile

__all__ = ["Step", "next_step", "profile_from", "suggested"]

_KIND = "launcher.kind"


@dataclass(frozen=True)
class Step:
    """One question, with where its answer goes."""

    key: str
    """The dotted key that the answer fills."""
    question: Question

    def suggestion(self, machine: Machine, answers: Mapping[str, Any], before: Mapping[str, Any]) -> Any:
        """What Enter answers: what the profile said before, else what suits the machine.

        Args:
            machine: What was found.
            answers: The answers so far, by dotted key.
            before: What the profile said, by dotted key.
        """
        picked = [choice.value for choice in self.choices(machine, answers)]
        if self.key in before and (not picked or before[self.key] in picked):
            return before[self.key]
        return self.question.suggest(machine, _local(answers))

    def choices(self, machine: Machine, answers: Mapping[str, Any]) -> list[Choice]:
        """What can be picked on this machine after these answers."""
        local = _local(answers)
        return [choice for choice in self.question.choices if choice.offered(machine, local)]

    def problem(self, value: Any, answers: Mapping[str, Any]) -> str | None:
        """What is wrong with an answer, given those before it; None if nothing is."""
        try:
            Profile.model_validate(nested({**answers, self.key: value}))
        except ValidationError as error:
            return next((found.expected for found in explain(error, {}) if found.key == self.key), None)
        return None


def next_step(answers: Mapping[str, Any]) -> Step | None:
    """The first question that these answers leave open, or None when all is said."""
    return next((step for step in _steps(answers) if step.key not in answers), None)


def suggested(machine: Machine, before: Mapping[str, Any] | None = None) -> Profile:
    """The profile that Enter on every question gives."""
    answers: dict[str, Any] = {}
    while step := next_step(answers):
        answers[step.key] = step.suggestion(machine, answers, before or {})
    return profile_from(answers, before or {})


def profile_from(answers: Mapping[str, Any], before: Mapping[str, Any]) -> Profile:
    """The profile of these answers; what was never asked stays as it was.

    Args:
        answers: The answers, by dotted key.
        before: What the profile said, by dotted key.
    """
    kept = {
        key: value
        for key, value in before.items()
        if not key.startswith("launcher.") or before.get(_KIND) == answers[_KIND]
    }
    unasked = {key: None for key in kept if key in _questions(answers) and key not in answers}
    values = {key: value for key, value in {**kept, **unasked, **answers}.items() if value is not None}
    return Profile.model_validate(nested(values))


def _steps(answers: Mapping[str, Any]) -> Iterator[Step]:
    yield Step(_KIND, _KIND_QUESTION)
    if _KIND not in answers:
        return
    for key, question in _questions(answers).items():
        if question.when(_local(answers)):
            yield Step(key, question)


def _questions(answers: Mapping[str, Any]) -> dict[str, Question]:
    """Every question of the chosen launcher and of the profile itself, by dotted key."""
    launcher = LAUNCHERS[answers[_KIND]]
    asked = {f"launcher.{name}": question_of(launcher, name) for name in launcher.model_fields}
    asked |= {name: question_of(Profile, name) for name in Profile.model_fields}
    return {key: question for key, question in asked.items() if question}


def _local(answers: Mapping[str, Any]) -> dict[str, Any]:
    return {key.rpartition(".")[2]: value for key, value in answers.items()}


def _offered(launcher: type[Launcher], machine: Machine, _: Answers) -> bool:
    return launcher.offered(machine)


_KIND_QUESTION = Question(
    "How should scripts run?",
    suggest=lambda machine, _: suggest(machine),
    choices=tuple(
        Choice(kind, launcher.title, partial(_offered, launcher)) for kind, launcher in LAUNCHERS.items()
    ),
)
