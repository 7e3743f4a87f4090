"""Where the links in a folder point: another place in it, which is kept, or out of it, which cannot be sent."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

__all__ = ["folders", "is_below_link", "kept", "meant"]


def folders(name: str) -> list[str]:
    """The folders that a file is in, the outermost first."""
    return [name[:number] for number, letter in enumerate(name) if letter == "/"]


def is_below_link(source: Path, name: str, known: dict[str, bool]) -> bool:
    """Whether a file is in a folder that is a link, and so is another file.

    Args:
        source: The folder that is sent.
        name: The file, from there on.
        known: Which folders are links, as far as it was asked before.
    """
    for folder in folders(name):
        if folder not in known:
            known[folder] = (source / folder).is_symlink()
        if known[folder]:
            return True
    return False


def meant(source: Path, name: str) -> str | None:
    """What a link points to, by its path from the folder that is sent; None if that is not there, or outside."""
    there = Path(
        os.path.realpath(source / name)
    )  # unlike Path.resolve, it comes to an end where links go round
    said = os.path.relpath(there, source)
    return said if os.access(there, os.F_OK) and not _leads_out(said) else None


def kept(source: Path, name: str) -> str:
    """The text of a link that points to the same place wherever the folder is put."""
    text, folder = (source / name).readlink(), PurePosixPath(name).parent
    if not text.is_absolute() and not _leads_out(os.path.normpath(folder / text)):
        return str(text)
    there = meant(source, name)
    assert there is not None  # others are refused before
    return os.path.relpath(there, folder)


def _leads_out(path: str) -> bool:
    return path == ".." or path.startswith("../")
