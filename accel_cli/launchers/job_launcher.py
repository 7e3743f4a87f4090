"""The parts of launchers that start `accel launch` on several nodes: common fields, checks, the files that are sent, the plan."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, ValidationInfo
from typing_extensions import override

from accel_cli import console
from accel_cli.console import is_secret
from accel_cli.errors import UsageError
from accel_cli.launchers import torchrun
from accel_cli.launchers.launcher import DETACH, JOB_NAME, Launcher, LaunchSpec
from accel_cli.launchers.node_launch import build_node_options
from accel_cli.launchers.sections import Answers, CountOrAuto, ExpandedPath, Question
from accel_cli.launchers.source_files import (
    Selection,
    check_engine_files,
    check_selected,
    locate_target,
    select_files,
    write_archive,
)
from accel_cli.planning.launch_options import LaunchOption
from accel_cli.planning.plan import JobPlan, Plan

__all__ = [
    "Exclude",
    "GpusPerNode",
    "Include",
    "JobLauncher",
    "Nodes",
    "ProcessesPerNode",
    "SentFolder",
    "SourceDir",
    "WorkingDir",
    "clean_name",
    "count_gpus",
    "count_processes",
    "find_exposed_secret",
]

_FOLDER = "folder"
"""The value of `launcher.source` with which the job carries files."""
_NODE_KEYS = {"rdzv_timeout", "max_restarts", "ranks", "shutdown_timeout", *torchrun.PASSED_KEYS}
"""Keys of torchrun that `accel launch` on each node receives, as far as the launcher has them."""


def _check_is_sent(value: Any, info: ValidationInfo) -> Any:
    """Raise ValueError if a key selects files although the job carries none."""
    if value not in (".", []) and info.data.get("source", _FOLDER) != _FOLDER:
        raise ValueError(f"expected none without source: {_FOLDER}")
    return value


def _check_working_dir(value: str | None, info: ValidationInfo) -> str | None:
    if value and info.data.get("source") == _FOLDER:
        raise ValueError(f"expected none with source: {_FOLDER}, whose files are in a separate folder")
    return value


Nodes = Annotated[
    int, Field(ge=1, description="Number of nodes."), Question("How many nodes?", suggest=lambda *_: 1)
]
GpusPerNode = Annotated[int, Field(ge=0), Question("How many GPUs on each node?", suggest=lambda *_: 0)]
ProcessesPerNode = Annotated[
    CountOrAuto,
    Field(description="Number of processes on each node; `auto` is one for each of `gpus_per_node`, or 1."),
    Question(
        "How many processes on each node?",
        suggest=lambda *_: 1,
        when=lambda answers: not answers.get("gpus_per_node"),
        hint="a number",
    ),
]
SourceDir = Annotated[
    str,
    Field(min_length=1, description="Folder that is sent, with the script and the modules it imports."),
    AfterValidator(_check_is_sent),
    ExpandedPath,
]
Include = Annotated[
    list[str],
    Field(
        description="Patterns of files to send although git ignores them, they are data, or they may hold secrets."
    ),
    AfterValidator(_check_is_sent),
]
Exclude = Annotated[
    list[str], Field(description="Patterns of files not to send."), AfterValidator(_check_is_sent)
]
WorkingDir = Annotated[str | None, AfterValidator(_check_working_dir)]


@dataclass(frozen=True)
class SentFolder:
    """The folder whose files a job carries."""

    source: str
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    cwd: str
    """The working directory of the nodes, in that folder."""
    script: str | None
    """The file that must be sent, relative to the working directory; None for a module or program."""

    def select(self, env: Mapping[str, str]) -> Selection:
        """Return the files; `env` are the variables of the nodes.

        Raises:
            UsageError: A file that the job needs is not among them.
        """
        selection = select_files(Path(self.source), self.include, self.exclude)
        check_selected(selection, Path(self.cwd, self.script or ""))
        check_engine_files(selection, self.cwd, env)
        return selection

    def write(self, env: Mapping[str, str], archive: Path) -> Selection:
        """Write the files to an archive, and print notes about those that are left out."""
        selection = self.select(env)
        console.print_notes(selection.notes)
        write_archive(selection, archive)
        return selection


class JobLauncher(Launcher):
    """A launcher that submits a job to a cluster, with one `accel launch` on each of its nodes."""

    if TYPE_CHECKING:  # fields of each launcher, in the order of its own section
        nnodes: int
        include: list[str]
        exclude: list[str]

    location = "job"
    launch_options: ClassVar[tuple[LaunchOption, ...]] = (DETACH, JOB_NAME)
    packages: ClassVar[tuple[str, ...]] = ()
    """The packages that it needs, by the names of their modules."""

    @classmethod
    @override
    def get_missing_requirement(cls) -> str:
        return ", ".join(package for package in cls.packages if not find_spec(package))

    @classmethod
    @override
    def may_start_several(cls, answers: Answers) -> bool:
        each = answers.get("nproc_per_node", max(1, count_gpus(answers.get("gpus_per_node"))))
        return (answers.get("nnodes", 1), each) != (1, 1)

    def locate(self, spec: LaunchSpec, cure: str) -> tuple[str, SentFolder | None]:
        """Return the target as a node finds it, and the folder that the job carries; None if it carries none.

        Raises:
            UsageError: The target or the current directory is not in that folder; the message ends with `cure`.
        """
        if spec.is_builtin or self.sent_folder is None:
            return spec.target, None
        target, cwd = locate_target(spec.target, spec.kind, self.sent_folder, cure)
        script = target if spec.kind == "script" else None
        return target, SentFolder(self.sent_folder, tuple(self.include), tuple(self.exclude), cwd, script)

    def build_options(self, nproc_per_node: int) -> tuple[str, ...]:
        """Return the options of `accel launch` on each node."""
        return build_node_options({"nproc_per_node": nproc_per_node, **self.model_dump(include=_NODE_KEYS)})

    def build_plan(  # noqa: PLR0913 - the facts that differ
        self,
        spec: LaunchSpec,
        job: JobPlan,
        *,
        argv: Sequence[str],
        env: Mapping[str, str],
        nproc_per_node: int,
        device: str,
    ) -> Plan:
        """Return the plan of a launch.

        Args:
            spec: The launch.
            job: The job.
            argv: The command that the plan shows.
            env: The variables of the processes.
            nproc_per_node: The number of processes on each node.
            device: The device of a process if the settings leave it open.
        """
        return Plan(
            launcher=self.kind,
            argv=tuple(argv),
            env=env,
            device=device if spec.settings.device == "auto" else spec.settings.device,
            target=spec.target,
            nnodes=self.nnodes,
            nproc_per_node=nproc_per_node,
            job=replace(job, detach="detach" in spec.option_values, jobs_options=spec.jobs_options),
        )


def clean_name(text: str, longest: int) -> str:
    """Return text as lower-case letters, digits and hyphens that begin with a letter, as names of hosts do."""
    stem = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (stem if stem[:1].isalpha() else f"job-{stem}")[:longest].rstrip("-")


def count_gpus(gpus_per_node: int | str | None) -> int:
    """Return the number in a value such as `4` or `a100:4`."""
    return int(str(gpus_per_node or 0).rpartition(":")[2])


def find_exposed_secret(env: Mapping[str, str], secrets: Container[str]) -> str:
    """Return the first variable of a profile that looks like a secret, which the job would show; empty without one.

    Args:
        env: The variables.
        secrets: The names in `launcher.secrets`, whose values the job does not show.

    Raises:
        UsageError: A variable is one of `launcher.secrets` too.
    """
    for name in env:
        if name in secrets:
            raise UsageError(f"{name} is in both env and launcher.secrets. Remove one of them.")
        if is_secret(name):
            return name
    return ""


def count_processes(
    spec: LaunchSpec, nproc_per_node: CountOrAuto, num_gpus: int, source: str = "gpus_per_node"
) -> int:
    """Return the number of processes on each node, from the key and the GPUs that a node reserves.

    Args:
        spec: The launch.
        nproc_per_node: The key.
        num_gpus: The number of GPUs.
        source: The key of the launcher that requests them.

    Raises:
        UsageError: There are more processes than GPUs.
    """
    on_cpu = spec.settings.device == "cpu"
    if nproc_per_node == "auto":
        return 1 if on_cpu else max(1, num_gpus)
    if 0 < num_gpus < nproc_per_node and not on_cpu:
        raise UsageError(
            f"Invalid launcher.nproc_per_node {nproc_per_node}: launcher.{source} requests {num_gpus} GPU(s) per node. "
            "Request one GPU for each process, or use --cpu."
        )
    return nproc_per_node
