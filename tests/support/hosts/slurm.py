"""A Slurm cluster on one machine, from Debian's packages: each node is a network namespace with its own name.

It needs root, and does not affect another Slurm on this machine: configuration, keys, sockets and logs are in a separate
folder, the network is in separate namespaces. Its daemons end with the process that started them. Run as a script, it
runs until Ctrl-C and prints the `PATH` with which `sbatch` and similar commands use this cluster.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

from support.processes.services import UnavailableError, prepare_service
from support.processes.waits import limit

CLIENTS = ("sbatch", "srun", "salloc", "scancel", "scontrol", "sinfo", "squeue", "sacct")
NETWORK = "10.79.0"
CPUS, GPUS = 4, 2
"""The simulated CPUs and GPUs of each node."""
READY_S = limit(30)

CONFIG = """\
ClusterName=accel
SlurmctldHost={login}({network}.2)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CryptoType=crypto/munge
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdTimeout=300
MessageTimeout=60
KillWait=30
MinJobAge=600
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000,bf_interval=1
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}
PartitionName=short Nodes={names} Default=YES MaxTime=60 State=UP
PartitionName=long Nodes={names} MaxTime=600 State=UP
"""


class SlurmCluster:
    """Two nodes and a login node; `path` is the folder to prepend to `PATH` so that commands use this cluster."""

    def __init__(self, nodes=2):
        self.folder = Path(f"/tmp/accel-slurm-{os.getpid()}")  # noqa: S108 - the path of a socket must be short
        # Names of namespaces are global: another session must use other names.
        self.names = [f"s{os.getpid()}n{number}" for number in range(nodes)]
        self.login = f"s{os.getpid()}login"
        self._switch = f"s{os.getpid()}sw"
        self._daemons = []
        self.path = self.folder / "bin"

    def start(self):
        """Install missing packages, start the cluster, and wait until all nodes are idle.

        Raises:
            UnavailableError: This machine cannot run a cluster.
        """
        prepare_service("Slurm")
        _remove_stale_clusters()
        try:
            self._create_network()
            self._configure()
            self._start_daemons()
            self._wait_until_idle()
        except BaseException:
            self.close()
            raise
        return self

    def close(self):
        """End all daemons and jobs, and remove all files and namespaces."""
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self.command("scancel", "--full", "--signal=KILL", f"--user={os.getuid()}")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        _remove(os.getpid())

    def command(self, *args):
        """Run a Slurm command on the login node."""
        command = [self.path / args[0], *args[1:]]
        return subprocess.run(command, capture_output=True, text=True, timeout=limit(30), check=False)

    def _create_network(self):
        self.folder.mkdir(mode=0o755)
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        hosts = ["127.0.0.1 localhost"]
        for port, (name, address) in enumerate(self._addresses().items()):
            _ip("netns", "add", name)
            link_options = ("type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", self._switch, "link", "add", f"p{port}", *link_options)
            _ip("-n", self._switch, "link", "set", f"p{port}", "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for link in ("eth0", "lo"):
                _ip("-n", name, "link", "set", link, "up")
            hosts.append(f"{address} {name}")
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n")

    def _addresses(self):
        nodes = {name: f"{NETWORK}.{10 + number}" for number, name in enumerate(self.names)}
        return {self.login: f"{NETWORK}.2", **nodes}

    def _configure(self):
        for name in ("state", "bin", "dev", "cgroup", "munge"):
            (self.folder / name).mkdir(mode=0o700 if name == "munge" else 0o755)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        sizes = (
            f"CPUs={CPUS} Sockets=1 CoresPerSocket={CPUS} ThreadsPerCore=1 RealMemory=4000 Gres=gpu:{GPUS}"
        )
        nodes = [
            f"NodeName={name} NodeAddr={self._addresses()[name]} NodeHostname={name} {sizes} State=UNKNOWN"
            for name in self.names
        ]
        config = CONFIG.format(
            folder=self.folder, login=self.login, network=NETWORK,
            nodes="\n".join(nodes), names=",".join(self.names),
        )  # fmt: skip
        (self.folder / "slurm.conf").write_text(config)
        for number in range(GPUS):  # Slurm needs device files, and accepts links to them
            (self.folder / "dev" / f"gpu{number}").symlink_to("/dev/null")
        gpus = f"Name=gpu File={self.folder}/dev/gpu[0-{GPUS - 1}]"
        (self.folder / "gres.conf").write_text(f"NodeName={','.join(self.names)} {gpus}\n")
        # `disabled` exists since 23.05; before, v1 keeps Slurm from searching for systemd's cgroup.
        plugin = "disabled" if _version() >= (23, 5) else "cgroup/v1"
        config_of_cgroups = f"CgroupPlugin={plugin}\nCgroupMountpoint={self.folder}/cgroup\n"
        (self.folder / "cgroup.conf").write_text(config_of_cgroups)
        for name in CLIENTS:
            self._write_wrapper(name)

    def _write_wrapper(self, name):
        """Write a command of the same name that runs on the login node, or inside a job on the node of the job."""
        program = shutil.which(name)
        wrapper = self.path / name
        prefix = shlex.join(self._build_node_prefix(self.login))
        wrapper.write_text(
            f"#!/bin/sh\nexport SLURM_CONF={self.folder}/slurm.conf\n"
            f'[ -n "$SLURM_JOB_ID" ] && exec {program} "$@"\nexec {prefix} {program} "$@"\n'
        )
        wrapper.chmod(0o755)

    def _build_node_prefix(self, name):
        """Return the words before a command that run it on a node."""
        enter = f'mount --bind {self.folder}/hosts /etc/hosts && hostname {name} && exec "$@"'
        return ("nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "--mount", "sh", "-c", enter, name)

    def _start_daemons(self):
        files = [f"--{key}-file={self.folder}/munge/{key}" for key in ("key", "seed", "pid", "log")]
        self._daemon(
            self.login, "munged", "--foreground", "--force", f"--socket={self.folder}/munge.sock", *files
        )
        self._wait_for((self.folder / "munge.sock").exists, "munged did not start")
        self._daemon(self.login, "slurmctld", "-D", "-c")
        for name in self.names:
            self._daemon(name, "slurmd", "-D", "-c", "-N", name)

    def _daemon(self, name, *command):
        log = self.folder / f"{command[0]}.{name}.log"
        environ = {**os.environ, "SLURM_CONF": f"{self.folder}/slurm.conf"}
        until_parent_exits = ("setpriv", "--pdeathsig", "KILL")
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*until_parent_exits, *self._build_node_prefix(name), *command],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environ,
            )  # fmt: skip
        self._daemons.append(process)

    def _wait_until_idle(self):
        self._wait_for(lambda: self._count_idle_nodes() == len(self.names), "the nodes are not idle")

    def _count_idle_nodes(self):
        return len(set(self.command("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").stdout.split()))

    def _wait_for(self, condition, problem):
        deadline = time.monotonic() + READY_S
        while not condition():
            if time.monotonic() > deadline:
                logs = [f"== {log.name}\n{log.read_text()[-1500:]}" for log in self.folder.glob("*.log")]
                raise UnavailableError("\n".join([f"{problem} within {READY_S} s", *logs]))
            time.sleep(0.1)


def _version():
    output = subprocess.run(["slurmd", "-V"], capture_output=True, text=True, check=True).stdout
    return tuple(map(int, re.findall(r"\d+", output)[:2]))


def _ip(*args):
    result = subprocess.run(["ip", *args], capture_output=True, text=True, check=False)
    if result.returncode:
        raise UnavailableError(f"ip {' '.join(args)}: {result.stderr.strip()}")


def _remove_stale_clusters():
    """Remove clusters of sessions that were killed."""
    for folder in Path("/tmp").glob("accel-slurm-*"):  # noqa: S108
        pid = folder.name.rpartition("-")[2]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            _remove(int(pid))


def _remove(session):
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for name in re.findall(rf"^s{session}(?:n\d+|login|sw)\b", namespaces, re.MULTILINE):
        processes = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        for pid in processes.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    shutil.rmtree(f"/tmp/accel-slurm-{session}", ignore_errors=True)  # noqa: S108


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cluster = SlurmCluster().start()
    print(f"export PATH={cluster.path}:$PATH", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()
    cluster.close()
