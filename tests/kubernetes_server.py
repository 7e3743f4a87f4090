"""A Kubernetes API server for tests: it checks and stores objects over HTTP, and runs the container of each pod as a process.

It has one namespace, and imitates the controllers of Jobs as far as the launcher needs them: indexes, host names, failed
jobs whose other pods are deleted, disruptions, and deletion. Each pod has a folder instead of a file system of its own: the
paths of its mounts are replaced by that of a folder in the command, its arguments and its variables. With `hosts`, each
pod is in a network namespace, and the name of a pod resolves once it runs.
"""

from __future__ import annotations

import base64
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

TOKEN = "a-token-of-the-tests"
INDEX = "batch.kubernetes.io/job-completion-index"
PATHS = re.compile(r"/(?:api/v1|apis/batch/v1)/namespaces/team/(\w+)(?:/([\w.-]+))?(/log)?")


class ApiError(Exception):
    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


class Pod:
    """A pod, and the process of its container."""

    def __init__(self, server, job, index):
        self.server, self.index, self.job = server, index, job
        template, name = job["spec"]["template"], job["metadata"]["name"]
        self.hostname = f"{name}-{index}"
        self.labels = {**template["metadata"]["labels"], "job-name": name}
        self.name = f"{self.hostname}-{uuid.uuid4().hex[:5]}"
        self.spec = template["spec"]
        self.folder = server.folder / self.name
        self.lines, self.process, self.conditions, self.code, self.ended_at = [], None, [], None, None
        self.failure = self.folder / "termination-log"

    def start(self):
        """Run the container; like a kubelet, wait until the ConfigMaps of its volumes exist."""
        self.folder.mkdir()
        self.failure.touch()
        container = self.spec["containers"][0]
        mounts = {container["terminationMessagePath"]: self.failure}
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        for number, mount in enumerate(container["volumeMounts"]):
            folder = self.folder / f"mount{number}"
            folder.mkdir()
            mounts[mount["mountPath"]] = folder
            if config := volumes[mount["name"]].get("configMap"):
                for key, text in self.server.wait_for_data(config["name"], self.job).items():
                    (folder / key).write_bytes(base64.b64decode(text))

        variables = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "JOB_COMPLETION_INDEX": str(self.index),
        }
        for item in container["env"]:
            if reference := item.get("valueFrom"):
                wanted = reference["secretKeyRef"]
                variables[item["name"]] = self.server.secrets[wanted["name"]][wanted["key"]]
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

        command = [*map(read, container["command"]), *map(read, container["args"])]
        environ = {name: read(value) for name, value in variables.items()}
        self.process = subprocess.Popen(
            [*self.server.enter(self), *command], cwd=self.folder, env=environ, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        with self.process.stdout:
            for line in self.process.stdout:
                now = dt.datetime.now(dt.timezone.utc)
                self.lines.append((now, f"{now:%Y-%m-%dT%H:%M:%S.%f}000Z ".encode() + line))
        code = self.process.wait()
        self.ended_at, self.code = stamp(), code if code >= 0 else 128 - code

    def end(self):
        """Send SIGTERM, and SIGKILL when the time for the end is over."""
        if self.process and self.code is None:
            self.process.terminate()
            try:
                self.process.wait(self.spec["terminationGracePeriodSeconds"])
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
        while self.process and self.code is None:
            time.sleep(0.05)

    def disrupt(self):
        """End it at once, as the loss of its node does."""
        self.conditions = [{"type": "DisruptionTarget", "status": "True"}]
        os.killpg(self.process.pid, signal.SIGKILL)

    def show(self):
        state, phase = {"waiting": {"reason": "ContainerCreating"}}, "Pending"
        if self.process:
            state, phase = {"running": {"startedAt": stamp()}}, "Running"
        if self.code is not None:
            phase = "Failed" if self.code else "Succeeded"
            state = {
                "exitCode": self.code,
                "finishedAt": self.ended_at,
                "message": self.failure.read_text(),
                "reason": "Error",
            }
            state = {"terminated": state}
        status = {
            "name": "accel",
            "image": "x",
            "imageID": "x",
            "ready": False,
            "restartCount": 0,
            "state": state,
        }
        metadata = {"name": self.name, "labels": self.labels, "annotations": {INDEX: str(self.index)}}
        return {
            "metadata": metadata,
            "spec": {**self.spec, "nodeName": f"node{self.index}"},
            "status": {"phase": phase, "conditions": self.conditions, "containerStatuses": [status]},
        }


class KubernetesServer:
    """The API server, and the controller of its jobs."""

    def __init__(self, folder, hosts=()):
        self.folder, self.hosts = folder, hosts
        self.objects = {"jobs": {}, "services": {}, "configmaps": {}}
        self.pods, self.secrets, self.deletions = [], {}, []
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

    def write_kubeconfig(self, token, port=None):
        port = port or self._http.server_port
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
            "current-context": "x",
        }
        self.kubeconfig.write_text(yaml.safe_dump(config))

    def close(self):
        self._closed = True
        for pod in self.pods:
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
            file.write(f"{host.address} {pod.hostname}.{pod.spec['subdomain']} {pod.hostname}\n")
        binds = f"mount --bind {self.names} /etc/hosts && mount --bind {self.folder}/nsswitch.conf /etc/nsswitch.conf"
        words = ("nsenter", f"--net=/run/netns/{host.namespace}", "unshare", "--uts", "--mount", "sh", "-c")
        return (*words, f'{binds} && hostname "$0" && exec "$@"', pod.hostname)

    # HTTP

    def answer(self, request):
        url = urlsplit(request.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        length = int(request.headers.get("Content-Length") or 0)
        body = json.loads(request.rfile.read(length)) if length else {}
        try:
            path = self.authorize(request, url.path)
            with self._lock:
                code, result = 200, self.call(request.command, path, query, body)
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
        if method == "POST":
            return self.create(kind, body)
        if not name:
            wanted = dict(pair.split("=") for pair in query["labelSelector"].split(","))
            items = [pod.show() for pod in self.pods] if kind == "pods" else list(self.objects[kind].values())
            return {"items": [item for item in items if wanted.items() <= item["metadata"]["labels"].items()]}
        if name not in self.objects[kind]:
            raise ApiError(404, f'{kind} "{name}" not found')
        item = self.objects[kind][name]
        if method == "DELETE":
            assert kind == "jobs"
            assert "Foreground" in (query.get("propagationPolicy"), body.get("propagationPolicy"))
            item["metadata"]["deletionTimestamp"] = stamp()
            self.deletions.append(name)
        return item

    def create(self, kind, item):
        try:
            kubernetes_validate.validate(item, "1.31", strict=True)
        except kubernetes_validate.ValidationError as error:
            raise ApiError(422, str(error.message)) from None
        name = item["metadata"]["name"]
        if name in self.objects[kind]:
            raise ApiError(409, f'{kind} "{name}" already exists')
        item["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": stamp(), "namespace": "team"}
        self.objects[kind][name] = item
        if kind == "jobs":
            item["status"] = {"startTime": stamp()}
            threading.Thread(target=self.control, args=(item,), daemon=True).start()
        return item

    def read_log(self, name, query):
        pod = next((pod for pod in self.pods if pod.name == name), None)
        if pod is None:
            raise ApiError(404, f'pods "{name}" not found')
        if pod.process is None:
            raise ApiError(400, "container is waiting to start: ContainerCreating")
        assert query["timestamps"].lower() == "true"
        since = dt.timedelta(seconds=int(query.get("sinceSeconds", 10**6)))
        oldest = dt.datetime.now(dt.timezone.utc) - since
        return b"".join(line for at, line in pod.lines if at >= oldest)

    # The controller of jobs

    def control(self, job):
        """Run the pods of a job; the last one starts first, so that it must wait for the name of the first."""
        spec, name = job["spec"], job["metadata"]["name"]
        pods = {index: Pod(self, job, index) for index in reversed(range(spec["completions"]))}
        for pod in pods.values():
            self.pods.append(pod)
            pod.start()
            time.sleep(0.5)
        while not self._closed and not job["metadata"].get("deletionTimestamp"):
            time.sleep(0.05)
            if "podFailurePolicy" in spec:
                self._replace_disrupted(job, pods)
            codes = [pod.code for pod in pods.values()]
            if any(codes):
                self._condition(job, "FailureTarget")
                self._delete(pod for pod in pods.values() if pod.code is None)
                self._condition(job, "Failed")
                return
            if None not in codes:
                job["status"]["completionTime"] = stamp()
                self._condition(job, "Complete")
                return
        self._delete(pods.values())
        uid = job["metadata"]["uid"]
        for items in self.objects.values():
            for key, item in [*items.items()]:
                if [owner for owner in item["metadata"].get("ownerReferences", ()) if owner["uid"] == uid]:
                    del items[key]
        del self.objects["jobs"][name]

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
    def _condition(job, kind):
        condition = {"type": kind, "status": "True", "lastTransitionTime": stamp()}
        if kind == "Failed":
            condition |= {
                "reason": "BackoffLimitExceeded",
                "message": "Job has reached the specified backoff limit",
            }
        job["status"].setdefault("conditions", []).append(condition)


def stamp():
    return f"{dt.datetime.now(dt.timezone.utc):%Y-%m-%dT%H:%M:%SZ}"
