"""`accel xla pod`: the gcloud command that runs `accel launch` on every worker of a TPU pod."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from accel_cli.commands import launch
from accel_cli.commands.command import parse_launch

if TYPE_CHECKING:
    from accel_cli.planning.launch_options import Request
    from accel_cli.planning.plan import Plan
    from accel_cli.profile.layers import Resolved
    from accel_cli.profile.planner import ResolvedLaunch

__all__ = ["Pod", "app", "find_folder", "prepare"]

_NAME = re.compile(r"[A-Za-z0-9][\w.:-]*")


class Pod(NamedTuple):
    """A TPU pod, and how its workers run the script."""

    name: str
    zone: str | None = None
    project: str | None = None
    folder: str | None = None
    setup: Sequence[str] = ()


app = typer.Typer(
    rich_help_panel="Manage",
    no_args_is_help=True,
    epilog="Example: accel xla pod my-pod --zone us-central2-b -- train.py --epochs 3",
)


@app.callback()
def xla() -> None:
    """Start a launch on all hosts of a TPU pod."""


@app.command("pod", epilog="Example: accel xla pod my-pod --zone us-central2-b -- train.py --epochs 3")
def pod(  # noqa: PLR0913 - options of the command
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the TPU.")],
    launch_args: Annotated[
        list[str],
        typer.Argument(metavar="LAUNCH", help="Arguments of accel launch: its options, SCRIPT and ARGS."),
    ],
    *,
    zone: Annotated[
        str | None,
        typer.Option("--zone", metavar="ZONE", help="Use the TPU in this zone instead of gcloud's default."),
    ] = None,
    project: Annotated[
        str | None,
        typer.Option("--project", metavar="ID", help="Use this project instead of gcloud's default."),
    ] = None,
    folder: Annotated[
        str | None,
        typer.Option(
            "--folder",
            metavar="DIR",
            help="Run in this folder of the workers, relative to the home; by default the current folder.",
        ),
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(
            "--setup",
            metavar="COMMAND",
            help="Run a shell command on every worker before the launch; can be repeated.",
        ),
    ] = None,
    run: Annotated[bool, typer.Option("--run", help="Run the command instead of printing it.")] = False,
) -> None:
    """Print the gcloud command that runs accel launch on every worker of a TPU pod.

    Put -- before the arguments of accel launch, so that its options are not read as options of accel xla pod.
    """
    import os
    import shutil

    from accel_cli import console
    from accel_cli.commands import plan_view
    from accel_cli.errors import UsageError
    from accel_cli.launchers.single import Single
    from accel_cli.planning.plan import join_for_bash

    # In another folder, the workers may have a script that is missing here.
    request = _parse_launch(context, launch_args, is_here=folder is None)
    resolved, plan = prepare(Pod(name, zone, project, folder, setup or ()), request, os.environ)
    console.print_notes(plan.notes)
    if "dry_run" in request.options or "explain" in request.options:
        console.plain(plan_view.format_plan(plan, resolved if "explain" in request.options else None))
        return
    quiet = "quiet" in request.options
    if not run:
        console.plain(join_for_bash(plan.argv))
        if not quiet:
            console.note(
                "nothing was run. Run this command, or add --run, to launch the script on every worker."
            )
        return
    if not shutil.which("gcloud"):
        raise UsageError(
            "gcloud not found: accel xla pod --run needs it to reach the workers. Install the Google Cloud CLI "
            "(https://cloud.google.com/sdk/docs/install), or leave out --run and run the printed command elsewhere."
        )
    if not quiet:
        console.note(plan_view.format_headline(plan, resolved))
    raise typer.Exit(Single().run(plan))


def _parse_launch(context: typer.Context, args: Sequence[str], *, is_here: bool) -> Request:
    """Return the request for arguments of `accel launch`."""
    from dataclasses import replace

    parsed = parse_launch(launch.app, args, context)
    return replace(launch.parse(parsed, is_here=is_here), for_pod=True)


def find_folder(folder: str | None) -> str:
    """Return the working folder on the workers: relative to the home if it is in the home of this user.

    Args:
        folder: The folder; None takes the current one.
    """
    from pathlib import Path

    path = Path.cwd() if folder is None else Path(folder).expanduser()
    for home in (Path.home(), Path.home().resolve()):
        if path.is_relative_to(home):
            return str(path.relative_to(home))
    return str(path)


def prepare(pod: Pod, request: Request, environ: Mapping[str, str]) -> tuple[ResolvedLaunch, Plan]:
    """Return the resolved profile, and the plan whose command launches it on every worker.

    Args:
        pod: The pod.
        request: The launch. The user's own profile does not apply, since it describes this machine.
        environ: The environment.

    Raises:
        UsageError: The launch cannot run on a pod.
    """
    from accel_cli import console, launchers
    from accel_cli.errors import UsageError
    from accel_cli.extensions.xla.tpu import Packages, Tpu, XlaDevices
    from accel_cli.planning.machine import Machine
    from accel_cli.planning.plan import Plan
    from accel_cli.profile import planner

    for parameter, value in (("NAME", pod.name), ("--zone", pod.zone), ("--project", pod.project)):
        if value is not None and not _NAME.fullmatch(value):
            raise UsageError(
                f"Invalid {parameter} {value!r}: expected letters, digits, '-', '_', '.' and ':', as in names of Google Cloud."
            )
    if "node_rank" in request.options:
        raise UsageError(
            "Cannot use --node-rank with accel xla pod: it is for one node, and all of them are started. Leave it out."
        )
    # A worker is assumed to have the packages; its own `accel launch` checks them.
    devices = XlaDevices(Tpu(("TPU",), "accel xla pod"), Packages("2.9.0", "2.9.0", "installed"))
    worker = Machine(1, others=(devices,))
    console.print_notes(request.notes)
    resolved = planner.resolve(request, environ, worker)
    console.print_notes(resolved.notes)
    plan = planner.plan(resolved)
    if plan.launcher != (needed := launchers.suggest_launcher(worker)):
        raise UsageError(
            f"Cannot run on a TPU pod with launcher.kind: {plan.launcher} (from {resolved.get_source('launcher.kind')}): it "
            f"needs {needed}. Use --set launcher.kind={needed} for this run."
        )
    for name, value in resolved.profile.env.items():
        if console.mask_secrets(name, value) != value:
            raise UsageError(
                f"Cannot send env.{name} to the workers: it looks like a secret, and command lines are visible to all users. Set "
                "it in the environment of the workers, or in a file that a --setup command reads there."
            )
    return resolved, Plan(
        launcher=plan.launcher,
        argv=(
            "gcloud",
            "compute",
            "tpus",
            "tpu-vm",
            "ssh",
            pod.name,
            *_build_options(pod, request, resolved),
        ),
        env={},
        device=f"TPU pod {pod.name}",
        target=request.target,
        notes=plan.notes,
    )


def _build_options(pod: Pod, request: Request, resolved: Resolved) -> Iterator[str]:
    """Yield the options of gcloud, the last of which is the command for the shell of every worker."""
    from accel_cli.planning.plan import quote_for_bash

    if pod.zone:
        yield f"--zone={pod.zone}"
    if pod.project:
        yield f"--project={pod.project}"
    yield "--worker=all"
    # The home is a variable, since users have other names on the workers.
    folder = find_folder(pod.folder)
    home = "" if folder.startswith("/") else '"$HOME"/'
    # `python3 -m`, since the PATH of a command over ssh lacks the programs that pip installed for a user.
    launch = ("python3", "-m", "accel_cli", "launch", "--no-profile", *_list_assignments(resolved))
    kind = {"script": (), "module": ("-m",), "program": ("--no-python",)}[request.kind]
    command = " ".join(map(quote_for_bash, (*launch, *kind, "--", request.target, *request.args)))
    yield f"--command={' && '.join([f'cd {home}{quote_for_bash(folder)}', *pod.setup, f'exec {command}'])}"


def _list_assignments(resolved: Resolved) -> Iterator[str]:
    """Yield every value that a layer has set, as options of `accel launch`."""
    from accel_cli.profile import yaml_io

    values = resolved.values
    for key in resolved.sources:
        text = str(values[key]) if key.startswith("env.") else yaml_io.inline(values[key])
        yield from ("--set", f"{key}={text}")
