"""Several processes through torch's elastic agent, on one machine or on several that meet by c10d."""

from __future__ import annotations

import socket
import sys
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field
from typing_extensions import override

from accel_cli.errors import UsageError
from accel_cli.launchers import elastic
from accel_cli.launchers.base import Job, Plan, device_of, environment
from accel_cli.launchers.gpus import GpuIds, choose_gpus
from accel_cli.planning import network
from accel_cli.planning.machine import Machine
from accel_cli.planning.nodes import PORT
from accel_cli.planning.plan import get_runner
from accel_cli.profile.fields import Answers, Question
from accel_cli.runner.rank_filter import get_highest_rank

__all__ = ["Torchrun"]


def _positive(value: int | str) -> int | str:
    if isinstance(value, int) and value < 1:
        raise ValueError("expected a whole number of at least 1, or auto")
    return value


def _processes(machine: Machine, _: Answers) -> int | str:
    return "auto" if machine.devices else min(2, machine.cpus)


def _endpoint(*_: object) -> str:
    """Return a port on this machine, by the address that others reach it by, or else by its name."""
    return str(network.Endpoint(network.own_address() or socket.gethostname(), PORT))


def _doubt_endpoint(endpoint: str | None) -> str | None:
    """Return why no other machine reaches an endpoint, in one line of a terminal; None if nothing is known of it."""
    if not endpoint or not elastic.is_endpoint(endpoint) or not network.Endpoint.parse(endpoint).loopback:
        return None
    return "only this machine reaches it: give an address that all machines reach"


class Torchrun(elastic.Elastic):
    """Several processes that train together, through torch.distributed.run's elastic agent."""

    title: ClassVar[str] = "Several processes (torchrun)"

    kind: Literal["torchrun"] = Field(
        "torchrun", description="Several processes, through torch's elastic agent (torch.distributed.run)."
    )
    nnodes: Annotated[elastic.Nnodes, Question("How many machines?", suggest=lambda *_: 1)] = 1
    nproc_per_node: Annotated[
        int | Literal["auto"],
        Field(
            union_mode="left_to_right",
            description="Number of processes on this machine; `auto` is one for each accelerator (of `gpu_ids`), or 1 on the CPU.",
        ),
        Field(json_schema_extra={"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]}),
        AfterValidator(_positive),
        Question(
            "How many processes on each machine?",
            suggest=_processes,
            hint="a number, or auto",
        ),
    ] = "auto"
    gpu_ids: GpuIds = None
    rdzv_endpoint: Annotated[
        elastic.Endpoint,
        Question(
            "Where do they meet, as host:port?",
            suggest=_endpoint,
            when=lambda answers: answers.get("nnodes", 1) != 1,
            hint="an address every machine reaches",
            doubt=_doubt_endpoint,
        ),
    ] = None
    allow_loopback: elastic.AllowLoopback = False
    rdzv_id: elastic.RunId = "accel"
    max_restarts: elastic.MaxRestarts = 0
    rdzv_timeout: elastic.RdzvTimeout = 600
    last_call_timeout: elastic.LastCallTimeout = 5
    monitor_interval: elastic.MonitorInterval = 0.1
    start_method: Literal["auto", "forkserver", "exec"] = Field(
        "auto",
        description="How processes start: `forkserver` imports torch once and forks them, `exec` is a command "
        "each; `auto` is forkserver for Python on Linux.",
    )
    ranks: elastic.Ranks = 0
    log_dir: elastic.LogDir = None
    shutdown_timeout: elastic.ShutdownTimeout = 30
    stall_timeout: elastic.StallTimeout = None
    omp_num_threads: Annotated[
        int | None,
        Field(
            ge=1, description="OMP_NUM_THREADS of each process; unset divides the processor cores among them."
        ),
    ] = None

    @classmethod
    @override
    def several(cls, answers: Answers) -> bool:
        return (answers.get("nnodes", 1), answers.get("nproc_per_node", 1)) != (1, 1)

    @override
    def plan(self, job: Job) -> Plan:
        self.check_static(job)
        job, visible = choose_gpus(job, self.gpu_ids)
        count = self._count(job)
        device = device_of(job, count)
        if get_highest_rank(self.ranks) >= self.range[1] * count:
            raise UsageError(
                f"ranks: {self.ranks} was asked for, but the last rank is {self.range[1] * count - 1}"
            )
        method, reason = self._started_by(job)
        threads = str(self.omp_num_threads or max(1, job.machine.cpus // count))
        return Plan(
            launcher=self.kind,
            runner=get_runner(method),
            argv=elastic.command(job, "worker.py"),
            env={**environment(job, {"OMP_NUM_THREADS": threads, **self.interfaces()}), **visible},
            device=device,
            target=job.target,
            nnodes=self.range[1],
            nproc_per_node=count,
            derived=job.nodes.line,
            agent=self.agent(job),
            start_method=f"{method} ({reason})",
        )

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
