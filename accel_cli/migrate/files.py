"""Files that `accel migrate` reads and writes."""

from __future__ import annotations

import ast
import contextlib
import difflib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from accel_cli import git
from accel_cli.errors import UsageError
from accel_cli.migrate.findings import Finding
from accel_runtime.installation import format_install
from accel_runtime.text import escape_controls

__all__ = ["STDIN", "MigratedFile", "find_files", "migrate_file"]

STDIN = Path("-")
"""The argument for a script that is read from the standard input."""
_SHELL = {".sh", ".bash", ".slurm", ".sbatch"}
_SKIPPED = {"__pycache__", "node_modules", "site-packages", "venv"}


@dataclass(frozen=True)
class MigratedFile:
    """A file before and after its conversion."""

    path: Path
    before: str
    after: str
    findings: tuple[Finding, ...] = ()
    notes: tuple[Finding, ...] = ()

    @property
    def name(self) -> str:
        """Its path, on one line of a terminal."""
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
        """Write the converted file, and return the path of the copy of the file before."""
        path = self.path.resolve()
        if not os.access(path, os.W_OK):
            raise UsageError(f"Cannot write {self.path}: the file is read-only. Change its permissions.")
        copy = _choose_copy(path)
        created = [copy]
        try:
            shutil.copy2(path, copy)
            descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:99]}.")
            created.append(Path(name))
            with os.fdopen(descriptor, "wb") as file:
                file.write(self.after.encode("utf-8"))
                file.flush()
                os.fsync(file.fileno())
            shutil.copymode(path, name)
            Path(name).replace(path)
        except BaseException as error:
            for one in created:
                with contextlib.suppress(OSError):
                    one.unlink()
            if isinstance(error, OSError):
                raise UsageError(f"Cannot write {self.path}: {error.strerror}. It is unchanged.") from None
            raise
        return copy


def _choose_copy(path: Path) -> Path:
    """Return the path for a copy that does not exist yet: `train.py.orig`, `train.py.orig.1`."""
    copy = path.with_name(f"{path.name}.orig")
    number = 0
    while os.path.lexists(copy):
        number += 1
        copy = path.with_name(f"{path.name}.orig.{number}")
    return copy


def find_files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files to convert: those that are given, and the scripts in folders.

    Raises:
        UsageError: A path does not exist, or is not a Python or shell script.
    """
    for path in paths:
        if path == STDIN:
            yield path
        elif path.is_dir():
            yield from _find_in_folder(path)
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
            yield path


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


def migrate_file(path: Path) -> MigratedFile:
    """Return a file before and after its conversion; nothing is written.

    Raises:
        UsageError: The file is not UTF-8, or not valid Python.
    """
    try:
        data = sys.stdin.buffer.read() if path == STDIN else path.read_bytes()
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
        return MigratedFile(path, text, after, findings)
    try:
        import libcst  # noqa: PLC0415 - takes longer than the other commands
    except ImportError as error:
        raise UsageError(
            f"Cannot migrate Python scripts: the package libcst cannot be imported ({error}). Run: {format_install('libcst')}"
        ) from None
    from accel_cli.migrate.conversion import migrate_script  # noqa: PLC0415 - imports libcst

    code = text.removeprefix("\ufeff")
    try:
        ast.parse(code)
        result = migrate_script(code)
    except RecursionError:
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
    return MigratedFile(path, text, mark + result.text, result.findings, result.notes)
