"""The same `accel launch` on every worker of a TPU pod: the command of gcloud that starts it there."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accel_cli import launchers
from accel_cli.console import mask_secrets
from accel_cli.errors import UsageError
from accel_cli.launchers.slurm import quoted
from accel_cli.planning import planner
from accel_cli.planning.machine import Machine, Packages, Tpu
from accel_cli.planning.plan import Plan
from accel_cli.planning.planner import Request
from accel_cli.profile import yaml_io
from accel_cli.profile.layers import Resolved, flat

__all__ = ["Pod", "check_gcloud", "check_target", "folder", "prepare"]

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_WORKER = Machine(1, tpu=Tpu(("TPU",), "--tpu-pod"), packages=Packages("2.9.0", "2.9.0", "there"))
"""What a worker is taken for until its own `accel launch` looks."""


@dataclass(frozen=True)
class Pod:
    """A TPU pod, and where on its workers the script is."""

    name: str
    folder: str
    """The working folder on the workers, from their user's home unless it is absolute."""
    zone: str | None = None
    project: str | None = None
    setup: tuple[str, ...] = ()
    """Lines of shell that run before, on every worker."""


def folder(said: str | None) -> str:
    """The working folder as the workers call it: from the home, if it is in it.

    Args:
        said: The folder that was asked for; None takes this one.
    """
    path = Path.cwd() if said is None else Path(said).expanduser()
    for home in (Path.home(), Path.home().resolve()):
        if path.is_relative_to(home):
            return str(path.relative_to(home))
    return str(path)


def check_target(request: Request, said: str | None) -> None:
    """Refuse what is not here to run, unless the workers have a folder of their own.

    Raises:
        UsageError: The script or module is not in this folder.
    """
    if said is None:
        planner.check_target(request.target, request.kind)


def prepare(pod: Pod, request: Request, environ: Mapping[str, str]) -> tuple[Resolved, Plan]:
    """What was decided here, and the command that has it done on every worker.

    Args:
        pod: The pod.
        request: What was typed. The user's own profile has no say: it is about this machine.
        environ: The environment.

    Raises:
        UsageError: It cannot run on a pod.
    """
    for option, name in (("--tpu-pod", pod.name), ("--zone", pod.zone), ("--project", pod.project)):
        if name is not None and not _NAME.fullmatch(name):
            raise UsageError(f"{option} {name!r} is no name of Google Cloud")
    if request.node_rank is not None:
        raise UsageError("--node-rank is for one machine, and --tpu-pod starts all of them: leave it out")
    request = replace(request, for_pod=True)
    resolved = planner.resolve(request, environ, _WORKER)
    # What cannot run on any worker is said here, once.
    planned = planner.make_plan(request, resolved, {}, _WORKER)
    if planned.launcher != (needed := launchers.suggest(_WORKER)):
        where = resolved.source("launcher.kind")
        raise UsageError(
            f"--tpu-pod needs launcher.kind: {needed}, and {where} says {planned.launcher}; --set launcher.kind={needed} "
            "says otherwise for this run"
        )
    _refuse_secrets(resolved)
    argv = (
        "gcloud",
        "compute",
        "tpus",
        "tpu-vm",
        "ssh",
        pod.name,
        *_options(pod, _command(pod, request, resolved)),
    )
    plan = Plan(
        launcher=planned.launcher,
        runner="accel_cli.launchers.single:become",
        argv=argv,
        env={},
        device=f"TPU pod {pod.name}",
        target=request.target,
    )
    return resolved, plan


def check_gcloud() -> None:
    """Refuse to run where gcloud is not.

    Raises:
        UsageError: It is not there.
    """
    if not shutil.which("gcloud"):
        raise UsageError(
            "gcloud, which reaches the workers of a pod, is not on PATH. Install the Google Cloud CLI "
            "(https://cloud.google.com/sdk/docs/install), or leave out --run-pod and run the printed command elsewhere."
        )


def _options(pod: Pod, command: str) -> Iterator[str]:
    if pod.zone:
        yield f"--zone={pod.zone}"
    if pod.project:
        yield f"--project={pod.project}"
    yield "--worker=all"
    yield f"--command={command}"


def _command(pod: Pod, request: Request, resolved: Resolved) -> str:
    """What the shell of a worker is given."""
    # A folder from the home is the home's by the worker's own variable: users are called otherwise there.
    home = "" if pod.folder.startswith("/") else '"$HOME"/'
    start = {"script": [], "module": ["-m"], "program": ["--no-python"]}[request.kind]
    # By `python3 -m`: what pip installed for a user is not on the PATH of a command over ssh.
    launch = ["python3", "-m", "accel_cli", "launch", "--no-profile", *_assignments(resolved), *start, "--"]
    words = " ".join(map(quoted, (*launch, request.target, *request.args)))
    return " && ".join([f"cd {home}{quoted(pod.folder)}", *pod.setup, f"exec {words}"])


def _assignments(resolved: Resolved) -> Iterator[str]:
    """Every value that a layer said, as options."""
    values = flat(resolved.profile.model_dump())
    for key in resolved.sources:
        yield from ("--set", f"{key}={_text(key, values[key])}")


def _text(key: str, value: Any) -> str:
    """A value as `--set` reads it."""
    if key.startswith("env."):
        return str(value)
    return yaml_io.dump({"value": value}).removeprefix("value:").strip()


def _refuse_secrets(resolved: Resolved) -> None:
    for name, value in resolved.profile.env.items():
        if mask_secrets(name, value) != value:
            raise UsageError(
                f"env.{name} holds a secret, which would stand in the command line of every worker: set it in the "
                "workers' own environment, or in a file that a --pod-setup line reads there"
            )
