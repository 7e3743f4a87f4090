"""The `launcher:` section of a profile for hosts that ssh reaches, and the commands that run on them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from typing_extensions import Self, override

from accel_cli.errors import UsageError
from accel_cli.launchers.base import GpuIds, Launcher, LaunchSpec, Plan
from accel_cli.launchers.job_launcher import build_node_options
from accel_cli.launchers.torchrun import Endpoint, MaxRestarts, Ranks, ShutdownTimeout, StallTimeout
from accel_cli.planning.network import Endpoint as Address
from accel_cli.planning.nodes import PORT
from accel_cli.planning.options import LaunchOption
from accel_cli.planning.plan import JobPlan, get_highest_rank
from accel_cli.sections import Answers, Choice, CountOrAuto, Question
from accel_cli.ssh.hosts import Host, check_hosts, parse_host, read_hostfile

__all__ = ["Ssh", "SshPlan"]

_EXTRA = "accel-runtime[ssh]"
_NODE_KEYS = {
    "gpu_ids", "max_restarts", "ranks", "log_dir", "shutdown_timeout", "stall_timeout", "rdzv_timeout", "omp_num_threads",
}  # fmt: skip
"""Keys of torchrun that `accel launch` on each host receives if they are set."""
_START = (
    "import sys; sys.path[:] = [path for path in sys.path if path]; "
    "from accel_cli.ssh.supervisor import main; main()"
)
"""Starts the supervisor without importing modules from the home directory."""


@dataclass(frozen=True, kw_only=True)
class SshPlan(JobPlan):
    """The hosts of a launch and the command of each."""

    hosts: tuple[Host, ...]
    counts: tuple[int | str, ...]
    """Processes of each host; `auto` is one for each GPU."""
    python: str
    folder: str
    """The working folder on the hosts."""
    options: tuple[str, ...]
    """Options of `accel launch` that are the same on all hosts."""
    target: tuple[str, ...]
    """The script and its arguments, as `accel launch` takes them."""
    script: str | None
    """The file that must exist on the hosts; None for a module or program."""
    fixed_ranks: bool
    """True if hosts get their rank from the list; restarts do not allow it."""
    rdzv_endpoint: str | None
    connect_timeout: int
    lost_after: int
    shutdown_timeout: int
    sync: bool
    include: tuple[str, ...]
    exclude: tuple[str, ...]

    @property
    def num_processes(self) -> int:
        """The number of processes on all hosts; 0 if it depends on their GPUs."""
        counts = [count for count in self.counts if isinstance(count, int)]
        return sum(counts) if len(counts) == len(self.counts) else 0

    @property
    def ssh_options(self) -> tuple[str, ...]:
        """The options of `ssh`, which take precedence over the user's configuration."""
        settings = {
            "BatchMode": "yes",
            "ConnectTimeout": self.connect_timeout,
            "ServerAliveInterval": max(1, self.lost_after // 3),
            "ServerAliveCountMax": 3,
            # Forwardings of the configuration are for interactive sessions, and only one session can have them.
            "ClearAllForwardings": "yes",
            "ForwardX11": "no",
            "RemoteCommand": "none",
            # The connection of a running session is shared, but none that ends with the launch.
            "ControlMaster": "no",
        }
        return ("-T", *(f"-o{name}={value}" for name, value in settings.items()))

    def build_ssh_command(self, host: Host) -> tuple[str, ...]:
        """Return the command that starts the supervisor of a host."""
        remote = f"exec {shlex.quote(self.python)} -c {shlex.quote(_START)}"
        return ("ssh", *self.ssh_options, "--", host.destination, remote)

    def build_launch_command(self, rank: int, endpoint: str, run_id: str) -> tuple[str, ...]:
        """Return the command `accel launch` of a host."""
        nodes: tuple[object, ...] = ()
        if len(self.hosts) > 1:
            nodes = ("--nnodes", len(self.hosts), "--rdzv-endpoint", endpoint, "--rdzv-id", run_id)
            nodes += ("--node-rank", rank) if self.fixed_ranks else ()
        nodes += ("--nproc-per-node", self.counts[rank])
        launch = (self.python, "-m", "accel_cli", "launch", "--quiet", "--no-profile")
        return (*launch, *map(str, nodes), *self.options, *self.target)

    @override
    def describe(self) -> list[str]:
        first = Address(self.hosts[0].name, PORT)
        endpoint = self.rdzv_endpoint or str(first)
        lines = [f"working folder: {self.folder}{' (copied with rsync)' if self.sync else ''}"]
        if len(self.hosts) > 1 and not self.rdzv_endpoint:
            lines.append(
                f"rendezvous: the address of {first.host} that ssh connects to, port {PORT} or the next free one"
            )
        lines.append("hosts:")
        for rank, host in enumerate(self.hosts):
            command = shlex.join(self.build_launch_command(rank, endpoint, "ID"))
            lines.append(f"  {host.destination}: {command}")
        return lines


def _split_hosts(value: Any) -> Any:
    """Convert text such as `a,b` to a list."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _check_entries(value: list[str] | None) -> list[str] | None:
    if value is not None:
        check_hosts([*map(parse_host, value)])
    return value


def _check_line(value: str | None) -> str | None:
    if value is not None and (not value.strip() or not value.isprintable() or value.startswith("~")):
        raise ValueError("expected a path without ~ on one line")
    return value


_Path = Annotated[str | None, AfterValidator(_check_line)]


class Ssh(Launcher):
    """`accel launch` on several hosts, started, watched and ended over ssh."""

    title: ClassVar[str] = "Several machines over ssh"
    location = "hosts"
    launch_options = (
        LaunchOption(
            "--hosts", "Run on these hosts over ssh.", "HOST,HOST", "launcher.hosts", selects_launcher=True
        ),
        LaunchOption(
            "--hostfile",
            "Run over ssh on the hosts of this file, with a line 'host slots=N' for each.",
            "FILE",
            "launcher.hostfile",
            selects_launcher=True,
        ),
        LaunchOption(
            "--sync", "Copy the working folder to every host with rsync.", key="launcher.sync", const=True
        ),
    )

    kind: Literal["ssh"] = Field(
        "ssh", description="Several machines: `accel launch` runs on each, over ssh."
    )
    hosts: Annotated[
        list[str] | None,
        BeforeValidator(_split_hosts),
        AfterValidator(_check_entries),
        Field(
            description="Hosts as `ssh` takes them: `node1`, `user@node1`, an address or an alias, each with or without `slots=N` after it. "
            "The first has the rendezvous."
        ),
        Question(
            "Which hosts?",
            suggest=lambda *_: ["localhost"],
            hint="names as in `ssh NAME`, with commas between them",
        ),
    ] = None
    hostfile: Annotated[
        _Path,
        Field(description="File with a line `host slots=N` for each host, instead of `hosts`."),
    ] = None
    nnodes: int | None = Field(
        None, ge=1, description="Number of hosts that are used, from the start of the list; unset uses all."
    )
    nproc_per_node: Annotated[
        CountOrAuto,
        Field(
            description="Number of processes on each host; `auto` is its `slots`, or one for each accelerator, or 1 on the CPU."
        ),
        Question(
            "How many processes on each host?",
            suggest=lambda *_: "auto",
            hint="a number, or auto for one per GPU",
        ),
    ] = "auto"
    gpu_ids: GpuIds = None
    python: Annotated[
        _Path,
        Field(
            description="Python that has accel on every host; unset is the path of the one that runs `accel launch`."
        ),
    ] = None
    folder: Annotated[
        _Path,
        Field(description="Working folder on every host; unset is the path of the current folder."),
    ] = None
    sync: Annotated[
        bool,
        Field(description="Copy the working folder to every host with rsync before the start."),
        Question(
            "Is the working folder on every host?",
            suggest=lambda *_: False,
            choices=(
                Choice(False, "yes: on a shared file system"),
                Choice(True, "no: copy it with rsync at each launch"),
            ),
        ),
    ] = False
    include: list[str] = Field(
        default_factory=list,
        description="With `sync`, patterns of files to copy although git ignores them, or although they may hold secrets.",
    )
    exclude: list[str] = Field(
        default_factory=list, description="With `sync`, patterns of files not to copy."
    )
    rdzv_endpoint: Annotated[
        Endpoint,
        Field(
            description="Rendezvous address, `host:port` on one of the hosts; unset is the address of the first host that ssh "
            "connects to, and a free port."
        ),
    ] = None
    max_restarts: MaxRestarts = 0
    rdzv_timeout: int = Field(
        600, ge=1, description="Seconds to wait for the other nodes before the launch fails."
    )
    ranks: Ranks = 0
    log_dir: str | None = Field(
        None,
        min_length=1,
        description="Folder for the logs of runs on each host; if unset, the system's folder for program state.",
    )
    shutdown_timeout: ShutdownTimeout = 30
    stall_timeout: StallTimeout = None
    omp_num_threads: Annotated[
        int | None,
        Field(
            ge=1,
            description="OMP_NUM_THREADS of each process; if unset, the processor cores are divided among them.",
        ),
    ] = None
    connect_timeout: int = Field(
        10, ge=1, description="Seconds within which a host must accept a connection."
    )
    lost_after: int = Field(
        30,
        ge=2,
        description="Seconds without a sign of life after which a connection counts as lost; its host then ends its processes.",
    )

    @model_validator(mode="after")
    def _check_hosts(self) -> Self:
        if self.hosts is None and self.hostfile is None:
            raise ValueError("hosts or hostfile is needed, for example --hosts node1,node2")
        if self.hosts is not None and self.hostfile is not None:
            raise ValueError(
                "hosts and hostfile are both set. Remove one: --hosts instead of the hostfile of a profile needs --set "
                "launcher.hostfile=null, and --hostfile needs --set launcher.hosts=null"
            )
        return self

    @classmethod
    @override
    def may_start_several(cls, answers: Answers) -> bool:
        return (len(answers.get("hosts") or ()), answers.get("nproc_per_node", "auto")) != (1, 1)

    @override
    def plan(self, spec: LaunchSpec) -> Plan:
        if self.sync and not find_spec("pathspec"):
            raise UsageError(
                f'Cannot use launcher.sync: pathspec is not installed. Install it: pip install "{_EXTRA}"'
            )
        hosts = self._list_hosts()
        counts = tuple(self._count_processes(host, spec) for host in hosts)
        job = self._build_job(spec, hosts, counts)
        if job.num_processes and get_highest_rank(self.ranks) >= job.num_processes:
            raise UsageError(f"Invalid ranks {self.ranks!r}: the last rank is {job.num_processes - 1}.")
        return Plan(
            launcher=self.kind,
            argv=job.build_ssh_command(hosts[0]),
            env=self._build_environment(spec),
            device=spec.settings.device if spec.settings.device != "auto" else "detected on each host",
            target=spec.target,
            nnodes=len(hosts),
            nproc_per_node=next((count for count in counts if isinstance(count, int)), 1),
            process_description=_describe_processes(counts),
            job=job,
        )

    @override
    def run(self, plan: Plan) -> int:
        from accel_cli.ssh.run import run  # noqa: PLC0415 - not for a dry run

        return run(plan)

    @override
    def get_world_sizes(self, spec: LaunchSpec, plan: Plan) -> Sequence[int]:
        assert isinstance(plan.job, SshPlan)
        return [plan.job.num_processes] if plan.job.num_processes else []

    def _list_hosts(self) -> tuple[Host, ...]:
        """Return the hosts of the list or of the hostfile, which is a part of the profile."""
        if self.hosts is not None:
            hosts = tuple(map(parse_host, self.hosts))
        else:
            hosts = read_hostfile(Path(self.hostfile or ""))
        if self.nnodes is not None and self.nnodes > len(hosts):
            raise UsageError(
                f"Invalid launcher.nnodes {self.nnodes}: only {len(hosts)} host(s) are listed. List more hosts, or reduce nnodes."
            )
        return hosts[: self.nnodes]

    def _count_processes(self, host: Host, spec: LaunchSpec) -> int | str:
        """Return the number of processes of a host; `auto` is one for each of its GPUs."""
        num_gpus = self._count_chosen_gpus(spec)
        if self.nproc_per_node == "auto":
            count = host.slots or num_gpus or (1 if spec.settings.device == "cpu" else "auto")
            source = f"slots={host.slots} of host {host.destination}"
        else:
            count, source = self.nproc_per_node, f"launcher.nproc_per_node {self.nproc_per_node}"
            if host.slots is not None and count > host.slots:
                raise UsageError(
                    f"Invalid {source}: host {host.destination} has slots={host.slots}. Reduce it, or use auto."
                )
        # As on the host itself: two ranks of NCCL cannot use one GPU.
        if num_gpus and int(count) > num_gpus and spec.settings.process_group_backend != "gloo":
            raise UsageError(
                f"Invalid {source}: launcher.gpu_ids {self.gpu_ids} chooses {num_gpus} GPU(s) on every host. Reduce it, choose more "
                "GPUs, or share them with process_group_backend: gloo."
            )
        return count

    def _count_chosen_gpus(self, spec: LaunchSpec) -> int | None:
        """Return the number of GPUs that `gpu_ids` chooses on every host; None if it chooses none."""
        if self.gpu_ids in {None, "all"} or spec.settings.device == "cpu":
            return None
        return len(str(self.gpu_ids).split(","))

    def _build_job(self, spec: LaunchSpec, hosts: tuple[Host, ...], counts: tuple[int | str, ...]) -> SshPlan:
        keys = self.model_dump(include=_NODE_KEYS, exclude_defaults=True)
        return SshPlan(
            hosts=hosts,
            counts=counts,
            python=self.python or spec.python,
            folder=self.folder or str(Path.cwd()),
            options=build_node_options(keys),
            target=spec.build_arguments(),
            script=spec.target if spec.kind == "script" else None,
            fixed_ranks=not self.max_restarts,
            rdzv_endpoint=self.rdzv_endpoint,
            connect_timeout=self.connect_timeout,
            lost_after=self.lost_after,
            shutdown_timeout=self.shutdown_timeout,
            sync=self.sync,
            include=tuple(self.include),
            exclude=tuple(self.exclude),
        )

    def _build_environment(self, spec: LaunchSpec) -> Mapping[str, str]:
        """Return the variables of the profile and of its settings; those of this shell take precedence, as in every launch."""
        variables = {name: spec.environ.get(name, value) for name, value in spec.env.items()}
        return {**variables, **spec.settings.to_env()}


def _describe_processes(counts: Sequence[int | str]) -> str:
    """Return a description of processes whose number is unknown, or differs between hosts; else an empty string."""
    if len(set(counts)) == 1:
        return "" if isinstance(counts[0], int) else "a process for each GPU"
    return f"{', '.join(map(str, counts[:-1]))} and {counts[-1]} processes"
