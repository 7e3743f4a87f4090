"""Hosts with a real `sshd`: network namespaces of `hosts.py`, keys of their own, and an `ssh` that reads no file of the user."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from support.hosts.network import Hosts, hosts
from support.processes.waits import wait_until

SSHD_CONFIG = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
"""
SSH_CONFIG = """\
Host first
  HostName h0
Host *
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile none
  StrictHostKeyChecking yes
"""
IN_HOST = """\
mount --bind "$1" /etc/hosts && hostname "$2" || exit
[ -z "$3" ] || mount -t tmpfs none "$3" || exit
shift 3
exec "$@"
"""


class SshHosts:
    """Hosts that reach each other over ssh; the first is also where `accel launch` is typed."""

    def __init__(self, machines: Hosts, folder: Path, emptied: Mapping[str, Path]) -> None:
        self.machines, self.folder = machines, folder
        self._emptied = emptied
        self._daemons: list[subprocess.Popen[bytes]] = []

    def accel(self, *args: str, **environ: str) -> subprocess.Popen[str]:
        """Run `accel` on the first host, with the keys of these hosts."""
        path = f"{self.folder}:{os.environ['PATH']}"
        return self.machines[0].accel(*args, env={"PATH": path, **environ})

    def start(self) -> None:
        for name in ("key", "host_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name], check=True
            )
        key = (self.folder / "host_key.pub").read_text()
        names = [name for host in self.machines for name in (host.name, host.address)]
        (self.folder / "known_hosts").write_text("".join(f"{name} {key}" for name in names))
        (self.folder / "sshd_config").write_text(SSHD_CONFIG.format(folder=self.folder))
        (self.folder / "ssh_config").write_text(SSH_CONFIG.format(folder=self.folder))
        # ssh finds the home by the account, not by HOME.
        wrapper = self.folder / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {self.folder}/ssh_config "$@"\n')
        wrapper.chmod(0o755)
        Path("/run/sshd").mkdir(exist_ok=True)
        for host in self.machines:
            emptied = str(self._emptied.get(host.name, ""))
            table = f"/etc/netns/{host.namespace}/hosts"
            enter = ["nsenter", f"--net=/run/netns/{host.namespace}", "unshare", "--uts", "--mount"]
            daemon = ["/usr/sbin/sshd", "-D", "-e", "-f", str(self.folder / "sshd_config")]
            with (self.folder / f"{host.name}.log").open("wb") as log:
                self._daemons.append(
                    subprocess.Popen(
                        [*enter, "sh", "-c", IN_HOST, "sh", table, host.name, emptied, *daemon], stderr=log
                    )
                )
        for host in self.machines:
            self._wait_for(host.namespace, host.address)

    def close(self) -> None:
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()

    def list_processes(self) -> list[str]:
        """Return the command lines of all processes on all hosts, without the daemons of ssh."""
        found = []
        for host in self.machines:
            pids = subprocess.run(
                ["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True
            )
            for pid in pids.stdout.split():
                try:
                    command = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode()
                except OSError:
                    continue
                if command and "sshd" not in command.split(" ")[0]:
                    found.append(f"{host.name} {pid} {command}")
        return found

    def _wait_for(self, namespace: str, address: str) -> None:
        probe = "import socket, sys; socket.create_connection((sys.argv[1], 22), 1).close()"
        command = ["ip", "netns", "exec", namespace, sys.executable, "-S", "-c", probe, address]
        wait_until(
            lambda: subprocess.run(command, capture_output=True, check=False).returncode == 0,
            description=lambda: str([log.read_text() for log in self.folder.glob("*.log")]),
        )


@contextmanager
def ssh_hosts(
    count: int, folder: Path, *, emptied: Mapping[str, Path] = MappingProxyType({})
) -> Iterator[SshHosts]:
    """Start so many hosts with `sshd`, h0 and on.

    Args:
        count: The number of hosts.
        folder: A new folder for their keys.
        emptied: A folder of each of these hosts in which it sees an empty file system of its own, not the files of the others.
    """
    folder.mkdir(mode=0o755)
    with hosts(count) as machines:
        cluster = SshHosts(machines, folder, emptied)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()
