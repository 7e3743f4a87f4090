"""The target of a launch, a script, module or program: checks before anything starts, and options that were typed after it."""

from __future__ import annotations

import errno
import importlib.machinery
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from accel_cli.errors import UsageError
from accel_cli.planning.launch_options import Request
from accel_cli.planning.nested_launchers import NestedLauncher, find_nested_launcher
from accel_cli.planning.plan import join_for_bash
from accel_runtime.environment.settings import find_nearest

__all__ = ["check_target", "find_options_after_script"]

_MAX_FIRST_LINE = 256
"""The most bytes of the first line of a program that the kernel reads."""


def check_target(request: Request, options: Sequence[str] = ()) -> None:
    """Raise if the target of a request cannot run, before anything starts.

    Args:
        request: The launch.
        options: The words of the command line before the target, for the command in the message.
    """
    target, kind, args = request.target, request.kind, request.args
    if not target:
        raise UsageError("Cannot run '': the name is empty. Check the variable that contains it.")
    if nested := find_nested_launcher(target, kind, args):
        raise UsageError(
            f"Cannot launch {nested.name}: {nested.reason}. {_format_unnested(nested, args, options)}"
        )
    if kind == "script":
        _check_script(Path(target))
    elif kind == "program":
        _check_program(target)
    elif kind == "module":
        package = target.partition(".")[0]
        if not package or not importlib.machinery.PathFinder.find_spec(package, [str(Path.cwd()), *sys.path]):
            raise UsageError(
                f"Module not found: {target!r}, in this folder or in {sys.prefix}. Give its name as for `python -m`."
            )


def _format_unnested(nested: NestedLauncher, args: Sequence[str], options: Sequence[str]) -> str:
    """Return what to do instead of a launch of a launcher."""
    if nested.words is None:
        return f"Run it without accel launch: {join_for_bash((nested.name, *args))}."
    kept = [word for word in options if word not in {"-m", "--module", "--no-python", "--no_python", "--"}]
    return f"Launch the script itself: {join_for_bash(('accel', 'launch', *kept, *nested.words))}"


def _check_program(target: str) -> None:
    """Raise if a program does not exist, or if the interpreter in its first line does not, which the kernel does not name."""
    path = shutil.which(target)
    if not path:
        raise UsageError(
            f"Program not found: {target!r}. Check its name, its path, and that it is executable."
        )
    try:
        with Path(path).open("rb") as file:
            line = file.readline(_MAX_FIRST_LINE)
    except OSError:  # it may be executed all the same
        return
    if not line.startswith(b"#!"):
        return
    words = os.fsdecode(line[2:]).rstrip("\n").strip(" \t").split(" ")
    if line.endswith(b"\r\n"):
        raise UsageError(
            f"Cannot run {target}: its lines end as on Windows, so that the interpreter in its first line is {' '.join(words)!r}. "
            f"Convert it: sed -i 's/\\r$//' {shlex.quote(path)}"
        )
    if words[0] and not Path(words[0]).exists():
        raise UsageError(
            f"Cannot run {target}: the interpreter in its first line, {words[0]!r}, does not exist. Correct the line."
        )


def _check_script(path: Path) -> None:
    if path.suffix == ".ipynb":
        raise UsageError(
            f"Cannot run {path}: a notebook is not a script. Export it: jupyter nbconvert --to script {path}"
        )
    if path.is_dir():
        raise UsageError(
            f"Cannot run {path}: it is a directory. Give the script in it, or run a package with -m."
        )
    if not path.exists():
        similar = _find_similar_path(path)
        raise UsageError(
            f"Script not found: {path}. {f'Did you mean {similar}?' if similar else 'Check its path.'}"
        )
    # Not by opening it: a pipe would lose its writer.
    if not os.access(path, os.R_OK):
        raise UsageError(
            f"Cannot read the script {path}: {os.strerror(errno.EACCES)}. Change its permissions."
        )


def _find_similar_path(path: Path) -> Path | None:
    """Return an existing file whose path differs in one similar name."""
    missing = next(part for part in (*reversed(path.parents), path) if not part.exists())
    if not missing.parent.is_dir():
        return None
    name = find_nearest(missing.name, [item.name for item in missing.parent.iterdir()])
    similar = missing.parent / name / path.relative_to(missing) if name else path
    return similar if similar.is_file() else None


def find_options_after_script(request: Request, options: Iterable[str]) -> list[str]:
    """Find `options` of `accel launch` among the arguments of a script that does not declare them.

    Options of one letter, and those of a program (`--no-python`), are likely to be the script's own.
    """
    args = request.args[: request.args.index("--")] if "--" in request.args else request.args
    launch_options = {name for name in options if name.startswith("--")} - {"--help"}
    names = [argument.partition("=")[0] for argument in args]
    names = [name for name in dict.fromkeys(names) if name.replace("_", "-") in launch_options]
    if not names or request.kind == "program":
        return []
    from accel_cli.runner.forkserver import read_source

    try:
        source = read_source(request.kind, request.target).decode(errors="replace")
    except (OSError, ImportError, ValueError):  # the script of a pod may be on its workers only
        source = ""
    return [name for name in names if not _declares(source, name)]


def _declares(source: str, option: str) -> bool:
    """Return True if the text of a script has an option, or reads or declares a parameter of its name."""
    name = re.escape(option.removeprefix("--").replace("_", "-")).replace(r"\-", "[-_]")
    pattern = rf"--{name}(?![-\w])|\.{name}\b(?!\s*\()|\b{name}\s*(:[ \t]*\w|=(?!=))"
    return re.search(pattern, source) is not None
