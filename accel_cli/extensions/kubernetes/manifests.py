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
from accel_runtime.environment.settings import FAILURE_FILE

__all__ = [
    "CONTAINER",
    "JOB_SET_API",
    "NODE_CONTAINER",
    "RESERVED_VARIABLES",
    "SOURCE_VOLUME",
    "TRAINER_API",
    "KubernetesJobPlan",
    "format_user",
    "name_job",
    "name_keys",
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
_TRAINER_MEMBERS = {
    "image": "image",
    "command": "command",
    "args": "args",
    "env": "env",
    "resources": "resourcesPerNode",
}
"""Members of the container that a TrainJob has in its `trainer`, and their names there."""
_POD_KEYS = {
    "affinity": "affinity",
    "imagePullSecrets": "image_pull_secrets",
    "nodeSelector": "node_selector",
    "priorityClassName": "priority_class",
    "runtimeClassName": "runtime_class",
    "schedulerName": "scheduler_name",
    "serviceAccountName": "service_account",
    "tolerations": "tolerations",
}
"""The keys of the profile whose values members of a pod have."""
_POD_PATH = re.compile(r"spec\.(?:[\w.\[\]]*\btemplate|podTemplateOverrides\[0\])\.(metadata|spec)\.(\w+)")
"""The path of a member of the pods in a message of the cluster about a Job, a JobSet or a TrainJob."""


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
    template = _build_template(job, metadata, has_source=archive is not None)
    build = _build_train_job if section.kubeflow else _build_job_set if section.jobset else _build_job
    built = build(job, metadata, template)
    if section.suspend:
        built["spec"]["suspend"] = True
    if section.managed_by:
        built["spec"]["managedBy"] = section.managed_by
    return [*manifests, built]


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


def _build_job(
    job: KubernetesJobPlan, metadata: Mapping[str, Any], template: dict[str, Any]
) -> dict[str, Any]:
    action = "Ignore" if job.section.max_restarts else ""
    spec = {"ttlSecondsAfterFinished": job.section.ttl, **_build_job_spec(job, template, action)}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _build_job_set(
    job: KubernetesJobPlan, metadata: Mapping[str, Any], template: dict[str, Any]
) -> dict[str, Any]:
    """Return a JobSet of one Job, whose failure by a lost pod starts all pods again."""
    section = job.section
    # The Job of a lost pod fails by PodFailurePolicy, and that of a failed script by another reason.
    spec = _build_job_spec(job, template, "FailJob")
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


def _build_job_spec(job: KubernetesJobPlan, template: dict[str, Any], action: str) -> dict[str, Any]:
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
    return {**spec, "template": template}


def _build_train_job(
    job: KubernetesJobPlan, metadata: Mapping[str, Any], template: dict[str, Any]
) -> dict[str, Any]:
    """Return a TrainJob of Kubeflow Trainer: what its fields cannot hold changes the pods of its runtime."""
    section = job.section
    (container,) = [item for item in template["spec"]["containers"] if item["name"] == NODE_CONTAINER]
    moved = {name: container.pop(key) for key, name in _TRAINER_MEMBERS.items() if key in container}
    kind, _, runtime = section.runtime.rpartition("/")
    spec: dict[str, Any] = {
        "runtimeRef": {
            "apiGroup": TRAINER_API[0],
            "kind": kind or "ClusterTrainingRuntime",
            "name": runtime,
        },
        "trainer": {**moved, "numNodes": section.nnodes, "numProcPerNode": job.nproc_per_node},
    }
    if section.trainer_version == "2.1":
        spec["podTemplateOverrides"] = [{"targetJobs": [{"name": NODE_CONTAINER}], **template}]
    else:
        replicated = {"name": NODE_CONTAINER, "template": {"spec": {"template": template}}}
        patch = {"spec": {"replicatedJobs": [replicated]}}
        spec["runtimePatches"] = [{"manager": _MANAGER, "trainingRuntimeSpec": {"template": patch}}]
    if section.time:
        spec["activeDeadlineSeconds"] = section.time
    return {"apiVersion": "/".join(TRAINER_API[:2]), "kind": "TrainJob", "metadata": metadata, "spec": spec}


# The pods


def _build_template(
    job: KubernetesJobPlan, metadata: Mapping[str, Any], *, has_source: bool
) -> dict[str, Any]:
    """Return the metadata and the spec of the pods of every kind of job, with the patch of the profile.

    Those of a TrainJob have no policies, which are of its runtime, and no rendezvous, whose variables Trainer sets.
    """
    section, name = job.section, metadata["name"]
    volumes = list(_list_volumes(section, name if has_source else ""))
    script, variables = ([], {}) if section.kubeflow else _build_rendezvous(section, name)
    members = {
        **({} if section.kubeflow else _build_policies(section, name)),
        **_build_pod_security(section),
        "serviceAccountName": section.service_account,
        "nodeSelector": section.node_selector,
        "affinity": section.affinity,
        "tolerations": [_parse_toleration(text) for text in section.tolerations],
        "imagePullSecrets": [{"name": secret} for secret in section.image_pull_secrets],
        "priorityClassName": section.priority_class,
        "schedulerName": section.scheduler_name,
        "runtimeClassName": section.runtime_class,
    }
    container = {
        "name": NODE_CONTAINER if section.kubeflow else CONTAINER,
        "image": section.image,
        "imagePullPolicy": section.image_pull_policy,
        **_build_container_security(section),
        **_build_command(job, script, has_source=has_source),
        "env": _list_variables(job, variables),
        "resources": _build_resources(section),
        "volumeMounts": [mount for _, mount in volumes],
    }
    spec = {
        **{key: value for key, value in members.items() if value not in (None, {}, [])},
        "containers": [{key: value for key, value in container.items() if value not in (None, {})}],
        "volumes": [volume for volume, _ in volumes],
    }
    # The metadata of the job that its pods have too.
    shared = {key: metadata[key] for key in ("labels", "annotations") if key in metadata}
    return _patch_template(job, {"metadata": shared, "spec": spec})


def _build_policies(section: KubernetesSection, name: str) -> dict[str, Any]:
    """Return the members of a pod that are not of a runtime."""
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": section.shutdown_timeout + _GRACE_S,
        # JobSet makes the Service, and the name of each pod in it.
        "subdomain": name if section.nnodes > 1 and not section.jobset else None,
        "automountServiceAccountToken": None if section.service_account else False,
        # Without variables for each Service of the namespace, of which there may be thousands.
        "enableServiceLinks": False,
    }


def _build_rendezvous(section: KubernetesSection, name: str) -> tuple[list[str], dict[str, str]]:
    """Return the lines of shell before `accel launch`, and the variables with which the pods find each other."""
    variables, script = {}, []
    if section.nnodes > 1:
        first = f"{name}-{_REPLICATED_JOB}-0-0" if section.jobset else f"{name}-0"
        # Not as options: with these variables an agent waits until the name of the first pod resolves.
        variables = {"PET_NNODES": str(section.nnodes), "PET_MASTER_ADDR": f"{first}.{name}"}
        variables["PET_MASTER_PORT"] = str(PORT)
        script = ['export PET_NODE_RANK="$JOB_COMPLETION_INDEX"']
    if section.jobset:
        script.append(f'[ "${_ATTEMPT}" = 0 ] || set -- --resume "$@"')
    return script, variables


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
        yield (
            {"name": name, **_parse_volume(volume)},
            {**mount, "readOnly": True} if volume != text else mount,
        )


def _parse_toleration(text: str) -> dict[str, str]:
    """Return a toleration from `KEY`, `KEY:EFFECT` or `KEY=VALUE:EFFECT`."""
    words, _, effect = text.partition(":")
    key, equals, value = words.partition("=")
    operator = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
    return {"key": key, **operator, **({"effect": effect} if effect else {})}


def _escape(text: str) -> str:
    """Return text of an argument or a variable that Kubernetes leaves as it is."""
    return _REFERENCE.sub("$$", text)


def _build_pod_security(section: KubernetesSection) -> dict[str, Any]:
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


def _build_container_security(section: KubernetesSection) -> dict[str, Any]:
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


def _parse_volume(text: str) -> dict[str, Any]:
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


# The patch of the profile


def _patch_template(job: KubernetesJobPlan, template: dict[str, Any]) -> dict[str, Any]:
    """Return the template of the pods with the patch of the profile.

    Raises:
        UsageError: The patch sets what accel sets, or a variable that looks like a secret.
    """
    section = job.section
    (container,) = template["spec"]["containers"]
    variables = {item["name"] for item in container["env"]} | RESERVED_VARIABLES
    reserved = _list_reserved(section, container["name"], variables)
    rules = PatchRules("launcher.pod", _ITEM_KEYS, frozenset({"tolerations"}), reserved)
    merged: dict[str, Any] = merge_patch(template, section.pod, rules)
    for kind in ("containers", "initContainers"):
        for item in _list_mappings(merged["spec"].get(kind)):
            for variable in _list_mappings(item.get("env")):
                if "value" in variable and is_secret(str(variable["name"])):
                    raise UsageError(
                        f"Invalid launcher.pod.spec.{kind}[{item['name']}].env[{variable['name']}]: it looks like a secret, and everyone "
                        "who may read the job would see it. Set launcher.secrets, or valueFrom."
                    )
    return merged


def _list_mappings(value: Any) -> list[Mapping[str, Any]]:
    """Return the items of a list that are mappings; the cluster refuses others."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _list_reserved(section: KubernetesSection, container: str, variables: Iterable[str]) -> dict[str, str]:
    """Return what to do instead of setting a member that the launcher sets, by the path of the member."""
    main = f"spec.containers[{container}]"
    cures = {
        **{f"metadata.labels.{label}": "Use launcher.labels for other labels." for label in (INSTANCE, MANAGED_BY, OWNER)},
        # A cluster ignores them in a template.
        "metadata.name": "Set launcher.job_name.",
        "metadata.namespace": "Set launcher.namespace.",
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


def name_keys(section: KubernetesSection, message: str) -> str:
    """Return a message of the cluster in which the paths of members that the profile sets are its keys."""

    def name_key(match: re.Match[str]) -> str:
        part, member = match.groups()
        if member in section.pod.get(part, ()):
            return f"launcher.pod.{part}.{member}"
        key = _POD_KEYS.get(member)
        return f"launcher.{key}" if key else match[0]

    return _POD_PATH.sub(name_key, message)
