"""Output of the commands: notes and errors on stderr, tables on stdout, secrets masked."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "abbreviate_home",
    "confirm",
    "discard_typed_input",
    "error",
    "format_duration",
    "format_size",
    "get_terminal_size",
    "is_dumb_terminal",
    "is_secret",
    "mask_arguments",
    "mask_secrets",
    "note",
    "plain",
    "print_failure",
    "print_json",
    "print_notes",
    "print_problem",
    "read_progress",
    "show",
    "spinner",
    "table",
    "transfer_progress",
    "use_color",
    "write_content",
]


_BOLD_RED = "\x1b[1;31m"
_DIM = "\x1b[2m"
_RESET = "\x1b[0m"
_TABLE_GAP = 2
"""Columns of the terminal between two columns of a table."""
_PROGRESS_DELAY_S = 1.0
"""Reads that take longer show a progress bar."""


def note(text: str) -> None:
    """Write a line about the progress of a command to stderr."""
    _write_message("accel:", _DIM, text)


def print_notes(texts: Iterable[str]) -> None:
    """Write lines about the progress of a command to stderr."""
    for text in texts:
        note(text)


def error(text: str) -> None:
    """Write an error and its cure to stderr."""
    _write_message("accel: error:", _BOLD_RED, text)


def print_problem(text: str) -> None:
    """Write a problem of a file to stderr, as in `train.py:7: text`, the form that editors read."""
    _write(f"{_escape(text)}\n")


def print_failure(process: str, body: Sequence[str], cause: str) -> None:
    """Write how a process failed, cause last: a panel on a terminal, plain lines for other programs.

    Args:
        process: The rank, node and PID.
        body: The lines of the traceback.
        cause: The exception, or how the process ended.
    """
    if body and sys.stderr.isatty():
        _print_panel(f"{process} failed", [*body, ""], cause)
        return
    if body:
        calls = [
            number for number, line in enumerate(body) if line.startswith('  File "') and ", in " in line
        ]
        # The exceptions before this one are no part of its traceback.
        first = next((number for number, line in enumerate(body) if line.startswith("  ")), 0)
        head = ["Traceback (most recent call last):"] if calls else []
        _write(_escape("\n".join([*body[:first], *head, *body[first:], ""])))
    error(f"{process}: {cause}")


def use_color() -> bool:
    """Return whether output to a terminal may be coloured."""
    return not os.environ.get("NO_COLOR") and not is_dumb_terminal()


def is_dumb_terminal() -> bool:
    """Return True if the terminal, if there is one, knows no escape sequences."""
    return os.environ.get("TERM") == "dumb"


def confirm(question: str, *, default: bool = False) -> bool:
    """Ask a yes-or-no question on the terminal; Enter gives the default answer, the end of the input False."""
    discard_typed_input()
    try:
        answer = input(f"{_escape(question)} [{'Y/n' if default else 'y/N'}] ").strip().lower()
    except EOFError:
        _write("\n")
        return False
    return answer in {"y", "yes"} or (default and not answer)


def discard_typed_input() -> None:
    """Discard the lines that were typed on the terminal before a question was shown."""
    if os.name == "posix" and sys.stdin.isatty():
        import termios  # noqa: PLC0415 - not on Windows, and not needed by a launch

        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)


def plain(text: str, *, style: str = "") -> None:
    """Write text to stdout, with its control characters as escapes; `style` is an escape sequence of the terminal."""
    text = _escape(text.removesuffix("\n"))
    sys.stdout.write(f"{style}{text}{_RESET if style else ''}\n")


def write_content(data: bytes) -> None:
    """Write the output of a script, or a file for another program, to stdout unchanged."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def print_json(data: Any) -> None:
    """Write data to stdout as JSON."""
    import json  # noqa: PLC0415 - not needed by a launch

    plain(json.dumps(data, indent=2))


def show(text: str) -> None:
    """Write text with rich's markup to stdout."""
    from rich.console import Console  # noqa: PLC0415 - slow, and not needed by a launch

    Console().print(_escape(text), highlight=False, soft_wrap=True)


def abbreviate_home(text: str) -> str:
    """Return a text with `~` for the home directory."""
    return text.replace(f"{os.path.expanduser('~')}/", "~/")  # noqa: PTH111 - Path.home() fails without a home


def format_duration(seconds: float) -> str:
    """Return a duration with its units: `0.8 s`, `42 s`, `3 min 20 s`, `3 h 12 min` or `2 d 4 h`."""
    # Two units at most; a duration that rounds to a full unit has the larger one.
    if round(seconds, 1) < 1:
        return f"{max(seconds, 0.0):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:  # noqa: PLR2004 - an hour
        units = ((minutes, "min"), (rest, "s"))
    elif minutes < 24 * 60:
        units = ((minutes // 60, "h"), (minutes % 60, "min"))
    else:
        hours = minutes // 60
        units = ((hours // 24, "d"), (hours % 24, "h"))
    return " ".join(f"{count} {unit}" for count, unit in units if count)


def format_size(size: float) -> str:
    """Return a number of bytes with its unit."""
    from accel_runtime.environment import settings as env  # noqa: PLC0415 - not needed by the help

    return env.format_size(size)


def table(
    columns: Iterable[str],
    rows: Iterable[Iterable[str]],
    *,
    fixed: Collection[str] = (),
    cropped: Collection[str] = (),
    optional: Sequence[str] = (),
) -> None:
    r"""Write rows below headings to a terminal, and separated by tabs to other programs.

    On a narrow terminal, long values are folded; those of `cropped` columns are shortened, and `fixed` columns stay. Columns
    of `optional` are left out, the first one first, while the fixed ones do not fit. Control characters, such as the escape
    sequences of a terminal in the name of a file, are written as `\x1b`.
    """
    columns = list(columns)
    rows = [[_escape(value, keep_lines=False) for value in row] for row in rows]
    if not sys.stdout.isatty():
        for row in [columns, *rows] if any(columns) else rows:
            plain("\t".join(row))
        return
    from rich.cells import cell_len  # noqa: PLC0415 - as above
    from rich.console import Console  # noqa: PLC0415
    from rich.markup import escape  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    screen = Console()
    cells = [(heading, values) for heading, *values in zip(columns, *rows, strict=True)]
    widths = [
        max(map(cell_len, [heading, *([] if heading in cropped else words)]))
        for heading, values in cells
        for words in [values if heading in fixed else " ".join(values).split()]
    ]
    for heading in optional:
        if sum(width + _TABLE_GAP for width in widths) - _TABLE_GAP > screen.width:
            index = next(index for index, (each, _) in enumerate(cells) if each == heading)
            del cells[index], widths[index]
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for heading, _ in cells:
        overflow: Literal["ellipsis", "fold"] = "ellipsis" if heading in cropped else "fold"
        grid.add_column(heading, overflow=overflow, no_wrap=heading in fixed)
    for row in zip(*(values for _, values in cells), strict=True):
        grid.add_row(*map(escape, row))
    screen.print(grid)


@contextmanager
def read_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show on a terminal how much of each directory was read, once that takes more than a second.

    Yields:
        A function of a directory, the number of bytes read from it, and the number of its bytes (0 if unknown).
    """
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    with ExitStack() as stack:
        bar: Any = None
        tasks: dict[str, Any] = {}
        start: float | None = None

        def report(path: str, done: int, total: int) -> None:
            nonlocal bar, start
            now = time.monotonic()
            start = now if start is None else start
            if now - start < _PROGRESS_DELAY_S:
                return
            if bar is None:
                bar = stack.enter_context(_create_progress())
            if path not in tasks:
                tasks[path] = bar.add_task(_escape(Path(path).name, keep_lines=False), total=total or None)
            bar.update(tasks[path], completed=done)

        yield report


@contextmanager
def transfer_progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show on a terminal how many of `total` bytes were uploaded or downloaded.

    Yields:
        A thread-safe function that adds a number of bytes; negative if they are transferred again.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.progress import TransferSpeedColumn  # noqa: PLC0415 - as above

    with _create_progress(TransferSpeedColumn()) as bar:
        task = bar.add_task(_escape(title, keep_lines=False), total=total)
        yield lambda size: bar.advance(task, size)


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """Show a spinner with a text, and discard keys that are pressed meanwhile.

    An echoed newline would leave a line of the spinner on the screen, and buffered keys would answer the next question.
    """
    from rich.console import Console  # noqa: PLC0415 - as above

    with _discard_keys(), Console().status(_escape(text)):
        yield


@contextmanager
def _discard_keys() -> Iterator[None]:
    """Turn off echo on the terminal, if there is one, and discard its input at the end."""
    if os.name != "posix" or not sys.stdin.isatty():
        yield
        return
    import termios  # noqa: PLC0415 - not on Windows, and not needed by a launch

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    local = before[3] & ~(termios.ECHO | termios.ECHONL)
    termios.tcsetattr(terminal, termios.TCSADRAIN, [*before[:3], local, *before[4:]])
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSAFLUSH, before)


def _create_progress(*extra_columns: Any) -> Any:
    from rich.console import Console  # noqa: PLC0415 - as above
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), *extra_columns)
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _write_message(head: str, style: str, text: str) -> None:
    """Write a message to stderr, with a styled head on a terminal."""
    # Without rich: importing it takes as long as everything else in a launch.
    styled = f"{style}{head}{_RESET}" if sys.stderr.isatty() and use_color() else head
    _write(f"{styled} {_escape(text)}\n")


def _write(text: str) -> None:
    """Write to stderr; a full or closed stream must not end the command."""
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _escape(text: str, *, keep_lines: bool = True) -> str:
    from accel_runtime.environment.text import escape_controls  # noqa: PLC0415 - not needed by the help

    return escape_controls(text, keep_lines=keep_lines)


_BORDER = 6
"""Columns beside the title of a panel."""


def _print_panel(title: str, body: Sequence[str], cause: str) -> None:
    from rich.console import Console  # noqa: PLC0415 - as above
    from rich.panel import Panel  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console, heading = Console(stderr=True), Text(_escape(title))
    text = Text(_escape("\n".join(body)), overflow="fold")
    text.append(_escape(cause), style="bold red")
    # rich cuts a title that is longer than its line.
    is_long = heading.cell_len > console.width - _BORDER
    text = Text("\n\n").join([heading, text]) if is_long else text
    console.print(Panel(text, title=None if is_long else heading, title_align="left", border_style="red"))


_SECRET = re.compile(
    r"SECRET|TOKEN(?!IZ)|PASSWORD|PASSWD|CREDENTIAL|PRIVATE|API_?KEY|ACCESS_?KEY|(?<!KMS)_KEY$|_PAT$|COOKIE|AUTH",
    re.IGNORECASE,
)
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def is_secret(name: str) -> bool:
    """Return whether a variable looks like a secret by its name."""
    return bool(_SECRET.search(name))


def mask_secrets(name: str, value: str) -> str:
    """Return `***` if the name looks like a secret, else the value with logins in its URLs masked."""
    return "***" if value and is_secret(name) else _IN_URL.sub("***", value)


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command with secrets masked, as in `--token=abc`, `--token abc` and `api_key=abc`."""
    masked, pending = [], ""
    for argument in arguments:
        option, equals, value = argument.partition("=")
        is_assignment = bool(equals) and "://" not in option
        name = option.lstrip("+~-").replace("-", "_")
        if pending and is_secret(pending):
            # Also if it begins with a hyphen, as a password may.
            masked.append("***")
        elif is_assignment:
            masked.append(f"{option}={mask_secrets(name, value)}")
        else:
            masked.append(mask_secrets("", argument))
        pending = name if argument.startswith("-") and not is_assignment else ""
    return masked


def get_terminal_size(fd: int) -> os.terminal_size:
    """Return the columns and lines of a terminal; 80 and 24 if it does not know them, as over some serial lines.

    Raises:
        OSError: The descriptor is closed, or is not a terminal.
    """
    columns, lines = os.get_terminal_size(fd)
    return os.terminal_size((columns or 80, lines or 24))
