"""Which files of a folder are sent with a job, and whether they can be."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from accel_cli import console
from accel_cli.errors import UsageError
from accel_cli.launchers.sagemaker import links, patterns
from accel_cli.launchers.sagemaker.listing import Listing, Passes, listed, walked
from accel_cli.launchers.sagemaker.patterns import Pattern

__all__ = ["Chosen", "File", "check_holds", "check_size", "chosen", "shown", "summary"]

_EXCLUDED = "named in launcher.exclude"
_PRIVATE = "may hold secrets"
_GONE = "tracked by git, and not there"
_SPECIAL = "no file: a pipe, a socket or a device"
_UNREADABLE = "cannot be read"
_LOST = "links out of the folder, or to nothing"
_MB = 10**6
_FEW = 5


@dataclass(frozen=True)
class File:
    """One file or link."""

    name: str
    """Its path from the folder that is sent."""
    size: int = 0
    link: str = ""
    """Where it points, if it is a link."""


@dataclass(frozen=True)
class Chosen:
    """The files of a folder that are sent, by name, and what is to be said of the others."""

    source: Path
    files: tuple[File, ...]
    how: str = ""
    """How they were found, in words."""
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of what is not sent, by the reason."""
    notes: tuple[str, ...] = ()
    """What a person should read before they are sent."""

    @property
    def size(self) -> int:
        """All bytes together."""
        return sum(file.size for file in self.files)

    @property
    def largest(self) -> list[File]:
        """The five largest files, the largest first."""
        return sorted(self.files, key=lambda file: (-file.size, file.name))[:_FEW]


def chosen(source: Path, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Chosen:
    """Choose the files of a folder: what git does not ignore, and `include`, without `exclude` and secrets.

    Args:
        source: The folder.
        include: Patterns of files that are sent although git ignores them, or although they may hold secrets.
        exclude: Patterns of files that are not sent, whatever else holds.

    Raises:
        UsageError: A pattern is none, or means nothing that is there; a file cannot be read; a link leads out of the
            folder or to nothing.
    """
    source = source.resolve()
    if not source.is_dir():
        raise UsageError(f"launcher.source_dir: there is no folder {source}")
    wanted, unwanted = _parsed("include", include), _parsed("exclude", exclude)
    excluded: set[str] = set()

    def passes(name: str) -> bool:
        if any(pattern.matches(name) for pattern in unwanted):
            excluded.add(name)
            return False
        return True

    found = listed(source, passes)
    names = found.names | _included(source, wanted, passes, found.names)
    named = [pattern for pattern in wanted if pattern.names_a_secret]
    files = _taken(source, filter(passes, sorted(names, key=os.fsencode)), named, found)
    if excluded:
        found.left_out[_EXCLUDED] = excluded
    left_out = {reason: tuple(sorted(names)) for reason, names in found.left_out.items()}
    return Chosen(source, tuple(files), found.how, left_out, (*found.notes, *_notes(source, files, left_out)))


def check_holds(chosen: Chosen, target: str | Path) -> None:
    """Refuse to go on without a file, or a folder, that the job needs.

    Args:
        chosen: The files that are sent.
        target: The file or folder, by its path from the folder that is sent.

    Raises:
        UsageError: It is not sent.
    """
    name = _name(chosen.source, target)
    # It may be reached through a link to a folder of the tree.
    if {name, links.meant(chosen.source, name)} & _there(chosen.files):
        return
    if name.split("/")[0] == "..":
        raise UsageError(
            f"{shown(str(target))} is not in {chosen.source}, the folder that is sent; set launcher.source_dir to a "
            "folder that has it"
        )
    if not (chosen.source / name).exists():
        raise UsageError(f"there is no {shown(name)} in {chosen.source}, the folder that is sent")
    raise UsageError(f"{shown(name)} is not sent: {_why(chosen, name)}")


def check_size(chosen: Chosen, limit_mb: int) -> None:
    """Refuse to send more than was allowed.

    Raises:
        UsageError: The files are larger, all together; the message names the largest.
    """
    if chosen.size <= limit_mb * _MB:
        return
    largest = ", ".join(f"{shown(file.name)} ({console.size(file.size)})" for file in chosen.largest)
    raise UsageError(
        f"the {len(chosen.files)} files in {chosen.source} have {console.size(chosen.size)}, and "
        f"launcher.max_upload_size is {limit_mb} MB. The largest are {largest}. Name what the job does not need in "
        "launcher.exclude or in .gitignore, give it data as an input channel (launcher.inputs), or raise "
        "launcher.max_upload_size"
    )


def summary(chosen: Chosen) -> list[str]:
    """What is sent and what is not, for a person: lines."""
    return [
        f"{len(chosen.files)} files of {chosen.source}, {console.size(chosen.size)}: {chosen.how}",
        *(f"  {console.size(file.size):>9}  {shown(file.name)}" for file in chosen.largest),
        *(f"not sent, {reason}: {_several(names)}" for reason, names in chosen.left_out.items()),
    ]


def shown(name: str) -> str:
    """A name as a person can read it, whatever is in it."""
    return name if name.isprintable() else ascii(name)


def _parsed(key: str, said: Sequence[str]) -> list[Pattern]:
    found = []
    for text in said:
        try:
            found.append(patterns.parsed(text))
        except ValueError as error:
            raise UsageError(f"launcher.{key}: {error}; it got {text!r}") from None
    return found


def _included(source: Path, wanted: Sequence[Pattern], passes: Passes, known: set[str]) -> set[str]:
    """What the patterns of `include` mean.

    Raises:
        UsageError: One of them means nothing that is there.
    """
    everywhere = set(walked(source, "", passes)) if any(pattern.anywhere for pattern in wanted) else set()
    found = set()
    for pattern in wanted:
        there = set(walked(source, pattern.start, passes)) if pattern.start else set()
        meant = {name for name in there | everywhere | known if pattern.matches(name)}
        if not meant:
            raise UsageError(
                f"launcher.include: {pattern.text} means no file in {source} (links are not followed)"
            )
        found |= meant
    return found


def _taken(source: Path, names: Iterable[str], named: Sequence[Pattern], found: Listing) -> list[File]:
    """Those of the files that can be sent; the others are left out, each with its reason.

    Raises:
        UsageError: A person has to decide about one.
    """
    files = []
    known: dict[str, bool] = {}
    for name in names:
        secret = patterns.may_be_secret(name) and not any(pattern.matches(name) for pattern in named)
        taken = _PRIVATE if secret else _looked_at(source, name, known)
        if isinstance(taken, File):
            files.append(taken)
        else:
            found.leave_out(taken, name)
    _refuse(source, found.left_out)
    return files


def _looked_at(source: Path, name: str, known: dict[str, bool]) -> File | str:
    """A file, or why it is not sent."""
    path = source / name
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return _GONE
    except PermissionError:  # of the folder, which may be listed but not entered
        return _UNREADABLE
    if links.is_below_link(source, name, known):
        return _GONE
    if stat.S_ISLNK(status.st_mode):
        return File(name, link=links.kept(source, name)) if links.meant(source, name) else _LOST
    if not stat.S_ISREG(status.st_mode):
        return _SPECIAL
    readable = os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids)
    return File(name, status.st_size) if readable else _UNREADABLE


def _refuse(source: Path, left_out: Mapping[str, set[str]]) -> None:
    """What is not left out in silence."""
    if _UNREADABLE in left_out:
        raise UsageError(
            f"cannot be read in {source}: {_several(sorted(left_out[_UNREADABLE]))}. Make it readable, or name it in "
            "launcher.exclude"
        )
    if _LOST in left_out:
        lost = sorted(left_out[_LOST])
        pointing = ", ".join(
            f"{shown(name)} -> {shown(str((source / name).readlink()))}" for name in lost[:_FEW]
        )
        raise UsageError(
            f"{len(lost)} link(s) in {source} lead out of it or to nothing, and would be broken in the job: {pointing}. "
            "Name them in launcher.exclude, and give the job large data as an input channel (launcher.inputs)"
        )


def _notes(source: Path, files: Sequence[File], left_out: Mapping[str, tuple[str, ...]]) -> list[str]:
    """What a person should know before files are sent."""
    notes = []
    if _PRIVATE in left_out:
        notes.append(
            f"not sent, since it may hold secrets: {_several(left_out[_PRIVATE])}; name in launcher.include what the job "
            "needs all the same"
        )
    if _SPECIAL in left_out:
        notes.append(f"not sent, since it is {_SPECIAL}: {_several(left_out[_SPECIAL])}")
    there = _there(files)
    broken = [file.name for file in files if file.link and links.meant(source, file.name) not in there]
    if broken:
        notes.append(f"links to what is not sent, so broken in the job: {_several(broken)}")
    return notes


def _there(files: Sequence[File]) -> set[str]:
    """All names in the job: those of files, and of the folders they are in."""
    return {file.name for file in files}.union(*(links.folders(file.name) for file in files), {"."})


def _name(source: Path, target: str | Path) -> str:
    """A file by its path from the folder that is sent; the folder may have been reached by a link, the file may be one."""
    path = Path(target)
    return (
        os.path.relpath(path.parent.resolve() / path.name, source)
        if path.is_absolute()
        else os.path.normpath(path)
    )


def _why(chosen: Chosen, name: str) -> str:
    """Why a file is not among the chosen, and what to do."""
    itself = {name, *links.folders(name)}
    reason = next((reason for reason, names in chosen.left_out.items() if itself & set(names)), "")
    if reason == _EXCLUDED:
        return f"it is {reason}"
    if not reason and (chosen.source / name).is_dir():
        return "no file in it is"
    return f"{reason or 'it is not among the files that are taken'}. Name it in launcher.include"


def _several(names: Sequence[str]) -> str:
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return ", ".join(map(shown, names[:_FEW])) + more
