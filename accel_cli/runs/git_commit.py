"""The commit of a folder, read from the files of its repository: nothing is run, and no configuration is read."""

from __future__ import annotations

import re
from pathlib import Path

from accel_cli.runs.run_files import read_text

__all__ = ["read_git_commit"]

_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_REFERENCE = re.compile(r"ref: (refs/[\w./-]+)")


def read_git_commit(folder: Path) -> str:
    """Return the commit and the branch of the repository that a folder is in; empty outside of one.

    Changes that are not committed do not show.
    """
    top = next((each for each in (folder, *folder.parents) if (each / ".git").exists()), None)
    if top is None:
        return ""
    git = top / ".git"
    if git.is_file():  # a worktree or submodule
        git = top / read_text(git).removeprefix("gitdir:").strip()
    head = read_text(git / "HEAD").strip()
    if _COMMIT.fullmatch(head):
        return head
    match = _REFERENCE.fullmatch(head)
    if match is None or ".." in match[1]:
        return ""
    common = git / (read_text(git / "commondir").strip() or ".")
    commit = _read_reference(git, common, match[1])
    return f"{commit} ({match[1].removeprefix('refs/heads/')})" if commit else ""


def _read_reference(git: Path, common: Path, name: str) -> str:
    for folder in (git, common):
        if _COMMIT.fullmatch(text := read_text(folder / name).strip()):
            return text
    packed = re.search(
        rf"^([0-9a-f]{{40,64}}) {re.escape(name)}$", read_text(common / "packed-refs"), re.MULTILINE
    )
    return packed[1] if packed else ""
