"""The classes of commands and groups: help in panels, commands that are imported when used, and advice for options."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
from typing_extensions import override

from accel_cli.errors import UsageError
from accel_cli.planning.launch_options import find_foreign_option, normalize_option
from accel_runtime.environment.registry import Registry

__all__ = ["Command", "Group", "find_unknown_options"]


class Command(click.Command):
    """A command with help in panels.

    Args:
        args: Arguments of `click.Command`.
        panel: The panel of the group's help that lists the command.
        gives_advice: Refuse an option of torchrun or Accelerate with the option to use instead.
        settings: Settings of `click.Command`.
    """

    @override
    def __init__(
        self, *args: Any, panel: str = "Commands", gives_advice: bool = False, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self.help = inspect.cleandoc(self.help or "")
        self.panel = panel
        self.gives_advice = gives_advice

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if self.gives_advice and not ctx.resilient_parsing:  # not for shell completion
            _refuse_unknown_options(self, ctx, args)
        return super().parse_args(ctx, args)

    @override
    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _print_help(self, ctx)


class Group(Command, click.Group):
    """A group of commands, which may be a `Registry`: then the module of a command is imported when it is looked up."""

    command_class = Command

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        # In the order of definition. A registry lists those of accel only.
        return list(self.commands.names if isinstance(self.commands, Registry) else self.commands)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        if command is not None and not isinstance(command, click.Command):
            raise UsageError(
                f"Cannot run {ctx.command_path} {cmd_name}: its entry point is not a command of click, but of type "
                f"{type(command).__name__}. Update or uninstall the package that adds it."
            )
        return command

    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchOption:
            raise
        except click.UsageError:
            from difflib import get_close_matches

            similar = ", ".join(map(repr, get_close_matches(args[0], self.list_commands(ctx))))
            hint = f" Did you mean {similar}?" if similar else ""
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx) from None

    @override
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # click would print an empty line
            raise click.exceptions.Exit(128 + 2) from None


# Help ----------------------------------------------------------------------------------


def _print_help(command: Command, ctx: click.Context) -> None:
    """Print the help of a command; the formatter of click has no panels."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    def highlight(text: str, style: str = "") -> Text:
        content = Text(text, style)
        content.highlight_regex(r"(?<![\w-])--?[A-Za-z][\w-]*", "bold cyan")
        return content

    parameters: dict[str, list[tuple[Text, Text]]] = {"Arguments": [], "Options": []}
    for parameter in command.get_params(ctx):
        if record := parameter.get_help_record(ctx):
            names, meaning = record
            heading = "Arguments" if isinstance(parameter, click.Argument) else "Options"
            rows = parameters.setdefault(getattr(parameter, "heading", heading), [])
            rows.append((highlight(names, "yellow"), highlight(meaning)))
    commands: dict[str, list[tuple[Text, Text]]] = {}
    for panel, name, summary in _list_summaries(command, ctx):
        commands.setdefault(panel, []).append((Text(name, "bold cyan"), Text(summary)))

    console = Console(highlight=False)
    console.print(Padding(highlight(command.get_usage(ctx), "bold"), 1))
    paragraphs = (command.help or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    console.print(Padding(Text(text), (0, 1, 1, 1)))
    for panels in (parameters, commands):
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


def _list_summaries(command: click.Command, ctx: click.Context) -> Iterator[tuple[str, str, str]]:
    """Yield the panel, name and first paragraph of the help of each command of a group."""
    if isinstance(command, Group):
        for name in command.list_commands(ctx):
            inner: Any = command.get_command(ctx, name)
            yield inner.panel, name, " ".join((inner.help or "").partition("\n\n")[0].split())


# Options that a command does not have --------------------------------------------------


def _refuse_unknown_options(command: click.Command, ctx: click.Context, args: Sequence[str]) -> None:
    """Refuse options that the command does not have, one line each, with the option to use instead.

    Raises:
        UsageError: An option is unknown.
    """
    if unknown := dict(find_unknown_options(command, ctx, args)):
        raise UsageError(
            "\n".join(
                f"{ctx.command_path} has no option {name}. {advice}." for name, advice in unknown.items()
            )
        )


def find_unknown_options(
    command: click.Command, ctx: click.Context, args: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield each option before the script that the command does not have, with advice.

    The last one is the first option that neither the command nor another launcher has.
    """
    options: dict[str, Any] = {
        name: option for option in command.get_params(ctx) for name in (*option.opts, *option.secondary_opts)
    }
    rest = list(args)
    while rest and rest[0].startswith("-") and rest[0] not in {"-", "--"}:
        flag, equals, _ = rest.pop(0).partition("=")
        name = normalize_option(flag.lstrip("-"))
        known = options.get(flag if len(flag) == 2 else f"--{name}")  # noqa: PLR2004 - `-m`
        foreign = None if known else find_foreign_option(name)
        if foreign:
            yield flag, foreign.advice
        elif not known and flag.startswith("--"):
            # If it takes a value, the next argument is not an option.
            yield flag, _suggest_option(name, options)
            return
        takes_value = not known.is_flag if known else foreign is None or foreign.takes_value
        if takes_value and not equals:
            del rest[:1]


def _suggest_option(name: str, options: Mapping[str, Any]) -> str:
    """Return a sentence with the most similar option."""
    from accel_runtime.environment.settings import find_nearest

    known = [option[2:] for option in options if option.startswith("--")]
    similar = next((option for option in known if option.startswith(name)), None) or find_nearest(name, known)
    return (
        f"Did you mean --{similar}? See --help for all options" if similar else "See --help for all options"
    )
