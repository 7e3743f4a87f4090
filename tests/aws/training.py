"""A training job of the plane: its states, attempts, S3 files and description."""

from __future__ import annotations

import datetime as dt
import io
import math
import re
import signal
import tarfile
import threading
import time

from hosts import Played, Real, wait_all
from streams import Writer
from support.processes import free_port

__all__ = ["SETTINGS", "TrainingJob"]

SETTINGS = {
    "run": True,  # whether bundles are run; else what `play` says happens
    "play": {},
    "pause": 0.02,  # seconds in each state that has nothing to do
    "hold": None,  # the state that jobs do not leave until this changes
    "grace": 5.0,  # seconds between SIGTERM and SIGKILL
    "speed": 1.0,  # how much faster max_run and max_wait pass
    "time": None,  # training seconds that replace the real ones
    "spot_rate": 0.3,  # billable part of the seconds of a spot job
    "log_delay": 0.0,
    "quota": {},  # instances by type; `spot TYPE` for spot
}
_SAID = {
    "Starting": "Preparing the instances for training",
    "Downloading": "Downloading input data",
    "Training": "Training image download completed. Training in progress.",
    "Uploading": "Uploading generated training model",
    "Stopping": "Stopping the training job",
    "Interrupted": "Training job interrupted due to a lack of Spot capacity",
    "Restarting": "Restarting the training job",
    "Completed": "Training job completed",
    "Failed": "Training job failed",
    "Stopped": "Training job stopped",
    "MaxRuntimeExceeded": "Training job runtime exceeded MaxRuntimeInSeconds provided",
    "MaxWaitTimeExceeded": "Training job wait time exceeded MaxWaitTimeInSeconds provided",
}
_ENDS = {
    "Completed": "Completed",
    "Failed": "Failed",
    "Stopped": "Stopped",
    "MaxRuntimeExceeded": "Stopped",
    "MaxWaitTimeExceeded": "Stopped",
}


class TrainingJob:
    """A job, and the thread that runs it."""

    def __init__(self, request, arn, platform):
        """Begin.

        Args:
            said: The request.
            arn: The job's name in full.
            platform: `settings`, `root`, `s3` (a client), `env` of containers, `account`, `region`.
        """
        self.said, self.arn, self.platform = request, arn, platform
        self.name = request["TrainingJobName"]
        self.created = self.modified = _now()
        self.started = self.ended = None
        self.transitions, self.failure, self.metrics = [], None, {}
        self.asked, self.attempt, self.hosts = None, 0, []
        self.changed = threading.Condition()
        self.writer = Writer(platform.account, platform.region, lambda: platform.settings["log_delay"])
        self._phase("Starting")
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    # Requests ------------------------------------------------------------------------

    @property
    def done(self):
        return self.secondary in _ENDS

    @property
    def secondary(self):
        return self.transitions[-1]["Status"]

    @property
    def status(self):
        if self.secondary == "Stopping" or (self.asked == "stop" and not self.done):
            return "Stopping"
        return _ENDS.get(self.secondary, "InProgress")

    def ask(self, action):
        """Request `stop`, `interrupt`, or `kill` if the plane itself ends."""
        with self.changed:
            if self.asked not in {"stop", "kill"}:
                self.asked = action
            if action == "stop" and not self.done:
                self._phase("Stopping")
            self.changed.notify_all()

    def print(self, host, lines):
        """Print lines on a host."""
        printing = next(host_of_job for host_of_job in self.hosts if host_of_job.name == host)
        for line in lines:
            printing.put(line)

    def summary(self):
        summary_fields = {
            "TrainingJobName": self.name,
            "TrainingJobArn": self.arn,
            "CreationTime": self.created,
            "TrainingEndTime": self.ended,
            "LastModifiedTime": self.modified,
            "TrainingJobStatus": self.status,
            "SecondaryStatus": self.secondary,
        }
        return {key: value for key, value in summary_fields.items() if value is not None}

    def describe(self):
        described = {key: value for key, value in self.said.items() if key != "Tags"} | self.summary()
        described |= {
            "SecondaryStatusTransitions": [dict(transition) for transition in self.transitions],
            "FinalMetricDataList": [
                {"MetricName": name, "Value": value, "Timestamp": self.modified}
                for name, value in self.metrics.items()
            ],
        }
        described.setdefault("EnableManagedSpotTraining", False)
        if self.started:
            described["TrainingStartTime"] = self.started
        if self.failure and self.done:
            described["FailureReason"] = self.failure[:1024]
        if self.done:
            is_packed = self.said["OutputDataConfig"].get("CompressionType") != "NONE"
            artifacts = "model.tar.gz" if is_packed else "model/"
            described["ModelArtifacts"] = {"S3ModelArtifacts": f"{self._output()}/{artifacts}"}
        if self.ended and self.started:
            seconds = self.platform.settings["time"] or math.ceil((self.ended - self.started).total_seconds())
            rate = self.platform.settings["spot_rate"] if described["EnableManagedSpotTraining"] else 1
            described |= {
                "TrainingTimeInSeconds": seconds,
                "BillableTimeInSeconds": math.ceil(seconds * rate),
            }
        return described

    # States --------------------------------------------------------------------------

    def _run(self):
        try:
            with free_port() as self.port:
                end = self._live()
        except Exception as error:  # noqa: BLE001 - whatever it is, the job has failed and says why
            self.failure, end = f"InternalServerError: {type(error).__name__}: {error}", "Failed"
        for host in self.hosts:
            host.close()
        if not self.platform.settings["log_delay"]:
            self.writer.whole()
        with self.changed:
            self.ended = _now() if self.started else None
            self._phase(end)
        self.writer.end()

    def _live(self):
        while True:
            if why := self._stay("Starting"):
                return why
            self._phase("Downloading")
            self._prepare()
            if why := self._stay("Downloading"):
                return why
            self.started = self.started or _now()
            self._phase("Training")
            end = self._train()
            self._save()
            if end != "Interrupted":
                break
            self._phase("Interrupted")
            if why := self._stay("Interrupted"):
                return why
            self.attempt += 1
            self._phase("Starting")
        if end == "Completed":
            self._phase("Uploading")
            self._stay("Uploading")
        self._upload(end)
        return end

    def _phase(self, status):
        with self.changed:
            if self.asked == "stop" and status not in {*_ENDS, "Stopping"}:
                return
            if self.transitions:
                self.transitions[-1]["EndTime"] = _now()
            self.transitions.append(
                {"Status": status, "StartTime": _now(), "StatusMessage": self.failure or _SAID[status]}
            )
            self.modified = _now()
            self.changed.notify_all()

    def _stay(self, status):
        """Stay in a state for the configured time; return the end, if it comes earlier."""
        end = time.monotonic() + self.platform.settings["pause"]
        with self.changed:
            while self.platform.settings["hold"] == status or time.monotonic() < end:
                if self.asked in {"stop", "kill"}:
                    break
                if self._late() and status != "Uploading":
                    return "MaxWaitTimeExceeded"
                self.changed.wait(0.01)
            return "Stopped" if self.asked in {"stop", "kill"} and status != "Uploading" else None

    def _late(self):
        wait = self.said["StoppingCondition"].get("MaxWaitTimeInSeconds")
        return wait is not None and self._passed(self.created) > wait

    def _passed(self, since):
        return (_now() - since).total_seconds() * self.platform.settings["speed"]

    def _train(self):
        with self.changed:
            if self.asked == "interrupt":
                self.asked = None
        for host in self.hosts:
            host.start()
        start = _now()
        with self.changed:
            while (why := self._why_ended(start)) is None:
                self.changed.wait(0.02)
        if why != "over":
            self._end_hosts()
        return self._verdict(why)

    def _why_ended(self, start):  # noqa: PLR0911 - as many as there are reasons
        if self.asked == "kill":
            return "Stopped"
        if any(host.code for host in self.hosts):
            return "over"
        if self.platform.settings["hold"] != "Training" and all(host.code == 0 for host in self.hosts):
            return "over"
        if self.asked == "stop":
            return "Stopped"
        if self.asked == "interrupt":
            self.asked = None
            return "Interrupted"
        if self._passed(start) > self.said["StoppingCondition"].get("MaxRuntimeInSeconds", 86400):
            return "MaxRuntimeExceeded"
        return "MaxWaitTimeExceeded" if self._late() else None

    def _verdict(self, why):
        if why != "over":
            return why
        failed = [host for host in sorted(self.hosts, key=lambda host: host.when) if host.code]
        if not failed:
            return "Completed"
        first = failed[0]
        self._end_hosts()
        reason = next(
            (text for text in map(_failure, [first, *self.hosts]) if text), "See job logs for the reason"
        )
        self.failure = f"AlgorithmError: {reason}, exit code: {first.code}"
        return "Failed"

    def _end_hosts(self):
        for number, seconds in ((signal.SIGTERM, self.platform.settings["grace"]), (signal.SIGKILL, 10)):
            if self.asked == "kill" and number == signal.SIGTERM:
                continue
            for host in self.hosts:
                if host.code is None:
                    host.signal(number)
            if wait_all(self.hosts, seconds):
                return

    # Hosts ---------------------------------------------------------------------------

    def _prepare(self):
        for host in self.hosts:
            host.close()
        count, real = self.said["ResourceConfig"].get("InstanceCount", 1), self.platform.settings["run"]
        names = [f"127.{index}" if real else f"algo-{index}" for index in range(1, count + 1)]
        stamp = int(time.time()) + self.attempt
        self.hosts = [self._host(name, f"{self.name}/{name}-{stamp}", real) for name in names]
        if real:
            self._fill(names)

    def _host(self, name, stream, real):
        def put(line):
            self.writer.put(stream, line)
            self._measure(line)

        def ended(host):
            host.when = time.monotonic()
            with self.changed:
                self.changed.notify_all()

        if real:
            host = Real(name, self.platform.root / self.name / str(self.attempt) / name, put, ended)
        else:
            host = Played(name, self.platform.settings["play"], put, ended)
        host.put = put
        return host

    def _measure(self, line):
        for metric in self.said["AlgorithmSpecification"].get("MetricDefinitions", []):
            if match := re.search(metric["Regex"], line):
                self.metrics[metric["Name"]] = float(match[1])

    def _fill(self, names):
        """Fill the folders of every host: its channels and its checkpoints."""
        env = {
            "TRAINING_JOB_NAME": self.name,
            "TRAINING_JOB_ARN": self.arn,
            "AWS_REGION": self.platform.region,
            # Containers have a network each; here all jobs are on one loopback interface.
            "SM_MASTER_PORT": str(self.port),
            **self.platform.env,
        }
        for index, host in enumerate(self.hosts):
            host.configure(self.said, names)
            for channel in self.said.get("InputDataConfig", []):
                self._channel(host, channel, index)
            if keep := self.said.get("CheckpointConfig"):
                self._fetch(keep["S3Uri"].rstrip("/") + "/", host.root / "checkpoints")
            host.prepare(self.said, env)

    def _channel(self, host, channel, index):
        if (source := channel["DataSource"].get("S3DataSource")) is None:
            return  # a file system
        sharded = source.get("S3DataDistributionType") == "ShardedByS3Key"
        folder = host.root / "input" / "data" / channel["ChannelName"]
        self._fetch(source["S3Uri"], folder, (index, len(self.hosts)) if sharded else (0, 1))

    def _fetch(self, uri, folder, shard=(0, 1)):
        folder.mkdir(parents=True, exist_ok=True)
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        start = prefix if prefix.endswith("/") or not prefix else prefix + "/"
        for key in sorted(self.platform.keys(bucket, prefix))[shard[0] :: shard[1]]:
            name = key.removeprefix(start) if key.startswith(start) else key.rpartition("/")[2]
            if name and not name.endswith("/"):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                self.platform.s3.download_file(bucket, key, str(folder / name))

    # Output --------------------------------------------------------------------------

    def _output(self):
        return f"{self.said['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{self.name}/output"

    def _save(self):
        """Copy checkpoints to S3, also after a failure."""
        if keep := self.said.get("CheckpointConfig"):
            for host in self.hosts:
                for name, content in host.files("checkpoints").items():
                    self._put(f"{keep['S3Uri'].rstrip('/')}/{name}", content)

    def _upload(self, end):
        folders = {"output/data": "output.tar.gz"} | ({} if end == "Failed" else {"model": "model.tar.gz"})
        for folder, archive in folders.items():
            files = {}
            for host in self.hosts:
                files |= host.files(folder)
            if files and self.said["OutputDataConfig"].get("CompressionType") == "NONE":
                for name, content in files.items():
                    self._put(f"{self._output()}/{folder.rpartition('/')[2]}/{name}", content)
            elif files:
                self._put(f"{self._output()}/{archive}", _tar(files))

    def _put(self, uri, content):
        bucket, _, key = uri.removeprefix("s3://").partition("/")
        self.platform.s3.put_object(Bucket=bucket, Key=key, Body=content)

    def close(self):
        """End immediately, and leave no process."""
        self.ask("kill")
        self.thread.join()
        self.writer.whole()


def _failure(host):
    return host.failure().strip()


def _now():
    return dt.datetime.now(dt.UTC)


def _tar(files):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, data in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return content.getvalue()
