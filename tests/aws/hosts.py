"""Hosts of a training job: real processes with separate /opt/ml folders, or output prepared by a test."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

__all__ = ["Played", "Real", "wait_all"]

_ENTRY = ["/bin/sh", "-c"]
_ARGUMENTS = ["exec $(command -v python3 || command -v python) /opt/ml/input/data/accel/entry.py"]
_LONGEST = 256 * 1024
"""Bytes of the longest event that CloudWatch takes."""


class Played:
    """A host that prints prepared lines, and ends when the test permits it."""

    when = math.inf
    """When it ended."""

    def __init__(self, name, play, put, ended):
        self.name, self.code, self._put = name, None, put
        self._play, self._ended, self._stop = play, ended, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self):
        self._thread.start()

    def signal(self, number):
        if number == signal.SIGTERM and self._play.get("stubborn"):
            return
        self.code = 128 + number if self.code is None else self.code
        self._stop.set()

    def close(self):
        self.signal(signal.SIGKILL)
        if self._thread.ident:
            self._thread.join()

    def failure(self):
        return self._play.get("failure", "") if self.name == self._play.get("fails", self.name) else ""

    def files(self, folder):
        """Return the files of a folder of /opt/ml, as `{name: text}`."""
        return {name: text.encode() for name, text in self._play.get(folder, {}).items()}

    def _run(self):
        lines = self._play.get("lines", {})
        for line in lines.get(self.name, []) if isinstance(lines, dict) else lines:
            self._put(line)
            if self._stop.wait(self._play.get("every", 0)):
                break
        self._stop.wait(self._play.get("seconds", 0))
        if self.code is None:
            self.code = self._play.get("exit", 0) if self.name == self._play.get("fails", self.name) else 0
        if self._play.get("last", True) and self.code != 128 + signal.SIGKILL:
            self._put(f"accel: {self.name} ended with exit code {self.code}")
        self._ended(self)


class Real:
    """A host that runs the bundle in its own session, with its own /opt/ml."""

    when = math.inf

    def __init__(self, name, root, put, ended):
        self.name, self.root, self.code = name, root, None
        self._put, self._ended, self._process, self._thread = put, ended, None, None
        shutil.rmtree(root, ignore_errors=True)
        for folder in ("input/config", "input/data", "model", "output/data", "checkpoints", "home"):
            (root / folder).mkdir(parents=True, exist_ok=True)

    def configure(self, request, hosts):
        """Write the files of /opt/ml/input/config, as the platform does."""
        kind = request["ResourceConfig"]["InstanceType"]
        group = {"instance_group_name": "homogeneousCluster", "instance_type": kind, "hosts": hosts}
        config = {
            "resourceconfig": {
                "current_host": self.name,
                "current_instance_type": kind,
                "current_group_name": "homogeneousCluster",
                "hosts": hosts,
                "instance_groups": [group],
                "network_interface_name": "lo",
            },
            "inputdataconfig": {
                channel["ChannelName"]: {
                    "TrainingInputMode": channel.get("InputMode", "File"),
                    "S3DistributionType": channel["DataSource"]
                    .get("S3DataSource", {})
                    .get("S3DataDistributionType", "FullyReplicated"),
                    "RecordWrapperType": channel.get("RecordWrapperType", "None"),
                }
                for channel in request.get("InputDataConfig", [])
            },
            "hyperparameters": request.get("HyperParameters", {}),
        }
        for name, content in config.items():
            (self.root / "input" / "config" / f"{name}.json").write_text(json.dumps(content))

    def prepare(self, request, env):
        algorithm = request["AlgorithmSpecification"]
        entry, arguments = algorithm.get("ContainerEntrypoint"), algorithm.get("ContainerArguments")
        if (entry, arguments) != (_ENTRY, _ARGUMENTS):
            raise ValueError(f"the plane runs {_ENTRY} {_ARGUMENTS}; it got {entry} {arguments}")
        self._command = [*entry, *(text.replace("/opt/ml", str(self.root)) for text in arguments)]
        path = f"{Path(sys.executable).parent}{os.pathsep}/usr/local/bin{os.pathsep}/usr/bin{os.pathsep}/bin"
        # HOME distinguishes the processes of this host from all others.
        self._env = {"PATH": path, "HOME": str(self.root / "home"), **env, **request.get("Environment", {})}

    def start(self):
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self.root / "home",
            env=self._env,
            start_new_session=True,
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def signal(self, number):
        """Send a signal to process 1 of the container only, as the platform does; SIGKILL is sent to all."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._sweep()

    def close(self):
        self.signal(signal.SIGKILL)
        if self._thread:
            self._thread.join()

    def failure(self):
        path = self.root / "output" / "failure"
        return path.read_text(errors="replace") if path.is_file() else ""

    def files(self, folder):
        top = self.root / folder
        paths = sorted(path for path in top.rglob("*") if path.is_file())
        return {str(path.relative_to(top)): path.read_bytes() for path in paths}

    def _run(self):
        pump = threading.Thread(target=self._pump, daemon=True)
        pump.start()
        code = self._process.wait()
        self._sweep()  # a container ends with its process 1, and all else in it too
        pump.join()
        self.code = code if code >= 0 else 128 - code
        self._ended(self)

    def _pump(self):
        while line := self._process.stdout.readline(_LONGEST):
            self._put(line.removesuffix(b"\n").decode(errors="replace"))

    def _sweep(self):
        home_variable = f"HOME={self.root / 'home'}".encode()
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and home_variable in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
            except OSError:  # the process has ended, or belongs to another user
                continue


def wait_all(hosts, seconds):
    """Return whether all hosts end within the given seconds."""
    end = time.monotonic() + seconds
    while any(host.code is None for host in hosts) and time.monotonic() < end:
        time.sleep(0.005)
    return all(host.code is not None for host in hosts)
