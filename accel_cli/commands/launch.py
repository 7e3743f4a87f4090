"""`accel launch`: turn the profile into processes that run a script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from accel_cli.commands.completion import profile_names

if TYPE_CHECKING:
    from accel_cli.launchers.base import Plan
    from accel_cli.profile.layers import Resolved

__all__ = ["SETTINGS", "launch"]

SETTINGS: dict[str, Any] = {
    # Everything after the script is the script's: options of ours end there.
    "context_settings": {"allow_interspersed_args": False},
    "epilog": "Example: accel launch --nproc-per-node 2 train.py --epochs 3",
}
_HOW = "What runs"
_OVER = "Over the profile"


def launch(  # noqa: PLR0913, PLR0917 - one parameter an option
    script: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT", help="A Python script; with -m a module, with --no-python a program."
        ),
    ],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Its arguments, passed on untouched.")
    ] = None,
    module: Annotated[
        bool,
        typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.", rich_help_panel=_HOW),
    ] = False,
    no_python: Annotated[
        bool,
        typer.Option("--no-python", help="SCRIPT is a program, run without Python.", rich_help_panel=_HOW),
    ] = False,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The named profile to use.",
            rich_help_panel=_OVER,
            autocompletion=profile_names,
        ),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override one value; can be repeated.", rich_help_panel=_OVER
        ),
    ] = None,
    nproc_per_node: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Processes on each machine: a number, or auto.", rich_help_panel=_OVER
        ),
    ] = None,
    nnodes: Annotated[
        int | None, typer.Option(metavar="N", help="Number of machines.", rich_help_panel=_OVER)
    ] = None,
    shutdown_timeout: Annotated[
        int | None,
        typer.Option(
            metavar="SECONDS", help="How long processes may save after a signal.", rich_help_panel=_OVER
        ),
    ] = None,
    stall_timeout: Annotated[
        int | None,
        typer.Option(
            metavar="SECONDS",
            help="Show where every process is when none makes progress for so long.",
            rich_help_panel=_OVER,
        ),
    ] = None,
    mixed_precision: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="no, bf16 or fp16.", rich_help_panel=_OVER)
    ] = None,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Compute on the CPU, whatever else is there.", rich_help_panel=_OVER)
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and run nothing.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="As --dry-run, with where each value came from.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="Leave out the line that says what runs.")
    ] = False,
) -> None:
    """Run a training script as the profile says.

    Options stand before SCRIPT; everything after it reaches the script byte for byte.
    """
    import os

    from accel_cli import console, planning
    from accel_cli.errors import UsageError

    if module and no_python:
        raise UsageError("-m and --no-python contradict each other: a module needs Python")
    request = planning.Request(
        target=script,
        args=tuple(args or ()),
        kind="module" if module else "program" if no_python else "script",
        profile=profile,
        assignments=tuple(assignments or ()),
        nproc_per_node=nproc_per_node,
        nnodes=nnodes,
        shutdown_timeout=shutdown_timeout,
        stall_timeout=stall_timeout,
        mixed_precision=mixed_precision,
        cpu=cpu,
    )
    planning.check_target(request.target, request.kind)
    resolved, plan = planning.prepare(request, os.environ)
    if dry_run or explain:
        console.plain(described(plan, resolved if explain else None))
        return
    if not quiet:
        console.note(headline(plan, resolved))
    raise typer.Exit(planning.run(plan))


def headline(plan: Plan, resolved: Resolved) -> str:
    """The line at every start: launcher, processes, devices, precision, and which profile said so."""
    from accel_cli.console import short

    files = [
        layer
        for layer in resolved.layers
        if layer.name in {"user", "project"} or layer.name.startswith("profile ")
    ]
    said = " + ".join(f"{layer.name} ({short(layer.where[''])})" for layer in files)
    return (
        f"{plan.launcher}, {_processes(plan)}, {plan.device}, mixed precision {resolved.profile.mixed_precision}; "
        f"profile: {said or 'none, detected defaults (accel config writes one)'}"
    )


def _processes(plan: Plan) -> str:
    if plan.nnodes > 1:
        return f"{plan.nnodes * plan.nproc_per_node} processes ({plan.nproc_per_node} on each of {plan.nnodes} machines)"
    return "1 process" if plan.nproc_per_node == 1 else f"{plan.nproc_per_node} processes"


def described(plan: Plan, resolved: Resolved | None) -> str:
    """The plan as text; with `resolved` also where every value of the profile came from."""
    import shlex

    from accel_cli.masking import masked
    from accel_cli.profile.layers import flat

    lines = [
        f"launcher: {plan.launcher}",
        f"start: {_processes(plan)}",
        f"device: {plan.device}",
        f"command: {shlex.join(plan.argv)}",
        "environment:",
        *(f"  {name}={masked(name, value)}" for name, value in sorted(plan.env.items())),
    ]
    if plan.agent:
        lines += [
            "elastic agent:",
            *(f"  {name}: {value}" for name, value in plan.agent.items() if value is not None),
        ]
    if resolved:
        values = flat(resolved.profile.model_dump())
        lines += [
            "profile:",
            *(f"  {key}: {value}  [{resolved.source(key)}]" for key, value in values.items()),
        ]
    return "\n".join(lines)
