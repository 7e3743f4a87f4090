"""The devices and CPUs of this machine, and the table of devices that torch does not detect."""

from __future__ import annotations

import json
import subprocess
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from accel_cli.errors import UsageError, explain_torch_error
from accel_runtime.environment.cgroup import count_cpus
from accel_runtime.environment.registry import Registry

__all__ = [
    "DETECTORS",
    "Machine",
    "OtherDevices",
    "check_has_files",
    "count_names",
    "detect",
    "detect_quickly",
    "detect_without_torch",
]

_ACCEL = Path(__file__).parents[1]
_PROBE_TIMEOUT_S = 120
_DEVICE_FILES = ("nvidia[0-9]*", "kfd", "dxg", "dri/renderD*")
"""The device files of NVIDIA, AMD, WSL and Intel accelerators on Linux."""


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
class OtherDevices(ABC):
    """Devices that torch does not detect; a subclass is in the table, as a function that detects them."""

    launcher: ClassVar[str]
    """The launcher that suits a machine with them."""
    device: ClassVar[str]
    """The `device` of a profile that chooses them."""

    @property
    @abstractmethod
    def exists(self) -> bool:
        """True if this machine has them."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """A summary in one line; empty if there are none."""

    @property
    @abstractmethod
    def problem(self) -> str:
        """The reason why they cannot be used here, with its cure; empty if they can."""


DETECTORS: Registry[Callable[[Mapping[str, str]], OtherDevices]] = Registry(
    {
        "xla": "accel_cli.extensions.xla.tpu:detect_devices",
    }
)
"""Functions of the environment that detect devices without importing a library for them."""


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
    others: tuple[OtherDevices, ...] = ()
    """The devices that torch does not detect, of each library that this installation has."""

    @property
    def summary(self) -> str:
        """A summary in one line."""
        parts = (
            *(other.summary for other in self.others),
            count_names(self.devices),
            f"{self.cpus} CPU cores",
        )
        return ", ".join(part for part in parts if part)

    @property
    def problems(self) -> list[str]:
        """The reasons why hardware of this machine cannot be used."""
        of_others = (other.problem for other in self.others if other.exists)
        return [problem for problem in (self.problem, *of_others) if problem]


def detect(environ: Mapping[str, str]) -> Machine:
    """Return the hardware of this machine; runs torch in a child process, which takes seconds."""
    return _add_others(_probe_torch(environ), environ)


def detect_quickly(environ: Mapping[str, str]) -> Machine:
    """Return the hardware of this machine; runs torch only if the system has an accelerator."""
    has_accelerator = sys.platform != "linux" or any(
        next(Path("/dev").glob(pattern), None) for pattern in _DEVICE_FILES
    )
    return _add_others(_probe_torch(environ) if has_accelerator else Machine(count_cpus()), environ)


def detect_without_torch(environ: Mapping[str, str]) -> Machine:
    """Return what is known at once: the CPUs, the number of NVIDIA's device files, and the devices that torch does not detect."""
    files = sorted(Path("/dev").glob("nvidia[0-9]*"))
    gpus = Machine(count_cpus(), "cuda" if files else None, ("NVIDIA GPU",) * len(files))
    return _add_others(gpus, environ)


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


def _add_others(machine: Machine, environ: Mapping[str, str]) -> Machine:
    return replace(machine, others=tuple(detect(environ) for detect in DETECTORS.values()))


def count_names(names: Iterable[str]) -> str:
    """Return equal names with their number, as in `2 x NVIDIA A100`."""
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items())
