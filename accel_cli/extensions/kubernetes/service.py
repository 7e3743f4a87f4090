"""The jobs of a Kubernetes cluster: submission, status, logs of all pods, and deletion."""

from __future__ import annotations

import datetime as dt
import math
import re
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any, ClassVar

from typing_extensions import override

from accel_cli import console
from accel_cli.errors import AccelError, UsageError
from accel_cli.extensions.kubernetes.cluster import TIMEOUT_S, KubernetesCluster, has_kubeconfig
from accel_cli.extensions.kubernetes.fields import INSTANCE, MANAGED_BY, OWNER
from accel_cli.extensions.kubernetes.manifests import (
    CONTAINER,
    JOB_SET_API,
    NODE_CONTAINER,
    TRAINER_API,
    KubernetesJobPlan,
    format_user,
    name_job,
    name_keys,
    read_source,
    render,
)
from accel_cli.launchers.job_service import Job, Jobs, Log, PollIntervals, UnreachableError, follow_submission
from accel_cli.planning.plan import Plan
from accel_runtime.environment.text import encode_text

__all__ = [
    "JobSets",
    "KubernetesJobs",
    "PodLogs",
    "TrainJobs",
    "check",
    "count_restarts",
    "describe_job",
    "describe_placement",
    "get_index",
    "keep_failure",
    "open_jobs",
    "submit",
]

_MARGIN_S = 5
"""Seconds of a log that are read again, since clocks differ; lines that were read already are left out."""
_SIGTERM_EXIT_CODE = 143
_STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")
_NUM_SHOWN = 4
_CONDITIONS = {"Completed": "Complete"}
"""The conditions of a JobSet that a Job has under another name."""
_STARTING = frozenset({"ContainerCreating", "PodInitializing"})
"""Reasons of a container that waits and need no attention."""


class KubernetesJobs(Jobs):
    """The user's Jobs in a namespace; Kubernetes deletes a finished one after `launcher.ttl` seconds."""

    intervals: ClassVar[PollIntervals] = PollIntervals(log_s=0.5, status_s=(1.0, 10.0), last_output_s=2.0)
    output_location = (
        "on the volumes of its pods. Mount a volume with launcher.volumes, and read it from another pod."
    )
    resource: ClassVar[tuple[str, str, str]] = ("batch", "v1", "jobs")
    """The group, version and plural name of the jobs in the API."""
    kind: ClassVar[str] = "Job"
    label: ClassVar[str] = INSTANCE
    """The label of pods with the name of their job."""
    container: ClassVar[str] = CONTAINER
    """The name of the container that runs accel."""
    children: ClassVar[tuple[str, ...]] = ()
    """The ends of the names of objects through which a job creates its pods."""

    def __init__(self, cluster: KubernetesCluster) -> None:
        self.cluster = cluster
        self._last: dict[str, Job] = {}
        self._pods: dict[str, dict[str, Any]] = {}
        """The last state of every pod that was seen, by job and unique id: the cluster deletes pods that were drained."""

    @property
    def _location(self) -> dict[str, Any]:
        """The arguments of every call about jobs."""
        group, version, plural = self.resource
        return {
            "group": group,
            "version": version,
            "namespace": self.cluster.namespace,
            "plural": plural,
            "_request_timeout": TIMEOUT_S,
        }

    def create(self, body: Mapping[str, Any], *, is_dry_run: bool = False) -> Mapping[str, str]:
        """Create a job from its manifest, and return the reference with which it owns other objects.

        In a dry run the cluster checks the manifest, and creates nothing.
        """
        more = {"dry_run": "All"} if is_dry_run else {}
        created = self.cluster.custom.create_namespaced_custom_object(
            **self._location, body=body, field_validation="Strict", **more
        )
        metadata = {key: created["metadata"][key] for key in ("name", "uid")}
        return {"apiVersion": created["apiVersion"], "kind": created["kind"], **metadata}

    def delete(self, job_id: str) -> None:
        """Delete a job and all objects that it owns; it remains until its pods have ended."""
        self.cluster.custom.delete_namespaced_custom_object(
            **self._location, name=job_id, propagation_policy="Foreground"
        )

    def list_pods(self, job_id: str) -> list[Any]:
        """Return the pods of a job."""
        pods = self._select_pods(f"{self.label}={job_id}")
        seen = self._pods.setdefault(job_id, {})
        for pod in pods:
            uid = pod.metadata.uid
            seen[uid] = keep_failure(seen[uid], pod, self.container) if uid in seen else pod
        return pods

    def _select_pods(self, selector: str) -> list[Any]:
        pods = self.cluster.core.list_namespaced_pod(
            self.cluster.namespace, label_selector=selector, _request_timeout=TIMEOUT_S
        )
        return list(pods.items)

    @override
    def list(self) -> list[Job]:
        selector = f"{MANAGED_BY}=accel,{OWNER}={format_user()}"
        with self.cluster.translate_errors("list jobs"):
            jobs = self.cluster.custom.list_namespaced_custom_object(
                **self._location, label_selector=selector
            )
            all_pods = self._select_pods(selector)
        pods: dict[str, list[Any]] = defaultdict(list)
        for pod in all_pods:
            pods[pod.metadata.labels.get(self.label)].append(pod)
        by_job = [(job, pods[job["metadata"]["name"]]) for job in jobs["items"]]
        described = [self._describe(job, its_pods, its_pods) for job, its_pods in by_job]
        return sorted(described, key=lambda job: job.submitted)

    @override
    def status(self, job_id: str) -> Job:
        with self.cluster.translate_errors(f"read job {job_id}"):
            try:
                found = self.cluster.custom.get_namespaced_custom_object(**self._location, name=job_id)
            except self.cluster.response_error as error:
                if error.status != HTTPStatus.NOT_FOUND:
                    raise
                return self._describe_deleted(job_id)
            if found["metadata"].get("labels", {}).get(MANAGED_BY) != "accel":
                raise UsageError(
                    f"Cannot use job {job_id!r}: accel did not submit it. Run accel jobs list, or use kubectl for other jobs."
                )
            pods = self.list_pods(job_id)
            job = self._describe(found, pods, self._pods[job_id].values())
            if job.state == "Pending":
                reason = job.reason or self._read_warning(job_id, pods)
                job = replace(job, reason=describe_placement(pods, reason))
        self._last[job_id] = job
        return job

    def _describe(self, job: Mapping[str, Any], pods: Collection[Any], seen: Collection[Any]) -> Job:
        described = describe_job(job, pods, seen, self.container, dt.datetime.now(dt.UTC))
        options = f"--prefix --tail=-1 -c {self.container} -l {self.label}={described.id}"
        return replace(described, log=f"{self.cluster.kubectl} logs {options}")

    def _describe_deleted(self, job_id: str) -> Job:
        """Return a job that was deleted after its last status; raise if it was never seen."""
        last = self._last.get(job_id)
        if last is None:
            raise self._build_unknown_error(job_id)
        if last.finished:
            return last
        return replace(
            last, state="Deleted", finished=True, exit_code=_SIGTERM_EXIT_CODE, reason="the job was deleted"
        )

    def _build_unknown_error(self, job_id: str) -> UsageError:
        return UsageError(
            f"Unknown job {job_id!r} in namespace {self.cluster.namespace}: it was deleted, or is in another one. Run "
            "accel jobs list, or set launcher.namespace; launcher.kubeflow: true selects TrainJobs, and launcher.jobset: true JobSets."
        )

    def _read_warning(self, job_id: str, pods: Iterable[Any]) -> str:
        """Return the newest event of a job that has no pods, or of a pod that waits, if it is a warning."""
        waiting = [pod.metadata.name for pod in pods if pod.status.phase == "Pending"]
        for name in waiting[:1] or [job_id, *(job_id + end for end in self.children)]:
            try:
                events = self.cluster.core.list_namespaced_event(
                    self.cluster.namespace,
                    field_selector=f"involvedObject.name={name}",
                    _request_timeout=TIMEOUT_S,
                ).items
            except self.cluster.response_error:  # not every user may read events
                return ""
            # Of events of the same second, the one that is no warning: the cluster repeats those that remain true.
            newest = max(
                events, key=lambda event: (_get_event_time(event), event.type != "Warning"), default=None
            )
            if newest is not None and newest.type == "Warning":
                return f"{newest.reason}: {' '.join((newest.message or '').split())}"
        return ""

    @override
    def open_log(self, job: Job) -> Log:
        return PodLogs(self, job)

    @override
    def stop(self, job_id: str) -> None:
        with self.cluster.translate_errors(f"stop job {job_id}"):
            try:
                self.delete(job_id)
            except self.cluster.response_error as error:
                if error.status != HTTPStatus.NOT_FOUND:
                    raise
                raise self._build_unknown_error(job_id) from error


class TrainJobs(KubernetesJobs):
    """The user's TrainJobs of Kubeflow Trainer in a namespace; they remain until they are deleted."""

    resource = TRAINER_API
    kind = "TrainJob"
    # Of the JobSet with the name of the TrainJob, through which Trainer creates the pods.
    label = "jobset.sigs.k8s.io/jobset-name"
    container = NODE_CONTAINER
    children = ("-node-0",)

    @override
    def create(self, body: Mapping[str, Any], *, is_dry_run: bool = False) -> Mapping[str, str]:
        try:
            return super().create(body, is_dry_run=is_dry_run)
        except self.cluster.response_error as error:
            if match := re.search(r'unknown field \\?"([\w.\[\]]+)', str(error.body)):
                raise UsageError(
                    f"Cannot submit a TrainJob: the Kubeflow Trainer of the cluster does not know {match[1]}. Set "
                    "it in the runtime instead, or set launcher.trainer_version to the version of the Trainer: '2.1', or '2.2' for 2.2 "
                    "and newer."
                ) from error
            raise


class JobSets(KubernetesJobs):
    """The user's JobSets in a namespace, each of one Job."""

    resource = JOB_SET_API
    kind = "JobSet"
    children = ("-node-0",)


def open_jobs(cluster: KubernetesCluster, *, kubeflow: bool = False, jobset: bool = False) -> KubernetesJobs:
    """Return the Jobs of a cluster, its TrainJobs or its JobSets."""
    return (TrainJobs if kubeflow else JobSets if jobset else KubernetesJobs)(cluster)


def _get_event_time(event: Any) -> float:
    at = event.last_timestamp or event.event_time or event.metadata.creation_timestamp
    return float(at.timestamp()) if at else 0.0


# The output of a job


class PodLogs(Log):
    """The output of all pods of a job; with several pods, each line begins with the name of its pod."""

    def __init__(self, jobs: KubernetesJobs, job: Job) -> None:
        self._jobs, self._job_id = jobs, job.id
        self._has_several_pods = job.hosts > 1
        self._read_at: dict[str, float] = {}
        self._restarts: dict[str, int] = {}
        self._last: dict[str, tuple[int, int]] = {}
        """The time of the last line of each pod, and the number of lines of that time."""

    @override
    def read(self) -> bytes:
        output, failure, self._complete = [], None, False
        with self._jobs.cluster.translate_errors(f"read the log of job {self._job_id}"):
            pods = self._jobs.list_pods(self._job_id)
        is_complete = True
        for pod in sorted(pods, key=get_index):
            if pod.status.phase == "Pending":
                continue
            prefix = encode_text(f"{self._job_id}-{get_index(pod)} | ") if self._has_several_pods else b""
            is_complete &= pod.status.phase in {"Succeeded", "Failed"}
            try:
                for lines in self._read_pod(pod):
                    is_complete &= not lines
                    output += [prefix + line + b"\n" for line in lines]
            except UnreachableError as error:
                # One node may be lost: the lines of the others are read, and kept.
                failure = error
        if failure is not None and not output:
            raise failure
        self._complete = is_complete and failure is None
        return b"".join(output)

    def _read_pod(self, pod: Any) -> Iterator[list[bytes]]:
        """Yield the new lines of a pod, those of a container that was restarted meanwhile first."""
        name, restarts = pod.metadata.name, count_restarts(pod, self._jobs.container)
        if restarts > self._restarts.get(name, 0):
            yield self._read_container(name, previous=True)
            self._restarts[name] = restarts
        yield self._read_container(name)

    def _read_container(self, name: str, *, previous: bool = False) -> list[bytes]:
        """Return the new lines of a container."""
        options: dict[str, Any] = {
            "timestamps": True,
            "container": self._jobs.container,
            "_preload_content": False,
        }
        now = time.monotonic()
        if name in self._read_at:
            options["since_seconds"] = math.ceil(now - self._read_at[name]) + _MARGIN_S
        cluster = self._jobs.cluster
        with cluster.translate_errors(f"read the log of pod {name}"):
            try:
                response = cluster.core.read_namespaced_pod_log(
                    name, cluster.namespace, previous=previous, _request_timeout=TIMEOUT_S, **options
                )
                data = response.data
            except cluster.response_error as error:
                # The container has not started, or the pod was deleted meanwhile.
                if error.status in {HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND}:
                    return []
                raise
        lines = self._drop_known(name, data.split(b"\n"))
        if not previous:
            self._read_at[name] = now
        return lines

    def _drop_known(self, name: str, lines: list[bytes]) -> list[bytes]:
        """Return the text of the lines that come after the last one that was read."""
        before, num_before = self._last.get(name, (0, 0))
        last, count = before, num_before
        new, num_skipped = [], 0
        for line in lines:
            stamp, _, text = line.partition(b" ")
            at = _parse_stamp(stamp)
            # None: the end of the log, or a message of the cluster.
            if at is None or at < before:
                continue
            if at == before and num_skipped < num_before:
                num_skipped += 1
                continue
            # The lines of two streams may be slightly out of order.
            if at >= last:
                last, count = (at, count + 1) if at == last else (at, 1)
            new.append(text)
        self._last[name] = (last, count)
        return new


def _parse_stamp(stamp: bytes) -> int | None:
    """Return the time of a log line in nanoseconds; None for other text."""
    if not (match := _STAMP.fullmatch(stamp)):
        return None
    seconds, fraction, zone = (part.decode("ascii") if part else "" for part in match.groups())
    at = dt.datetime.fromisoformat(seconds + zone.replace("Z", "+00:00"))
    return int(at.timestamp()) * 10**9 + int(f"{fraction:0<9}")


# Submission


def submit(plan: Plan) -> int:
    """Submit a job and return 0 if the plan detaches; otherwise follow it to its end and return its exit code."""
    job = plan.job
    assert isinstance(job, KubernetesJobPlan)
    section = job.section
    cluster = KubernetesCluster(section.context, section.namespace)
    jobs = open_jobs(cluster, kubeflow=section.kubeflow, jobset=section.jobset)
    name = name_job(job)
    archive, _ = read_source(job)
    manifests = render(job, name, format_user(), archive)
    try:
        _create(jobs, name, manifests)
    except UsageError as error:
        raise UsageError(name_keys(section, str(error))) from error
    return follow_submission(jobs, name, job)


def check(job: KubernetesJobPlan) -> None:
    """Let the cluster check the manifest of a job without creating it; print a note if that is not possible here.

    Raises:
        UsageError: The cluster rejects the manifest.
    """
    section = job.section
    if not has_kubeconfig():
        console.note("the manifest is not checked by the cluster: no kubeconfig here")
        return
    try:
        cluster = KubernetesCluster(section.context, section.namespace)
        jobs = open_jobs(cluster, kubeflow=section.kubeflow, jobset=section.jobset)
        *_, body = render(job, name_job(job), format_user(), b"" if job.sent else None)
        with cluster.translate_errors("check the job"):
            jobs.create(body, is_dry_run=True)
    except (UnreachableError, UsageError) as error:
        # Without a package, a connection or credentials, what would be sent is still shown.
        status = getattr(error.__cause__, "status", None)
        if isinstance(error, UsageError) and status not in {None, HTTPStatus.UNAUTHORIZED}:
            raise UsageError(name_keys(section, str(error))) from error
        console.note(f"the manifest is not checked by the cluster: {error}")


def _create(jobs: KubernetesJobs, name: str, manifests: list[dict[str, Any]]) -> None:
    """Create the objects of a job, or none of them; with the job, Kubernetes deletes the others."""
    *others, body = manifests
    cluster = jobs.cluster
    namespace, owner = cluster.namespace, None
    try:
        with cluster.translate_errors(f"submit job {name} to namespace {namespace}"):
            owner = jobs.create(body)
            calls = {
                "Service": cluster.core.create_namespaced_service,
                "ConfigMap": cluster.core.create_namespaced_config_map,
            }
            for other in others:
                metadata = {**other["metadata"], "ownerReferences": [owner]}
                calls[other["kind"]](namespace, {**other, "metadata": metadata}, _request_timeout=TIMEOUT_S)
    except BaseException as error:
        # An answer that did not arrive may have been that the job was created.
        if owner or cluster.was_sent(error):
            _withdraw(jobs, name)
        if isinstance(error, KeyboardInterrupt):
            console.note("The submission was interrupted, and the job was deleted.")
        raise


def _withdraw(jobs: KubernetesJobs, name: str) -> None:
    """Delete a job that may exist; print an error if that fails."""
    try:
        with jobs.cluster.translate_errors(f"delete job {name}"):
            try:
                jobs.delete(name)
            except jobs.cluster.response_error as error:
                if error.status != HTTPStatus.NOT_FOUND:
                    raise
    except AccelError as failure:
        console.error(
            f"job {name} may have been created, and was not deleted: {failure} Run {jobs.cluster.kubectl} delete "
            f"{jobs.kind.lower()} {name}."
        )


def describe_job(
    job: Mapping[str, Any], pods: Collection[Any], seen: Collection[Any], container: str, now: dt.datetime
) -> Job:
    """Return the state of a job.

    Args:
        job: A Job, a JobSet or a TrainJob, as the API returns it.
        pods: Its pods.
        seen: All its pods that were ever seen, in their last state.
        container: The name of the container that runs accel.
        now: The time.
    """
    metadata, spec, status = job["metadata"], job["spec"], job.get("status", {})
    conditions = {
        _CONDITIONS.get(item["type"], item["type"]): item
        for item in status.get("conditions", ())
        if item["status"] == "True"
    }
    ended = conditions.get("Complete") or conditions.get("Failed")
    state, reason = _describe_state(conditions, pods)
    exit_code = None
    if ended:
        exit_code, cause = (0, "") if "Complete" in conditions else _find_failure(seen, container)
        condition = ended.get("reason", "")
        shown = "" if condition == "BackoffLimitExceeded" else ended.get("message") or condition
        causes = (shown, cause) if condition == "DeadlineExceeded" else (cause, shown)
        reason = "" if exit_code == 0 else next(filter(None, causes), "a pod failed")
    elif "deletionTimestamp" in metadata:
        state, reason = "Terminating", ""
    elif state == "Running":
        reason = _describe_progress(status.get("trainerStatus", {}))
    # A TrainJob has no time of its start.
    start = _parse_time(status.get("startTime") or metadata["creationTimestamp"])
    elapsed = (_parse_time(ended["lastTransitionTime"]) if ended else now) - start
    nodes = list(
        dict.fromkeys(pod.spec.node_name for pod in sorted(pods, key=get_index) if pod.spec.node_name)
    )
    more = f" and {len(nodes) - _NUM_SHOWN} more" if len(nodes) > _NUM_SHOWN else ""
    return Job(
        id=metadata["name"],
        name=metadata["name"],
        state=state,
        finished=ended is not None,
        exit_code=exit_code,
        reason=reason,
        nodes=", ".join(nodes[:_NUM_SHOWN]) + more,
        restarts=status.get("restarts", 0) + max((count_restarts(pod, container) for pod in pods), default=0),
        submitted=metadata["creationTimestamp"],
        # The clock of the cluster may be ahead.
        elapsed=str(dt.timedelta(seconds=max(0, int(elapsed.total_seconds())))),
        hosts=_count_pods(spec),
    )


def _describe_progress(status: Mapping[str, Any]) -> str:
    """Return the progress in the status of a TrainJob, as its script or accel reports it; empty without one."""
    percent, seconds = status.get("progressPercentage"), status.get("estimatedRemainingSeconds")
    parts = [
        "" if percent is None else f"{percent} % done",
        "" if seconds is None else f"{console.format_duration(seconds)} left",
    ]
    return ", ".join(filter(None, parts))


def _count_pods(spec: Mapping[str, Any]) -> int:
    if "replicatedJobs" in spec:
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    return int(spec.get("completions") or spec.get("trainer", {}).get("numNodes", 1))


def _parse_time(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text)


def _describe_state(conditions: Mapping[str, Any], pods: Collection[Any]) -> tuple[str, str]:
    """Return the state of a job, and why it waits."""
    for name in ("Complete", "Failed", "Suspended"):
        if name in conditions:
            return name, conditions[name].get("message", "")
    if "FailureTarget" in conditions:
        return "Failing", ""
    waits = [reason for pod in pods if (reason := _find_obstacle(pod))]
    if waits or not pods or any(pod.status.phase == "Pending" for pod in pods):
        return "Pending", waits[0] if waits else ""
    return "Running", ""


def describe_placement(pods: Collection[Any], reason: str) -> str:
    """Return why a job waits, after the number of pods that hold their resources until the others are placed."""
    num_running = sum(pod.status.phase == "Running" for pod in pods)
    if not (num_running and reason):
        return reason
    return f"{num_running} of {len(pods)} pods run and wait for the others; {reason}"


def _find_obstacle(pod: Any) -> str:
    """Return why a pod does not start; empty if it runs, or is about to."""
    for status in (*(pod.status.init_container_statuses or ()), *(pod.status.container_statuses or ())):
        waiting = status.state.waiting if status.state else None
        if waiting and waiting.reason not in {None, *_STARTING}:
            # The cause of a restart is that of the last end.
            ended = status.last_state.terminated if status.last_state else None
            text = (ended and ended.message) or waiting.message
            return (
                f"{waiting.reason}: {text.strip().splitlines()[0]}"
                if text and text.strip()
                else waiting.reason
            )
    for item in pod.status.conditions or ():
        if item.type == "PodScheduled" and item.status == "False" and item.message:
            return f"{item.reason}: {item.message}"
    return ""


def _find_failure(pods: Collection[Any], container: str) -> tuple[int, str]:
    """Return the exit code of the pod that failed first, and the reason that it left."""
    failures = []
    # A pod that was replaced is not the cause.
    newest = {get_index(pod): pod for pod in sorted(pods, key=_get_creation)}
    for index, pod in newest.items():
        ended = _get_failed_end(pod, container)
        disruption = _find_disruption(pod)
        if not (ended or disruption):
            continue
        lines = ((ended and ended.message) or "").strip().splitlines()
        at = ended.finished_at.timestamp() if ended and ended.finished_at else math.inf
        # The agent of the pod with the first failure leaves a message; the others end because of it.
        order = (not disruption, not lines, at, index)
        code = ended.exit_code if ended else 1
        if disruption:
            text = f"pod {index} was disrupted: {disruption}"
        elif lines:
            text = lines[0]
        else:
            cause = "" if ended.reason in {None, "Error"} else f" ({ended.reason})"
            text = f"the container of pod {index} exited with code {code}{cause}"
        failures.append((order, code, text))
    if not failures:
        return 1, ""
    _, code, text = min(failures)
    return code, text


def keep_failure(old: Any, new: Any, container: str) -> Any:
    """Return the new state of a pod; a failure that left a message remains its last end if later ones left none."""
    before, after = _get_failed_end(old, container), _get_failed_end(new, container)
    if before and before.message and not (after and after.message):
        for status in new.status.container_statuses or ():
            if status.name == container and status.last_state:
                status.last_state.terminated = before
    return new


def _get_failed_end(pod: Any, container: str) -> Any:
    """Return an end of the container of a pod with an exit code above 0, the last that left a message; None without one."""
    states = [
        state
        for status in pod.status.container_statuses or ()
        if status.name == container
        for state in (status.state, status.last_state)
        if state and state.terminated and state.terminated.exit_code
    ]
    # A container that was restarted may have been ended by the cluster after the failure of the one before.
    return next((state.terminated for state in (*(s for s in states if s.terminated.message), *states)), None)


def _find_disruption(pod: Any) -> str:
    """Return why the cluster ended a pod, such as an eviction; empty if it did not."""
    if pod.status.phase == "Failed" and pod.status.reason:
        return ": ".join(filter(None, (pod.status.reason, pod.status.message)))
    for item in pod.status.conditions or ():
        if item.type == "DisruptionTarget" and item.status == "True":
            return ": ".join(filter(None, (item.reason, item.message)))
    return ""


def count_restarts(pod: Any, container: str) -> int:
    """Return how often the cluster has restarted the container of a pod."""
    counts = [item.restart_count for item in pod.status.container_statuses or () if item.name == container]
    return int(counts[0]) if counts else 0


def get_index(pod: Any) -> int:
    """Return the completion index of a pod."""
    return int((pod.metadata.annotations or {}).get("batch.kubernetes.io/job-completion-index", 0))


def _get_creation(pod: Any) -> float:
    created = pod.metadata.creation_timestamp
    return float(created.timestamp()) if created else 0.0
