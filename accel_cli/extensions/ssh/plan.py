"""The plan of a launch over ssh: its hosts, and the commands that run on them."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from accel_cli.extensions.ssh.hosts import Host
from accel_cli.launchers.node_launch import build_command, build_rendezvous_options
from accel_cli.launchers.source_files import describe_selection, select_files
from accel_cli.planning.network import Endpoint
from accel_cli.planning.nodes import PORT
from accel_cli.planning.plan import JobPlan, join_for_bash

__all__ = ["SshPlan"]

_START = (
    "import sys; sys.path[:] = [path for path in sys.path if path]; "
    "from accel_cli.extensions.ssh.entry import main; main()"
)
"""Starts `entry.py` without importing modules from the home directory."""


@dataclass(frozen=True, kw_only=True)
class SshPlan(JobPlan):
    """The hosts of a launch and the command of each."""

    hosts: tuple[Host, ...]
    counts: tuple[int | str, ...]
    """Processes of each host; `auto` is one for each GPU."""
    python: str
    """The Python of hosts whose entry names none."""
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
        """Return the command that becomes `accel launch` on a host."""
        remote = f"exec {shlex.quote(host.python or self.python)} -c {shlex.quote(_START)}"
        return ("ssh", *self.ssh_options, "--", host.destination, remote)

    def build_launch_command(self, rank: int, endpoint: str, run_id: str) -> tuple[str, ...]:
        """Return the command `accel launch` of a host."""
        fixed_rank = rank if self.fixed_ranks else None
        nodes = build_rendezvous_options(len(self.hosts), fixed_rank, endpoint, run_id)
        count = ("--nproc-per-node", str(self.counts[rank]))
        return build_command(
            self.hosts[rank].python or self.python, *nodes, *count, *self.options, *self.target
        )

    @override
    def describe(self) -> list[str]:
        first = Endpoint(self.hosts[0].name, PORT)
        endpoint = self.rdzv_endpoint or str(first)
        lines = [f"working folder: {self.folder}{' (copied with rsync)' if self.sync else ''}"]
        if len(self.hosts) > 1 and not self.rdzv_endpoint:
            lines.append(
                f"rendezvous: the address of {first.host} that ssh connects to, port {PORT} or the next free one"
            )
        lines.append("hosts:")
        for rank, host in enumerate(self.hosts):
            command = join_for_bash(self.build_launch_command(rank, endpoint, "ID"))
            lines.append(f"  {host.destination}: {command}")
        return lines

    @override
    def preview(self) -> str:
        """Return the files that `--sync` copies; empty without it."""
        if not self.sync:
            return ""
        selection = select_files(Path.cwd(), self.include, self.exclude, keep_links=True)
        return "\n".join(describe_selection(selection))
