"""Which checkpoints a directory holds, whole or not, and what else looks like one. Needs no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from accel_runtime.checkpoint import folder
from accel_runtime.checkpoint.errors import CheckpointError, RequestError
from accel_runtime.checkpoint.folder import Found
from accel_runtime.checkpoint.manifest import NAME, UNFINISHED

__all__ = ["Entry", "Survey", "newest", "survey", "whole"]

_NUMBERED = re.compile(r"checkpoint_(\d+)")
_LEFTOVER = re.compile(r"\.(.+)\.(saving-|replaced-|removing).*")
_ACCELERATE = ("random_states_*.pkl", "optimizer.bin", "scheduler.bin", "sampler.bin", "pytorch_model.bin")
"""Files that Accelerate's `save_state` writes, and ours does not."""


@dataclass(frozen=True)
class Entry:
    """A directory that is a checkpoint, or should be one."""

    path: Path
    """Its name, also where a crash has left it beside that name."""
    found: Found | None
    """What it is, where it is whole as far as the manifest and the sizes of files tell."""
    problem: str = ""
    """Else what is wrong with it."""
    foreign: bool = False
    """Whether Accelerate wrote it."""

    @property
    def number(self) -> int | None:
        """N of `checkpoint_N`."""
        matched = _NUMBERED.fullmatch(self.path.name)
        return int(matched[1]) if matched else None


@dataclass(frozen=True)
class Survey:
    """What a directory holds."""

    directory: Path
    entries: list[Entry]
    """The oldest first."""
    leftovers: list[Path]
    """What saves that run now, or have ended before their time, have written."""


def survey(directory: Path) -> Survey:
    """Look at a project's directory, one that holds checkpoints, or a checkpoint.

    Raises:
        RequestError: There is no such directory.
    """
    if not directory.is_dir():
        found = _entry(directory)
        if found.found is None:
            raise RequestError(
                f"{directory} is no directory" if directory.exists() else f"{directory} is not there"
            )
        return Survey(directory.parent, [found], [])
    if _looks_like_one(directory):
        return Survey(directory.parent, [_entry(directory)], [])
    within = directory / "checkpoints"
    directory = within if within.is_dir() else directory
    inside = sorted(path for path in directory.iterdir() if path.is_dir())
    leftovers = [path for path in inside if _LEFTOVER.fullmatch(path.name)]
    names = {path for path in inside if path not in leftovers and _looks_like_one(path)}
    names |= {
        directory / match[1]
        for path in leftovers
        if (match := _LEFTOVER.fullmatch(path.name)) and _left(path)
    }
    return Survey(directory, sorted(map(_entry, names), key=_age), leftovers)


def whole(directory: Path) -> Found:
    """The checkpoint that is meant: this one, or the newest in the directory that is whole.

    Raises:
        RequestError: There is none.
        CheckpointError: It is damaged, or all are.
    """
    there = _some(directory)
    if len(there) == 1 and there[0].found is None:
        raise (RequestError if there[0].foreign else CheckpointError)(there[0].problem)
    fine = [entry.found for entry in there if entry.found is not None]
    if not fine:
        told = "".join(f"\n  {entry.problem}" for entry in there)
        raise CheckpointError(f"{directory} has no checkpoint that is whole:{told}")
    return fine[-1]


def newest(directory: Path) -> Entry:
    """The checkpoint that is meant: this one, or the newest in the directory, whole or not.

    Raises:
        RequestError: There is none, or Accelerate wrote it.
    """
    there = _some(directory)
    if there[-1].foreign:
        raise RequestError(there[-1].problem)
    return there[-1]


def _some(directory: Path) -> list[Entry]:
    found = survey(directory)
    if not found.entries:
        raise RequestError(f"{found.directory} holds no checkpoint")
    return found.entries


def _entry(path: Path) -> Entry:
    if _is_accelerates(path):
        why = f"{path} was written by Accelerate, without checksums: accelerator.load_state() loads it"
        return Entry(path, None, why, foreign=True)
    try:
        return Entry(path, folder.find(path))
    except CheckpointError as error:
        return Entry(path, None, str(error))


def _age(entry: Entry) -> tuple[int, str]:
    saved_at = entry.found.manifest.saved_at if entry.found else ""
    return (-1 if entry.number is None else entry.number), saved_at


def _looks_like_one(path: Path) -> bool:
    return (path / NAME).is_file() or _NUMBERED.fullmatch(path.name) is not None or _is_accelerates(path)


def _left(path: Path) -> bool:
    """Whether a crash has left a whole checkpoint there."""
    return (path / NAME).is_file() and not (path / UNFINISHED).exists()


def _is_accelerates(path: Path) -> bool:
    return not (path / NAME).exists() and any(next(path.glob(name), None) for name in _ACCELERATE)
