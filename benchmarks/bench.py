"""Environments of the benchmarks: that of accel, that of Accelerate, and the variables of both."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from accel_runtime.env import HOME
from benchmarks.measure import Run, child

__all__ = ["ACCELERATE", "SCRIPTS", "Bench", "accelerate_environment"]

ACCELERATE = "1.15.0"
SCRIPTS = Path(__file__).with_name("scripts")
_FOREIGN = ("ACCEL", "FORK_LAUNCHED", "LOCAL_", "MASTER_", "OMP_", "PYTHON", "RANK", "TORCH", "WORLD_SIZE")
"""How variables begin that would change what is measured."""


@dataclass(frozen=True)
class Bench:
    """One run of the benchmarks."""

    repeats: int
    """How many rounds count."""
    accel: Path
    """The folder of accel's commands; torchrun and bare Python are taken from here too."""
    accelerate: Path
    """The folder of Accelerate's commands."""
    cwd: Path
    """An empty folder to run in, so that nobody's profile or configuration takes part."""

    def run(self, *argv: str) -> Callable[[], Run]:
        """A case: this command, run to its end."""
        return lambda: child(argv, self._environ(), self.cwd)

    def _environ(self) -> Mapping[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        alone = {HOME: str(self.cwd), "HF_HOME": str(self.cwd)}
        # One thread a process, and the processor only, whatever else is there.
        return kept | alone | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def accelerate_environment(root: Path) -> Path:
    """The commands of an environment that has Accelerate and our torch; made when it is missing.

    Args:
        root: The folder that has or gets `.venv-bench`.
    """
    folder = root / ".venv-bench"
    ready = folder / ".ready"
    wanted = [f"accelerate=={ACCELERATE}", f"torch=={version('torch').partition('+')[0]}"]
    if not ready.exists() or ready.read_text(encoding="utf-8").split() != wanted:
        print(f"making {folder.name} with {' and '.join(wanted)}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip: list[Path | str] = [
            folder / "bin" / "python",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ]
        subprocess.run([*pip, *wanted], check=True)
        ready.write_text("\n".join(wanted), encoding="utf-8")
    return folder / "bin"
