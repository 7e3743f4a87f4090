"""AWS on loopback: the server of moto in this process, with what moto lacks of training jobs.

moto answers for S3, IAM, STS, CloudWatch Logs and Secrets Manager over real HTTP. Its training jobs are `Completed` when they are
created, cannot be stopped, and their descriptions lack members of the request. So own are:

- a description with all members of the request, and the states, reason and times that a test sets (`Aws.play`);
- the refusal of a name in use, and `StopTrainingJob`;
- jobs whose bundle runs (`Aws.run`, in `hosts.py`): no other program runs ContainerEntrypoint and writes its output to a log.

moto validates no request: botocore's client does, and tests compare requests with golden files.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import tarfile
import time

import boto3
from aws.calls import CALLS, NOTES, OF_TESTS
from aws.hosts import Run
from botocore.config import Config
from moto.backends import get_backend
from moto.core.responses import ActionResult
from moto.sagemaker.exceptions import ResourceInUseException
from moto.sagemaker.responses import SageMakerResponse
from moto.server import ThreadedMotoServer

__all__ = ["ACCOUNT", "REGION", "ROLE", "Aws"]

REGION = "us-east-1"
ACCOUNT = "123456789012"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/trainer"
GROUP = "/aws/sagemaker/TrainingJobs"
_SERVICES = ("iam", "logs", "s3", "sagemaker", "secretsmanager")
_TRUST = {
    "Version": "2012-10-17",
    "Statement": [
        {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}
    ],
}


class Aws:
    """An AWS account on loopback.

    Args:
        root: A folder for the hosts of jobs, and for notes.
    """

    def __init__(self, root):
        self._root, self._clients, self._runs = root, {}, {}
        self._session = boto3.session.Session("testing", "testing")
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.address = f"http://{host}:{port}"
        _extend_moto(self)
        self.reset()

    def close(self):
        self.reset()
        self._server.stop()

    def reset(self):
        """Restore the state at the start: no job, no bucket, no role, no fault."""
        for run in self._runs.values():
            run.close()
        self._runs, self._play, self._states = {}, {}, {}
        self.run = False
        """Whether the bundle of the jobs from now on runs."""
        CALLS.clear()
        (self._root / "calls").write_text("")
        for service in _SERVICES:
            for regions in get_backend(service).values():
                for backend in regions.values():
                    backend.reset()

    @property
    def env(self):
        """Return the environment of a process that uses only this server."""
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            NOTES: str(self._root / "calls"),
        }

    def use(self, monkeypatch):
        """Let this process, and its children, use the server, and boto3 try again without a pause."""
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in self.env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0)

    def client(self, name, region=REGION):
        """Return a client of the tests, whose calls are neither noted nor broken."""
        key = name, region
        if key not in self._clients:
            config = Config(user_agent_extra=OF_TESTS)
            self._clients[key] = self._session.client(name, region, endpoint_url=self.address, config=config)
        return self._clients[key]

    fault = staticmethod(CALLS.fault)

    def calls(self):
        """Return the calls of all processes that have used the server, as `service:Operation`."""
        return (self._root / "calls").read_text().split()

    # The account ---------------------------------------------------------------------

    def role(self, name="trainer", trust=None):
        """Create a role that SageMaker can assume."""
        created = self.client("iam").create_role(
            RoleName=name, AssumeRolePolicyDocument=json.dumps(trust or _TRUST)
        )
        return created["Role"]["Arn"]

    def bucket(self, name, **objects):
        """Create a bucket with these objects, by key."""
        self.client("s3").create_bucket(Bucket=name)
        for key, body in objects.items():
            self.client("s3").put_object(Bucket=name, Key=key, Body=body)
        return name

    # Jobs ----------------------------------------------------------------------------

    def play(self, status="Completed", secondary=None, states=(), **play):
        """Choose what becomes of the jobs that are created from now on.

        Args:
            status: TrainingJobStatus.
            secondary: SecondaryStatus; None for that of the same name, or `Training`.
            states: Pairs of both that the first descriptions show before.
            play: `lines` of the first host, or by host; files of `model` and `output`; and members of the description.
        """
        secondary = secondary or ("Training" if status == "InProgress" else status)
        self._play = {"states": [*states, (status, secondary)], **play}

    def create(self, name, **changes):
        """Create a job as accel does, with changes of the minimal request."""
        request = {
            "TrainingJobName": name,
            "RoleArn": ROLE,
            "AlgorithmSpecification": {
                "TrainingImage": f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/pytorch:1",
                "TrainingInputMode": "File",
            },
            "OutputDataConfig": {"S3OutputPath": "s3://sagemaker-out/accel"},
            "ResourceConfig": {"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 30},
            "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
        }
        self.client("sagemaker").create_training_job(**request | changes)

    def describe(self, name, region=REGION):
        return self.client("sagemaker", region).describe_training_job(TrainingJobName=name)

    def log(self, job, lines, host="algo-1"):
        """Add lines to the log of a host."""
        if not lines:
            return
        logs, stream = get_backend("logs")[ACCOUNT][job.region_name], f"{job.training_job_name}/{host}-1"
        if GROUP not in logs.groups:
            logs.create_log_group(GROUP, {})
        if stream not in logs.groups[GROUP].streams:
            logs.create_log_stream(GROUP, stream)
        # CloudWatch takes no event without text.
        events = [{"timestamp": int(time.time() * 1000), "message": line or " "} for line in lines]
        logs.put_log_events(GROUP, stream, events)

    def put(self, job, files, name):
        """Put files that a job leaves, as `{path: bytes}`, where SageMaker does."""
        place = job.output_data_config
        bucket, _, prefix = place["S3OutputPath"].removeprefix("s3://").partition("/")
        prefix, s3 = f"{prefix}/{job.training_job_name}/output", get_backend("s3")[ACCOUNT]["aws"]
        if place.get("CompressionType") == "NONE":
            for path, content in files.items():
                s3.put_object(bucket, f"{prefix}/{name}/{path}", content)
        elif files:
            s3.put_object(bucket, f"{prefix}/{name}.tar.gz", pack(files))

    def started(self, job, request):
        """Begin a job that was created; called by moto's server."""
        name, count = job.training_job_name, request["ResourceConfig"]["InstanceCount"]
        if self.run:
            self._runs[name] = Run(self, job, request, self._root / name)
            return
        play = {"states": [("Completed", "Completed")], **self._play}
        self._states[name], lines = play.pop("states"), play.pop("lines", [])
        status = self._states[name][-1][0]
        job.training_job_status, job.secondary_status = self._states[name][0]
        last = "accel: {} ended with exit code " + str(int(status == "Failed"))
        for host in [f"algo-{number}" for number in range(1, count + 1)]:
            host_lines = lines.get(host, []) if isinstance(lines, dict) else lines
            self.log(job, [*host_lines, *([last.format(host)] if status != "InProgress" else [])], host)
        if status == "InProgress":
            job.training_end_time = None
        for folder in ("model", "output"):
            files = {path: text.encode() for path, text in play.pop(folder, {}).items()}
            self.put(job, files, folder)
        for member, value in play.items():
            setattr(job, underscored(member), value)

    def step(self, job):
        """Show the next state of a job; the last one stays."""
        if states := self._states.get(job.training_job_name):
            job.training_job_status, job.secondary_status = states[0] if len(states) == 1 else states.pop(0)

    def stop(self, job):
        """Stop a job; called by moto's server."""
        if run := self._runs.get(job.training_job_name):
            run.stop()
        else:
            self._states[job.training_job_name] = [("Stopping", "Training"), ("Stopped", "Stopped")]


def pack(files):
    """Return an archive of files, as `{path: bytes}`; a key may be an entry of a link."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, data in files.items():
            entry = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return content.getvalue()


def underscored(member):
    """Return the attribute of moto's job for a member of a request or description."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", member).lower()


def _extend_moto(aws):
    """Give moto's SageMaker what it lacks."""
    create, describe = SageMakerResponse.create_training_job, SageMakerResponse.describe_training_job

    def create_training_job(self):
        request, backend = json.loads(self.body), self.sagemaker_backend
        name, before = request["TrainingJobName"], backend.training_jobs
        if name in before:
            raise ResourceInUseException(f"Training job names must be unique: {before[name].arn} exists")
        answer = create(self)
        job = before.pop(name)
        for member, value in request.items():
            setattr(job, underscored(member), value)
        job.region_name = self.region
        # moto does not sort a list, and the newest are the first of it.
        backend.training_jobs = {name: job, **before}
        aws.started(job, request)
        return answer

    def describe_training_job(self):
        if job := self.sagemaker_backend.training_jobs.get(self._get_param("TrainingJobName")):
            aws.step(job)
        return describe(self)

    def stop_training_job(self):
        name = self._get_param("TrainingJobName")
        self.sagemaker_backend.describe_training_job(name)  # refuses a name that no job has
        aws.stop(self.sagemaker_backend.training_jobs[name])
        return ActionResult({})

    for method in (create_training_job, describe_training_job, stop_training_job):
        setattr(SageMakerResponse, method.__name__, method)
