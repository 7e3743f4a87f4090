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
from collections.abc import Mapping
from contextlib import suppress
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

__all__ = ["SkyJobs", "SkyLog", "submit"]

_TIMEOUT_S = 120
_CHUNK = 1 << 18
_NO_SKY = "launcher.kind: skypilot needs the command sky, which was not found. Install SkyPilot (https://docs.skypilot.co), and run sky check."
_UNREACHABLE = re.compile(r"(?i)connect|timed? ?out|api server.*(unavailable|not healthy)|temporarily")
_EXIT_CODES = {"SUCCEEDED": 0, "CANCELLED": 143, "FAILED": 1, "FAILED_DRIVER": 1, "FAILED_SETUP": 1}
"""Exit codes by the status of a job that has ended; SkyPilot does not report that of the script."""
_LOG_EXIT_CODES = frozenset({0, 100, 103})
"""Exit codes of `sky logs` for a job that succeeded, failed or was cancelled."""
_FIRST_S, _QUIET_S = 20.0, 0.3
"""Seconds to wait for the first output of `sky logs`, and for more."""
_GONE_EXIT_CODE = 143
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
        return [
            self._describe(record, prices) for record in sorted(records, key=lambda each: each["launched_at"])
        ]

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
        job = self._last[job_id] = self._describe(found[0], prices)
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
        return SkyLog(job.id)

    @override
    def stop(self, job_id: str) -> None:
        self.status(job_id)
        _run("down", "--yes", job_id)


class SkyLog(Log):
    """The output of all nodes, from a `sky logs` that runs as long as the job."""

    def __init__(self, name: str) -> None:
        self._name = name
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
        process = _popen("logs", self._name, "--tail", "0")
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
            raise UnreachableError(f"sky logs {self._name} ended with exit code {code}.")


def submit(plan: Plan) -> int:
    """Start a cluster with the job and return 0 if the plan detaches; otherwise follow the job and return its exit code."""
    job = plan.job
    assert isinstance(job, SkyJobPlan)
    for name in job.section.secrets:
        if name not in os.environ:
            raise UsageError(
                f"Cannot pass {name} of launcher.secrets: it is not set here. Set it, or remove it from the profile."
            )
    cluster = f"{job.name}-{secrets.token_hex(3)}"
    commands = format_commands(cluster, job.jobs_options)
    with write_folder(job) as folder:
        command = ("sky", "launch", *job.options, "--cluster", cluster, str(folder / TASK_FILE))
        try:
            # Its own messages are for the user; stdout is for the output of the job.
            code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, check=False).returncode
        except FileNotFoundError:
            raise UsageError(_NO_SKY) from None
        except KeyboardInterrupt:
            console.note(
                f"The submission was interrupted, and cluster {cluster} may start and cost money. {commands}"
            )
            raise
    if code:
        raise AccelError(
            f"SkyPilot did not submit the job (sky launch exited with code {code}); its messages are above. A cluster that was started "
            f"remains and costs money: run sky down {cluster}"
        )
    return follow_submission(SkyJobs(), cluster, job, note=_format_price(cluster))


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
    output = _COLORS.sub("", _run(command, "--output", "json", *names))
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
