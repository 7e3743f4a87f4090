"""How a launch divides models among its processes: refused before anything starts, or said in a few words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from accel_cli.errors import UsageError
from accel_cli.launchers.base import Job, Launcher, Plan
from accel_runtime.env import SettingsError, check_layout

__all__ = ["planned"]

_NAMES = ("dp_replicate", "dp_shard", "cp", "tp")
Sizes = tuple[int, int, int, int]


def planned(launcher: Launcher, job: Job) -> Plan:
    """What will happen if a launcher runs the job, with how models are divided.

    Args:
        launcher: How the processes start.
        job: What is to run.

    Raises:
        UsageError: It cannot run this way on this machine, or the processes cannot divide models so.
    """
    launcher.check_layout(job.settings)
    plan = launcher.plan(job)
    if not launcher.divides:
        return plan
    worlds = launcher.worlds(job, plan)
    return replace(plan, layout=_described(job, _fitting(job, worlds), known=bool(worlds)))


def _fitting(job: Job, worlds: Sequence[int]) -> list[Sizes]:
    """The sizes for each number of processes that there may be."""
    settings = job.settings
    try:
        return [check_layout(settings.parallel, settings.fully_shard, world) for world in worlds or (None,)]
    except SettingsError as error:
        come_and_go = (
            f"; with launcher.nnodes a range there may be {worlds[0]} to {worlds[-1]} processes, and dp_shard: auto fits "
            "every number that the other sizes divide"
        )
        raise UsageError(f"{error}{come_and_go if len(worlds) > 1 else ''}") from None


def _described(job: Job, every: Sequence[Sizes], *, known: bool) -> str:
    """The sizes above 1 under their names, those that change with the machines as a range."""
    parallel = job.settings.parallel
    if parallel.plain:
        return ""
    said = []
    for index, name in enumerate(_NAMES):
        low, high = every[0][index], every[-1][index]
        auto = name == "dp_shard" and parallel.dp_shard == "auto"
        if high > 1 or auto:
            said.append(
                f"{name} {'auto' if auto and not known else low if low == high else f'{low} to {high}'}"
            )
    return " x ".join(said)
