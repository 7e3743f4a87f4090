"""Logging on several processes: records name their rank, and only the first process writes by default."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Any

from typing_extensions import override

from accel_runtime.environment.installation import format_install
from accel_runtime.environment.settings import Settings, is_placed_by_device
from accel_runtime.environment.topology import Topology

__all__ = ["MultiProcessAdapter", "get_logger"]


class MultiProcessAdapter(logging.LoggerAdapter[logging.Logger]):
    """Logger whose records start with `[RANK i]` and are written by the first process by default.

    Every method of a logger takes two more keywords: `main_process_only=False` writes on every process, `in_order=True`
    writes on every process, one after the other. All processes must make a call with `in_order=True`, and they wait for
    each other in it, whatever their levels.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self._logged: set[str] = set()

    @override
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the rank to the message, and count the frame of `log`.

        As in Accelerate, that frame is part of the `stacklevel` of a script: 2, the default, is the line of the call, 3
        the line that called its function.
        """
        kwargs["stacklevel"] = max(kwargs.get("stacklevel", 2), 2)
        return f"[RANK {find_topology().rank}] {msg}", kwargs

    @override
    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Write a record on the processes that it is meant for.

        Raises:
            RuntimeError: `in_order` is set before the processes are connected.
        """
        main_process_only = kwargs.pop("main_process_only", True)
        if kwargs.pop("in_order", False):
            self._log_in_order(level, msg, args, kwargs)
        elif self.isEnabledFor(level) and (not main_process_only or find_topology().rank == 0):
            msg, changed = self.process(msg, kwargs)
            self.logger.log(level, msg, *args, **changed)

    def _log_in_order(self, level: int, msg: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The level is checked last: processes may have different levels, and all of them must wait.
        topology = find_topology()
        for rank in range(topology.world_size):
            if rank == topology.rank and self.isEnabledFor(level):
                msg, changed = self.process(msg, kwargs)
                changed["stacklevel"] += 1
                self.logger.log(level, msg, *args, **changed)
            if topology.world_size > 1:
                from accel_runtime.backends import wait_for_everyone  # noqa: PLC0415 - torch is needed only if processes wait

                wait_for_everyone()

    def warning_once(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Write a warning only the first time for this message with these arguments."""
        # With the rank, as replicas that are threads of one process share this logger.
        if (key := f"{find_topology().rank} {msg!r} {args!r}") not in self._logged:
            self._logged.add(key)
            kwargs["stacklevel"] = max(kwargs.get("stacklevel", 2), 2) + 1
            self.warning(msg, *args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return the logger of this name for several processes; no `Accelerator` is needed.

    Args:
        name: Usually `__name__`.
        log_level: `debug`, `info`, `warning`, `error` or `critical`, in any case: the level of this logger and of the
            root logger. None uses the variable `ACCEL_LOG_LEVEL`, and without it changes no level.

    Raises:
        ValueError: The level does not exist, or a variable of accel has an invalid value.
    """
    logger = logging.getLogger(name)
    level = log_level or Settings.from_env(os.environ).log_level
    if level != "auto":
        logger.setLevel(level.upper())
        logging.root.setLevel(level.upper())
    return MultiProcessAdapter(logger)


def find_topology() -> Topology:
    """Return the topology of this process or replica; torch_xla gives replicas their ranks by device."""
    if not is_placed_by_device(os.environ):
        return Topology.from_env(os.environ)
    from accel_runtime.backends import current_topology  # noqa: PLC0415 - it imports torch, and logging does without

    return current_topology()


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return `tqdm.auto.tqdm`, shown by the first process of each node.

    Args:
        *args: Arguments for `tqdm`.
        main_process_only: If true, only the first process of each node shows the bar.
        **kwargs: Arguments for `tqdm`.

    Raises:
        ImportError: The package tqdm is not installed.
        ValueError: The first argument is True or False, as in early versions of Accelerate.
    """
    if args and isinstance(args[0], bool):
        raise ValueError(
            f"tqdm({args[0]}, ...) changed its arguments. Use tqdm(..., main_process_only={args[0]})."
        )
    try:
        from tqdm.auto import tqdm as bar  # noqa: PLC0415 - optional dependency
    except ModuleNotFoundError as error:
        raise ImportError(
            f"tqdm() failed: the package tqdm is not installed. Run: {format_install('tqdm')}"
        ) from error
    if main_process_only and find_topology().local_rank != 0:
        kwargs["disable"] = True
    return bar(*args, **kwargs)
