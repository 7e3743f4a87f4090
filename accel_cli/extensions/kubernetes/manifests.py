"""The manifests of a job (Job and Service, JobSet or TrainJob, and a ConfigMap with the source), and the patch `launcher.pod`."""

from __future__ import annotations

import base64
import re
import secrets
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from accel_cli import console
from accel_cli.console import is_secret
from accel_cli.errors import UsageError
from accel_cli.extensions.kubernetes.fields import INSTANCE, MANAGED_BY, OWNER, KubernetesSection
from accel_cli.launchers.job_launcher import SentFolder, clean_name
from accel_cli.launchers.job_service import get_user
from accel_cli.launchers.manifest import PatchRules, format_manifests, merge_patch
from accel_cli.launchers.source_files import Selection, describe_selection
from accel_cli.planning.nodes import PORT
from accel_cli.planning.plan import JobPlan
from accel_runtime.environment.settings import FAILURE_FILE, find_nearest

__all__ = [
    "CONTAINER",
    "JOB_SET_API",
    "NODE_CONTAINER",
    "RESERVED_VARIABLES",
    "SOURCE_VOLUME",
    "TRAINER_API",
    "KubernetesJobPlan",
    "build_container_security",
    "build_pod_security",
    "format_user",
    "name_job",
    "parse_volume",
    "patch_pod",
    "read_source",
    "render",
]

CONTAINER = "accel"
"""The name of the container of every pod."""
NODE_CONTAINER = "node"
"""The name of the container, and of the replicated job, of the runtimes of Kubeflow Trainer."""
TRAINER_API = ("trainer.kubeflow.org", "v1alpha1", "trainjobs")
"""The group, version and plural name of TrainJobs."""
JOB_SET_API = ("jobset.x-k8s.io", "v1alpha2", "jobsets")
"""The same of JobSets."""
_REPLICATED_JOB = "node"
"""The name of the one replicated job of a JobSet."""
_ATTEMPT = "JOBSET_RESTART_ATTEMPT"
"""The variable with the number of times that a JobSet has started all pods again."""
_MAX_RETRIES = 3
_FAILURE = "/dev/termination-log"
_SOURCE, _ARCHIVE, _WORKSPACE = "/etc/accel/source", "source.tar.gz", "/workspace"
RESERVED_VARIABLES = frozenset(
    {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT", FAILURE_FILE}
)
"""The variables that the launcher or Kubeflow Trainer sets."""
_MAX_LABEL = 63
"""Characters of a host name, and of the value of a label."""
_MAX_NAME = 57
"""Characters of a job's name: the host name of a pod adds a hyphen and its index."""
_NUM_RANDOM = 5
_MANAGER = "accel/launcher"
"""The owner of the changes to a runtime of Kubeflow Trainer."""
_MAX_SOURCE = (1 << 20) - 1024
"""Bytes that a ConfigMap can hold, less its keys."""
_GRACE_S = 10
"""Seconds after the shutdown timeout until Kubernetes kills what still runs."""
_REFERENCE = re.compile(r"\$(?=[($])")
"""The start of a reference `$(NAME)`, which Kubernetes replaces in arguments and variables, or of its escape."""
SOURCE_VOLUME = "source"
"""The name of the volume with the files of the working folder."""
_ITEM_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    # A volume may be mounted at several paths.
    "volumeMounts": "mountPath",
}
_METADATA = ("labels", "annotations")
"""The metadata of a pod that a template can set."""
_TRAIN_JOB_POD = frozenset({
    "affinity", "containers", "imagePullSecrets", "initContainers", "nodeSelector", "schedulingGates", "securityContext",
    "serviceAccountName", "terminationGracePeriodSeconds", "tolerations", "volumes",
})  # fmt: skip
"""Fields of a pod that a TrainJob of Kubeflow Trainer 2.3 can change; older versions have fewer, as the cluster reports."""
_TRAIN_JOB_CONTAINER = frozenset({"name", "securityContext", "volumeMounts"})
"""The same of the container that runs accel."""
_QUANTITIES = frozenset({"limits", "requests", "sizeLimit", "overhead", "divisor"})
"""Fields whose amounts may be numbers, although the models of the client have text."""
_SCALARS: Mapping[str, tuple[Any, str]] = {"str": (str, "text in quotes"), "int": (int, "a whole number"), "bool": (bool, "true or false"), "float": ((int, float), "a number")}  # fmt: skip
_COLLECTION = re.compile(r"(list|dict)[\[(](?:str, )?(\w+)[\])]", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class KubernetesJobPlan(JobPlan):
    """A job of Kubernetes."""

    section: KubernetesSection
    """The launcher's section of the profile."""
    name: str
    """The start of its name."""
    args: tuple[str, ...]
    """The arguments of `accel launch` in every pod."""
    env: Mapping[str, str]
    """The variables of every pod."""
    nproc_per_node: int
    """The number of processes in every pod."""
    sent: SentFolder | None
    """The folder whose files it carries; None if it carries none."""

    @override
    def preview(self) -> str:
        """Return the manifests as YAML, with the files of the archive in comments at the end."""
        archive, selection = read_source(self)
        text = format_manifests(render(self, name_job(self), format_user(), archive))
        return "\n".join(
            [text, *(f"# {line}" for line in (describe_selection(selection) if selection else ()))]
        )


def name_job(job: KubernetesJobPlan) -> str:
    """Return a new name of a job, which ends with random characters."""
    random = "".join(secrets.choice("bcdfghjklmnpqrstvwxz2456789") for _ in range(_NUM_RANDOM))
    longest = _MAX_NAME
    if job.section.kubeflow or job.section.jobset:
        # JobSet checks the names of pods: `NAME-node-0-INDEX-abcde`.
        longest = _MAX_LABEL - len(f"-{NODE_CONTAINER}-0-{job.section.nnodes - 1}-abcde")
    return f"{clean_name(job.name, longest - 1 - _NUM_RANDOM)}-{random}"


def format_user() -> str:
    """Return the name of the user, as the value of a label."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", get_user())[:_MAX_LABEL].strip("-_.") or "unknown"


def read_source(job: KubernetesJobPlan) -> tuple[bytes | None, Selection | None]:
    """Return the archive of the folder that is sent, and its files; None if none is.

    Raises:
        UsageError: A file that the job needs is not among them, or the archive does not fit a ConfigMap.
    """
    if job.sent is None:
        return None, None
    with tempfile.TemporaryDirectory(prefix="accel-") as scratch:
        archive = Path(scratch, _ARCHIVE)
        selection = job.sent.write(job.env, archive)
        data = archive.read_bytes()
    if len(data) > _MAX_SOURCE:
        largest = ", ".join(
            f"{file.name} ({console.format_size(file.size)})" for file in selection.largest if file.size
        )
        raise UsageError(
            f"The {len(selection.files)} files in {selection.source} have {console.format_size(len(data))} compressed: a job "
            f"carries at most 1 MiB. The largest are {largest}. Add files to launcher.exclude or .gitignore, or put them into "
            "the image or on a volume and set launcher.source: image."
        )
    return data, selection


def render(job: KubernetesJobPlan, name: str, user: str, archive: bytes | None) -> list[dict[str, Any]]:
    """Return the manifests of a job, as kubectl takes them.

    Args:
        job: The job.
        name: Its name.
        user: The user who submits it.
        archive: The archive of the source; None if none is sent.
    """
    section = job.section
    labels = {**section.labels, MANAGED_BY: "accel", INSTANCE: name, OWNER: user}
    metadata: dict[str, Any] = {"name": name, "labels": labels}
    if section.annotations:
        metadata["annotations"] = section.annotations
    if section.namespace:
        metadata["namespace"] = section.namespace
    manifests = []
    if section.nnodes > 1 and not (section.kubeflow or section.jobset):
        manifests.append(_build_service(metadata))
    if archive is not None:
        data = {_ARCHIVE: base64.b64encode(archive).decode("ascii")}
        manifests.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "binaryData": data})
    build = _build_train_job if section.kubeflow else _build_job_set if section.jobset else _build_job
    return [*manifests, build(job, metadata, has_source=archive is not None)]


def _build_service(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Service that gives every pod a host name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",
            # The pods find each other before they are ready.
            "publishNotReadyAddresses": True,
            "selector": {INSTANCE: metadata["name"]},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }


def _build_job(job: KubernetesJobPlan, metadata: Mapping[str, Any], *, has_source: bool) -> dict[str, Any]:
    action = "Ignore" if job.section.max_restarts else ""
    spec = _build_job_spec(job, metadata, action, has_source=has_source)
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _build_job_set(
    job: KubernetesJobPlan, metadata: Mapping[str, Any], *, has_source: bool
) -> dict[str, Any]:
    """Return a JobSet of one Job, whose failure by a lost pod starts all pods again."""
    section = job.section
    # The Job of a lost pod fails by PodFailurePolicy, and that of a failed script by another reason.
    spec = _build_job_spec(job, metadata, "FailJob", has_source=has_source)
    reasons = ["BackoffLimitExceeded", "DeadlineExceeded"]
    job_set = {
        "failurePolicy": {
            "maxRestarts": _MAX_RETRIES if section.max_retries is None else section.max_retries,
            "rules": [{"name": "failed", "action": "FailJobSet", "onJobFailureReasons": reasons}],
        },
        "ttlSecondsAfterFinished": section.ttl,
        "replicatedJobs": [{"name": _REPLICATED_JOB, "replicas": 1, "template": {"spec": spec}}],
    }
    return {"apiVersion": "/".join(JOB_SET_API[:2]), "kind": "JobSet", "metadata": metadata, "spec": job_set}


def _build_job_spec(
    job: KubernetesJobPlan, metadata: Mapping[str, Any], action: str, *, has_source: bool
) -> dict[str, Any]:
    """Return the spec of a Job; `action` is that for pods that were drained, preempted or lost with their node."""
    section = job.section
    spec: dict[str, Any] = {
        "completions": section.nnodes,
        "parallelism": section.nnodes,
        "completionMode": "Indexed",
        # Restarts are those of the agents in the pods: a pod that fails ends the job.
        "backoffLimit": 0,
    }
    if action:
        disrupted = {"type": "DisruptionTarget", "status": "True"}
        spec["podFailurePolicy"] = {"rules": [{"action": action, "onPodConditions": [disrupted]}]}
    if section.time:
        spec["activeDeadlineSeconds"] = section.time
    if not section.jobset:
        spec["ttlSecondsAfterFinished"] = section.ttl
    return spec | {
        "template": _patch_pod(
            job,
            {
                "metadata": _get_pod_metadata(metadata),
                "spec": _build_pod(job, metadata["name"], has_source=has_source),
            },
        ),
    }


def _build_pod(job: KubernetesJobPlan, name: str, *, has_source: bool) -> dict[str, Any]:
    section = job.section
    volumes = list(_list_volumes(section, name if has_source else ""))
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": section.shutdown_timeout + _GRACE_S,
    }
    # JobSet makes the Service, and the name of each pod in it.
    first = f"{name}-{_REPLICATED_JOB}-0-0" if section.jobset else f"{name}-0"
    if section.nnodes > 1 and not section.jobset:
        pod["subdomain"] = name
    if not section.service_account:
        pod["automountServiceAccountToken"] = False
    # Without variables for each Service of the namespace, of which there may be thousands.
    pod["enableServiceLinks"] = False
    pod |= build_pod_security(section)
    pod |= _build_scheduling(section)
    names = {
        "priorityClassName": section.priority_class,
        "schedulerName": section.scheduler_name,
        "runtimeClassName": section.runtime_class,
    }
    pod |= {key: value for key, value in names.items() if value}
    variables, script = {}, []
    if section.nnodes > 1:
        # Not as options: with these variables an agent waits until the name of the first pod resolves.
        variables = {"PET_NNODES": str(section.nnodes), "PET_MASTER_ADDR": f"{first}.{name}"}
        variables["PET_MASTER_PORT"] = str(PORT)
        script = ['export PET_NODE_RANK="$JOB_COMPLETION_INDEX"']
    if section.jobset:
        script.append(f'[ "${_ATTEMPT}" = 0 ] || set -- --resume "$@"')
    container = {
        "name": CONTAINER,
        "image": section.image,
        **({"imagePullPolicy": section.image_pull_policy} if section.image_pull_policy else {}),
        **build_container_security(section),
        **_build_command(job, script, has_source=has_source),
        "env": _list_variables(job, variables),
    }
    if resources := _build_resources(section):
        container["resources"] = resources
    container |= {"terminationMessagePath": _FAILURE, "volumeMounts": [mount for _, mount in volumes]}
    return {**pod, "containers": [container], "volumes": [volume for volume, _ in volumes]}


def _get_pod_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a job that its pods have too."""
    return {key: metadata[key] for key in ("labels", "annotations") if key in metadata}


def _patch_pod(job: KubernetesJobPlan, template: dict[str, Any]) -> dict[str, Any]:
    (container,) = template["spec"]["containers"]
    variables = [item["name"] for item in container.get("env", ())]
    return patch_pod(job.section, template, container["name"], [*variables, *RESERVED_VARIABLES])


def _build_train_job(
    job: KubernetesJobPlan, metadata: Mapping[str, Any], *, has_source: bool
) -> dict[str, Any]:
    """Return a TrainJob of Kubeflow Trainer: what its fields cannot hold changes the pods of its runtime."""
    section = job.section
    volumes = list(_list_volumes(section, metadata["name"] if has_source else ""))
    trainer = {
        "image": section.image,
        **_build_command(job, [], has_source=has_source),
        # Trainer adds PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT, which `accel launch` reads.
        "env": _list_variables(job, {}),
        "numNodes": section.nnodes,
        "numProcPerNode": job.nproc_per_node,
    }
    if resources := _build_resources(section):
        trainer["resourcesPerNode"] = resources
    template = {
        "metadata": _get_pod_metadata(metadata),
        "spec": {
            **_build_scheduling(section),
            **build_pod_security(section),
            "containers": [
                {
                    "name": NODE_CONTAINER,
                    **build_container_security(section),
                    "volumeMounts": [mount for _, mount in volumes],
                }
            ],
            "volumes": [volume for volume, _ in volumes],
        },
    }
    pod = _patch_pod(job, template)
    kind, _, runtime = section.runtime.rpartition("/")
    spec: dict[str, Any] = {
        "runtimeRef": {
            "apiGroup": TRAINER_API[0],
            "kind": kind or "ClusterTrainingRuntime",
            "name": runtime,
        },
        "trainer": trainer,
    }
    if section.trainer_version == "2.1":
        spec["podTemplateOverrides"] = [{"targetJobs": [{"name": NODE_CONTAINER}], **pod}]
    else:
        replicated = {"name": NODE_CONTAINER, "template": {"spec": {"template": pod}}}
        patch = {"spec": {"replicatedJobs": [replicated]}}
        spec["runtimePatches"] = [{"manager": _MANAGER, "trainingRuntimeSpec": {"template": patch}}]
        if section.time:
            spec["activeDeadlineSeconds"] = section.time
    return {"apiVersion": "/".join(TRAINER_API[:2]), "kind": "TrainJob", "metadata": metadata, "spec": spec}


def _build_scheduling(section: KubernetesSection) -> dict[str, Any]:
    """Return the fields of a pod that both kinds of jobs can set."""
    values = {
        "serviceAccountName": section.service_account,
        "nodeSelector": section.node_selector,
        "affinity": section.affinity,
        "tolerations": [_parse_toleration(text) for text in section.tolerations],
        "imagePullSecrets": [{"name": secret} for secret in section.image_pull_secrets],
    }
    return {key: value for key, value in values.items() if value}


def _build_command(job: KubernetesJobPlan, script: list[str], *, has_source: bool) -> dict[str, Any]:
    """Return the command of a container, and its arguments."""
    lines = ["set -e"]
    if job.section.user_and_group[0]:
        # A user that the image does not know has / as its home, and no name.
        lines.append('[ -w "$HOME" ] || export HOME=/tmp LOGNAME="${LOGNAME:-accel}"')
    if has_source:
        lines += [f"cd {_WORKSPACE}", f"tar -xzf {_SOURCE}/{_ARCHIVE}"]
        lines += [f"cd {shlex.quote(job.sent.cwd)}"] if job.sent and job.sent.cwd != "." else []
    elif job.section.working_dir:
        lines.append(f"cd {shlex.quote(job.section.working_dir)}")
    lines += [*script, 'exec accel launch "$@"']
    return {
        "command": ["/bin/sh", "-c", _escape("\n".join(lines) + "\n"), "accel"],
        "args": [_escape(word) for word in job.args],
    }


def _list_variables(job: KubernetesJobPlan, variables: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the variables of a container, those with secrets by reference."""
    values = {**job.env, **variables, FAILURE_FILE: _FAILURE}
    env: list[dict[str, Any]] = [
        {"name": key, "value": _escape(value)} for key, value in sorted(values.items())
    ]
    for key, reference in sorted(job.section.secrets.items()):
        secret, _, item = reference.partition("/")
        env.append({"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": item}}})
    if job.section.jobset:
        path = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
        env.append({"name": _ATTEMPT, "valueFrom": {"fieldRef": {"fieldPath": path}}})
    return env


def _build_resources(section: KubernetesSection) -> dict[str, Any]:
    """Return what a container requests and is limited to; empty if nothing is set."""
    resources = {key: str(value) for key, value in section.resources.items()}
    if section.gpus_per_node:
        resources[section.gpu_resource] = str(section.gpus_per_node)
    return {"requests": resources, "limits": resources} if resources else {}


def _list_volumes(section: KubernetesSection, source: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield every volume of a pod with its mount; `source` is the ConfigMap with the archive, empty if none is sent."""
    memory = {"medium": "Memory", **({"sizeLimit": section.shared_memory} if section.shared_memory else {})}
    # The default of a container is 64 MB, too little for the workers of a DataLoader.
    yield {"name": "shm", "emptyDir": memory}, {"name": "shm", "mountPath": "/dev/shm"}  # noqa: S108 - not a file
    if source:
        yield (
            {"name": SOURCE_VOLUME, "configMap": {"name": source}},
            {"name": SOURCE_VOLUME, "mountPath": _SOURCE, "readOnly": True},
        )
        yield {"name": "workspace", "emptyDir": {}}, {"name": "workspace", "mountPath": _WORKSPACE}
    for number, (path, text) in enumerate(section.volumes.items()):
        volume, name = text.removesuffix(":ro"), f"volume-{number}"
        mount: dict[str, Any] = {"name": name, "mountPath": path}
        yield {"name": name, **parse_volume(volume)}, {**mount, "readOnly": True} if volume != text else mount


def _parse_toleration(text: str) -> dict[str, str]:
    """Return a toleration from `KEY`, `KEY:EFFECT` or `KEY=VALUE:EFFECT`."""
    words, _, effect = text.partition(":")
    key, equals, value = words.partition("=")
    operator = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
    return {"key": key, **operator, **({"effect": effect} if effect else {})}


def _escape(text: str) -> str:
    """Return text of an argument or a variable that Kubernetes leaves as it is."""
    return _REFERENCE.sub("$$", text)


def build_pod_security(section: KubernetesSection) -> dict[str, Any]:
    """Return the security context of the pods; empty if the profile asks for none."""
    user, group = section.user_and_group
    context: dict[str, Any] = {"runAsNonRoot": True} if section.is_restricted else {}
    if user is not None:
        context["runAsUser"] = user
    if group is not None:
        context["fsGroup"] = group
        # A volume with millions of files would take hours otherwise.
        context["fsGroupChangePolicy"] = "OnRootMismatch"
    if section.is_restricted:
        context["seccompProfile"] = {"type": "RuntimeDefault"}
    return {"securityContext": context} if context else {}


def build_container_security(section: KubernetesSection) -> dict[str, Any]:
    """Return the security context of the container that runs accel; empty if it needs none."""
    context: dict[str, Any] = {"allowPrivilegeEscalation": False} if section.is_restricted else {}
    capabilities = {
        **({"drop": ["ALL"]} if section.is_restricted else {}),
        # Cards for RDMA read and write memory that must not be swapped.
        **({"add": ["IPC_LOCK"]} if section.has_rdma else {}),
    }
    if capabilities:
        context["capabilities"] = capabilities
    return {"securityContext": context} if context else {}


def parse_volume(text: str) -> dict[str, Any]:
    """Return the source of a volume, from its form in the profile without `:ro`."""
    if text.startswith("nfs://"):
        server, _, path = text.removeprefix("nfs://").partition("/")
        return {"nfs": {"server": server, "path": f"/{path}"}}
    if text.startswith("csi/"):
        driver, _, query = text.removeprefix("csi/").partition("?")
        attributes = dict(pair.split("=", 1) for pair in query.split("&") if pair)
        return {"csi": {"driver": driver, **({"volumeAttributes": attributes} if attributes else {})}}
    kind, _, value = text.partition(":" if text.startswith("host:") else "/")
    contents: dict[str, dict[str, Any]] = {
        "pvc": {"persistentVolumeClaim": {"claimName": value}},
        "configmap": {"configMap": {"name": value}},
        "secret": {"secret": {"secretName": value}},
        "host": {"hostPath": {"path": value}},
        "emptydir": {"emptyDir": {}},
    }
    return contents[kind]


def patch_pod(
    section: KubernetesSection, template: Mapping[str, Any], container: str, variables: Iterable[str]
) -> dict[str, Any]:
    """Return the template of the pods with the patch of the profile.

    Args:
        section: The launcher's section.
        template: The metadata and the spec of the pods.
        container: The name of the container that runs accel.
        variables: The names of the variables that the launcher sets in it.

    Raises:
        UsageError: The patch sets what accel sets, or is not valid.
    """
    if not (section.pod or section.affinity):
        return dict(template)
    rules = PatchRules(
        "launcher.pod",
        _ITEM_KEYS,
        frozenset({"tolerations"}),
        _list_reserved(section, container, variables),
    )
    merged: dict[str, Any] = merge_patch(template, section.pod, rules)
    problems = [
        *_find_misplaced(section, merged, container),
        *_find_secrets(merged["spec"]),
        *_find_model_problems(merged),
    ]
    if problems:
        lines = [f"{_name_key(section, path)}: {problem}" for path, problem in problems]
        raise UsageError("\n".join(["The manifest of the pods is not valid; nothing was sent:", *lines]))
    return merged


def _name_key(section: KubernetesSection, path: str) -> str:
    """Return the key of the profile that a member of a pod comes from."""
    if section.affinity and path.startswith(".spec.affinity"):
        return f"launcher{path.removeprefix('.spec')}"
    return f"launcher.pod{path}"


def _list_reserved(section: KubernetesSection, container: str, variables: Iterable[str]) -> dict[str, str]:
    """Return what to do instead of setting a member that the launcher sets, by the path of the member."""
    main = f"spec.containers[{container}]"
    cures = {
        **{f"metadata.labels.{label}": "Use launcher.labels for other labels." for label in (INSTANCE, MANAGED_BY, OWNER)},
        "spec.restartPolicy": "Set launcher.max_restarts.",
        "spec.subdomain": "Remove it.",
        "spec.hostname": "Remove it.",
        "spec.terminationGracePeriodSeconds": "Set launcher.shutdown_timeout.",
        f"spec.volumes[{SOURCE_VOLUME}]": "Set launcher.source: image to send no files.",
        f"{main}.image": "Set launcher.image.",
        f"{main}.command": "Pass another script to accel launch, or use an init container for preparations.",
        f"{main}.args": "Pass the arguments of the script to accel launch.",
        f"{main}.workingDir": "Set launcher.working_dir.",
        f"{main}.terminationMessagePath": "Remove it.",
        **{f"{main}.env[{name}]": "Set env, or the key of the setting, in the profile." for name in variables},
    }  # fmt: skip
    for amounts in ("requests", "limits"):
        for name in {section.gpu_resource, "nvidia.com/gpu", "amd.com/gpu"}:
            cures[f"{main}.resources.{amounts}.{name}"] = "Set launcher.gpus_per_node."
    if section.kubeflow:
        cures.pop("spec.terminationGracePeriodSeconds")  # of the runtime
    return cures


def _find_misplaced(
    section: KubernetesSection, pod: Mapping[str, Any], container: str
) -> Iterator[tuple[str, str]]:
    """Yield the members that a template of pods does not have, or that a TrainJob cannot change."""
    for name in pod:
        if name not in {"metadata", "spec"}:
            yield f".{name}", "unknown member of a pod; expected metadata or spec"
    for name in pod["metadata"]:
        if name not in _METADATA:
            yield f".metadata.{name}", "the pods of a job can have labels and annotations only"
    if not section.kubeflow:
        return
    reason = "a TrainJob cannot set it; set it in its runtime"
    yield from ((f".spec.{name}", reason) for name in pod["spec"] if name not in _TRAIN_JOB_POD)
    for item in pod["spec"]["containers"]:
        for name in item:
            if item["name"] == container and name not in _TRAIN_JOB_CONTAINER:
                yield f".spec.containers[{container}].{name}", reason


def _find_secrets(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the variables of containers that look like secrets and have their value in the manifest."""
    for name in ("containers", "initContainers"):
        for item in spec.get(name) or ():
            for variable in item.get("env") or ():
                if "value" in variable and is_secret(str(variable["name"])):
                    yield (
                        f".spec.{name}[{item['name']}].env[{variable['name']}]",
                        "looks like a secret, and everyone who may read the job would see it; set launcher.secrets, or valueFrom",
                    )


def _find_model_problems(pod: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield unknown members and values of a wrong type, if the official client is installed."""
    try:
        from kubernetes.client import models  # noqa: PLC0415 - takes a second
    except ImportError:
        console.note(
            "launcher.pod and launcher.affinity were not checked: the package kubernetes is not installed. The cluster checks it."
        )
        return
    yield from _compare(models, pod, "V1PodTemplateSpec", "")


def _compare(models: Any, value: Any, type_name: str, path: str) -> Iterator[tuple[str, str]]:
    """Yield the differences between a value and a type of the client."""
    if collection := _COLLECTION.fullmatch(type_name):
        yield from _compare_items(models, value, collection[1].lower() == "list", collection[2], path)
    elif type_name in _SCALARS:
        expected, kind = _SCALARS[type_name]
        if not isinstance(value, expected) or (type_name == "int" and isinstance(value, bool)):
            yield path, f"expected {kind}, got {value!r}"
    elif model := getattr(models, type_name, None):  # else `object`: a number or text
        yield from _compare_members(models, value, model, path)


def _compare_items(
    models: Any, value: Any, is_list: bool, type_name: str, path: str
) -> Iterator[tuple[str, str]]:
    """Yield the differences of the items of a list or a mapping."""
    if not isinstance(value, list if is_list else Mapping):
        yield path, f"expected {'a list' if is_list else 'keys and values'}, got {value!r}"
        return
    items: Iterable[tuple[Any, Any]] = enumerate(value) if isinstance(value, list) else value.items()
    for key, item in items:
        if not _is_amount(path, item):
            yield from _compare(
                models, item, type_name, _index(path, key, item) if is_list else f"{path}.{key}"
            )


def _compare_members(models: Any, value: Any, model: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the differences of the members of an object."""
    if not isinstance(value, Mapping):
        yield path, f"expected keys and values, got {value!r}"
        return
    types = {model.attribute_map[name]: each for name, each in model.openapi_types.items()}
    for name, item in value.items():
        inner = f"{path}.{name}"
        if name not in types:
            nearest = find_nearest(str(name), list(types))
            yield inner, f"unknown member{f'; did you mean {nearest}?' if nearest else ''}"
        elif not _is_amount(inner, item):
            yield from _compare(models, item, types[name], inner)


def _is_amount(path: str, value: Any) -> bool:
    """Return True for a number where the models of the client have text, and Kubernetes takes both."""
    return isinstance(value, (int, float)) and path.rpartition(".")[2] in _QUANTITIES


def _index(path: str, number: int, item: Any) -> str:
    """Return the path of an item of a list: by its name if that identifies it."""
    key = _ITEM_KEYS.get(path.rpartition(".")[2])
    return f"{path}[{item[key] if key and isinstance(item, Mapping) and key in item else number}]"
