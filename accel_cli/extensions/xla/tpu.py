"""The TPU of this machine, and the packages for it: torch_xla and libtpu."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from accel_cli.planning.machine import Machine, OtherDevices, count_names
from accel_runtime.environment.accelerate import launch
from accel_runtime.environment.installation import format_install, format_new_environment
from accel_runtime.environment.text import decode_text

__all__ = [
    "OPTIONS",
    "Packages",
    "Tpu",
    "XlaDevices",
    "detect_devices",
    "detect_packages",
    "detect_tpu",
    "get_devices",
]

_METADATA_TIMEOUT_S = 2.0
"""Short, since the metadata server runs on the host of the virtual machine."""
_GOOGLE_PCI_VENDOR = "0x1ae0"
_TPU_NAMES: Mapping[str, str] = {
    "0x0027": "TPU v2 or v3",
    "0x0056": "TPU",
    "0x005e": "TPU v4",
    "0x0062": "TPU v5p",
    "0x0063": "TPU v5e",
    "0x006f": "TPU v6e",
    "0x0076": "TPU v7x",
}
"""By PCI device id; Google's network cards and disks have the same vendor id."""

OPTIONS: Mapping[str, str] = {
    "Use accel xla pod NAME --run": "run-pod",
    "Use accel xla pod NAME --zone ZONE": "zone=",
    "Use accel xla pod NAME --project ID": "project=",
    "Use accel xla pod NAME --folder DIR": "pod-folder=",
    "Use accel xla pod NAME --setup COMMAND": "pod-setup=",
    launch.TPU_CLUSTER.advice: "tpu-pod=",
}
"""Options of Accelerate's and torch_xla's launchers of pods by the advice for them."""


@dataclass(frozen=True)
class Tpu:
    """The TPU of this machine, as far as it can be detected without torch_xla."""

    chips: tuple[str, ...] = ()
    """The name of each chip."""
    source: str = ""
    """The device or variable that shows the TPU; empty without one."""
    hosts: tuple[str, ...] = ()
    """The hosts of its slice in the order of their ranks; empty if unknown."""
    worker: str = ""
    """The rank of this host among them, not validated."""
    hosts_source: str = ""
    """The source of the hosts."""

    @property
    def exists(self) -> bool:
        """True if there is a TPU."""
        return bool(self.source)

    @property
    def summary(self) -> str:
        """A summary in one line; empty without a TPU."""
        return f"{count_names(self.chips) or 'TPU'} ({self.source})" if self.exists else ""


@dataclass(frozen=True)
class Packages:
    """The versions of the packages that a TPU needs; None if not installed."""

    torch_xla: str | None = None
    torch: str | None = None
    libtpu: str | None = None


@dataclass(frozen=True)
class XlaDevices(OtherDevices):
    """The TPU of this machine, and the packages for it or for torch_xla's CPU device."""

    launcher: ClassVar[str] = "xla"
    device: ClassVar[str] = "xla"

    tpu: Tpu = field(default_factory=Tpu)
    packages: Packages = field(default_factory=Packages)

    @property
    @override
    def exists(self) -> bool:
        return self.tpu.exists

    @property
    @override
    def summary(self) -> str:
        return self.tpu.summary

    @property
    @override
    def problem(self) -> str:
        """The reason why torch_xla cannot be used here, with its cure; empty if it can."""
        extra = "tpu" if self.tpu.exists else "xla"
        install = format_install("torch_xla[tpu]" if self.tpu.exists else "torch_xla", extra=extra)
        torch, torch_xla = self.packages.torch, self.packages.torch_xla
        if torch_xla is None:
            return f"torch_xla is not installed. Install it with the torch that it needs: {install}"
        if torch is None or _get_release(torch) != _get_release(torch_xla):
            return (
                f"torch_xla {torch_xla} needs torch {_get_release(torch_xla)}, but torch {torch or 'none'} is installed. Run in "
                f"a new environment: {format_new_environment(extra)}"
            )
        if self.tpu.exists and self.packages.libtpu is None:
            return f"libtpu, the driver of the TPU, is not installed. Install it: {install}"
        return ""


def detect_devices(environ: Mapping[str, str]) -> XlaDevices:
    """Return the TPU of this machine and the installed packages, without importing torch."""
    return XlaDevices(detect_tpu(environ), detect_packages(environ))


def get_devices(machine: Machine) -> XlaDevices:
    """Return those of a machine."""
    return next((other for other in machine.others if isinstance(other, XlaDevices)), XlaDevices())


def detect_packages(environ: Mapping[str, str]) -> Packages:
    """Return the installed packages for a TPU, from their metadata."""
    # TPU_LIBRARY_PATH names a libtpu that is not installed as a package.
    libtpu = environ.get("TPU_LIBRARY_PATH") or _find_version("libtpu")
    return Packages(_find_version("torch_xla"), _find_version("torch"), libtpu)


def _find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def detect_tpu(environ: Mapping[str, str], *, root: Path = Path("/")) -> Tpu:
    """Return the TPU of this machine, from the PCI bus, the device files and the variables of Google's machines."""
    chips = _list_chips(root)
    if wanted := environ.get("PJRT_DEVICE"):
        # torch_xla does not use a TPU if this variable names another device.
        if wanted != "TPU":
            return Tpu()
        source = f"PJRT_DEVICE={wanted}"
    elif chips:
        source = "PCI"
    elif files := sorted((root / "dev").glob("accel[0-9]*")):
        chips, source = ("TPU",) * len(files), ", ".join(f"/dev/{file.name}" for file in files)
    elif kind := environ.get("TPU_ACCELERATOR_TYPE"):
        source = f"TPU_ACCELERATOR_TYPE={kind}"
    else:
        return Tpu()
    if names := environ.get("TPU_WORKER_HOSTNAMES"):
        worker = environ.get("TPU_WORKER_ID", "")
        return Tpu(chips, source, tuple(names.split(",")), worker, "TPU_WORKER_*")
    if chips and not environ.get("TPU_SKIP_MDS_QUERY"):
        server = environ.get("GCE_METADATA_HOST", "metadata.google.internal")
        try:
            endpoints = _query_metadata(server, "worker-network-endpoints")
            worker = _query_metadata(server, "agent-worker-number")
        except OSError:
            return Tpu(chips, source)
        # Each endpoint is `name:id:address`.
        hosts = tuple(endpoint.split(":")[-1] for endpoint in endpoints.split(","))
        return Tpu(chips, source, hosts, worker, "TPU metadata")
    return Tpu(chips, source)


def _list_chips(root: Path) -> tuple[str, ...]:
    """Return the names of the TPU chips on the PCI bus."""
    devices = sorted((root / "sys/bus/pci/devices").glob("*"))
    google = [device for device in devices if _read(device / "vendor") == _GOOGLE_PCI_VENDOR]
    names = (_TPU_NAMES.get(_read(device / "device")) for device in google)
    return tuple(name for name in names if name)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError):
        return ""


def _query_metadata(server: str, name: str) -> str:
    # Slow to import, and needed on TPUs only.
    from urllib.request import ProxyHandler, Request, build_opener  # noqa: PLC0415

    url = f"http://{server}/computeMetadata/v1/instance/attributes/{name}"
    request = Request(url, headers={"Metadata-Flavor": "Google"})
    with build_opener(ProxyHandler({})).open(request, timeout=_METADATA_TIMEOUT_S) as response:
        return str(decode_text(response.read()).strip())


def _get_release(version: str) -> str:
    """Return `2.9` for `2.9.0+cu128`."""
    return ".".join(version.split(".")[:2])
