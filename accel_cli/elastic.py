"""What a plan for torch's elastic agent is made of: pure, and without what only a profile needs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import accel_cli
from accel_runtime.env import Settings

__all__ = ["added", "agent", "command", "interfaces", "runner"]

_LOOPBACK = "127.0.0.1"
_HEARD_S = (6, 30)
"""The least and the most seconds without a word from a machine before it counts as lost."""


def command(python: str, what: Sequence[str], file: str = "worker.py", *how: str) -> tuple[str, ...]:
    """The command of one process, under a file of accel's: it keeps what is written, and records a failure.

    Args:
        python: The interpreter.
        what: `script`, `module` or `program`, its path or name, and its own arguments.
        file: The file of accel's.
        how: What that is told.
    """
    # By path: `-m` would put the current folder before the standard library while the file loads.
    return (python, str(Path(accel_cli.__file__).parent / "runner" / file), *how, *what)


def runner(start_method: str) -> str:
    """The function that carries the plan out, as `module:function`."""
    return (
        "accel_cli.runner.agent:run"
        if start_method == "exec"
        else "accel_cli.runner.forkserver:exec_fork_server"
    )


def added(
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


def interfaces(machines: int) -> dict[str, str]:
    """Where collectives listen: left alone, on an address that other machines reach."""
    if machines > 1 or sys.platform != "linux":
        return {}
    return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def agent(
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
