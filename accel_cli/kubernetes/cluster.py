"""The jobs of a Kubernetes cluster, through its client: submission, status, logs of all pods, and deletion."""

from __future__ import annotations

import datetime as dt
import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from accel_cli import console
from accel_cli.errors import AccelError, UsageError
from accel_cli.jobs.base import Job, Jobs, Log, PollIntervals, UnreachableError, follow, format_commands
from accel_cli.kubernetes.manifests import (
    CONTAINER,
    OWNER,
    KubernetesJobPlan,
    format_user,
    name_job,
    read_source,
    render,
)
from accel_cli.planning.plan import Plan

__all__ = ["Cluster", "KubernetesJobs", "PodLogs", "parse_job", "submit"]

_TIMEOUT_S = (10, 60)
"""Seconds to connect, and to wait for an answer."""
_MARGIN_S = 5
"""Seconds of a log that are read again, since clocks differ; lines that were read already are left out."""
_SERVER_ERROR, _TOO_MANY, _CONFLICT, _NOT_FOUND, _FORBIDDEN, _UNAUTHORIZED, _BAD_REQUEST = (
    500,
    429,
    409,
    404,
    403,
    401,
    400,
)
_SIGTERM_EXIT_CODE = 143
_NUM_SHOWN = 4
_STARTING = frozenset({"ContainerCreating", "PodInitializing"})
"""Reasons of a container that waits and need no attention."""


class Cluster:
    """A cluster of the user's kubeconfig, and a namespace in it.

    Args:
        context: The context; None takes the current one.
        namespace: The namespace; None takes that of the context.
    """

    def __init__(self, context: str | None = None, namespace: str | None = None) -> None:
        self._context, self._namespace = context, namespace
        try:
            import kubernetes  # noqa: PLC0415 - takes a second
        except ImportError as error:
            raise UsageError(
                f"launcher.kind: kubernetes needs the package kubernetes, which cannot be imported ({error}). Run "
                "pip install 'accel-runtime[kubernetes]'."
            ) from None
        self._sdk: Any = kubernetes

    @cached_property
    def namespace(self) -> str:
        """The namespace of the profile, else of the context, else `default`."""
        if self._namespace:
            return self._namespace
        with self.translate_errors("read the kubeconfig"):
            contexts, current = self._sdk.config.list_kube_config_contexts()
        chosen = next((item for item in contexts if item["name"] == self._context), current)
        return str(chosen["context"].get("namespace") or "default")

    @cached_property
    def batch(self) -> Any:
        """The API of jobs."""
        return self._sdk.client.BatchV1Api(self._api)

    @cached_property
    def core(self) -> Any:
        """The API of pods, services and ConfigMaps."""
        return self._sdk.client.CoreV1Api(self._api)

    @cached_property
    def _api(self) -> Any:
        configuration = self._sdk.client.Configuration()
        # Repeated by `follow`, with a message of its own.
        configuration.retries = False
        with self.translate_errors("read the kubeconfig"):
            self._sdk.config.load_kube_config(context=self._context, client_configuration=configuration)
        return self._sdk.client.ApiClient(configuration)

    @property
    def response_error(self) -> type[Exception]:
        """The class of errors for answers that are not successful."""
        error: type[Exception] = self._sdk.client.ApiException
        return error

    def get_status_code(self, error: Exception) -> int:
        """Return the HTTP status of an error of the client; 0 if there was no answer."""
        return int(getattr(error, "status", 0) or 0)

    @contextmanager
    def translate_errors(self, action: str) -> Iterator[None]:
        """Turn errors of the client into `UsageError`, or `UnreachableError` if the cluster does not answer.

        `action` follows "Cannot" in the message: `submit the job`.
        """
        import urllib3  # noqa: PLC0415 - a package of the client

        try:
            yield
        except self._sdk.config.ConfigException as error:
            raise UsageError(
                f"Cannot {action}: {str(error).rstrip('.')}. Set KUBECONFIG or launcher.context; kubectl config get-contexts "
                "lists contexts."
            ) from error
        except self.response_error as error:
            raise self._translate_response(error, action) from error
        except urllib3.exceptions.HTTPError as error:
            raise UnreachableError(f"Cannot {action}: the cluster does not answer: {error}.") from error

    def _translate_response(self, error: Any, action: str) -> AccelError:
        code, message = self.get_status_code(error), _read_message(error)
        if code in {0, _TOO_MANY} or code >= _SERVER_ERROR:
            return UnreachableError(f"Cannot {action}: the cluster does not answer: {code} {message}.")
        if code == _UNAUTHORIZED:
            return UsageError(
                f"Cannot {action}: the cluster rejects the credentials: {message}. Log in again, or set launcher.context."
            )
        if code == _FORBIDDEN:
            return UsageError(f"Cannot {action}: {message}. Ask an administrator for the permission.")
        return UsageError(f"Cannot {action}: the cluster rejects it with {code}: {message}.")


def _read_message(error: Any) -> str:
    """Return the message of an answer in one line."""
    try:
        text = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        text = error.reason
    return " ".join(str(text).split()).rstrip(".")


class KubernetesJobs(Jobs):
    """The user's jobs in a namespace; Kubernetes deletes a finished job after `launcher.ttl` seconds."""

    intervals: ClassVar[PollIntervals] = PollIntervals(log_s=0.5, status_s=(1.0, 10.0), last_output_s=2.0)

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._last: dict[str, Job] = {}

    @override
    def list(self) -> list[Job]:
        cluster = self._cluster
        owned = f"app.kubernetes.io/managed-by=accel,{OWNER}={format_user()}"
        with cluster.translate_errors("list jobs"):
            jobs = cluster.batch.list_namespaced_job(
                cluster.namespace, label_selector=owned, _request_timeout=_TIMEOUT_S
            ).items
            pods = _list_pods(cluster, owned)
        jobs.sort(key=lambda job: job.metadata.creation_timestamp)
        names = [job.metadata.name for job in jobs]
        by_job: dict[str, list[Any]] = {name: [] for name in names}
        for pod in pods:
            by_job.get(_get_job_name(pod), []).append(pod)
        return [parse_job(job, by_job[name], _get_now()) for job, name in zip(jobs, names, strict=True)]

    @override
    def status(self, job_id: str) -> Job:
        cluster = self._cluster
        with cluster.translate_errors(f"read job {job_id}"):
            try:
                job = cluster.batch.read_namespaced_job(
                    job_id, cluster.namespace, _request_timeout=_TIMEOUT_S
                )
            except cluster.response_error as error:
                if cluster.get_status_code(error) != _NOT_FOUND:
                    raise
                return self._describe_deleted(job_id)
            pods = _list_pods(cluster, f"app.kubernetes.io/instance={job_id}")
        self._last[job_id] = parse_job(job, pods, _get_now())
        return self._last[job_id]

    def _describe_deleted(self, job_id: str) -> Job:
        """Return a job that was deleted after its last status; raise if it was never seen."""
        last = self._last.get(job_id)
        if last is None:
            raise UsageError(
                f"Unknown job {job_id!r} in namespace {self._cluster.namespace}: it was deleted, or is in another one. Run "
                "accel jobs list, or set launcher.namespace."
            )
        if last.finished:
            return last
        return replace(
            last, state="Deleted", finished=True, exit_code=_SIGTERM_EXIT_CODE, reason="the job was deleted"
        )

    @override
    def open_log(self, job: Job) -> Log:
        return PodLogs(self._cluster, job.id)

    @override
    def stop(self, job_id: str) -> None:
        cluster = self._cluster
        with cluster.translate_errors(f"stop job {job_id}"):
            # The job remains until its pods have ended.
            cluster.batch.delete_namespaced_job(
                job_id, cluster.namespace, propagation_policy="Foreground", _request_timeout=_TIMEOUT_S
            )

    @override
    def download(self, job_id: str, into: Path) -> Path:
        raise UsageError(
            f"Cannot download Kubernetes job {job_id}: its files are on the volumes of its pods. Mount a volume with "
            "launcher.volumes, and read it from another pod."
        )


def _list_pods(cluster: Cluster, selector: str) -> list[Any]:
    pods = cluster.core.list_namespaced_pod(
        cluster.namespace, label_selector=selector, _request_timeout=_TIMEOUT_S
    )
    return list(pods.items)


def _get_job_name(pod: Any) -> str:
    return str((pod.metadata.labels or {}).get("app.kubernetes.io/instance", ""))


def _get_index(pod: Any) -> int:
    """Return the completion index of a pod."""
    return int((pod.metadata.annotations or {}).get("batch.kubernetes.io/job-completion-index", 0))


def _get_now() -> dt.datetime:
    return dt.datetime.now(dt.timezone.utc)


def parse_job(job: Any, pods: list[Any], now: dt.datetime) -> Job:
    """Return the state of a job from the objects of the client."""
    metadata, status = job.metadata, job.status
    conditions = {item.type: item for item in status.conditions or () if item.status == "True"}
    ended = conditions.get("Complete") or conditions.get("Failed")
    state, reason = _describe_state(conditions, pods)
    exit_code = None
    if ended:
        exit_code, cause = (0, "") if "Complete" in conditions else _find_failure(pods)
        shown = "" if ended.reason == "BackoffLimitExceeded" else ended.message or ended.reason or ""
        reason = "" if exit_code == 0 else cause or shown or "a pod failed"
    elif metadata.deletion_timestamp:
        state, reason = "Terminating", ""
    start, end = status.start_time, status.completion_time or (ended and ended.last_transition_time) or now
    nodes = list(
        dict.fromkeys(pod.spec.node_name for pod in sorted(pods, key=_get_index) if pod.spec.node_name)
    )
    more = f" and {len(nodes) - _NUM_SHOWN} more" if len(nodes) > _NUM_SHOWN else ""
    return Job(
        id=metadata.name,
        name=metadata.name,
        state=state,
        finished=ended is not None,
        exit_code=exit_code,
        reason=reason,
        nodes=", ".join(nodes[:_NUM_SHOWN]) + more,
        submitted=metadata.creation_timestamp.isoformat() if metadata.creation_timestamp else "",
        elapsed=str(dt.timedelta(seconds=int((end - start).total_seconds()))) if start else "",
        log=f"kubectl logs -n {metadata.namespace} --prefix --tail=-1 -l app.kubernetes.io/instance={metadata.name}",
        hosts=job.spec.completions or 1,
    )


def _describe_state(conditions: Mapping[str, Any], pods: list[Any]) -> tuple[str, str]:
    """Return the state of a job, and why it waits."""
    for name in ("Complete", "Failed", "Suspended"):
        if name in conditions:
            return name, conditions[name].message or ""
    if "FailureTarget" in conditions:
        return "Failing", ""
    waits = [reason for pod in pods if (reason := _find_obstacle(pod))]
    if waits or not pods or any(pod.status.phase == "Pending" for pod in pods):
        return "Pending", waits[0] if waits else ""
    return "Running", ""


def _find_obstacle(pod: Any) -> str:
    """Return why a pod does not start; empty if it runs, or is about to."""
    for status in pod.status.container_statuses or ():
        waiting = status.state.waiting if status.state else None
        if waiting and waiting.reason not in {None, *_STARTING}:
            return f"{waiting.reason}: {waiting.message}" if waiting.message else str(waiting.reason)
    for item in pod.status.conditions or ():
        if item.type == "PodScheduled" and item.status == "False" and item.message:
            return f"{item.reason}: {item.message}"
    return ""


def _find_failure(pods: list[Any]) -> tuple[int, str]:
    """Return the exit code of the pod that failed first, and the reason that it left."""
    failures = []
    for pod in pods:
        for status in pod.status.container_statuses or ():
            ended = status.state.terminated if status.state and status.name == CONTAINER else None
            if ended and ended.exit_code:
                # The agent of the pod with the first failure leaves a message; the others end because of it.
                order = (not ended.message, ended.finished_at.timestamp() if ended.finished_at else math.inf)
                failures.append((order, _get_index(pod), ended))
    if not failures:
        return 1, ""
    _, index, ended = min(failures, key=lambda failure: failure[:2])
    lines = (ended.message or "").strip().splitlines()
    if not lines:
        cause = "" if ended.reason in {None, "Error"} else f" ({ended.reason})"
        lines = [f"the container of pod {index} exited with code {ended.exit_code}{cause}"]
    return ended.exit_code, lines[0]


class PodLogs(Log):
    """The output of all pods of a job; with several pods, each line begins with the name of its own."""

    def __init__(self, cluster: Cluster, job_id: str) -> None:
        self._cluster, self._job_id = cluster, job_id
        self._read_at: dict[str, float] = {}
        self._last: dict[str, tuple[str, int]] = {}
        """The time of the last line of each pod, and the number of lines of that time."""
        self._complete = False

    @override
    def read(self) -> bytes:
        output, is_complete = [], True
        with self._cluster.translate_errors(f"read the log of job {self._job_id}"):
            pods = _list_pods(self._cluster, f"app.kubernetes.io/instance={self._job_id}")
            for pod in sorted(pods, key=_get_index):
                if pod.status.phase == "Pending":
                    continue
                lines = self._read_pod(pod.metadata.name)
                is_complete &= pod.status.phase in {"Succeeded", "Failed"} and not lines
                several = _read_size(pod) > 1
                prefix = f"{self._job_id}-{_get_index(pod)} | ".encode() if several else b""
                output += [prefix + line + b"\n" for line in lines]
        self._complete = is_complete
        return b"".join(output)

    @override
    def is_complete(self, job: Job) -> bool:
        return self._complete

    def _read_pod(self, name: str) -> list[bytes]:
        """Return the new lines of a pod."""
        options: dict[str, Any] = {"timestamps": True, "container": CONTAINER, "_preload_content": False}
        now = time.monotonic()
        if name in self._read_at:
            options["since_seconds"] = math.ceil(now - self._read_at[name]) + _MARGIN_S
        try:
            response = self._cluster.core.read_namespaced_pod_log(
                name, self._cluster.namespace, _request_timeout=_TIMEOUT_S, **options
            )
        except self._cluster.response_error as error:
            # The container has not started, or the pod was deleted meanwhile.
            if self._cluster.get_status_code(error) in {_BAD_REQUEST, _NOT_FOUND}:
                return []
            raise
        lines = self._drop_known(name, response.data.split(b"\n"))
        self._read_at[name] = now
        return lines

    def _drop_known(self, name: str, lines: list[bytes]) -> list[bytes]:
        """Return the text of the lines that come after the last one that was read."""
        last, count = self._last.get(name, ("", 0))
        new, skipped = [], 0
        for line in lines:
            stamp, _, text = line.partition(b" ")
            if not stamp:
                continue
            at = _parse_time(stamp)
            if at < last:
                continue
            if at == last and skipped < self._last.get(name, ("", 0))[1]:
                skipped += 1
                continue
            last, count = (at, count + 1) if at == last else (at, 1)
            new.append(text)
        self._last[name] = (last, count)
        return new


def _parse_time(stamp: bytes) -> str:
    """Return a time of a log line, with a fraction of nine digits, so that times compare as text."""
    seconds, _, fraction = stamp.decode("ascii", "replace").rstrip("Z").partition(".")
    return f"{seconds}.{fraction:0<9}"


def _read_size(pod: Any) -> int:
    """Return the number of pods of a job, from the variables of one."""
    variables = {item.name: item.value for item in pod.spec.containers[0].env or ()}
    return int(variables.get("PET_NNODES") or 1)


def submit(plan: Plan) -> int:
    """Submit a job and return 0 if the plan detaches; otherwise follow it to its end and return its exit code."""
    job = plan.job
    assert isinstance(job, KubernetesJobPlan)
    section = job.section
    cluster = Cluster(section.context, section.namespace)
    name = name_job(job.name)
    _create(cluster, name, render(job, name, format_user(), read_source(job)))
    jobs = KubernetesJobs(cluster)
    jobs.jobs_options = job.jobs_options
    # Before the next call to the cluster, since from here on there is a job to stop.
    console.note(f"job {name} is submitted. {format_commands(name, jobs.jobs_options)}")
    if job.detach:
        console.plain(name)
        return 0
    return follow(jobs, jobs.status(name))


def _create(cluster: Cluster, name: str, manifests: list[dict[str, Any]]) -> None:
    """Create the objects of a job, or none of them; with the job, Kubernetes deletes the others."""
    *others, body = manifests
    namespace, options = cluster.namespace, {"_request_timeout": _TIMEOUT_S}
    with cluster.translate_errors(f"submit job {name} to namespace {namespace}"):
        created = cluster.batch.create_namespaced_job(namespace, body, **options)
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": created.metadata.uid}
    calls = {
        "Service": cluster.core.create_namespaced_service,
        "ConfigMap": cluster.core.create_namespaced_config_map,
    }
    try:
        with cluster.translate_errors(f"submit job {name} to namespace {namespace}"):
            for other in others:
                metadata = {**other["metadata"], "ownerReferences": [owner]}
                calls[other["kind"]](namespace, {**other, "metadata": metadata}, **options)
    except BaseException as error:
        try:
            KubernetesJobs(cluster).stop(name)
        except AccelError as failure:
            console.error(
                f"job {name} was created and cannot be deleted: {failure} Run kubectl delete job {name}."
            )
        if isinstance(error, KeyboardInterrupt):
            console.note("The submission was interrupted, and the job was deleted.")
        raise
