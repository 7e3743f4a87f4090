"""The names of the files in a folder: those that git knows or does not ignore, else all but clutter."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path, PurePosixPath

from accel_cli.errors import UsageError
from accel_cli.launchers.sagemaker import patterns
from accel_cli.launchers.sagemaker.links import folders, is_below_link

__all__ = ["CLUTTER", "IGNORED", "Listing", "Passes", "listed", "walked"]

CLUTTER = "caches, environments and the like"
IGNORED = "ignored by git"
_MOST = 500_000
"""More files than this are no project, but a home or a disk."""
_ELSEWHERE = tuple(
    f"-u{name}" for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR")
)
"""What git's own hooks set, and means their repository and not the one of a folder."""
_NOT_FOUND = 127
_VENV_MARKS = frozenset({"pyvenv.cfg", "conda-meta"})

Passes = Callable[[str], bool]
"""Whether a name is asked for at all; a folder that is not, is not looked into."""


@dataclass
class Listing:
    """The names of files, from a folder on, and those of what was left out."""

    how: str
    """How they were found, in words."""
    names: set[str] = field(default_factory=set)
    left_out: dict[str, set[str]] = field(default_factory=dict)
    """What was left out, by the reason; the name of a folder stands for all that is in it."""
    notes: list[str] = field(default_factory=list)
    """What a person should read."""

    def leave_out(self, reason: str, name: str) -> None:
        """Keep in mind that a name is left out."""
        self.left_out.setdefault(reason, set()).add(name)


def listed(source: Path, passes: Passes) -> Listing:
    """The files of a folder: as git lists them in a work tree of it, else all that are there but clutter.

    Raises:
        UsageError: A folder cannot be read, or there are far too many files.
    """
    found = Listing("what git tracks, and what is new and not ignored")
    note = ""
    if any(os.path.lexists(folder / ".git") for folder in (source, *source.parents)):
        try:
            _ask_git(source, "", found)
        except _GitError as error:
            note = f"git does not list the files of {source}: {error}; so all but {CLUTTER} are taken"
        else:
            if found.names or set(found.left_out) - {IGNORED}:
                return found
            note = f"git lists no file of {source}, maybe since it ignores the folder; so all but {CLUTTER} are taken"
    found = Listing(f"all files but {CLUTTER}, since git does not list them", notes=[note] if note else [])
    found.names.update(walked(source, "", passes, lambda name: found.leave_out(CLUTTER, name)))
    return found


def walked(
    source: Path, start: str, passes: Passes, skipped: Callable[[str], None] = lambda _: None
) -> Iterator[str]:
    """All that is below a place in a folder, links as themselves, but no clutter.

    Raises:
        UsageError: A folder cannot be read, or there are far too many files.
    """
    if is_below_link(source, start, {}):
        return
    if not (source / start).is_dir() or (source / start).is_symlink():
        yield from [str(PurePosixPath(start))] if os.path.lexists(source / start) else []
        return
    ahead, count = [start], 0
    while ahead:
        for name, is_folder in _inside(source, ahead.pop()):
            if not passes(name):
                continue
            if patterns.is_clutter(name.rpartition("/")[2]) or (is_folder and _is_venv(source / name)):
                skipped(name)
            elif is_folder:
                ahead.append(name)
            else:
                yield name
                count += 1
                if count > _MOST:
                    raise UsageError(
                        f"there are more than {_MOST} files in {source}; set launcher.source_dir to the folder of the "
                        "project, or name what is not needed in launcher.exclude"
                    )


def _inside(source: Path, folder: str) -> Iterator[tuple[str, bool]]:
    """The names in a folder, from the source on, and whether each is a folder."""
    try:
        with os.scandir(source / folder) as entries:
            for entry in entries:
                yield str(PurePosixPath(folder, entry.name)), entry.is_dir(follow_symlinks=False)
    except OSError as error:
        raise UsageError(
            f"the folder {source / folder} cannot be read: {error.strerror}. Make it readable, or name it in "
            "launcher.exclude"
        ) from None


def _is_venv(folder: Path) -> bool:
    return any(os.path.lexists(folder / mark) for mark in _VENV_MARKS) or _ignores_itself(folder)


def _ignores_itself(folder: Path) -> bool:
    """As the folder does in which a job's model came home; without git, too."""
    try:
        return (folder / ".gitignore").read_bytes().strip() == b"*"
    except OSError:
        return False


class _GitError(Exception):
    """Git does not answer; the text says why."""


def _ask_git(source: Path, below: str, found: Listing) -> None:
    """Add what git says of a folder, and of the repositories in it.

    Raises:
        _GitError: Git is missing, or refuses.
    """
    folder = source / below
    tracked = _git(folder, found, "--cached")
    new = _git(folder, found, "--others", "--exclude-standard")
    for name in _ignored(folder):
        found.leave_out(IGNORED, str(PurePosixPath(below, name)))
    mine = {str(PurePosixPath(below, name)) for name in tracked}
    mine.update(_without_clutter(source, (str(PurePosixPath(below, name)) for name in new), found))
    for name in mine:
        path = source / name
        if path.is_symlink() or not path.is_dir():
            found.names.add(name)
        elif os.path.lexists(path / ".git"):
            _ask_git(source, name, found)
        elif _is_empty(path):
            found.notes.append(
                f"the submodule {name} is not checked out, and is not sent; git submodule update --init checks it out"
            )


def _is_empty(folder: Path) -> bool:
    try:
        return not any(folder.iterdir())
    except OSError:
        return False


def _ignored(folder: Path) -> list[str]:
    """What git ignores, for a person to know; it fails in a folder that is ignored and has files that are tracked."""
    try:
        return _git(folder, None, "--others", "--ignored", "--exclude-standard", "--directory")
    except _GitError:
        return []


def _without_clutter(source: Path, names: Iterable[str], found: Listing) -> Iterator[str]:
    """What git does not know yet, but for what nobody would add to it."""
    known: dict[str, bool] = {}
    for name in names:
        for part in chain(folders(name), [name]):
            if part not in known:
                is_venv = part != name and _is_venv(source / part)
                known[part] = is_venv or patterns.is_clutter(part.rpartition("/")[2])
            if known[part]:
                found.leave_out(CLUTTER, part)
                break
        else:
            yield name


def _git(folder: Path, found: Listing | None, *which: str) -> list[str]:
    """What `git ls-files` lists; its warnings become notes.

    Raises:
        _GitError: There is no git, or it refuses.
    """
    try:
        done = subprocess.run(
            ["env", *_ELSEWHERE, "git", "ls-files", "-z", *which],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    except OSError as error:
        raise _GitError(f"it cannot be run ({error.strerror})") from None
    if done.returncode == _NOT_FOUND:
        raise _GitError("there is no git here")
    said = done.stderr.decode(errors="replace").splitlines()
    if done.returncode:
        raise _GitError(said[0] if said else f"exit code {done.returncode}")
    if found is not None:
        found.notes += [f"git: {line}" for line in said if line.startswith("warning:")][:3]
    return [os.fsdecode(name.rstrip(b"/")) for name in done.stdout.split(b"\0") if name]
