"""Where profiles live, and how they are read and written: whole, or not at all."""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import platformdirs

from accel_cli.errors import Problem, ProfileError, UsageError
from accel_cli.profile import yaml_io
from accel_cli.profile.schema import SCHEMA_VERSION, json_schema
from accel_cli.profile.yaml_io import Document
from accel_runtime import env

__all__ = [
    "DEFAULT",
    "MIGRATIONS",
    "PROJECT_FILE",
    "Store",
    "UnversionedError",
    "find_distrust",
    "is_accelerate_config",
    "lock",
    "migrate_profile",
    "read",
    "read_text",
    "render",
    "write",
]


DEFAULT = "default"
"""The name of the user's own profile."""
PROJECT_FILE = "accel.yaml"
SCHEMA_FILE = ".accel.schema.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HEADER = f"# yaml-language-server: $schema={SCHEMA_FILE}\n"


@dataclass(frozen=True)
class Store:
    """The folders in which profiles are looked for."""

    home: Path
    """The user's profiles, one `NAME.yaml` each."""
    cwd: Path
    """Where a project file is looked for, from here upwards to the repository's root."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str], cwd: Path) -> Store:
        """The user's folder: `ACCEL_HOME` if it is set, else where this platform keeps configuration."""
        home = environ.get(env.HOME)
        base = Path(home).expanduser() if home else platformdirs.user_config_path("accel")
        return cls(base / "profiles", cwd)

    def path(self, name: str) -> Path:
        """The file of a named profile, whether it exists or not.

        Raises:
            UsageError: The name could not be a file's name everywhere.
        """
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} is no profile name: use up to 64 letters, digits, '.', '_' and '-', the first one a "
                "letter or digit. To use a profile from a file, `accel config import FILE --profile NAME`."
            )
        return self.home / f"{name}.yaml"

    def names(self) -> list[str]:
        """The profiles there are, the user's own first."""
        found = sorted(path.stem for path in self.home.glob("*.yaml") if _NAME.fullmatch(path.stem))
        return sorted(found, key=lambda name: name != DEFAULT)

    def project(self) -> Path | None:
        """The project file that holds here: in this folder, or above it up to the repository's root."""
        for folder in (self.cwd, *self.cwd.parents):
            if (folder / PROJECT_FILE).is_file():
                return folder / PROJECT_FILE
            if (folder / ".git").exists():
                return None
        return None


def find_distrust(path: Path, environ: Mapping[str, str]) -> str | None:
    """Return why a project file must not be used: another user could have written it. None if it may be used.

    A profile sets variables of the processes, so whoever writes one can run code. The owner has to be this user or
    root, or the user who called sudo; neither the file nor its folder may be writable by every user.
    """
    folders = [folder for folder in environ.get(env.TRUSTED_PROJECTS, "").split(os.pathsep) if folder]
    if os.name != "posix" or any(Path(folder).resolve() == path.parent.resolve() for folder in folders):
        return None
    owners = {0, os.getuid()}
    if os.getuid() == 0 and environ.get("SUDO_UID", "").isdecimal():
        owners.add(int(environ["SUDO_UID"]))
    for item in (path, path.parent):
        try:
            found = item.stat()
        except OSError as error:
            return f"{item} cannot be read: {error.strerror}"
        if found.st_uid not in owners:
            return f"{item} belongs to another user"
        if found.st_mode & stat.S_IWOTH:
            return f"every user can write {item}"
    return None


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        UsageError: It cannot be read, or is no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not text in UTF-8") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def read(path: Path) -> Document:
    """A profile file, brought up to date; its values are not checked yet, and its version may be missing (`problems`).

    Raises:
        UsageError: It cannot be read, is no YAML, or of a version we do not know.
    """
    found = yaml_io.parse(read_text(path), str(path))
    try:
        return replace(
            found, data=migrate_profile(found.data, f"{path}:{found.lines.get(('schema_version',), 1)}")
        )
    except UnversionedError as error:
        return replace(found, problems=tuple(error.problems))


def render(data: Mapping[str, Any], comments: Mapping[str, str] = MappingProxyType({})) -> str:
    """The text of a profile file, with the comment that lets editors check and complete it.

    Args:
        data: What it says.
        comments: What stands above a key, by dotted key.
    """
    return _HEADER + yaml_io.dump(data, comments)


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Let one process at a time change the profiles in the folder of `path`, which is made if it does not exist.

    Raises:
        UsageError: The folder cannot be made or opened.
    """
    import fcntl  # noqa: PLC0415 - not on Windows

    folder = path.resolve().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def write(path: Path, text: str) -> None:
    """Put a profile in its place, with the schema its first line points at; whole or not at all.

    A new profile is readable by this user only, since it may hold secrets; a project file, which is shared, by everybody.

    Raises:
        UsageError: The folder cannot be made or written to.
    """
    try:
        # A link is followed, so that people who keep profiles in a repository of dotfiles keep their link.
        target = path.resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        _replace(target.parent / SCHEMA_FILE, json.dumps(json_schema(), indent=1) + "\n")
        _replace(target, text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None


def _replace(path: Path, text: str) -> None:
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        shared = path.name in {PROJECT_FILE, SCHEMA_FILE}
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o644 if shared else 0o600
        Path(scratch).chmod(mode)
        Path(scratch).replace(path)
    finally:
        Path(scratch).unlink(missing_ok=True)


Migration = Callable[[dict[str, Any]], dict[str, Any]]


class UnversionedError(ProfileError):
    """A file does not say its version; the rest of it is read as one of today's layout."""


MIGRATIONS: Mapping[int, Migration] = MappingProxyType({})
"""For every older version, what makes it the next one; a release that changes the layout adds a line."""


def is_accelerate_config(data: Mapping[str, Any]) -> bool:
    """Return True if this is a config file of Accelerate rather than a profile."""
    return "compute_environment" in data or "distributed_type" in data


def migrate_profile(
    data: dict[str, Any],
    where: str,
    migrations: Mapping[int, Migration] = MIGRATIONS,
    newest: int = SCHEMA_VERSION,
) -> dict[str, Any]:
    """The data of a file in today's layout.

    Raises:
        UnversionedError: The version is missing, or is no version.
        ProfileError: The version is newer than this accel, or this is a config file of Accelerate.
    """
    version = data.get("schema_version")
    if version is None and is_accelerate_config(data):
        cure = "Make a profile of it: accel config import FILE"
        raise ProfileError(
            [Problem(where, "", f"this is a config file of Accelerate, not a profile. {cure}")]
        )
    if version is None:
        hint = f"add the line: schema_version: {newest}"
        raise UnversionedError(
            [Problem(where, "schema_version", "every profile says its version", "nothing", hint)]
        )
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise UnversionedError(
            [Problem(where, "schema_version", "expected a whole number above 0", repr(version))]
        )
    if version > newest:
        reason = f"this file was written by a newer accel; this one reads up to version {newest}"
        raise ProfileError([Problem(where, "schema_version", reason, repr(version))])
    for step in range(version, newest):
        data = {**migrations[step](data), "schema_version": step + 1}
    return data
