"""One conversation: look at the machine, ask, show the YAML, and write it if the person agrees."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.syntax import Syntax

from accel_cli import console, layout, machine
from accel_cli.errors import UsageError
from accel_cli.launchers.base import Job
from accel_cli.machine import Machine
from accel_cli.profile import document, edit, layers, schema, store
from accel_cli.wizard import prompts

__all__ = ["converse"]

_INTERRUPTED = 130


def converse(target: Path) -> int:
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
        agreed = prompts.ask_all(found, before, written, show)
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
            layout.planned(
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
    return edit.edited(text, document.parse(text, str(target)), data, comments)


def _agree(target: Path, values: dict[str, Any], *, as_it_was: bool) -> bool | None:
    text = _text(target, values, as_it_was=as_it_was)
    Console().print(Syntax(text, "yaml", background_color="default"))
    return prompts.confirm(f"{'Replace' if target.exists() else 'Write'} {target}?")
