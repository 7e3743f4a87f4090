"""One conversation: look at the machine, ask, show the YAML, and write it if the person agrees."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.syntax import Syntax

from accel_cli import console, layout, machine
from accel_cli.errors import UsageError
from accel_cli.launchers.base import Job
from accel_cli.machine import Machine
from accel_cli.profile import document, layers, store
from accel_cli.profile.schema import Profile
from accel_cli.wizard import prompts

__all__ = ["converse"]

_INTERRUPTED = 130


def converse(target: Path) -> int:
    """Fill the profile at `target` by questions.

    Returns:
        0, or 130 if the person pressed Ctrl-C; nothing is written then, nor without a yes.
    """
    try:
        with Console().status("Looking at this machine (this imports torch once)"):
            found = machine.detect(os.environ)
        console.show(f"[bold]This machine:[/bold] {found.summary}")
        for problem in found.problems:
            console.note(problem)
        agreed = prompts.ask_all(found, _before(target, found), lambda profile: _agree(profile, target))
    except KeyboardInterrupt:
        console.note("nothing was written")
        return _INTERRUPTED
    if agreed is None:
        console.note("nothing was written")
        return 0
    store.write(target, store.render(agreed.data()))
    console.note(f"{target} is written; next: accel launch train.py")
    return 0


def _before(target: Path, found: Machine) -> dict[str, Any]:
    """What the file said until now, by dotted key, if this machine could run it."""
    if not target.is_file():
        return {}
    try:
        profile = layers.resolve([layers.file(target, "file")]).profile
        if profile.start.runs != "job":
            # A plan that is never run: it tells whether Enter on every question would launch.
            layout.planned(
                profile.start,
                Job("train.py", (), "script", profile.settings, {}, {}, found, python="python"),
            )
    except UsageError as error:
        console.note(f"{target} cannot be used here, so the questions start anew: {error}")
        return {}
    return layers.flat(profile.data())


def _agree(profile: Profile, target: Path) -> bool | None:
    Console().print(Syntax(document.dump(profile.data()), "yaml", background_color="default"))
    return prompts.confirm(f"{'Replace' if target.exists() else 'Write'} {target}?")
