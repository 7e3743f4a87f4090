"""The `launcher:` section of a profile for jobs of a Kubernetes cluster, and its plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from accel_cli.errors import UsageError
from accel_cli.extensions.kubernetes.cluster import KubernetesCluster, has_kubeconfig
from accel_cli.extensions.kubernetes.fields import KubernetesSection
from accel_cli.extensions.kubernetes.manifests import RESERVED_VARIABLES, KubernetesJobPlan
from accel_cli.extensions.kubernetes.service import KubernetesJobs, check, open_jobs, submit
from accel_cli.launchers import job_launcher
from accel_cli.launchers.launcher import LaunchSpec, Plan
from accel_cli.planning.launch_options import LaunchOption
from accel_cli.planning.plan import name_target

__all__ = ["Kubernetes"]

_MANIFEST = LaunchOption(
    "--manifest", "Print only the manifests, for kubectl create -f -, and run nothing.", only_prints=True
)


class Kubernetes(KubernetesSection):
    """A Job of a Kubernetes cluster, with an elastic agent in each pod."""

    title: ClassVar[str] = "A job on a Kubernetes cluster"
    proven_on: ClassVar[str] = "emulator: an API server that runs the containers as processes"
    packages = ("kubernetes",)
    job_keys: ClassVar[tuple[str, ...]] = ("context", "namespace", "kubeflow", "jobset")
    launch_options = (*KubernetesSection.launch_options, _MANIFEST)

    @classmethod
    @override
    def get_missing_service(cls) -> str:
        return "" if has_kubeconfig() else "no kubeconfig here"

    @property
    @override
    def may_share_files(self) -> bool:
        # A folder of the host may be that of another node for each pod.
        return self.nnodes == 1 or any(
            volume.startswith(("pvc/", "nfs://")) and not volume.endswith(":ro")
            for volume in self.volumes.values()
        )

    @property
    @override
    def sent_folder(self) -> str | None:
        return self.source_dir if self.source == "folder" else None

    @property
    @override
    def has_own_folder(self) -> bool:
        return True

    @override
    def plan(self, spec: LaunchSpec) -> Plan:
        if self.image is None:
            raise UsageError(
                "No image is set. Set launcher.image to one that has torch, accel and what the script needs, for example "
                "--set launcher.image=registry.example.com/accel:cuda"
            )
        self._check_env(spec)
        num_gpus, source = self.gpus
        count = job_launcher.count_processes(spec, self.nproc_per_node, num_gpus, source)
        target, sent = self.locate(spec, "use launcher.source: image if the image has the script")
        job = KubernetesJobPlan(
            section=self,
            name=self.job_name or name_target(spec.target),
            args=("--quiet", "--no-profile", *self.build_options(count), *spec.build_arguments(target)),
            env={**spec.env, **spec.settings.to_env()},
            nproc_per_node=count,
            sent=sent,
        )
        _check_text(job)
        return self.build_plan(
            spec,
            job,
            argv=("accel", "launch", *job.args),
            env=job.env,
            nproc_per_node=count,
            device="GPU" if num_gpus else "cpu",
        )

    @override
    def run(self, plan: Plan) -> int:
        return submit(plan)

    @override
    def preview(self, plan: Plan, options: Mapping[str, Any]) -> str:
        # The manifests alone are for kubectl, which has the cluster check them.
        if "manifest" not in options:
            assert isinstance(plan.job, KubernetesJobPlan)
            check(plan.job)
        return super().preview(plan, options)

    @classmethod
    @override
    def open_jobs(cls, values: Mapping[str, Any]) -> KubernetesJobs:
        cluster = KubernetesCluster(values.get("launcher.context"), values.get("launcher.namespace"))
        kinds = {kind: values.get(f"launcher.{kind}") is True for kind in ("kubeflow", "jobset")}
        return open_jobs(cluster, **kinds)

    def _check_env(self, spec: LaunchSpec) -> None:
        """Raise if a variable of the profile is the launcher's own, or must be in a Secret."""
        for name in (*spec.env, *self.secrets):
            if name in RESERVED_VARIABLES:
                raise UsageError(
                    f"Cannot set {name}: the launcher sets it in every pod. Remove it from the profile."
                )
        if name := job_launcher.find_exposed_secret(spec.env, self.secrets):
            raise UsageError(
                f"env.{name} looks like a secret, and everyone who may read the job would see it. Store the value in a "
                f"Secret of the namespace, and its name and key in the profile: --set 'launcher.secrets={{{name}: NAME/KEY}}'"
            )


def _check_text(job: KubernetesJobPlan) -> None:
    """Raise if an argument or a variable cannot be in a manifest, which is UTF-8."""
    for text in (*job.args, *job.env.values()):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UsageError(
                f"Cannot pass {text!a} to a pod: it is not valid UTF-8. Pass it in a file."
            ) from None
