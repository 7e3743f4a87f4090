"""`accel migrate`: convert training scripts to accel."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from accel_cli import console
from accel_cli.commands.command import Command
from accel_cli.commands.completion import complete_files
from accel_cli.commands.options import argument, option
from accel_cli.errors import UsageError

if TYPE_CHECKING:
    from accel_cli.migrate.files import MigratedFile

__all__ = ["migrate"]

_MAX_UNCHANGED = 5
"""The number of scripts that are listed one by one because nothing has to change in them."""
_COLORS = {"+": "\x1b[32m", "-": "\x1b[31m", "@": "\x1b[36m"}


@click.command("migrate", cls=Command, panel="Set up", epilog="Example: accel migrate train.py")
@argument(
    "paths",
    metavar="PATH",
    nargs=-1,
    required=True,
    help="Convert these scripts, or the scripts in these folders; - reads a script from the standard input.",
    shell_complete=complete_files,
)
@option(
    "--write",
    is_flag=True,
    help="Write the changes; the files before are kept as *.orig. A script from the standard input is printed.",
)
@option("--check", is_flag=True, help="Exit with code 1 if something is left to do.")
@click.pass_context
def migrate(context: click.Context, paths: tuple[str, ...], write: bool, check: bool) -> None:
    """Convert training scripts, and shell scripts that launch them, to accel.

    Prints the changes as a diff, and the places that are not converted with the code to write. Scripts are only read, and
    not run.
    """
    if "" in paths:  # not the current folder, as for Path("")
        raise UsageError("Cannot migrate '': the name is empty. Check the variable that contains it.")
    files, problems = _read_files([Path(path) for path in paths])
    for file in files:
        problems += [f"{file.name}:{place.line}: {place.text}" for place in file.findings]
        problems += [f"{file.name}:{place.line}: note: {place.text}" for place in file.notes]
    changed = [file for file in files if file.is_changed]
    unwritten = [error for file in files if (error := _show(file, write=write))]
    sys.stdout.flush()
    problems += unwritten
    for problem in problems:
        console.print_problem(problem)
    as_they_are = [note for file in files if (note := _describe_unchanged(file))]
    for note in as_they_are[:_MAX_UNCHANGED]:
        console.note(note)
    if len(as_they_are) > _MAX_UNCHANGED:
        console.note(f"{_count(len(as_they_are) - _MAX_UNCHANGED)} more: the same")
    if not changed and not problems and not as_they_are:
        console.note("nothing to convert")
    elif changed and not write:
        console.note(f"{_count(len(changed))} would change; accel migrate --write applies it")
    if unwritten:
        context.exit(2)
    if check and ((changed and not write) or any(file.findings for file in files)):
        context.exit(1)


def _read_files(paths: list[Path]) -> tuple[list[MigratedFile], list[str]]:
    """Return the files after their conversion, and the errors of files in folders that cannot be converted."""
    from accel_cli.migrate.files import find_files, migrate_file

    files: list[MigratedFile] = []
    problems: list[str] = []
    done: set[Path] = set()
    for path, folder in find_files(paths):
        if path.resolve() in done:
            continue
        done.add(path.resolve())
        try:
            files.append(migrate_file(path, folder))
        except UsageError as error:
            if path in paths or "libcst" in str(error):
                raise
            problems.append(str(error))
    return files, problems


def _show(file: MigratedFile, *, write: bool) -> str:
    """Write a file, or print its changes; return the error if it cannot be written."""
    from accel_cli.migrate.files import STDIN
    from accel_runtime.environment.text import encode_text, escape_controls

    if write and file.path == STDIN:
        console.write_content(encode_text(file.after))
    elif write and file.is_changed:
        try:
            console.note(
                f"wrote {file.name}; the file before is {escape_controls(file.write().name, keep_lines=False)}"
            )
        except UsageError as error:
            return str(error)
    elif file.is_changed:
        _print_diff(file.format_diff())
    return ""


def _describe_unchanged(file: MigratedFile) -> str:
    """Return that `accel launch` runs a script of a library as it is; empty for one that is converted, or has no library."""
    if file.library and file.findings:
        return f"{file.name}: accel launch also runs it as it is, with {file.library}"
    if file.library and not file.is_changed:
        return f"{file.name}: nothing has to change, since accel launch runs {file.library} as it is"
    return ""


def _count(number: int) -> str:
    return "1 file" if number == 1 else f"{number} files"


def _print_diff(diff: str) -> None:
    from accel_runtime.environment.text import encode_text

    if not sys.stdout.isatty():
        console.write_content(encode_text(diff))
        return
    for line in diff.splitlines():
        is_plain = line.startswith(("+++", "---")) or not console.use_color()
        console.plain(line, style="" if is_plain else _COLORS.get(line[:1], ""))
