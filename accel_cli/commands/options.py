"""Options and arguments of commands: built from what dataclasses declare, with errors in the words of a profile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from typing import Any

import click
from typing_extensions import override

from accel_cli.commands.completion import complete_assignments, complete_files, complete_profile_names
from accel_cli.planning.launch_options import LaunchOption

__all__ = [
    "Argument",
    "IntRange",
    "Option",
    "argument",
    "build_option",
    "declare",
    "option",
    "parse_integer",
    "pass_options",
]


class Option(click.Option):
    """An option, under a heading of the help."""

    @override
    def __init__(self, *args: Any, heading: str = "Options", **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.heading = heading

    @override
    def make_metavar(self, ctx: click.Context) -> str:
        if self.metavar is None and isinstance(self.type, click.Choice):
            return f"<{'|'.join(self.type.choices)}>"
        return super().make_metavar(ctx)


class Argument(click.Argument):
    """An argument with a line in the help, and named by its metavar in errors."""

    @override
    def __init__(self, *args: Any, help: str = "", **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.help: str = help

    @override
    def get_usage_pieces(self, ctx: click.Context) -> list[str]:
        name = self.human_readable_name if self.required else f"[{self.human_readable_name}]"
        return [name if self.nargs == 1 else f"{name}..."]

    @override
    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        extra = "  [required]" if self.required else ""
        if isinstance(self.default, str):
            extra = f"  [default: {self.default}]"
        return self.human_readable_name, f"{self.help}{extra}"

    @override
    def get_error_hint(self, ctx: click.Context | None) -> str:
        return f"'{self.human_readable_name}'"


def parse_integer(text: str) -> int:
    """Return the number of an option.

    Raises:
        click.BadParameter: It is not a whole number.
    """
    try:
        return int(text)
    except ValueError:
        raise click.BadParameter(f"expected a whole number, got {text!r}") from None


class IntRange(click.IntRange):
    """A range of whole numbers."""

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number = parse_integer(value)
        if self.min is not None and number < self.min:
            self.fail(f"expected at least {self.min}, got {value!r}", param, ctx)
        if self.max is not None and number > self.max:
            self.fail(f"expected at most {self.max}, got {value!r}", param, ctx)
        return number


option = functools.partial(click.option, cls=Option, show_default=True)
argument = functools.partial(click.argument, cls=Argument)


def declare(decorator: Callable[..., Any], *names: str, default: Any = MISSING, **settings: Any) -> Any:
    """Return a field of a dataclass that is a parameter of the commands with `pass_options`.

    Args:
        decorator: `option` or `argument`.
        names: The spellings of the option, or the name of the argument.
        default: The default; without one, the parameter is required.
        settings: Settings of the decorator.
    """
    given = {} if default is MISSING else {"default": default}
    return field(**given, metadata={_PARAMETER: decorator(*names, **given, **settings)})


_PARAMETER = "parameter"


def pass_options(group: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator of a command: it adds the declared parameters of a dataclass, and passes them as one object.

    The object is the last positional argument of the function.
    """
    declared = {one.name: one.metadata[_PARAMETER] for one in fields(group)}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(*args: Any, **values: Any) -> Any:
            return function(*args, group(**{name: values.pop(name) for name in declared}), **values)

        for add in reversed(declared.values()):
            command = add(command)
        return command

    return decorate


def build_option(declared: LaunchOption, heading: str = "") -> click.Option:
    """Return the option of `accel launch` for its declaration, under its own heading of the help or another one."""
    heading = heading or declared.heading or "Options"
    names = [*([declared.short] if declared.short else []), declared.flag]
    if not declared.metavar:
        return Option(names, help=declared.help, heading=heading, is_flag=True)
    completions = {
        "profile": complete_profile_names,
        "set": complete_assignments,
        **dict.fromkeys(("config_file", "log_dir", "hostfile"), complete_files),
    }
    return Option(
        names,
        help=declared.help,
        heading=heading,
        metavar=declared.metavar,
        multiple=declared.repeated,
        type=_get_type(declared),
        shell_complete=completions.get(declared.name),
    )


def _get_type(declared: LaunchOption) -> Any:
    if declared.minimum is not None:
        return IntRange(min=declared.minimum)
    return parse_integer if declared.type == "integer" else str
