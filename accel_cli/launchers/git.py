"""Files of a folder as git lists them, without the configuration of its repository, which may name programs to run."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from accel_cli.errors import AccelError, UsageError

__all__ = ["GitError", "list_files"]

_TIMEOUT_S = 120.0
"""A listing takes seconds, except where git waits: for a pipe named `.gitignore`, or a file system without an answer."""
_MAX_LINK_BYTES = 4096
"""Size of a `.git` file and of `commondir`: each is one path."""
_USER_VARIABLES = {"GIT_CONFIG_GLOBAL", "GIT_CONFIG_NOSYSTEM", "GIT_CONFIG_SYSTEM", "GIT_EXEC_PATH"}
_DATA_KEYS = r"^(core\.(excludesfile|ignorecase|precomposeunicode)|extensions\.objectformat)$"
"""Keys that say how names are compared and files are read; none names a program."""
_CONFIG = "[core]\n\trepositoryformatversion = {version}\n\tbare = false\n"
# Also against the configuration of this user, whose hooks and monitors are for other repositories.
_SAFE_OPTIONS = (
    "--no-pager", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "core.untrackedCache=false",
)  # fmt: skip


class GitError(AccelError):
    """Git cannot list the files of a folder."""


def list_files(folder: Path, *options: str) -> list[str] | None:
    """Return what `git ls-files -z --others --exclude-standard` lists, with more options; None outside of a repository.

    Nothing of the folder is run: git gets a repository without configuration of its own, and of that of the folder only the
    index, the objects and the rules of what is ignored; docs/design/files-that-run-nothing.md.

    Raises:
        GitError: Git is missing, or cannot read the repository.
        UsageError: Git waits for something.
    """
    folder = folder.resolve()
    found = _find_repository(folder)
    if found is None:
        return None
    git = shutil.which("git")
    # A `git` that is found through a relative entry of PATH may be a file of the folder.
    if git is None or not Path(git).is_absolute():
        raise GitError("git is not found")
    top, git_dir = found
    common = _read_link(git_dir / "commondir", git_dir) or git_dir
    with tempfile.TemporaryDirectory(prefix="accel-git-") as name:
        scratch = Path(name)
        settings = _create_repository(scratch, git, git_dir, common)
        environment = {
            **_get_environment(),
            "GIT_DIR": name,
            "GIT_WORK_TREE": str(top),
            "GIT_INDEX_FILE": str(git_dir / "index"),
            "GIT_OBJECT_DIRECTORY": str(common / "objects"),
        }
        command = [git, *_SAFE_OPTIONS]
        for key, value in settings.items():
            # Git reads a relative path from the top of the work tree.
            path = top / value
            if key != "core.excludesfile":
                command += ["-c", f"{key}={value}"]
            elif _is_regular(path):
                command += ["-c", f"{key}={path}"]
        command += ["ls-files", "-z", "--others", "--exclude-standard", *options]
        output = _run(command, folder, environment)
    return [os.fsdecode(entry) for entry in output.split(b"\0") if entry]


def _get_environment() -> dict[str, str]:
    """Return this environment without git's variables, which its hooks set, and which name another repository."""
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("GIT_") or key in _USER_VARIABLES
    }


def _find_repository(folder: Path) -> tuple[Path, Path] | None:
    """Return the top of the work tree that a folder is in, and the directory of its repository."""
    broken = None
    for top in (folder, *folder.parents):
        mark = top / ".git"
        if not os.path.lexists(mark):
            continue
        git_dir = mark.resolve() if mark.is_dir() else _read_link(mark, top, "gitdir: ")
        if git_dir and os.path.lexists(git_dir / "HEAD"):
            return top, git_dir
        broken = broken or mark
    if broken:
        raise GitError(f"{broken} is not a repository")
    return None


def _read_link(path: Path, base: Path, prefix: str = "") -> Path | None:
    """Return the path that a file of git contains after a prefix; None without one."""
    if not _is_regular(path):
        return None
    with path.open("rb") as file:
        text = os.fsdecode(file.read(_MAX_LINK_BYTES)).rstrip("\r\n")
    if not text.startswith(prefix) or "\0" in text:
        return None
    return (base / text.removeprefix(prefix)).resolve()


def _is_regular(path: Path) -> bool:
    """Return False also for pipes and devices, from which reading may not end."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def _create_repository(scratch: Path, git: str, git_dir: Path, common: Path) -> dict[str, str]:
    """Make an empty repository that shares the rules of another one; return the settings that are needed to list its files."""
    (scratch / "refs").mkdir()
    (scratch / "info").mkdir()
    (scratch / "HEAD").write_text("ref: refs/heads/main\n", encoding="ascii")
    (scratch / "config").write_text(_CONFIG.format(version=0), encoding="ascii")
    if os.path.lexists(git_dir / "index") and not _is_regular(git_dir / "index"):
        raise GitError(f"{git_dir / 'index'} is not a file")
    if _is_regular(common / "info" / "exclude"):
        (scratch / "info" / "exclude").symlink_to(common / "info" / "exclude")
    for shared in git_dir.glob("sharedindex.*"):
        if _is_regular(shared):
            (scratch / shared.name).symlink_to(shared)
    settings = _read_settings(scratch, git, common / "config")
    object_format = settings.pop("extensions.objectformat", "sha1")
    if object_format != "sha1":
        if not object_format.isalnum():
            raise GitError("the format of its objects is unknown")
        text = f"{_CONFIG.format(version=1)}[extensions]\n\tobjectformat = {object_format}\n"
        (scratch / "config").write_text(text, encoding="ascii")
    return settings


def _read_settings(scratch: Path, git: str, config: Path) -> dict[str, str]:
    """Return the settings of a configuration file that name no program, without those of the files that it includes."""
    if not _is_regular(config):
        return {}
    command = [git, "config", "--file", str(config), "--no-includes", "-z", "--get-regexp", _DATA_KEYS]
    command[-2:-2] = ["--type=path"]
    output = _run(command, scratch, {**_get_environment(), "GIT_DIR": str(scratch)}, allowed=(0, 1))
    # A key without a value is true.
    entries = (os.fsdecode(entry).partition("\n") for entry in output.split(b"\0") if entry)
    return {key: value if separator else "true" for key, separator, value in entries}


def _run(
    command: list[str], folder: Path, environment: dict[str, str], allowed: tuple[int, ...] = (0,)
) -> bytes:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"Cannot list the files of {folder}: git does not end within {_TIMEOUT_S:g} s. Remove pipes named .gitignore, or "
            "check the file system."
        ) from None
    if done.returncode not in allowed:
        lines = done.stderr.decode(errors="replace").splitlines() or [f"exit code {done.returncode}"]
        raise GitError(lines[0])
    return done.stdout
