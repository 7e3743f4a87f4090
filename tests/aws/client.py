"""Client of the plane for tests: start it as a subprocess, configure it, and end it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from support.waits import limit

__all__ = ["ARGUMENTS", "ENTRYPOINT", "ROLE", "AwsPlane"]

REGION = "us-east-1"
ACCOUNT = "123456789012"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/trainer"
ENTRYPOINT = ["/bin/sh", "-c"]
ARGUMENTS = ["exec $(command -v python3 || command -v python) /opt/ml/input/data/accel/entry.py"]
_TRUST = {
    "Version": "2012-10-17",
    "Statement": [
        {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}
    ],
}
_PATIENCE_S = limit(60)


class AwsPlane:
    """A running plane."""

    def __init__(self, root):
        """Start the plane; it ends with `close`, and with this process."""
        command = [sys.executable, str(Path(__file__).parent / "plane.py"), "--root", str(root), "--no-run"]
        self._errors, self._clients, self._session = Path(root) / "plane.err", {}, None
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.address = self._process.stdout.readline().strip()
        assert self.address, self._errors.read_text()

    def close(self):
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    @property
    def env(self):
        """Return the environment of a process that uses only the plane."""
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def use(self, monkeypatch):
        """Let this process, and its children, use the plane."""
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in self.env.items():
            monkeypatch.setenv(name, value)

    def client(self, name, region=REGION):
        import boto3
        from botocore.config import Config

        key = name, region
        if key not in self._clients:
            self._session = self._session or boto3.session.Session("testing", "testing")
            # Set explicitly, since a test may have other values in its environment when the first client is created.
            config = Config(retries={"mode": "legacy", "max_attempts": 4})
            self._clients[key] = self._session.client(name, region, endpoint_url=self.address, config=config)
        return self._clients[key]

    # Settings ------------------------------------------------------------------------

    def ask(self, verb, **arguments):
        connection = http.client.HTTPConnection(self.address.removeprefix("http://"), timeout=_PATIENCE_S)
        with contextlib.closing(connection):
            connection.request("POST", f"/_plane/{verb}", json.dumps(arguments))
            answer = connection.getresponse()
            assert answer.status == 200, f"the plane knows no {verb}"
            return json.load(answer)

    def fault(self, operation, kind, times=1, **fields):
        """Break the next calls of an operation; see `faults.Fault`."""
        self.ask("fault", operation=operation, kind=kind, times=times, **fields)

    def settings(self, **values):
        """Change settings; see `training.SETTINGS`."""
        self.ask("settings", **values)

    def reset(self):
        self.ask("reset")

    def calls(self):
        """Return the calls since the last `reset` or `clear`, as `service:Operation`."""
        return self.ask("calls")

    # Helpers -------------------------------------------------------------------------

    def role(self, name="trainer", trust=None):
        """Create a role that SageMaker can assume."""
        created = self.client("iam").create_role(
            RoleName=name, AssumeRolePolicyDocument=json.dumps(trust or _TRUST)
        )
        return created["Role"]["Arn"]

    def bucket(self, name, **objects):
        """Create a bucket with these objects, by key."""
        s3 = self.client("s3")
        s3.create_bucket(Bucket=name)
        for key, body in objects.items():
            s3.put_object(Bucket=name, Key=key, Body=body)
        return name

    def request(self, name, **changes):
        """Return a minimal CreateTrainingJob request."""
        fields = {
            "TrainingJobName": name,
            "RoleArn": ROLE,
            "AlgorithmSpecification": {
                "TrainingImage": f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/pytorch:1",
                "TrainingInputMode": "File",
                "ContainerEntrypoint": ENTRYPOINT,
                "ContainerArguments": ARGUMENTS,
            },
            "OutputDataConfig": {"S3OutputPath": "s3://sagemaker-out/accel"},
            "ResourceConfig": {"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 30},
            "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
        }
        return fields | changes

    def wait(self, name, *states):
        """Wait until a job is in one of these secondary states, or has ended; return its description."""
        client, end = self.client("sagemaker"), time.monotonic() + _PATIENCE_S
        states = {*states} or {"Completed", "Failed", "Stopped", "MaxRuntimeExceeded", "MaxWaitTimeExceeded"}
        while (description := client.describe_training_job(TrainingJobName=name))[
            "SecondaryStatus"
        ] not in states:
            assert time.monotonic() < end, description
            time.sleep(0.02)
        return description
