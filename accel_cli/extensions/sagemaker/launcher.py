"""The `launcher:` section of a profile for training jobs of Amazon SageMaker, and its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from accel_cli.errors import AccelError, UsageError
from accel_cli.extensions.sagemaker import images
from accel_cli.extensions.sagemaker.aws import Account
from accel_cli.extensions.sagemaker.fields import SageMakerSection
from accel_cli.extensions.sagemaker.request import SageMakerJobPlan, build_job_spec
from accel_cli.launchers.launcher import LaunchSpec, Plan

if TYPE_CHECKING:
    from accel_cli.extensions.sagemaker.service import SageMakerJobs
    from accel_cli.planning.machine import Machine

__all__ = ["SageMaker"]


class SageMaker(SageMakerSection):
    """A training job of Amazon SageMaker, with the elastic agent in the container of every instance."""

    title: ClassVar[str] = "A training job on Amazon SageMaker"
    proven_on: ClassVar[str] = (
        "emulator: moto, and botocore's model of the service; the jobs run as processes"
    )

    @classmethod
    @override
    def describe_environment(
        cls, machine: Machine, environ: Mapping[str, str]
    ) -> Mapping[str, Mapping[str, str] | str]:
        """Return the AWS profile and region that the AWS tools would use; never a key."""
        try:
            session = Account().session
        except AccelError as error:
            return {"aws": f"not available: {error}"}
        return {"aws": {"profile": session.profile_name, "region": session.region_name or "none"}}

    @override
    def get_world_sizes(self, spec: LaunchSpec, plan: Plan) -> Sequence[int]:
        each = images.count_gpus(self.instance_type) if plan.process_description else plan.nproc_per_node
        return (self.instance_count * each,) if each else ()

    @property
    @override
    def may_share_files(self) -> bool:
        # Every host has a checkpoint folder of its own, and S3 merges them.
        return self.instance_count == 1

    @property
    @override
    def sent_folder(self) -> str | None:
        return self.source_dir

    @override
    def plan(self, spec: LaunchSpec) -> Plan:
        if spec.settings.device not in {"auto", "cpu", "cuda"}:
            raise UsageError(
                f"device: {spec.settings.device} is not available on SageMaker. Use auto, cuda or cpu."
            )
        run = build_job_spec(self, spec)
        may_use_gpus = spec.settings.device != "cpu" and (
            self.allow_unknown_instance or images.has_gpu(self.instance_type)
        )
        return Plan(
            launcher=self.kind,
            argv=(spec.target, *spec.args),
            env=run["env"],
            device=self.instance_type,
            target=spec.target,
            nnodes=self.instance_count,
            nproc_per_node=1 if self.nproc_per_node == "auto" else self.nproc_per_node,
            process_description="a process for each GPU"
            if self.nproc_per_node == "auto" and may_use_gpus
            else "",
            job=SageMakerJobPlan(
                section=self,
                run=run,
                # Targets of accel itself are in its own archive.
                source=None if spec.is_builtin else self.source_dir,
                output_dir=self.output_dir,
                detach="detach" in spec.option_values,
                jobs_options=spec.jobs_options,
            ),
        )

    @override
    def run(self, plan: Plan) -> int:
        from accel_cli.extensions.sagemaker import service  # noqa: PLC0415 - loads what a job is sent with

        return service.submit(plan)

    @classmethod
    @override
    def open_jobs(cls, values: Mapping[str, Any]) -> SageMakerJobs:
        from accel_cli.extensions.sagemaker.service import SageMakerJobs  # noqa: PLC0415 - only accel jobs needs it

        return SageMakerJobs(Account(values.get("launcher.region"), values.get("launcher.aws_profile")))

    @override
    def preview(self, plan: Plan, options: Mapping[str, Any]) -> str:
        from accel_cli.extensions.sagemaker import service  # noqa: PLC0415 - loads what a job is sent with

        return service.preview(plan, offline="offline" in options)
