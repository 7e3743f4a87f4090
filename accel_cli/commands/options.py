"""Base classes of the commands: help in panels, declared options, options of torchrun and Accelerate, and completion."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer.main
from typer.core import TyperCommand, TyperGroup
from typing_extensions import override

from accel_cli.errors import UsageError
from accel_cli.planning.options import OPTIONS, LaunchOption, find_foreign_option, normalize_option

__all__ = [
    "AccelCommand",
    "AccelGroup",
    "CommandApp",
    "CompatCommand",
    "CompatGroup",
    "RequestCommand",
    "complete_assignments",
    "complete_checkpoints",
    "complete_keys",
    "complete_profile_names",
    "expand_options",
    "find_unknown_options",
    "get_options",
    "get_summary",
]

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


def expand_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command for a function: each parameter that is a dataclass is replaced by an option for each field.

    Fields are declared like parameters of a command: `Annotated[type, typer.Option(...)]`, and a default.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[type, list[str]]] = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        group = parameter.annotation
        if isinstance(group, type) and is_dataclass(group):
            fields = inspect.signature(group, eval_str=True).parameters
            groups[parameter.name] = group, list(fields)
            parameters += fields.values()
        else:
            parameters.append(parameter)

    @functools.wraps(function)
    def command(**values: Any) -> Any:
        for name, (group, fields) in groups.items():
            values[name] = group(**{field: values.pop(field) for field in fields})
        return function(**values)

    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    command.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    return command


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


class _CompatMixin:
    """Refuses options of torchrun and Accelerate with the option to use instead."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        refuse_unknown_options(self, ctx, args)
        parsed: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
        return parsed


class CompatCommand(_CompatMixin, AccelCommand):
    """A command to which users may give options of torchrun or Accelerate."""


class CompatGroup(_CompatMixin, AccelGroup):
    """A group of commands to which users may give options of torchrun or Accelerate."""


class RequestCommand(CompatCommand):
    """A command with declared options of `accel launch`; its function gets their values from `get_options`."""

    declared: Iterable[LaunchOption] = OPTIONS.values()

    @override
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.declared_names: set[str] = set()
        self.add_options({option: option.heading for option in self.declared})

    def add_options(self, options: Mapping[LaunchOption, str]) -> None:
        """Add declared options, each under a heading of the help."""
        self.params = [*self.params, *_build_parameters(options)]
        self.declared_names |= {option.name for option in options}

    def take_options(self, ctx: Any) -> dict[str, Any]:
        """Remove the declared options from a parsed context, and return those that were given, by name."""
        values = {name: ctx.params.pop(name) for name in self.declared_names}
        return {
            name: value
            for name, value in values.items()
            if value is not None and value is not False and value not in ([], ())
        }

    @override
    def invoke(self, ctx: Any) -> Any:
        ctx.meta[_OPTIONS] = self.take_options(ctx)
        return super().invoke(ctx)


_OPTIONS = "accel.options"


def get_options(context: typer.Context) -> dict[str, Any]:
    """Return the declared options that were given to a command, by name."""
    options: dict[str, Any] = context.meta[_OPTIONS]
    return options


def _build_parameters(options: Mapping[LaunchOption, str]) -> list[Any]:
    """Return parameters for declared options, built by typer from the signature of a function."""

    def function() -> None: ...

    signature = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if option.metavar else False,
            annotation=Annotated[
                _get_type(option),
                typer.Option(
                    *([option.short] if option.short else []),
                    option.flag,
                    metavar=option.metavar,
                    help=option.help,
                    min=option.minimum,
                    rich_help_panel=heading or None,
                    autocompletion=complete_profile_names if option.name == "profile" else None,
                ),
            ],
        )
        for option, heading in options.items()
    ]
    function.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False)
    app.command()(function)
    parameters: list[Any] = typer.main.get_command(app).params
    return parameters


def _get_type(option: LaunchOption) -> Any:
    if not option.metavar:
        return bool
    if option.repeated:
        return list[str] | None
    return (int if option.type == "integer" else str) | None


def refuse_unknown_options(command: Any, ctx: Any, args: Sequence[str]) -> None:
    """Refuse options that the command does not have, one line each, with the option to use instead.

    Raises:
        UsageError: An option is unknown.
    """
    if ctx.resilient_parsing:  # shell completion
        return
    if unknown := dict(find_unknown_options(command, ctx, args)):
        raise UsageError(
            "\n".join(
                f"{ctx.command_path} has no option {name}. {advice}." for name, advice in unknown.items()
            )
        )


def find_unknown_options(command: Any, ctx: Any, args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each option before the script that the command does not have, with advice.

    The last one is the first option that neither the command nor another launcher has.
    """
    options = {
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


def complete_profile_names(incomplete: str) -> list[str]:
    """Return the names of the profiles that start with a text."""
    from accel_cli.profile.store import Store

    names = Store.from_env(os.environ, Path.cwd()).list_names()
    return [name for name in names if name.startswith(incomplete)]


def complete_keys(incomplete: str) -> list[tuple[str, str]]:
    """Return the keys of a profile that start with a text, and their descriptions."""
    from accel_cli.profile.schema import known_keys

    return [(key, text) for key, text in known_keys().items() if key.startswith(incomplete)]


def complete_assignments(incomplete: str) -> list[tuple[str, str]]:
    """Return the keys of a profile that start with a text, each with `=`."""
    return [(f"{key}=", text) for key, text in complete_keys(incomplete)]


def complete_checkpoints(incomplete: str) -> list[str]:
    """Return the directories that start with a text: checkpoints, and their parents."""
    # Keep the text unchanged, with `./` in front too.
    head, _, rest = incomplete.rpartition("/")
    parent = f"{head}/" if "/" in incomplete else ""
    try:
        names = sorted(path.name for path in Path(parent or ".").iterdir() if path.is_dir())
    except OSError:
        return []
    return [f"{parent}{name}" for name in names if name.startswith(rest) and not name.startswith(".")]
