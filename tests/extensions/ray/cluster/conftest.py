"""A Ray cluster of this machine: a head without processors, and nodes with two each."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from support.processes.waits import limit

STARTED = {
    # A lost node is noticed within seconds.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    "NODE_KEY": "of-the-node",
}


class RayCluster:
    """The head and its nodes, each a raylet with workers of its own."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        os.environ.update(STARTED)
        head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": 0}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = f"http://{self._cluster.webui_url}"
        self.nodes = []
        self.want(2)

    def want(self, count):
        """Have so many nodes: start those that are missing."""
        self.nodes = [
            node for node in self.nodes if node.any_processes_alive() and self.get_raylet(node).poll() is None
        ]
        while len(self.nodes) < count:
            self.nodes.append(self._cluster.add_node(num_cpus=2))

    @staticmethod
    def get_raylet(node):
        return node.all_processes["raylet"][0].process

    def lose_node_of(self, pid):
        """Kill the raylet that started a process, and nothing else: its workers must end themselves."""
        raylets = {self.get_raylet(node).pid: node for node in self.nodes}
        while pid not in raylets:
            pid = get_parent(pid)
        os.kill(pid, signal.SIGKILL)
        self.get_raylet(raylets[pid]).wait()

    def close(self):
        self._cluster.shutdown()


def get_parent(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    assert int(fields[1]) > 1, f"process {pid} has lost its parent"
    return int(fields[1])


def find_processes(file, text):
    """Return the ids of the processes whose command or environment has a text."""
    found = []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if path.name.isdigit() and text.encode() in (path / file).read_bytes():
                found.append(int(path.name))
    return found


@pytest.fixture(scope="session")
def ray_cluster():
    cluster = RayCluster()
    yield cluster
    cluster.close()


class Launches:
    """Starts `accel launch` of jobs with a word in their arguments, and looks for processes with it."""

    def __init__(self, cluster, folder):
        self.word, self._folder, self._processes = f"word-{uuid.uuid4().hex[:8]}", folder, []
        self._options = ("--set", "launcher.kind=ray", "--set", f"launcher.address={cluster.address}")

    def start(self, *args, options=()):
        """Start a launch of `train.py` with arguments, after the options."""
        python = f"launcher.python={sys.executable}"
        command = [
            *(
                sys.executable,
                "-m",
                "accel_cli",
                "launch",
                "--cpu",
                *self._options,
                "--set",
                python,
                *options,
            ),
            *("train.py", *args, self.word),
        ]
        process = subprocess.Popen(
            command,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def jobs(self, *args):
        """Run `accel jobs` to its end."""
        command = [sys.executable, "-m", "accel_cli", "jobs", *args, *self._options]
        return subprocess.run(
            command, cwd=self._folder, capture_output=True, text=True, timeout=limit(120), check=False
        )

    def list_processes(self):
        """List the processes of the nodes that have the word in their command."""
        return sorted(
            set(find_processes("cmdline", self.word)) - {process.pid for process in self._processes}
        )

    def find_worker(self):
        """Return the process of Ray that started `accel launch` on a node."""
        pid = self.list_processes()[0]
        while b"ray::" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            pid = get_parent(pid)
        return pid

    @staticmethod
    def find_driver(job_id):
        (driver,) = set(find_processes("cmdline", "accel_cli.extensions.ray")) & set(
            find_processes("environ", job_id)
        )
        return driver

    def wait_for_end(self, seconds=20):
        """Wait until no process of the job is left, and return those that are."""
        end = time.monotonic() + limit(seconds)
        while (found := self.list_processes()) and time.monotonic() < end:
            time.sleep(0.1)
        return found

    def close(self):
        for process in self._processes:
            process.kill()
            process.communicate()


@pytest.fixture
def launches(ray_cluster, cwd):
    ray_cluster.want(2)
    launches = Launches(ray_cluster, cwd)
    yield launches
    launches.close()
