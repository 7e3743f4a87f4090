"""`accel launch`: turn the profile into processes that run a script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from typing_extensions import override

from accel_cli.commands.options import ForeignCommand, complete_profile_names

if TYPE_CHECKING:
    from accel_cli.launchers.base import Launcher
    from accel_cli.planning.plan import Plan
    from accel_cli.planning.planner import Request
    from accel_cli.profile.layers import Resolved

__all__ = ["SETTINGS", "launch"]

_TYPED = "accel.typed"


class LaunchCommand(ForeignCommand):
    """The command `accel launch`; it keeps the arguments as typed, since parsing drops `--`."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_TYPED] = tuple(args)
        return super().parse_args(ctx, args)


SETTINGS: dict[str, Any] = {
    "cls": LaunchCommand,
    # Everything after the script is the script's: options of ours end there.
    "context_settings": {"allow_interspersed_args": False},
    "epilog": "Example: accel launch --nproc-per-node 2 train.py --epochs 3",
}
_HOW = "What runs"
_OVER = "Over the profile"
_POD = "TPU pods"


def launch(  # noqa: PLR0913, PLR0917 - one parameter an option
    context: typer.Context,
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
            autocompletion=complete_profile_names,
        ),
    ] = None,
    no_profile: Annotated[
        bool,
        typer.Option(
            "--no-profile",
            help="Read no profile: variables and options say everything.",
            rich_help_panel=_OVER,
        ),
    ] = False,
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
    gpu_ids: Annotated[
        str | None,
        typer.Option(
            metavar="IDS",
            help="Use these GPUs, a process for each: all, or ids as in 0,2.",
            rich_help_panel=_OVER,
        ),
    ] = None,
    nnodes: Annotated[
        str | None,
        typer.Option(metavar="N", help="Number of machines, or a range MIN:MAX.", rich_help_panel=_OVER),
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where machines meet: one of them, by an address all reach.",
            rich_help_panel=_OVER,
        ),
    ] = None,
    rdzv_id: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the job at that endpoint.", rich_help_panel=_OVER),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="This machine's number, where numbers must hold.", rich_help_panel=_OVER
        ),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(metavar="N", help="Restarts of all processes after a failure.", rich_help_panel=_OVER),
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
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="RANKS",
            help="Whose output to show: all, none, or ranks as in 0,2.",
            rich_help_panel=_OVER,
        ),
    ] = None,
    log_dir: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder for the logs of runs.", rich_help_panel=_OVER),
    ] = None,
    job_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the job, where one is submitted.", rich_help_panel=_OVER),
    ] = None,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Compute on the CPU, whatever else is there.", rich_help_panel=_OVER)
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Have accelerator.resume() go on from the newest checkpoint.",
            rich_help_panel=_OVER,
        ),
    ] = False,
    tpu_pod: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Print the gcloud command that starts this on every worker of a TPU pod.",
            rich_help_panel=_POD,
        ),
    ] = None,
    zone: Annotated[
        str | None,
        typer.Option(metavar="ZONE", help="The pod's zone; else gcloud's own.", rich_help_panel=_POD),
    ] = None,
    project: Annotated[
        str | None,
        typer.Option(metavar="ID", help="The pod's project; else gcloud's own.", rich_help_panel=_POD),
    ] = None,
    pod_folder: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="The working folder on the workers; else this one, from the home.",
            rich_help_panel=_POD,
        ),
    ] = None,
    pod_setup: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LINE",
            help="A line of shell that runs before, on every worker; can be repeated.",
            rich_help_panel=_POD,
        ),
    ] = None,
    run_pod: Annotated[
        bool, typer.Option("--run-pod", help="Run that command instead of printing it.", rich_help_panel=_POD)
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and run nothing.")] = False,
    offline: Annotated[
        bool,
        typer.Option(
            "--offline", help="Print what SageMaker would be asked, as JSON, and ask nobody anything."
        ),
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="As --dry-run, with where each value came from.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Submit the job and do not follow it; prints its id.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="Leave out the line that says what runs.")
    ] = False,
) -> None:
    """Run a training script as the profile says.

    Options stand before SCRIPT; everything after it reaches the script byte for byte.
    """
    import os
    from dataclasses import replace

    from accel_cli import console
    from accel_cli.commands import tpu_pods
    from accel_cli.errors import UsageError
    from accel_cli.planning import planner

    if module and no_python:
        raise UsageError("-m and --no-python contradict each other: a module needs Python")
    if profile and no_profile:
        raise UsageError("--profile and --no-profile contradict each other")
    request = planner.Request(
        target=script,
        args=tuple(args or ()),
        kind="module" if module else "program" if no_python else "script",
        profile=profile,
        assignments=tuple(assignments or ()),
        nproc_per_node=nproc_per_node,
        gpu_ids=gpu_ids,
        nnodes=nnodes,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_id=rdzv_id,
        node_rank=node_rank,
        max_restarts=max_restarts,
        shutdown_timeout=shutdown_timeout,
        stall_timeout=stall_timeout,
        mixed_precision=mixed_precision,
        ranks=ranks,
        log_dir=log_dir,
        job_name=job_name,
        cpu=cpu,
        resume=resume,
        no_profile=no_profile,
    )
    if tpu_pod is not None:
        tpu_pods.check_target(request, pod_folder)
        resolved, plan = tpu_pods.prepare(
            tpu_pods.Pod(
                tpu_pod, tpu_pods.folder(pod_folder), zone=zone, project=project, setup=tuple(pod_setup or ())
            ),
            request,
            os.environ,
        )
    else:
        _refuse_pod_options(
            zone=zone, project=project, pod_folder=pod_folder, pod_setup=pod_setup, run_pod=run_pod
        )
        planner.check_target(request.target, request.kind)
        resolved, plan = planner.prepare(request, os.environ)
    _refuse_job_options(plan, detach=detach, offline=offline)
    _note_options_after_script(context, request)
    if offline:
        console.plain(planner.looked(plan, offline=True))
        return
    if dry_run or explain:
        console.plain(described(plan, resolved if explain else None))
        _show_what_is_sent(plan, wanted=dry_run)
        return
    if tpu_pod is not None and not run_pod:
        _print_pod(plan, quiet=quiet)
        return
    if run_pod:
        tpu_pods.check_gcloud()
    if not quiet:
        console.note(headline(plan, resolved))
    raise typer.Exit(
        planner.run_plan(replace(plan, detach=detach, again=_again(request, resolved.profile.start)))
    )


def _again(request: Request, launcher: Launcher) -> str:
    """What `accel jobs` has to be told to look for a job where this launch submits it."""
    from accel_cli.jobs import again

    keys = {"launcher.kind", *(f"launcher.{key}" for key in launcher.found_by)}
    return again(request.profile, [text for text in request.assignments if text.partition("=")[0] in keys])


def _refuse_pod_options(**said: Any) -> None:
    from accel_cli.errors import UsageError

    for name, value in said.items():
        if value:
            raise UsageError(f"--{name.replace('_', '-')} is for a TPU pod: it needs --tpu-pod NAME")


def _refuse_job_options(plan: Plan, *, detach: bool, offline: bool) -> None:
    from accel_cli.errors import UsageError

    if detach and not (plan.script or plan.request):
        raise UsageError(f"--detach is for launchers that submit a job; {plan.launcher} runs the script here")
    if offline and not plan.look:
        raise UsageError(
            f"--offline is for jobs of SageMaker; with launcher.kind: {plan.launcher}, --dry-run asks nobody anything"
        )


def _note_options_after_script(context: typer.Context, request: Request) -> None:
    """Name the options of `accel launch` that the script gets because they stand after it."""
    from accel_cli import console
    from accel_cli.planning import planner

    dashes = context.meta[_TYPED][: -1 - len(request.args)][-1:] == ("--",)
    options = {name for parameter in context.command.params for name in parameter.opts}
    names = [] if dashes else planner.find_options_after_script(request, options)
    if names:
        target = request.target
        console.note(
            f"options after {target} go to it, not to accel launch: {', '.join(names)}. To give them to accel launch, put "
            f"them before {target}; to leave out this line, put -- before {target}."
        )


def _show_what_is_sent(plan: Plan, *, wanted: bool) -> None:
    from accel_cli import console
    from accel_cli.planning import planner

    if plan.look and wanted:
        console.plain(planner.looked(plan, offline=False))


def _print_pod(plan: Plan, *, quiet: bool) -> None:
    """The command for the workers of a pod, on stdout, and beside it what to do with it."""
    import shlex

    from accel_cli import console

    console.plain(shlex.join(plan.argv))
    if not quiet:
        console.note("nothing runs yet: this command starts it on every worker, and so does --run-pod")


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
        f"{plan.launcher}, {_processes(plan)}, {plan.device}, mixed precision {resolved.profile.mixed_precision}"
        f"{f', {plan.layout}' if plan.layout else ''}; "
        f"profile: {said or 'none, detected defaults (accel config writes one)'}"
        f"{_machines(plan)}"
    )


def _machines(plan: Plan) -> str:
    """Where the machines meet, and who said so."""
    if plan.derived:
        return f"; {plan.derived}"
    where = plan.agent.get("rdzv_endpoint") if plan.nnodes > 1 else None
    return f"; meeting at {where}" if where else ""


def _processes(plan: Plan) -> str:
    if plan.counted:
        return plan.counted if plan.nnodes == 1 else f"{plan.counted}, on {plan.nnodes} machines"
    if plan.nnodes > 1 and plan.agent.get("min_nodes", plan.nnodes) != plan.nnodes:
        each = "1 process" if plan.nproc_per_node == 1 else f"{plan.nproc_per_node} processes"
        return f"{each} on each of {plan.agent['min_nodes']} to {plan.nnodes} machines"
    if plan.nnodes > 1:
        return f"{plan.nnodes * plan.nproc_per_node} processes ({plan.nproc_per_node} on each of {plan.nnodes} machines)"
    return "1 process" if plan.nproc_per_node == 1 else f"{plan.nproc_per_node} processes"


def described(plan: Plan, resolved: Resolved | None) -> str:
    """The plan as text; with `resolved` also where every value of the profile came from."""
    import shlex

    from accel_cli.console import mask_secrets
    from accel_cli.profile.layers import flat

    lines = [
        f"launcher: {plan.launcher}",
        f"start: {_processes(plan)}",
        f"device: {plan.device}",
        *([f"layout: {plan.layout}"] if plan.layout else []),
        *([f"start method: {plan.start_method}"] if plan.start_method else []),
        f"command: {shlex.join(plan.argv)}",
        "environment:",
        *(f"  {name}={mask_secrets(name, value)}" for name, value in sorted(plan.env.items())),
    ]
    if plan.agent:
        lines += [
            "elastic agent:",
            *(f"  {name}: {value}" for name, value in plan.agent.items() if value is not None),
        ]
    if plan.script:
        lines += ["batch script:", plan.script.rstrip("\n")]
    if resolved:
        values = flat(resolved.profile.model_dump())
        values |= {
            key: mask_secrets(key, str(value)) for key, value in values.items() if key.startswith("env.")
        }
        lines += [
            "profile:",
            *(f"  {key}: {value}  [{resolved.source(key)}]" for key, value in values.items()),
        ]
    return "\n".join(lines)
