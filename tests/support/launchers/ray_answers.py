"""Recorded answers of Ray's client of the job API, which is in an environment of its own: `make test-ray` uses a real one."""

from __future__ import annotations

from types import SimpleNamespace

__all__ = ["RecordedClient", "details"]


def details(status, message="", **more):
    """Return the details of a job."""
    values = {"submission_id": "train-1", "job_id": "01", "metadata": {"job_name": "train-1"}, "start_time": 1_000_000,
              "end_time": 1_065_000, "driver_exit_code": None}  # fmt: skip
    return SimpleNamespace(status=status, message=message, **values | more)


class RecordedClient:
    """A client that answers for recorded jobs.

    Args:
        user: The user who submitted them.
    """

    def __init__(self, user):
        self._user = user
        self._jobs, self._outputs = {}, {}

    def add(self, job_id, status, output, **more):
        """Add a job with its output."""
        metadata = {"accel-user": self._user, "job_name": job_id}
        self._jobs[job_id] = details(status, submission_id=job_id, metadata=metadata, **more)
        self._outputs[job_id] = output

    def list_jobs(self):
        """Return the details of all jobs."""
        return list(self._jobs.values())

    def get_job_info(self, job_id):
        """Return the details of a job."""
        if job_id not in self._jobs:
            raise RuntimeError(f"Request failed with status code 404: Job {job_id} does not exist.")
        return self._jobs[job_id]

    def stop_job(self, job_id):
        """End a job that runs."""
        self.get_job_info(job_id).status = "STOPPED"

    async def tail_job_logs(self, job_id):
        """Yield the output; the connection of a job that runs is closed as by a proxy."""
        yield self._outputs[job_id]
