"""Machines for tests: network namespaces with names and addresses of their own, joined by a switch.

The switch is a namespace too, so that the network of the machine that runs the tests stays as it is.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from fork_launch import Accel

__all__ = ["Host", "Hosts", "hosts", "needs_hosts"]


def possible() -> bool:
    """Whether this machine lets us make namespaces."""
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        return False
    name = f"probe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], check=False)
    return made


needs_hosts = pytest.mark.skipif(not possible(), reason="network namespaces need root, ip and unshare")


class Host:
    """One machine: a name, an address, and processes."""

    def __init__(self, number: int, namespace: str, switch: str) -> None:
        self.name, self.address = f"h{number}", f"10.77.0.{10 + number}"
        self.namespace, self._switch, self._port = namespace, switch, f"p{number}"
        self.processes: list[subprocess.Popen[str]] = []

    def accel(self, *args: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Run `accel` on it, forked from an interpreter that has imported torch."""
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        here = (self.namespace, self.name)
        process = Accel(*args, host=here, text=True, env={**os.environ, **(env or {})}, **streams)
        self.processes.append(process)
        return process

    def call_itself(self, address: str) -> None:
        """Let its own name lead to an address on itself, as Debian does with 127.0.1.1."""
        path = Path("/etc/netns", self.namespace, "hosts")
        others = [line for line in path.read_text().splitlines() if not line.endswith(f" {self.name}")]
        path.write_text("\n".join([*others, f"{address} {self.name}"]) + "\n")

    def kill(self) -> None:
        """End everything that runs on it at once, as a power cut would end it."""
        # Again and again, since one that is listed may have forked meanwhile.
        while pids := ip("netns", "pids", self.namespace).split():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.01)

    def cut(self) -> None:
        """Take its cable out."""
        ip("-n", self._switch, "link", "set", self._port, "down")

    def mend(self) -> None:
        """Put its cable in again."""
        ip("-n", self._switch, "link", "set", self._port, "up")


class Hosts(tuple[Host, ...]):
    """Machines of one network."""

    __slots__ = ()

    def launch(self, *options: str, env: Mapping[str, str] | None = None) -> list[subprocess.Popen[str]]:
        """`accel launch` with the same options on all of them, which shows what all ranks write."""
        return [host.accel("launch", "--ranks", "all", *options, env=env) for host in self]


def ip(*args: str) -> str:
    return subprocess.run(["ip", *args], check=True, capture_output=True, text=True).stdout


@contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """So many machines, h0 and on, gone with all their processes at the end."""
    stem = f"accel{os.getpid()}"
    switch = f"{stem}sw"
    machines = Hosts(Host(n, f"{stem}h{n}", switch) for n in range(count))
    table = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in machines)
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        for number, host in enumerate(machines):
            connect(host, switch, f"p{number}", table)
        yield machines
    finally:
        for host in machines:
            with suppress(subprocess.CalledProcessError):
                host.kill()
            for process in host.processes:
                process.kill()
                process.communicate()
        for namespace in (switch, *(host.namespace for host in machines)):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns", namespace), ignore_errors=True)


def connect(host: Host, switch: str, port: str, table: str) -> None:
    ip("netns", "add", host.namespace)
    folder = Path("/etc/netns", host.namespace)
    folder.mkdir(parents=True)
    (folder / "hosts").write_text(table)
    (folder / "nsswitch.conf").write_text("hosts: files\n")  # there is no name server to wait for
    ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
    ip("-n", switch, "link", "set", port, "master", "br0", "up")
    ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
    for name in ("eth0", "lo"):
        ip("-n", host.namespace, "link", "set", name, "up")
