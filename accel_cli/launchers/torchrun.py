"""Several processes through torch's elastic agent, on one machine or on several that meet by c10d."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import Self, override

import accel_cli
from accel_cli.errors import UsageError
from accel_cli.fields import Answers, Question
from accel_cli.launchers.base import Job, Launcher, Plan, device_of, environment
from accel_cli.machine import Machine
from accel_cli.ranks import checked, highest

__all__ = ["Torchrun"]

_LOOPBACK = "127.0.0.1"
_ENDPOINT = re.compile(r"(\[[0-9a-fA-F:]+\]|[^\s:\[\]]+):(\d{1,5})")
_TOO_BIG_PORT = 65536
_RANGE = re.compile(r"([1-9]\d*):([1-9]\d*)")
_HEARD_S = (6, 30)
"""The least and the most seconds without a word from a machine before it counts as lost."""


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


def _machines(value: int | str) -> int | str:
    if isinstance(value, str):
        found = _RANGE.fullmatch(value)
        if not found or int(found[1]) > int(found[2]):
            raise ValueError("expected a whole number of at least 1, or a range MIN:MAX such as 1:4")
        return int(found[1]) if found[1] == found[2] else value
    if value < 1:
        raise ValueError("expected at least 1")
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
        int | str,
        Field(
            union_mode="left_to_right",
            description="Number of machines, or a range `MIN:MAX` within which machines may come and go. "
            "The same `accel launch` is started on every one of them.",
        ),
        Field(json_schema_extra={"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]}),
        AfterValidator(_machines),
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
    rdzv_timeout: Annotated[
        int, Field(ge=1, description="Seconds to wait for the other machines before it is an error.")
    ] = 600
    last_call_timeout: Annotated[
        int,
        Field(
            ge=1,
            description="Seconds a range of machines waits for more of them once the fewest are there, at each start.",
        ),
    ] = 5
    monitor_interval: Annotated[
        float, Field(gt=0, description="Seconds between two looks at whether the processes are alive.")
    ] = 0.1
    start_method: Literal["auto", "forkserver", "exec"] = Field(
        "auto",
        description="How processes start: `forkserver` imports torch once and forks them, `exec` is a command "
        "each; `auto` is forkserver for Python on Linux.",
    )
    ranks: Annotated[
        int | str,
        AfterValidator(checked),
        Field(description="Whose output is on the screen: `all`, `none`, or ranks as in `0,2`."),
    ] = 0
    log_dir: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Folder for the logs of runs; unset keeps them where this system keeps a program's state.",
        ),
    ] = None
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
        if self.range[1] > 1 and self.rdzv_endpoint is None:
            raise ValueError("rdzv_endpoint (host:port) is needed if nnodes is above 1")
        return self

    @property
    def range(self) -> tuple[int, int]:
        """The fewest and the most machines."""
        low, _, high = str(self.nnodes).partition(":")
        return int(low), int(high or low)

    @override
    def plan(self, job: Job) -> Plan:
        self._check_static(job)
        count = self._count(job)
        device = device_of(job, count)
        if highest(self.ranks) >= self.range[1] * count:
            raise UsageError(
                f"ranks: {self.ranks} was asked for, but the last rank is {self.range[1] * count - 1}"
            )
        method, reason = self._started_by(job)
        threads = str(self.omp_num_threads or max(1, job.machine.cpus // count))
        return Plan(
            launcher=self.kind,
            runner="accel_cli.agent:run" if method == "exec" else "accel_cli.forkserver:become",
            argv=_worker(job),
            env=environment(job, {"OMP_NUM_THREADS": threads, **self._interfaces()}),
            device=device,
            target=job.target,
            nnodes=self.range[1],
            nproc_per_node=count,
            derived=job.nodes.line,
            agent=self._agent(job),
            start_method=f"{method} ({reason})",
        )

    def _check_static(self, job: Job) -> None:
        if not job.nodes.static:
            return
        low, high = self.range
        if high <= int(job.nodes.node_rank or 0):
            raise UsageError(
                f"--node-rank {job.nodes.node_rank} does not fit nnodes {high}: numbers count from 0"
            )
        if low != high or self.max_restarts:
            asked = f"nnodes {self.nnodes}" if low != high else f"max_restarts {self.max_restarts}"
            raise UsageError(
                f"--node-rank gives every machine a fixed number, and {asked} lets machines come anew: "
                "leave out --node-rank (machines number themselves), or max_restarts and the range"
            )

    def _interfaces(self) -> dict[str, str]:
        """Where collectives listen: left alone, on an address that other machines reach."""
        if self.range[1] > 1 or sys.platform != "linux":
            return {}
        return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}

    def _started_by(self, job: Job) -> tuple[str, str]:
        """The start method, and why."""
        unable = ""
        if job.kind == "program":
            unable = "a program is not known to be Python"
        elif sys.platform != "linux":
            unable = f"the fork server needs Linux, and this is {sys.platform}"
        if unable and self.start_method == "forkserver":
            raise UsageError(f"start_method: forkserver was asked for, but {unable}; use exec or auto")
        if self.start_method != "auto":
            return self.start_method, "launcher.start_method"
        return ("exec", unable) if unable else ("forkserver", "torch is imported once for all processes")

    def _count(self, job: Job) -> int:
        if isinstance(self.nproc_per_node, int):
            return self.nproc_per_node
        return 1 if job.settings.device == "cpu" else max(1, len(job.machine.devices))

    def _agent(self, job: Job) -> dict[str, Any]:
        """What the elastic agent is told, in torch's words where it has one."""
        low, high = self.range
        alone = high == 1
        least, most = _HEARD_S
        return {
            "run_id": self.rdzv_id,
            "rdzv_backend": "c10d",
            # On one machine the store takes any free port, so launches never meet.
            "rdzv_endpoint": self.rdzv_endpoint if not alone and self.rdzv_endpoint else f"{_LOOPBACK}:0",
            "max_restarts": self.max_restarts,
            "monitor_interval": self.monitor_interval,
            "local_addr": _LOOPBACK if alone else None,
            "min_nodes": low,
            "max_nodes": high,
            "node_rank": None if alone else job.nodes.node_rank,
            "static": job.nodes.static or None,
            "rdzv_timeout": self.rdzv_timeout,
            "last_call_timeout": self.last_call_timeout,
            "lost_after": max(least, min(most, job.settings.process_group_timeout)),
            "ranks": self.ranks,
            "log_dir": self.log_dir,
            "shutdown_timeout": self.shutdown_timeout,
            "stall_timeout": self.stall_timeout,
        }


def _worker(job: Job) -> tuple[str, ...]:
    """The command of one process, under `worker`: it keeps what is written, and records a failure."""
    # By path: `-m` would put the current folder before the standard library while the worker loads.
    worker = str(Path(accel_cli.__file__).with_name("worker.py"))
    return (job.python, worker, job.kind, job.target, *job.args)
