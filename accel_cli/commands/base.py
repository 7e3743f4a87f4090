"""Base classes of the commands, which print their help in panels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup
from typing_extensions import override

__all__ = ["AccelCommand", "AccelGroup", "CommandApp", "get_summary"]

Function = TypeVar("Function", bound=Callable[..., Any])


class _HelpMixin:
    """Prints the help without typer's formatter: importing that takes as long as the rest of `accel --help`."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line."""
        pieces: list[str] = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [piece.replace("{", "").replace("}", "") for piece in pieces]

    def format_help(self, ctx: Any, _formatter: Any) -> None:
        """Print the help to stdout."""
        _print_help(self, ctx)

    def list_summaries(self, _ctx: Any) -> Iterator[tuple[str, str, str]]:
        """Yield the panel, name and summary of each subcommand."""
        yield from ()


class AccelCommand(_HelpMixin, TyperCommand):
    """A command."""


class AccelGroup(_HelpMixin, TyperGroup):
    """A group of commands."""

    @override
    def list_summaries(self, ctx: Any) -> Iterator[tuple[str, str, str]]:
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            yield command.rich_help_panel or "Commands", name, get_summary(command.help)


class CommandApp(typer.Typer):
    """A typer application with `AccelGroup` and `AccelCommand` as default classes."""

    @override
    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"cls": AccelGroup, "add_completion": False, **settings})

    @override
    def command(self, *args: Any, **settings: Any) -> Callable[[Function], Function]:
        return super().command(*args, **{"cls": AccelCommand, **settings})


def get_summary(text: str | None) -> str:
    """Return the first paragraph of a help text, in one line."""
    return " ".join(inspect.cleandoc(text or "").partition("\n\n")[0].split())


def _print_help(command: Any, ctx: Any) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    def highlight(text: str, style: str = "") -> Text:
        content = Text(text, style)
        content.highlight_regex(r"(?<![\w-])--?[A-Za-z][\w-]*", "bold cyan")
        return content

    options: dict[str, list[tuple[Text, Text]]] = {"Arguments": [], "Options": []}
    for parameter in command.get_params(ctx):
        if record := parameter.get_help_record(ctx):
            is_argument = parameter.param_type_name == "argument"
            # The option --help has no panel in older versions of typer.
            title = getattr(parameter, "rich_help_panel", None) or ("Arguments" if is_argument else "Options")
            names = highlight(parameter.metavar if is_argument else record[0], "yellow")
            # Older versions of typer escape the bracket for rich.
            options.setdefault(title, []).append((names, highlight(record[1].replace("\\[", "["))))
    commands: dict[str, list[tuple[Text, Text]]] = {}
    for title, name, summary in command.list_summaries(ctx):
        commands.setdefault(title, []).append((Text(name, "bold cyan"), Text(summary)))

    console = Console(highlight=False)
    console.print(Padding(highlight(command.get_usage(ctx), "bold"), 1))
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    console.print(Padding(Text(text), (0, 1, 1, 1)))
    for panels in (options, commands):
        longest = max((len(names) for rows in panels.values() for names, _ in rows), default=0)
        for title, rows in panels.items():
            if rows:
                grid = Table.grid(padding=(0, 2))
                grid.add_column(min_width=min(longest, console.width // 3), overflow="fold")
                grid.add_column(overflow="fold")
                for row in rows:
                    grid.add_row(*row)
                console.print(Panel(grid, title=title, title_align="left", border_style="dim"))
    if command.epilog:
        console.print(Padding(highlight(command.epilog), 1))
