"""The launcher of one host of a SageMaker job: makes the source ready, meets the other hosts, runs the processes.

Run by path as `host.py ROOT`. Until the packages are there it needs the standard library only, and it never
needs what only a profile does.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import NoReturn

if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        # This folder, whose modules have names of their own only within it.
        del sys.path[0]
    sys.path.insert(0, str(Path(__file__).parents[2]))

from accel_cli.container import gpus, packages, source, told, vault, work
from accel_cli.container.problem import ContainerError
from accel_cli.container.ready import Ready
from accel_cli.container.told import Told
from accel_cli.container.work import Work
from accel_cli.planning.machine import cpus
from accel_cli.planning.plan import Plan
from accel_cli.runner import run_dir
from accel_runtime.env import SettingsError

__all__ = ["headline", "main", "prepare"]

_NAMES_S = 300
"""Seconds the name of the first host may take to resolve."""
_SAID_S = 15


def main(root: Path) -> int:
    """Run this host's part of the job; its exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stopped)
    for folder in ("model", "checkpoints", "output/data"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    try:
        ready = prepare(root, os.environ)
    except ContainerError as error:
        _leave(root, str(error))
        _note(f"error: {error}")
        return 1
    os.environ.update(ready.environ)
    sys.path.append(str(_packages(root)))
    os.chdir(root / "code" / ready.work.cwd)
    return _run(ready)


def prepare(root: Path, environ: Mapping[str, str]) -> Ready:
    """Make everything ready that the processes need.

    Args:
        root: `/opt/ml`.
        environ: The environment of the container.

    Raises:
        ContainerError: Something is missing.
    """
    bundle = root / "input" / "data" / told.CHANNEL
    do, platform = work.read(bundle / "job.json"), told.read(root / "input" / "config")
    # Before the source's own folder is copied there.
    again = _holds_anything(root / "checkpoints")
    _lay_out(root, bundle, do)
    mine = _variables(root, do, platform, environ)
    _say_what_stays(do, environ)
    if late := bool(do.secrets and do.requirements and packages.missing(["boto3"])):
        packages.require(do.requirements or "", root / "code", mine)
    mine |= vault.resolved(do.secrets, do.region)
    if do.requirements and not late:
        packages.require(do.requirements, root / "code", mine)
    packages.provide(bundle / "wheels", _packages(root), mine)
    if len(platform.hosts) > 1:
        _wait_for(platform.hosts[0], time.monotonic() + _NAMES_S)
    if again:
        _note(f"{root / 'checkpoints'} holds what was saved before: accelerator.resume() goes on from there")
    return Ready(root, do, platform, mine, again)


def _lay_out(root: Path, bundle: Path, do: Work) -> None:
    """The source, with the folders that the platform keeps."""
    code = root / "code"
    source.unpack(bundle / "source.tar.gz", code)
    cwd = code / do.cwd
    if not cwd.is_dir():
        raise ContainerError(f"the job starts in {do.cwd}, and the source has no such folder")
    for key, name, folder in (
        ("launcher.checkpoint_dir", do.checkpoint_dir, "checkpoints"),
        ("launcher.model_dir", do.model_dir, "model"),
    ):
        if name:
            source.link(cwd, name, root / folder, key=key)


def _variables(root: Path, do: Work, platform: Told, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the processes: what the container has already stays as it is."""
    more = {"mp_parameters": dict(do.model_parallel)} if do.model_parallel else {}
    machine = {"NUM_GPUS": gpus.count(environ), "NUM_CPUS": cpus()}
    about = told.variables(root, platform, machine=machine, more=more)
    # The host's own name is the same on all hosts here, and NCCL would take them for one machine. Nothing is set for
    # EFA: from version 1.6 on its plugin for NCCL finds the device, and chooses a protocol that is safe on it.
    ours = {"NCCL_HOSTID": platform.host, **about}
    if len(platform.hosts) > 1 and platform.interface in {name for _, name in socket.if_nameindex()}:
        ours |= dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), platform.interface)
    paths = [str(root / "accel"), str(_packages(root)), *filter(None, [environ.get("PYTHONPATH")])]
    composed = {"PYTHONPATH": os.pathsep.join(paths), **gpus.compatible({**do.env, **environ})}
    return {**ours, **do.env, **environ, **composed}


def _say_what_stays(do: Work, environ: Mapping[str, str]) -> None:
    stays = sorted(name for name, value in do.env.items() if environ.get(name, value) != value)
    if stays:
        _note(f"{', '.join(stays)} of the profile's env is set in this container already, and stays as it is")


def _wait_for(host: str, deadline: float) -> None:
    """Wait for the name of the first host: names come with the hosts, and those come one after another."""
    said = time.monotonic()
    while True:
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            if time.monotonic() > deadline:
                raise ContainerError(
                    f"the name of the first host, {host}, did not resolve within {_NAMES_S} s: {error}"
                ) from None
        else:
            return
        if time.monotonic() - said > _SAID_S:
            said = time.monotonic()
            _note(f"waiting: {host} has no address yet; {deadline - said:.0f} s left")
        time.sleep(0.5)


def _run(ready: Ready) -> int:
    """Run the processes of this host, as `accel launch` would."""
    from accel_cli import console  # noqa: PLC0415 - its packages are there by now
    from accel_cli.errors import AccelError, ElsewhereError  # noqa: PLC0415

    try:
        plan = ready.plan()
        _note(headline(plan))
        # What a list of processes shows, where a process takes the place of this one.
        sys.argv[1:] = [ready.work.target, *ready.work.args]
        module, _, function = plan.runner.partition(":")
        return int(getattr(import_module(module), function)(plan))
    except ElsewhereError as error:
        console.error(str(error))
        return error.exit_code
    except (AccelError, SettingsError) as error:
        _leave(ready.root, str(error))
        console.error(str(error))
        return 1


def headline(plan: Plan) -> str:
    """The line at the start: which of the hosts this is, and what runs on it."""
    each = "1 process" if plan.nproc_per_node == 1 else f"{plan.nproc_per_node} processes"
    if plan.nnodes == 1:
        return f"{plan.agent[run_dir.HOST_KEY]} runs {each}, {plan.device}"
    place = f"machine {plan.agent['node_rank'] + 1} of {plan.nnodes}"
    return f"{plan.agent[run_dir.HOST_KEY]} is {place} with {each} on each, {plan.device}; they meet at {plan.agent['rdzv_endpoint']}"


def _leave(root: Path, text: str) -> None:
    run_dir.write_reason({run_dir.REASON_FILE: str(root / "output" / "failure")}, text)


def _stopped(number: int, _frame: FrameType | None) -> NoReturn:
    """The platform ends the job while this host makes itself ready: that is no failure."""
    sys.exit(128 + number)


def _packages(root: Path) -> Path:
    return root / "accel-packages"


def _holds_anything(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _note(text: str) -> None:
    sys.stderr.write(f"accel: {text}\n")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
