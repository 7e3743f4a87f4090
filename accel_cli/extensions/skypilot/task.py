"""The task of SkyPilot that runs a job: its YAML, and the files that the job carries."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from accel_cli import console
from accel_cli.extensions.skypilot.fields import SkyPilotSection
from accel_cli.launchers.job_launcher import SentFolder
from accel_cli.launchers.manifest import PatchRules, format_manifests, merge_patch
from accel_cli.launchers.source_files import describe_selection
from accel_cli.planning.plan import JobPlan, join_for_bash
from accel_runtime.environment.settings import __version__

__all__ = ["LABEL", "TASK_FILE", "SkyJobPlan", "write_folder"]

TASK_FILE, _ARCHIVE = "accel-task.yaml", "accel-source.tar.gz"
"""The files that `sky launch` takes: the task, and the source in the working directory."""
LABEL = "accel-version"
"""The label of the clusters that accel starts."""


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
    sent: SentFolder | None
    """The folder whose files it carries; None if it carries none."""

    def build_submission(self, name: str, file: str) -> tuple[str, ...]:
        """Return the command that submits the task of a file, as a job or to a cluster with a name."""
        # The name of a secret alone: sky takes the value from its environment.
        secrets = [word for each in self.section.secrets for word in ("--secret", each)]
        if self.section.managed:
            return ("sky", "jobs", "launch", "--yes", "--detach-run", *secrets, "--name", name, file)
        end = ("--down", "--idle-minutes-to-autostop", str(self.section.down_after))
        return ("sky", "launch", "--yes", "--detach-run", *end, *secrets, "--cluster", name, file)

    def build_task(self, workdir: str) -> dict[str, Any]:
        """Return the task.

        Args:
            workdir: The folder that is sent.

        Raises:
            UsageError: The patch of the profile sets what accel sets.
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
            **({"workdir": workdir} if self.sent else {}),
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
        merged: dict[str, Any] = merge_patch(
            task, section.task, PatchRules("launcher.task", reserved=reserved)
        )
        return merged

    def _build_script(self) -> str:
        """Return the commands of every node; `accel launch` finds the others in SkyPilot's variables."""
        lines = ["set -e"]
        if self.sent:
            # Of this node: the working directory may be on a disk that the nodes of Kubernetes share.
            lines += [
                "mkdir -p source",
                f"tar -xzf {_ARCHIVE} -C source",
                f"cd {shlex.quote(f'source/{self.sent.cwd}')}",
            ]
        return "\n".join([*lines, f"exec {join_for_bash(self.command)}", ""])

    @override
    def preview(self) -> str:
        """Return the task as YAML, secrets masked, with the files that the job carries."""
        task = self.build_task(f"FOLDER with {_ARCHIVE}")
        task["envs"] = {key: console.mask_secrets(key, value) for key, value in task["envs"].items()}
        files = describe_selection(self.sent.select(self.env)) if self.sent else ()
        return "\n".join([format_manifests([task]), *files])


_KEYS = {"use_spot": "spot", "image_id": "image"}
"""Members of the resources that have a key of another name."""


@contextmanager
def write_folder(job: SkyJobPlan) -> Iterator[Path]:
    """Yield a temporary folder with the task and the working directory, which `sky launch` uploads.

    The source is an archive: SkyPilot would leave out files that git ignores, and send those that may hold secrets.
    """
    with tempfile.TemporaryDirectory(prefix="accel-") as scratch:
        folder, workdir = Path(scratch), Path(scratch, "workdir")
        workdir.mkdir()
        if job.sent:
            job.sent.write(job.env, workdir / _ARCHIVE)
        text = format_manifests([job.build_task(str(workdir))])
        (folder / TASK_FILE).touch(mode=0o600)
        (folder / TASK_FILE).write_text(text, encoding="utf-8")
        yield folder
