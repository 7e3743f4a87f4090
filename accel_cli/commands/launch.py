"""`accel launch` and `accel test`: run a script, or a check of training, with the settings of the active profile."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from typing_extensions import override

from accel_cli import console
from accel_cli.commands.command import Command, find_unknown_options
from accel_cli.commands.completion import complete_files
from accel_cli.commands.options import argument, build_option
from accel_cli.errors import AccelError, RunEndedError, UsageError
from accel_cli.planning.launch_options import OPTIONS, SELECTION, ConfigFile, Kind, Request

if TYPE_CHECKING:
    from accel_cli.planning.plan import Plan
    from accel_cli.profile.layers import Resolved

__all__ = ["build_request", "format_headline", "format_plan", "launch", "select_given", "test"]

_ARGUMENTS = "accel.arguments"
_TRANSLATION = "accel.translation"
_FOREIGN_VALUES = frozenset({"gpu", "xpu", "cpu", "fp8"})
"""Values of options of accel that only torchrun or Accelerate has."""


class _LaunchCommand(Command):
    """The command `accel launch`; options of launchers are added only if the command line or the help needs them."""

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Before parsing, which removes `--`.
        ctx.meta[_ARGUMENTS] = tuple(args)
        needs_help = not args or not set(ctx.help_option_names).isdisjoint(args)
        is_unknown = any(find_unknown_options(self, ctx, args))
        if ctx.resilient_parsing or needs_help or is_unknown:
            self._add_launcher_options()
        values = {text.rpartition("=")[2] for text in args}
        if not (ctx.resilient_parsing or needs_help) and (is_unknown or values & _FOREIGN_VALUES):
            args = self._translate(ctx, args)
        return super().parse_args(ctx, args)

    def _translate(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Return the command line with the options of accel instead of those of torchrun and Accelerate."""
        from accel_cli.accelerate.foreign_options import translate

        own = {
            name: not option.is_flag
            for option in self.get_params(ctx)
            if isinstance(option, click.Option)
            for name in option.opts
        }
        ctx.meta[_TRANSLATION] = translation = translate(args, own)
        return list(translation.args)

    def _add_launcher_options(self) -> None:
        """Add the options that launchers declare, under headings with the launchers' names."""
        from accel_cli.launchers import list_options

        names = {parameter.name for parameter in self.params}
        self.params += [
            build_option(option, f"Only with launcher.kind: {' or '.join(kinds)}")
            for option, kinds in list_options().items()
            if option.name not in names
        ]


@click.command(
    "launch",
    cls=_LaunchCommand,
    panel="Run",
    gives_advice=True,
    params=[build_option(option) for option in OPTIONS.values()],
    # Options after the script are passed to it.
    context_settings={"allow_interspersed_args": False},
    epilog="Example: accel launch --nproc-per-node 2 train.py --epochs 3",
)
@argument(
    "script",
    metavar="SCRIPT",
    help="Run this Python script; with -m a module, with --no-python a program.",
    shell_complete=complete_files,
)
@argument(
    "args",
    metavar="ARGS",
    nargs=-1,
    help="Pass these arguments to the script.",
    shell_complete=complete_files,
)
@click.pass_context
def launch(context: click.Context, /, script: str, args: tuple[str, ...], **options: Any) -> None:
    """Launch a script with the settings of the active profile.

    Options of accel launch come before SCRIPT; everything after it is passed to the script unchanged.
    """
    try:
        code = _launch(context, build_request(script, args, select_given(options), context))
    except RunEndedError:  # the failure is that of another node
        raise
    except AccelError as error:
        from accel_cli.runs import run_dir
        from accel_runtime.environment.settings import FAILURE_FILE

        run_dir.write_reason(os.environ.get(FAILURE_FILE), str(error))
        raise
    context.exit(code)


def _launch(context: click.Context, request: Request) -> int:
    """Run a request, or print its plan; return the exit code."""
    from accel_cli.profile import planner

    words = context.meta[_ARGUMENTS]
    options = words[: len(words) - len(request.args) - 1]
    planner.check_target(request.target, request.kind, request.args, options)
    resolved, plan = planner.prepare(request, os.environ)
    _note_translation(context, request, plan)
    _note_options_after_script(context, request)
    launcher, options = resolved.profile.launcher, request.options
    if any(option.only_prints and option.name in options for option in launcher.launch_options):
        console.plain(launcher.preview(plan, options))
        return 0
    if "dry_run" in options or "explain" in options:
        console.plain(format_plan(plan, resolved if "explain" in options else None))
        if "dry_run" in options and (preview := launcher.preview(plan, options)):
            console.plain(preview)
        return 0
    _check_engine_is_installed(resolved)
    if "quiet" not in options:
        console.note(format_headline(plan, resolved))
    return launcher.run(_add_details(plan, request, resolved))


def _check_engine_is_installed(resolved: Resolved) -> None:
    """Raise if the processes run here and need an engine that is missing."""
    from importlib.util import find_spec

    engine, launcher = resolved.profile.settings.engine, resolved.profile.launcher
    if engine is None or launcher.location not in {"local", "pod"}:
        return
    spec = find_spec(engine.package)
    # A folder of this name, as for JSON files, has no origin.
    if spec is None or spec.origin is None:
        from accel_runtime.environment.installation import format_install

        raise UsageError(
            f"Cannot use {engine.key}: {engine.choice}: {engine.title} is not installed. Install it: "
            f"{format_install(engine.package, extra=engine.package)}"
        )


@click.command(
    "test",
    cls=Command,
    panel="Run",
    gives_advice=True,
    params=[build_option(OPTIONS[name]) for name in SELECTION],
    epilog="Example: accel test --nproc-per-node 2",
)
@click.pass_context
def test(context: click.Context, /, **options: Any) -> None:
    """Check processes, collectives, gradients, gathering and precision on this machine."""
    from accel_cli.profile import planner

    request = Request(
        "accel_runtime.selfcheck", kind="module", options=select_given(options), is_builtin=True
    )
    resolved, plan = planner.prepare(request, os.environ)
    console.note(format_headline(plan, resolved))
    _check_engine_is_installed(resolved)
    plan = _add_details(plan, request, resolved, is_quiet=True)
    context.exit(resolved.profile.launcher.run(plan))


def select_given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were typed, by name."""
    return {
        name: value
        for name, value in options.items()
        if value is not None and value is not False and value != ()
    }


def _add_details(plan: Plan, request: Request, resolved: Resolved, *, is_quiet: bool = False) -> Plan:
    """Return the plan with the facts that are recorded in the folder of its run."""
    from dataclasses import replace

    from accel_cli.planning.plan import LaunchDetails

    profile = {
        key: console.mask_secrets(key if key.startswith("env.") else "", value)
        if isinstance(value, str)
        else value
        for key, value in resolved.values.items()
    }
    details = LaunchDetails(
        arguments=request.args,
        headline=format_headline(plan, resolved),
        profile=profile,
        is_quiet=is_quiet or "quiet" in request.options,
    )
    return replace(plan, details=details)


def build_request(
    script: str, args: tuple[str, ...], options: dict[str, Any], context: click.Context
) -> Request:
    """Return the request for the arguments and options of a command line, parsed in a context.

    Raises:
        UsageError: Two options contradict each other.
    """
    if "module" in options and "no_python" in options:
        raise UsageError("Pass either -m or --no-python, not both: a module needs Python.")
    if "profile" in options and "no_profile" in options:
        raise UsageError("Pass either --profile or --no-profile, not both.")
    kind: Kind = "module" if "module" in options else "program" if "no_python" in options else "script"
    file = _read_config_file(options.get("config_file"), context)
    return Request(script, args, kind, options, config_file=file)


def _read_config_file(name: str | None, context: click.Context) -> ConfigFile | None:
    """Return a config file of Accelerate for one launch."""
    if name is None:
        return None
    from accel_cli.accelerate.config_file import read_config

    translation = context.meta.get(_TRANSLATION)
    file = read_config(Path(name), translation and translation.data)
    if file.unused:
        listing = "; ".join(f"{line} ({reason})" for line, reason in file.unused)
        console.note(f"{name}: {len(file.unused)} value(s) have no effect: {listing}")
    return file


def _note_translation(context: click.Context, request: Request, plan: Plan) -> None:
    """Print the command in the options of accel if it has options of torchrun or Accelerate."""
    from accel_cli.planning.plan import join_for_bash

    translation = context.meta.get(_TRANSLATION)
    if translation is None or not translation.is_changed:
        return
    translation.check(os.environ, plan.nnodes, plan.nproc_per_node, plan.layout)
    if "quiet" not in request.options:
        words = translation.args[: len(translation.args) - len(request.args)]
        dots = " ..." if request.args else ""
        console.note(f"same as: accel launch {join_for_bash(words)}{dots}")


def _note_options_after_script(context: click.Context, request: Request) -> None:
    """Print a note about options of `accel launch` that are passed to the script because they come after it."""
    from accel_cli.profile import planner

    has_dashes = context.meta[_ARGUMENTS][: -1 - len(request.args)][-1:] == ("--",)
    flags = {flag for parameter in context.command.params for flag in parameter.opts}
    names = [] if has_dashes else planner.find_options_after_script(request, flags)
    if names:
        target = request.target
        console.note(
            f"options after {target} are passed to it, not to accel launch: {', '.join(names)}. Put them before {target} to "
            f"pass them to accel launch, or put -- before {target} to silence this line."
        )


def format_headline(plan: Plan, resolved: Resolved) -> str:
    """Return the line that describes a launch: launcher, processes, device, precision, profile and rendezvous."""
    from accel_cli.profile import store
    from accel_cli.profile.layers import CONFIG_FILE

    files = [
        f"{layer.name} ({console.abbreviate_home(layer.where[''])})"
        for layer in resolved.layers
        if layer.name in {"user", "project", CONFIG_FILE} or layer.name.startswith("profile ")
    ]
    profile = " + ".join(files) or "none"
    if not files and resolved.get_source("launcher.kind") != "--set":
        default = store.find_accelerate_file(os.environ)
        command = (
            f"accel config import {console.abbreviate_home(str(default))}" if default else "accel config"
        )
        profile = f"none, detected defaults ({command} writes one)"
    parts = [
        plan.launcher,
        _format_processes(plan),
        plan.device,
        f"mixed precision {resolved.profile.mixed_precision}",
    ]
    if plan.layout:
        parts.append(plan.layout)
    nodes = plan.node_summary
    if not nodes and plan.agent and plan.nnodes > 1:
        nodes = f"rendezvous at {plan.agent.rdzv_endpoint}"
    return "; ".join([", ".join(parts), f"profile: {profile}", *([nodes] if nodes else [])])


def _format_processes(plan: Plan) -> str:
    count, nodes = plan.nproc_per_node, plan.nnodes
    processes = "1 process" if count == 1 else f"{count} processes"
    if plan.process_description:
        return plan.process_description if nodes == 1 else f"{plan.process_description}, on {nodes} nodes"
    if plan.agent and plan.agent.min_nodes != nodes:
        return f"{processes} on each of {plan.agent.min_nodes} to {nodes} nodes"
    return processes if nodes == 1 else f"{nodes * count} processes ({count} on each of {nodes} nodes)"


_DEFAULT, _DETECTED = "default", "detected"
"""Sources of values that nobody has set."""


def _format_values(title: str, values: Mapping[str, tuple[Any, str]]) -> Iterator[str]:
    """Yield the values of a profile with their sources, and a star before those that are set."""
    yield f"{title}:" if values else f"{title}: none"
    for key, (value, source) in values.items():
        shown = console.mask_secrets(key, str(value)) if key.startswith("env.") else value
        mark = " " if source in {_DEFAULT, _DETECTED} else "*"
        yield f"{mark} {key}: {shown}  [{source}]"


def format_plan(plan: Plan, resolved: Resolved | None) -> str:
    """Return the plan as text; with `resolved` also the source of every value of the profile, and variables with default values.

    Values that a file, a variable or an option has set come first, each with a star; the defaults come last.
    """
    from dataclasses import asdict

    from accel_cli.planning.plan import join_for_bash
    from accel_runtime.environment.settings import Settings

    values = resolved.effective_values if resolved else {}
    given = {key: entry for key, entry in values.items() if entry[1] != _DEFAULT}
    lines = [*_format_values("set", given)] if resolved else []
    lines += [f"launcher: {plan.launcher}", f"start: {_format_processes(plan)}", f"device: {plan.device}"]
    if plan.layout:
        lines.append(f"layout: {plan.layout}")
    if plan.agent:
        reason = f" ({plan.agent.start_method_reason})" if plan.agent.start_method_reason else ""
        lines.append(f"start method: {plan.agent.start_method}{reason}")
    lines += [f"command: {join_for_bash(plan.argv)}", "environment:"]
    defaults = {} if resolved else Settings().to_env()
    shown = {name: value for name, value in sorted(plan.env.items()) if defaults.get(name) != value}
    lines += [f"  {name}={console.mask_secrets(name, value)}" for name, value in shown.items()]
    if hidden := len(plan.env) - len(shown):
        lines.append(f"  and {hidden} variables with default values, which --explain prints")
    if plan.agent:
        settings = {**asdict(plan.agent), "start_method": None, "start_method_reason": None}
        lines.append("elastic agent:")
        lines += [
            f"  {name}: {value}"
            for name, value in settings.items()
            if value is not None and value is not False
        ]
    if plan.job:
        lines += plan.job.describe()
    if resolved:
        lines += _format_values("defaults", {key: entry for key, entry in values.items() if key not in given})
    if resolved and (section := resolved.profile.engine) and resolved.engine:
        lines.append(f"configuration of {section.settings.title}:")
        for path, (value, source) in section.list_configuration(resolved.engine).items():
            lines.append(f"  {path}: {value}  [{source}]")
    return "\n".join(lines)
