"""`accel test`: a short self-check under the profile in force."""

from __future__ import annotations

from typing import Annotated

import typer

from accel_cli.commands.options import complete_profile_names

__all__ = ["EXAMPLE", "test"]

EXAMPLE = "Example: accel test --nproc-per-node 2"


def test(  # noqa: PLR0913, PLR0917 - one parameter an option
    profile: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The named profile to use.", autocompletion=complete_profile_names),
    ] = None,
    nproc_per_node: Annotated[
        str | None, typer.Option(metavar="N", help="Processes on each machine: a number, or auto.")
    ] = None,
    gpu_ids: Annotated[
        str | None,
        typer.Option(metavar="IDS", help="Use these GPUs, a process for each: all, or ids as in 0,2."),
    ] = None,
    nnodes: Annotated[
        str | None, typer.Option(metavar="N", help="Number of machines, or a range MIN:MAX.")
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where machines meet: one of them, by an address all reach."),
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Compute on the CPU, whatever else is there.")] = False,
) -> None:
    """Check that processes, collectives, gradients, gathering and precision work here."""
    import os

    from accel_cli import console
    from accel_cli.commands.launch import headline
    from accel_cli.planning import planner

    request = planner.Request(
        "accel_runtime.selfcheck",
        kind="module",
        profile=profile,
        nproc_per_node=nproc_per_node,
        gpu_ids=gpu_ids,
        nnodes=nnodes,
        rdzv_endpoint=rdzv_endpoint,
        cpu=cpu,
        as_a_whole=True,
    )
    resolved, plan = planner.prepare(request, os.environ)
    console.note(headline(plan, resolved))
    raise typer.Exit(planner.run_plan(plan))
