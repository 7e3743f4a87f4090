"""The devices, CPUs and packages of this machine: torch, TPUs and torch_xla."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from accel_cli.errors import UsageError, explain_torch_error
from accel_runtime.environment.cgroup import count_cpus
from accel_runtime.environment.installation import format_install, format_new_environment
from accel_runtime.environment.text import decode_text

__all__ = [
    "Machine",
    "Packages",
    "Tpu",
    "check_has_files",
    "detect",
    "detect_packages",
    "detect_quickly",
    "detect_tpu",
    "detect_without_torch",
]

_ACCEL = Path(__file__).parents[1]
_PROBE_TIMEOUT_S = 120
_METADATA_TIMEOUT_S = 2.0
"""Short, since the metadata server runs on the host of the virtual machine."""
_DEVICE_FILES = ("nvidia[0-9]*", "kfd", "dxg", "dri/renderD*")
"""The device files of NVIDIA, AMD, WSL and Intel accelerators on Linux."""
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


def check_has_files(action: str) -> None:
    """Raise UsageError if accel is in an archive, such as a zipapp, whose files other processes cannot read.

    Args:
        action: What needs the files, as in "start processes".
    """
    if not _ACCEL.is_dir():
        raise UsageError(
            f"Cannot {action}: accel is in the archive {_ACCEL.parent}, and its files are needed as files. Install accel with "
            "pip in the environment of the script."
        )


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
        return f"{_count_names(self.chips) or 'TPU'} ({self.source})" if self.exists else ""


@dataclass(frozen=True)
class Packages:
    """The versions of the packages that a TPU needs; None if not installed."""

    torch_xla: str | None = None
    torch: str | None = None
    libtpu: str | None = None


@dataclass(frozen=True)
class Machine:
    """The hardware that a launch can use."""

    cpus: int
    """Logical processors that this process may use."""
    accelerator: str | None = None
    """torch's type of the accelerator: `cuda`, `mps`, `xpu`."""
    devices: tuple[str, ...] = ()
    """The names of the accelerators, in torch's order."""
    rocm: bool = False
    """True if the type `cuda` stands for AMD GPUs."""
    bf16: bool = False
    """True if the accelerator supports bfloat16."""
    torch: str | None = None
    """The version of torch; None if torch was not run."""
    problem: str | None = None
    """The reason why torch could not be run."""
    tpu: Tpu = field(default_factory=Tpu)
    """The TPU, which torch does not detect."""
    packages: Packages = field(default_factory=Packages)
    """The installed packages for it."""

    @property
    def summary(self) -> str:
        """A summary in one line."""
        parts = (self.tpu.summary, _count_names(self.devices), f"{self.cpus} CPU cores")
        return ", ".join(part for part in parts if part)

    @property
    def xla_problem(self) -> str:
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

    @property
    def problems(self) -> list[str]:
        """The reasons why hardware of this machine cannot be used."""
        tpu_problem = self.xla_problem if self.tpu.exists else ""
        return [problem for problem in (self.problem, tpu_problem) if problem]


def detect(environ: Mapping[str, str]) -> Machine:
    """Return the hardware of this machine; runs torch in a child process, which takes seconds."""
    return _add_tpu(_probe_torch(environ), environ)


def detect_quickly(environ: Mapping[str, str]) -> Machine:
    """Return the hardware of this machine; runs torch only if the system has an accelerator."""
    has_accelerator = sys.platform != "linux" or any(
        next(Path("/dev").glob(pattern), None) for pattern in _DEVICE_FILES
    )
    return _add_tpu(_probe_torch(environ) if has_accelerator else Machine(count_cpus()), environ)


def detect_without_torch(environ: Mapping[str, str]) -> Machine:
    """Return what is known at once: the CPUs, the number of NVIDIA's device files, and the TPU."""
    files = sorted(Path("/dev").glob("nvidia[0-9]*"))
    gpus = Machine(count_cpus(), "cuda" if files else None, ("NVIDIA GPU",) * len(files))
    return _add_tpu(gpus, environ)


def _probe_torch(environ: Mapping[str, str]) -> Machine:
    command = [sys.executable, "-m", "accel_runtime.torch_probe"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=True, env=environ
        )
        fields = json.loads(result.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["no message"])[-1]
        return Machine(count_cpus(), problem=explain_torch_error(reason))
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return Machine(count_cpus(), problem=f"Cannot detect the devices of torch: {error}")
    return Machine(count_cpus(), **{**fields, "devices": tuple(fields["devices"])})


def _add_tpu(machine: Machine, environ: Mapping[str, str]) -> Machine:
    return replace(machine, tpu=detect_tpu(environ), packages=detect_packages(environ))


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


def _count_names(names: Iterable[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items())
