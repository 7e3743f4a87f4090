"""Editing a file in the person's own editor, until it is right or given up."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from accel_cli import console
from accel_cli.errors import UsageError

__all__ = ["edited"]


def edited(path: Path, check: Callable[[Path], None]) -> str | None:
    """The new text of a file, or None if the person changed nothing or gave up.

    Args:
        path: The file; it is not touched.
        check: Raises UsageError for a text that may not be kept.

    Raises:
        UsageError: There is no editor, it failed, or without a terminal the text has mistakes.
    """
    before = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder) / path.name
        scratch.write_text(before, encoding="utf-8")
        while True:
            _open(scratch)
            after = scratch.read_text(encoding="utf-8")
            if after == before:
                return None
            try:
                check(scratch)
            except UsageError as error:
                reason = str(error).replace(str(scratch), path.name)
                if not _again(reason):
                    return None
            else:
                return after


def _open(path: Path) -> None:
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    command = [*shlex.split(editor), str(path)]
    try:
        code = subprocess.run(command, check=False).returncode
    except OSError as error:
        raise UsageError(f"the editor {editor!r} cannot be started ({error.strerror}); set EDITOR") from None
    if code:
        raise UsageError(f"the editor {editor!r} ended with code {code}; nothing was changed")


def _again(reason: str) -> bool:
    """Show what is wrong and ask whether to go on editing."""
    if not sys.stdin.isatty():
        raise UsageError(f"{reason}\nThe file was left as it was.")
    console.error(reason)
    console.drop_typed()
    answer = input("Edit again? [Y/n] ")
    return not answer.strip().lower().startswith("n")
