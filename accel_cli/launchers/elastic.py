"""What launchers share whose processes torch's elastic agent watches, on one machine or on several that meet by c10d."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import Self

from accel_cli.errors import UsageError
from accel_cli.launchers.base import Job, Launcher
from accel_cli.planning import network, plan
from accel_cli.runner.rank_filter import check_ranks

__all__ = [
    "AllowLoopback",
    "Elastic",
    "Endpoint",
    "LastCallTimeout",
    "LogDir",
    "MaxRestarts",
    "MonitorInterval",
    "Nnodes",
    "Ranks",
    "RdzvTimeout",
    "RunId",
    "ShutdownTimeout",
    "StallTimeout",
    "command",
    "is_endpoint",
]

_ENDPOINT = re.compile(r"(\[[0-9a-fA-F:]+\]|[^\s:\[\]]+):(\d{1,5})")
_TOO_BIG_PORT = 65536
_RANGE = re.compile(r"([1-9]\d*):([1-9]\d*)")


def is_endpoint(text: str) -> bool:
    """Return True if a text is host:port with a port that there can be."""
    matched = _ENDPOINT.fullmatch(text)
    return matched is not None and 0 < int(matched[2]) < _TOO_BIG_PORT


def _endpoint(text: str | None) -> str | None:
    if text is None:
        return None
    if not is_endpoint(text):
        raise ValueError("expected host:port with a port from 1 to 65535")
    return text


def _machines(value: int | str) -> int | str:
    if isinstance(value, str):
        found = _RANGE.fullmatch(value)
        if not found or int(found[1]) > int(found[2]):
            raise ValueError("expected a whole number of at least 1, or a range MIN:MAX such as 1:4")
        return int(found[1]) if found[1] == found[2] else value
    if value < 1:
        raise ValueError("expected at least 1")
    return value


Nnodes = Annotated[
    int | str,
    Field(
        union_mode="left_to_right",
        description="Number of machines, or a range `MIN:MAX` within which machines may come and go. "
        "The same `accel launch` is started on every one of them.",
    ),
    Field(json_schema_extra={"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]}),
    AfterValidator(_machines),
]
Endpoint = Annotated[
    str | None,
    AfterValidator(_endpoint),
    Field(
        description="`host:port` where the machines meet; the host is one of them. Needed if nnodes is above 1."
    ),
]
AllowLoopback = Annotated[
    bool,
    Field(
        description="Accept a loopback address as `rdzv_endpoint` with several machines, which then all run on this one."
    ),
]
RunId = Annotated[
    str,
    Field(min_length=1, description="Name of the job; machines with the same name and endpoint meet."),
]
MaxRestarts = Annotated[
    int, Field(ge=0, description="How often all processes are started again after one of them failed.")
]
RdzvTimeout = Annotated[
    int, Field(ge=1, description="Seconds to wait for the other machines before it is an error.")
]
LastCallTimeout = Annotated[
    int,
    Field(
        ge=1,
        description="Seconds a range of machines waits for more of them once the fewest are there, at each start.",
    ),
]
MonitorInterval = Annotated[
    float, Field(gt=0, description="Seconds between two looks at whether the processes are alive.")
]
Ranks = Annotated[
    int | str,
    AfterValidator(check_ranks),
    Field(description="Whose output is on the screen: `all`, `none`, or ranks as in `0,2`."),
]
LogDir = Annotated[
    str | None,
    Field(
        min_length=1,
        description="Folder for the logs of runs; unset keeps them where this system keeps a program's state.",
    ),
]
ShutdownTimeout = Annotated[
    int,
    Field(
        ge=0,
        description="Seconds the processes have to save and end after a signal, or after one of them failed.",
    ),
]
StallTimeout = Annotated[
    int | None,
    Field(
        ge=1,
        description="Seconds without progress on any process until `accel launch` shows where each one is; unset does not watch.",
    ),
]


class Elastic(Launcher):
    """A launcher whose processes the elastic agent starts; its section has these fields, in an order of its own."""

    if TYPE_CHECKING:
        nnodes: Nnodes
        rdzv_endpoint: Endpoint
        allow_loopback: AllowLoopback
        rdzv_id: RunId
        max_restarts: MaxRestarts
        rdzv_timeout: RdzvTimeout
        last_call_timeout: LastCallTimeout
        monitor_interval: MonitorInterval
        ranks: Ranks
        log_dir: LogDir
        shutdown_timeout: ShutdownTimeout
        stall_timeout: StallTimeout

    @model_validator(mode="after")
    def _machines_need_a_meeting_place(self) -> Self:
        if self.range[1] > 1 and self.rdzv_endpoint is None:
            raise ValueError("rdzv_endpoint (host:port) is needed if nnodes is above 1")
        return self

    @model_validator(mode="after")
    def _machines_reach_the_endpoint(self) -> Self:
        if self.range[1] == 1 or self.rdzv_endpoint is None or self.allow_loopback:
            return self
        if network.Endpoint.parse(self.rdzv_endpoint).loopback:
            raise ValueError(
                f"rdzv_endpoint: no other machine reaches {self.rdzv_endpoint}, and nnodes is {self.nnodes}. Use an address of "
                "one machine that all of them reach, or set launcher.allow_loopback: true to run all of them on this machine"
            )
        return self

    @property
    def range(self) -> tuple[int, int]:
        """The fewest and the most machines."""
        low, _, high = str(self.nnodes).partition(":")
        return int(low), int(high or low)

    def check_static(self, job: Job) -> None:
        """Refuse a typed number of this machine where machines may change.

        Raises:
            UsageError: It does not fit.
        """
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

    def interfaces(self) -> dict[str, str]:
        """Where collectives listen: left alone, on an address that other machines reach."""
        return plan.get_loopback_interfaces(self.range[1])

    def agent(self, job: Job) -> dict[str, Any]:
        """What the elastic agent is told, in torch's words where it has one."""
        return plan.build_agent_settings(
            self.range,
            rdzv_endpoint=self.rdzv_endpoint,
            node_rank=job.nodes.node_rank,
            patience=job.settings.process_group_timeout,
            run_id=self.rdzv_id,
            max_restarts=self.max_restarts,
            monitor_interval=self.monitor_interval,
            static=job.nodes.static or None,
            rdzv_timeout=self.rdzv_timeout,
            last_call_timeout=self.last_call_timeout,
            ranks=self.ranks,
            log_dir=self.log_dir,
            shutdown_timeout=self.shutdown_timeout,
            stall_timeout=self.stall_timeout,
        )


def command(job: Job, file: str, *how: str) -> tuple[str, ...]:
    """The command of one process of a job, under a file of accel's."""
    return plan.build_worker_command(job.python, (job.kind, job.target, *job.args), file, *how)
