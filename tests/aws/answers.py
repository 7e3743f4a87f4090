"""Operations of SageMaker that moto lacks: training jobs that are validated, run, listed and stopped."""

from __future__ import annotations

import datetime as dt
import json
import types

from moto.core.responses import ActionResult
from moto.iam.models import iam_backends
from moto.s3.models import s3_backends
from moto.sagemaker.exceptions import SagemakerClientError
from moto.sagemaker.responses import SageMakerResponse
from rules import RefusedError, check
from training import TrainingJob

__all__ = ["ACCOUNT", "answer", "keys"]

ACCOUNT = "123456789012"
_PAGE = 10


def answer(plane):
    """Register these operations for the dispatch of moto."""
    SageMakerResponse.moto_create = SageMakerResponse.create_training_job
    SageMakerResponse.plane = plane
    for name, method in vars(Answers).items():
        if not name.startswith("__") and name != "plane":
            setattr(SageMakerResponse, name, method)


def keys(bucket, prefix):
    """Return the keys of a bucket below a prefix, or none without a bucket."""
    buckets = s3_backends[ACCOUNT]["aws"].buckets
    return [key for key in buckets[bucket].keys if key.startswith(prefix)] if bucket in buckets else []


class Answers(SageMakerResponse):
    """Operations of SageMaker, with the method names of moto's dispatch."""

    plane = None
    """What is behind them."""

    def _mine(self):
        return {
            name: job
            for (account, region, name), job in self.plane.jobs.items()
            if (account, region) == (self.current_account, self.region)
        }

    def _job(self):
        name = self._get_param("TrainingJobName")
        if job := self._mine().get(name):
            return job
        raise SagemakerClientError("ValidationException", "Requested resource not found.")

    def _arn(self, name):
        return f"arn:aws:sagemaker:{self.region}:{self.current_account}:training-job/{name}"

    def create_training_job(self):
        request = json.loads(self.body)
        with self.plane.lock:
            try:
                check(request, self._world())
            except RefusedError as error:
                raise SagemakerClientError(error.code, error.message) from None
            name = request["TrainingJobName"]
            arn = self._arn(name)
            self.moto_create()  # moto lists its tags
            platform = self.plane.platform(self.current_account, self.region)
            self.plane.jobs[self.current_account, self.region, name] = TrainingJob(request, arn, platform)
        return ActionResult({"TrainingJobArn": arn})

    def _world(self):
        mine = self._mine()
        return types.SimpleNamespace(
            names=lambda: mine,
            arn=self._arn,
            role=self._role,
            region=self.region,
            objects=lambda uri: keys(*uri.removeprefix("s3://").split("/", 1)),
            quota=lambda kind, spot: self.plane.settings["quota"].get(f"spot {kind}" if spot else kind),
            used=lambda kind: sum(
                job.said["ResourceConfig"]["InstanceCount"]
                for job in mine.values()
                if not job.done and job.said["ResourceConfig"]["InstanceType"] == kind
            ),
        )

    def _role(self, arn):
        for role in iam_backends[self.current_account]["aws"].roles.values():
            if role.arn == arn:
                policy = role.assume_role_policy_document
                return json.loads(policy) if isinstance(policy, str) else policy
        return None

    def describe_training_job(self):
        return ActionResult(self._job().describe())

    def list_training_jobs(self):
        parameter = self._get_param
        jobs = [job for job in self._mine().values() if self._wanted(job)]
        keys = {"Name": lambda job: job.name, "Status": lambda job: job.status}
        down = parameter("SortOrder", "Descending") == "Descending"
        jobs.sort(key=keys.get(parameter("SortBy", "CreationTime"), lambda job: job.created), reverse=down)
        start, size = int(parameter("NextToken") or 0), int(parameter("MaxResults") or _PAGE)
        page = {"TrainingJobSummaries": [job.summary() for job in jobs[start : start + size]]}
        if start + size < len(jobs):
            page["NextToken"] = str(start + size)
        return ActionResult(page)

    def _wanted(self, job):
        after, before = self._get_param("CreationTimeAfter"), self._get_param("CreationTimeBefore")
        name, status = self._get_param("NameContains"), self._get_param("StatusEquals")
        return (
            (after is None or job.created >= _aware(after))
            and (before is None or job.created <= _aware(before))
            and (not name or name.lower() in job.name.lower())
            and (not status or job.status == status)
        )

    def stop_training_job(self):
        job = self._job()
        if job.done:
            raise SagemakerClientError(
                "ValidationException",
                f"The request was rejected because the training job is in status {job.status}.",
            )
        job.ask("stop")
        return ActionResult({})

    def delete_training_job(self):
        job = self._job()
        if not job.done:
            raise SagemakerClientError("ValidationException", f"The training job is in status {job.status}.")
        del self.plane.jobs[self.current_account, self.region, job.name]
        return ActionResult({})

    def update_training_job(self):
        job = self._job()
        job.said["ResourceConfig"] |= json.loads(self.body).get("ResourceConfig", {})
        return ActionResult({"TrainingJobArn": job.arn})


def _aware(when):
    return when if when.tzinfo else when.replace(tzinfo=dt.UTC)
