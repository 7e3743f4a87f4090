"""The state of a job, from the object of the cluster and its pods: exit code, reason, and why it waits."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Collection, Mapping
from typing import Any

from accel_cli.launchers.jobs import Job

__all__ = ["count_restarts", "describe_job", "describe_placement", "get_index", "keep_failure"]

_NUM_SHOWN = 4
_CONDITIONS = {"Completed": "Complete"}
"""The conditions of a JobSet that a Job has under another name."""
_STARTING = frozenset({"ContainerCreating", "PodInitializing"})
"""Reasons of a container that waits and need no attention."""


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


def _count_pods(spec: Mapping[str, Any]) -> int:
    if "replicatedJobs" in spec:
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    return int(spec.get("completions") or spec.get("trainer", {}).get("numNodes", 1))


def _parse_time(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text.replace("Z", "+00:00"))


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
