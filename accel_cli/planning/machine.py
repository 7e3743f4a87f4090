"""The devices, CPUs and packages of this machine: torch, TPUs and torch_xla."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accel_cli.errors import explain_torch_error

__all__ = ["Machine", "Packages", "Tpu", "cpus", "detect", "detect_packages", "detect_tpu", "glance"]


_GOOGLE = "0x1ae0"
_METADATA = "metadata.google.internal"
_PATIENCE_S = 2.0
"""The server is on the machine itself."""
_CHIPS: Mapping[str, str] = MappingProxyType(
    {
        "0x0027": "TPU v2 or v3",
        "0x0056": "TPU",
        "0x005e": "TPU v4",
        "0x0062": "TPU v5p",
        "0x0063": "TPU v5e",
        "0x006f": "TPU v6e",
        "0x0076": "TPU v7x",
    }
)
"""By PCI device; Google's network cards and disks in every machine of its cloud have the same vendor."""


@dataclass(frozen=True)
class Tpu:
    """The TPU of this machine, as far as can be seen from outside."""

    chips: tuple[str, ...] = ()
    """A name for each chip."""
    said_by: str = ""
    """What showed that there is one; empty where nothing did."""
    hosts: tuple[str, ...] = ()
    """The hosts of the slice it is a part of, in the order of their numbers; empty where nothing says so."""
    worker: str = ""
    """The number of this one among them, as it was said."""
    hosts_by: str = ""
    """What said which hosts there are."""

    @property
    def found(self) -> bool:
        """Whether there is one."""
        return bool(self.said_by)

    @property
    def summary(self) -> str:
        """One line for a person; empty without a TPU."""
        if not self.found:
            return ""
        kinds = {name: self.chips.count(name) for name in self.chips}
        chips = [f"{count} x {name}" for name, count in kinds.items()]
        return f"{', '.join(chips) or 'TPU'} ({self.said_by})"


@dataclass(frozen=True)
class Packages:
    """The versions of what computes on a TPU; None is not installed."""

    torch_xla: str | None = None
    torch: str | None = None
    libtpu: str | None = None

    def problem(self, tpu: Tpu) -> str:
        """Why torch_xla cannot be used, with what to do; empty where it can."""
        install = f'pip install "accel[{"tpu" if tpu.found else "xla"}]"'
        if self.torch_xla is None:
            return f"torch_xla is not installed: {install} brings it, with the torch that it fits"
        if self.torch is None or _release(self.torch) != _release(self.torch_xla):
            return (
                f"torch_xla {self.torch_xla} loads with torch {_release(self.torch_xla)} only, and torch "
                f"{self.torch or 'none'} is installed: {install}, in an environment of its own, brings the pair"
            )
        if tpu.found and self.libtpu is None:
            return f"libtpu, which drives the TPU, is not installed: {install} brings it"
        return ""


def detect_tpu(environ: Mapping[str, str], *, root: Path = Path("/")) -> Tpu:
    """Look for a TPU: on the PCI bus, among the device files, and in what Google's machines say in variables.

    Args:
        environ: The environment.
        root: Where `sys` and `dev` are.
    """
    found = _found(environ, root)
    return replace(found, **_hosts(environ, ask=bool(found.chips))) if found.found else found


def _found(environ: Mapping[str, str], root: Path) -> Tpu:
    if wanted := environ.get("PJRT_DEVICE"):
        # torch_xla was told what to use: a TPU that it is not to use is none.
        return Tpu(_on_the_bus(root), f"PJRT_DEVICE={wanted}") if wanted == "TPU" else Tpu()
    if chips := _on_the_bus(root):
        return Tpu(chips, "PCI")
    if files := sorted((root / "dev").glob("accel[0-9]*")):
        return Tpu(("TPU",) * len(files), ", ".join(f"/dev/{file.name}" for file in files))
    if kind := environ.get("TPU_ACCELERATOR_TYPE"):
        return Tpu((), f"TPU_ACCELERATOR_TYPE={kind}")
    return Tpu()


def _hosts(environ: Mapping[str, str], *, ask: bool) -> dict[str, Any]:
    """Which hosts there are: by variables, as Kubernetes has them, else by the machine's own metadata server."""
    if names := environ.get("TPU_WORKER_HOSTNAMES"):
        said_by, worker = "TPU_WORKER_*", environ.get("TPU_WORKER_ID", "")
        return {"hosts": tuple(names.split(",")), "worker": worker, "hosts_by": said_by}
    if not ask or environ.get("TPU_SKIP_MDS_QUERY"):
        return {}
    server = environ.get("GCE_METADATA_HOST", _METADATA)
    try:
        endpoints = _attribute(server, "worker-network-endpoints")
        worker = _attribute(server, "agent-worker-number")
    except OSError:
        return {}
    # Each is `name:id:address`.
    hosts = tuple(endpoint.split(":")[-1] for endpoint in endpoints.split(","))
    return {"hosts": hosts, "worker": worker, "hosts_by": "TPU metadata"}


def _attribute(server: str, name: str) -> str:
    # As slow to import as all else a launch does, and needed on TPUs only.
    from urllib.request import ProxyHandler, Request, build_opener  # noqa: PLC0415

    url = f"http://{server}/computeMetadata/v1/instance/attributes/{name}"
    asked = Request(url, headers={"Metadata-Flavor": "Google"})
    with build_opener(ProxyHandler({})).open(asked, timeout=_PATIENCE_S) as answer:
        return str(answer.read().decode().strip())


def detect_packages(environ: Mapping[str, str]) -> Packages:
    """What is installed here, from the packages' own records."""
    # A libtpu that is no package is said by a variable.
    libtpu = environ.get("TPU_LIBRARY_PATH") or _installed("libtpu")
    return Packages(_installed("torch_xla"), _installed("torch"), libtpu)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _on_the_bus(root: Path) -> tuple[str, ...]:
    devices = sorted((root / "sys/bus/pci/devices").glob("*"))
    google = [device for device in devices if _read(device / "vendor") == _GOOGLE]
    names = (_CHIPS.get(_read(device / "device")) for device in google)
    return tuple(name for name in names if name)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError):
        return ""


def _release(version: str) -> str:
    """`2.9` of `2.9.0+cu128`."""
    return ".".join(version.split(".")[:2])


_DEVICE_FILES = ("nvidia[0-9]*", "kfd", "dxg", "dri/renderD*")
"""Where Linux shows NVIDIA, AMD, WSL and Intel accelerators."""
_TIMEOUT_S = 120


@dataclass(frozen=True)
class Machine:
    """The hardware a launch can count on."""

    cpus: int
    """Logical processors this process may use."""
    accelerator: str | None = None
    """torch's word for what computes beside the CPU: `cuda`, `mps`, `xpu`."""
    devices: tuple[str, ...] = ()
    """The accelerators' names, in torch's order."""
    rocm: bool = False
    """True if torch's word `cuda` stands for AMD GPUs."""
    bf16: bool = False
    """Whether the accelerator computes in bfloat16."""
    torch: str | None = None
    """The version of torch; None where it was not asked."""
    problem: str | None = None
    """Why torch could not be asked."""
    tpu: Tpu = field(default_factory=Tpu)
    """The TPU, which torch does not know of."""
    packages: Packages = field(default_factory=Packages)
    """What is installed to compute on it."""

    @property
    def summary(self) -> str:
        """One line for a person."""
        kinds = {name: self.devices.count(name) for name in self.devices}
        accelerators = [f"{count} x {name}" for name, count in kinds.items()]
        tpus = [self.tpu.summary] if self.tpu.found else []
        return ", ".join([*tpus, *accelerators, f"{self.cpus} CPU cores"])

    @property
    def xla_problem(self) -> str:
        """Why torch_xla cannot be used here, with what to do; empty where it can."""
        return self.packages.problem(self.tpu)

    @property
    def problems(self) -> list[str]:
        """Why something that is here cannot be used."""
        unused_tpu = self.xla_problem if self.tpu.found else ""
        return [problem for problem in (self.problem, unused_tpu) if problem]


def detect(environ: Mapping[str, str] | None = None) -> Machine:
    """Ask a child process what torch finds: exact, and as slow as importing torch."""
    return _with_tpu(_asked(environ), environ)


def _asked(environ: Mapping[str, str] | None) -> Machine:
    command = [sys.executable, "-m", "accel_runtime.probe"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True, env=environ
        )
        found = json.loads(answer.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["no message"])[-1]
        return Machine(cpus(), problem=explain_torch_error(reason))
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return Machine(cpus(), problem=f"torch could not be asked: {error}")
    found["devices"] = tuple(found["devices"])
    return Machine(cpus(), **found)


def glance(environ: Mapping[str, str] | None = None) -> Machine:
    """`detect`, unless the system shows no accelerator at all: then there is nothing to ask."""
    return detect(environ) if _may_have_accelerator() else _with_tpu(Machine(cpus()), environ)


def _with_tpu(found: Machine, environ: Mapping[str, str] | None) -> Machine:
    """What was found, and what can be known of a TPU without asking anybody."""
    variables = environ or {}
    return replace(found, tpu=detect_tpu(variables), packages=detect_packages(variables))


def _may_have_accelerator() -> bool:
    if sys.platform != "linux":
        return True
    return any(next(Path("/dev").glob(pattern), None) for pattern in _DEVICE_FILES)


def cpus() -> int:
    """Logical processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
