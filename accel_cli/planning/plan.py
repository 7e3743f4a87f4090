"""What will happen: the pure data that every launcher makes of a job."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import accel_cli
from accel_runtime.env import Settings

__all__ = [
    "Plan",
    "build_agent_settings",
    "build_environment",
    "build_worker_command",
    "get_loopback_interfaces",
    "get_runner",
]


@dataclass(frozen=True)
class Plan:
    """What will happen: pure data."""

    launcher: str
    runner: str
    """Where the function lives that carries this out, as `module:function`."""
    argv: tuple[str, ...]
    """The command of every process."""
    env: Mapping[str, str]
    """What is added to the environment the processes inherit."""
    device: str
    """What a process computes on, in words."""
    target: str = ""
    """The script, module or program, as it was typed."""
    nnodes: int = 1
    nproc_per_node: int = 1
    counted: str = ""
    """What `accel launch` says of the processes where their number shows itself only when they run."""
    derived: str = ""
    """What a scheduler's variables said of the machines, and all that follows; empty where none did."""
    agent: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of torch's elastic agent, where one starts the processes."""
    start_method: str = ""
    """How the agent starts processes, `forkserver` or `exec`, and in brackets why; empty without an agent."""
    script: str = ""
    """What is handed to a scheduler, where one starts the processes; `argv` is then the command that hands it over."""
    layout: str = ""
    """How models are divided among the processes; empty where each has a whole one."""
    request: Mapping[str, Any] = field(default_factory=dict)
    """What a service is asked for, where one runs the processes in its own containers; `argv` is then the script's."""
    look: str = ""
    """Where the function lives that says all that will be asked and sent, and changes nothing, as `module:function`;
    empty where the plan says everything."""
    output_dir: str = "."
    """Where the log of a job goes, or what it brings home."""
    detach: bool = False
    """Whether a job is only submitted, and not followed."""
    again: str = ""
    """Options with which `accel jobs` finds a submitted job again, each with a space before it."""

    def to_json(self) -> str:
        """The plan as text, for a program that takes this one's place."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote."""
        known = json.loads(text)
        return cls(**{**known, "argv": tuple(known["argv"])})


_LOOPBACK = "127.0.0.1"
_HEARD_S = (6, 30)
"""The least and the most seconds without a word from a machine before it counts as lost."""


def build_worker_command(
    python: str, what: Sequence[str], file: str = "worker.py", *how: str
) -> tuple[str, ...]:
    """The command of one process, under a file of accel's: it keeps what is written, and records a failure.

    Args:
        python: The interpreter.
        what: `script`, `module` or `program`, its path or name, and its own arguments.
        file: The file of accel's.
        how: What that is told.
    """
    # By path: `-m` would put the current folder before the standard library while the file loads.
    return (python, str(Path(accel_cli.__file__).parent / "runner" / file), *how, *what)


def get_runner(start_method: str) -> str:
    """The function that carries the plan out, as `module:function`."""
    return (
        "accel_cli.runner.agent:run"
        if start_method == "exec"
        else "accel_cli.runner.forkserver:exec_fork_server"
    )


def build_environment(
    environ: Mapping[str, str], defaults: Mapping[str, str], env: Mapping[str, str], settings: Settings
) -> dict[str, str]:
    """What to add to the inherited environment: a variable the user set is left alone.

    Args:
        environ: What is inherited.
        defaults: What is set where nobody says otherwise.
        env: What the profile says.
        settings: What the processes are told.
    """
    wanted = {**defaults, **env}
    return {**{name: value for name, value in wanted.items() if name not in environ}, **settings.to_env()}


def get_loopback_interfaces(machines: int) -> dict[str, str]:
    """Where collectives listen: left alone, on an address that other machines reach."""
    if machines > 1 or sys.platform != "linux":
        return {}
    return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def build_agent_settings(
    nnodes: tuple[int, int], *, rdzv_endpoint: str | None, node_rank: int | None, patience: int, **said: Any
) -> dict[str, Any]:
    """What the elastic agent is told, in torch's words where it has one.

    Args:
        nnodes: The fewest and the most machines.
        rdzv_endpoint: Where they meet.
        node_rank: The number of this one, where machines have numbers.
        patience: Seconds a collective waits for the others.
        said: The rest, as it is.
    """
    low, high = nnodes
    alone = high == 1
    least, most = _HEARD_S
    return {
        "rdzv_backend": "c10d",
        # On one machine the store takes any free port, so launches never meet.
        "rdzv_endpoint": rdzv_endpoint if not alone and rdzv_endpoint else f"{_LOOPBACK}:0",
        "local_addr": _LOOPBACK if alone else None,
        "min_nodes": low,
        "max_nodes": high,
        "node_rank": None if alone else node_rank,
        "lost_after": max(least, min(most, patience)),
        **said,
    }
