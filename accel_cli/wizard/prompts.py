"""Asking on a terminal: one question at a time, with a way back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import questionary
from questionary import Choice, Style

from accel_cli import fields
from accel_cli.errors import ProfileError
from accel_cli.machine import Machine
from accel_cli.profile import document
from accel_cli.profile.schema import Profile
from accel_cli.wizard.steps import Step, next_step, profile_from

__all__ = ["BACK", "ask_all", "confirm"]

BACK = object()
"""What a person answers to see the question before."""
_BACK_KEY = "<"
_STYLE = Style([("qmark", "fg:ansicyan bold"), ("question", "bold"), ("pointer", "fg:ansicyan bold"),
                ("answer", "fg:ansicyan"), ("highlighted", "fg:ansicyan")])  # fmt: skip


@dataclass(frozen=True)
class _Asked:
    """The state of a conversation: what was answered, in the order it was asked."""

    answers: dict[str, Any]

    def back(self) -> _Asked:
        return _Asked(dict(list(self.answers.items())[:-1]))


def ask_all(
    machine: Machine, before: Mapping[str, Any], show: Callable[[Profile], bool | None]
) -> Profile | None:
    """Ask until the person agrees to what will be written.

    Args:
        machine: What was found; it makes the suggestions.
        before: What the profile said until now, by dotted key.
        show: Shows the result and asks; True writes it, False drops it, None goes back.

    Returns:
        The profile, or None if the person wants none.

    Raises:
        KeyboardInterrupt: The person pressed Ctrl-C.
    """
    asked = _Asked({})
    while True:
        step = next_step(asked.answers)
        if step is None:
            profile = profile_from(asked.answers, before)
            agreed = show(profile)
            if agreed is not None:
                return profile if agreed else None
            asked = asked.back()
            continue
        choices = step.choices(machine, asked.answers)
        answer = _ask(step, step.suggestion(machine, asked.answers, before), asked.answers, choices)
        asked = asked.back() if answer is BACK else _Asked({**asked.answers, step.key: answer})


def confirm(question: str) -> bool | None:
    """Ask whether to write; None goes back."""
    choices = [
        Choice("Yes", value=True),
        Choice("Back", value=BACK),  # a value of None would become the title
        Choice("No, leave all as it is", value=False),
    ]
    picked = questionary.select(question, choices=choices, style=_STYLE, instruction=" ").unsafe_ask()
    return None if picked is BACK else bool(picked)


def _ask(step: Step, suggestion: Any, answers: Mapping[str, Any], offered: Sequence[fields.Choice]) -> Any:
    if offered:
        return _pick(
            step.question.text,
            suggestion,
            [Choice(each.title, value=each.value) for each in offered],
            answers,
        )
    return _type(step, suggestion, answers)


def _pick(text: str, suggestion: Any, choices: list[Choice], answers: Mapping[str, Any]) -> Any:
    if answers:
        choices.append(Choice("Back", value=BACK))
    return questionary.select(
        text, choices=choices, default=suggestion, style=_STYLE, instruction="(arrows, Enter)"
    ).unsafe_ask()


def _type(step: Step, suggestion: Any, answers: Mapping[str, Any]) -> Any:
    hint = step.question.hint + "; " if step.question.hint else ""

    def check(text: str) -> bool | str:
        if text.strip() in {"", _BACK_KEY}:
            return True
        try:
            return step.problem(_read(text), answers) or True
        except ProfileError:
            return "this cannot be read as a value"

    text: str = questionary.text(
        step.question.text,
        instruction=f"({hint}{_BACK_KEY} goes back) ",
        validate=check,
        style=_STYLE,
        # Shown until something is typed, so that nobody has to erase a suggestion first.
        placeholder=[("class:text", "" if suggestion is None else str(suggestion))],
    ).unsafe_ask()
    return BACK if text.strip() == _BACK_KEY else _read(text) if text.strip() else suggestion


def _read(text: str) -> Any:
    return document.scalar(text.strip(), "answer")
