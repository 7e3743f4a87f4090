"""What a person sees: notes and errors on stderr, tables on stdout, all readable on 80 columns."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = [
    "coloured",
    "confirm",
    "drop_typed",
    "error",
    "failure",
    "is_secret",
    "mask_secrets",
    "moving",
    "note",
    "plain",
    "reading",
    "short",
    "show",
    "size",
    "spinner",
    "table",
]


_BOLD_RED = "\x1b[1;31m"
_DIM = "\x1b[2m"
_RESET = "\x1b[0m"
_THOUSAND = 1000
_PATIENCE_S = 1.0
"""What takes longer is shown to be under way."""


def note(text: str) -> None:
    """A line about what happens, beside the script's own output."""
    _say("accel:", _DIM, text)


def error(text: str) -> None:
    """What went wrong and what to do."""
    _say("accel: error:", _BOLD_RED, text)


def failure(where: str, body: Sequence[str], cause: str) -> None:
    """How a process failed, cause last: a panel on a terminal, plain lines for other programs.

    Args:
        where: Which process.
        body: Where it happened, as lines.
        cause: What it raised, or how it ended.
    """
    if body and sys.stderr.isatty():
        _panel(f"{where} failed", [*body, ""], cause)
        return
    if body:
        called = any(line.startswith('  File "') and ", in " in line for line in body)
        head = ["Traceback (most recent call last):"] if called else []
        _write("\n".join([*head, *body, ""]))
    error(f"{where}: {cause}")


def coloured() -> bool:
    """Whether there may be colours on a terminal."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def confirm(question: str) -> bool:
    """Ask on a terminal if something shall be done; anything but a yes is a no."""
    drop_typed()
    try:
        answer = input(f"{question} [y/N] ")
    except EOFError:
        _write("\n")
        return False
    return answer.strip().lower() in {"y", "yes"}


def drop_typed() -> None:
    """Drop the lines that were typed on the terminal before a question was shown."""
    if os.name == "posix" and sys.stdin.isatty():
        import termios  # noqa: PLC0415 - not on Windows, and not what a launch needs

        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)


def plain(text: str) -> None:
    """Text for other programs, as it is."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def show(text: str) -> None:
    """Text for a person, with rich's markup."""
    from rich.console import Console  # noqa: PLC0415 - not what a launch needs

    Console().print(text, highlight=False, soft_wrap=True)


def short(text: str) -> str:
    """A text in which the person's home is `~`."""
    return text.replace(f"{Path.home()}/", "~/")


def size(number: float) -> str:
    """A number of bytes."""
    for unit in ("B", "kB", "MB"):
        if number < _THOUSAND:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= _THOUSAND
    return f"{number:.2f} GB"


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Rows under headings; to another program, one line a row with tabs between."""
    if not sys.stdout.isatty():
        for row in rows:
            plain("\t".join(row))
        return
    from rich.console import Console  # noqa: PLC0415 - as above
    from rich.markup import escape  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    grid = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        grid.add_column(column, overflow="fold")
    for row in rows:
        grid.add_row(*map(escape, row))
    Console().print(grid)


@contextmanager
def reading() -> Iterator[Callable[[str, int, int], None]]:
    """Show on a terminal how much of a directory was read, once that takes a while.

    Yields:
        Told which directory it is, how many bytes of it were read, and how many there are (0: not known).
    """
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    with ExitStack() as stack:
        bars: list[Any] = []
        tasks: dict[str, Any] = {}
        begun = time.monotonic()

        def tell(path: str, done: int, total: int) -> None:
            nonlocal begun
            begun = begun if tasks else time.monotonic()
            tasks.setdefault(path, None)
            if time.monotonic() - begun < _PATIENCE_S:
                return
            if not bars:
                bars.append(stack.enter_context(_progress()))
            if tasks[path] is None:
                tasks[path] = bars[0].add_task(Path(path).name, total=total or None)
            bars[0].update(tasks[path], completed=done)

        yield tell


@contextmanager
def moving(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show on a terminal how much of something was sent or fetched; threads may tell it.

    Yields:
        Told how many bytes more there are; less than nothing where some are moved again.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.progress import TransferSpeedColumn  # noqa: PLC0415 - as above

    with _progress(TransferSpeedColumn()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda more: bar.advance(task, more)


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """Show that something is under way; keys that are pressed meanwhile are dropped.

    Shown, the end of a line would move the spinner's line up, where nothing takes it away; and kept, they would answer a
    question that was not read.
    """
    from rich.console import Console  # noqa: PLC0415 - as above

    with _dropped_keys(), Console().status(text):
        yield


@contextmanager
def _dropped_keys() -> Iterator[None]:
    """Neither show nor keep what is typed on the terminal, if there is one."""
    if os.name != "posix" or not sys.stdin.isatty():
        yield
        return
    import termios  # noqa: PLC0415 - not on Windows, and not what a launch needs

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    local = before[3] & ~(termios.ECHO | termios.ECHONL)
    termios.tcsetattr(terminal, termios.TCSADRAIN, [*before[:3], local, *before[4:]])
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSAFLUSH, before)


def _progress(*more: Any) -> Any:
    from rich.console import Console  # noqa: PLC0415 - as above
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), *more)
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _say(head: str, style: str, text: str) -> None:
    """Write a message to stderr, its head in a style where a person looks at it."""
    # By hand: a launch says one line, and rich takes as long to import as all else a launch does.
    styled = f"{style}{head}{_RESET}" if sys.stderr.isatty() and coloured() else head
    _write(f"{styled} {text}\n")


def _write(text: str) -> None:
    """Write to stderr; a screen that is full or gone must not end what is under way."""
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _panel(title: str, body: Sequence[str], cause: str) -> None:
    from rich.console import Console  # noqa: PLC0415 - as above
    from rich.panel import Panel  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    text = Text("\n".join(body), overflow="fold").append(cause, style="bold red")
    panel = Panel(text, title=Text(title), title_align="left", border_style="red")
    Console(stderr=True).print(panel)


_SECRET = re.compile(
    r"SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|PRIVATE|API_?KEY|ACCESS_?KEY|(?<!KMS)_KEY$|_PAT$|COOKIE|AUTH",
    re.IGNORECASE,
)
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def is_secret(name: str) -> bool:
    """Whether the name of a variable speaks of a secret."""
    return bool(_SECRET.search(name))


def mask_secrets(name: str, value: str) -> str:
    """The value, unless the name speaks of a secret; a login inside an address is masked too."""
    return "***" if value and is_secret(name) else _IN_URL.sub("***", value)
