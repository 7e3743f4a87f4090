"""Replicas of torch_xla: the unmodified script on every TPU core, on one machine or on the hosts of a pod."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import Self, override

from accel_cli.errors import UsageError
from accel_cli.launchers import elastic
from accel_cli.launchers.base import Job, Plan, environment
from accel_cli.planning.machine import Machine
from accel_cli.profile.fields import Choice, Question
from accel_runtime.env import ROUNDING

__all__ = ["Xla"]

_SAME = "launcher.replicas"
_OFF = frozenset({"", "0", "false", "no", "off"})


def _replicas(value: Any) -> Any:
    if value == "auto":
        return "all"  # what an option means that other launchers know
    if value not in {"all", 1} or isinstance(value, bool):
        raise ValueError(
            "expected all or 1: torch_xla starts a replica on every device of the machine, or one on a single device, "
            "and nothing between"
        )
    return value


class Xla(elastic.Elastic):
    """The script on every device that torch_xla finds, each a replica of the model."""

    title: ClassVar[str] = "TPU (torch_xla)"
    runs = "pod"
    words: ClassVar[Mapping[str, str]] = MappingProxyType({"launcher.nproc_per_node": _SAME})

    formats: ClassVar[frozenset[str]] = frozenset({"no", "bf16"})
    divides = False

    kind: Literal["xla"] = Field(
        "xla",
        description="A replica on every TPU core, started by torch_xla; or on its CPU device, to try it.",
    )
    replicas: Annotated[
        Literal["all", 1],
        BeforeValidator(_replicas),
        Field(
            description="On how many devices of a machine: `all`, or 1 (on one machine). torch_xla knows no other number."
        ),
        Question(
            "On how many TPU cores?",
            suggest=lambda *_: "all",
            choices=(
                Choice("all", "all: every core of the TPU, on every host of a pod"),
                Choice(1, "1: a single core, to try something"),
            ),
        ),
    ] = "all"
    spmd: Annotated[
        bool,
        Field(
            description="Whether one process computes on all devices of the machine as a mesh, with a model sharded over them."
        ),
        Question(
            "How do the cores share the work?",
            suggest=lambda *_: False,
            choices=(
                Choice(False, "each has a replica of the model, and a part of every batch"),
                Choice(True, "SPMD: one process computes on all of them, with the model sharded"),
            ),
            when=lambda answers: answers.get("replicas") != 1,
        ),
    ] = False
    main_training_function: str | None = Field(
        None,
        min_length=1,
        description="A function of the script that is called without arguments on every replica, after the script was "
        "imported; unset runs the script itself.",
    )
    nnodes: elastic.Nnodes = 1
    rdzv_endpoint: elastic.Endpoint = None
    allow_loopback: elastic.AllowLoopback = False
    rdzv_id: elastic.RunId = "accel"
    max_restarts: elastic.MaxRestarts = 0
    rdzv_timeout: elastic.RdzvTimeout = 600
    last_call_timeout: elastic.LastCallTimeout = 5
    monitor_interval: elastic.MonitorInterval = 0.1
    ranks: elastic.Ranks = 0
    log_dir: elastic.LogDir = None
    shutdown_timeout: elastic.ShutdownTimeout = 30
    stall_timeout: elastic.StallTimeout = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        low, high = self.range
        if low != high:
            raise ValueError(
                f"nnodes: the hosts of a TPU do not come and go: expected a number, not {self.nnodes}"
            )
        if self.replicas == 1 and (self.spmd or high > 1):
            other = (
                "spmd computes on all devices"
                if self.spmd
                else "several machines train on all devices of each"
            )
            raise ValueError(f"replicas: 1 is one device of one machine, but {other}; use replicas: all")
        return self

    @classmethod
    @override
    def offered(cls, machine: Machine) -> bool:
        return machine.tpu.found or machine.packages.torch_xla is not None

    @classmethod
    @override
    def suits_bf16(cls, machine: Machine) -> bool:
        return True

    @override
    def plan(self, job: Job) -> Plan:
        self.check_static(job)
        _check(job)
        pjrt = _pjrt_device(job)
        if pjrt == "CPU" and self.replicas != 1 and not self.spmd:
            _check_cpu_replicas({**job.env, **job.environ})
        told = replace(job, settings=replace(job.settings, device="xla", spmd=self.spmd))
        function = "" if job.as_a_whole else self.main_training_function or ""
        how = ("spmd" if self.spmd else str(self.replicas), function)
        return Plan(
            launcher=self.kind,
            runner="accel_cli.runner.agent:run",
            argv=elastic.command(job, "xla_replicas.py", *how),
            # Said also where the user has set it: everything else follows from it.
            env={**environment(told, {**self.interfaces(), **self._quiet}), "PJRT_DEVICE": pjrt},
            device=f"xla (PJRT_DEVICE={pjrt})",
            target=job.target,
            nnodes=self.range[1],
            nproc_per_node=1,
            counted=self._counted,
            derived=job.nodes.line,
            agent={**self.agent(job), "replicas": True},
            start_method="torch_xla.launch" if not self.spmd else "exec (SPMD is one process a machine)",
        )

    @property
    def _quiet(self) -> dict[str, str]:
        # With SPMD, XLA says at every graph it compiles that a part of it will be replaced.
        return {"TF_CPP_MIN_LOG_LEVEL": "2"} if self.spmd else {}

    @property
    def _counted(self) -> str:
        if self.spmd:
            return "one process on all devices (SPMD)"
        return "one replica" if self.replicas == 1 else "a replica on every device"


def _check(job: Job) -> None:
    """Refuse what torch_xla cannot do, or would do otherwise than it was said, before anything starts."""
    settings = job.settings
    if job.kind == "program":
        raise UsageError(
            f"--no-python: torch_xla runs Python code on its devices, and {job.target} is a program; give a script, or a "
            "module with -m"
        )
    if settings.device not in {"auto", "xla"}:
        raise UsageError(
            f"device: {settings.device} contradicts launcher.kind: xla, which computes on what PJRT_DEVICE names; "
            "PJRT_DEVICE=CPU accel launch tries a script on torch_xla's CPU device"
        )
    if settings.process_group_backend != "auto":
        raise UsageError(
            f"process_group_backend: {settings.process_group_backend} has no say with launcher.kind: xla, where "
            "torch_xla itself carries collectives; use auto"
        )
    if settings.mixed_precision == "fp16":
        raise UsageError("mixed_precision: fp16 is for GPUs; on a TPU use bf16, which needs no scaled loss")
    _check_environment({**job.env, **job.environ})
    if problem := job.machine.problem or job.machine.xla_problem:
        raise UsageError(problem)


def _check_environment(environ: Mapping[str, str]) -> None:
    for name in ROUNDING:
        if environ.get(name, "").lower() not in _OFF:
            raise UsageError(
                f"{name}={environ[name]} makes torch_xla round every float32 number, also weights and optimizer state, "
                "without a word; unset it, and use mixed_precision: bf16"
            )
    if environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError(
            f"WORLD_SIZE={environ['WORLD_SIZE']}: something else has started this process as one of several, and "
            "torch_xla starts replicas itself; run accel launch once on each machine"
        )


def _check_cpu_replicas(environ: Mapping[str, str]) -> None:
    """Refuse several replicas of torch_xla's CPU device: their first collective would end the process."""
    count = environ.get("CPU_NUM_DEVICES") or "1"
    if count != "1":
        raise UsageError(
            f"CPU_NUM_DEVICES={count}: torch_xla's CPU device has no collectives between its replicas (pytorch/xla issue "
            "5005). Leave it out to try a script with one replica, or set launcher.spmd to true to use all devices."
        )


def _pjrt_device(job: Job) -> str:
    """What torch_xla computes on: what the user said, or the TPU that is there."""
    if said := job.environ.get("PJRT_DEVICE") or job.env.get("PJRT_DEVICE"):
        return said
    if job.machine.tpu.found:
        return "TPU"
    raise UsageError(
        f"launcher.kind: xla, but this machine has no TPU ({job.machine.summary}); PJRT_DEVICE=CPU accel launch ... "
        "tries a script on torch_xla's CPU device"
    )
