"""The task of SkyPilot that runs a job: its YAML, and the files that the job carries."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from typing_extensions import override

from accel_cli import console
from accel_cli.errors import UsageError
from accel_cli.extensions.skypilot.fields import SkyPilotSection
from accel_cli.launchers.manifest import PatchRules, merge_patch
from accel_cli.launchers.source_files import (
    Selection,
    check_engine_files,
    check_selected,
    describe_selection,
    select_files,
    write_archive,
)
from accel_cli.planning.plan import JobPlan, join_for_bash
from accel_runtime.environment.settings import __version__, find_nearest

__all__ = ["LABEL", "TASK_FILE", "SkyJobPlan", "write_folder"]

TASK_FILE, _ARCHIVE = "accel-task.yaml", "accel-source.tar.gz"
"""The files that `sky launch` takes: the task, and the source in the working directory."""
LABEL = "accel-version"
"""The label of the clusters that accel starts."""
_KNOWN = frozenset({
    "api_server_access", "config", "envs", "event_callback", "file_mounts", "inputs", "managed_secrets", "name", "num_nodes",
    "outputs", "pool", "resources", "run", "secrets", "service", "setup", "volume_mounts", "volumes", "workdir",
})  # fmt: skip
"""The members of a task in SkyPilot 0.14; the command checks all others inside of them."""


@dataclass(frozen=True, kw_only=True)
class SkyJobPlan(JobPlan):
    """A job on a cluster of SkyPilot."""

    section: SkyPilotSection
    """The launcher's section of the profile."""
    name: str
    """The start of the cluster's name."""
    command: tuple[str, ...]
    """The command `accel launch` of every node."""
    env: Mapping[str, str]
    """The variables of every node."""
    folder: str | None
    """The working directory in the source that is sent; None if none is sent."""
    script: str | None
    """The file that the source must have; None for a module or program."""

    @property
    def options(self) -> tuple[str, ...]:
        """The options of `sky launch` before the name of the cluster and the task."""
        # The name alone: sky takes the value from its environment.
        secrets = (word for name in self.section.secrets for word in ("--secret", name))
        minutes = str(self.section.down_after)
        return ("--yes", "--detach-run", "--down", "--idle-minutes-to-autostop", minutes, *secrets)

    def build_task(self, workdir: str) -> dict[str, Any]:
        """Return the task.

        Args:
            workdir: The folder that is sent.

        Raises:
            UsageError: The patch of the profile sets what accel sets, or an unknown member.
        """
        section = self.section
        resources: dict[str, Any] = {
            "infra": section.infra,
            "accelerators": section.accelerators,
            "cpus": section.cpus,
            "memory": section.memory,
            "disk_size": section.disk_size,
            "use_spot": section.spot or None,
            "image_id": section.image,
            "labels": {LABEL: __version__},
        }
        task: dict[str, Any] = {
            "name": self.name,
            "num_nodes": section.nnodes,
            "resources": {key: value for key, value in resources.items() if value is not None},
            "envs": dict(self.env),
            **({"workdir": workdir} if self.folder is not None else {}),
            **({"setup": "\n".join([*section.setup, ""])} if section.setup else {}),
            "run": self._build_script(),
        }
        reserved = {
            "name": "Set launcher.job_name.",
            "num_nodes": "Set launcher.nnodes.",
            "workdir": "Set launcher.source_dir.",
            "setup": "Set launcher.setup.",
            "run": "Pass the script to accel launch.",
            "secrets": "Set launcher.secrets.",
            **{
                f"resources.{key}": f"Set launcher.{_KEYS.get(key, key)}."
                for key in resources
                if key != "labels"
            },
            f"resources.labels.{LABEL}": "Remove it.",
            "envs": "Set env in the profile.",
        }
        for name in section.task:
            if name not in _KNOWN:
                nearest = find_nearest(name, sorted(_KNOWN))
                hint = f" Did you mean {nearest}?" if nearest else ""
                raise UsageError(
                    f"Invalid launcher.task.{name}: a task has no such member.{hint} Correct or remove it."
                )
        merged: dict[str, Any] = merge_patch(
            task, section.task, PatchRules("launcher.task", reserved=reserved)
        )
        return merged

    def _build_script(self) -> str:
        """Return the commands of every node; `accel launch` finds the others in SkyPilot's variables."""
        lines = ["set -e"]
        if self.folder is not None:
            # Of this node: the working directory may be on a disk that the nodes of Kubernetes share.
            lines += [
                "mkdir -p source",
                f"tar -xzf {_ARCHIVE} -C source",
                f"cd {shlex.quote(f'source/{self.folder}')}",
            ]
        return "\n".join([*lines, f"exec {join_for_bash(self.command)}", ""])

    def list_files(self) -> Selection | None:
        """Return the files that the job carries; None if it carries none.

        Raises:
            UsageError: A file that the job needs is not among them.
        """
        if self.folder is None:
            return None
        section = self.section
        selection = select_files(Path(section.source_dir), section.include, section.exclude)
        check_selected(selection, Path(self.folder, self.script or ""))
        check_engine_files(selection, self.folder, self.env)
        return selection

    @override
    def preview(self) -> str:
        """Return the task as YAML, secrets masked, with the files that the job carries."""
        selection = self.list_files()
        task = self.build_task(f"FOLDER with {_ARCHIVE}")
        task["envs"] = {key: console.mask_secrets(key, value) for key, value in task["envs"].items()}
        text = yaml.dump(task, Dumper=_TaskDumper, sort_keys=False, allow_unicode=True, width=10**9).rstrip(
            "\n"
        )
        return "\n".join([text, *(describe_selection(selection) if selection else ())])


_KEYS = {"use_spot": "spot", "image_id": "image"}
"""Members of the resources that have a key of another name."""


class _TaskDumper(yaml.SafeDumper):
    """Writes text of several lines as a block, and a number in text in quotes."""

    def represent_str(self, data: str) -> Any:
        is_number = re.fullmatch(r"[-+]?\.?[0-9][\w.:+-]*|[yYnN]", data)
        style = "|" if "\n" in data else "'" if is_number else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


_TaskDumper.add_representer(str, _TaskDumper.represent_str)


@contextmanager
def write_folder(job: SkyJobPlan) -> Iterator[Path]:
    """Yield a temporary folder with the task and the working directory, which `sky launch` uploads.

    The source is an archive: SkyPilot would leave out files that git ignores, and send those that may hold secrets.
    """
    selection = job.list_files()
    for note in selection.notes if selection else ():
        console.note(note)
    with tempfile.TemporaryDirectory(prefix="accel-") as scratch:
        folder, workdir = Path(scratch), Path(scratch, "workdir")
        workdir.mkdir()
        if selection:
            write_archive(selection, workdir / _ARCHIVE)
        text = yaml.dump(job.build_task(str(workdir)), Dumper=_TaskDumper, sort_keys=False, width=10**9)
        (folder / TASK_FILE).touch(mode=0o600)
        (folder / TASK_FILE).write_text(text, encoding="utf-8")
        yield folder
