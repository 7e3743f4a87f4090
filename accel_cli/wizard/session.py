"""The wizard's dialog: ask the questions, show the YAML, and write it after confirmation."""

from __future__ import annotations

import os
import shutil
import textwrap
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import questionary
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.filters import Always
from prompt_toolkit.key_binding import KeyBindings, merge_key_bindings
from prompt_toolkit.layout import Dimension, ScrollbarMargin
from questionary import Style
from questionary.prompts.common import InquirerControl
from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

from accel_cli import console
from accel_cli.errors import AccelError, UsageError
from accel_cli.launchers.launcher import LaunchSpec
from accel_cli.launchers.sections import Choice
from accel_cli.planning import machine
from accel_cli.planning.machine import Machine
from accel_cli.profile import edit, layers, planner, schema, store
from accel_cli.profile.layers import Layer
from accel_cli.wizard import questions
from accel_cli.wizard.questions import Step
from accel_runtime.environment.accelerate.sharding import EngineWords
from accel_runtime.environment.engines import ENGINES

__all__ = ["ask_sharding", "run_wizard"]

_INTERRUPTED = 130
_BACK = object()
"""The answer that returns to the previous question."""
_BACK_KEY = "<"
_GOES_BACK = f"{_BACK_KEY} goes back"
_FILTER_FROM = 12
"""With more choices, typing filters them."""
_MAX_LINES = 12
"""Lines of a list on the screen; a longer one scrolls."""
_MIN_WIDTH, _INDENT = 10, 3
"""The least width of wrapped text, and the columns of the pointer before a choice."""
_WIDE = 79
_INSTANT_S = 0.3
"""If detecting the hardware takes longer, the first question is shown meanwhile."""
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
    is_edited = target.is_file()
    purpose = "Editing {}: Enter keeps each value" if is_edited else "Creating {}"
    path = console.abbreviate_home(str(target))
    Console().print(Text(f"{purpose.format(path)}; Ctrl-C changes nothing."), highlight=False)
    try:
        detection, answers = _Detection(), dict[str, Any]()
        if not detection.is_done(_INSTANT_S) and (step := questions.next_step({})):
            # Importing torch takes seconds; this question needs only what shows without it.
            answers[step.key] = _ask(step, detection.guess(), {}, _read_kind(target), set())
        detected = detection.finish()
        suggestions, existing = _load_existing(target, detected)
        values = _ask_all(target, detected, suggestions, existing, answers)
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


class _Detection:
    """The detection of the hardware in another thread, since importing torch takes seconds."""

    def __init__(self) -> None:
        self._result: Machine | None = None
        # A daemon, so that Ctrl-C does not wait for torch.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._result = machine.detect(os.environ)

    def is_done(self, timeout_s: float) -> bool:
        """Wait for the result up to a time; return False if it is not there then."""
        self._thread.join(timeout_s)
        return self._result is not None

    def guess(self) -> Machine:
        """Return what is known of this machine without torch."""
        return machine.detect_without_torch(os.environ)

    def finish(self) -> Machine:
        """Wait for the hardware, and print it."""
        if not self.is_done(0):
            with console.spinner("Detecting hardware (imports torch once)"):
                self._thread.join()
        if self._result is None:
            raise AccelError(
                "Cannot detect the hardware: see the error above. Use accel config set KEY=VALUE."
            )
        console.show(f"[bold]This machine:[/bold] {self._result.summary}")
        console.print_notes(self._result.problems)
        return self._result


def _read_kind(target: Path) -> dict[str, Any]:
    """Return the kind of the launcher of an existing profile, for the first question."""
    try:
        return dict(layers.read_file(target, "file").values) if target.is_file() else {}
    except UsageError:
        return {}  # reported after the detection


def ask_sharding(file: Path, engine: EngineWords) -> str:
    """Ask for the section of the profile that the settings of an engine in a file become."""
    titles = (
        "fully_shard of torch (recommended): nothing to install; what it lacks is listed",
        f"{engine.title}: every setting stays, and scripts need the package {ENGINES[engine.name].package}",
    )
    return ("fully_shard", engine.name)[
        _select(f"{file} uses {engine.title}. Which library shards models?", titles)
    ]


def _load_existing(target: Path, detected: Machine) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of the profile at `target` and those its file sets; both empty if it cannot run here."""
    if not target.is_file():
        return {}, {}
    try:
        layer = layers.read_file(target, "file")
        resolved = layers.resolve([layer]).complete_engine()
        profile = resolved.profile
        if profile.launcher.location != "job":
            # The plan is never run: it fails if the answers suggested from this file could not launch.
            planner.build_plan(
                profile.launcher,
                LaunchSpec("train.py", (), "script", profile.settings, {}, {}, detected, python="python"),
                resolved.engine,
            )
    except UsageError as error:
        console.note(f"cannot use {target} on this machine, so the wizard suggests defaults: {error}")
        return {}, {}
    return questions.complete_suggestions(layers.flatten(profile.data())), dict(layer.values)


def _ask_all(
    target: Path,
    detected: Machine,
    suggestions: Mapping[str, Any],
    existing: Mapping[str, Any],
    answers: dict[str, Any],
) -> dict[str, Any] | None:
    """Ask all questions, and return the confirmed values of the profile by dotted key; None if they are discarded.

    `suggestions` are the values of the existing profile; `existing` are those that its file sets, which are kept if no
    question asks for them, and `answers` those that were given before.
    """
    previous = dict(suggestions)  # and the answers to which the user went back
    notes: set[str] = set()
    while True:
        if step := questions.next_step(answers):
            answer = _ask(step, detected, answers, previous, notes)
        else:
            answer, values = _BACK, {}
            try:
                values = questions.build_values(answers, existing)
                layers.resolve([Layer("these answers", values, {"": "these answers"})]).complete_engine()
                values = layers.relate_files(values, target)
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
    Console().print("", Syntax(text, "yaml", background_color="default", word_wrap=True))
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
            offers = step.question.offers(detected, questions.strip_sections(answers))
        if offers.note and offers.note not in notes:
            notes.add(offers.note)
            console.note(offers.note)
        choices, other = list(offers.choices), ["Type another value"]
        if choices and suggestion is not None and suggestion not in [choice.value for choice in choices]:
            choices.insert(0, Choice(suggestion, f"{questions.format_answer(suggestion)} (current)"))
    if not choices:
        return _ask_text(step, suggestion, detected, answers, previous)
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
        if (answer := _ask_text(step, suggestion, detected, answers, previous)) is not _BACK:
            return answer


def _select(
    text: str, titles: Sequence[str], *, default: int = 0, back: int | None = None, instruction: str = ""
) -> int:
    """Return the index of the selected line; the key `<` selects line `back`."""
    is_filtered = len(titles) > _FILTER_FROM
    filtering = f"({len(titles)} choices: type to filter, arrows, Enter)"
    instruction = instruction or (filtering if is_filtered else "(arrows, Enter)")
    titles = [*map(_wrap_title, titles)]
    text = _wrap_before_answers(text, [instruction, *titles])
    # Indices as values: questionary replaces a value of None by the title.
    choices = [questionary.Choice(title, value=index) for index, title in enumerate(titles)]
    question = questionary.select(
        text,
        choices=choices,
        default=choices[default],
        style=_STYLE,
        instruction=instruction,
        use_search_filter=is_filtered,
        use_jk_keys=not is_filtered,
    )
    for window in question.application.layout.find_all_windows():
        if isinstance(window.content, InquirerControl):  # the others scroll
            window.height = Dimension(max=_MAX_LINES)
            window.right_margins = [ScrollbarMargin()]
    if back is not None:
        keys = KeyBindings()
        keys.add(_BACK_KEY, eager=True)(lambda event: event.app.exit(result=back))
        defaults = question.application.key_bindings or KeyBindings()
        question.application.key_bindings = merge_key_bindings([defaults, keys])
    return int(question.unsafe_ask())


def _wrap_title(title: str) -> str:
    """Return a choice with line breaks between words, and its further lines below its first one."""
    width = max(_MIN_WIDTH, shutil.get_terminal_size().columns - _INDENT - 1)
    return f"\n{' ' * _INDENT}".join(textwrap.wrap(title, width) or [title])


def _wrap_before_answers(text: str, answers: Sequence[str]) -> str:
    """Return a question with line breaks between words; one of the answers, which follows it, may need the next line."""
    width = max(_MIN_WIDTH, shutil.get_terminal_size().columns - 1)
    lines = textwrap.wrap(f"? {text}", width)
    # On a wide screen the instruction stays beside the question, and a long answer may be broken.
    answers = answers[:1] if width >= _WIDE else answers
    longest = max(len(line) for answer in answers for line in answer.splitlines()[:1])
    return "\n".join([*lines, " "] if len(lines[-1]) + 1 + longest > width else lines)[2:]


def _wrap_question(text: str, instruction: str) -> tuple[str, str]:
    """Return a question and its instruction with line breaks between words."""
    mark = "\0"
    width = max(_MIN_WIDTH, shutil.get_terminal_size().columns - 1)
    unbroken = instruction.replace(_GOES_BACK, _GOES_BACK.replace(" ", "\N{NO-BREAK SPACE}"))
    lines = textwrap.wrap(f"? {text}{mark} {unbroken}", width, break_on_hyphens=False)
    wrapped = "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")
    question, _, rest = wrapped[2:].partition(mark)
    return question, rest.removeprefix(" ")


def _ask_text(
    step: Step, suggestion: Any, detected: Machine, answers: Mapping[str, Any], previous: Mapping[str, Any]
) -> Any:
    """Ask for a typed answer; Enter gives the suggestion."""
    may_clear = step.may_clear(detected, answers)
    clear = f"{questions.NONE} for none" if may_clear and previous.get(step.key) else ""
    hints = "; ".join(filter(None, [step.question.hint, clear, _GOES_BACK]))
    completions = list(step.question.complete()) if step.question.complete else []

    def parse(text: str) -> Any:
        return questions.parse_answer(text, step.annotation) if text.strip() else suggestion

    def check(text: str) -> bool | str:
        if text.strip() == _BACK_KEY:
            return True
        try:
            value = parse(text)
            if value is None and text.strip() and not may_clear:
                return f"expected a value: {questions.NONE} cannot be chosen here"
            return step.find_problem(value, answers) or True
        except ValueError as error:
            return str(error)

    text, instruction = _wrap_question(step.question.text, f"({hints})")
    question = questionary.text(
        text,
        instruction=instruction,
        validate=check,
        validate_while_typing=False,
        style=_STYLE,
        completer=WordCompleter(completions, sentence=True, match_middle=True) if completions else None,
        # A placeholder needs not be erased before another answer is typed.
        placeholder=[("class:text", questions.format_answer(suggestion))],
    )
    for window in question.application.layout.find_all_windows():
        if window.height == 1:  # prompt_toolkit shows one line of an error
            window.height, window.wrap_lines = Dimension(min=1), Always()
    typed: str = question.unsafe_ask()
    return _BACK if typed.strip() == _BACK_KEY else parse(typed)
