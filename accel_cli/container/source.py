"""The source of a job in its container: unpacked, with the folders linked that the platform keeps."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path, PurePosixPath

from accel_cli.container.problem import ContainerError

__all__ = ["link", "unpack"]


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the source into a folder of its own; what would leave it is refused.

    Raises:
        ContainerError: The archive is broken, or not one of a source tree.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        with tarfile.open(archive) as tar:
            if hasattr(tarfile, "data_filter"):
                tar.extractall(folder, filter="data")
            else:
                tar.extractall(folder, members=[_checked(member) for member in tar])  # noqa: S202 - they are
    except (OSError, EOFError, tarfile.TarError) as error:
        raise ContainerError(f"{archive.name} cannot be unpacked: {error}") from error


def _checked(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """A member that stays in its folder: what `data_filter` does, which Pythons before 3.10.12 and 3.11.4 lack."""
    names = [member.name]
    if member.issym():
        names.append(str(PurePosixPath(member.name).parent / member.linkname))
    elif member.islnk():
        names.append(member.linkname)
    elif not (member.isfile() or member.isdir()):
        raise tarfile.ExtractError(f"{member.name!r} is neither a file, a folder nor a link")
    for name in (*names, member.linkname):
        if name.startswith("/") or (os.path.normpath(name).split("/")[0] == ".." and name in names):
            raise tarfile.ExtractError(f"{member.name!r} leads out of the source")
    return member


def link(cwd: Path, name: str, target: Path, *, key: str) -> None:
    """Let a folder of the source be one that the platform keeps; what the source has in it is copied there first.

    Args:
        cwd: Where the job starts.
        name: The folder, in it.
        target: What it becomes. A file that is there already stays: it is of a run that was interrupted.
        key: The key of the profile that names it.

    Raises:
        ContainerError: It is no folder of the source.
    """
    folder = cwd / name
    if Path(name).is_absolute() or ".." in Path(name).parts or folder == cwd:
        raise ContainerError(f"{key}: {name} is not a folder below the one the job starts in")
    target.mkdir(parents=True, exist_ok=True)
    try:
        if folder.is_dir():
            _copy(folder, target)
        _remove(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.symlink_to(target, target_is_directory=True)
    except (OSError, shutil.Error) as error:
        raise ContainerError(f"{key}: {name} cannot become {target}: {error}") from error


def _copy(folder: Path, target: Path) -> None:
    def there(at: str, names: list[str]) -> list[str]:
        beside = target / Path(at).relative_to(folder)
        return [
            name for name in names if os.path.lexists(beside / name) and not _folders(Path(at), beside, name)
        ]

    shutil.copytree(folder, target, symlinks=True, ignore=there, dirs_exist_ok=True)


def _folders(at: Path, beside: Path, name: str) -> bool:
    return all((place / name).is_dir() and not (place / name).is_symlink() for place in (at, beside))


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    elif folder.is_dir():
        shutil.rmtree(folder)
