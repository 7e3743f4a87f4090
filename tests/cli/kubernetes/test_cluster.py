"""The state of jobs from the objects of the client, and logs that are read in parts."""

import datetime as dt

import pytest
from kubernetes.client import ApiClient

from accel_cli.kubernetes.cluster import PodLogs, parse_job

NOW = dt.datetime(2026, 1, 2, 3, 5, tzinfo=dt.timezone.utc)
EARLY, LATE = "2026-01-02T03:04:05Z", "2026-01-02T03:04:15Z"


class Answer:
    """An answer of the cluster, as the client reads it."""

    def __init__(self, data):
        self.data = data

    @staticmethod
    def read(kind, content):
        return ApiClient()._ApiClient__deserialize(content, kind)


def job(conditions=(), **status):
    conditions = [{"status": "True", "lastTransitionTime": LATE, **item} for item in conditions]
    metadata = {"name": "run-x", "namespace": "team", "creationTimestamp": EARLY}
    status = {"startTime": EARLY, "conditions": conditions, **status}
    spec = {"template": {}, "completions": 2}
    return Answer.read("V1Job", {"metadata": metadata, "spec": spec, "status": status})


def pod(index, phase="Running", state=None, conditions=()):
    container = {
        "name": "accel",
        "image": "",
        "imageID": "",
        "ready": True,
        "restartCount": 0,
        "state": state or {},
    }
    metadata = {
        "name": f"run-x-{index}",
        "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
    }
    status = {"phase": phase, "containerStatuses": [container], "conditions": list(conditions)}
    spec = {"nodeName": f"node{index}", "containers": [{"name": "accel"}]}
    return Answer.read("V1Pod", {"metadata": metadata, "spec": spec, "status": status})


def failed(index, code, at=EARLY, **more):
    return pod(index, "Failed", {"terminated": {"exitCode": code, "finishedAt": at, **more}})


FAILED = job([{"type": "Failed", "reason": "BackoffLimitExceeded", "message": "limit"}])


@pytest.mark.parametrize(
    ("job", "pods", "state", "code", "reason"),
    [
        (job(), [], "Pending", None, ""),
        (job(), [pod(0), pod(1, "Pending", {"waiting": {"reason": "ContainerCreating"}})], "Pending", None, ""),
        (job(), [pod(0), pod(1, "Pending", {"waiting": {"reason": "ImagePullBackOff", "message": "no image"}})], "Pending",
         None, "ImagePullBackOff: no image"),
        (job(), [pod(0, "Pending", conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
         "message": "0/4 nodes"}])], "Pending", None, "Unschedulable: 0/4 nodes"),
        (job(), [pod(0), pod(1)], "Running", None, ""),
        (job([{"type": "Suspended", "message": "in a queue"}]), [], "Suspended", None, "in a queue"),
        (job([{"type": "Complete"}]), [], "Complete", 0, ""),
        (job([{"type": "FailureTarget"}]), [failed(1, 7)], "Failing", None, ""),
        (FAILED, [failed(0, 143), failed(1, 7, LATE, message="exit code 7 on run-x-1\nline 2")], "Failed", 7, "exit code 7 on run-x-1"),
        (FAILED, [failed(0, 1, LATE), failed(1, 7, EARLY)], "Failed", 7, "the container of pod 1 exited with code 7"),
        (FAILED, [failed(0, 137, reason="OOMKilled")], "Failed", 137, "the container of pod 0 exited with code 137 (OOMKilled)"),
        (job([{"type": "Failed", "reason": "DeadlineExceeded", "message": "too long"}]), [], "Failed", 1, "too long"),
        (FAILED, [], "Failed", 1, "a pod failed"),
    ],
)  # fmt: skip
def test_the_state_and_exit_code_of_a_job_are_those_of_its_pods(job, pods, state, code, reason):
    read = parse_job(job, pods, NOW)
    assert (read.state, read.exit_code, read.reason, read.finished) == (state, code, reason, code is not None)
    assert read.elapsed == ("0:00:10" if code is not None else "0:00:55")


def test_lines_that_were_read_before_are_left_out():
    logs = PodLogs(None, "run-x")
    first = [
        b"2026-01-02T03:04:05.5Z a",
        b"2026-01-02T03:04:05.500000001Z b",
        b"2026-01-02T03:04:05.500000001Z b",
        b"",
    ]
    assert logs._drop_known("p", first) == [b"a", b"b", b"b"]
    more = [*first[1:3], b"2026-01-02T03:04:05.500000001Z c", b"2026-01-02T03:04:06Z d e"]
    assert logs._drop_known("p", more) == [b"c", b"d e"]
    assert logs._drop_known("p", more) == []
    assert logs._drop_known("q", more[-1:]) == [b"d e"]
