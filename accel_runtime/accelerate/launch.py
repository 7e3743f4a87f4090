"""`PrepareForLaunch` and `write_basic_config` under the name of Accelerate's `utils.launch`."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from accel_runtime.environment.settings import MixedPrecision
from accel_runtime.foundation.options import DistributedType

__all__ = ["PrepareForLaunch", "write_basic_config"]

_LOG = logging.getLogger("accel_runtime.utils")


class PrepareForLaunch:
    """Set the variables of a rank in a process of `torch.multiprocessing` or torch_xla, and call a function.

    `MASTER_ADDR`, `MASTER_PORT` and `WORLD_SIZE` are read from the environment, as in Accelerate; `NPROC` is the number of
    processes of this node, and `NODE_RANK` the rank of the node.

    Args:
        launcher: The function.
        distributed_type: The variables of a rank are set for `MULTI_CPU`, `MULTI_GPU` and other `MULTI_` types only.
        debug: Initialize a gloo process group with the rendezvous file `ACCELERATE_DEBUG_RDV_FILE`.
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
            index: The local rank of this process.
            *args: Arguments of the function.
        """
        if self.debug or self.distributed_type.value.startswith("MULTI_"):
            self._set_rank(index)
        if self.debug:
            dist.init_process_group(
                "gloo",
                init_method=Path(os.environ["ACCELERATE_DEBUG_RDV_FILE"]).absolute().as_uri(),
                rank=index,
                world_size=int(os.environ["WORLD_SIZE"]),
            )
        self.launcher(*args)

    def _set_rank(self, index: int) -> None:
        counts = (os.environ.get(name) for name in ("NPROC", "LOCAL_WORLD_SIZE", "WORLD_SIZE"))
        per_node = int(next((count for count in counts if count), "1"))
        os.environ["LOCAL_RANK"] = str(index)
        os.environ["RANK"] = str(per_node * int(os.environ.get("NODE_RANK", "0")) + index)
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(per_node))
        if self.debug:
            # Not used by the rendezvous file, but required for the environment of a rank.
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            os.environ.setdefault("MASTER_PORT", "0")


def write_basic_config(
    mixed_precision: MixedPrecision = "no", save_location: str | os.PathLike[str] | None = None
) -> Path | Literal[False]:
    """Write the default profile of this machine like `accel config default`, unless it exists.

    Args:
        mixed_precision: `no`, `bf16` or `fp16`.
        save_location: Must be None: the name of a profile defines its path.

    Returns:
        The file; False if it existed before, and was not changed.

    Raises:
        ValueError: If there is a `save_location`, or the number format is invalid.
        RuntimeError: If the profile cannot be written.
    """
    if save_location is not None:
        raise ValueError(
            f"write_basic_config cannot write {os.fspath(save_location)!r}: profiles have names instead of paths. Leave "
            "save_location out, or run `accel config default --profile NAME` in a shell."
        )
    if mixed_precision not in {"no", "bf16", "fp16"}:
        raise ValueError(f"Invalid mixed_precision {mixed_precision!r}: expected one of no, bf16, fp16.")
    path = Path(_run_config("path"))
    if path.exists():
        _LOG.warning(
            "%s exists and was not changed. `accel config show` prints the profile, `accel config` changes it.",
            path,
        )
        return False
    _run_config("default")
    _run_config("set", f"mixed_precision={mixed_precision}")
    return path


def _run_config(*arguments: str) -> str:
    # The runtime must not import accel_cli.
    command = [sys.executable, "-m", "accel_cli", "config", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"write_basic_config failed: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout.strip()
