"""The plan of a launch as plain data, with the settings of an elastic agent or the job to submit."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any, Literal, TypeAlias

from accel_runtime.environment.text import encode_text

__all__ = [
    "DEFAULT_RUN_ID",
    "KEEP_DAYS",
    "KEEP_RUNS",
    "PROGRESS_INTERVAL_S",
    "AgentSettings",
    "JobPlan",
    "LaunchDetails",
    "Plan",
    "StallAction",
    "check_ranks",
    "get_highest_rank",
    "join_for_bash",
    "name_target",
    "quote_for_bash",
    "select_ranks",
]


StallAction: TypeAlias = Literal["report", "restart", "fail"]
DEFAULT_RUN_ID = "accel"
"""The name of a run at the rendezvous, if the user gives none."""
KEEP_RUNS, KEEP_DAYS = 50, 30
"""The number of run folders that are kept, and the days after the end of a run, unless the profile sets others."""
PROGRESS_INTERVAL_S = 10.0
"""The least seconds between two writes of the progress of a run, unless the profile or the receiver has others."""
_LOOPBACK = "127.0.0.1"
_MIN_LOST_AFTER_S, _MAX_LOST_AFTER_S = 6, 30
_RANK_LIST = re.compile(r"\d+(,\d+)*", re.ASCII)


def name_target(target: str) -> str:
    """Return the name of a script or program without its folder and suffix, and that of a module with its packages."""
    return re.sub(r"\.(py|pyw|pyc|pyz|sh|bash)\Z", "", PurePath(target).name)


def check_ranks(value: int | str) -> int | str:
    """Return a selection of ranks: `all`, `none`, or a list such as `0,2`; raise ValueError for anything else."""
    if value in {"all", "none"} or _RANK_LIST.fullmatch(str(value).replace(" ", "")):
        return value
    raise ValueError("expected all, none, or ranks as in 0,2")


def select_ranks(value: int | str, world_size: int) -> frozenset[int]:
    """Return the ranks of a selection, for a world size."""
    if value in {"all", "none"}:
        return frozenset(range(world_size) if value == "all" else ())
    return frozenset(int(rank) for rank in str(value).split(","))


def get_highest_rank(value: int | str) -> int:
    """Return the highest rank that a selection names; -1 for `all` and `none`."""
    return max(select_ranks(value, 0), default=-1)


@dataclass(frozen=True)
class AgentSettings:
    """Settings of torch's elastic agent, under torch's names if torch has them."""

    min_nodes: int
    max_nodes: int
    rdzv_endpoint: str
    """The rendezvous as `host:port`; for a single node always a free port of the loopback interface."""
    node_rank: int | None
    """The rank of this node; None if the rendezvous assigns it."""
    run_id: str
    process_group_timeout: int
    """Seconds that a collective waits for the other processes."""
    max_restarts: int
    monitor_interval: float
    """Seconds between two checks of the processes."""
    rdzv_timeout: int
    """Seconds to wait for the other nodes."""
    last_call_timeout: int
    """Seconds to wait for more nodes than `min_nodes`."""
    ranks: int | str
    """The ranks whose output is shown."""
    log_dir: str | None
    shutdown_timeout: int
    """Seconds that the processes have to exit after a signal."""
    stall_timeout: int | None
    """Seconds without progress until stacks are shown."""
    stall_action: StallAction = "report"
    """The reaction to a stall besides the report."""
    startup_timeout: int | None = None
    """Seconds without progress before the first step; None is a multiple of `stall_timeout`."""
    node_check: str | None = None
    """The key of the launcher that checks the nodes before the processes start; None if none does."""
    metrics_port: str | None = None
    """The address at which metrics are served, as `host:port`."""
    progress_line: float | None = None
    progress_file: str | None = None
    """The file for the progress of the run."""
    progress_interval: float | None = None
    """The least seconds between two writes of that file; None without one."""
    keep_runs: int = KEEP_RUNS
    """The number of run folders to keep."""
    keep_days: int = KEEP_DAYS
    """Days to keep the folder of a run after its end."""
    static: bool = False
    """True if `node_rank` was given by an option."""
    starts_replicas: bool = False
    """True if there is one process on each node, which starts the ranks of that node itself."""
    start_method: str = "exec"
    start_method_reason: str = ""
    host: str | None = None
    """The name of this node, if its host name means nothing to the user."""
    failure_file: str | None = None
    """The file for the reason of a failure."""
    rdzv_socket: int | None = None
    """The file descriptor of a socket that is bound to the port of the rendezvous; None if this launch binds it."""

    def __post_init__(self) -> None:
        if self.is_single_node:
            # Its store takes any free port, so that two launches on one node never meet.
            object.__setattr__(self, "rdzv_endpoint", f"{_LOOPBACK}:0")
            object.__setattr__(self, "node_rank", None)

    @property
    def is_single_node(self) -> bool:
        """True if no other node can join."""
        return self.max_nodes == 1

    @property
    def lost_after(self) -> int:
        """Seconds without a heartbeat until a node counts as lost."""
        return max(_MIN_LOST_AFTER_S, min(_MAX_LOST_AFTER_S, self.process_group_timeout))


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """A job to submit; launchers add what only they need in a subclass."""

    output_dir: str = "."
    """The folder for the log or the results of the job."""
    detach: bool = False
    """True if the job is submitted, but not followed."""
    jobs_options: str = ""
    """The options with which `accel jobs` finds the job, each with a space before it."""

    def describe(self) -> list[str]:
        """Return the lines about the job that `--dry-run` prints."""
        return []

    def preview(self) -> str:
        """Return what would be sent to a service; empty if nothing is, or `describe` has it."""
        return ""


@dataclass(frozen=True)
class LaunchDetails:
    """Facts about a launch that are recorded in the folder of its run, in addition to the plan."""

    arguments: tuple[str, ...]
    """The arguments of the target."""
    headline: str
    """The line that describes the launch."""
    profile: Mapping[str, Any]
    """The values of the profile by dotted key, with secrets masked."""
    is_quiet: bool = False
    """True if notes about the end of the run are left out."""


@dataclass(frozen=True)
class Plan:
    """The plan of a launch, as plain data."""

    launcher: str
    argv: tuple[str, ...]
    """The command of every process."""
    env: Mapping[str, str]
    """The variables that are added to the inherited environment."""
    device: str
    """The device of a process, for the user."""
    target: str = ""
    """The script, module or program, as it was typed."""
    nnodes: int = 1
    nproc_per_node: int = 1
    process_description: str = ""
    """A description of the processes, if their number is known only when they run."""
    node_summary: str = ""
    """The source of the nodes and all values derived from it; empty if the profile and options name them."""
    layout: str = ""
    """The sizes of parallelism, as in `dp_shard 2 x tp 2`; empty if every process has a full model."""
    agent: AgentSettings | None = None
    """Settings of torch's elastic agent, if it starts the processes."""
    job: JobPlan | None = None
    """The job, if a scheduler or a service starts the processes."""
    details: LaunchDetails | None = None
    """The facts for the record of the run; None if the command is not a launch."""
    notes: tuple[str, ...] = ()
    """Sentences for the user, which are printed before it runs."""

    def to_json(self) -> str:
        """Return the plan as JSON, for the process that replaces this one; jobs are submitted by this process itself."""
        assert self.job is None
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that `to_json` wrote."""
        data = json.loads(text)
        agent = AgentSettings(**data["agent"]) if data["agent"] else None
        details = LaunchDetails(**data["details"]) if data["details"] else None
        return cls(
            **{
                **data,
                "argv": tuple(data["argv"]),
                "notes": tuple(data["notes"]),
                "agent": agent,
                "details": details,
            }
        )


def quote_for_bash(word: str) -> str:
    """Return a word of bash that means this text: on one line, and escaped if it has unprintable characters."""
    if word.isprintable():
        return shlex.quote(word)
    # sbatch rejects a script with a carriage return, and bytes that are not valid UTF-8 must be kept.
    return "$'" + "".join(map(_escape_character, word)) + "'"


def join_for_bash(words: Iterable[str]) -> str:
    """Return a command of bash with these words."""
    return " ".join(map(quote_for_bash, words))


def _escape_character(character: str) -> str:
    if character in {"'", "\\"}:
        return f"\\{character}"
    if character.isprintable():
        return character
    return "".join(f"\\{byte:03o}" for byte in encode_text(character))
