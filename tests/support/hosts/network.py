"""Hosts for tests: network namespaces with their own names and addresses, connected by a switch.

The switch is a namespace too, so that the network of this machine does not change.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from support.processes.commands import Accel

__all__ = ["Host", "Hosts", "hosts"]


class Host:
    """A host with its name, address and processes."""

    def __init__(self, number: int, namespace: str, switch: str) -> None:
        self.name, self.address = f"h{number}", f"10.77.0.{10 + number}"
        self.namespace, self._switch, self._port = namespace, switch, f"p{number}"
        self.processes: list[subprocess.Popen[str]] = []

    def accel(
        self, *args: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.Popen[str]:
        """Run `accel` on this host, forked from an interpreter that has imported torch."""
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        namespace_and_name = (self.namespace, self.name)
        process = Accel(
            *args, host=namespace_and_name, text=True, env={**os.environ, **(env or {})}, cwd=cwd, **streams
        )
        self.processes.append(process)
        return process

    def call_itself(self, address: str) -> None:
        """Resolve the name of this host to a local address on the host, as Debian does with 127.0.1.1."""
        path = Path("/etc/netns", self.namespace, "hosts")
        others = [line for line in path.read_text().splitlines() if not line.endswith(f" {self.name}")]
        path.write_text("\n".join([*others, f"{address} {self.name}"]) + "\n")

    def kill(self) -> None:
        """Kill all processes of this host at once, like a power failure."""
        # Repeat, since a listed process may have forked meanwhile.
        while pids := ip("netns", "pids", self.namespace).split():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.01)

    def cut(self) -> None:
        """Disconnect this host from the switch."""
        ip("-n", self._switch, "link", "set", self._port, "down")

    def mend(self) -> None:
        """Reconnect this host to the switch."""
        ip("-n", self._switch, "link", "set", self._port, "up")


class Hosts(tuple[Host, ...]):
    """Hosts of one network."""

    __slots__ = ()

    def launch(self, *options: str, env: Mapping[str, str] | None = None) -> list[subprocess.Popen[str]]:
        """Run `accel launch --ranks all` with the same options on all hosts."""
        return [host.accel("launch", "--ranks", "all", *options, env=env) for host in self]


def ip(*args: str) -> str:
    return subprocess.run(["ip", *args], check=True, capture_output=True, text=True).stdout


@contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """Create hosts h0, h1, ...; remove them with all their processes at the end."""
    prefix = f"accel{os.getpid()}"
    switch = f"{prefix}sw"
    hosts_of_network = Hosts(Host(n, f"{prefix}h{n}", switch) for n in range(count))
    table = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in hosts_of_network)
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        for number, host in enumerate(hosts_of_network):
            connect_host(host, switch, f"p{number}", table)
        yield hosts_of_network
    finally:
        for host in hosts_of_network:
            with suppress(subprocess.CalledProcessError):
                host.kill()
            for process in host.processes:
                process.kill()
                process.communicate()
        for namespace in (switch, *(host.namespace for host in hosts_of_network)):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns", namespace), ignore_errors=True)


def connect_host(host: Host, switch: str, port: str, table: str) -> None:
    ip("netns", "add", host.namespace)
    folder = Path("/etc/netns", host.namespace)
    folder.mkdir(parents=True)
    (folder / "hosts").write_text(table)
    (folder / "nsswitch.conf").write_text("hosts: files\n")  # no name server is available
    ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
    ip("-n", switch, "link", "set", port, "master", "br0", "up")
    ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
    for name in ("eth0", "lo"):
        ip("-n", host.namespace, "link", "set", name, "up")
