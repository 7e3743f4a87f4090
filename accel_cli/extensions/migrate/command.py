"""`accel migrate`: convert training scripts to accel."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accel_cli import console
from accel_cli.commands.command import ScriptCommand, get_parsed
from accel_cli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel_cli.extensions.migrate.files import MigratedFile

__all__ = ["app"]

app = typer.Typer()

_MAX_UNCHANGED = 5
"""The number of scripts that are listed one by one because nothing has to change in them."""
_PROGRESS_S = 5.0
"""The seconds between two lines of progress, on a terminal and in a pipe."""
_MANY_FILES, _CHUNK = 16, 4
_STEPS, _TIMEOUT_S = 10, 300
_VERIFY = "Verify"
_PREPARED = re.compile(r"accelerator\.prepare(?:_data_loader)?\(([^)]*)\)")
_COLORS = {"+": "\x1b[32m", "-": "\x1b[31m", "@": "\x1b[36m"}


@app.command("migrate", cls=ScriptCommand, rich_help_panel="Set up", epilog="Example: accel migrate train.py")
def migrate(  # noqa: PLR0913 - an argument for each option
    context: typer.Context,
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH",
            help="Convert these scripts, or the scripts in these folders; - reads a script from the standard input.",
        ),
    ],
    *,
    write: Annotated[
        bool,
        typer.Option(
            "--write",
            help="Write the changes; the files before are kept as *.orig. A script from the standard input is printed.",
        ),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with code 1 if something is left to do.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Run the first steps of the script before and after the conversion, on one process and on two, in a copy "
            "of its folder, and compare them. Arguments of the script follow --. Other paths are scripts that it imports.",
            rich_help_panel=_VERIFY,
        ),
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            metavar="N",
            min=1,
            help=f"Set the number of optimizer steps that --verify compares (default: {_STEPS}).",
            rich_help_panel=_VERIFY,
        ),
    ] = None,
    timeout: Annotated[
        int | None,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            min=1,
            help=f"Set the time that --verify waits for each step (default: {_TIMEOUT_S}).",
            rich_help_panel=_VERIFY,
        ),
    ] = None,
) -> None:
    """Convert training scripts, and shell scripts that launch them, to accel.

    Prints the changes as a diff, and the places that are not converted with the code to write.

    Scripts are only read, and not run, except with --verify.
    """
    words = get_parsed(context).words
    arguments = words[words.index("--") + 1 :] if verify and "--" in words else ()
    scripts = paths[: len(paths) - len(arguments)]
    if "" in scripts:  # not the current folder, as for Path("")
        raise UsageError("Cannot migrate '': the name is empty. Check the variable that contains it.")
    if verify:
        options = ["--write"] * write + ["--check"] * check
        with _exit_at_signals():
            raise typer.Exit(_verify(scripts, arguments, context, options))
    if steps or timeout:
        raise UsageError("Cannot use --steps or --timeout: nothing is run. Add --verify.")
    _convert([Path(path) for path in paths], write=write, check=check)


def _convert(paths: list[Path], *, write: bool, check: bool) -> None:
    """Print or write the changes, and print the places that are left."""
    files, problems = _read_files(paths)
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
    console.print_notes(as_they_are[:_MAX_UNCHANGED])
    if len(as_they_are) > _MAX_UNCHANGED:
        console.note(f"{_count(len(as_they_are) - _MAX_UNCHANGED)} more: the same")
    if not changed and not problems and not as_they_are:
        console.note("nothing to convert")
    elif changed and not write:
        console.note(f"{_count(len(changed))} would change; accel migrate --write applies it")
    if write and (names := ", ".join(file.name for file in changed if _multiplies_batch(file))):
        console.note(
            f"{names}: on N processes, the global batch is N times as large as before, and the learning rate is not; "
            "Accelerator(split_batches=True) keeps the global batch"
        )
    if unwritten:
        raise typer.Exit(2)
    if check and ((changed and not write) or any(file.findings for file in files)):
        raise typer.Exit(1)


def _read_files(paths: list[Path]) -> tuple[list[MigratedFile], list[str]]:
    """Return the files after their conversion, and the errors of files in folders that cannot be converted."""
    from accel_cli.extensions.migrate.files import MigratedFile, find_files, join_trainings

    files: list[MigratedFile] = []
    problems: list[str] = []
    unique: dict[Path, tuple[Path, Path]] = {}
    for path, folder in find_files(paths):
        unique.setdefault(path.resolve(), (path, folder))
    found = list(unique.values())
    for (path, _), result in zip(found, _migrate_files(found), strict=True):
        if isinstance(result, MigratedFile):
            files.append(result)
        elif path in paths:
            raise UsageError(result)
        else:
            problems.append(result)
    return join_trainings(files), problems


def _migrate_files(found: list[tuple[Path, Path]]) -> Iterator[MigratedFile | str]:
    """Yield each file after its conversion, or its error, in order; many files are converted by all CPUs."""
    paths = [path for path, _ in found]
    if len(found) < _MANY_FILES:
        yield from _report_progress(paths, map(_try_to_migrate, found))
        return
    from concurrent.futures import ProcessPoolExecutor

    from accel_runtime.environment.cgroup import count_cpus

    with ProcessPoolExecutor(count_cpus(), initializer=_ignore_interrupts) as pool:
        try:
            # map starts the processes: they are forked before the thread that prints
            results = pool.map(_try_to_migrate, found, chunksize=_CHUNK)
            yield from _report_progress(paths, results)
        finally:
            pool.shutdown(cancel_futures=True)


def _report_progress(
    paths: list[Path], results: Iterator[MigratedFile | str]
) -> Iterator[MigratedFile | str]:
    """Yield results of files, and print again and again how many there are, and the file that is converted."""
    ended = threading.Event()
    current = 0

    def report() -> None:
        while not ended.wait(_PROGRESS_S):
            console.note(f"read {current} of {_count(len(paths))}; converting {paths[current]}")

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        for result in results:
            current = min(current + 1, len(paths) - 1)
            yield result
    finally:
        ended.set()
        thread.join()


def _ignore_interrupts() -> None:
    """Leave Ctrl-C to the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _try_to_migrate(file: tuple[Path, Path]) -> MigratedFile | str:
    """Return a file after its conversion, or its error: one file never ends the conversion of a folder."""
    from accel_cli.extensions.migrate.files import MissingPackageError, migrate_file

    try:
        return migrate_file(*file)
    except MissingPackageError:
        raise
    except UsageError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - an error of accel, which other files may not have
        place = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"Cannot migrate {file[0]}: accel failed with {type(error).__name__} in {Path(place.filename).name}:{place.lineno} ({error}). "
            "Convert this file by hand, and report the error."
        )


def _verify(scripts: list[str], arguments: tuple[str, ...], context: typer.Context, others: list[str]) -> int:
    """Compare the first steps before and after the conversion; return the exit code.

    Args:
        scripts: The paths of the scripts.
        arguments: The arguments of the first one, which follow `--`.
        context: The context of the command.
        others: The options that exclude a comparison.
    """
    if others:
        raise UsageError(
            f"Cannot combine --verify with {' and '.join(others)}: it compares, and changes nothing. Run accel migrate --verify first."
        )
    from accel_cli.extensions.migrate.verification import ConvertedScript, read_versions, verify
    from accel_cli.extensions.migrate.verification_runs import VerifyOptions
    from accel_cli.planning.machine import detect_quickly

    paths = [Path(path) for path in scripts]
    if not paths:
        raise UsageError("Cannot compare: there is no script before --. Put PATH before --.")
    versions, left = read_versions(paths)
    converted = ConvertedScript(
        script=paths[0],
        before={path: before for path, (before, _) in versions.items()},
        after={path: after for path, (_, after) in versions.items()},
        options=VerifyOptions(
            arguments=arguments,
            environ=os.environ,
            max_steps=context.params["steps"] or _STEPS,
            timeout_s=context.params["timeout"] or _TIMEOUT_S,
        ),
        devices=len(detect_quickly(os.environ).devices),
    )
    result = verify(converted, console.note)
    columns = (
        "step",
        "loss before",
        "loss after",
        "loss on 2 processes",
        "difference after",
        "difference on 2 processes",
    )
    console.table(columns, result.rows)
    sys.stdout.flush()
    console.print_notes(result.sentences)
    if left:
        console.note(f"{left} left to convert by hand; accel migrate {paths[0]} lists them")
    return 0 if result.is_equal else 1


@contextmanager
def _exit_at_signals() -> Iterator[None]:
    """Exit at SIGTERM and SIGHUP through the handlers of exceptions, which end the processes that were started."""

    def raise_exit(number: int, _frame: Any) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, raise_exit) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show(file: MigratedFile, *, write: bool) -> str:
    """Write a file, or print its changes; return the error if it cannot be written."""
    from accel_cli.extensions.migrate.files import STDIN
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


def _multiplies_batch(file: MigratedFile) -> bool:
    """Return if a script of one process has loaders that are prepared now; those of several processes had as large batches before."""
    is_parallel = any(word in file.before for word in ("distributed", "accelerate", "fabric"))
    return not is_parallel and any(
        re.search("load|data|batch|_dl", arguments, re.IGNORECASE)
        for arguments in _PREPARED.findall(file.after)
    )


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
