"""What a job would be, in lines for a person, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from accel_cli import console
from accel_cli.launchers.sagemaker import files
from accel_cli.launchers.sagemaker.facts import Found
from accel_cli.launchers.sagemaker.files import Chosen
from accel_cli.planning.plan import Plan

__all__ = ["described"]

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def described(plan: Plan, found: Found, chosen: Chosen) -> Iterator[str]:
    """The lines: who asks, what is asked for, what is sent, and what was looked at for that."""
    said, of = plan.request["profile"], found.facts
    made = "" if found.has_bucket else "  (the bucket is not there, and would be made)"
    yield f"training job: {of.name}"
    yield f"where: {of.region}, account {of.account}, asked for by {found.who}"
    yield f"instances: {_instances(said)}"
    yield f"role: {of.role_arn}"
    yield f"image: {of.image_uri}"
    yield from _several("inputs", {name: _place(where) for name, where in of.inputs.items()})
    yield from _several("metrics", of.metrics)
    yield from _several("secrets, read in the job from Secrets Manager", said["secrets"])
    yield f"sent to: {of.home}/bundle/{made}"
    if plan.request["source"] is not None:
        yield from (f"  {line}" for line in files.summary(chosen))
    yield f"checkpoints: {said['checkpoint_uri'] or f'{of.home}/checkpoints'}"
    home = console.short(str(Path(plan.output_dir, of.name)))
    yield f"output: {of.home}/output{f', and what it leaves then in {home}' if said['download'] else ''}"
    yield (
        "looked at: the role, the bucket and the name at AWS; the request against what SageMaker is known to take. Quotas "
        "and the rights to submit show only when a job is submitted"
    )
    yield "nothing was sent or changed"


def _instances(said: Mapping[str, Any]) -> str:
    spot = f", spot: with waiting at most {_time(said['max_wait'])}" if said["spot"] else ""
    kept = f", kept for {_time(said['keep_alive'])} after it" if said["keep_alive"] else ""
    return f"{said['instance_count']} x {said['instance_type']}, for at most {_time(said['max_run'])}{spot}{kept}"


def _time(seconds: int) -> str:
    """`90000` as `1d 1h`."""
    words = []
    for unit, size in _UNITS.items():
        whole, seconds = divmod(seconds, size)
        words += [f"{whole}{unit}"] if whole else []
    return " ".join(words)


def _place(where: Any) -> str:
    return str(where["uri"]) if isinstance(where, Mapping) else str(where)


def _several(what: str, values: Mapping[str, str]) -> Iterator[str]:
    if values:
        yield f"{what}:"
        yield from (f"  {name}: {value}" for name, value in values.items())
