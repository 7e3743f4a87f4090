"""What is sent for a job, in one folder: its source, accel itself, what runs first, and what that is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accel_cli
from accel_cli.errors import AccelError
from accel_cli.launchers.sagemaker import archive, wheels
from accel_cli.launchers.sagemaker.archive import Archive
from accel_cli.launchers.sagemaker.files import Chosen, File
from accel_cli.launchers.sagemaker.patterns import is_clutter

__all__ = ["Bundle", "accel_files", "make"]

_PACKAGES = ("accel_cli", "accel_runtime")
_ENTRY = "accel_cli/container/entry.py"


@dataclass(frozen=True)
class Bundle:
    """A folder that is sent as it is."""

    folder: Path
    source: Archive
    notes: tuple[str, ...] = ()
    """What a person should read."""

    @property
    def files(self) -> dict[str, Path]:
        """All there is to send, by the path from the folder on."""
        found = (path for path in self.folder.rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix(): path for path in sorted(found)}

    @property
    def size(self) -> int:
        """All bytes together."""
        return sum(path.stat().st_size for path in self.files.values())


def make(
    run: Mapping[str, Any], chosen: Chosen | None, into: Path, python: str | None, *, machine: str = "x86_64"
) -> Bundle:
    """Put together what a job is sent.

    Args:
        run: The content of `job.json`.
        chosen: The files of the source; None for what accel itself brings along.
        into: An empty folder.
        python: The container's Python, as `3.12`; None where it is not known.
        machine: The container's processors, `x86_64` or `aarch64`.

    Raises:
        UsageError: A file changes all the time, cannot be read, or is gone.
        AccelError: The folder cannot be written, or accel is not whole here.
    """
    accel = accel_files()
    source = archive.write(chosen or Chosen(into, ()), into / "source.tar.gz")
    archive.write(accel, into / "accel.tar.gz")
    try:
        shutil.copyfile(accel.source / _ENTRY, into / "entry.py")
        # Arguments need not be text: json escapes what is none, and brings it back.
        (into / "job.json").write_text(json.dumps(run, indent=1), encoding="ascii")
        note = wheels.fetch(into / "wheels", python, machine=machine)
    except OSError as error:
        raise AccelError(f"{into} cannot be written: {error.strerror or error}") from None
    return Bundle(into, source, (note,) if note else ())


def accel_files() -> Chosen:
    """The accel that is running.

    Raises:
        AccelError: Parts of it are not where they should be.
    """
    root = Path(str(accel_cli.__file__)).resolve().parent.parent
    for part in (*_PACKAGES, _ENTRY):
        if not (root / part).exists():
            raise AccelError(f"there is no {part} in {root}: this accel is not whole; install it anew")
    names = sorted(name for package in _PACKAGES for name in _inside(root, package))
    return Chosen(root, tuple(File(name, (root / name).stat().st_size) for name in names))


def _inside(root: Path, folder: str) -> Iterator[str]:
    for path in (root / folder).iterdir():
        if path.name.startswith(".") or is_clutter(path.name):
            continue
        name = f"{folder}/{path.name}"
        if path.is_dir():
            yield from _inside(root, name)
        elif path.is_file():
            yield name
