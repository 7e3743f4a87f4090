"""The fields of the `launcher:` section of a profile for jobs of a Kubernetes cluster."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from accel_cli.launchers import job_launcher, torchrun
from accel_cli.launchers.sections import ItemError, Question, match

__all__ = ["INSTANCE", "MANAGED_BY", "OWNER", "KubernetesSection"]

INSTANCE, MANAGED_BY = "app.kubernetes.io/instance", "app.kubernetes.io/managed-by"
OWNER = "accel-user"
"""The label with the user who submitted a job."""
_WEEK_S = 7 * 86400
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_NAME = rf"{_LABEL}(\.{_LABEL})*"
"""A name of Kubernetes: DNS-1123."""
_RUNTIME = "torch-distributed"
_POD_GRACE_S = 30
"""Seconds that Kubernetes gives pods to end, unless their manifest says otherwise."""
_GPUS = frozenset({"nvidia.com/gpu", "amd.com/gpu"})
"""Resources of which each is a GPU."""
_TPUS = r"(google\.com/tpu|cloud-tpus\.google\.com/.+)"
_OTHER_ACCELERATORS = r"(nvidia\.com/(gpu\..+|mig-.+)|gpu\.intel\.com/.+|habana\.ai/.+|aws\.amazon\.com/neuron.*|huawei\.com/.+)"
"""Resources of which several may be one device, or a part of one."""
_RDMA = r"rdma/.+|vpc\.amazonaws\.com/efa|networking\.gke\.io\.networks/rdma-.+"
"""Resources that are network cards for RDMA, which lock memory."""
_USER_ID = 1000
"""The user and the group of restricted pods, unless the profile sets others."""
_CSI = rf"csi/{_NAME}(\?[\w.-]+=[^\s&]*(&[\w.-]+=[^\s&]*)*)?"
_NFS = r"nfs://[^/\s]+/[^:\s]*"
_MIN_TTL_S = 60
"""Seconds of a finished job in which `accel launch` reads its end."""


def _match_items(key: str, value: str, expected: str) -> AfterValidator:
    """Return a validator of the keys and values of a mapping."""

    def check(mapping: dict[str, Any]) -> dict[str, Any]:
        for name, item in mapping.items():
            if not (re.fullmatch(key, name) and re.fullmatch(value, str(item))):
                raise ItemError(f"expected {expected}", f"{name}: {item}")
        return mapping

    return AfterValidator(check)


def _check_labels(labels: dict[str, str]) -> dict[str, str]:
    if reserved := sorted({INSTANCE, MANAGED_BY, OWNER} & labels.keys()):
        raise ValueError(f"expected labels other than {reserved[0]}, which accel sets")
    return labels


_Name = Annotated[str, match(_NAME, "a name of lower-case letters, digits, hyphens and dots")]
_Text = Annotated[str, match(r"\S+", "text without spaces")]


class KubernetesSection(job_launcher.JobLauncher):
    """The keys of a job of Kubernetes, and the checks of their combinations."""

    kind: Literal["kubernetes"] = Field(
        "kubernetes",
        description="A Job of Kubernetes: `accel launch` submits it with the credentials of your kubeconfig.",
    )
    image: Annotated[
        _Text | None,
        Field(description="Container image with torch, accel and what the script needs; always needed."),
        Question(
            "Which image?",
            suggest=lambda *_: "registry.example.com/team/accel:cuda",
            hint="with torch, accel and the script's packages",
        ),
    ] = None
    nnodes: job_launcher.Nodes = Field(1, description="Number of pods; each is a node of the run.")
    gpus_per_node: job_launcher.GpusPerNode = Field(0, description="GPUs of each pod; 0 requests none.")
    nproc_per_node: job_launcher.ProcessesPerNode = Field(
        "auto",
        description="Number of processes in each pod; `auto` is one for each requested GPU, or 1.",
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
    resources: dict[str, int | str] = Field(
        default_factory=dict,
        description="Other resources of each pod, requested and limited to: `{cpu: 8, memory: 64Gi}`.",
    )
    shared_memory: str | None = Field(
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
    jobset: bool = Field(
        False,
        description="Submit a `JobSet`, which starts all pods again after the loss of any of them, the first included; the cluster "
        "must have JobSet 0.6 or newer.",
    )
    max_retries: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="Number of times that a `JobSet` starts all pods again after one was lost; unset is 3. Scripts continue with "
        "`accelerator.resume()`.",
    )
    volumes: Annotated[
        dict[str, str],
        _match_items(
            r"/[^:]+",
            rf"((pvc|configmap|secret)/{_NAME}|host:/[^:]*|{_NFS}|{_CSI})(:ro)?|emptydir",
            "a mount path with pvc/NAME, configmap/NAME, secret/NAME, nfs://SERVER/PATH, csi/DRIVER?KEY=VALUE, host:/PATH or "
            "emptydir, such as /data: pvc/data:ro",
        ),
    ] = Field(
        default_factory=dict,
        description="Volumes by mount path: `/data: pvc/NAME`, `configmap/NAME`, `secret/NAME`, `nfs://SERVER/PATH`, "
        "`csi/DRIVER?KEY=VALUE&KEY=VALUE` with the attributes of an ephemeral volume, `host:/PATH` or `emptydir`; `:ro` at the "
        "end mounts it read-only.",
    )
    pod_security: Literal["restricted", "none"] | None = Field(
        None,
        description="`restricted` gives the pods the security context that the standard `restricted` of Kubernetes demands; `none` "
        "gives none. Unset is `restricted`, and `none` if the pods request RDMA, and for Kubeflow Trainer 2.1.",
    )
    run_as_user: int | None = Field(
        None,
        ge=0,
        description="User id of the processes; unset is 1000 with `pod_security: restricted`, otherwise that of the image. Their HOME is `/tmp` if the image has no writable one for it.",
    )
    fs_group: int | None = Field(
        None,
        ge=0,
        description="Group that owns the volumes, and in which the processes are; unset is 1000 with `pod_security: restricted`.",
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
    affinity: dict[str, Any] = Field(
        default_factory=dict,
        description="Affinity of the pods, as in their manifest: `{podAntiAffinity: ...}`.",
    )
    scheduler_name: _Name | None = Field(
        None, description="Scheduler that places the pods, such as `volcano`; unset is the cluster's."
    )
    runtime_class: _Name | None = Field(
        None, description="Runtime class of the pods, such as `nvidia`; unset is the cluster's."
    )
    image_pull_secrets: list[_Name] = Field(
        default_factory=list, description="Secrets with the credentials of the image's registry."
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        None,
        description="When nodes pull the image; unset is `Always` for the tag `latest`, else `IfNotPresent`.",
    )
    priority_class: _Name | None = Field(None, description="Priority class of the pods.")
    labels: Annotated[
        dict[str, str],
        AfterValidator(_check_labels),
    ] = Field(
        default_factory=dict,
        description="More labels of the job and its pods: `kueue.x-k8s.io/queue-name: training`.",
    )
    annotations: dict[str, str] = Field(
        default_factory=dict,
        description="Annotations of the job and its pods: `sidecar.istio.io/inject: 'false'`.",
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
    pod: dict[str, Any] = Field(
        default_factory=dict,
        description="Patch of the pods, merged into the metadata and the spec that accel generates: "
        "`{spec: {hostNetwork: true}}`. What accel sets itself is refused.",
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
    suspend: bool = Field(
        False,
        description="Create the job suspended, without pods, until its `spec.suspend` is set to false, as by `kubectl patch` or a queue.",
    )
    managed_by: Annotated[
        str | None, match(r"[a-z0-9.-]+/[\w.-]+", "a controller such as kueue.x-k8s.io/multikueue")
    ] = Field(
        None,
        description="Controller that runs the job in place of the cluster's own: `kueue.x-k8s.io/multikueue` runs it in another cluster.",
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
        600,
        ge=1,
        description="Seconds that a pod waits for the others, which may need new nodes and an image. It holds its GPUs meanwhile; "
        "the job then fails.",
    )
    ranks: torchrun.Ranks = 0
    shutdown_timeout: torchrun.ShutdownTimeout = 30
    progress_line: torchrun.ProgressLine = None
    stall_timeout: torchrun.StallTimeout = None
    stall_action: torchrun.StallActionKey = "report"
    startup_timeout: torchrun.StartupTimeout = None
    preflight: torchrun.Preflight = False
    start_method: torchrun.StartMethod = "auto"
    _check_stalls = model_validator(mode="after")(torchrun.check_stall_keys)

    @property
    def gpus(self) -> tuple[int, str]:
        """The number of GPUs of each pod, and the key that requests them."""
        names = [name for name in self.resources if name in {*_GPUS, self.gpu_resource}]
        return (
            (int(self.resources[names[0]]), "resources") if names else (self.gpus_per_node, "gpus_per_node")
        )

    @property
    def has_rdma(self) -> bool:
        """True if the pods request network cards for RDMA."""
        return any(re.fullmatch(_RDMA, name) for name in self.resources)

    @property
    def is_restricted(self) -> bool:
        """True if the pods have the security context of the standard `restricted`."""
        if self.pod_security is None:
            return not (self.has_rdma or (self.kubeflow and self.trainer_version == "2.1"))
        return self.pod_security == "restricted"

    @property
    def user_and_group(self) -> tuple[int | None, int | None]:
        """The ids of the user of the processes and of the group of the volumes; None is that of the image, and no group."""
        default = _USER_ID if self.is_restricted else None
        user, group = self.run_as_user, self.fs_group
        return default if user is None else user, default if group is None else group

    @model_validator(mode="after")
    def _check_security(self) -> Self:
        if self.is_restricted and self.run_as_user == 0:
            raise ValueError(
                "run_as_user: the standard restricted does not allow root; set pod_security: none, or another user"
            )
        return self

    @model_validator(mode="after")
    def _check_accelerators(self) -> Self:
        for name in (*self.resources, self.gpu_resource):
            if re.fullmatch(_TPUS, name):
                raise ValueError(
                    f"resources: cannot contain {name}, since the pods of a job have no launcher for TPUs; run accel launch "
                    "with launcher.kind: xla in pods of your own"
                )
        names = [name for name in self.resources if name in {*_GPUS, self.gpu_resource}]
        amount = str(self.resources[names[0]]) if names else "0"
        if len(names) > 1 or (names and self.gpus_per_node):
            key = names[1] if len(names) > 1 else "gpus_per_node"
            raise ValueError(
                f"resources: cannot contain {names[0]} beside {key}; request GPUs with one of them"
            )
        if not amount.isdigit():
            raise ValueError(f"resources: expected a whole number for {names[0]}, got {amount}")
        for name in self.resources if self.nproc_per_node == "auto" else ():
            if name not in names and re.fullmatch(_OTHER_ACCELERATORS, name):
                raise ValueError(
                    f"resources: cannot count processes from {name}; set gpu_resource: {name} and gpus_per_node, or "
                    "nproc_per_node"
                )
        return self

    @model_validator(mode="after")
    def _check_jobset(self) -> Self:
        if self.jobset and self.kubeflow:
            raise ValueError(
                "jobset: Kubeflow Trainer makes a JobSet of a TrainJob itself; remove kubeflow or jobset"
            )
        if self.max_retries is not None and not self.jobset:
            raise ValueError(
                "max_retries: only a JobSet starts lost pods again; set jobset: true, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _check_kubeflow(self) -> Self:
        if not self.kubeflow:
            if (self.runtime, self.trainer_version) != (_RUNTIME, "2.2"):
                raise ValueError(
                    "runtime and trainer_version are for TrainJobs: set kubeflow: true, or remove them"
                )
            return self
        if self.ttl != _WEEK_S:
            raise ValueError(
                "ttl: a TrainJob cannot set it, and remains until kubectl delete trainjob deletes it"
            )
        if self.shutdown_timeout > _POD_GRACE_S and self.runtime == _RUNTIME:
            raise ValueError(
                f"shutdown_timeout: the pods of the runtime {_RUNTIME} are killed after {_POD_GRACE_S} seconds; set a runtime "
                "with a longer terminationGracePeriodSeconds"
            )
        return self
