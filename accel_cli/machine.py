"""What this machine has, asked of a child process: torch is never imported here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from accel_cli import tpu
from accel_cli.errors import explain_torch_error
from accel_cli.tpu import Packages, Tpu

__all__ = ["Machine", "cpus", "detect", "glance"]

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
    return replace(found, tpu=tpu.seen(variables), packages=tpu.packages(variables))


def _may_have_accelerator() -> bool:
    if sys.platform != "linux":
        return True
    return any(next(Path("/dev").glob(pattern), None) for pattern in _DEVICE_FILES)


def cpus() -> int:
    """Logical processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
