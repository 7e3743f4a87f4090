"""The thread that writes while the script trains on; what goes wrong in it comes up in the script."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from accel_runtime.checkpoint.errors import CheckpointError

__all__ = ["Background"]

_TOLD_S = 1.0
"""Who waits longer is told so."""
_AGAIN_S = 10.0
"""How often."""


class Background:
    """One save at a time.

    Args:
        tells: Whether this process says what it waits for.
    """

    def __init__(self, *, tells: bool) -> None:
        self._tells = tells
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._progress: Callable[[], str] = str
        self._target = Path()

    def start(
        self,
        work: Callable[[], object],
        target: Path,
        progress: Callable[[], str],
        optimizers: Iterable[torch.optim.Optimizer],
    ) -> None:
        """Do it while the script goes on; a step of one of the optimizers raises what went wrong until then.

        Args:
            work: Writes.
            target: What it writes.
            progress: Says how far it is.
            optimizers: The script's own.
        """
        assert self._thread is None
        self._target, self._progress = target, progress
        self._hooks = [optimizer.register_step_pre_hook(self._step) for optimizer in optimizers]
        # A daemon, for the interpreter would wait for it before anybody could say so: `leave` does.
        self._thread = threading.Thread(target=self._run, args=(work,), name="accel-checkpoint", daemon=True)
        self._thread.start()
        _at_exit(self)

    def check(self) -> None:
        """Raise what went wrong; if it is still at work, nothing.

        Raises:
            CheckpointError: The checkpoint could not be written.
        """
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until it is written.

        Raises:
            CheckpointError: It could not be.
        """
        thread = self._thread
        if thread is None:
            return
        begun = time.monotonic()
        thread.join(_TOLD_S)
        while thread.is_alive():
            self._tell(f"waiting for {self._target} to be written: {self._progress()}")
            thread.join(_AGAIN_S)
        if time.monotonic() - begun > _TOLD_S and self._error is None:
            self._tell(f"{self._target} is written")
        self._thread = None
        for hook in self._hooks:
            hook.remove()
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(f"{self._target} was not saved: {error}") from error

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it is raised where the script is
            self._error = error

    def _step(self, *_: object) -> None:
        self.check()

    def _tell(self, text: str) -> None:
        if self._tells:
            print(f"accel: {text}", file=sys.stderr, flush=True)  # noqa: T201 - the person waits for it

    def leave(self) -> None:
        """At exit: wait; if it could not be written, the process has failed."""
        try:
            self.wait()
        except CheckpointError as error:
            print(f"accel: {error}", file=sys.stderr, flush=True)  # noqa: T201 - nobody is left to raise it to
            sys.stdout.flush()
            # An exception would be printed at this point, and the exit code stay 0.
            os._exit(1)


def _at_exit(background: Background) -> None:
    # Registered last it runs first: the processes must still be able to speak to each other.
    atexit.unregister(background.leave)
    atexit.register(background.leave)
