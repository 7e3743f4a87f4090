"""The torchrun launcher, and the fields and checks of all launchers that use torch's elastic agent."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Protocol, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from typing_extensions import override

from accel_cli.errors import AccelError, UsageError, explain_torch_error
from accel_cli.launchers.launcher import (
    GpuIds,
    KeepDays,
    KeepRuns,
    Launcher,
    LaunchSpec,
    Plan,
    build_environment,
    build_rank_command,
    choose_gpus,
    resolve_device,
)
from accel_cli.launchers.sections import Answers, CountOrAuto, ExpandedPath, Question
from accel_cli.planning import network
from accel_cli.planning.machine import Machine
from accel_cli.planning.nodes import PORT
from accel_cli.planning.plan import (
    DEFAULT_RUN_ID,
    KEEP_DAYS,
    KEEP_RUNS,
    PROGRESS_INTERVAL_S,
    AgentSettings,
    StallAction,
    check_ranks,
    get_highest_rank,
)
from accel_runtime.environment import settings as env

__all__ = [
    "NODE_CHECK",
    "PASSED_KEYS",
    "ElasticLauncher",
    "Endpoint",
    "LogDir",
    "MaxRestarts",
    "Nnodes",
    "OmpNumThreads",
    "Preflight",
    "ProgressLine",
    "Ranks",
    "RdzvTimeout",
    "ShutdownTimeout",
    "StallActionKey",
    "StallTimeout",
    "StartMethod",
    "StartupTimeout",
    "Torchrun",
    "check_stall_keys",
    "is_endpoint",
]

_ENDPOINT = re.compile(r"(\[[0-9a-fA-F:]+\]|[^\s:\[\]]+):(\d{1,5})")
_TOO_BIG_PORT = 65536
_RANGE = re.compile(r"([1-9]\d*):([1-9]\d*)")


def is_endpoint(text: str) -> bool:
    """Return True if a text is host:port with a valid port."""
    match = _ENDPOINT.fullmatch(text)
    return match is not None and 0 < int(match[2]) < _TOO_BIG_PORT


def _check_endpoint(text: str | None) -> str | None:
    if text is not None and not is_endpoint(text):
        raise ValueError("expected host:port with a port from 1 to 65535")
    return text


def _parse_metrics_port(text: str | None) -> str | None:
    """Return the address of a port, or of `host:port`."""
    address = text if text is None or ":" in text else f"127.0.0.1:{text}"
    if address is not None and not is_endpoint(address):
        raise ValueError("expected a port from 1 to 65535, or host:port")
    return address


def _parse_nnodes(value: int | str) -> int | str:
    if isinstance(value, str):
        match = _RANGE.fullmatch(value)
        if not match or int(match[1]) > int(match[2]):
            raise ValueError("expected a whole number of at least 1, or a range MIN:MAX such as 1:4")
        return int(match[1]) if match[1] == match[2] else value
    if value < 1:
        raise ValueError("expected at least 1")
    return value


Nnodes = Annotated[
    int | str,
    Field(
        union_mode="left_to_right",
        description="Number of nodes, or a range `MIN:MAX` within which nodes may join and leave. "
        "The same `accel launch` is started on every node.",
    ),
    Field(json_schema_extra={"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]}),
    AfterValidator(_parse_nnodes),
]
Endpoint = Annotated[
    str | None,
    AfterValidator(_check_endpoint),
    Field(description="Rendezvous address, `host:port` on one of the nodes. Needed if nnodes is above 1."),
]
MaxRestarts = Annotated[
    int, Field(ge=0, description="Maximum number of restarts of all processes after a failure.")
]
Ranks = Annotated[
    int | str,
    AfterValidator(check_ranks),
    Field(description="Ranks whose output is shown: `all`, `none`, or a list as in `0,2`."),
]
ShutdownTimeout = Annotated[
    int,
    Field(
        ge=0,
        description="Seconds the processes have to save and exit after a signal, or after a failure of one of them.",
    ),
]
StallTimeout = Annotated[
    int | None,
    Field(
        ge=1,
        description="Seconds without progress of any process until `accel launch` shows all stacks; if unset, stalls are not detected.",
    ),
]
StallActionKey = Annotated[
    StallAction,
    Field(
        description="After a stall is shown: `report` leaves the processes running, `restart` restarts all of them, as after a "
        "failure, and `fail` ends the run with exit code 124."
    ),
]
StartupTimeout = Annotated[
    int | None,
    Field(
        ge=1,
        description="`stall_timeout` before the first step: imports, connecting, the first batch, compilation; unset is ten times "
        "`stall_timeout`.",
    ),
]

Preflight = Annotated[
    bool,
    Field(
        description="Check the nodes before the script starts: devices, folders, connections, bandwidth. A bad node is left out if "
        "enough remain, otherwise the launch fails with its name.",
    ),
]
StartMethod = Annotated[
    Literal["auto", "forkserver", "exec"],
    Field(
        description="Start method of processes: `forkserver` imports torch once and forks, `exec` executes a command for "
        "each; `auto` is forkserver for Python on Linux."
    ),
]
RdzvTimeout = Annotated[
    int, Field(ge=1, description="Seconds to wait for the other nodes before the launch fails.")
]
MetricsPort = Annotated[
    str | None,
    BeforeValidator(lambda value: str(value) if isinstance(value, int) else value),
    AfterValidator(_parse_metrics_port),
    Field(
        description="Port at which `accel launch` serves metrics of the run for Prometheus: of the loopback interface, or of "
        "another address as `HOST:PORT`.",
    ),
]
ProgressLine = Annotated[
    float | None,
    Field(
        gt=0,
        description="Seconds between two lines of `accel launch` that name the step, the loss, the speed and the time that remains, for "
        "programs that watch the log; if unset, none is printed.",
    ),
]
ProgressFile = Annotated[
    str | None,
    Field(
        min_length=1,
        description="File to which `accel launch` writes the progress of the run: a line of JSON every `progress_interval` seconds and at "
        "the end, or the last state only if its name ends in `.json`. Of several nodes, the first one writes it.",
    ),
    ExpandedPath,
]
LogDir = Annotated[
    str | None,
    Field(
        min_length=1,
        description="Folder for the logs of runs; if unset, the system's folder for program state.",
    ),
    ExpandedPath,
]
OmpNumThreads = Annotated[
    int | None,
    Field(
        ge=1,
        description="OMP_NUM_THREADS of each process; if unset, the processor cores are divided among them.",
    ),
]


class StallKeys(Protocol):
    """The keys of a section about stalls."""

    stall_timeout: int | None
    stall_action: StallAction
    startup_timeout: int | None
    max_restarts: int


_Section = TypeVar("_Section", bound=StallKeys)


NODE_CHECK = "preflight"
"""The key that checks the nodes, in the table of checks."""
PASSED_KEYS = (
    "stall_timeout",
    "stall_action",
    "startup_timeout",
    NODE_CHECK,
    "start_method",
    "progress_line",
)
"""The keys about stalls, the check of the nodes, the start of processes and the progress line, which launchers of several nodes pass on to `accel launch` on each node."""


def check_stall_keys(section: _Section) -> _Section:
    """Raise ValueError if a key about stalls would have no effect."""
    for key, default in (("stall_action", "report"), ("startup_timeout", None)):
        if section.stall_timeout is None and getattr(section, key) != default:
            raise ValueError(f"{key}: stalls are detected only with stall_timeout; set it, or remove {key}")
    if section.stall_action == "restart" and section.max_restarts == 0:
        raise ValueError("stall_action: restart needs max_restarts above 0")
    return section


class ElasticLauncher(Launcher):
    """A launcher whose processes the elastic agent starts."""

    nnodes: Nnodes = 1
    rdzv_endpoint: Endpoint = None
    allow_loopback: bool = Field(
        False,
        description="Accept a loopback address as `rdzv_endpoint` for several nodes that all run on this machine.",
    )
    rdzv_id: str = Field(
        DEFAULT_RUN_ID,
        min_length=1,
        description="Name of the run; nodes with the same name and endpoint join the same run.",
    )
    max_restarts: MaxRestarts = 0
    rdzv_timeout: RdzvTimeout = 600
    last_call_timeout: int = Field(
        5,
        ge=1,
        description="Seconds to wait for more nodes of a range once the minimum has joined, at each start.",
    )
    monitor_interval: float = Field(0.1, gt=0, description="Seconds between two checks of the processes.")
    ranks: Ranks = 0
    log_dir: LogDir = None
    keep_runs: KeepRuns = KEEP_RUNS
    keep_days: KeepDays = KEEP_DAYS
    shutdown_timeout: ShutdownTimeout = 30
    stall_timeout: StallTimeout = None
    stall_action: StallActionKey = "report"
    startup_timeout: StartupTimeout = None
    metrics_port: MetricsPort = None
    progress_line: ProgressLine = None
    progress_file: ProgressFile = None
    progress_interval: float = Field(
        PROGRESS_INTERVAL_S, gt=0, description="Seconds between two writes of `progress_file`."
    )
    _check_stalls = model_validator(mode="after")(check_stall_keys)

    @model_validator(mode="after")
    def _check_progress(self) -> Self:
        if self.progress_file is None and self.progress_interval != PROGRESS_INTERVAL_S:
            raise ValueError(
                "progress_interval: progress is written only with progress_file; set it, or remove progress_interval"
            )
        return self

    @model_validator(mode="after")
    def _check_endpoint_is_set(self) -> Self:
        if self.range[1] > 1 and self.rdzv_endpoint is None:
            raise ValueError("rdzv_endpoint (host:port) is needed if nnodes is above 1")
        return self

    @model_validator(mode="after")
    def _check_endpoint_is_reachable(self) -> Self:
        if self.range[1] == 1 or self.rdzv_endpoint is None or self.allow_loopback:
            return self
        if network.Endpoint.parse(self.rdzv_endpoint).is_loopback:
            raise ValueError(
                f"rdzv_endpoint: {self.rdzv_endpoint} is not reachable from other nodes, and nnodes is {self.nnodes}. Use an "
                "address that all nodes reach, or set launcher.allow_loopback: true to run all nodes on this machine"
            )
        return self

    @property
    def range(self) -> tuple[int, int]:
        """The minimum and maximum number of nodes."""
        low, _, high = str(self.nnodes).partition(":")
        return int(low), int(high or low)

    def check_node_rank(self, spec: LaunchSpec) -> None:
        """Raise if `--node-rank` is not below the number of nodes, or if nodes may join later."""
        if not spec.nodes.static:
            return
        low, high = self.range
        if high <= int(spec.nodes.node_rank or 0):
            raise UsageError(
                f"Invalid --node-rank {spec.nodes.node_rank}: expected 0 to {high - 1} for nnodes {high}."
            )
        if low != high or self.max_restarts:
            cause = f"nnodes {self.nnodes}" if low != high else f"max_restarts {self.max_restarts}"
            raise UsageError(
                f"Cannot fix the rank of this node by --node-rank: {cause} lets nodes join later. Leave out --node-rank, or "
                "set max_restarts to 0 and nnodes to a number."
            )

    @override
    def run(self, plan: Plan) -> int:
        """Run the elastic agent: after a fork server, or in this process."""
        assert plan.agent
        if plan.agent.start_method == "forkserver":
            from accel_cli.runner.forkserver import exec_fork_server  # noqa: PLC0415 - not for a dry run

            return exec_fork_server(plan)
        try:
            from accel_cli.runner.run import run  # noqa: PLC0415 - imports torch
        except (ImportError, MemoryError, OSError) as error:
            raise AccelError(explain_torch_error(error)) from error
        return run(plan)

    def get_interfaces(self) -> dict[str, str]:
        """Return the variables that bind collectives to the loopback interface, for a run on one node."""
        if self.range[1] > 1 or sys.platform != "linux":
            return {}
        return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}

    def build_agent_settings(
        self, spec: LaunchSpec, start_method: tuple[str, str], *, starts_replicas: bool = False
    ) -> AgentSettings:
        """Return the settings of the elastic agent, with the start method and the reason for it."""
        method, reason = start_method
        min_nodes, max_nodes = self.range
        socket_number = spec.environ.get(env.RDZV_SOCKET, "")
        return AgentSettings(
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            rdzv_endpoint=self.rdzv_endpoint or "",
            node_rank=spec.nodes.node_rank,
            static=spec.nodes.static,
            run_id=self.rdzv_id,
            process_group_timeout=spec.settings.process_group_timeout,
            max_restarts=self.max_restarts,
            monitor_interval=self.monitor_interval,
            rdzv_timeout=self.rdzv_timeout,
            last_call_timeout=self.last_call_timeout,
            ranks=self.ranks,
            log_dir=self.log_dir,
            shutdown_timeout=self.shutdown_timeout,
            stall_timeout=self.stall_timeout,
            stall_action=self.stall_action,
            startup_timeout=self.startup_timeout,
            metrics_port=self.metrics_port,
            progress_line=self.progress_line,
            progress_file=self.progress_file,
            progress_interval=self.progress_interval if self.progress_file else None,
            keep_runs=self.keep_runs,
            keep_days=self.keep_days,
            host=spec.environ.get(env.NODE_NAME),
            failure_file=spec.environ.get(env.FAILURE_FILE),
            rdzv_socket=int(socket_number) if socket_number.isdecimal() else None,
            start_method=method,
            start_method_reason=reason,
            starts_replicas=starts_replicas,
        )


def _suggest_count(machine: Machine, _: Answers) -> int | str:
    return "auto" if machine.devices else min(2, machine.cpus)


def _suggest_endpoint(*_: object) -> str:
    """Return a port on this machine, with the address that other machines reach, or else its host name."""
    return str(network.Endpoint(network.find_own_address() or socket.gethostname(), PORT))


def _check_reachable(endpoint: str | None) -> str | None:
    """Return a problem if only this machine reaches an endpoint."""
    if not endpoint or not is_endpoint(endpoint) or not network.Endpoint.parse(endpoint).is_loopback:
        return None
    return "only this machine reaches this address: give one that all nodes reach"


class Torchrun(ElasticLauncher):
    """Several processes, started and watched by the elastic agent of torch.distributed.run."""

    # The exit code of a launch is decided in `runner/agent.py`.

    title: ClassVar[str] = "Several processes (torchrun)"
    proven_on: ClassVar[str] = (
        "CPU only: several processes over gloo, also on hosts that are network namespaces of one machine; not several GPUs"
    )

    kind: Literal["torchrun"] = Field(
        "torchrun", description="Several processes, through torch's elastic agent (torch.distributed.run)."
    )
    nnodes: Annotated[Nnodes, Question("How many nodes?", suggest=lambda *_: 1)] = 1
    nproc_per_node: Annotated[
        CountOrAuto,
        Field(
            description="Number of processes on each node; `auto` is one for each accelerator (of `gpu_ids`), or 1 on the CPU."
        ),
        Question(
            "How many processes on each node?",
            suggest=_suggest_count,
            hint="a number, or auto",
        ),
    ] = "auto"
    gpu_ids: GpuIds = None
    rdzv_endpoint: Annotated[
        Endpoint,
        Question(
            "Rendezvous address, as host:port?",
            suggest=_suggest_endpoint,
            when=lambda answers: answers.get("nnodes", 1) != 1,
            hint="an address of one node that all nodes reach",
            check=_check_reachable,
        ),
    ] = None
    preflight: Preflight = False
    start_method: StartMethod = "auto"
    omp_num_threads: OmpNumThreads = None

    @classmethod
    @override
    def may_start_several(cls, answers: Answers) -> bool:
        return (answers.get("nnodes", 1), answers.get("nproc_per_node", 1)) != (1, 1)

    @override
    def plan(self, spec: LaunchSpec) -> Plan:
        self.check_node_rank(spec)
        spec, visible = choose_gpus(spec, self.gpu_ids)
        count = self._count_processes(spec)
        device = resolve_device(spec, count)
        maximum = self._read_num_processes(spec, self.range[1] * count)
        if maximum and get_highest_rank(self.ranks) >= maximum:
            raise UsageError(f"Invalid ranks {self.ranks!r}: the last rank is {maximum - 1}.")
        threads = str(self.omp_num_threads or max(1, spec.machine.cpus // count))
        return Plan(
            launcher=self.kind,
            argv=build_rank_command(spec),
            env={**build_environment(spec, {"OMP_NUM_THREADS": threads, **self.get_interfaces()}), **visible},
            device=device,
            target=spec.target,
            nnodes=self.range[1],
            nproc_per_node=count,
            node_summary=spec.nodes.summary,
            agent=replace(
                self.build_agent_settings(spec, self._choose_start_method(spec)),
                node_check=NODE_CHECK if self.preflight else None,
            ),
        )

    @override
    def get_world_sizes(self, spec: LaunchSpec, plan: Plan) -> Sequence[int]:
        sizes = super().get_world_sizes(spec, plan)
        num_processes = self._read_num_processes(spec, sizes[-1])
        return sizes if num_processes == sizes[-1] else [num_processes] if num_processes else []

    def _read_num_processes(self, spec: LaunchSpec, default: int) -> int:
        """Return the number of processes on all nodes; 0 if other nodes run another number, which is not known."""
        text = spec.environ.get(env.NUM_PROCESSES, "")
        return int(text) if self.range[1] > 1 and text.isdecimal() else default

    def _choose_start_method(self, spec: LaunchSpec) -> tuple[str, str]:
        """Return the start method and the reason for it."""
        obstacle = ""
        if spec.kind == "program":
            obstacle = "a program may not be Python"
        elif sys.platform != "linux":
            obstacle = f"the fork server needs Linux, and this is {sys.platform}"
        if obstacle and self.start_method == "forkserver":
            raise UsageError(f"Cannot use start_method: forkserver: {obstacle}. Use exec or auto.")
        if self.start_method != "auto":
            return self.start_method, "launcher.start_method"
        return ("exec", obstacle) if obstacle else ("forkserver", "torch is imported once for all processes")

    def _count_processes(self, spec: LaunchSpec) -> int:
        if isinstance(self.nproc_per_node, int):
            return self.nproc_per_node
        return 1 if spec.settings.device == "cpu" else max(1, len(spec.machine.devices))
