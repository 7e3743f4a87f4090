"""What a person sees: notes and errors on stderr, tables on stdout, all readable on 80 columns."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

__all__ = ["coloured", "error", "failure", "note", "plain", "short", "show", "table"]


def note(text: str) -> None:
    """A line about what happens, beside the script's own output."""
    _err().print(f"[dim]accel:[/dim] {escape(text)}", highlight=False, soft_wrap=True)


def error(text: str) -> None:
    """What went wrong and what to do."""
    _err().print(f"[bold red]accel: error:[/bold red] {escape(text)}", highlight=False, soft_wrap=True)


def failure(where: str, body: Sequence[str], cause: str) -> None:
    """How a process failed, cause last: a panel on a terminal, plain lines for other programs.

    Args:
        where: Which process.
        body: Where it happened, as lines.
        cause: What it raised, or how it ended.
    """
    screen = _err()
    if body and screen.is_terminal:
        text = Text("\n".join([*body, ""]), overflow="fold").append(cause, style="bold red")
        screen.print(Panel(text, title=Text(f"{where} failed"), title_align="left", border_style="red"))
        return
    if body:
        called = any(line.startswith('  File "') and ", in " in line for line in body)
        head = ["Traceback (most recent call last):"] if called else []
        screen.print(Text("\n".join([*head, *body])), soft_wrap=True)
    error(f"{where}: {cause}")


def coloured() -> bool:
    """Whether there may be colours on a terminal."""
    return not _err().no_color


def plain(text: str) -> None:
    """Text for other programs, as it is."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def show(text: str) -> None:
    """Text for a person, with rich's markup."""
    Console().print(text, highlight=False, soft_wrap=True)


def short(text: str) -> str:
    """A text in which the person's home is `~`."""
    return text.replace(f"{Path.home()}/", "~/")


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Rows under headings; to another program, one line a row with tabs between."""
    if not sys.stdout.isatty():
        for row in rows:
            plain("\t".join(row))
        return
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        grid.add_column(column, overflow="fold")
    for row in rows:
        grid.add_row(*map(escape, row))
    Console().print(grid)


def _err() -> Console:
    return Console(stderr=True)
