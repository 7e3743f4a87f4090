"""Following a job: its log on stdout, what becomes of it on stderr, its exit code at the end."""

from __future__ import annotations

import sys
import time

from accel_cli import console
from accel_cli.jobs.base import Job, Jobs, Log, UnreachableError

__all__ = ["follow", "pass_on"]

_INTERRUPTED = 130
_READ_EVERY_S = 0.2
_ASK_EVERY_S = (0.5, 5.0)
"""How often a service is asked: often at the start, then less and less."""
_SILENT_S = 600
"""How long a service may not answer before that is the end."""
_LATE_S = 1.0
"""How long the last lines of a log may take to arrive on a shared file system."""


def follow(jobs: Jobs, job: Job) -> int:
    """Pass on what a job prints until it is done; Ctrl-C leaves it running.

    Returns:
        What the job's end comes to, or 130 after Ctrl-C.

    Raises:
        UnreachableError: The service has not answered for a long time.
        UsageError: The job is not known any more.
    """
    try:
        job = _until_done(jobs, job)
    except KeyboardInterrupt:
        console.note(
            f"job {job.id} goes on; accel jobs logs {job.id} -f follows it again, accel jobs stop {job.id} ends it"
        )
        return _INTERRUPTED
    return _end(job)


def pass_on(log: Log) -> bool:
    """Print what is new in a log; whether there was anything."""
    new = log.read()
    if new:
        # Bytes, since a log may hold what is no text.
        sys.stdout.flush()
        sys.stdout.buffer.write(new)
        sys.stdout.buffer.flush()
    return bool(new)


def _until_done(jobs: Jobs, job: Job) -> Job:
    log, pause, asked = jobs.log(job), _ASK_EVERY_S[0], time.monotonic()
    answered = asked
    _say(job)
    while not job.done:
        _catch_up(log)
        time.sleep(_READ_EVERY_S)
        if time.monotonic() - asked < pause:
            continue
        new, asked, pause = (
            _ask(jobs, job, since=answered),
            time.monotonic(),
            min(pause * 1.2, _ASK_EVERY_S[1]),
        )
        if new:
            answered = asked
            if _changed(job, new):
                _say(new)
                pause = _ASK_EVERY_S[0]
            job = new
    _drain(log)
    return job


def _ask(jobs: Jobs, job: Job, *, since: float) -> Job | None:
    """What the service says, or None if it does not answer now."""
    try:
        return jobs.status(job.id)
    except UnreachableError as error:
        if time.monotonic() - since > _SILENT_S:
            raise
        console.note(f"{error}; job {job.id} is asked about again")
        return None


def _catch_up(log: Log) -> bool:
    """Print all that is new in a log; whether there was anything."""
    some = False
    while pass_on(log):
        some = True
    return some


def _drain(log: Log) -> None:
    last = time.monotonic()
    while time.monotonic() - last < _LATE_S:
        if _catch_up(log):
            last = time.monotonic()
        time.sleep(_READ_EVERY_S)


def _changed(old: Job, new: Job) -> bool:
    return (old.state, old.reason, old.restarts) != (new.state, new.reason, new.restarts)


def _say(job: Job) -> None:
    if job.done:
        return
    why = f" ({job.reason})" if job.reason else ""
    where = f" on {job.where}" if job.where else ""
    again = f", restart {job.restarts}" if job.restarts else ""
    console.note(f"job {job.id} is {job.state}{why}{where}{again}")


def _end(job: Job) -> int:
    """The last line on the screen, and the exit code."""
    code = job.exit_code or 0
    if code:
        console.error(
            f"job {job.id} ended as {job.state} with exit code {code}; its log: {job.log or 'unknown'}"
        )
    else:
        console.note(f"job {job.id} is {job.state} after {job.elapsed}")
    return code
