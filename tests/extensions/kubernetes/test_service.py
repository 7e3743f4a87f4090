"""The state of jobs from the objects of the client, and logs that are read in parts."""

import datetime as dt
from types import SimpleNamespace

import pytest
from kubernetes.client import ApiClient, ApiException

from accel_cli.errors import UsageError
from accel_cli.extensions.kubernetes.cluster import KubernetesCluster
from accel_cli.extensions.kubernetes.service import KubernetesJobs, PodLogs, TrainJobs, describe_job
from accel_cli.launchers.job_service import Job, UnreachableError

NOW = dt.datetime(2026, 1, 2, 3, 5, tzinfo=dt.UTC)
EARLY, LATE = "2026-01-02T03:04:05Z", "2026-01-02T03:04:15Z"
OURS = {"app.kubernetes.io/managed-by": "accel"}
RUN = Job("run-x", "run-x", "Running", finished=False, hosts=2)


def read(kind, content):
    """Return an object of the client, as it reads it from an answer."""
    return ApiClient()._ApiClient__deserialize(content, kind)


def conditions(*items):
    return [{"status": "True", "lastTransitionTime": LATE, **item} for item in items]


def job(*items, spec=None, **status):
    """Return a Job of two pods, as the API returns it."""
    metadata = {"name": "run-x", "namespace": "team", "creationTimestamp": EARLY, "labels": OURS}
    status = {"startTime": EARLY, "conditions": conditions(*items), **status}
    return {"metadata": metadata, "spec": spec or {"completions": 2}, "status": status}


def train_job(*items):
    content = job(*items, spec={"trainer": {"numNodes": 2}})
    del content["status"]["startTime"]
    return content


def pod(
    index,
    phase="Running",
    state=None,
    conditions=(),
    *,
    container="accel",
    **status,
):
    """Return a pod; `restarts`, `last` and `at` are the number of restarts, the state before the last, and the creation."""
    restarts, last, at = status.pop("restarts", 0), status.pop("last", None), status.pop("at", EARLY)
    own = {
        "name": container,
        "image": "",
        "imageID": "",
        "ready": True,
        "restartCount": restarts,
        "state": state or {},
        "lastState": last or {},
    }
    metadata = {
        "name": f"run-x-{index}",
        "uid": f"uid-{index}-{at}",
        "creationTimestamp": at,
        "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
    }
    status = {"phase": phase, "containerStatuses": [own], "conditions": list(conditions), **status}
    # A service mesh may put its own container first.
    spec = {"nodeName": f"node{index}", "containers": [{"name": "proxy"}, {"name": container}]}
    return read("V1Pod", {"metadata": metadata, "spec": spec, "status": status})


def ended(code, at=EARLY, **more):
    return {"terminated": {"exitCode": code, "finishedAt": at, **more}}


def failed(index, code, at=EARLY, **more):
    return pod(index, "Failed", ended(code, at, **more))


FAILED = [{"type": "Failed", "reason": "BackoffLimitExceeded", "message": "limit"}]
EVICTED = {"reason": "Evicted", "message": "The node was low on resource: memory."}
DISRUPTED = [
    {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "drained"}
]


@pytest.mark.parametrize(
    ("items", "pods", "state", "code", "reason"),
    [
        ([], [], "Pending", None, ""),
        ([], [pod(0), pod(1, "Pending", {"waiting": {"reason": "ContainerCreating"}})], "Pending", None, ""),
        ([], [pod(0), pod(1, "Pending", {"waiting": {"reason": "ImagePullBackOff", "message": "no image"}})], "Pending",
         None, "ImagePullBackOff: no image"),
        ([], [pod(0, "Pending", conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
         "message": "0/4 nodes"}])], "Pending", None, "Unschedulable: 0/4 nodes"),
        ([], [pod(0, "Pending", initContainerStatuses=[{"name": "mesh", "image": "", "imageID": "", "ready": False,
         "restartCount": 0, "state": {"waiting": {"reason": "ErrImagePull"}}}])], "Pending", None, "ErrImagePull"),
        ([], [pod(0), pod(1)], "Running", None, ""),
        ([{"type": "Suspended", "message": "in a queue"}], [], "Suspended", None, "in a queue"),
        ([{"type": "Complete"}], [], "Complete", 0, ""),
        ([{"type": "FailureTarget"}], [failed(1, 7)], "Failing", None, ""),
        (FAILED, [failed(0, 143), failed(1, 7, LATE, message="exit code 7 on run-x-1\nline 2")], "Failed", 7, "exit code 7 on run-x-1"),
        (FAILED, [failed(0, 1, LATE), failed(1, 7, EARLY)], "Failed", 7, "the container of pod 1 exited with code 7"),
        (FAILED, [failed(0, 137, reason="OOMKilled")], "Failed", 137, "the container of pod 0 exited with code 137 (OOMKilled)"),
        ([{"type": "Failed", "reason": "DeadlineExceeded", "message": "too long"}], [failed(0, 143, message="stopped")], "Failed", 143,
         "too long"),
        (FAILED, [], "Failed", 1, "a pod failed"),
        # Evictions: without a state of the container, and of a pod that had time to save.
        (FAILED, [pod(0), pod(1, "Failed", **EVICTED)], "Failed", 1,
         "pod 1 was disrupted: Evicted: The node was low on resource: memory."),
        (FAILED, [failed(0, 1, message="rank 1 is gone"), pod(1, "Failed", ended(143), DISRUPTED)], "Failed", 143,
         "pod 1 was disrupted: EvictionByEvictionAPI: drained"),
        # A pod that was lost and replaced is not the cause.
        (FAILED, [pod(1, "Failed", ended(137), DISRUPTED), failed(0, 7, message="the cause"), pod(1, at=LATE)], "Failed", 7,
         "the cause"),
    ],
)  # fmt: skip
def test_the_state_and_exit_code_of_a_job_are_those_of_its_pods(items, pods, state, code, reason):
    described = describe_job(job(*items), pods, pods, "accel", NOW)
    assert (described.state, described.exit_code, described.reason) == (state, code, reason)
    assert described.finished == (code is not None)
    assert described.elapsed == ("0:00:10" if code is not None else "0:00:55")


def test_the_state_of_a_train_job_is_that_of_its_conditions_and_of_the_pods_that_were_seen():
    running = pod(1, container="node", restarts=2, last=ended(7, message="exit code 7\nmore"))
    status = train_job()
    described = describe_job(status, [running], [running], "node", NOW)
    assert (described.state, described.restarts, described.hosts) == ("Running", 2, 2)
    failed = train_job({"type": "Failed", "reason": "FailedJobs", "message": "jobset failed"})
    described = describe_job(failed, [], [running], "node", NOW)
    assert (described.state, described.exit_code, described.reason) == ("Failed", 7, "exit code 7")
    assert (described.finished, described.elapsed) == (True, "0:00:10")
    assert describe_job(failed, [], [], "node", NOW).reason == "jobset failed"
    done = train_job({"type": "Complete", "message": "jobset completed"})
    assert describe_job(done, [], [], "node", NOW).exit_code == 0
    waiting = pod(
        0,
        state={"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
        last=ended(7, message="exit code 7"),
    )
    assert describe_job(status, [waiting], [], "node", NOW).reason == "CrashLoopBackOff: exit code 7"


def test_a_clock_of_the_cluster_that_is_ahead_makes_no_negative_duration():
    assert describe_job(job(), [], [], "accel", NOW - dt.timedelta(hours=1)).elapsed == "0:00:00"


# A cluster in memory, for what a server would do only after minutes


class Response(SimpleNamespace):
    def __init__(self, text):
        super().__init__(data=text)


class FakeCluster:
    """A cluster whose answers are those of functions; its errors are translated as those of a real one."""

    namespace, kubectl, response_error = "team", "kubectl", ApiException
    translate_errors, _translate_response = (
        KubernetesCluster.translate_errors,
        KubernetesCluster._translate_response,
    )

    def __init__(self, pods, log=None, **core):
        import kubernetes

        self._sdk = kubernetes
        self.core = SimpleNamespace(
            list_namespaced_pod=lambda *_, **__: SimpleNamespace(items=pods),
            read_namespaced_pod_log=log,
            **core,
        )
        self.custom = SimpleNamespace(get_namespaced_custom_object=lambda **_: self.job)


def error(status, text=""):
    return ApiException(status=status, reason=text)


def test_lines_that_were_read_before_are_left_out():
    logs = PodLogs(None, RUN)
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


def test_messages_of_the_cluster_in_a_log_and_another_time_zone_hide_no_line():
    logs = PodLogs(None, RUN)
    first = [
        b"2026-01-02T04:04:05.5+01:00 a",
        b"unable to retrieve container logs for containerd://3f",
        b"failed to try",
    ]
    assert logs._drop_known("p", first) == [b"a"]
    # Out of order by a little, as two streams of a container may be.
    more = [b"2026-01-02T03:04:05.5Z a", b"2026-01-02T03:04:07Z c", b"2026-01-02T03:04:06Z b"]
    assert logs._drop_known("p", more) == [b"c", b"b"]


def test_a_pod_whose_node_is_lost_hides_no_line_of_the_others():
    texts = {"run-x-0": b"2026-01-02T03:04:05Z a\n", "run-x-1": error(500, "dial tcp: i/o timeout")}

    def log(name, *_, **options):
        assert options["container"] == "accel"
        if isinstance(texts[name], Exception):
            raise texts[name]
        return Response(texts[name])

    logs = PodLogs(KubernetesJobs(FakeCluster([pod(0), pod(1)], log)), RUN)
    assert logs.read() == b"run-x-0 | a\n"
    with pytest.raises(
        UnreachableError, match=r"log of pod run-x-1: the cluster does not answer: 500 dial tcp"
    ):
        logs.read()
    texts["run-x-1"] = b"2026-01-02T03:04:05Z b\n"
    assert logs.read() == b"run-x-1 | b\n"


def test_the_last_lines_of_a_container_that_was_restarted_are_read():
    current, restarted = b"2026-01-02T03:04:05Z a\n", b""

    def log(*_, previous, **__):
        return Response(restarted if previous else current)

    pods = [pod(0, container="node")]
    logs = PodLogs(TrainJobs(FakeCluster(pods, log)), RUN)
    assert logs.read() == b"run-x-0 | a\n"
    current, restarted = b"2026-01-02T03:04:09Z c\n", current + b"2026-01-02T03:04:06Z b\n"
    pods[0] = pod(0, container="node", restarts=1)
    assert logs.read() == b"run-x-0 | b\nrun-x-0 | c\n"
    assert logs.read() == b""


def event(kind, reason, at):
    content = {"type": kind, "reason": reason, "message": f"{reason} of\nx", "lastTimestamp": at}
    return read("CoreV1Event", {**content, "metadata": {"name": "e"}, "involvedObject": {}})


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        (
            [event("Normal", "Scheduled", EARLY), event("Warning", "FailedMount", LATE)],
            # The pod that runs holds its resources meanwhile.
            "1 of 2 pods run and wait for the others; FailedMount: FailedMount of x",
        ),
        ([event("Warning", "FailedMount", EARLY), event("Normal", "Pulling", LATE)], ""),
        ([event("Warning", "FailedScheduling", EARLY), event("Normal", "Scheduled", EARLY)], ""),
        ([], ""),
        (error(403), ""),
    ],
)
def test_a_pod_that_waits_without_a_reason_has_that_of_its_newest_event(events, reason):
    def list_events(*_, field_selector, **__):
        assert field_selector == "involvedObject.name=run-x-1"
        if isinstance(events, Exception):
            raise events
        return SimpleNamespace(items=events)

    waiting = pod(1, "Pending", {"waiting": {"reason": "ContainerCreating"}})
    cluster = FakeCluster([pod(0), waiting], list_namespaced_event=list_events)
    cluster.job = job()
    found = KubernetesJobs(cluster).status("run-x")
    assert (found.state, found.reason) == ("Pending", reason)


def test_a_job_of_others_is_not_used():
    cluster = FakeCluster([])
    cluster.job = job()
    del cluster.job["metadata"]["labels"]
    with pytest.raises(UsageError, match="accel did not submit it"):
        KubernetesJobs(cluster).status("run-x")


def test_the_failure_of_a_pod_that_was_deleted_meanwhile_is_known():
    pods = [pod(0, "Running", ended(143), DISRUPTED)]
    cluster = FakeCluster(pods, lambda *_, **__: Response(b""))
    cluster.job, jobs = job(), KubernetesJobs(cluster)
    jobs.open_log(jobs.status("run-x")).read()
    pods.clear()
    cluster.job = job(*FAILED)
    found = jobs.status("run-x")
    assert (found.exit_code, found.reason) == (143, "pod 0 was disrupted: EvictionByEvictionAPI: drained")


def test_the_state_of_a_job_set_is_that_of_its_conditions_and_counts_its_restarts():
    def describe(*conditions):
        spec = {"replicatedJobs": [{"template": {"spec": {"completions": 2}}}]}
        status = {"restarts": 1, "conditions": list(conditions)}
        return describe_job({**job(), "spec": spec, "status": status}, [pod(0)], [pod(0)], "accel", NOW)

    def condition(kind, status="True"):
        return {"type": kind, "status": status, "lastTransitionTime": LATE, "message": f"jobset {kind}"}

    assert (describe().state, describe().restarts, describe().hosts) == ("Running", 1, 2)
    ended = describe(condition("StartupPolicyCompleted"), condition("Completed"))
    assert (ended.state, ended.finished, ended.exit_code) == ("Complete", True, 0)
    failed = describe(condition("Completed", "False"), condition("Failed"))
    assert (failed.state, failed.exit_code, failed.reason) == ("Failed", 1, "jobset Failed")


def test_a_failure_that_left_a_message_is_that_of_its_pod_after_restarts_that_left_none():
    pods = [pod(0, container="node", restarts=1, last=ended(7, message="exit code 7"))]
    jobs = TrainJobs(FakeCluster(pods))
    jobs.list_pods("run-x")
    pods[:] = [pod(0, state=ended(143), container="node", restarts=2, last=ended(1))]
    (found,) = jobs.list_pods("run-x")
    status = train_job({"type": "Failed", "reason": "FailedJobs"})
    described = describe_job(status, [], [found], "node", NOW)
    assert (described.exit_code, described.reason) == (7, "exit code 7")
