"""What will happen: the pure data that every launcher makes of a job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Plan"]


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
