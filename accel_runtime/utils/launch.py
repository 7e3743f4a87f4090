"""Functions that scripts and notebooks start processes with, under the name of Accelerate's `utils.launch`."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from accel_runtime.env import MixedPrecision
from accel_runtime.kinds import DistributedType

__all__ = ["PrepareForLaunch", "write_basic_config"]

_LOG = logging.getLogger("accel_runtime.utils")


class PrepareForLaunch:
    """Call a function in a process that `torch.multiprocessing` or torch_xla has started, after placing the process.

    `MASTER_ADDR`, `MASTER_PORT` and `WORLD_SIZE` are those of the environment, as in Accelerate; `NPROC` is the number of
    processes of this machine, and `NODE_RANK` its number.

    Args:
        launcher: The function.
        distributed_type: How the processes work together: with `MULTI_CPU`, `MULTI_GPU` and their like the variables of a
            rank are set; with others the function is called as it is.
        debug: Connect the processes over gloo and the file that `ACCELERATE_DEBUG_RDV_FILE` names.
    """

    def __init__(
        self,
        launcher: Callable[..., Any],
        distributed_type: DistributedType | str = DistributedType.NO,
        debug: bool = False,
    ) -> None:
        self.launcher = launcher
        self.distributed_type = DistributedType(distributed_type)
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Call the function.

        Args:
            index: The number of this process on its machine.
            *args: What the function is called with.
        """
        if self.debug or self.distributed_type.value.startswith("MULTI_"):
            self._place(index)
        if self.debug:
            dist.init_process_group(
                "gloo",
                init_method=Path(os.environ["ACCELERATE_DEBUG_RDV_FILE"]).absolute().as_uri(),
                rank=index,
                world_size=int(os.environ["WORLD_SIZE"]),
            )
        self.launcher(*args)

    def _place(self, index: int) -> None:
        counts = (os.environ.get(name) for name in ("NPROC", "LOCAL_WORLD_SIZE", "WORLD_SIZE"))
        per_node = int(next((count for count in counts if count), "1"))
        os.environ["LOCAL_RANK"] = str(index)
        os.environ["RANK"] = str(per_node * int(os.environ.get("NODE_RANK", "0")) + index)
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(per_node))
        if self.debug:
            # The processes have met; the variables only say so.
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            os.environ.setdefault("MASTER_PORT", "0")


def write_basic_config(
    mixed_precision: MixedPrecision = "no", save_location: str | os.PathLike[str] | None = None
) -> Path | Literal[False]:
    """Write the profile that suits this machine, as `accel config default` does, unless there is one.

    Args:
        mixed_precision: `no`, `bf16` or `fp16`.
        save_location: None only: a profile has a name, and its place follows from it.

    Returns:
        The file; False if there was one, which is left as it is.

    Raises:
        ValueError: A `save_location`, or another number format.
        RuntimeError: The profile cannot be written.
    """
    if save_location is not None:
        raise ValueError(
            f"write_basic_config cannot write {os.fspath(save_location)!r}: profiles have names instead of paths. Leave "
            "save_location out, or run `accel config default --profile NAME` in a shell."
        )
    if mixed_precision not in {"no", "bf16", "fp16"}:
        raise ValueError(
            f"mixed_precision must be one of no, bf16, fp16; it is {mixed_precision!r}. Choose one of them."
        )
    path = Path(_run_config("path"))
    if path.exists():
        _LOG.warning(
            "%s is left as it is. `accel config show` prints the profile, `accel config` changes it.", path
        )
        return False
    _run_config("default")
    _run_config("set", f"mixed_precision={mixed_precision}")
    return path


def _run_config(*arguments: str) -> str:
    # The runtime does not import the command line, which is a package of its own.
    command = [sys.executable, "-m", "accel_cli", "config", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"write_basic_config failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()
