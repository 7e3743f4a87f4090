"""The GPUs that a launch uses: those chosen by `gpu_ids`, through the variable of their vendor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from accel_cli.errors import UsageError
from accel_cli.launchers.base import Job

__all__ = ["VARIABLES", "GpuIds", "choose_gpus"]

VARIABLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "cuda": ("CUDA_VISIBLE_DEVICES",),
        "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        "xpu": ("ZE_AFFINITY_MASK",),
        "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
        "mlu": ("MLU_VISIBLE_DEVICES",),
        "musa": ("MUSA_VISIBLE_DEVICES",),
        "sdaa": ("SDAA_VISIBLE_DEVICES",),
        "hpu": ("HABANA_VISIBLE_MODULES",),
    }
)
"""The variables that show a process some GPUs only, by torch's word for the accelerator; the first that is set counts."""
_ALL = "all"
_IDS = re.compile(r"[\w.:/-]+(,[\w.:/-]+)*", re.ASCII)


def _check_ids(value: int | str | None) -> int | str | None:
    if value is None:
        return None
    ids = str(value).replace(" ", "")
    if not _IDS.fullmatch(ids) or ids.startswith("-") or isinstance(value, bool):
        raise ValueError("expected all, or ids as in 0,2")
    if len(set(ids.split(","))) < len(ids.split(",")):
        raise ValueError("expected every id once")
    return value if isinstance(value, int) else ids


def _join_ids(value: Any) -> Any:
    """Return the text that a list of ids stands for."""
    if not isinstance(value, list):
        return value
    if not value or not all(type(name) in {int, str} for name in value):
        raise ValueError("expected all, or ids as in 0,2 or [0, 2]")
    return ",".join(map(str, value))


GpuIds = Annotated[
    int | str | None,
    BeforeValidator(_join_ids),
    AfterValidator(_check_ids),
    Field(
        json_schema_extra={
            "anyOf": [
                {"type": ["integer", "string", "null"]},
                {"type": "array", "items": {"type": ["integer", "string"]}, "minItems": 1},
            ]
        }
    ),
    Field(
        description="GPUs to use, by the ids that the vendor's variable takes (`CUDA_VISIBLE_DEVICES`, ...), as in `0,2` or `[0, 2]`; unset "
        "or `all` uses every one. If that variable is set already, they must be among those that it names. On the CPU it "
        "has no effect."
    ),
]


def choose_gpus(job: Job, gpu_ids: int | str | None) -> tuple[Job, dict[str, str]]:
    """Return a job on the machine with the chosen GPUs only, and the variable that shows its processes these.

    Args:
        job: What is to run.
        gpu_ids: The value of the launcher's key.

    Raises:
        UsageError: An id is no GPU that this launch may see, or there are no GPUs to choose from.
    """
    machine = job.machine
    if job.settings.device == "cpu" or machine.problem:
        return job, {}
    names = VARIABLES.get("rocm" if machine.rocm else machine.accelerator or "", ())
    variable = next((name for name in names if name in job.environ), next(iter(names), ""))
    visible = _list_visible(job, variable)
    if variable in job.env and variable not in job.environ:
        return _follow_profile(job, gpu_ids, variable, visible), {}
    if gpu_ids in {None, _ALL}:
        return job, {}
    if not visible:
        raise UsageError(
            f"launcher.gpu_ids: {gpu_ids} was asked for, but this machine has no GPUs to choose from ({machine.summary}). "
            "Leave out --gpu-ids, or the key launcher.gpu_ids."
        )
    ids = str(gpu_ids).split(",")
    if unseen := [name for name in ids if name not in visible]:
        why = f"{variable}={job.environ[variable]} shows" if variable in job.environ else "this machine has"
        raise UsageError(
            f"launcher.gpu_ids: {gpu_ids} was asked for, but {why} no GPU {' and no GPU '.join(unseen)}. Choose among "
            f"{', '.join(visible)}."
        )
    return _on(job, visible, ids), {variable: ",".join(ids)}


def _follow_profile(job: Job, gpu_ids: int | str | None, variable: str, visible: list[str]) -> Job:
    """Return a job on the GPUs that a variable in the profile's `env:` names."""
    value = job.env[variable]
    if gpu_ids not in {None, _ALL}:
        raise UsageError(
            f"launcher.gpu_ids: {gpu_ids} and env.{variable}: {value} both choose GPUs. Take one of them out."
        )
    # Other names than numbers, such as UUIDs, are the vendor's to judge.
    return _on(job, visible, _split(value)) if set(_split(value)) <= set(visible) else job


def _list_visible(job: Job, variable: str) -> list[str]:
    """Return the ids of the GPUs that torch has found, in its order: by number unless the variable names them."""
    count = len(job.machine.devices) if variable else 0
    named = _split(job.environ[variable]) if variable in job.environ else []
    return (named or [str(number) for number in range(count)])[:count]


def _split(ids: str) -> list[str]:
    return [name.strip() for name in ids.split(",") if name.strip()]


def _on(job: Job, visible: list[str], chosen: list[str]) -> Job:
    devices = tuple(job.machine.devices[visible.index(name)] for name in chosen)
    return replace(job, machine=replace(job.machine, devices=devices))
