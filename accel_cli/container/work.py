"""What a host is to do: the content of `job.json`, as `accel launch` wrote it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from accel_cli.container.problem import ContainerError

__all__ = ["VERSION", "Work", "read"]

VERSION = 1
"""Of the file."""


@dataclass(frozen=True)
class Work:
    """The job, as every host gets it."""

    kind: Literal["script", "module", "program"]
    target: str
    args: tuple[str, ...] = ()
    """Byte for byte: what is no text is there as lone surrogates."""
    cwd: str = "."
    """Where it starts: a folder in the source."""
    nproc_per_node: int | Literal["auto"] = "auto"
    settings: Mapping[str, str] = field(default_factory=dict)
    """The variables of accel."""
    env: Mapping[str, str] = field(default_factory=dict)
    """The profile's variables."""
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Variables whose value is a secret, by its name or ARN."""
    requirements: str | None = None
    """A file in the source that pip installs."""
    model_dir: str | None = None
    """The folder of `cwd` that is the job's model."""
    checkpoint_dir: str | None = None
    """The folder of `cwd` that outlives the job."""
    model_parallel: Mapping[str, Any] | None = None
    region: str | None = None
    agent: Mapping[str, Any] = field(default_factory=dict)
    """What the elastic agent is told beside the machines."""

    @property
    def what(self) -> tuple[str, ...]:
        """What a process runs, as `worker.py` takes it."""
        return (self.kind, self.target, *self.args)


def read(file: Path) -> Work:
    """The job a file says.

    Raises:
        ContainerError: It cannot be read.
    """
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        if said["version"] != VERSION:
            raise ContainerError(
                f"{file} has version {said['version']}, and this accel reads version {VERSION}"
            )
        known = {each.name for each in fields(Work)}
        given = {name: value for name, value in said.items() if name in known and value is not None}
        return Work(**{**given, "args": tuple(given.get("args", ()))})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ContainerError(f"{file} does not say what to run: {type(error).__name__}: {error}") from error
