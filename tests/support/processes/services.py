"""Services that tests need and that are no Python packages: servers, a browser, and the rights of root.

A test that needs one has the mark `service`. `make test` skips it by name, whatever is installed, and `make test-services` installs
what it needs and runs it, so that both do the same on every machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

__all__ = [
    "FIXTURES",
    "SERVICES",
    "Service",
    "UnavailableError",
    "prepare_service",
    "prepare_services",
    "skip_services",
]


class UnavailableError(RuntimeError):
    """This machine does not have a service that a test needs, and cannot install it."""


@dataclass(frozen=True)
class Service:
    """What a test needs.

    Attributes:
        name: The name as users write it.
        packages: Packages of Debian that have the programs.
        programs: Programs that must be found.
        needs_root: Whether it needs root with its capabilities on Linux.
    """

    name: str
    packages: tuple[str, ...]
    programs: tuple[str, ...]
    needs_root: bool = False


_NAMESPACES = ("ip", "mount", "nsenter", "setpriv", "unshare")
_CEPH = (
    "ceph-mon",
    "ceph-osd",
    "ceph",
    "radosgw",
    "radosgw-admin",
    "ceph-authtool",
    "monmaptool",
)
SERVICES = {
    service.name: service
    for service in (
        Service("root", ("iproute2", "mount", "util-linux"), _NAMESPACES, needs_root=True),
        Service("Ceph", ("ceph-mon", "ceph-osd", "ceph-common", "radosgw"), _CEPH),
        Service("Chromium", ("chromium", "chromium-driver"), ("chromedriver",)),
        Service("rsync", ("rsync",), ("rsync",)),
        Service(
            "Slurm",
            ("slurmctld", "slurmd", "slurm-client", "munge", "iproute2", "util-linux"),
            ("slurmctld", "slurmd", "sbatch", "scontrol", "munged", *_NAMESPACES),
            needs_root=True,
        ),
        Service(
            "sshd",
            ("openssh-client", "openssh-server", "rsync", "iproute2", "util-linux"),
            ("ssh", "ssh-keygen", "sshd", "rsync", *_NAMESPACES),
            needs_root=True,
        ),
    )
}
FIXTURES = {
    "cpu_group": "root",
    "memory_group": "root",
    "names_of_hosts": "root",
    "process_limit": "root",
    "slurm_cluster": "Slurm",
}
"""Services of fixtures, so that no test that uses one lacks the mark."""


def skip_services(items, *, run):
    """Add the marks of fixtures to tests, and skip the tests that need a service unless they shall run.

    Args:
        items: The collected tests.
        run: Whether services are installed and used.
    """
    for item in items:
        for name in FIXTURES.keys() & set(item.fixturenames):
            item.add_marker(pytest.mark.service(FIXTURES[name]))
        if not run and (names := _list_services(item)):
            reason = f"needs {' and '.join(names)}, which `make test-services` installs and uses"
            item.add_marker(pytest.mark.skip(reason=reason))


def prepare_services(item):
    """Install the services of a test.

    Raises:
        UnavailableError: One of them cannot be had here.
    """
    for name in _list_services(item):
        prepare_service(name)


@cache
def prepare_service(name: str) -> None:
    """Install a service, unless all of its programs are there.

    Raises:
        UnavailableError: It cannot be had here.
    """
    service = SERVICES[name]
    if service.needs_root and (sys.platform != "linux" or os.geteuid() != 0 or not _can_mount()):
        raise UnavailableError(f"{name} needs Linux, root and its capabilities")
    for folder in ("/usr/sbin", "/sbin"):  # of daemons; not in the PATH of every user
        if folder not in os.environ["PATH"].split(os.pathsep):
            os.environ["PATH"] += f"{os.pathsep}{folder}"
    from filelock import FileLock  # a machine with a GPU may have none

    with FileLock(Path(tempfile.gettempdir()) / "accel-tests-apt.lock"):
        _install(service)


def _can_mount() -> bool:
    """Return whether this process has the capabilities of root."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    effective = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    system, network = 1 << 21, 1 << 12  # CAP_SYS_ADMIN, CAP_NET_ADMIN
    return effective & (system | network) == system | network


def _install(service: Service) -> None:
    if all(map(shutil.which, service.programs)):
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise UnavailableError(
            f"{', '.join(service.programs)} are not all installed, and that needs apt-get as root"
        )
    quiet = {"env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, "capture_output": True, "text": True}
    subprocess.run(["apt-get", "update", "-q"], check=False, **quiet)
    options = ["-o", "DPkg::Lock::Timeout=120", "-y", "-q", "--no-install-recommends"]
    process = subprocess.run(["apt-get", "install", *options, *service.packages], check=False, **quiet)
    if not all(map(shutil.which, service.programs)):
        packages = " ".join(service.packages)
        raise UnavailableError(f"apt-get cannot install {packages}: {process.stderr[-500:]}")


def _list_services(item):
    return sorted({name for mark in item.iter_markers("service") for name in mark.args})
