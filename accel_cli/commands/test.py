"""`accel test`: check that training works with the effective profile."""

from __future__ import annotations

import os

import typer

from accel_cli import console
from accel_cli.commands.base import CommandApp
from accel_cli.commands.options import RequestCommand, get_options
from accel_cli.planning.options import OPTIONS, SELECTION, Request

__all__ = ["app"]

app = CommandApp(rich_help_panel="Run")


class TestCommand(RequestCommand):
    """The command `accel test`."""

    declared = tuple(OPTIONS[name] for name in SELECTION)


@app.command("test", cls=TestCommand, epilog="Example: accel test --nproc-per-node 2")
def test(context: typer.Context) -> None:
    """Check processes, collectives, gradients, gathering and precision on this machine."""
    from accel_cli.commands.launch import format_headline
    from accel_cli.planning import planner

    request = Request("accel_runtime.selfcheck", kind="module", options=get_options(context), is_builtin=True)
    resolved, plan = planner.prepare(request, os.environ)
    console.note(format_headline(plan, resolved))
    raise typer.Exit(resolved.profile.launcher.run(plan))
