"""The process that starts replicas: it passes signals on to theirs, and ends at once when one of theirs does."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from accel_cli.forkserver.process import SIGNALS
from accel_cli.replica.folder import died

__all__ = ["Pool"]

_LOOK_S = 0.1
_REAP_S = 5.0


class Pool:
    """The processes of replicas, from the outside.

    torch_xla collects results in the order of ranks, and its pool waits for whoever is left: while one replica is stuck
    in a collective, the failure of another would not be seen.

    Args:
        error: The file in which the launcher looks for a failure.
    """

    def __init__(self, error: Path) -> None:
        self._error = error
        self._children: dict[int, BaseProcess] = {}
        self._sent: set[int] = set()
        self._watcher = threading.Thread(target=self._look, name="replicas", daemon=True)

    def watch(self) -> None:
        """Begin, before any is started; in the main thread."""
        for number in (*SIGNALS, signal.SIGWINCH):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._pass_on)
        self._watcher.start()

    def settle(self) -> None:
        """Once the pool is broken: wait for what is known of the process that ended, which ends this one."""
        self._watcher.join(_REAP_S)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        running = [child for child in multiprocessing.active_children() if child.pid]
        self._sent.add(number)
        for child in running:
            with suppress(ProcessLookupError):
                os.kill(child.pid or 0, number)
        if not running and number != signal.SIGWINCH:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _look(self) -> None:
        while True:
            self._children |= {child.pid or 0: child for child in multiprocessing.active_children()}
            wait([child.sentinel for child in self._children.values()] or [], _LOOK_S)
            for child in self._ended():
                if child.exitcode:
                    self._end(child)
                del self._children[child.pid or 0]

    def _ended(self) -> Iterator[BaseProcess]:
        yield from [child for child in self._children.values() if child.exitcode is not None]

    def _end(self, child: BaseProcess) -> None:
        """End with the code of the failure; the launcher then ends what still runs."""
        assert child.pid is not None
        assert child.exitcode is not None
        if -child.exitcode not in self._sent:
            died(self._error, child.pid, child.exitcode)
        os._exit(self._code(child.exitcode))

    def _code(self, exitcode: int) -> int:
        """Of what was recorded first; the replica whose end is seen first may have failed after it."""
        try:
            said = json.loads(self._error.read_text(encoding="utf-8"))["accel"]
        except (OSError, ValueError, KeyError):
            return exitcode if exitcode > 0 else 128 - exitcode
        if "exitcode" in said:
            return int(said["exitcode"]) if said["exitcode"] > 0 else 128 - int(said["exitcode"])
        code = said.get("exit")
        return code & 0xFF if isinstance(code, int) else 1
