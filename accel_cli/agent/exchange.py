"""What the machines tell each other of their failures, so that each can name the one that was first."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from typing import Any

from accel_cli import failures
from accel_cli.failures import Cause, Failure, Link

__all__ = ["Told"]

_KEY = "accel/failure/"
_READ = "accel/failures_read"
_PATIENCE_S = {True: 1.0, False: 10.0}
"""How long the others are waited for, where this machine has a failure of its own, and where it has not."""
_LINGER_S = 4.0
"""How long a machine stays for the others to read what it said: the store may be here."""
_PERIOD_S = 0.05


class Told:
    """What this machine tells the others, and they it.

    Args:
        store: What the machines share.
        mine: The first failure of this machine.
        machine: Its number.
        machines: How many there are.
    """

    def __init__(self, store: Any, mine: Failure, *, machine: int, machines: int) -> None:
        self._store, self._machine, self._machines = store, machine, machines
        self._found = [mine]
        self._asked = threading.Event()
        # A store that has gone may keep its callers waiting; nobody waits for this thread for long.
        self._thread = threading.Thread(target=self._talk, args=(mine,), name="failures", daemon=True)

    def first(self) -> Failure:
        """The first failure of all machines, as far as they say in time."""
        if self._machines > 1:
            self._thread.start()
            self._asked.wait(_PATIENCE_S[False])
        return failures.first(list(self._found))

    def linger(self) -> None:
        """Stay until the others have read it, but not for ever."""
        if self._machines > 1:
            self._thread.join(_LINGER_S)

    def _talk(self, mine: Failure) -> None:
        try:
            self._store.set(f"{_KEY}{self._machine}", _written(mine))
            self._listen(time.monotonic() + _PATIENCE_S[mine.cause == Cause.OWN])
            self._asked.set()
            read = self._store.add(_READ, 1)
            while read < self._machines:
                time.sleep(_PERIOD_S)
                read = self._store.add(_READ, 0)
        except RuntimeError:  # the machine that holds the store has gone
            self._asked.set()

    def _listen(self, late: float) -> None:
        others = {f"{_KEY}{other}" for other in range(self._machines)} - {f"{_KEY}{self._machine}"}
        while others and time.monotonic() < late:
            there = {key for key in others if self._store.check([key])}
            self._found += [_read(self._store.get(key)) for key in there]
            others -= there
            time.sleep(_PERIOD_S)


def _written(failure: Failure) -> str:
    """A failure without the places in the code, which mean something on its own machine only."""
    chain = [(link.kind, link.said[:2000]) for link in failure.chain]
    return json.dumps({**dataclasses.asdict(failure), "chain": chain, "crash": ()})


def _read(text: bytes) -> Failure:
    said = json.loads(text)
    chain = tuple(Link(kind, words) for kind, words in said.pop("chain"))
    return Failure(**{**said, "chain": chain, "crash": ()})
