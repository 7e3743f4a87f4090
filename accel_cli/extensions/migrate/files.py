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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from accel_cli.errors import UsageError
from accel_cli.extensions.migrate.findings import Finding, Parts
from accel_cli.extensions.migrate.marks import add_marks, find_marks
from accel_cli.launchers import git
from accel_runtime.environment.installation import format_install
from accel_runtime.environment.text import escape_controls

__all__ = ["STDIN", "MigratedFile", "MissingPackageError", "find_files", "join_trainings", "migrate_file"]

STDIN = Path("-")
"""The argument for a script that is read from the standard input."""
_SHELL = {".sh", ".bash", ".slurm", ".sbatch"}
_MAX_PLACES = 3
"""The number of places of one kind that a finding names."""
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
    parts: Parts | None = None
    """The parts of a training, if the file does not have all of it, as in `Migration`."""

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
        from accel_cli.extensions.migrate.shell import migrate_shell  # noqa: PLC0415 - a Python script does without

        after, findings = migrate_shell(text)
        return MigratedFile(path, text, after, findings, folder=folder)
    try:
        import libcst  # noqa: PLC0415 - takes longer than the other commands
    except ImportError as error:
        raise MissingPackageError(
            f"Cannot migrate Python scripts: the package libcst cannot be imported ({error}). Run: {format_install('libcst')}"
        ) from None
    from accel_cli.extensions.migrate.conversion import migrate_script  # noqa: PLC0415 - imports libcst

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
    return MigratedFile(
        path, text, mark + after, findings, result.notes, result.library, folder, result.parts
    )


# Trainings that are spread over several files


def join_trainings(files: Sequence[MigratedFile]) -> list[MigratedFile]:
    """Return files with one finding for each training that is spread over several, in place of those of its parts."""
    if not any(file.parts for file in files):
        return list(files)
    project = _Project(files)
    for training in project.find_trainings():
        parts = {path: one for path in training if (one := project.get_parts(path))}
        shown = [path for path in project.arguments if path in parts]
        first = min(shown, key=lambda path: not parts[path].backward)
        sentence = Finding(parts[first].finding.line, project.describe(training))
        for path in shown:
            project.replace_finding(path, {sentence} if path == first else set())
    for path in project.find_used_optimizers():
        project.replace_finding(path, set())
    return [project.files.get(file.path.resolve(), file) for file in files]


class _Project:
    """Python files with those that they import, and the parts of trainings in them; all paths are resolved."""

    def __init__(self, files: Iterable[MigratedFile]) -> None:
        self.files = {file.path.resolve(): file for file in files if file.path.suffix == ".py"}
        self.arguments = list(self.files)
        partial = {path for path, file in self.files.items() if file.parts}
        pending = [(path, file.folder.resolve().parent) for path, file in self.files.items()]
        pending += [(one, root) for path, root in pending if path in partial for one in _list_beside(path)]
        self._imports: dict[Path, dict[str, Path]] = {}
        """The files that each file imports, by the names that they have there."""
        while pending:
            path, root = pending.pop()
            if path not in self._imports:
                self._imports[path] = _find_imports(path, root)
                pending += [(one, root) for one in self._imports[path].values()]
        self._reached = {path: self._follow(path) for path in self._imports}
        related = [reached for reached in self._reached.values() if reached & partial]
        for path in set().union(*related) - self.files.keys():
            with contextlib.suppress(UsageError):
                self.files[path] = migrate_file(path, path.parent)

    def _follow(self, path: Path) -> set[Path]:
        """Return a file and those that it imports, also through others."""
        found, pending = {path}, [path]
        while pending:
            new = set(self._imports[pending.pop()].values()) - found
            found |= new
            pending += new
        return found

    def get_parts(self, path: Path) -> Parts | None:
        """Return the parts of a training in a file that does not have all of it."""
        return self.files[path].parts if path in self.files else None

    def replace_finding(self, path: Path, findings: set[Finding]) -> None:
        """Replace the finding about the parts of a file."""
        file = self.files[path]
        others = {one for one in file.findings if not file.parts or one != file.parts.finding}
        self.files[path] = replace(file, findings=tuple(sorted(others | findings)), parts=None)

    def find_trainings(self) -> list[set[Path]]:
        """Return the files of each training that is spread; trainings with a file in common are one."""
        found: list[set[Path]] = []
        for path in self.files:
            if others := self._find_others(path):
                joined = [training for training in found if training & {path, *others}]
                found = [training for training in found if training not in joined]
                found.append({path}.union(others, *joined))
        return found

    def _find_others(self, path: Path) -> set[Path]:
        """Return the files with the optimizers of a file's backward pass, or those that import it."""
        parts = self.get_parts(path)
        if parts is None or not parts.backward:
            return set()
        imported = {name.partition(".")[0] for name in self._imports[path]}
        if parts.sources and not parts.sources & imported:
            return set()  # the optimizers are created here or in a library
        optimizers = {one for one in self.files if (other := self.get_parts(one)) and other.optimizer}
        users = [reached for reached in self._reached.values() if path in reached]
        beside = set().union(*users) - self.find_used_optimizers()
        importing = {one for one, names in self._imports.items() if path in names.values()}
        return (
            {one for one in optimizers if one in self._reached[path] or path in self._reached[one]}
            or optimizers & beside
            or (importing if parts.steps else set())
        )

    def find_used_optimizers(self) -> set[Path]:
        """Return the files with optimizers that a file imports which is converted, and prepares them."""
        converted = [path for path, file in self.files.items() if "accel_runtime" in file.after]
        used = {one for path in converted for one in self._imports[path].values()}
        return {one for one in used if (parts := self.get_parts(one)) and parts.optimizer}

    def describe(self, training: set[Path]) -> str:
        """Return the text of the finding about a training that is spread over files."""
        places: dict[str, list[str]] = {kind: [] for kind in ("model", "optimizer", "backward pass")}
        names = {self._name(path): self.get_parts(path) for path in training}
        for name, parts in sorted(names.items()):
            lines = (parts.model, parts.optimizer, parts.backward) if parts else (0, 0, 0)
            for kind, line in zip(("model", "optimizer", "backward pass"), lines, strict=True):
                places[kind] += [f"{name}:{line}"] if line else []
        if not places["optimizer"]:
            places["imported by"] = sorted(name for name, parts in names.items() if not parts)
        text = "; ".join(f"{kind}: {_shorten(found)}" for kind, found in places.items() if found)
        return f"This training is not converted: it is spread over several files ({text}). Change them by hand, as the page Migrate several files shows."

    def _name(self, path: Path) -> str:
        if path in self.arguments:
            return self.files[path].name
        relative = os.path.relpath(path)
        return escape_controls(str(path) if relative.startswith("..") else relative, keep_lines=False)


def _shorten(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_PLACES} more" if len(names) > _MAX_PLACES else ""
    return ", ".join(names[:_MAX_PLACES]) + more


def _find_imports(path: Path, root: Path) -> dict[str, Path]:
    """Return the files below a folder that a file imports, by the names that they, or what is in them, have there."""
    found: dict[str, Path] = {}
    above = [one for one in path.parents if one.is_relative_to(root)]
    for node in _parse(path):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        level = node.level if isinstance(node, ast.ImportFrom) else 0
        folders = above[level - 1 : level] if level else [*above, *(one / "src" for one in above)]
        for alias in node.names:
            module = f"{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
            if file := _find_module(f"{module}{alias.name}".lstrip("."), tuple(folders)):
                found[alias.asname or alias.name] = file
    return found


@functools.cache
def _find_module(name: str, folders: tuple[Path, ...]) -> Path | None:
    """Return the file of a module, or of the module of a name; that in the first folder."""
    names = name.split(".")
    for folder in folders:
        for count in range(len(names), 0, -1):
            base = folder.joinpath(*names[:count])
            for file in (base.with_name(f"{base.name}.py"), base / "__init__.py"):
                if file.is_file():
                    return file.resolve()
    return None


# Names that other files read


def _list_read_elsewhere(path: Path) -> frozenset[str]:
    """Return the names that files beside a script, and beside its folder, import from it or read as attributes."""
    if path == STDIN:
        return frozenset()
    read = [_list_imports(one) for one in _list_beside(path)]
    return frozenset().union(*(names for modules, names in read if path.stem in modules))


def _list_beside(path: Path) -> list[Path]:
    """Return the other Python files of a file's folder, and those beside this folder."""
    found = [one.resolve() for folder in (path.parent, path.parent / "..") for one in folder.glob("*.py")]
    return sorted(one for one in found if one.is_file() and one != path.resolve())


def _parse(path: Path) -> list[ast.AST]:
    """Return the nodes of a Python file; none if it cannot be read."""
    try:
        return list(ast.walk(ast.parse(path.read_bytes())))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []


@functools.cache
def _list_imports(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Return the last parts of the modules that a file imports, and the names that it imports or reads as attributes."""
    nodes = _parse(path)
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
