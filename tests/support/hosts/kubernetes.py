"""A Kubernetes API server for tests: it checks and stores objects over HTTP, and runs the container of each pod as a process.

It has one namespace, and imitates the controllers of Jobs as far as the launcher needs them: indexes, host names, failed
jobs whose other pods are deleted, disruptions, and deletion. It also imitates Kubeflow Trainer with its runtime
`torch-distributed`: a TrainJob changes the pods of the runtime, whose containers are restarted in place, and which have the
variables of Trainer's plugin for torch. Of JobSet it imitates the restart of all pods after a disruption. Each pod has a folder instead of a file system of its own: the paths of its mounts are
replaced by that of a folder in the command, its arguments and its variables. With `hosts`, each pod is in a network
namespace, and the name of a pod resolves once it runs.
"""

from __future__ import annotations

import base64
import copy
import datetime as dt
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import yaml
from support.launchers import job_set_schema, train_job_schema

TOKEN = "a-token-of-the-tests"
INDEX = "batch.kubernetes.io/job-completion-index"
ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
PATHS = re.compile(
    r"/(?:api/v1|apis/batch/v1|apis/trainer.kubeflow.org/v1alpha1|apis/jobset.x-k8s.io/v1alpha2)/namespaces/team/(\w+)(?:/([\w.-]+))?(/log)?"
)
TERMINATION_LOG = "/dev/termination-log"
BACK_OFF_S = 1.0
"""Seconds until a container that failed is started again; ten in a cluster, and longer each time."""
RUNTIME = {
    "metadata": {"labels": {}},
    "spec": {
        # The default of JobSet.
        "restartPolicy": "OnFailure",
        "containers": [{"name": "node", "image": "pytorch/pytorch"}],
    },
}
"""The pods of the runtime `torch-distributed`."""


class ApiError(Exception):
    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


class Pod:
    """A pod, and the process of its container."""

    def __init__(self, server, job, index):
        self.server, self.index, self.job = server, index, job
        template, name, self.subdomain = server.build_pod(job)
        self.hostname = f"{name}-{index}"
        self.annotations = {INDEX: str(index), ATTEMPT: str(job["status"].get("restarts", 0))}
        self.labels = {**template["metadata"]["labels"], "job-name": name}
        self.name, self.uid, self.created = (
            f"{self.hostname}-{uuid.uuid4().hex[:5]}",
            str(uuid.uuid4()),
            stamp(),
        )
        self.spec = template["spec"]
        self.container = self.spec["containers"][0]
        self.folder = server.folder / self.name
        self.lines, self.previous_lines, self.restarts, self.last_state = [], [], 0, {}
        self.process, self.conditions, self.code, self.ended_at, self.is_ending = None, [], None, None, False
        self.failure, self.lock = self.folder / "termination-log", threading.Lock()

    def start(self):
        """Run the container; like a kubelet, wait until the ConfigMaps and Secrets of its volumes exist."""
        self.folder.mkdir()
        mounts = {self.container.get("terminationMessagePath", TERMINATION_LOG): self.failure}
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        for number, mount in enumerate(self.container["volumeMounts"]):
            folder = self.folder / f"mount{number}"
            folder.mkdir()
            mounts[mount["mountPath"]] = folder
            volume = volumes[mount["name"]]
            if config := volume.get("configMap"):
                for key, text in self.server.wait_for_data(config["name"], self.job).items():
                    (folder / key).write_bytes(base64.b64decode(text))
            if "secret" in volume and volume["secret"]["secretName"] not in self.server.secrets:
                name = volume["secret"]["secretName"]
                self.server.warn(
                    self.name, "FailedMount", f'MountVolume.SetUp failed: secret "{name}" not found'
                )
                return

        variables = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "JOB_COMPLETION_INDEX": str(self.index),
        }
        for item in self.container["env"]:
            reference = item.get("valueFrom", {})
            if "secretKeyRef" in reference:
                wanted = reference["secretKeyRef"]
                variables[item["name"]] = self.server.secrets[wanted["name"]][wanted["key"]]
            elif "fieldRef" in reference:
                path = re.fullmatch(r"metadata\.annotations\['(.+)'\]", reference["fieldRef"]["fieldPath"])
                variables[item["name"]] = self.annotations[path[1]]
            else:
                variables[item["name"]] = item["value"]

        def read(text):
            text = re.sub(
                r"\$\$|\$\((\w+)\)",
                lambda match: variables.get(match[1], match[0]) if match[1] else "$",
                text,
            )
            for path, folder in mounts.items():
                text = text.replace(path, str(folder))
            return text

        command = [*map(read, self.container["command"]), *map(read, self.container["args"])]
        environ = {name: read(value) for name, value in variables.items()}
        self.command, self.environ = [*self.server.enter(self), *command], environ
        self.run()

    def run(self):
        self.failure.write_text("")
        self.code = None
        self.process = subprocess.Popen(
            self.command, cwd=self.folder, env=self.environ, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        process = self.process
        with process.stdout:
            for line in process.stdout:
                now = dt.datetime.now(dt.UTC)
                self.lines.append((now, f"{now:%Y-%m-%dT%H:%M:%S.%f}000Z ".encode() + line))
        code = process.wait()
        self.ended_at, self.code = stamp(), code if code >= 0 else 128 - code
        if self.code and self.spec["restartPolicy"] == "OnFailure" and not self.is_ending:
            self._restart()

    def _restart(self):
        self.last_state = self._describe_end()
        end = time.monotonic() + BACK_OFF_S
        while time.monotonic() < end:
            if self.is_ending:
                return
            time.sleep(0.05)
        with self.lock:
            if not self.is_ending:
                self.previous_lines, self.lines = self.lines, []
                self.restarts += 1
                self.run()

    def end(self):
        """Send SIGTERM, and SIGKILL when the time for the end is over."""
        with self.lock:
            self.is_ending = True
        if self.process and self.code is None:
            self.process.terminate()
            try:
                self.process.wait(self.spec.get("terminationGracePeriodSeconds", 30))
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
        while self.process and self.code is None:
            time.sleep(0.05)

    def disrupt(self, reason="DeletionByTaintManager"):
        """End it at once, as the loss of its node does."""
        self.conditions = [
            {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "node lost"}
        ]
        os.killpg(self.process.pid, signal.SIGKILL)

    def _describe_end(self):
        ended = {
            "exitCode": self.code,
            "finishedAt": self.ended_at,
            "message": self.failure.read_text(),
            "reason": "Error",
        }
        return {"terminated": ended}

    def show(self):
        state, phase = {"waiting": {"reason": "ContainerCreating"}}, "Pending"
        if self.process:
            state, phase = {"running": {"startedAt": stamp()}}, "Running"
        if self.code is not None:
            phase, state = "Failed" if self.code else "Succeeded", self._describe_end()
            if self.code and self.spec["restartPolicy"] == "OnFailure" and not self.is_ending:
                phase = "Running"
                state = {
                    "waiting": {
                        "reason": "CrashLoopBackOff",
                        "message": "back-off restarting failed container",
                    }
                }
        status = {
            "name": self.container["name"],
            "image": "x",
            "imageID": "x",
            "ready": False,
            "restartCount": self.restarts,
            "state": state,
            "lastState": self.last_state,
        }
        metadata = {
            "name": self.name,
            "uid": self.uid,
            "creationTimestamp": self.created,
            "labels": self.labels,
            "annotations": self.annotations,
        }
        return {
            "metadata": metadata,
            "spec": {**self.spec, "nodeName": f"node{self.index}"},
            "status": {"phase": phase, "conditions": self.conditions, "containerStatuses": [status]},
        }


class KubernetesServer:
    """The API server, and the controller of its jobs.

    Tests change its attributes: `trainer` is the version of Kubeflow Trainer, None without it; `backoff_limit` that of its
    runtime; `rejection` the reason for which pods are not admitted; `is_down` breaks every connection; the logs of the pods in
    `lost_nodes` cannot be read.
    """

    def __init__(self, folder, hosts=()):
        self.folder, self.hosts = folder, hosts
        self.objects = {"jobs": {}, "services": {}, "configmaps": {}, "trainjobs": {}, "jobsets": {}}
        self.pods, self.secrets, self.deletions, self.events = [], {}, [], []
        self.trainer, self.backoff_limit, self.rejection, self.is_down, self.lost_nodes = (
            "2.2",
            6,
            "",
            False,
            set(),
        )
        self.names = folder / "hosts"
        self.names.write_text("127.0.0.1 localhost\n")
        (folder / "nsswitch.conf").write_text("hosts: files\n")
        self._lock, self._closed = threading.RLock(), False
        server = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self):
                server.answer(self)

            def log_message(self, *_):
                pass

            do_GET = do_POST = do_DELETE = answer  # noqa: N815 - names of http.server

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self.kubeconfig = folder / "kubeconfig"
        self.write_kubeconfig(TOKEN)

    def write_kubeconfig(self, token, port=None, **more):
        port = port or self._http.server_port
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
            "current-context": "x",
            **more,
        }
        self.kubeconfig.write_text(yaml.safe_dump(config))

    def close(self):
        self._closed = True
        for pod in self.pods:
            with pod.lock:
                pod.is_ending = True
            if pod.process and pod.code is None:
                pod.process.terminate()
                try:
                    pod.process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(pod.process.pid, signal.SIGKILL)
                    pod.process.wait()
            if pod.process:
                pod.reader.join()
        self._http.shutdown()
        self._http.server_close()

    def wait_for_data(self, name, job):
        """Return the data of a ConfigMap once it exists; none if the job is deleted before."""
        while not self._closed and not job["metadata"].get("deletionTimestamp"):
            if name in self.objects["configmaps"]:
                return self.objects["configmaps"][name]["binaryData"]
            time.sleep(0.02)
        return {}

    def enter(self, pod):
        """Return the words before the command of a pod that put it into its network namespace."""
        if not self.hosts:
            return ()
        host = self.hosts[pod.index]
        with self._lock, self.names.open("a") as file:
            file.write(f"{host.address} {pod.hostname}.{pod.subdomain} {pod.hostname}\n")
        binds = f"mount --bind {self.names} /etc/hosts && mount --bind {self.folder}/nsswitch.conf /etc/nsswitch.conf"
        words = ("nsenter", f"--net=/run/netns/{host.namespace}", "unshare", "--uts", "--mount", "sh", "-c")
        return (*words, f'{binds} && hostname "$0" && exec "$@"', pod.hostname)

    def warn(self, name, reason, message):
        """Record a warning about an object."""
        event = {"type": "Warning", "reason": reason, "message": message, "lastTimestamp": stamp()}
        metadata = {"name": f"{name}.{len(self.events)}", "namespace": "team"}
        self.events.append({"metadata": metadata, "involvedObject": {"name": name}, **event})

    # HTTP

    def answer(self, request):
        url = urlsplit(request.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        length = int(request.headers.get("Content-Length") or 0)
        body = json.loads(request.rfile.read(length)) if length else {}
        if self.is_down:
            request.close_connection = True
            return
        try:
            path = self.authorize(request, url.path)
            with self._lock:
                code, result = (
                    201 if request.command == "POST" else 200,
                    self.call(request.command, path, query, body),
                )
        except ApiError as error:
            code, result = error.code, {"kind": "Status", "message": str(error), "code": error.code}
        data = result if isinstance(result, bytes) else json.dumps(result).encode()
        request.send_response(code)
        request.send_header("Content-Type", "text/plain" if isinstance(result, bytes) else "application/json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    @staticmethod
    def authorize(request, path):
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise ApiError(401, "Unauthorized")
        if not (match := PATHS.fullmatch(path)):
            raise ApiError(403, f"the path {path} is forbidden")
        return match.groups()

    def call(self, method, path, query, body):
        kind, name, log = path
        if log:
            return self.read_log(name, query)
        if kind == "trainjobs" and self.trainer is None:
            raise ApiError(404, "404 page not found")
        if method == "POST":
            return self.create(kind, body, query)
        if kind == "events":
            key, _, value = query["fieldSelector"].partition("=")
            assert key == "involvedObject.name"
            return {"items": [event for event in self.events if event["involvedObject"]["name"] == value]}
        if not name:
            wanted = dict(pair.split("=") for pair in query["labelSelector"].split(","))
            items = [pod.show() for pod in self.pods] if kind == "pods" else list(self.objects[kind].values())
            return {"items": [item for item in items if wanted.items() <= item["metadata"]["labels"].items()]}
        if name not in self.objects[kind]:
            raise ApiError(404, f'{kind} "{name}" not found')
        item = self.objects[kind][name]
        if method == "DELETE":
            assert kind in {"jobs", "trainjobs", "jobsets"}
            assert "Foreground" in (query.get("propagationPolicy"), body.get("propagationPolicy"))
            item["metadata"]["deletionTimestamp"] = stamp()
            self.deletions.append(name)
        return item

    def create(self, kind, item, query):
        if kind == "trainjobs":
            if unknown := train_job_schema.find_unknown_field(item, self.trainer):
                assert query["fieldValidation"] == "Strict", "a cluster drops the field"
                raise ApiError(400, f'TrainJob in version "v1alpha1" cannot be handled as a TrainJob: strict decoding error: '
                               f'unknown field "{unknown}"')  # fmt: skip
            if problem := train_job_schema.find_problem(item, self.trainer):
                raise ApiError(422, problem)
        elif kind == "jobsets":
            if problem := job_set_schema.find_problem(item):
                raise ApiError(422, problem)
        else:
            try:
                kubernetes_validate.validate(item, "1.31", strict=True)
            except kubernetes_validate.ValidationError as error:
                raise ApiError(422, str(error.message)) from None
        name = item["metadata"]["name"]
        if query.get("dryRun") == "All":
            return {**item, "metadata": {**item["metadata"], "uid": "none"}}
        if name in self.objects[kind]:
            raise ApiError(409, f'{kind} "{name}" already exists')
        item["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": stamp(), "namespace": "team"}
        self.objects[kind][name] = item
        if kind in {"jobs", "trainjobs", "jobsets"}:
            item["status"] = {"startTime": stamp()} if kind == "jobs" else {}
            control = self.control_job_set if kind == "jobsets" else self.control
            threading.Thread(target=control, args=(kind, item), daemon=True).start()
        return item

    def read_log(self, name, query):
        pod = next((pod for pod in self.pods if pod.name == name), None)
        if pod is None:
            raise ApiError(404, f'pods "{name}" not found')
        if pod.index in self.lost_nodes:
            raise ApiError(500, "Get https://node:10250/containerLogs: dial tcp: i/o timeout")
        if pod.process is None:
            raise ApiError(400, "container is waiting to start: ContainerCreating")
        assert query["timestamps"].lower() == "true"
        assert query["container"] == pod.container["name"]
        is_previous = query.get("previous", "").lower() == "true"
        if is_previous and not pod.restarts:
            raise ApiError(400, "previous terminated container not found")
        since = dt.timedelta(seconds=int(query.get("sinceSeconds", 10**6)))
        oldest = dt.datetime.now(dt.UTC) - since
        lines = pod.previous_lines if is_previous else pod.lines
        return b"".join(line for at, line in lines if at >= oldest)

    # The controllers of jobs

    def build_pod(self, job):
        """Return the template of the pods of a job, the start of their host names, and their subdomain."""
        name, spec = job["metadata"]["name"], copy.deepcopy(job["spec"])
        if job["kind"] == "Job":
            return spec["template"], name, spec["template"]["spec"].get("subdomain")
        if job["kind"] == "JobSet":
            return spec["replicatedJobs"][0]["template"]["spec"]["template"], f"{name}-node-0", name
        template, trainer = copy.deepcopy(RUNTIME), spec["trainer"]
        for patch in train_job_schema.list_pod_patches(spec):
            template["metadata"]["labels"] |= patch.get("metadata", {}).get("labels", {})
            (changes,) = patch["spec"].pop("containers")
            template["spec"] |= patch["spec"]
            assert changes.pop("name") == "node"
            template["spec"]["containers"][0] |= changes
        container = template["spec"]["containers"][0]
        container |= {key: trainer[key] for key in ("image", "command", "args")}
        container["resources"] = trainer.get("resourcesPerNode", {})
        field = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
        # As Trainer's plugin for torch.
        container["env"] = [
            *trainer["env"],
            {"name": "PET_NNODES", "value": str(trainer["numNodes"])},
            {"name": "PET_NPROC_PER_NODE", "value": str(trainer["numProcPerNode"])},
            {"name": "PET_NODE_RANK", "valueFrom": field},
            {"name": "PET_MASTER_ADDR", "value": f"{name}-node-0-0.{name}"},
            {"name": "PET_MASTER_PORT", "value": "29500"},
        ]
        template["metadata"]["labels"] |= {"jobset.sigs.k8s.io/jobset-name": name}
        return template, f"{name}-node-0", name

    def control(self, kind, job):
        """Run the pods of a job; the last one starts first, so that it must wait for the name of the first."""
        spec, name = job["spec"], job["metadata"]["name"]
        is_train_job = kind == "trainjobs"
        count = spec["trainer"]["numNodes"] if is_train_job else spec["completions"]
        if self.rejection:
            child = f"{name}-node-0" if is_train_job else name
            self.warn(child, "FailedCreate", f"Error creating: {self.rejection}")
            count = 0
        pods = {index: Pod(self, job, index) for index in reversed(range(count))}
        for pod in pods.values():
            self.pods.append(pod)
            pod.start()
            time.sleep(0.5)
        while not self._closed and not job["metadata"].get("deletionTimestamp"):
            time.sleep(0.05)
            if "podFailurePolicy" in spec:
                self._replace_disrupted(job, pods)
            codes = [pod.code for pod in pods.values()]
            if is_train_job and sum(pod.restarts for pod in pods.values()) >= self.backoff_limit:
                self._delete(pods.values())
                message = f"jobset failed due to one or more job failures ({name}-node-0)"
                self._condition(job, "Failed", "FailedJobs", message)
                return
            if any(codes) and not is_train_job:
                self._condition(job, "FailureTarget")
                self._delete(pod for pod in pods.values() if pod.code is None)
                message = "Job has reached the specified backoff limit"
                self._condition(job, "Failed", "BackoffLimitExceeded", message)
                return
            if codes and set(codes) == {0}:
                job["status"]["completionTime"] = stamp()
                self._condition(job, "Complete")
                return
        self._collect(kind, job, pods)

    def control_job_set(self, kind, job_set):
        """Run the pods of a JobSet; those of its Job start again if one was lost, and not if a script failed."""
        spec, status = job_set["spec"], job_set["status"]
        count = spec["replicatedJobs"][0]["template"]["spec"]["completions"]
        while True:
            pods = [Pod(self, job_set, index) for index in reversed(range(count))]
            self.pods += pods
            for pod in pods:
                pod.start()
            while not any(pod.code for pod in pods) and {pod.code for pod in pods} != {0}:
                time.sleep(0.05)
                if self._closed or job_set["metadata"].get("deletionTimestamp"):
                    self._collect(kind, job_set, {pod.index: pod for pod in pods})
                    return
            if not any(pod.code for pod in pods):
                self._condition(job_set, "Completed", "AllJobsCompleted", "jobset completed successfully")
                return
            is_lost = any(pod.code and pod.conditions for pod in pods)
            restarts = status.get("restarts", 0)
            if not is_lost or restarts == spec["failurePolicy"]["maxRestarts"]:
                self._delete(pod for pod in pods if pod.code is None)
                self._condition(
                    job_set, "Failed", "FailedJobs", "jobset failed due to one or more job failures"
                )
                return
            self._delete(pods)
            status["restarts"] = restarts + 1

    def _collect(self, kind, job, pods):
        """Delete a job with its pods and the objects that it owns."""
        self._delete(pods.values())
        uid = job["metadata"]["uid"]
        for items in self.objects.values():
            for key, item in [*items.items()]:
                if [owner for owner in item["metadata"].get("ownerReferences", ()) if owner["uid"] == uid]:
                    del items[key]
        del self.objects[kind][job["metadata"]["name"]]

    def _replace_disrupted(self, job, pods):
        for pod in [*pods.values()]:
            if pod.code and pod.conditions:
                pods[pod.index] = Pod(self, job, pod.index)
                self.pods.append(pods[pod.index])
                pods[pod.index].start()

    def _delete(self, pods):
        """End pods and delete them, with their logs, as the controller does of a job that has failed."""
        for pod in [*pods]:
            pod.end()
            time.sleep(2)  # a kubelet takes as long to report it, and meanwhile its last lines can be read
            self.pods.remove(pod)

    @staticmethod
    def _condition(job, kind, reason="", message=""):
        condition = {
            "type": kind,
            "status": "True",
            "lastTransitionTime": stamp(),
            "reason": reason,
            "message": message,
        }
        job["status"].setdefault("conditions", []).append(condition)


def stamp():
    return f"{dt.datetime.now(dt.UTC):%Y-%m-%dT%H:%M:%SZ}"
