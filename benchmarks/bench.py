"""Run programs for the benchmarks: the two environments, a child process and its cost, and programs in turn."""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from accel_runtime.environment.settings import HOME

__all__ = [
    "ACCELERATE",
    "SCRIPTS",
    "Bench",
    "Run",
    "make_accelerate_environment",
    "read_cpu_model",
    "run_interleaved",
]

T = TypeVar("T")
ACCELERATE = "1.15.0"
SCRIPTS = Path(__file__).with_name("scripts")
_LAUNCH_PREFIXES = (
    "ACCEL",
    "FORK_LAUNCHED",
    "LOCAL_",
    "MASTER_",
    "OMP_",
    "PYTHON",
    "RANK",
    "TORCH",
    "WORLD_SIZE",
)
"""Prefixes of environment variables that would change the measured programs."""
_TIMEOUT_S = 300.0
_GRACE_S = 10.0


@dataclass(frozen=True)
class Run:
    """Cost and output of a command."""

    cpu: float
    """User and system seconds of the command and of all its children that were waited for."""
    wall: float
    """Seconds from start to end."""
    started: float
    """Time of the start, in seconds since 1970."""
    output: str
    """Standard output."""

    def numbers(self, name: str) -> list[float]:
        """Return the numbers in lines such as `began 1.5` of all ranks; accel launch adds a prefix to each."""
        return [
            float(value) for value in re.findall(rf"^(?:\[\d+\] )?{name} (\S+)$", self.output, re.MULTILINE)
        ]


@dataclass(frozen=True)
class Bench:
    """Environments and number of rounds of a run of the benchmarks."""

    repeats: int
    """Number of rounds that count."""
    accel: Path
    """Folder with the commands of accel; torchrun and bare Python are taken from it too."""
    accelerate: Path
    """Folder with the commands of Accelerate."""
    cwd: Path
    """Empty folder to run in, without profiles and configuration files."""

    def command(self, *argv: str) -> Callable[[], Run]:
        """Return a function that runs a command to its end.

        It raises RuntimeError with the end of the output if the command fails, or takes longer than five minutes.
        """
        return lambda: _run(argv, self._environment(), self.cwd)

    def commands(self, *arguments: str, program: str = "python") -> dict[str, Callable[[], Run]]:
        """Return a command for each library: a program with these arguments and the name of the library."""
        return {
            "accel": self.command(f"{self.accel}/{program}", *arguments, "accel_runtime"),
            "Accelerate": self.command(f"{self.accelerate}/{program}", *arguments, "accelerate"),
        }

    @property
    def half(self) -> int:
        """Number of rounds of a script that repeats its measurement."""
        return (self.repeats + 1) // 2

    def _environment(self) -> Mapping[str, str]:
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(_LAUNCH_PREFIXES)
        }
        # One thread per process, and no GPU.
        return inherited | {
            HOME: str(self.cwd),
            "HF_HOME": str(self.cwd),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }


def make_accelerate_environment(root: Path) -> Path:
    """Return the folder of commands of `root/.venv-bench`, created with Accelerate and our torch if it is missing."""
    folder = root / ".venv-bench"
    ready = folder / ".ready"
    requirements = [f"accelerate=={ACCELERATE}", f"torch=={version('torch').partition('+')[0]}"]
    if not ready.exists() or ready.read_text(encoding="utf-8").split() != requirements:
        print(f"creating {folder.name} with {' and '.join(requirements)}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [
            str(folder / "bin" / "python"),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ]
        subprocess.run([*pip, *requirements], check=True)
        ready.write_text("\n".join(requirements), encoding="utf-8")
    return folder / "bin"


def run_interleaved(programs: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """Run programs in turn (A B C A B C), so that other load on the machine affects all of them equally.

    One round before the `repeats` that count fills the caches.
    """
    for run in programs.values():
        run()
    rounds = [{name: run() for name, run in programs.items()} for _ in range(repeats)]
    return {name: [results[name] for results in rounds] for name in programs}


def _run(argv: Sequence[str], environment: Mapping[str, str], cwd: Path) -> Run:
    # Files instead of pipes: a reader would compete with the measured program.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started, start = time.time(), time.perf_counter()
        process = subprocess.Popen(
            argv,
            env=environment,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        cpu = _wait(process)
        wall = time.perf_counter() - start
        out.seek(0)
        err.seek(0)
        output, errors = out.read().decode(), err.read().decode(errors="replace")
    if process.returncode:
        raise RuntimeError(
            f"{' '.join(argv)} failed: exit code {process.returncode}.\n{output[-2000:]}{errors[-4000:]}"
        )
    return Run(cpu, wall, started, output)


def _wait(process: subprocess.Popen[bytes]) -> float:
    """Wait for a process, and return the CPU seconds of it and its children."""
    # SIGTERM first: a launcher then ends its workers, which are in process groups of their own.
    timers = [
        threading.Timer(after, os.killpg, (process.pid, number))
        for after, number in ((_TIMEOUT_S, signal.SIGTERM), (_TIMEOUT_S + _GRACE_S, signal.SIGKILL))
    ]
    for timer in timers:
        timer.start()
    try:
        _, status, usage = os.wait4(process.pid, 0)
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        raise
    finally:
        for timer in timers:
            timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime


def read_cpu_model() -> str:
    """Return the name of the processor, which Linux does not give to `platform`."""
    info = Path("/proc/cpuinfo")  # of Linux only
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    model = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return model[1] if model else platform.machine()
