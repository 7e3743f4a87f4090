"""Hosts of a training job: processes of `entry.py` with a folder each that replaces `/opt/ml`."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

from support.processes.children import free_port

__all__ = ["ARGUMENTS", "ENTRYPOINT", "Host", "Run"]

ENTRYPOINT = ["/bin/sh", "-c"]
ARGUMENTS = ["exec $(command -v python3 || command -v python) /opt/ml/input/data/accel/entry.py"]
_GRACE_S = 120
"""Seconds from SIGTERM to SIGKILL."""


def read_clock():
    """Return the time as moto has it, in UTC without a zone; each process of the tests would take a second to import moto."""
    return datetime.now(UTC).replace(tzinfo=None)


class Host:
    """A host: its root folder, and the first process of its container."""

    def __init__(self, root, name):
        self.root, self.name, self.process = root, name, None

    def configure(self, hosts, **files):
        """Create the folders, and write what the platform does into `input/config`."""
        for folder in ("input/config", "input/data/accel", "model", "output/data", "checkpoints"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        resources = {"hosts": list(hosts), "current_host": self.name, "network_interface_name": "lo"}
        config = {"resourceconfig": resources, "inputdataconfig": {"accel": {}}, "hyperparameters": {}}
        for name, content in (config | files).items():
            (self.root / "input" / "config" / f"{name}.json").write_text(json.dumps(content))

    @property
    def failure(self):
        """Return the failure reason that the platform would read, or None."""
        file = self.root / "output" / "failure"
        return file.read_text() if file.exists() else None

    def launch(self, command, env):
        """Start the first process."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(list(map(str, command)), env=env, cwd="/", text=True, **pipes)
        return self

    def close(self):
        """End the process, and with it the others of the container."""
        if self.process:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                try:
                    self.process.wait(10)
                except subprocess.TimeoutExpired:
                    self.process.kill()
            self.process.wait()
            self.process.stdout.close()


class Run:
    """A job whose bundle runs, on hosts that are addresses of the loopback interface.

    Args:
        aws: The server, with its S3 and its logs.
        job: moto's job.
        request: What was requested.
        root: The folder of the hosts.
    """

    def __init__(self, aws, job, request, root):
        self._aws, self._job, self._request, self._root = aws, job, request, root
        self._hosts, self._is_stopped = [], threading.Event()
        job.training_job_status, job.secondary_status = "InProgress", "Starting"
        job.training_start_time = job.training_end_time = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self):
        """Send SIGTERM to the first process of each host."""
        self._job.training_job_status = "Stopping"
        self._is_stopped.set()

    def close(self):
        """End immediately."""
        self._is_stopped.set()
        for host in self._hosts:
            host.close()
        self._thread.join()

    def _run(self):
        job, count = self._job, self._request["ResourceConfig"]["InstanceCount"]
        names = [f"127.{number}" for number in range(1, count + 1)]
        with free_port() as port:
            self._hosts = [self._start(name, names, port) for name in names]
            job.training_start_time = read_clock()
            job.training_job_status, job.secondary_status = "InProgress", "Training"
            readers = [threading.Thread(target=self._read, args=(host,)) for host in self._hosts]
            for reader in readers:
                reader.start()
            codes = self._wait()
            for reader in readers:
                reader.join()
        self._leave(any(codes) and not self._is_stopped.is_set())

    def _start(self, name, names, port):
        algorithm, host = self._request["AlgorithmSpecification"], Host(self._root / name, name)
        host.configure(names)
        for channel in self._request["InputDataConfig"]:
            self._fetch(channel["DataSource"]["S3DataSource"]["S3Uri"], host, channel["ChannelName"])
        arguments = [text.replace("/opt/ml", str(host.root)) for text in algorithm["ContainerArguments"]]
        env = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(host.root),
            "TRAINING_JOB_NAME": self._job.training_job_name,
            "AWS_REGION": self._job.region_name,
            # Containers have a network each; here all jobs are on one loopback interface.
            "SM_MASTER_PORT": str(port),
            **self._aws.env,
            **self._request.get("Environment", {}),
        }
        return host.launch([*algorithm["ContainerEntrypoint"], *arguments], env)

    def _fetch(self, uri, host, channel):
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        s3 = self._aws.client("s3")
        for item in s3.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]:
            path = host.root / "input" / "data" / channel / item["Key"].removeprefix(prefix)
            path.parent.mkdir(parents=True, exist_ok=True)
            s3.download_file(bucket, item["Key"], str(path))

    def _read(self, host):
        for line in host.process.stdout:
            self._aws.log(self._job, [line.removesuffix("\n")], host.name)

    def _wait(self):
        """Wait until all hosts have ended, or one has failed or the job is stopped and the others end; return exit codes."""
        is_ending, end = False, float("inf")
        while None in (codes := [host.process.poll() for host in self._hosts]):
            if not is_ending and (self._is_stopped.wait(0.05) or any(codes)):
                is_ending, end = True, time.monotonic() + _GRACE_S
                self._signal(signal.SIGTERM)
            if time.monotonic() > end:
                self._signal(signal.SIGKILL)
            time.sleep(0.05)
        return codes

    def _signal(self, number):
        for host in self._hosts:
            host.process.send_signal(number)

    def _leave(self, has_failed):
        """Keep what the hosts leave, and show the end."""
        job = self._job
        for folder, name in (("model", "model"), ("output/data", "output")):
            tops = [host.root / folder for host in self._hosts]
            paths = [(top, path) for top in tops for path in sorted(top.rglob("*")) if path.is_file()]
            files = {str(path.relative_to(top)): path.read_bytes() for top, path in paths}
            self._aws.put(job, files, name)
        if has_failed:
            job.failure_reason = "".join(host.failure or "" for host in self._hosts)
        status = "Failed" if has_failed else "Stopped" if self._is_stopped.is_set() else "Completed"
        job.training_end_time = read_clock()
        seconds = math.ceil((job.training_end_time - job.training_start_time).total_seconds())
        job.training_time_in_seconds = job.billable_time_in_seconds = seconds
        job.training_job_status = job.secondary_status = status
