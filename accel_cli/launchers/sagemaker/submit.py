"""Carries a plan for SageMaker out: asks what AWS has, sends the folder, starts the job and follows it."""

from __future__ import annotations

import json
import shlex
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from accel_cli import console
from accel_cli.errors import AccelError, UsageError
from accel_cli.jobs import service
from accel_cli.jobs.base import Jobs, follow
from accel_cli.launchers.sagemaker import (
    buckets,
    bundle,
    check,
    facts,
    files,
    images,
    instances,
    starting,
    upload,
)
from accel_cli.launchers.sagemaker.aws import Account
from accel_cli.launchers.sagemaker.files import Chosen
from accel_cli.launchers.sagemaker.request import Facts, training_job
from accel_cli.launchers.sagemaker.sight import described
from accel_cli.planning.plan import Plan

__all__ = ["look", "submit"]

_CONSOLES = {"aws-cn": "console.amazonaws.cn", "aws-us-gov": "console.amazonaws-us-gov.com"}
_DONE = frozenset({1, 2})
"""Ends of a job that may have left something all the same: logs, and the model of one that was stopped."""
_ENDS = (signal.SIGTERM, signal.SIGHUP)


def look(plan: Plan, *, offline: bool) -> str:
    """What would be asked and sent; nothing is changed anywhere.

    Args:
        plan: What to look at.
        offline: Whether AWS is not asked either; the answer is then the request itself, as JSON.

    Raises:
        UsageError: A job cannot run like this.
        UnreachableError: AWS does not answer.
    """
    account, now = _account(plan), datetime.now(timezone.utc)
    if offline:
        text = json.dumps(_request(plan, facts.assumed(account, plan, now)), indent=2)
        _check(plan, json.loads(facts.filled(text)))
        return text
    found = facts.gather(account, plan, now)
    _check(plan, _request(plan, found.facts))
    return "\n".join(described(plan, found, _chosen(plan)))


def submit(plan: Plan) -> int:
    """Submit the job, and follow it to its end unless the plan says otherwise.

    Returns:
        What the job's end comes to; 130 after Ctrl-C, which leaves the job running; 0 if it is not followed.

    Raises:
        UsageError: A job cannot run like this; nothing was started, and nothing is left of it.
        UnreachableError: AWS does not answer.
    """
    with _ending_orderly():
        of = _submitted(plan)
    # Said before AWS is asked anything more, since from now on there is something to stop.
    jobs = _jobs(plan, of)
    console.note(
        f"job {of.name} is submitted; accel jobs logs {of.name} -f{jobs.options} follows it, accel jobs stop {of.name}"
        f"{jobs.options} ends it"
    )
    console.note(f"it is also at {_page(of)}")
    if plan.detach:
        console.plain(of.name)
        return 0
    return _followed(plan, jobs, of.name)


def _submitted(plan: Plan) -> Facts:
    account = _account(plan)
    with _before_sending():
        found = facts.gather(account, plan, datetime.now(timezone.utc))
        request = _request(plan, found.facts)
        _check(plan, request)
        _check_home(plan, found.facts.name)
        chosen = _chosen(plan)
    with tempfile.TemporaryDirectory(prefix="accel-") as scratch:
        with _before_sending():
            packed = _packed(plan, found.facts, chosen, Path(scratch))
        with _bucket(account, found):
            _send(account, found.facts, packed)
            starting.start(account, request, found.facts, plan.again)
    return found.facts


@contextmanager
def _before_sending() -> Iterator[None]:
    """Ctrl-C is answered; later steps have more to say of it."""
    try:
        yield
    except KeyboardInterrupt:
        console.note("broken off; nothing was sent")
        raise


def _followed(plan: Plan, jobs: Jobs, name: str) -> int:
    ended = follow(jobs, jobs.status(name))
    # What accel runs of its own, `accel test`, has no model.
    if ended == 0 and plan.request["profile"]["download"] and plan.request["source"] is not None:
        _bring_home(jobs, name, Path(plan.output_dir))
    elif ended in _DONE:
        console.note(f"accel jobs download {name}{jobs.options} brings home what it left")
    return ended


def _bring_home(jobs: Jobs, name: str, home: Path) -> None:
    """Fetch what the job left.

    Raises:
        AccelError: It cannot be fetched now.
    """
    again = f"accel jobs download {name} -o {shlex.quote(str(home))}{jobs.options}"
    try:
        console.note(f"what it left is in {console.short(str(jobs.download(name, home)))}")
    except UsageError as error:
        # The job has done what it was to do, and may have nothing to leave.
        console.note(str(error))
    except AccelError as error:
        raise type(error)(f"{error}; {again} tries it again") from error
    except KeyboardInterrupt:
        console.note(f"broken off; {again} fetches what it left")
        raise


def _jobs(plan: Plan, of: Facts) -> Jobs:
    aws_profile = plan.request["profile"]["aws_profile"]
    jobs = service(plan.launcher, {"launcher.region": of.region, "launcher.aws_profile": aws_profile})
    jobs.options = plan.again
    return jobs


def _page(of: Facts) -> str:
    """Where AWS's console shows the job."""
    host = _CONSOLES.get(of.partition, "console.aws.amazon.com")
    return f"https://{of.region}.{host}/sagemaker/home?region={of.region}#/jobs/{of.name}"


def _account(plan: Plan) -> Account:
    said = plan.request["profile"]
    return Account(said["region"], said["aws_profile"])


def _request(plan: Plan, of: Facts) -> dict[str, Any]:
    return training_job(plan.request["profile"], plan.request["run"]["env"], of)


def _check(plan: Plan, request: Mapping[str, Any]) -> None:
    check.check(request, allow_unknown_instance=plan.request["profile"]["allow_unknown_instance"])


def _chosen(plan: Plan) -> Chosen:
    """The files that are sent.

    Raises:
        UsageError: They are too many bytes, or lack what the job needs.
    """
    said, run, source = plan.request["profile"], plan.request["run"], plan.request["source"]
    if source is None:
        return Chosen(Path.cwd(), ())
    chosen = files.chosen(Path(source), said["include"], said["exclude"])
    for note in chosen.notes:
        console.note(note)
    if run["kind"] == "script":
        files.check_holds(chosen, Path(run["cwd"], run["target"]))
    elif run["cwd"] != ".":
        files.check_holds(chosen, run["cwd"])
    if run["requirements"]:
        files.check_holds(chosen, run["requirements"])
    files.check_size(chosen, said["max_upload_size"])
    return chosen


def _check_home(plan: Plan, name: str) -> None:
    """Refuse early what would only show when the model comes home."""
    home = Path(plan.output_dir)
    if not plan.request["profile"]["download"] or plan.detach:
        return
    if home.exists() and not home.is_dir():
        raise UsageError(f"launcher.output_dir: {home} is no folder")
    if (home / name).exists():
        raise UsageError(
            f"launcher.output_dir: {home / name} is there already, where the model would come; choose another --job-name"
        )


def _packed(plan: Plan, of: Facts, chosen: Chosen, scratch: Path) -> bundle.Bundle:
    machine = "aarch64" if instances.is_arm(plan.request["profile"]["instance_type"]) else "x86_64"
    run = {**plan.request["run"], "region": of.region}
    packed = bundle.make(run, chosen, scratch, images.python_of(of.image_uri), machine=machine)
    for note in packed.notes:
        if plan.request["profile"]["network_isolation"]:
            raise UsageError(
                f"{note}; with launcher.network_isolation a container has no network to fetch them by"
            )
        console.note(note)
    return packed


def _send(account: Account, of: Facts, packed: bundle.Bundle) -> None:
    upload.send(
        account.client("s3"),
        packed,
        of.bucket,
        f"{of.prefix}/bundle",
        speaking=account.speaking,
        account=of.account,
    )


@contextmanager
def _bucket(account: Account, found: facts.Found) -> Iterator[None]:
    """The bucket, made if it is not there; one that was made for nothing is taken away again."""
    if found.has_bucket:
        yield
        return
    name = found.facts.bucket
    buckets.make(account, name)
    console.note(f"bucket {name} is made, for this job and others to come")
    try:
        yield
    except BaseException:
        buckets.unmake(account, name)
        raise


@contextmanager
def _ending_orderly() -> Iterator[None]:
    """A terminal that is closed, or `kill`, ends a submission as an error does: what was sent is deleted."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in _ENDS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
