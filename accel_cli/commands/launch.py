"""`accel launch` and `accel test`: run a script, or a check of training, with the settings of the active profile.

A launch has five stages, each a call with the result of the one before: `parse` the command line to a request, `resolve` it
to the profile, `plan` what starts, show it (`plan_view`), and `run` it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accel_cli import console
from accel_cli.commands.command import ScriptCommand, get_parsed
from accel_cli.errors import AccelError, RunEndedError, UsageError, explain_os_error
from accel_cli.planning.launch_options import ConfigFile, Kind, Request
from accel_cli.profile import options as typed

if TYPE_CHECKING:
    from accel_cli.planning.plan import Plan
    from accel_cli.profile.planner import ResolvedLaunch

__all__ = ["app", "parse", "run"]

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
    global_batch_size: typed.GlobalBatchSize = None,
    resume: typed.Resume = False,
    ranks: typed.Ranks = None,
    log_dir: typed.LogDir = None,
    metrics_port: typed.MetricsPort = None,
    record_numerics: typed.RecordNumerics = None,
    check_replay: typed.CheckReplay = None,
    progress_line: typed.ProgressLine = None,
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
        code = _start(parse(context))
    except RunEndedError:  # the failure is that of another node
        raise
    except (AccelError, OSError, MemoryError) as error:
        from accel_cli import control
        from accel_cli.runs import run_dir
        from accel_runtime.environment.settings import FAILURE_FILE

        if isinstance(error, AccelError):
            code, reason = error.exit_code, str(error)
        else:
            code, reason = 1, explain_os_error(error)
        run_dir.write_reason(os.environ.get(FAILURE_FILE), reason)
        control.report_failure(code)
        raise
    raise typer.Exit(code)


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
    options = _select_given(context.params)
    request = Request("accel_runtime.selfcheck", kind="module", options=options, is_builtin=True)
    raise typer.Exit(_start(request))


def _select_given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were typed, by name."""
    return {
        name: value
        for name, value in options.items()
        if value is not None and value is not False and value != ()
    }


def parse(context: typer.Context, *, is_here: bool = True) -> Request:
    """Return the request of a command line of `accel launch`.

    Args:
        context: The parsed command line.
        is_here: True if the script must exist on this machine.

    Raises:
        UsageError: Two options contradict each other, a file of options cannot be read, or the script cannot run.
    """
    from accel_cli.commands.target import check_target, find_options_after_script

    options = _select_given(context.params)
    script, args = options.pop("script"), tuple(options.pop("args", ()))
    if "module" in options and "no_python" in options:
        raise UsageError("Pass either -m or --no-python, not both: a module needs Python.")
    if "profile" in options and "no_profile" in options:
        raise UsageError("Pass either --profile or --no-profile, not both.")
    kind: Kind = "module" if "module" in options else "program" if "no_python" in options else "script"
    words, translation = get_parsed(context).words, get_parsed(context).translation
    file = _read_config_file(options.get("config_file"), translation)
    request = Request(script, args, kind, options, config_file=file, translation=translation)
    before_script = words[: len(words) - len(args) - 1]
    if is_here:
        check_target(request, before_script)
    notes = []
    if file and file.unused:
        listing = "; ".join(f"{line} ({reason})" for line, reason in file.unused)
        notes.append(f"{file.name}: {len(file.unused)} value(s) have no effect: {listing}")
    flags = {flag for parameter in context.command.params for flag in parameter.opts}
    if before_script[-1:] != ("--",) and (names := find_options_after_script(request, flags)):
        notes.append(
            f"options after {script} are passed to it, not to accel launch: {', '.join(names)}. Put them before {script} to "
            f"pass them to accel launch, or put -- before {script} to silence this line."
        )
    same_as = ""
    if translation and translation.is_changed and "quiet" not in options:
        same_as = _describe_translation(translation.args, len(args))
    return replace(request, same_as=same_as, notes=tuple(notes))


def _read_config_file(name: str | None, translation: Any) -> ConfigFile | None:
    """Return a config file of Accelerate for one launch."""
    if name is None:
        return None
    from accel_cli.accelerate.config_file import read_config

    return read_config(Path(name), translation and translation.data)


def _describe_translation(words: Sequence[str], num_args: int) -> str:
    """Return the command in the options of accel, without the arguments of the script."""
    from accel_cli.planning.plan import join_for_bash

    shown = join_for_bash(words[: len(words) - num_args])
    return f"accel launch {shown}{' ...' if num_args else ''}"


def _start(request: Request) -> int:
    """Resolve and plan a request, then show or run it; return the exit code."""
    from accel_cli.commands import plan_view
    from accel_cli.profile import planner

    console.print_notes(request.notes)
    resolved = planner.resolve(request, os.environ)
    console.print_notes(resolved.notes)
    plan = planner.plan(resolved)
    console.print_notes(plan.notes)
    return 0 if plan_view.show_plan(plan, resolved) else run(plan, resolved)


def run(plan: Plan, resolved: ResolvedLaunch) -> int:
    """Run a plan, after the checks of the engine and the line that describes the launch; return the exit code.

    Raises:
        UsageError: The processes run here, and need a package that is missing.
    """
    from accel_cli.commands import plan_view
    from accel_cli.planning.plan import LaunchDetails

    request, launcher, engine = resolved.request, resolved.profile.launcher, resolved.profile.engine
    if engine and launcher.location in {"local", "pod"}:
        engine.check_is_installed()
    headline = plan_view.format_headline(plan, resolved)
    if "quiet" not in request.options:
        console.note(headline)
    profile = {
        key: console.mask_secrets(key if key.startswith("env.") else "", value)
        if isinstance(value, str)
        else value
        for key, value in resolved.values.items()
    }
    details = LaunchDetails(
        arguments=request.args,
        headline=headline,
        profile=profile,
        is_quiet=request.is_builtin or "quiet" in request.options,
    )
    return launcher.run(replace(plan, details=details))
