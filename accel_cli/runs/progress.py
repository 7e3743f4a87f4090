"""Progress of a run as few numbers, and the seam of those that receive it now and then: files, metrics, services."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self, TypeAlias

from accel_cli.planning.plan import PROGRESS_INTERVAL_S, AgentSettings
from accel_cli.runs.goodput import Goodput, measure_goodput
from accel_cli.runs.run_dir import RunFolder
from accel_cli.runs.snapshot import RunSnapshot, read_snapshot

__all__ = ["Health", "ProgressSink", "RunProgress", "RunState"]

RunState: TypeAlias = Literal["starting", "running", "stalled", "succeeded", "failed", "stopped"]
"""The last three are final: exit code 0, another one, or the end by a signal to the launcher."""


@dataclass(frozen=True)
class Health:
    """Signs of trouble."""

    stalled_ranks: tuple[int, ...] = ()
    """The ranks without progress for more than ten seconds and ten usual steps."""
    slow_ranks: tuple[int, ...] = ()
    """The rank that the others wait for, if one is clearly slower."""
    restarts: int = 0
    """The number of restarts of all processes."""


@dataclass(frozen=True)
class RunProgress:
    """Progress of a run at one time, as the ranks of the node show it that writes it."""

    time: float
    """In seconds since 1970."""
    run: str
    """The id of the run."""
    state: RunState
    """`starting` (no step and no Accelerator yet), `running` or `stalled`; at the end `succeeded`, `failed`, or `stopped` by a signal."""
    exit_code: int | None = None
    """The exit code of the launch; None until its end."""
    steps: int = 0
    """The optimizer steps of this attempt, of the rank that is behind the others."""
    total_steps: int | None = None
    """The steps at the end of the run; None if they are unknown, as of a run that continues another one."""
    fraction: float | None = None
    """The part of the run that is done, from 0 to 1; None if its end is unknown."""
    eta_s: float | None = None
    """Seconds until the end of the run; None if they are unknown."""
    steps_per_s: float | None = None
    """Steps per second over the last steps; None before the second."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The last logged number of each metric, by name; in JSON, NaN and infinity are text."""
    health: Health = field(default_factory=Health)
    world_size: int | None = None
    """The number of ranks on all nodes; None before they start."""
    nodes: int | None = None
    """The number of nodes; None before the ranks start."""
    goodput: Goodput | None = None
    """The wall time until now, by what it was used for, in JSON the productive share; None before the first step, or if unknown."""

    @classmethod
    def read(cls, run: RunFolder) -> RunProgress:
        """Return the progress of a run in progress, with its goodput, from its folder."""
        snapshot = read_snapshot(run)
        goodput = measure_goodput(run, snapshot.started, snapshot.time, is_kept=True)
        return replace(cls.from_snapshot(snapshot), goodput=goodput)

    @classmethod
    def from_snapshot(cls, snapshot: RunSnapshot) -> RunProgress:
        """Return the progress that a snapshot of a run in progress shows, without its goodput."""
        behind = min(
            (rank for rank in snapshot.ranks if rank.beat and rank.beat.steps),
            key=lambda rank: rank.beat.steps if rank.beat else 0,
            default=None,
        )
        goal = snapshot.goal
        return cls(
            time=snapshot.time,
            run=snapshot.run,
            state=_find_state(snapshot),
            steps=behind.beat.steps if behind and behind.beat else 0,
            total_steps=round(goal.number)
            if goal and goal.counts_steps and not snapshot.is_resumed
            else None,
            fraction=snapshot.fraction,
            eta_s=snapshot.eta,
            steps_per_s=behind.rate if behind else None,
            metrics={each.name: each.value for each in snapshot.metrics if isinstance(each.value, float)},
            health=Health(
                stalled_ranks=snapshot.stalled,
                slow_ranks=() if snapshot.slowest is None else (snapshot.slowest,),
                restarts=snapshot.attempt or 0,
            ),
            world_size=snapshot.world_size,
            nodes=snapshot.nodes,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the progress as JSON data, in which numbers that JSON does not have are text."""
        return {
            "time": self.time,
            "run": self.run,
            "state": self.state,
            "exit_code": self.exit_code,
            "steps": self.steps,
            "total_steps": self.total_steps,
            "fraction": self.fraction,
            "eta_s": self.eta_s,
            "steps_per_s": self.steps_per_s,
            "metrics": {
                name: value if math.isfinite(value) else str(value) for name, value in self.metrics.items()
            },
            "stalled_ranks": [*self.health.stalled_ranks],
            "slow_ranks": [*self.health.slow_ranks],
            "restarts": self.health.restarts,
            "world_size": self.world_size,
            "nodes": self.nodes,
            "goodput": self.goodput.share if self.goodput else None,
        }


def _find_state(snapshot: RunSnapshot) -> RunState:
    if all(rank.state == "starting" for rank in snapshot.ranks):
        return "starting"
    return "running" if snapshot.idle_time is None else "stalled"


class ProgressSink(ABC):
    """Receives the progress of a run in the process of `accel launch`.

    All methods are called from one thread, which is the sink's own: `create`, `open`, then `write` at once and at most every `interval_s`
    seconds, and `close` once if `open` has returned, whatever has happened since, also after a signal to the launcher. A sink may
    wait in each of them: the run does not wait for it, but for a few seconds at its start and its end.

    An exception never ends a run: it is shown once, with the name of the sink, and only `close` is called after that; after an
    OSError of `write`, which may pass, `write` is called again at the next interval. The exception is UsageError in `create` and `open`: the launch is refused with its text, before
    a process starts.
    """

    interval_s: float | None = PROGRESS_INTERVAL_S
    """The least seconds between two writes; None for a sink that reads the folder of the run itself, and gets none."""
    is_per_node: ClassVar[bool] = False
    """True if the sink of each node writes its own ranks; otherwise only the first node of the run has the sink."""

    @classmethod
    @abstractmethod
    def create(cls, settings: AgentSettings, environ: Mapping[str, str]) -> Self | None:
        """Return the sink of a launch; None if neither its settings nor the environment switch it on.

        Without side effects.
        """

    @abstractmethod
    def open(self, run: RunFolder) -> None:
        """Prepare for the progress of a run.

        Raises:
            UsageError: The user has to correct something before the run can start.
        """

    @abstractmethod
    def write(self, progress: RunProgress) -> str | None:
        """Take the progress of a run that has not ended.

        Returns:
            A line that the launcher prints below the output of the ranks so far; None or empty for none.
        """

    @abstractmethod
    def close(self, outcome: RunProgress) -> str | None:
        """Take the last progress, with a final state and the exit code, and release everything.

        If another node has become the first one after a restart, the run goes on there, and the state is not final.

        Returns:
            A line that the launcher prints, as for `write`.
        """
