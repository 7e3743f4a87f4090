"""The `launcher:` section of a profile for jobs of a Kubernetes cluster, and its plan."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from typing_extensions import Self, override

from accel_cli.console import is_secret
from accel_cli.errors import UsageError
from accel_cli.kubernetes.manifests import (
    INSTANCE,
    MANAGED_BY,
    OWNER,
    RESERVED_VARIABLES,
    SHARED_VOLUMES,
    KubernetesJobPlan,
    preview,
)
from accel_cli.launchers import job_launcher, torchrun
from accel_cli.launchers.base import LaunchSpec, Plan
from accel_cli.planning.options import LaunchOption
from accel_cli.sections import Question, match
from accel_cli.source_files import locate_target

if TYPE_CHECKING:
    from accel_cli.kubernetes.jobs import KubernetesJobs

__all__ = ["Kubernetes"]

_WEEK_S = 7 * 86400
_MANIFEST = LaunchOption(
    "--manifest", "Print only the manifests, for kubectl create -f -, and run nothing.", only_prints=True
)
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_NAME = rf"{_LABEL}(\.{_LABEL})*"
"""A name of Kubernetes: DNS-1123."""
_QUANTITY = r"\d+(\.\d+)?(m|k|Ki|[MGTPE]i?)?"
_RUNTIME = "torch-distributed"
_POD_GRACE_S = 30
"""Seconds that Kubernetes gives pods to end, unless their manifest says otherwise."""
_MIN_TTL_S = 60
"""Seconds of a finished job in which `accel launch` reads its end."""
_NODE_KEYS = {"rdzv_timeout", "max_restarts", "ranks", "shutdown_timeout", "stall_timeout"}
"""Keys of torchrun that `accel launch` in each pod receives."""


def _match_items(key: str, value: str, expected: str) -> AfterValidator:
    """Return a validator of the keys and values of a mapping."""

    def check(mapping: dict[str, Any]) -> dict[str, Any]:
        for name, item in mapping.items():
            if not (re.fullmatch(key, name) and re.fullmatch(value, str(item))):
                raise ValueError(f"expected {expected}, got {name}: {item}")
        return mapping

    return AfterValidator(check)


def _check_labels(labels: dict[str, str]) -> dict[str, str]:
    if reserved := sorted({INSTANCE, MANAGED_BY, OWNER} & labels.keys()):
        raise ValueError(f"expected labels other than {reserved[0]}, which accel sets")
    return labels


_Name = Annotated[str, match(_NAME, "a name of lower-case letters, digits, hyphens and dots")]
_Text = Annotated[str, match(r"\S+", "text without spaces")]


class Kubernetes(job_launcher.JobLauncher):
    """A Job of a Kubernetes cluster, with an elastic agent in each pod."""

    title: ClassVar[str] = "A job on a Kubernetes cluster"
    packages = ("kubernetes", "pathspec")
    job_keys: ClassVar[tuple[str, ...]] = ("context", "namespace", "kubeflow")
    launch_options = (*job_launcher.JobLauncher.launch_options, _MANIFEST)

    kind: Literal["kubernetes"] = Field(
        "kubernetes",
        description="A Job of Kubernetes: `accel launch` submits it with the credentials of your kubeconfig.",
    )
    image: Annotated[
        _Text | None,
        Field(description="Container image with torch, accel and what the script needs; always needed."),
        Question(
            "Which image?",
            suggest=lambda *_: "accel:cuda",
            hint="with torch, accel and the script's packages",
        ),
    ] = None
    nnodes: job_launcher.Nodes = Field(1, description="Number of pods; each is a node of the run.")
    gpus_per_node: job_launcher.GpusPerNode = Field(0, description="GPUs of each pod; 0 requests none.")
    nproc_per_node: job_launcher.ProcessesPerNode = Field(
        "auto",
        description="Number of processes in each pod; `auto` is one for each of `gpus_per_node`, or 1.",
    )
    context: Annotated[
        _Text | None, Question("Which context of the kubeconfig?", hint="Enter for the current one")
    ] = Field(None, description="Context of the kubeconfig; unset is the current one.")
    namespace: Annotated[_Name | None, Question("Which namespace?", hint="Enter for that of the context")] = (
        Field(None, description="Namespace of the job; unset is that of the context.")
    )
    gpu_resource: Annotated[
        str, match(rf"{_NAME}/[\w.-]+", "a resource such as nvidia.com/gpu or amd.com/gpu")
    ] = Field("nvidia.com/gpu", description="Name of the GPUs in the cluster, such as `amd.com/gpu`.")
    resources: Annotated[
        dict[str, int | str],
        _match_items(r"[\w./-]+", _QUANTITY, "resources such as cpu: 8 and memory: 64Gi"),
    ] = Field(
        default_factory=dict,
        description="Other resources of each pod, requested and limited to: `{cpu: 8, memory: 64Gi}`.",
    )
    shared_memory: Annotated[str | None, match(_QUANTITY, "a size such as 16Gi")] = Field(
        None,
        description="Maximum size of `/dev/shm`, which counts as memory of the pod; unset is the limit of its memory.",
    )
    kubeflow: bool = Field(
        False,
        description="Submit a `TrainJob` of Kubeflow Trainer 2.1 or newer instead of a Job and a Service.",
    )
    runtime: Annotated[
        str,
        match(rf"(TrainingRuntime/)?{_NAME}", "a name such as torch-distributed, or TrainingRuntime/NAME"),
    ] = Field(
        _RUNTIME,
        description="ClusterTrainingRuntime of a `TrainJob`, or `TrainingRuntime/NAME` for one of the namespace.",
    )
    trainer_version: Annotated[
        Literal["2.1", "2.2"],
        BeforeValidator(str),
    ] = Field(
        "2.2",
        json_schema_extra={"enum": ["2.1", "2.2", 2.1, 2.2], "type": ["string", "number"]},
        description="Kubeflow Trainer in the cluster; `2.2` is also for newer versions. 2.1 names fields of a `TrainJob` differently.",
    )
    volumes: Annotated[
        dict[str, str],
        _match_items(
            r"/[^:]+",
            rf"((pvc|configmap|secret)/{_NAME}|host:/[^:]*)(:ro)?|emptydir",
            "a mount path with pvc/NAME, configmap/NAME, secret/NAME, host:/PATH or emptydir, such as /data: pvc/data:ro",
        ),
    ] = Field(
        default_factory=dict,
        description="Volumes by mount path: `/data: pvc/NAME`, `configmap/NAME`, `secret/NAME`, `host:/PATH` or "
        "`emptydir`; `:ro` at the end mounts it read-only.",
    )
    service_account: _Name | None = Field(
        None,
        description="Service account of the pods; unset gives them no credentials of the cluster, or those of the `TrainJob`'s runtime.",
    )
    node_selector: dict[str, str] = Field(
        default_factory=dict, description="Labels of the cluster's nodes on which the pods may run."
    )
    tolerations: Annotated[
        list[str],
        match(
            r"[\w./-]+(=[\w.-]*)?(:(NoSchedule|PreferNoSchedule|NoExecute))?",
            "KEY, KEY:EFFECT or KEY=VALUE:EFFECT such as nvidia.com/gpu:NoSchedule",
        ),
    ] = Field(
        default_factory=list,
        description="Taints of nodes that the pods tolerate: `nvidia.com/gpu:NoSchedule` or `pool=training:NoExecute`.",
    )
    image_pull_secrets: list[_Name] = Field(
        default_factory=list, description="Secrets with the credentials of the image's registry."
    )
    priority_class: _Name | None = Field(None, description="Priority class of the pods.")
    labels: Annotated[
        dict[str, str],
        _match_items(r"[\w./-]{1,317}", r"([A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?)?", "labels of Kubernetes"),
        AfterValidator(_check_labels),
    ] = Field(
        default_factory=dict,
        description="More labels of the job and its pods: `kueue.x-k8s.io/queue-name: training`.",
    )
    secrets: Annotated[
        dict[str, str],
        _match_items(
            r"[A-Za-z_]\w*", rf"{_NAME}/[\w.-]+", "variables with NAME/KEY of a Secret of the namespace"
        ),
    ] = Field(
        default_factory=dict,
        description="Environment variables whose values are in Secrets of the namespace: `WANDB_API_KEY: NAME/KEY`.",
    )
    source: Literal["folder", "image"] = Field(
        "folder",
        description="`folder` sends the files of `source_dir` with the job, at most 1 MiB compressed; `image` sends none, "
        "since the image or a volume has them.",
    )
    source_dir: job_launcher.SourceDir = "."
    include: job_launcher.Include = Field(default_factory=list)
    exclude: job_launcher.Exclude = Field(default_factory=list)
    working_dir: Annotated[job_launcher.WorkingDir, match(r"/.*", "an absolute path")] = Field(
        None,
        description="Working directory of the script with `source: image`; unset is that of the image.",
    )
    job_name: Annotated[str | None, Field(min_length=1)] = Field(
        None, description="Start of the job's name, before random characters; unset is the script's name."
    )
    time: int | None = Field(
        None, ge=1, description="Seconds after which the job is stopped; unset is no limit."
    )
    ttl: int = Field(
        _WEEK_S,
        ge=_MIN_TTL_S,
        description="Seconds after which Kubernetes deletes the finished job, with its pods and their logs. A `TrainJob` remains.",
    )
    max_restarts: torchrun.MaxRestarts = Field(
        0,
        description="Maximum number of restarts of all processes after a failure, inside the pods. Kubernetes then also "
        "replaces a pod, other than the first, whose node was drained or lost.",
    )
    rdzv_timeout: int = Field(
        1800,
        ge=1,
        description="Seconds that a pod waits for the others, which may need new nodes and an image.",
    )
    ranks: torchrun.Ranks = 0
    shutdown_timeout: torchrun.ShutdownTimeout = 30
    stall_timeout: torchrun.StallTimeout = None

    @model_validator(mode="after")
    def _check_kubeflow(self) -> Self:
        if not self.kubeflow:
            if (self.runtime, self.trainer_version) != (_RUNTIME, "2.2"):
                raise ValueError(
                    "runtime and trainer_version are for TrainJobs: set kubeflow: true, or remove them"
                )
            return self
        if self.priority_class:
            raise ValueError("priority_class: a TrainJob cannot set it; set it in the runtime")
        if self.ttl != _WEEK_S:
            raise ValueError(
                "ttl: a TrainJob cannot set it, and remains until kubectl delete trainjob deletes it"
            )
        if self.time and self.trainer_version == "2.1":
            raise ValueError(
                "time: a TrainJob can set it since Kubeflow Trainer 2.2; remove it, or set it in the runtime"
            )
        if self.shutdown_timeout > _POD_GRACE_S and self.runtime == _RUNTIME:
            raise ValueError(
                f"shutdown_timeout: the pods of the runtime {_RUNTIME} are killed after {_POD_GRACE_S} seconds; set a runtime "
                "with a longer terminationGracePeriodSeconds"
            )
        return self

    @override
    def plan(self, spec: LaunchSpec) -> Plan:
        if self.image is None:
            raise UsageError(
                "No image is set. Set launcher.image to one that has torch, accel and what the script needs, for example "
                "--set launcher.image=registry.example.com/accel:cuda"
            )
        self._check_env(spec)
        count = job_launcher.count_processes(spec, self.nproc_per_node, self.gpus_per_node)
        options = job_launcher.build_node_options(
            {"nproc_per_node": count, **self.model_dump(include=_NODE_KEYS)}
        )
        sends_files = self.source == "folder" and not spec.is_builtin
        target: str = spec.target
        cwd: str | None = None
        if sends_files:
            cure = "use launcher.source: image if the image has the script"
            target, cwd = locate_target(spec.target, spec.kind, self.source_dir, cure)
        needed = cwd or "."
        if cwd is not None and spec.kind == "script":
            needed = os.path.normpath(Path(cwd, target))
        has_shared_files = self.nnodes == 1 or any(
            volume.startswith(SHARED_VOLUMES) for volume in self.volumes.values()
        )
        # Without a common volume the first node writes all of a checkpoint.
        settings = replace(spec.settings, shared_files=spec.settings.shared_files and has_shared_files)
        job = KubernetesJobPlan(
            section=self,
            name=self.job_name or Path(spec.target).stem,
            args=("--quiet", "--no-profile", *options, *spec.build_arguments(target)),
            env={**spec.env, **settings.to_env()},
            nproc_per_node=count,
            cwd=cwd,
            needed=needed,
            detach="detach" in spec.option_values,
            jobs_options=spec.jobs_options,
        )
        _check_text(job)
        gpus = "GPU" if self.gpus_per_node else "cpu"
        return Plan(
            launcher=self.kind,
            argv=("accel", "launch", *job.args),
            env=job.env,
            device=gpus if spec.settings.device == "auto" else spec.settings.device,
            target=spec.target,
            nnodes=self.nnodes,
            nproc_per_node=count,
            job=job,
        )

    @override
    def run(self, plan: Plan) -> int:
        from accel_cli.kubernetes.jobs import submit  # noqa: PLC0415 - not for a dry run

        return submit(plan)

    @override
    def preview(self, plan: Plan, options: Mapping[str, Any]) -> str:
        assert isinstance(plan.job, KubernetesJobPlan)
        return preview(plan.job)

    @classmethod
    @override
    def open_jobs(cls, values: Mapping[str, Any]) -> KubernetesJobs:
        from accel_cli.kubernetes.cluster import KubernetesCluster  # noqa: PLC0415 - imports the client
        from accel_cli.kubernetes.jobs import open_jobs  # noqa: PLC0415 - imports the client

        cluster = KubernetesCluster(values.get("launcher.context"), values.get("launcher.namespace"))
        return open_jobs(cluster, kubeflow=values.get("launcher.kubeflow") is True)

    def _check_env(self, spec: LaunchSpec) -> None:
        """Raise if a variable of the profile is the launcher's own, or must be in a Secret."""
        for name in (*spec.env, *self.secrets):
            if name in RESERVED_VARIABLES:
                raise UsageError(
                    f"Cannot set {name}: the launcher sets it in every pod. Remove it from the profile."
                )
        for name in spec.env:
            if name in self.secrets:
                raise UsageError(f"{name} is in both env and launcher.secrets. Remove one of them.")
            if is_secret(name):
                raise UsageError(
                    f"env.{name} looks like a secret, and everyone who may read the job would see it. Store the value in a "
                    f"Secret of the namespace, and its name and key in the profile: --set 'launcher.secrets={{{name}: NAME/KEY}}'"
                )


def _check_text(job: KubernetesJobPlan) -> None:
    """Raise if an argument or a variable cannot be in a manifest, which is UTF-8."""
    for text in (*job.args, *job.env.values()):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"Cannot pass {text!a} to a pod: it is not valid UTF-8. Pass it in a file."
            ) from None
