"""The `launcher:` section of a profile for clusters that SkyPilot starts, and its plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from accel_cli.errors import UsageError
from accel_cli.extensions.skypilot.fields import SkyPilotSection
from accel_cli.extensions.skypilot.task import TASK_FILE, SkyJobPlan
from accel_cli.launchers import job_launcher, torchrun
from accel_cli.launchers.launcher import LaunchSpec, Plan
from accel_cli.launchers.node_launch import build_command, build_node_options
from accel_cli.launchers.source_files import locate_target
from accel_cli.planning.plan import name_target

if TYPE_CHECKING:
    from accel_cli.extensions.skypilot.service import SkyJobs

__all__ = ["SkyPilot"]

_NODE_KEYS = {"max_restarts", "ranks", "shutdown_timeout", "rdzv_timeout", *torchrun.PASSED_KEYS}
"""Keys of torchrun that `accel launch` on each node receives."""
_MAX_NAME = 40


class SkyPilot(SkyPilotSection):
    """A job on a cluster of its own, which SkyPilot starts on the cheapest infrastructure and ends after the job."""

    title: ClassVar[str] = "A job on a cloud, with SkyPilot"

    @property
    @override
    def may_share_files(self) -> bool:
        return self.nnodes == 1

    @property
    @override
    def sent_folder(self) -> str | None:
        return self.source_dir

    @property
    @override
    def has_own_folder(self) -> bool:
        return True

    @override
    def plan(self, spec: LaunchSpec) -> Plan:
        if name := job_launcher.find_exposed_secret(spec.env, self.secrets):
            raise UsageError(
                f"env.{name} looks like a secret, and SkyPilot shows the variables of a task. Set it in this shell, and name it in the "
                f"profile: --set 'launcher.secrets=[{name}]'"
            )
        count = job_launcher.count_processes(spec, self.nproc_per_node, self.num_gpus, "accelerators")
        options = build_node_options({"nproc_per_node": count, **self.model_dump(include=_NODE_KEYS)})
        target: str = spec.target
        folder: str | None = None
        if not spec.is_builtin:
            cure = "set launcher.source_dir to a folder above both"
            target, folder = locate_target(spec.target, spec.kind, self.source_dir, cure)
        job = SkyJobPlan(
            section=self,
            name=_clean_name(self.job_name or name_target(spec.target)),
            command=build_command(self.python, *options, *spec.build_arguments(target)),
            env={**spec.env, **spec.settings.to_env()},
            folder=folder,
            script=target if spec.kind == "script" and folder is not None else None,
            detach="detach" in spec.option_values,
            jobs_options=spec.jobs_options,
        )
        gpus = "GPU" if self.num_gpus else "cpu"
        return Plan(
            launcher=self.kind,
            argv=("sky", "launch", *job.options, "--cluster", f"{job.name}-...", TASK_FILE),
            env=job.env,
            device=gpus if spec.settings.device == "auto" else spec.settings.device,
            target=spec.target,
            nnodes=self.nnodes,
            nproc_per_node=count,
            job=job,
        )

    @override
    def run(self, plan: Plan) -> int:
        from accel_cli.extensions.skypilot.service import submit  # noqa: PLC0415 - not for a dry run

        return submit(plan)

    @classmethod
    @override
    def open_jobs(cls, values: Mapping[str, Any]) -> SkyJobs:
        from accel_cli.extensions.skypilot.service import SkyJobs  # noqa: PLC0415 - only for jobs

        return SkyJobs()


def _clean_name(text: str) -> str:
    """Return text that can be the start of a cluster's name."""
    stem = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_MAX_NAME].strip("-")
    return stem if stem[:1].isalpha() else f"job-{stem}".rstrip("-")
