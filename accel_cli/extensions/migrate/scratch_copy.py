"""A copy of a user's folder in which a script can run: small files are copied, large ones are links."""

from __future__ import annotations

import os
import shutil
from collections import deque
from pathlib import Path

from accel_cli.errors import UsageError

__all__ = ["copy_folder", "find_root", "link_siblings"]

_MAX_FILE_BYTES = 16 << 20
_MAX_BYTES = 256 << 20
"""Larger files, and those beyond this sum, are links to the user's files."""
_MAX_ENTRIES = 200_000
_MAX_SIBLINGS = 1000
_SKIPPED = {"__pycache__", "node_modules", "site-packages"}


def find_root(script: Path, folder: Path) -> Path:
    """Return the folder to copy: the current one if the script is in it, else that of the script."""
    folder, script = folder.resolve(), script.resolve()
    is_project = folder not in {Path.home().resolve(), Path(folder.anchor)}
    return folder if is_project and script.is_relative_to(folder) else script.parent


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder without hidden folders and environments, the files near its top first.

    Raises:
        UsageError: The folder has too many files, or cannot be read.
    """
    remaining, count = _MAX_BYTES, 0
    folders = deque([(source, target)])
    try:
        while folders:
            folder, copy = folders.popleft()
            copy.mkdir()
            entries = _list_entries(folder)
            count += len(entries)
            if count > _MAX_ENTRIES:
                raise UsageError(
                    f"Cannot verify the script: {source} has more than {_MAX_ENTRIES} files, which cannot be copied. Move the data "
                    "to another folder, with a link to it."
                )
            for entry in entries:
                path = copy / entry.name
                if entry.is_dir(follow_symlinks=False):
                    if not _is_skipped(entry):
                        folders.append((Path(entry.path), path))
                elif entry.is_symlink() or (entry.is_file() and not _is_copied(entry, remaining)):
                    path.symlink_to(os.path.realpath(entry.path))
                elif entry.is_file():
                    shutil.copy2(entry.path, path)
                    remaining -= entry.stat().st_size
    except OSError as error:
        raise UsageError(
            f"Cannot verify the script: {source} cannot be copied to {target} ({error}). Check permissions and free space."
        ) from None


def link_siblings(source: Path, copy: Path) -> None:
    """Link what is beside a folder, such as `../data`, beside its copy; nothing if that is too much."""
    entries = [entry for entry in _list_entries(source.parent) if not entry.name.startswith(".")]
    if len(entries) <= _MAX_SIBLINGS:
        for entry in entries:
            if entry.name != source.name:
                (copy.parent / entry.name).symlink_to(os.path.realpath(entry.path))


def _list_entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder; none if it cannot be read."""
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda entry: entry.name)
    except PermissionError:
        return []


def _is_skipped(entry: os.DirEntry[str]) -> bool:
    return entry.name in _SKIPPED or entry.name.startswith(".") or Path(entry.path, "pyvenv.cfg").exists()


def _is_copied(entry: os.DirEntry[str], remaining: int) -> bool:
    return entry.stat().st_size <= min(_MAX_FILE_BYTES, remaining) and os.access(entry.path, os.R_OK)
