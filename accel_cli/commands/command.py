"""What the commands need beyond typer: groups that are imported when used, options of launchers, advice, and messages.

This is the only module with private names of typer (`typer._click`, `typer._completion_classes`), as they are in 0.29: its
parser raises exceptions that typer does not export, and its completion in bash does not join `KEY=VALUE`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

import typer
from typer._click.core import Command, Context, Parameter
from typer._click.exceptions import MissingParameter, NoSuchOption
from typer._click.shell_completion import CompletionItem, add_completion_class
from typer._completion_classes import BashComplete
from typer.core import TyperCommand, TyperGroup, TyperOption
from typing_extensions import override

from accel_cli.errors import UsageError
from accel_cli.planning.launch_options import LaunchOption, find_foreign_option, normalize_option
from accel_cli.profile.options import OPTIONAL_VALUES
from accel_runtime.environment.registry import Registry

__all__ = [
    "HELP_OPTIONS",
    "LazyGroup",
    "Parsed",
    "ScriptCommand",
    "complete_assignments_in_bash",
    "format_parsing_error",
    "get_parsed",
    "hide_flag_types",
    "parse_launch",
]


HELP_OPTIONS = ("-h", "--help")

# Commands that are imported when used --------------------------------------------------


class LazyGroup(TyperGroup):
    """A group whose commands are a table; the module of each is imported when it is looked up."""

    table: ClassVar[Registry[Any]] = Registry({})
    """The commands by name: functions, or objects of `typer.Typer` with the command or with commands below it."""

    @override
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = cast("MutableMapping[str, Command]", _Commands(self.table))

    @override
    def list_commands(self, ctx: Context) -> list[str]:
        return list(self.table.names)  # without those of other packages


class _Commands(Mapping[str, Command]):
    """The commands of a table."""

    def __init__(self, table: Registry[Any]) -> None:
        self._table = table

    def __getitem__(self, name: str) -> Command:
        return _build_command(name, self._table[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


def _build_command(name: str, entry: Any) -> Command:
    """Return the command of an entry of a table: a function, or an object of `typer.Typer`."""
    command = _build_with_types(name, entry)
    hide_flag_types(command)
    return command


def hide_flag_types(command: Command) -> None:
    """Leave `<bool>` out of the help of a command, and of those below it: a flag takes no value."""
    for parameter in command.get_params(Context(command, help_option_names=[*HELP_OPTIONS])):
        if isinstance(parameter, TyperOption) and parameter.is_flag and parameter.metavar is None:
            parameter.metavar = ""
    if isinstance(command, TyperGroup) and isinstance(command.commands, dict):
        for inner in command.commands.values():
            hide_flag_types(inner)


def _build_with_types(name: str, entry: Any) -> Command:
    app = typer.Typer(add_completion=False)
    if inspect.isfunction(entry):
        app.command(name)(entry)
        return typer.main.get_command(app)
    if not isinstance(entry, typer.Typer):
        raise UsageError(
            f"Cannot run accel {name}: its entry point is neither a function nor an object of typer.Typer, but of type "
            f"{type(entry).__name__}. Update or uninstall the package that adds it."
        )
    of_name = [command for command in entry.registered_commands if command.name == name]
    app.registered_commands = of_name or entry.registered_commands
    is_group = entry.registered_callback or entry.info.callback or entry.registered_groups
    if not is_group and len(app.registered_commands) == 1:
        return typer.main.get_command(app)
    app = typer.Typer(add_completion=False)
    app.add_typer(entry, name=name, rich_help_panel=entry.rich_help_panel)
    return typer.main.get_group(app).commands[name]


# The command line of a launch ----------------------------------------------------------

_FOREIGN_VALUES = frozenset({"gpu", "xpu", "cpu", "fp8"})
"""Values of options of accel that only torchrun or Accelerate has."""
_PARSED = "accel.parsed"


class Parsed:
    """What a command line with a script has beside the values of its options: the words, and their translation."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)
        """The command line, before parsing removes `--`."""
        self.translation: Any = None
        """The `accel_cli.accelerate.foreign_options.Translation`; None if all options are those of accel."""


class ScriptCommand(TyperCommand):
    """A command with a script, which keeps the words of its command line.

    If what follows the script is passed to it (`allow_interspersed_args` is false), the command is a launch: options of other
    launchers are translated, and those that launchers declare are added if the command line or the help needs them.
    """

    @override
    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        parsed = ctx.meta[_PARSED] = Parsed(args)
        if ctx.allow_interspersed_args:
            return super().parse_args(ctx, args)
        if not OPTIONAL_VALUES.keys().isdisjoint(args):
            args = _fill_optional_values(self, ctx, args)
            parsed.words = tuple(args)
        needs_help = not args or not set(ctx.help_option_names).isdisjoint(args)
        is_unknown = any(_find_unknown_options(self, ctx, args))
        if ctx.resilient_parsing or needs_help or is_unknown:
            names = {parameter.name for parameter in self.params}
            self.params += [option for option in _build_launcher_options() if option.name not in names]
        values = {text.rpartition("=")[2] for text in args}
        if not (ctx.resilient_parsing or needs_help) and (is_unknown or values & _FOREIGN_VALUES):
            args = self._translate(ctx, parsed)
            if unknown := dict(_find_unknown_options(self, ctx, args)):
                raise UsageError(
                    "\n".join(
                        f"{ctx.command_path} has no option {name}. {advice}."
                        for name, advice in unknown.items()
                    )
                )
        *_, option, script = ("", "", *args)  # the parser empties the list
        try:
            return super().parse_args(ctx, args)
        except MissingParameter:
            if option.startswith("-") and script.endswith(".py"):
                raise UsageError(
                    f"Missing argument 'SCRIPT': {script} is taken as the value of {option}. Write {option} VALUE {script}."
                ) from None
            raise

    def _translate(self, ctx: Context, parsed: Parsed) -> list[str]:
        """Return the command line with the options of accel instead of those of torchrun and Accelerate."""
        from accel_cli.accelerate.foreign_options import translate

        own = {
            name: not option.is_flag
            for option in self.get_params(ctx)
            if isinstance(option, TyperOption)
            for name in option.opts
        }
        parsed.translation = translate(list(parsed.words), own)
        return list(parsed.translation.args)

    @override
    def invoke(self, ctx: Context) -> Any:
        # The options of launchers are not parameters of the function, which reads them from the context.
        assert self.callback
        names = inspect.signature(self.callback).parameters
        return ctx.invoke(self.callback, **{name: ctx.params[name] for name in names if name in ctx.params})


def get_parsed(ctx: Context) -> Parsed:
    """Return the words of a command line with a script, and their translation."""
    parsed: Parsed = ctx.meta[_PARSED]
    return parsed


def parse_launch(app: typer.Typer, args: Sequence[str], ctx: Context) -> typer.Context:
    """Return the context with the arguments of `accel launch` that another command received.

    Args:
        app: The command `accel launch`, perhaps with others.
        args: The arguments.
        ctx: The context of the other command.
    """
    return cast(
        "typer.Context",
        _build_command("launch", app).make_context("launch", list(args), parent=ctx.find_root()),
    )


def _build_launcher_options() -> list[Parameter]:
    """Return the options that launchers declare, in panels with the launchers' names."""
    from accel_cli.launchers import list_options

    def options() -> None:
        pass

    parameters = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if option.metavar else False,
            annotation=_annotate(option, f"Only with launcher.kind: {' or '.join(kinds)}"),
        )
        for option, kinds in list_options().items()
    ]
    vars(options)["__signature__"] = inspect.Signature(parameters)
    return _build_command("launch", options).params


def _annotate(option: LaunchOption, panel: str) -> Any:
    """Return the annotation of a parameter that is the option of a launcher."""
    of_type = {"integer": int | None}.get(option.type, str | None) if option.metavar else bool
    typed = typer.Option(option.flag, metavar=option.metavar or None, help=option.help, rich_help_panel=panel)
    return Annotated[of_type, typed]


def _fill_optional_values(command: Command, ctx: Context, args: Sequence[str]) -> list[str]:
    """Return a command line in which each option whose value may be left out has one: it has none before an option or a file."""
    options = {name: option for option in command.get_params(ctx) for name in option.opts}
    filled, rest = [], list(args)
    # What follows the script belongs to it.
    while rest and rest[0].startswith("-") and rest[0] not in {"-", "--"}:
        word = rest.pop(0)
        following = rest[0] if rest else "-"
        default = OPTIONAL_VALUES.get(word)
        if default and (following.startswith("-") or following.endswith(".py") or Path(following).is_file()):
            filled.append(f"{word}={default}")
            continue
        filled.append(word)
        option: Any = options.get(word)
        foreign = None if option else find_foreign_option(normalize_option(word.lstrip("-")))
        takes_value = not option.is_flag if option else foreign is None or foreign.takes_value
        if takes_value and "=" not in word:
            filled += rest[:1]
            del rest[:1]
    return filled + rest


# Options that a command does not have --------------------------------------------------


def _find_unknown_options(command: Command, ctx: Context, args: Sequence[str]) -> Iterator[tuple[str, str]]:
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


def format_parsing_error(error: typer.TyperException) -> str:
    """Return the message for a command line that typer rejects; empty for a group alone, which has printed its help."""
    text = _describe_invalid_value(error) or error.format_message()
    if not text:
        return ""
    # A letter has other meanings in each command.
    name = normalize_option(error.option_name.lstrip("-")) if isinstance(error, NoSuchOption) else ""
    if isinstance(error, NoSuchOption) and len(name) > 1 and (foreign := find_foreign_option(name)):
        advice = f"{foreign.advice[0].lower()}{foreign.advice[1:]}"
        text = f"No such option: {error.option_name}. In accel launch, {advice}"
    end = "" if text.endswith((".", "?")) else "."
    context = getattr(error, "ctx", None)
    command = f"{context.command_path} " if context else ""
    return f"{text}{end} See {command}--help."


def _describe_invalid_value(error: typer.TyperException) -> str:
    """Return the message for a value that pydantic rejects, in the words of a profile; empty for other errors."""
    rejected: Any = error.__cause__
    if not isinstance(error, typer.BadParameter) or not hasattr(rejected, "errors"):
        return ""
    problem = rejected.errors()[0]
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "value_error":
        error.message = str(context["error"])
    elif expected := {
        "int": "a whole number",
        "float": "a number",
        "string": "text",
        "greater": f"at least {context.get('ge')}",
        "less": f"at most {context.get('le')}",
    }.get(kind.partition("_")[0]):
        error.message = f"expected {expected}, got {problem['input']!r}"
    return error.format_message()


# Completion ----------------------------------------------------------------------------


def complete_assignments_in_bash() -> None:
    """Make completion in bash join the parts of `KEY=VALUE`, which are three words for its function."""
    add_completion_class(_Bash, "bash")


class _Bash(BashComplete):
    joined = False

    @override
    def get_completion_args(self) -> tuple[list[str], str]:
        args, incomplete = super().get_completion_args()
        words: list[str] = []
        for word in (*args, incomplete):
            self.joined = bool(words) and (word == "=" or words[-1].endswith("="))
            words[-1:] = [words[-1] + word] if self.joined else [*words[-1:], word]
        return words[:-1], words[-1]

    @override
    def format_completion(self, item: CompletionItem) -> str:
        # bash replaces the part behind the last `=`.
        text = super().format_completion(item)
        return text.rpartition("=")[2] if self.joined else text
