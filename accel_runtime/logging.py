"""Log records of several processes: whose they are, and who writes them."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from accel_runtime.env import Settings
from accel_runtime.topology import Topology

__all__ = ["MultiProcessAdapter", "get_logger"]

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:  # on Python 3.10 it takes no brackets
    _Adapter = logging.LoggerAdapter


class MultiProcessAdapter(_Adapter):
    """A logger whose records say `[RANK i]` and are written by the first process, unless told otherwise.

    Every method of a logger takes two more keywords: `main_process_only=False` writes on every process,
    `in_order=True` writes on every process, one after the other. All processes have to make a call with
    `in_order=True`, and they wait for one another in it, whatever their levels.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self._said: set[str] = set()

    @override
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the rank to the message, and count the frame of `log`.

        As in Accelerate, that frame is part of a `stacklevel` that a script gives: 2, the default, is the line of the call,
        3 the line that called its function.
        """
        kwargs["stacklevel"] = max(kwargs.get("stacklevel", 2), 2)
        return f"[RANK {Topology.standing().rank}] {msg}", kwargs

    @override
    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Write a record where it is to be written.

        Raises:
            RuntimeError: `in_order` before the processes are connected.
        """
        main_process_only = kwargs.pop("main_process_only", True)
        if kwargs.pop("in_order", False):
            self._in_turn(level, msg, args, kwargs)
        elif self.isEnabledFor(level) and (not main_process_only or Topology.standing().rank == 0):
            msg, changed = self.process(msg, kwargs)
            self.logger.log(level, msg, *args, **changed)

    def _in_turn(self, level: int, msg: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The level is asked last: processes may have levels of their own, and all of them have to wait.
        here = Topology.standing()
        for rank in range(here.world_size):
            if rank == here.rank and self.isEnabledFor(level):
                msg, changed = self.process(msg, kwargs)
                changed["stacklevel"] += 1
                self.logger.log(level, msg, *args, **changed)
            if here.world_size > 1:
                _wait()

    def warning_once(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        """`warning`, but only the first time for this message with these arguments."""
        # Replicas that are threads of one process share this logger, and each of them has to say it once.
        if (said := f"{Topology.standing().rank} {msg!r} {args!r}") not in self._said:
            self._said.add(said)
            kwargs["stacklevel"] = max(kwargs.get("stacklevel", 2), 2) + 1
            self.warning(msg, *args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """The logger of this name, for several processes; it needs no `Accelerator`.

    Args:
        name: Usually `__name__`.
        log_level: `debug`, `info`, `warning`, `error` or `critical`, in any case: the level of this logger and
            of the root logger. None takes the variable `ACCEL_LOG_LEVEL`, and without it changes no level.

    Raises:
        ValueError: No such level, or a variable of accel with a value we cannot use.
    """
    logger = logging.getLogger(name)
    told = log_level or Settings.from_env(os.environ).log_level
    if told != "auto":
        logger.setLevel(told.upper())
        logging.root.setLevel(told.upper())
    return MultiProcessAdapter(logger)


def _wait() -> None:
    """Until every process is here."""
    from accel_runtime.current import wait  # noqa: PLC0415 - logging costs no torch until processes wait for each other

    wait()
