"""Several processes through torch's elastic agent, on one machine or on several that meet by c10d."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import Self, override

import accel_cli
from accel_cli.fields import Answers, Question
from accel_cli.launchers.base import Job, Launcher, Plan, device_of, environment
from accel_cli.machine import Machine

__all__ = ["Torchrun"]

_LOOPBACK = "127.0.0.1"
_ENDPOINT = re.compile(r"(\[[0-9a-fA-F:]+\]|[^\s:\[\]]+):(\d{1,5})")
_TOO_BIG_PORT = 65536


def _endpoint(text: str | None) -> str | None:
    if text is None:
        return None
    matched = _ENDPOINT.fullmatch(text)
    if not matched or not 0 < int(matched[2]) < _TOO_BIG_PORT:
        raise ValueError("expected host:port with a port from 1 to 65535")
    return text


def _positive(value: int | str) -> int | str:
    if isinstance(value, int) and value < 1:
        raise ValueError("expected a whole number of at least 1, or auto")
    return value


def _processes(machine: Machine, _: Answers) -> int | str:
    return "auto" if machine.devices else min(2, machine.cpus)


class Torchrun(Launcher):
    """Several processes that train together, through torch.distributed.run's elastic agent."""

    title: ClassVar[str] = "Several processes (torchrun)"

    kind: Literal["torchrun"] = Field(
        "torchrun", description="Several processes, through torch's elastic agent (torch.distributed.run)."
    )
    nnodes: Annotated[
        int,
        Field(
            ge=1, description="Number of machines. The same `accel launch` is started on every one of them."
        ),
        Question("How many machines?", suggest=lambda *_: 1),
    ] = 1
    nproc_per_node: Annotated[
        int | Literal["auto"],
        Field(
            union_mode="left_to_right",
            description="Number of processes on this machine; `auto` is one for each accelerator, or 1 on the CPU.",
        ),
        Field(json_schema_extra={"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]}),
        AfterValidator(_positive),
        Question(
            "How many processes on each machine?",
            suggest=_processes,
            hint="a number, or auto",
        ),
    ] = "auto"
    rdzv_endpoint: Annotated[
        str | None,
        AfterValidator(_endpoint),
        Field(
            description="`host:port` where the machines meet; the host is one of them. Needed if nnodes is above 1."
        ),
        Question(
            "Where do they meet, as host:port?",
            suggest=lambda *_: "localhost:29400",
            when=lambda answers: answers.get("nnodes", 1) != 1,
            hint="an address every machine reaches",
        ),
    ] = None
    rdzv_id: Annotated[
        str,
        Field(min_length=1, description="Name of the job; machines with the same name and endpoint meet."),
    ] = "accel"
    max_restarts: Annotated[
        int, Field(ge=0, description="How often all processes are started again after one of them failed.")
    ] = 0
    monitor_interval: Annotated[
        float, Field(gt=0, description="Seconds between two looks at whether the processes are alive.")
    ] = 0.1
    shutdown_timeout: Annotated[
        int,
        Field(
            ge=0,
            description="Seconds the processes have to save and end after a signal, or after one of them failed.",
        ),
    ] = 30
    stall_timeout: Annotated[
        int | None,
        Field(
            ge=1,
            description="Seconds without progress on any process until `accel launch` shows where each one is; unset does not watch.",
        ),
    ] = None
    omp_num_threads: Annotated[
        int | None,
        Field(
            ge=1, description="OMP_NUM_THREADS of each process; unset divides the processor cores among them."
        ),
    ] = None

    @model_validator(mode="after")
    def _machines_need_a_meeting_place(self) -> Self:
        if self.nnodes > 1 and self.rdzv_endpoint is None:
            raise ValueError("rdzv_endpoint (host:port) is needed if nnodes is above 1")
        return self

    @override
    def plan(self, job: Job) -> Plan:
        count = self._count(job)
        device = device_of(job, count)
        threads = str(self.omp_num_threads or max(1, job.machine.cpus // count))
        return Plan(
            launcher=self.kind,
            runner="accel_cli.agent:run",
            argv=_worker(job),
            env=environment(job, {"OMP_NUM_THREADS": threads}),
            device=device,
            target=job.target,
            nnodes=self.nnodes,
            nproc_per_node=count,
            agent=self._agent(),
        )

    def _count(self, job: Job) -> int:
        if isinstance(self.nproc_per_node, int):
            return self.nproc_per_node
        return 1 if job.settings.device == "cpu" else max(1, len(job.machine.devices))

    def _agent(self) -> dict[str, Any]:
        """Arguments of `torch.distributed.launcher.api.LaunchConfig`."""
        alone = self.nnodes == 1
        return {
            "run_id": self.rdzv_id,
            "rdzv_backend": "c10d",
            # On one machine the store takes any free port, so launches never meet.
            "rdzv_endpoint": self.rdzv_endpoint if not alone and self.rdzv_endpoint else f"{_LOOPBACK}:0",
            "max_restarts": self.max_restarts,
            "monitor_interval": self.monitor_interval,
            "local_addr": _LOOPBACK if alone else None,
            "shutdown_timeout": self.shutdown_timeout,
            "stall_timeout": self.stall_timeout,
        }


def _worker(job: Job) -> tuple[str, ...]:
    """The command of one process; scripts and modules run under `worker`, which records a failure."""
    if job.kind == "program":
        return (job.target, *job.args)
    # By path: `-m` would put the current folder before the standard library while the worker loads.
    worker = str(Path(accel_cli.__file__).with_name("worker.py"))
    return (job.python, worker, job.kind, job.target, *job.args)
