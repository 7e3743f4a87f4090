"""The state of a job, from the object of the cluster and its pods: exit code, reason, and why it waits."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accel_cli.jobs.base import Job
from accel_cli.kubernetes.manifests import MANAGED_BY

__all__ = [
    "Condition",
    "JobStatus",
    "count_restarts",
    "describe_job",
    "get_index",
    "keep_failure",
    "read_job",
    "read_train_job",
]

_NUM_SHOWN = 4
_STARTING = frozenset({"ContainerCreating", "PodInitializing"})
"""Reasons of a container that waits and need no attention."""
_OWN_REASONS = frozenset({"DeadlineExceeded"})
"""Reasons of a failed job that are causes, whatever the exit codes of its pods."""


@dataclass(frozen=True)
class Condition:
    """A condition of a job that is true."""

    reason: str = ""
    message: str = ""
    at: dt.datetime | None = None


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """The state of a Job or a TrainJob, without that of its pods."""

    name: str
    namespace: str
    conditions: Mapping[str, Condition]
    nnodes: int
    submitted: dt.datetime | None
    start: dt.datetime | None
    is_owned: bool
    """True if accel has submitted it."""
    is_deleted: bool
    """True if its deletion has begun."""


def read_job(job: Any) -> JobStatus:
    """Return the state of a Job from the object of the client."""
    metadata, status = job.metadata, job.status
    return JobStatus(
        name=metadata.name,
        namespace=metadata.namespace,
        conditions={
            item.type: Condition(item.reason or "", item.message or "", item.last_transition_time)
            for item in status.conditions or ()
            if item.status == "True"
        },
        nnodes=job.spec.completions or 1,
        submitted=metadata.creation_timestamp,
        start=status.start_time,
        is_owned=(metadata.labels or {}).get(MANAGED_BY) == "accel",
        is_deleted=metadata.deletion_timestamp is not None,
    )


def read_train_job(job: Mapping[str, Any]) -> JobStatus:
    """Return the state of a TrainJob, of which the client has no class."""
    metadata, spec = job["metadata"], job["spec"]
    submitted = _parse_instant(metadata.get("creationTimestamp"))
    return JobStatus(
        name=metadata["name"],
        namespace=metadata["namespace"],
        conditions={
            item["type"]: Condition(
                item.get("reason", ""),
                item.get("message", ""),
                _parse_instant(item.get("lastTransitionTime")),
            )
            for item in job.get("status", {}).get("conditions", ())
            if item["status"] == "True"
        },
        nnodes=spec.get("trainer", {}).get("numNodes", 1),
        submitted=submitted,
        start=submitted,
        is_owned=metadata.get("labels", {}).get(MANAGED_BY) == "accel",
        is_deleted="deletionTimestamp" in metadata,
    )


def _parse_instant(text: str | None) -> dt.datetime | None:
    return dt.datetime.fromisoformat(text.replace("Z", "+00:00")) if text else None


def describe_job(
    status: JobStatus, pods: list[Any], seen: list[Any], container: str, now: dt.datetime
) -> Job:
    """Return the state of a job.

    Args:
        status: That of the job's object.
        pods: Its pods.
        seen: All its pods that were ever seen, in their last state.
        container: The name of the container that runs accel.
        now: The time.
    """
    conditions = status.conditions
    ended = conditions.get("Complete") or conditions.get("Failed")
    state, reason = _describe_state(conditions, pods)
    exit_code = None
    if ended:
        exit_code, cause = (0, "") if "Complete" in conditions else _find_failure(seen, container)
        shown = "" if ended.reason == "BackoffLimitExceeded" else ended.message or ended.reason
        causes = (shown, cause) if ended.reason in _OWN_REASONS else (cause, shown)
        reason = "" if exit_code == 0 else next(filter(None, causes), "a pod failed")
    elif status.is_deleted:
        state, reason = "Terminating", ""
    elapsed = int((((ended and ended.at) or now) - status.start).total_seconds()) if status.start else None
    nodes = list(
        dict.fromkeys(pod.spec.node_name for pod in sorted(pods, key=get_index) if pod.spec.node_name)
    )
    more = f" and {len(nodes) - _NUM_SHOWN} more" if len(nodes) > _NUM_SHOWN else ""
    return Job(
        id=status.name,
        name=status.name,
        state=state,
        finished=ended is not None,
        exit_code=exit_code,
        reason=reason,
        nodes=", ".join(nodes[:_NUM_SHOWN]) + more,
        restarts=max((count_restarts(pod, container) for pod in pods), default=0),
        submitted=status.submitted.isoformat() if status.submitted else "",
        # The clock of the cluster may be ahead.
        elapsed="" if elapsed is None else str(dt.timedelta(seconds=max(0, elapsed))),
        hosts=status.nnodes,
    )


def _describe_state(conditions: Mapping[str, Condition], pods: list[Any]) -> tuple[str, str]:
    """Return the state of a job, and why it waits."""
    for name in ("Complete", "Failed", "Suspended"):
        if name in conditions:
            return name, conditions[name].message
    if "FailureTarget" in conditions:
        return "Failing", ""
    waits = [reason for pod in pods if (reason := _find_obstacle(pod))]
    if waits or not pods or any(pod.status.phase == "Pending" for pod in pods):
        return "Pending", waits[0] if waits else ""
    return "Running", ""


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


def _find_failure(pods: list[Any], container: str) -> tuple[int, str]:
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
