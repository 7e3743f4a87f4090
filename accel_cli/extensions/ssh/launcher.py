"""The `launcher:` section of a profile for hosts that ssh reaches, and the commands that run on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from typing_extensions import override

from accel_cli.errors import UsageError
from accel_cli.extensions.ssh.hosts import Host, check_hosts, parse_host, read_hostfile
from accel_cli.extensions.ssh.plan import SshPlan
from accel_cli.launchers import torchrun
from accel_cli.launchers.launcher import GpuIds, Launcher, LaunchSpec, Plan
from accel_cli.launchers.node_launch import build_node_options
from accel_cli.launchers.sections import Answers, Choice, CountOrAuto, ExpandedPath, Question
from accel_cli.planning.launch_options import LaunchOption
from accel_cli.planning.plan import get_highest_rank

__all__ = ["Ssh"]

_NODE_KEYS = {
    "gpu_ids", "max_restarts", "ranks", "log_dir", "shutdown_timeout", *torchrun.PASSED_KEYS, "rdzv_timeout", "omp_num_threads",
}  # fmt: skip
"""Keys of torchrun that `accel launch` on each host receives if they are set."""


def _split_hosts(value: Any) -> Any:
    """Convert text such as `a,b` to a list."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _check_entries(value: list[str] | None) -> list[str] | None:
    if value is not None:
        check_hosts([*map(parse_host, value)])
    return value


def _check_line(value: str | None) -> str | None:
    if value is not None and (
        not value.strip() or not value.isprintable() or value.startswith("~") or "$" in value
    ):
        raise ValueError("expected a path without ~ and $ on one line")
    return value


_Path = Annotated[str | None, AfterValidator(_check_line)]


class Ssh(Launcher):
    """`accel launch` on several hosts, started, watched and ended over ssh."""

    title: ClassVar[str] = "Several machines over ssh"
    proven_on: ClassVar[str] = (
        "real service: sshd of OpenSSH on hosts that are network namespaces of one machine, CPUs only"
    )
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
            description="Hosts as `ssh` takes them: `node1`, `user@node1`, an address or an alias, each with or without `slots=N` "
            "and `python=PATH` after it. The first has the rendezvous."
        ),
        Question(
            "Which hosts?",
            suggest=lambda *_: ["localhost"],
            hint="names as in `ssh NAME`, with commas between them",
        ),
    ] = None
    hostfile: Annotated[
        str | None,
        ExpandedPath,
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
            description="Python that has accel on every host whose entry has no `python=PATH`; unset is the path of the one that runs "
            "`accel launch`."
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
        description="With `sync`, patterns of files to copy although git ignores them, they are data, or they may hold secrets.",
    )
    exclude: list[str] = Field(
        default_factory=list, description="With `sync`, patterns of files not to copy."
    )
    rdzv_endpoint: Annotated[
        torchrun.Endpoint,
        Field(
            description="Rendezvous address, `host:port` on one of the hosts; unset is the address of the first host that ssh "
            "connects to, and a free port."
        ),
    ] = None
    max_restarts: torchrun.MaxRestarts = 0
    rdzv_timeout: torchrun.RdzvTimeout = 600
    ranks: torchrun.Ranks = 0
    # Each host expands its variables.
    log_dir: str | None = Field(
        None,
        min_length=1,
        description="Folder for the logs of runs on each host; if unset, the system's folder for program state.",
    )
    shutdown_timeout: torchrun.ShutdownTimeout = 30
    progress_line: torchrun.ProgressLine = None
    stall_timeout: torchrun.StallTimeout = None
    stall_action: torchrun.StallActionKey = "report"
    startup_timeout: torchrun.StartupTimeout = None
    preflight: torchrun.Preflight = False
    start_method: torchrun.StartMethod = "auto"
    omp_num_threads: torchrun.OmpNumThreads = None
    connect_timeout: int = Field(
        10,
        ge=1,
        description="Seconds within which a host must accept a connection; three times that for Python to start.",
    )
    lost_after: int = Field(
        30,
        ge=2,
        description="Seconds without a sign of life after which a connection counts as lost; its host then ends its processes.",
    )

    _check_stalls = model_validator(mode="after")(torchrun.check_stall_keys)

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

    @property
    @override
    def may_share_files(self) -> bool:
        # rsync copies the folder to a disk of each host; without it, the folder is usually on a network file system.
        return not self.sync or 1 in {self.nnodes, len(self.hosts or ())}

    @property
    @override
    def sent_folder(self) -> str | None:
        return "." if self.sync else None

    @property
    @override
    def has_own_folder(self) -> bool:
        return self.folder is not None

    @override
    def plan(self, spec: LaunchSpec) -> Plan:
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
        from accel_cli.extensions.ssh.run import run  # noqa: PLC0415 - not for a dry run

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
