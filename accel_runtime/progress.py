"""A progress bar that one process of each machine shows."""

from __future__ import annotations

from typing import Any

from accel_runtime.topology import Topology

__all__ = ["tqdm"]


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """`tqdm.auto.tqdm`, shown by the first process of each machine.

    Args:
        *args: For `tqdm`.
        main_process_only: False shows a bar on every process.
        **kwargs: For `tqdm`.

    Raises:
        ImportError: The package tqdm is not installed.
        ValueError: The first argument is True or False, as it was in early versions of Accelerate.
    """
    if args and isinstance(args[0], bool):
        raise ValueError(
            f"tqdm({args[0]}, ...) is not what it was: write tqdm(..., main_process_only={args[0]})"
        )
    try:
        from tqdm.auto import tqdm as bar  # noqa: PLC0415 - a bar is optional, and so is its package
    except ModuleNotFoundError as error:
        raise ImportError("a progress bar needs the package tqdm: pip install tqdm") from error
    if main_process_only and Topology.standing().local_rank != 0:
        kwargs["disable"] = True
    return bar(*args, **kwargs)
