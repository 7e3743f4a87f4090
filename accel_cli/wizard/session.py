"""One conversation: look at the machine, ask, show the YAML, and write it if the person agrees."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import questionary
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.key_binding import KeyBindings, merge_key_bindings
from questionary import Choice, Style
from rich.console import Console
from rich.syntax import Syntax

from accel_cli import console
from accel_cli.errors import AccelError, UsageError
from accel_cli.launchers.base import Job
from accel_cli.planning import machine, planner
from accel_cli.planning.machine import Machine
from accel_cli.profile import edit, fields, layers, schema, store, yaml_io
from accel_cli.wizard import steps
from accel_cli.wizard.steps import Step, next_step, told, values_from

__all__ = ["BACK", "agree", "ask_all", "confirm", "run_wizard"]


_INTERRUPTED = 130


def run_wizard(target: Path) -> int:
    """Fill the profile at `target` by questions.

    Returns:
        0, or 130 if the person pressed Ctrl-C; nothing is written then, nor without a yes.
    """
    try:
        with console.spinner("Looking at this machine (this imports torch once)"):
            found = machine.detect(os.environ)
        console.show(f"[bold]This machine:[/bold] {found.summary}")
        for problem in found.problems:
            console.note(problem)
        before, written = _before(target, found)
        show = partial(_agree, target, as_it_was=bool(written))
        agreed = ask_all(found, before, written, show)
    except KeyboardInterrupt:
        console.note("nothing was written")
        return _INTERRUPTED
    if agreed is None:
        console.note("nothing was written")
        return 0
    store.write(target, _text(target, agreed, as_it_was=bool(written)))
    console.note(f"{target} is written; next: accel launch train.py")
    return 0


def _before(target: Path, found: Machine) -> tuple[dict[str, Any], dict[str, Any]]:
    """What held until now, by dotted key, and what of it the file says; both empty if this machine cannot run it."""
    if not target.is_file():
        return {}, {}
    try:
        layer = layers.file(target, "file")
        profile = layers.resolve([layer]).profile
        if profile.start.runs != "job":
            # A plan that is never run: it tells whether Enter on every question would launch.
            planner.plan_layout(
                profile.start,
                Job("train.py", (), "script", profile.settings, {}, {}, found, python="python"),
            )
    except UsageError as error:
        console.note(f"{target} cannot be used here, so the questions start anew: {error}")
        return {}, {}
    return layers.flat(profile.data()), dict(layer.values)


def _text(target: Path, values: dict[str, Any], *, as_it_was: bool) -> str:
    """Return the text of the file with these values: a new one, or that of the file with its comments and order."""
    data, comments = layers.to_data(values), schema.describe(values["launcher.kind"])
    if not as_it_was:
        return store.render(data, comments)
    text = store.read_text(target)
    return edit.edit_text(text, yaml_io.parse(text, str(target)), data, comments)


def _agree(target: Path, values: dict[str, Any], *, as_it_was: bool) -> bool | None:
    text = _text(target, values, as_it_was=as_it_was)
    Console().print(Syntax(text, "yaml", background_color="default"))
    return confirm(f"{'Replace' if target.exists() else 'Write'} {target}?")


BACK = object()
"""What a person answers to see the question before."""
_AGAIN = object()
"""What a person answers to see the same question once more."""
_BACK_KEY = "<"
_MANY = 12
"""Choices from which on typing narrows them."""
_STYLE = Style([("qmark", "fg:ansicyan bold"), ("question", "bold"), ("pointer", "fg:ansicyan bold"),
                ("answer", "fg:ansicyan"), ("highlighted", "fg:ansicyan")])  # fmt: skip


@dataclass(frozen=True)
class _Asked:
    """The state of a conversation: what was answered, in the order it was asked."""

    answers: dict[str, Any] = field(default_factory=dict)
    taken_back: dict[str, Any] = field(default_factory=dict)
    """Answers that are asked for once more: they are what is suggested then."""

    def back(self) -> _Asked:
        *kept, (key, value) = self.answers.items()
        return _Asked(dict(kept), {**self.taken_back, key: value})

    def with_(self, key: str, answer: Any) -> _Asked:
        return _Asked({**self.answers, key: answer}, self.taken_back)


@dataclass(frozen=True)
class _Turn:
    """A question in hand, with what Enter answers."""

    step: Step
    answers: Mapping[str, Any]
    suggestion: Any
    choices: Sequence[fields.Choice]
    """What can be picked; none lets the person type."""
    typing: bool = False
    """Whether something that is not among the choices can be typed."""
    said: fields.Answers = field(default_factory=dict)
    """What is said so far, for choices that make something."""


def ask_all(
    machine: Machine,
    before: Mapping[str, Any],
    written: Mapping[str, Any],
    show: Callable[[dict[str, Any]], bool | None],
) -> dict[str, Any] | None:
    """Ask until the person agrees to what will be written.

    Args:
        machine: What was found; it makes the suggestions.
        before: What held until now, by dotted key; it is suggested.
        written: Those of these values that stand in the file; what is not asked for again stays.
        show: Shows the result and asks; True writes it, False drops it, None goes back.

    Returns:
        The values of the profile by dotted key, or None if the person wants none: those that were answered, and those of
        `written` that stay.

    Raises:
        KeyboardInterrupt: The person pressed Ctrl-C.
    """
    asked, said = _Asked(), set[str]()
    while True:
        step = next_step(asked.answers)
        if step is None:
            values = _values(asked.answers, written)
            agreed = show(values) if values else None
            if agreed is not None:
                return values if agreed else None
            asked = asked.back()
            continue
        answer = _ask(_turn(step, machine, asked, before, said))
        if answer is not _AGAIN:
            asked = asked.back() if answer is BACK else asked.with_(step.key, answer)


def confirm(question: str) -> bool | None:
    """Ask whether to write; None goes back."""
    titles = ("Yes", "Back", "No, leave all as it is")
    return (True, None, False)[_select(question, titles, back=1, help_=" ")]


def agree(text: str, question: str) -> bool:
    """Show a text, and ask a question about it."""
    console.plain(text)
    return _select(question, ("Yes", "No"), back=1) == 0


def _values(answers: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any] | None:
    """The values, or None once it was said what does not fit together."""
    try:
        return values_from(answers, written)
    except AccelError as error:
        console.note(f"this does not fit together, so the last question comes again: {error}")
        return None


def _turn(step: Step, machine: Machine, asked: _Asked, before: Mapping[str, Any], said: set[str]) -> _Turn:
    answers = asked.answers
    suggestion = step.suggestion(machine, answers, {**before, **asked.taken_back})
    if not step.question.offers:
        return _Turn(step, answers, suggestion, step.choices(machine, answers))
    known = told(answers, before)
    with console.spinner("Looking for what there is"):
        offers = step.offers(machine, known)
    if offers.note and offers.note not in said:
        said.add(offers.note)
        console.note(offers.note)
    choices = list(offers.choices)
    if choices and suggestion is not None and suggestion not in [choice.value for choice in choices]:
        choices.insert(0, fields.Choice(suggestion, f"{steps.format_answer(suggestion)}, as before"))
    return _Turn(step, answers, suggestion, choices, typing=True, said=known)


def _ask(turn: _Turn) -> Any:
    if not turn.choices:
        return _type(turn)
    titles = [choice.title for choice in turn.choices]
    own = ["another one, which I type"] if turn.typing else []
    back = ["Back"] if turn.answers else []
    values = [choice.value if not choice.make else _AGAIN for choice in turn.choices]
    default = values.index(turn.suggestion) if turn.suggestion in values else 0
    picked = _select(
        turn.step.question.text,
        [*titles, *own, *back],
        default=default,
        back=len(titles) + len(own) if back else None,
    )
    if picked < len(titles):
        return _value(turn.choices[picked], turn.said)
    if picked == len(titles) and own:
        answer = _type(turn)
        return _AGAIN if answer is BACK else answer
    return BACK


def _value(choice: fields.Choice, said: fields.Answers) -> Any:
    """What a choice stands for, once it is there."""
    if not choice.make:
        return choice.value
    try:
        made = choice.make(said, agree)
    except AccelError as error:
        console.note(str(error))
        return _AGAIN
    return _AGAIN if made is None else made


def _select(
    text: str, titles: Sequence[str], *, default: int = 0, back: int | None = None, help_: str = ""
) -> int:
    """The number of the line that was picked; `back` is the one that the key for going back picks."""
    many = len(titles) > _MANY
    # By number: questionary takes a value of None for none at all, and shows the title in its place.
    choices = [Choice(title, value=index) for index, title in enumerate(titles)]
    question = questionary.select(
        text,
        choices=choices,
        default=choices[default],
        style=_STYLE,
        instruction=help_ or ("(type to narrow, arrows, Enter)" if many else "(arrows, Enter)"),
        use_search_filter=many,
        use_jk_keys=not many,
    )
    if back is not None:
        keys = KeyBindings()
        keys.add(_BACK_KEY, eager=True)(lambda event: event.app.exit(result=back))
        own = question.application.key_bindings or KeyBindings()
        question.application.key_bindings = merge_key_bindings([own, keys])
    return int(question.unsafe_ask())


def _type(turn: _Turn) -> Any:
    step, suggestion = turn.step, turn.suggestion
    clears = [f"{steps.NONE} for none"] if step.may_be_none and steps.format_answer(suggestion) else []
    help_ = "; ".join([*filter(None, [step.question.hint]), *clears, f"{_BACK_KEY} goes back"])

    def check(text: str) -> bool | str:
        if text.strip() == _BACK_KEY:
            return True
        try:
            return step.problem(step.read(text) if text.strip() else suggestion, turn.answers) or True
        except ValueError as error:
            return str(error)

    text: str = questionary.text(
        step.question.text,
        instruction=f"({help_}) ",
        validate=check,
        validate_while_typing=False,
        style=_STYLE,
        completer=_completer(step),
        # Shown until something is typed, so that nobody has to erase a suggestion first.
        placeholder=[("class:text", steps.format_answer(suggestion))],
    ).unsafe_ask()
    return BACK if text.strip() == _BACK_KEY else step.read(text) if text.strip() else suggestion


def _completer(step: Step) -> WordCompleter | None:
    words = step.question.complete() if step.question.complete else ()
    return WordCompleter(list(words), sentence=True, match_middle=True) if words else None
