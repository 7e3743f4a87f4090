"""`accel launch` and `accel test`: run a script, or a check of training, with the settings of the active profile."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accel_cli import console
from accel_cli.commands.command import ScriptCommand, get_parsed
from accel_cli.errors import AccelError, RunEndedError, UsageError
from accel_cli.planning.launch_options import ConfigFile, Kind, Request
from accel_cli.profile import options as typed

if TYPE_CHECKING:
    from accel_cli.planning.plan import Plan
    from accel_cli.profile.layers import Resolved

__all__ = ["app", "build_request", "format_headline", "format_plan"]

app = typer.Typer()


@app.command(
    "launch",
    cls=ScriptCommand,
    rich_help_panel="Run",
    # Options after the script are passed to it.
    context_settings={"allow_interspersed_args": False},
    epilog="Example: accel launch --nproc-per-node 2 train.py --epochs 3",
)
def launch(  # noqa: PLR0913 - the signature declares the options, which the request takes from the context
    context: typer.Context,
    script: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT", help="Run this Python script; with -m a module, with --no-python a program."
        ),
    ],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Pass these arguments to the script.")
    ] = None,
    *,
    dry_run: typed.DryRun = False,
    explain: typed.Explain = False,
    quiet: typed.Quiet = False,
    module: typed.Module = False,
    no_python: typed.NoPython = False,
    profile: typed.ProfileName = None,
    no_profile: typed.NoProfile = False,
    config_file: typed.ConfigPath = None,
    set: typed.SetKeys = None,  # noqa: A002 - as in a request
    nproc_per_node: typed.NprocPerNode = None,
    gpu_ids: typed.GpuIds = None,
    cpu: typed.Cpu = False,
    nnodes: typed.Nnodes = None,
    rdzv_endpoint: typed.RdzvEndpoint = None,
    rdzv_id: typed.RdzvId = None,
    node_rank: typed.NodeRank = None,
    mixed_precision: typed.MixedPrecision = None,
    resume: typed.Resume = False,
    ranks: typed.Ranks = None,
    log_dir: typed.LogDir = None,
    metrics_port: typed.MetricsPort = None,
    progress_file: typed.ProgressFile = None,
    max_restarts: typed.MaxRestarts = None,
    shutdown_timeout: typed.ShutdownTimeout = None,
    stall_timeout: typed.StallTimeout = None,
    stall_action: typed.StallAction = None,
    preflight: typed.Preflight = False,
) -> None:
    """Launch a script with the settings of the active profile.

    Options of accel launch come before SCRIPT; everything after it is passed to the script unchanged.
    """
    try:
        code = _launch(context, build_request(context))
    except RunEndedError:  # the failure is that of another node
        raise
    except AccelError as error:
        from accel_cli.runs import run_dir
        from accel_runtime.environment.settings import FAILURE_FILE

        run_dir.write_reason(os.environ.get(FAILURE_FILE), str(error))
        raise
    raise typer.Exit(code)


def _launch(context: typer.Context, request: Request) -> int:
    """Run a request, or print its plan; return the exit code."""
    from accel_cli.profile import planner

    words = get_parsed(context).words
    before_script = words[: len(words) - len(request.args) - 1]
    planner.check_target(request.target, request.kind, request.args, before_script)
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


@app.command("test", rich_help_panel="Run", epilog="Example: accel test --nproc-per-node 2")
def test(  # noqa: PLR0913, PLR0917 - as for launch
    context: typer.Context,
    profile: typed.ProfileName = None,
    nproc_per_node: typed.NprocPerNode = None,
    gpu_ids: typed.GpuIds = None,
    nnodes: typed.Nnodes = None,
    rdzv_endpoint: typed.RdzvEndpoint = None,
    cpu: typed.Cpu = False,
) -> None:
    """Check processes, collectives, gradients, gathering and precision on this machine."""
    from accel_cli.profile import planner

    request = Request(
        "accel_runtime.selfcheck", kind="module", options=_select_given(context.params), is_builtin=True
    )
    resolved, plan = planner.prepare(request, os.environ)
    console.note(format_headline(plan, resolved))
    _check_engine_is_installed(resolved)
    plan = _add_details(plan, request, resolved, is_quiet=True)
    raise typer.Exit(resolved.profile.launcher.run(plan))


def _select_given(options: Mapping[str, Any]) -> dict[str, Any]:
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


def build_request(context: typer.Context) -> Request:
    """Return the request of a parsed command line of `accel launch`.

    Raises:
        UsageError: Two options contradict each other.
    """
    options = _select_given(context.params)
    script, args = options.pop("script"), tuple(options.pop("args", ()))
    if "module" in options and "no_python" in options:
        raise UsageError("Pass either -m or --no-python, not both: a module needs Python.")
    if "profile" in options and "no_profile" in options:
        raise UsageError("Pass either --profile or --no-profile, not both.")
    kind: Kind = "module" if "module" in options else "program" if "no_python" in options else "script"
    file = _read_config_file(options.get("config_file"), context)
    return Request(script, args, kind, options, config_file=file)


def _read_config_file(name: str | None, context: typer.Context) -> ConfigFile | None:
    """Return a config file of Accelerate for one launch."""
    if name is None:
        return None
    from accel_cli.accelerate.config_file import read_config

    translation = get_parsed(context).translation
    file = read_config(Path(name), translation and translation.data)
    if file.unused:
        listing = "; ".join(f"{line} ({reason})" for line, reason in file.unused)
        console.note(f"{name}: {len(file.unused)} value(s) have no effect: {listing}")
    return file


def _note_translation(context: typer.Context, request: Request, plan: Plan) -> None:
    """Print the command in the options of accel if it has options of torchrun or Accelerate."""
    from accel_cli.planning.plan import join_for_bash

    translation = get_parsed(context).translation
    if translation is None or not translation.is_changed:
        return
    translation.check(os.environ, plan.nnodes, plan.nproc_per_node, plan.layout)
    if "quiet" not in request.options:
        words = translation.args[: len(translation.args) - len(request.args)]
        dots = " ..." if request.args else ""
        console.note(f"same as: accel launch {join_for_bash(words)}{dots}")


def _note_options_after_script(context: typer.Context, request: Request) -> None:
    """Print a note about options of `accel launch` that are passed to the script because they come after it."""
    from accel_cli.profile import planner

    has_dashes = get_parsed(context).words[: -1 - len(request.args)][-1:] == ("--",)
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
