"""What the hosts of a job are told to run: the content of `job.json`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_cli.console import is_secret
from accel_cli.errors import UsageError
from accel_cli.launchers.base import Job

if TYPE_CHECKING:
    from accel_cli.launchers.sagemaker.section import SageMaker

__all__ = ["VERSION", "described"]

VERSION = 1
"""Of the layout of `job.json`."""
_LONGEST = 131071
"""Bytes of one argument or variable, as Linux starts a program with (MAX_ARG_STRLEN less the end)."""


def described(said: SageMaker, job: Job) -> dict[str, Any]:
    """What every host runs, for `accel_cli.container`.

    Raises:
        UsageError: The script is outside what is sent, or something cannot travel.
    """
    _check_libraries(said, job)
    _check_env(job.env, said.secrets)
    _check_lengths(job)
    return {
        "version": VERSION,
        "accel": version("accel"),
        "kind": job.kind,
        "args": list(job.args),
        **_of_the_source(said, job),
        "nproc_per_node": said.nproc_per_node,
        "settings": job.settings.to_env(),
        "env": dict(job.env),
        "secrets": said.secrets,
        "model_dir": said.model_dir,
        "checkpoint_dir": said.checkpoint_dir,
        "model_parallel": said.model_parallel or None,
        "region": None,
        "agent": {
            "max_restarts": said.max_restarts,
            "ranks": said.ranks,
            "shutdown_timeout": said.shutdown_timeout,
            "stall_timeout": said.stall_timeout,
            "process_group_timeout": job.settings.process_group_timeout,
        },
    }


def _of_the_source(said: SageMaker, job: Job) -> dict[str, Any]:
    """What has its place in the folder that is sent."""
    if job.as_a_whole:
        return {"target": job.target, "cwd": ".", "requirements": None}
    source = Path(said.source_dir).resolve()
    return {
        "target": _target(job, source),
        "cwd": _below(Path.cwd(), source, "the folder this is launched from"),
        "requirements": said.requirements and _requirements(said.requirements, source),
    }


def _target(job: Job, source: Path) -> str:
    """A script as it is called in the job: from the folder it starts in, whatever was typed."""
    if job.kind != "script":
        return job.target
    _below(Path(job.target), source, f"the script {job.target}")
    # A link keeps its own name: it is sent as it is.
    return os.path.relpath(Path(job.target).absolute()) if Path(job.target).is_absolute() else job.target


def _requirements(name: str, source: Path) -> str:
    if not Path(name).is_file():
        raise UsageError(f"launcher.requirements: there is no file {name}")
    return _below(Path(name), source, f"launcher.requirements, {name},")


def _below(path: Path, source: Path, what: str) -> str:
    """A path from the folder that is sent."""
    # A link may lead out of the folder, and is sent as it is; the folder itself may have been reached by one.
    for found in (path.resolve(), Path(os.path.normpath(Path.cwd() / path))):
        if found.is_relative_to(source):
            return str(found.relative_to(source))
    raise UsageError(
        f"{what} is not in {source}, the folder that is sent; launch from the folder that has it, or set "
        "launcher.source_dir"
    )


def _check_libraries(said: SageMaker, job: Job) -> None:
    """Refuse SageMaker's own libraries where nothing says which image has them: AWS's newer ones do not."""
    if said.image_uri:
        return
    if job.settings.process_group_backend == "smddp":
        raise UsageError(
            "process_group_backend: smddp needs an image that has SageMaker's data parallel library, and AWS's images "
            "for torch 2.9 and newer have not: name yours in launcher.image_uri, or use auto"
        )
    if said.model_parallel:
        raise UsageError(
            "launcher.model_parallel needs an image that has SageMaker's model parallel library, and AWS's images for "
            "torch 2.9 and newer have not: name yours in launcher.image_uri"
        )


def _check_env(env: Mapping[str, str], secrets: Mapping[str, str]) -> None:
    for name in env:
        if name in secrets:
            raise UsageError(f"{name} is in env and in launcher.secrets; say it once")
        if is_secret(name):
            raise UsageError(
                f"env.{name} looks like a secret, and everyone who may look at the job would see it. Put the value in "
                f"AWS Secrets Manager, and its name in the profile: --set 'launcher.secrets={{{name}: NAME-OR-ARN}}'"
            )


def _check_lengths(job: Job) -> None:
    for number, arg in enumerate(job.args, 1):
        if len(os.fsencode(arg)) > _LONGEST:
            raise UsageError(
                f"argument {number} of the script has {len(os.fsencode(arg))} bytes; Linux starts a program with at "
                f"most {_LONGEST}"
            )
    for name, value in job.env.items():
        if len(os.fsencode(f"{name}={value}")) > _LONGEST:
            raise UsageError(
                f"env.{name} is too long: Linux starts a program with at most {_LONGEST} bytes in one"
            )
