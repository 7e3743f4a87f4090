"""The wizard's dialog: ask the questions, show the YAML, and write it after confirmation."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import questionary
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.filters import Always
from prompt_toolkit.key_binding import KeyBindings, merge_key_bindings
from prompt_toolkit.layout import Dimension
from questionary import Style
from rich.console import Console
from rich.syntax import Syntax

from accel_cli import console
from accel_cli.errors import AccelError, UsageError
from accel_cli.launchers.base import LaunchSpec
from accel_cli.launchers.sections import Choice
from accel_cli.planning import machine
from accel_cli.planning.machine import Machine
from accel_cli.profile import edit, layers, planner, schema, store
from accel_cli.profile.deepspeed_file import apply_deepspeed_file
from accel_cli.profile.layers import Layer
from accel_cli.wizard import steps
from accel_cli.wizard.steps import Step

__all__ = ["ask_sharding", "run_wizard"]

_INTERRUPTED = 130
_BACK = object()
"""The answer that returns to the previous question."""
_BACK_KEY = "<"
_FILTER_FROM = 12
"""With more choices, typing filters them."""
_STYLE = Style([("qmark", "fg:ansicyan bold"), ("question", "bold"), ("pointer", "fg:ansicyan bold"),
                ("answer", "fg:ansicyan"), ("highlighted", "fg:ansicyan")])  # fmt: skip


def run_wizard(target: Path) -> int:
    """Create or edit the profile at `target` by questions.

    Returns:
        0, or 130 after Ctrl-C. Nothing is written after Ctrl-C or without confirmation.

    Raises:
        UsageError: The profile cannot be written.
    """
    store.check_writable(target)
    try:
        with console.spinner("Detecting hardware (imports torch once)"):
            detected = machine.detect(os.environ)
        console.show(f"[bold]This machine:[/bold] {detected.summary}")
        for problem in detected.problems:
            console.note(problem)
        suggestions, existing = _load_existing(target, detected)
        values = _ask_all(target, detected, suggestions, existing)
    except KeyboardInterrupt:
        console.note("nothing was written")
        return _INTERRUPTED
    if values is None:
        console.note("nothing was written")
        return 0
    store.write(target, _render(target, values, update=bool(suggestions)))
    option = (
        ""
        if target.name == store.PROJECT_FILE or target.stem == store.DEFAULT
        else f"--profile {target.stem} "
    )
    console.note(f"wrote {target}; next: accel launch {option}train.py")
    return 0


def ask_sharding(file: Path) -> Literal["fully_shard", "deepspeed"]:
    """Ask for the section of the profile that the settings of DeepSpeed in a file become."""
    titles = (
        "fully_shard of torch (recommended): nothing to install; what it lacks is listed",
        "DeepSpeed: every setting stays, and scripts need the package deepspeed",
    )
    return ("fully_shard", "deepspeed")[
        _select(f"{file} uses DeepSpeed. Which library shards models?", titles)
    ]


def _load_existing(target: Path, detected: Machine) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of the profile at `target` and those its file sets; both empty if it cannot run here."""
    if not target.is_file():
        return {}, {}
    try:
        layer = layers.read_file(target, "file")
        profile = layers.resolve([layer]).profile
        if profile.launcher.location != "job":
            # The plan is never run: it fails if the answers suggested from this file could not launch.
            planner.build_plan(
                profile.launcher,
                LaunchSpec("train.py", (), "script", profile.settings, {}, {}, detected, python="python"),
            )
    except UsageError as error:
        console.note(f"cannot use {target} on this machine, so the wizard suggests defaults: {error}")
        return {}, {}
    return steps.complete_suggestions(layers.flatten(profile.data())), dict(layer.values)


def _ask_all(
    target: Path, detected: Machine, suggestions: Mapping[str, Any], existing: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Ask all questions, and return the confirmed values of the profile by dotted key; None if they are discarded.

    `suggestions` are the values of the existing profile; `existing` are those that its file sets, which are kept if no
    question asks for them.
    """
    answers: dict[str, Any] = {}
    previous = dict(suggestions)  # and the answers to which the user went back
    notes: set[str] = set()
    while True:
        if step := steps.next_step(answers):
            answer = _ask(step, detected, answers, previous, notes)
        else:
            answer, values = _BACK, {}
            try:
                values = steps.build_values(answers, existing)
                apply_deepspeed_file(layers.resolve([Layer("these answers", values, {"": "these answers"})]))
                values = layers.relate_deepspeed_file(values, target)
            except AccelError as error:
                values = {}
                console.note(f"{str(error).rstrip('.')}. Change the last answer, or go back.")
            if values and (is_confirmed := _confirm(target, values, update=bool(suggestions))) is not None:
                return values if is_confirmed else None
        if answer is _BACK:
            key, value = answers.popitem()
            previous[key] = value
        elif step:
            answers[step.key] = answer


def _confirm(target: Path, values: dict[str, Any], *, update: bool) -> bool | None:
    """Show the file and ask whether to write it; return None to go back."""
    text = _render(target, values, update=update)
    Console().print("", Syntax(text, "yaml", background_color="default"))
    question = f"{'Replace' if target.exists() else 'Write'} {target}?"
    titles = ("Yes", "Back", "No, change nothing")
    return (True, None, False)[_select(question, titles, back=1, instruction=" ")]


def _render(target: Path, values: dict[str, Any], *, update: bool) -> str:
    """Return the text of a new file, or of the existing one with its comments and order."""
    data, comments = layers.to_data(values), schema.describe(values["launcher.kind"])
    if not update:
        return store.render(data, comments)
    text = store.read_text(target)
    return edit.edit_text(text, data, comments)


def _ask(
    step: Step,
    detected: Machine,
    answers: Mapping[str, Any],
    previous: Mapping[str, Any],
    notes: set[str],
) -> Any:
    """Ask one question and return its answer; each of the `notes` about missing choices is shown once."""
    suggestion = step.suggest(detected, answers, previous)
    choices, other = step.choices(detected, answers), []
    if step.question.offers:
        with console.spinner("Loading choices"):
            offers = step.question.offers(detected, steps.strip_sections(answers))
        if offers.note and offers.note not in notes:
            notes.add(offers.note)
            console.note(offers.note)
        choices, other = list(offers.choices), ["Type another value"]
        if choices and suggestion is not None and suggestion not in [choice.value for choice in choices]:
            choices.insert(0, Choice(suggestion, f"{steps.format_answer(suggestion)} (current)"))
    if not choices:
        return _ask_text(step, suggestion, answers, previous)
    titles = [*(choice.title for choice in choices), *other]
    values = [choice.value for choice in choices]
    default = values.index(suggestion) if suggestion in values else 0
    while True:
        index = _select(
            step.question.text,
            [*titles, "Back"] if answers else titles,
            default=default,
            back=len(titles) if answers else None,
        )
        if index == len(titles):
            return _BACK
        if index < len(choices):
            return values[index]
        if (answer := _ask_text(step, suggestion, answers, previous)) is not _BACK:
            return answer


def _select(
    text: str, titles: Sequence[str], *, default: int = 0, back: int | None = None, instruction: str = ""
) -> int:
    """Return the index of the selected line; the key `<` selects line `back`."""
    is_filtered = len(titles) > _FILTER_FROM
    # Indices as values: questionary replaces a value of None by the title.
    choices = [questionary.Choice(title, value=index) for index, title in enumerate(titles)]
    question = questionary.select(
        text,
        choices=choices,
        default=choices[default],
        style=_STYLE,
        instruction=instruction or ("(type to filter, arrows, Enter)" if is_filtered else "(arrows, Enter)"),
        use_search_filter=is_filtered,
        use_jk_keys=not is_filtered,
    )
    if back is not None:
        keys = KeyBindings()
        keys.add(_BACK_KEY, eager=True)(lambda event: event.app.exit(result=back))
        defaults = question.application.key_bindings or KeyBindings()
        question.application.key_bindings = merge_key_bindings([defaults, keys])
    return int(question.unsafe_ask())


def _ask_text(step: Step, suggestion: Any, answers: Mapping[str, Any], previous: Mapping[str, Any]) -> Any:
    """Ask for a typed answer; Enter gives the suggestion."""
    may_clear = steps.is_optional(step.annotation) and not step.find_problem(None, answers)
    clear = f"{steps.NONE} for none" if may_clear and previous.get(step.key) else ""
    hints = "; ".join(filter(None, [step.question.hint, clear, f"{_BACK_KEY} goes back"]))
    completions = list(step.question.complete()) if step.question.complete else []

    def parse(text: str) -> Any:
        return steps.parse_answer(text, step.annotation) if text.strip() else suggestion

    def check(text: str) -> bool | str:
        if text.strip() == _BACK_KEY:
            return True
        try:
            return step.find_problem(parse(text), answers) or True
        except ValueError as error:
            return str(error)

    question = questionary.text(
        step.question.text,
        instruction=f"({hints}) ",
        validate=check,
        validate_while_typing=False,
        style=_STYLE,
        completer=WordCompleter(completions, sentence=True, match_middle=True) if completions else None,
        # A placeholder needs not be erased before another answer is typed.
        placeholder=[("class:text", steps.format_answer(suggestion))],
    )
    for window in question.application.layout.find_all_windows():
        if window.height == 1:  # prompt_toolkit shows one line of an error
            window.height, window.wrap_lines = Dimension(min=1), Always()
    text: str = question.unsafe_ask()
    return _BACK if text.strip() == _BACK_KEY else parse(text)
