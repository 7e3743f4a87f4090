"""Files that `accel migrate` reads and writes."""

from __future__ import annotations

import ast
import contextlib
import difflib
import errno
import functools
import itertools
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from accel_cli.errors import UsageError
from accel_cli.launchers import git
from accel_cli.migrate.findings import Finding
from accel_cli.migrate.marks import add_marks, find_marks
from accel_runtime.environment.installation import format_install
from accel_runtime.environment.text import escape_controls

__all__ = ["STDIN", "MigratedFile", "MissingPackageError", "find_files", "migrate_file"]

STDIN = Path("-")
"""The argument for a script that is read from the standard input."""
_SHELL = {".sh", ".bash", ".slurm", ".sbatch"}
_SKIPPED = {"__pycache__", "node_modules", "site-packages", "venv"}


class MissingPackageError(UsageError):
    """No Python script can be converted, since a package is missing."""


@dataclass(frozen=True)
class MigratedFile:
    """A file before and after its conversion."""

    path: Path
    before: str
    after: str
    findings: tuple[Finding, ...] = ()
    notes: tuple[Finding, ...] = ()
    library: str = ""
    """The library whose scripts `accel launch` runs as they are, as in `Migration`."""
    folder: Path = STDIN
    """The folder that is not left: the argument, or that of a file which is an argument."""

    @property
    def name(self) -> str:
        """The path on one line, with its control characters as escapes."""
        return escape_controls(str(self.path), keep_lines=False)

    @property
    def is_changed(self) -> bool:
        """Return whether the conversion changes the file."""
        return self.before != self.after

    def format_diff(self) -> str:
        """Return the changes as a unified diff."""
        lines = difflib.unified_diff(
            self.before.splitlines(keepends=True),
            self.after.splitlines(keepends=True),
            self.name,
            self.name,
        )
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
        )

    def write(self) -> Path:
        """Write the converted file, and return the path of the copy of the file before.

        Links are resolved once, and none is followed from then on, so that nothing outside of the folder is written even if
        a folder is replaced by a link meanwhile.

        Raises:
            UsageError: The file cannot be written, or was changed after it was read.
        """
        path = resolve_in_folder(self.path, self.folder)
        if not os.access(path, os.W_OK):
            raise UsageError(f"Cannot write {self.path}: the file is read-only. Change its permissions.")
        created: list[str] = []
        folder = None
        try:
            folder = _open_folder(self.folder.resolve(), path.parent)
            with _open_beside(folder, path.name, os.O_RDONLY) as file:
                data, status = file.read(), os.fstat(file.fileno())
            self._check_unchanged(data)
            created.append(_write_copy(folder, path.name, data, status))
            created.append(f".{path.name[:99]}.{secrets.token_hex(4)}")
            with _open_beside(folder, created[1], os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
                file.write(self.after.encode("utf-8"))
                file.flush()
                os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode))
                os.fsync(file.fileno())
            os.replace(created[1], path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException as error:
            for name in created:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)
            if isinstance(error, OSError):
                raise UsageError(f"Cannot write {self.path}: {error.strerror}. It is unchanged.") from None
            raise
        finally:
            if folder is not None:
                os.close(folder)
        return path.with_name(created[0])

    def _check_unchanged(self, data: bytes) -> None:
        if data != self.before.encode("utf-8"):
            raise UsageError(f"Cannot write {self.path}: it was changed meanwhile. Run the command again.")


def resolve_in_folder(path: Path, folder: Path) -> Path:
    """Return the file that a path leads to.

    Raises:
        UsageError: It is a link out of the folder.
    """
    target = Path(
        os.path.realpath(path)
    )  # unlike Path.resolve, without an error for links that form a circle
    if not target.is_relative_to(os.path.realpath(folder)):
        raise UsageError(
            f"Cannot migrate {path}: it is a link out of {folder}, to {target}. Pass the path of that file instead."
        )
    return target


def _open_folder(root: Path, folder: Path) -> int:
    """Return a descriptor of a folder below another one; a link on the way is an error."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    for name in folder.relative_to(root).parts:
        parent = descriptor
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        finally:
            os.close(parent)
    return descriptor


def _open_beside(folder: int, name: str, flags: int) -> BinaryIO:
    """Open a file in a folder; a link is an error, and so is a pipe."""
    descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)
    file = os.fdopen(descriptor, "wb" if flags & os.O_WRONLY else "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a file")
    return file


def _write_copy(folder: int, name: str, data: bytes, status: os.stat_result) -> str:
    """Write a copy under a name that does not exist yet: `train.py.orig`, `train.py.orig.1`; return the name."""
    for number in itertools.count():
        copy = f"{name}.orig.{number}" if number else f"{name}.orig"
        try:
            file = _open_beside(folder, copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            continue
        try:
            with file:
                file.write(data)
                os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode))
                file.flush()
                os.utime(file.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
        except BaseException:
            os.unlink(copy, dir_fd=folder)
            raise
        return copy
    raise AssertionError


def find_files(paths: Iterable[Path]) -> Iterator[tuple[Path, Path]]:
    """Yield the files to convert, those that are given and the scripts in folders, each with the folder that it is in.

    Raises:
        UsageError: A path does not exist, or is not a Python or shell script.
    """
    for path in paths:
        if path == STDIN:
            yield path, path
        elif path.is_dir():
            yield from ((file, path) for file in _find_in_folder(path))
        elif path.suffix == ".ipynb":
            raise UsageError(
                f"Cannot migrate {path}: a notebook is not a script. Export it: jupyter nbconvert --to script {path}"
            )
        elif not path.exists():
            raise UsageError(f"Cannot migrate {path}: the file does not exist. Check the path.")
        elif path.suffix in {".yaml", ".yml"}:
            raise UsageError(
                f"Cannot migrate {path}: it is not a script. Convert a configuration file of Accelerate: accel config import {path}"
            )
        elif path.suffix not in {".py", *_SHELL} or not path.is_file():
            raise UsageError(
                f"Cannot migrate {path}: expected a Python script (.py), a shell script (.sh) or a folder."
            )
        else:
            yield path, path.parent


def _find_in_folder(folder: Path) -> Iterator[Path]:
    """Yield the scripts in a folder, without those in hidden folders and environments, and those that git ignores."""
    ignored = _list_ignored(folder)
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if name not in _SKIPPED
            and not name.startswith(".")
            and not (Path(root) / name / "pyvenv.cfg").exists()
            and Path(root) / name not in ignored
        )
        for path in (Path(root) / name for name in sorted(names)):
            if path.suffix in {".py", *_SHELL} and path.is_file() and path not in ignored:
                yield path


def _list_ignored(folder: Path) -> set[Path]:
    """Return the files and folders that git ignores; none outside a repository."""
    try:
        names = git.list_files(folder, "--ignored", "--directory")
    except git.GitError:
        names = None
    return {folder / name for name in names or ()}


def migrate_file(path: Path, folder: Path) -> MigratedFile:
    """Return a file of a folder before and after its conversion; nothing is written.

    Raises:
        UsageError: The file is a link out of the folder, is not UTF-8, or not valid Python.
        MissingPackageError: libcst cannot be imported.
    """
    try:
        data = sys.stdin.buffer.read() if path == STDIN else resolve_in_folder(path, folder).read_bytes()
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(
            f"Cannot migrate {path}: it is not encoded in UTF-8. Convert its encoding first."
        ) from None
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}. Check its permissions.") from None
    if path.suffix in _SHELL or re.match(r"#!.*sh\b", text):
        from accel_cli.migrate.shell import migrate_shell  # noqa: PLC0415 - a Python script does without

        after, findings = migrate_shell(text)
        return MigratedFile(path, text, after, findings, folder=folder)
    try:
        import libcst  # noqa: PLC0415 - takes longer than the other commands
    except ImportError as error:
        raise MissingPackageError(
            f"Cannot migrate Python scripts: the package libcst cannot be imported ({error}). Run: {format_install('libcst')}"
        ) from None
    from accel_cli.migrate.conversion import migrate_script  # noqa: PLC0415 - imports libcst

    code = text.removeprefix("\ufeff")
    try:
        ast.parse(code)
        result = migrate_script(code, _list_read_elsewhere(path))
    except (RecursionError, MemoryError):  # MemoryError: the stack of Python's parser is full
        raise UsageError(
            f"Cannot migrate {path}: an expression is nested too deeply. Split it into several statements."
        ) from None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise UsageError(
            f"{path}:{line}: Cannot migrate the script: Python {version}, which runs accel, does not accept it ({getattr(error, 'msg', error)}). "
            "Correct it, or run accel with the version of Python that runs the script."
        ) from None
    except libcst.ParserSyntaxError as error:
        raise UsageError(
            f"{path}:{error.raw_line}: Cannot migrate the script: libcst cannot read this line, which may be newer syntax. Write "
            f"the line in another way, or install the newest libcst: {format_install('libcst', options='--upgrade')}"
        ) from None
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    after = result.text if result.text == code else add_marks(code, result.text, result.findings)
    findings = (*result.findings, *find_marks(code))
    return MigratedFile(path, text, mark + after, findings, result.notes, result.library, folder)


def _list_read_elsewhere(path: Path) -> frozenset[str]:
    """Return the names that files beside a script, and beside its folder, import from it or read as attributes."""
    if path == STDIN:
        return frozenset()
    others = [one for folder in (path.parent, path.parent / "..") for one in sorted(folder.glob("*.py"))]
    read = [
        _list_imports(one.resolve()) for one in others if one.is_file() and one.resolve() != path.resolve()
    ]
    return frozenset().union(*(names for modules, names in read if path.stem in modules))


@functools.cache
def _list_imports(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Return the last parts of the modules that a file imports, and the names that it imports or reads as attributes."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset(), frozenset()
    modules: set[str] = set()
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {alias.name.rpartition(".")[2] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported = {alias.name for alias in node.names}
            modules |= {(node.module or "").rpartition(".")[2], *imported}
            names |= imported
    return frozenset(modules), frozenset(names)
