"""The `launcher:` section of a profile for clusters that SkyPilot starts, and its plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from accel_cli.errors import UsageError
from accel_cli.extensions.skypilot.fields import SkyPilotSection
from accel_cli.extensions.skypilot.task import TASK_FILE, SkyJobPlan
from accel_cli.launchers import job_launcher
from accel_cli.launchers.launcher import LaunchSpec, Plan
from accel_cli.launchers.node_launch import build_command
from accel_cli.planning.plan import name_target

if TYPE_CHECKING:
    from accel_cli.extensions.skypilot.service import ManagedJobs, SkyJobs

__all__ = ["SkyPilot"]

_MAX_NAME = 40


class SkyPilot(SkyPilotSection):
    """A job on a cluster of its own, which SkyPilot starts on the cheapest infrastructure and ends after the job."""

    title: ClassVar[str] = "A job on a cloud, with SkyPilot"
    proven_on: ClassVar[str] = "emulator: an imitation of `sky`; `sky launch --dryrun` is the real command"
    job_keys: ClassVar[tuple[str, ...]] = ("managed",)

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
        target, sent = self.locate(spec, "set launcher.source_dir to a folder above both")
        job = SkyJobPlan(
            section=self,
            name=job_launcher.clean_name(self.job_name or name_target(spec.target), _MAX_NAME),
            command=build_command(self.python, *self.build_options(count), *spec.build_arguments(target)),
            env={**spec.env, **spec.settings.to_env()},
            sent=sent,
        )
        return self.build_plan(
            spec,
            job,
            argv=job.build_submission(f"{job.name}-...", TASK_FILE),
            env=job.env,
            nproc_per_node=count,
            device="GPU" if self.num_gpus else "cpu",
        )

    @override
    def run(self, plan: Plan) -> int:
        from accel_cli.extensions.skypilot.service import submit  # noqa: PLC0415 - not for a dry run

        return submit(plan)

    @classmethod
    @override
    def open_jobs(cls, values: Mapping[str, Any]) -> SkyJobs | ManagedJobs:
        from accel_cli.extensions.skypilot.service import ManagedJobs, SkyJobs  # noqa: PLC0415 - only for jobs

        return ManagedJobs() if values.get("launcher.managed") is True else SkyJobs()
