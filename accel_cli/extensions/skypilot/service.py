"""The jobs of SkyPilot, through its command: each is the first job of a cluster of its own."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import secrets
import select
import subprocess
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

from typing_extensions import override

from accel_cli import console
from accel_cli.errors import AccelError, UsageError
from accel_cli.extensions.skypilot.task import LABEL, TASK_FILE, SkyJobPlan, write_folder
from accel_cli.launchers.job_service import (
    Job,
    Jobs,
    Log,
    PollIntervals,
    UnreachableError,
    follow_submission,
    format_commands,
)
from accel_cli.planning.plan import Plan

__all__ = ["ManagedJobs", "SkyJobs", "SkyLog", "submit"]

_TIMEOUT_S = 120
_CHUNK = 1 << 18
_NO_SKY = "launcher.kind: skypilot needs the command sky, which was not found. Install SkyPilot (https://docs.skypilot.co), and run sky check."
_UNREACHABLE = re.compile(r"(?i)connect|timed? ?out|api server.*(unavailable|not healthy)|temporarily")
_EXIT_CODES = {"SUCCEEDED": 0, "CANCELLED": 143, "FAILED": 1, "FAILED_DRIVER": 1, "FAILED_SETUP": 1}
"""Exit codes by the status of a job that has ended; that of the script is in the log only."""
_MANAGED_EXIT_CODES = {
    **_EXIT_CODES,
    **dict.fromkeys(("FAILED_PRECHECKS", "FAILED_NO_RESOURCE", "FAILED_CONTROLLER"), 1),
}
_NODE_EXIT_CODES = re.compile(r"failed with return code list:\s*\[([\d, ]+)\]")
"""The line at the end of the log of a failed job (SkyPilot 0.10 to 0.14), with the exit code of each node."""
_CONSEQUENCES = frozenset({1, 137, 143})
"""Exit codes of nodes whose run ended on another one, or that SkyPilot has ended."""
_NUM_LAST_LINES = 50
_CONTROLLER = (
    "SkyPilot ends the clusters of the job, also after a failure. Its jobs controller remains, if it has one of its own, and stops after "
    "ten minutes without jobs: see sky status"
)
_LOG_EXIT_CODES = frozenset({0, 100, 103})
"""Exit codes of `sky logs` for a job that succeeded, failed or was cancelled."""
_FIRST_S, _QUIET_S = 20.0, 0.3
"""Seconds to wait for the first output of `sky logs`, and for more."""
_GONE_EXIT_CODE = 143
_NUM_RANDOM_BYTES = 3
_NAME = re.compile(rf"[a-z][-a-z0-9]*-[0-9a-f]{{{2 * _NUM_RANDOM_BYTES}}}")
"""The names of jobs of accel."""
_COLORS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_HOUR_S = 3600


class SkyJobs(Jobs):
    """The clusters that the user has started with accel, as `sky` reports them; SkyPilot forgets those that it has ended."""

    # A command of sky takes seconds, and asks its server.
    intervals: ClassVar[PollIntervals] = PollIntervals(log_s=0.5, status_s=(5.0, 30.0), last_output_s=10.0)
    output_location = "on the nodes, which SkyPilot ends after the job. Write them to a bucket, for example with file_mounts in launcher.task."

    def __init__(self) -> None:
        self._last: dict[str, Job] = {}

    @override
    def list(self) -> list[Job]:
        records = [record for record in _run_json("status") if LABEL in json.dumps(record)]
        prices = _read_prices() if records else {}
        ordered = sorted(records, key=lambda each: each["launched_at"])
        return [self._read_exit_code(self._describe(record, prices)) for record in ordered]

    @override
    def status(self, job_id: str) -> Job:
        if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job_id):
            raise UsageError(
                f"Invalid job id {job_id!r}: expected the name of a cluster. Run accel jobs list to see yours."
            )
        found = [record for record in _run_json("status", job_id) if record["name"] == job_id]
        if not found:
            return self._describe_gone(job_id)
        known = self._last.get(job_id)
        prices = {job_id: known.cost} if known and known.cost else _read_prices()
        return self._read_exit_code(self._describe(found[0], prices))

    def _read_exit_code(self, job: Job) -> Job:
        """Return a job with the exit code of its script, and keep it as its last state."""
        if job.state == "FAILED":
            job = replace(job, exit_code=_find_exit_code(self._last.get(job.id), "logs", job.id))
        self._last[job.id] = job
        return job

    def _describe(self, cluster: Mapping[str, Any], prices: Mapping[str, str]) -> Job:
        name, state, reason = cluster["name"], cluster["status"], ""
        record: Mapping[str, Any] = {}
        if state == "UP":
            jobs = _run_json("queue", name).get(name) or []
            record = max(jobs, key=lambda each: each["job_id"], default={})
            state = record.get("status", "PENDING")
        elif state == "STOPPED":
            reason = "the cluster was stopped"
        else:
            reason = cluster.get("init_status_reason") or "the cluster starts"
        code = _GONE_EXIT_CODE if state == "STOPPED" else _EXIT_CODES.get(state)
        start = record.get("start_at") or cluster["launched_at"]
        end = record.get("end_at") or time.time()
        place = "/".join(filter(None, (cluster.get("cloud"), cluster.get("region"))))
        kind = cluster.get("resources_str") or cluster.get("accelerators") or ""
        return Job(
            id=name,
            name=name,
            state=state,
            finished=code is not None,
            exit_code=code,
            reason=reason,
            nodes=", ".join(filter(None, (place, kind, prices.get(name, "")))),
            submitted=dt.datetime.fromtimestamp(cluster["launched_at"], dt.UTC).isoformat(),
            elapsed=str(dt.timedelta(seconds=max(0, int(end - start)))),
            log=f"sky logs {name} --tail 0",
            hosts=cluster.get("nodes", 1) if record else 0,
            cost=prices.get(name, ""),
        )

    def _describe_gone(self, job_id: str) -> Job:
        """Return a job whose cluster has ended since its last status; raise if it was never seen."""
        last = self._last.get(job_id)
        if last is None:
            raise UsageError(
                f"Unknown job {job_id!r}: SkyPilot has no cluster of this name, or has ended it. Run accel jobs list, or sky cost-report."
            )
        if last.finished:
            return last
        reason = "the cluster was ended"
        return Job(
            job_id, last.name, "DOWN", finished=True, exit_code=_GONE_EXIT_CODE, reason=reason, cost=last.cost
        )

    @override
    def open_log(self, job: Job) -> Log:
        return SkyLog("logs", job.id)

    @override
    def stop(self, job_id: str) -> None:
        self.status(job_id)
        _run("down", "--yes", job_id)


class ManagedJobs(Jobs):
    """The managed jobs of the user whose names are those of accel; SkyPilot starts them again after a preemption."""

    intervals: ClassVar[PollIntervals] = SkyJobs.intervals
    output_location = SkyJobs.output_location

    def __init__(self) -> None:
        self._last: dict[str, Job] = {}

    @override
    def list(self) -> list[Job]:
        jobs = map(self._describe, self._read())
        return sorted(jobs, key=lambda job: job.submitted)

    @override
    def status(self, job_id: str) -> Job:
        found = [record for record in self._read() if record["job_name"] == job_id]
        if not found:
            raise UsageError(
                f"Unknown job {job_id!r}: SkyPilot has no managed job of this name. Run accel jobs list, or sky jobs queue --all."
            )
        job = self._describe(max(found, key=lambda record: record["submitted_at"] or 0.0))
        if job.state == "FAILED":
            job = replace(
                job, exit_code=_find_exit_code(self._last.get(job_id), "jobs", "logs", "--name", job_id)
            )
        self._last[job_id] = job
        return job

    @staticmethod
    def _read() -> Sequence[Mapping[str, Any]]:
        records = _parse_json(_run("jobs", "queue", "--all", "--output", "json"), "jobs queue")
        return [record for record in records if _NAME.fullmatch(record.get("job_name") or "")]

    @staticmethod
    def _describe(record: Mapping[str, Any]) -> Job:
        name, state = record["job_name"], record["status"]
        code = _MANAGED_EXIT_CODES.get(state)
        submitted = record.get("submitted_at") or time.time()
        place = "/".join(filter(None, (record.get("cloud"), record.get("region"))))
        reason = record.get("failure_reason") or ""
        return Job(
            id=name,
            name=name,
            state=state,
            finished=code is not None,
            exit_code=code,
            reason=" ".join(reason.split()) if code else "",
            nodes=", ".join(
                filter(None, (place, record.get("cluster_resources") or record.get("resources")))
            ),
            restarts=record.get("recovery_count") or 0,
            submitted=dt.datetime.fromtimestamp(submitted, dt.UTC).isoformat(),
            elapsed=str(dt.timedelta(seconds=int(record.get("job_duration") or 0))),
            log=f"sky jobs logs --name {name} --tail 0",
            hosts=1 if record.get("start_at") else 0,
        )

    @override
    def open_log(self, job: Job) -> Log:
        return SkyLog("jobs", "logs", "--name", job.id)

    @override
    def stop(self, job_id: str) -> None:
        self.status(job_id)
        _run("jobs", "cancel", "--yes", "--name", job_id)


def _find_exit_code(known: Job | None, *words: str) -> int:
    """Return the exit code of a failed job: that of the node that failed first, as far as the end of its log shows it.

    Args:
        known: The last state of the job; a job that had failed in it is not read again.
        words: The command of sky that prints the log.
    """
    if known and known.finished and known.exit_code:
        return known.exit_code
    command = ("sky", *words, "--tail", str(_NUM_LAST_LINES))
    with suppress(OSError, subprocess.SubprocessError):
        # It fails as the job has.
        shown = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )  # fmt: skip
        if matches := _NODE_EXIT_CODES.findall(_COLORS.sub("", shown.stdout)):
            codes = [code for code in map(int, matches[-1].split(",")) if code]
            return next((code for code in codes if code not in _CONSEQUENCES), next(iter(codes), 1))
    return 1


class SkyLog(Log):
    """The output of all nodes, from a command of sky that runs as long as the job.

    Args:
        words: The command.
    """

    def __init__(self, *words: str) -> None:
        self._words = words
        self._process: subprocess.Popen[bytes] | None = None
        self._length = self._skip = 0
        """Bytes that were read, and of those the ones that a new `sky logs` prints again."""

    @override
    def read(self) -> bytes:
        if self._complete:
            return b""
        process = self._process = self._process or self._start()
        stdout = process.stdout
        assert stdout
        select.select([stdout], [], [], _QUIET_S if self._length else _FIRST_S)
        # None: nothing was printed; empty: the command has ended.
        data = stdout.read(_CHUNK)
        if data == b"":
            self._end(process)
        skipped, self._skip = (data or b"")[: self._skip], max(0, self._skip - len(data or b""))
        new = (data or b"")[len(skipped) :]
        self._length += len(new)
        self.find_error(new)
        return new

    def _start(self) -> subprocess.Popen[bytes]:
        self._skip = self._length
        process = _popen(*self._words, "--tail", "0")
        assert process.stdout
        os.set_blocking(process.stdout.fileno(), False)
        weakref.finalize(self, _kill, process)
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Record that all output was read, or that the connection was lost.

        Raises:
            UnreachableError: The command has ended before the job.
        """
        self._process, code = None, process.wait()
        self._complete = code in _LOG_EXIT_CODES
        if not self._complete:
            raise UnreachableError(f"sky {' '.join(self._words)} ended with exit code {code}.")


def submit(plan: Plan) -> int:
    """Start a cluster with the job and return 0 if the plan detaches; otherwise follow the job and return its exit code."""
    job = plan.job
    assert isinstance(job, SkyJobPlan)
    for name in job.section.secrets:
        if name not in os.environ:
            raise UsageError(
                f"Cannot pass {name} of launcher.secrets: it is not set here. Set it, or remove it from the profile."
            )
    name, is_managed = f"{job.name}-{secrets.token_hex(_NUM_RANDOM_BYTES)}", job.section.managed
    commands = format_commands(name, job.jobs_options)
    with write_folder(job) as folder:
        command = job.build_submission(name, str(folder / TASK_FILE))
        try:
            # Its own messages are for the user; stdout is for the output of the job.
            code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, check=False).returncode
        except FileNotFoundError:
            raise UsageError(_NO_SKY) from None
        except KeyboardInterrupt:
            subject = (
                f"job {name} may be submitted" if is_managed else f"cluster {name} may start and cost money"
            )
            console.note(f"The submission was interrupted, and {subject}. {commands}")
            raise
    if code:
        remains = (
            f"A job that was accepted runs: see sky jobs queue, and run sky jobs cancel --name {name}"
            if is_managed
            else f"A cluster that was started remains and costs money: run sky down {name}"
        )
        raise AccelError(
            f"SkyPilot did not submit the job ({' '.join(command[: 3 if is_managed else 2])} exited with code {code}); its messages are above. "
            f"{remains}"
        )
    if is_managed:
        return follow_submission(ManagedJobs(), name, job, note=_CONTROLLER)
    return follow_submission(SkyJobs(), name, job, note=_format_price(name))


def _format_price(cluster: str) -> str:
    price = _read_prices().get(cluster, "")
    return f"cluster {cluster} costs {price} until SkyPilot ends it" if price else ""


def _read_prices() -> dict[str, str]:
    """Return the cost per hour of the clusters that exist, by name; empty if SkyPilot does not report it."""
    try:
        records = _run_json("cost-report")
    except AccelError:  # it is experimental in SkyPilot
        return {}
    return {
        record["name"]: f"$ {record['total_cost'] / record['duration'] * _HOUR_S:.2f} per hour"
        for record in records
        if record.get("status") != "TERMINATED" and record.get("duration") and record.get("total_cost")
    }


def _run_json(*words: str) -> Any:
    """Return what a command of sky prints as JSON, after the lines about its server."""
    command, *names = words
    return _parse_json(_run(command, "--output", "json", *names), command)


def _parse_json(text: str, command: str) -> Any:
    """Return the JSON in the output of a command of sky."""
    output = _COLORS.sub("", text)
    # Lines about its server and about unknown clusters come first.
    for start in re.finditer(r"^[\[{]", output, re.MULTILINE):
        with suppress(ValueError):
            return json.loads(output[start.start() :])
    lines = output.strip().splitlines()
    raise UnreachableError(f"sky {command} printed no JSON: {lines[-1] if lines else 'nothing'}.")


def _run(*words: str) -> str:
    """Return the output of a command of sky.

    Raises:
        UsageError: The command is missing, or refuses its arguments.
        UnreachableError: Its server does not answer.
    """
    try:
        result = subprocess.run(
            ("sky", *words), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise UsageError(_NO_SKY) from None
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"sky {words[0]} did not answer within {_TIMEOUT_S} s.") from None
    if not result.returncode:
        return result.stdout
    lines = _COLORS.sub("", f"{result.stdout}\n{result.stderr}").strip().splitlines()
    text = lines[-1].strip().rstrip(".") if lines else "no message"
    kind = UnreachableError if _UNREACHABLE.search(text) else UsageError
    raise kind(f"sky {words[0]} failed: {text}.")


def _popen(*words: str) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            ("sky", *words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise UsageError(_NO_SKY) from None


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    if process.stdout:
        process.stdout.close()
