"""Files of profiles: find, read and write them."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
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
from accel_runtime.environment import settings as env
from accel_runtime.environment.accelerate import launch

__all__ = [
    "DEFAULT",
    "PROJECT_FILE",
    "ProfileStore",
    "check_writable",
    "find_accelerate_file",
    "find_distrust",
    "has_file",
    "is_accelerate_config",
    "lock",
    "parse",
    "read",
    "read_text",
    "render",
    "write",
]


DEFAULT = "default"
"""The name of the user's default profile."""
PROJECT_FILE = "accel.yaml"
SCHEMA_FILE = ".accel.schema.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SUFFIXES = {"yaml", "yml"}
_HEADER = f"# yaml-language-server: $schema={SCHEMA_FILE}\n"


@dataclass(frozen=True)
class ProfileStore:
    """The folders that are searched for profiles."""

    home: Path
    """The user's profiles, one `NAME.yaml` each."""
    cwd: Path
    """The folder where the search for a project file starts, upwards to the repository's root."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str], cwd: Path) -> ProfileStore:
        """Build from `ACCEL_HOME` if it is set, else from the platform's configuration folder."""
        home = environ.get(env.HOME)
        base = Path(home).expanduser() if home else platformdirs.user_config_path("accel")
        return cls(base / "profiles", cwd)

    def get_path(self, name: str) -> Path:
        """Return the path of a named profile, which need not exist.

        Raises:
            UsageError: The name is not a portable file name.
        """
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"Invalid profile name {name!r}: expected up to 64 letters, digits, '.', '_' and '-', beginning with a "
                "letter or digit. To use a profile from a file, run accel config import FILE --profile NAME."
            )
        stem, dot, suffix = name.rpartition(".")
        if stem and dot and suffix in _SUFFIXES:
            raise UsageError(
                f"Invalid profile name {name!r}: a name has no suffix {dot}{suffix}. Write {stem}; to use a profile from a file, run "
                f"accel config import FILE --profile {stem}."
            )
        return self.home / f"{name}.yaml"

    def list_names(self) -> list[str]:
        """Return the names of all profiles, the default one first."""
        names = sorted(path.stem for path in self.home.glob("*.yaml") if _NAME.fullmatch(path.stem))
        return sorted(names, key=lambda name: name != DEFAULT)

    def find_project_file(self) -> Path | None:
        """Return the nearest project file in this folder or above, up to the repository's root, or None."""
        return next(
            (folder / PROJECT_FILE for folder in self._list_folders() if has_file(folder / PROJECT_FILE)),
            None,
        )

    def find_misnamed_files(self) -> list[Path]:
        """Return files that would be the user's or the project's profile, but have the other suffix of YAML files."""
        files = [self.get_path(DEFAULT), *(folder / PROJECT_FILE for folder in self._list_folders())]
        misnamed = [file.with_suffix(".yml") for file in files if not has_file(file)]
        return [file for file in misnamed if file.is_file()]

    def _list_folders(self) -> Iterator[Path]:
        """Yield this folder and those above it, up to the repository's root."""
        for folder in (self.cwd, *self.cwd.parents):
            yield folder
            if (folder / ".git").exists():
                return


def find_distrust(path: Path, environ: Mapping[str, str]) -> str | None:
    """Return the reason if a project file is not trusted because another user could have written it, else None.

    A profile sets environment variables of processes, so its author can run code. The owner must be this user,
    root, or the user who called sudo; neither the file nor its folder may be writable by every user.
    """
    folders = [folder for folder in environ.get(env.TRUSTED_PROJECTS, "").split(os.pathsep) if folder]
    if os.name != "posix" or any(Path(folder).resolve() == path.parent.resolve() for folder in folders):
        return None
    owners = {0, os.getuid()}
    if os.getuid() == 0 and environ.get("SUDO_UID", "").isdecimal():
        owners.add(int(environ["SUDO_UID"]))
    for item in (path.parent, path):
        try:
            status = item.stat()
        except OSError:  # a broken link: reading it fails with the reason
            return None
        if status.st_uid not in owners:
            return f"{item} belongs to another user"
        if status.st_mode & stat.S_IWOTH:
            return f"every user can write {item}"
    return None


def has_file(path: Path) -> bool:
    """Return True if a profile is there; a folder or a broken link is one, since it must not be ignored: reading it fails."""
    return os.path.lexists(path)


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        UsageError: The file cannot be read, or is not UTF-8 text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"Cannot read {path}: it is not UTF-8 text. Save it as UTF-8.") from None
    except OSError as error:
        name = f"{path}, a link to {path.readlink()}" if path.is_symlink() else path
        raise UsageError(
            f"Cannot read {name}: {error.strerror}. Correct its path or its permissions."
        ) from None


def read(path: Path) -> Document:
    """Read a profile file, whose values are not checked yet.

    Raises:
        UsageError: The file cannot be read, is not YAML, or has an unknown version.
    """
    return parse(read_text(path), path)


def parse(text: str, path: Path) -> Document:
    """Parse the text of a profile file; a missing or invalid version is one of the `problems` of the result.

    Raises:
        ProfileError: The text is not YAML, has the version of a newer accel, or is a config file of Accelerate.
    """
    document = yaml_io.parse(text, str(path))
    version, where = document.data.get("schema_version"), f"{path}:{document.lines.get('schema_version', 1)}"
    if version is None and is_accelerate_config(document.data):
        reason = (
            "this is a config file of Accelerate, not a profile. Convert it with: accel config import FILE"
        )
        raise ProfileError([Problem(where, "", reason)])
    if version is None:
        reason = f"missing. Add this line: schema_version: {SCHEMA_VERSION}"
        return replace(document, problems=(Problem(where, "schema_version", reason),))
    if type(version) is not int or version < 1:
        problem = Problem(where, "schema_version", "expected a whole number above 0", repr(version))
        return replace(document, problems=(problem,))
    if version > SCHEMA_VERSION:
        reason = f"expected at most {SCHEMA_VERSION}: the file was written by a newer accel"
        raise ProfileError([Problem(where, "schema_version", reason, repr(version))])
    return document


def is_accelerate_config(data: Mapping[str, Any]) -> bool:
    """Return True if this is a config file of Accelerate rather than a profile."""
    return launch.COMPUTE_ENVIRONMENT.key in data or launch.DISTRIBUTED_TYPE.key in data


def find_accelerate_file(environ: Mapping[str, str]) -> Path | None:
    """Return the file that `accelerate config` writes by default, which `accel launch` does not use; None without one."""
    cache = Path(environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    path = Path(environ.get("HF_HOME", cache)).expanduser() / "accelerate" / "default_config.yaml"
    return path if path.is_file() else None


def render(data: Mapping[str, Any], comments: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the text of a profile file, with the comment that names its schema for editors."""
    return _HEADER + yaml_io.dump(data, comments)


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Lock the folder of `path` so that one process at a time changes its profiles; create it if needed.

    Raises:
        UsageError: The folder cannot be created or opened.
    """
    import fcntl  # noqa: PLC0415 - not on Windows

    folder = path.resolve().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UsageError(f"Cannot write {path}: {error.strerror}.") from None
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def check_writable(path: Path) -> None:
    """Raise if a file cannot be written, without creating it.

    Raises:
        UsageError: The folder, or the nearest one above that exists, cannot be written to.
    """
    folder = next(parent for parent in path.resolve().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        reason = os.strerror(errno.EACCES if folder.is_dir() else errno.ENOTDIR)
        raise UsageError(f"Cannot write {path}: {reason}.")


def write(path: Path, text: str) -> None:
    """Write a profile atomically, with the JSON schema that its first line refers to.

    A new profile is readable by this user only, since it may hold secrets; a project file, which is shared, by
    all users.

    Raises:
        UsageError: The folder cannot be created or written to, or the path is a project file that is a link out of its folder.
    """
    try:
        # Follow a symbolic link, so that links into a dotfiles repository survive. A project may be that of somebody else.
        target = path.resolve()
        if path.name == PROJECT_FILE and not target.is_relative_to(path.parent.resolve()):
            raise UsageError(
                f"Cannot write {path}: it is a link out of its folder, to {target}. Edit that file, or replace the link by a file."
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        _write_atomically(target.parent / SCHEMA_FILE, json.dumps(json_schema(), indent=1) + "\n")
        _write_atomically(target, text.replace("\n", "\r\n") if _has_crlf(target) else text)
    except OSError as error:
        raise UsageError(f"Cannot write {path}: {error.strerror}.") from None


def _has_crlf(path: Path) -> bool:
    if not path.exists():
        return False
    with path.open("rb") as file:
        return file.readline().endswith(b"\r\n")


def _write_atomically(path: Path, text: str) -> None:
    # One name, so that the next write replaces what a killed one has left.
    scratch = path.with_name(f".{path.name}.new")
    scratch.unlink(missing_ok=True)
    # The umask applies.
    mode = 0o666 if path.name in {PROJECT_FILE, SCHEMA_FILE} else 0o600
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            scratch.chmod(path.stat().st_mode & 0o777)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
