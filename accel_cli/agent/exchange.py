"""What the machines tell each other of their failures, so that each can name the one that was first."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from typing import Any

from accel_cli import failures
from accel_cli.failures import Cause, Failure, Link

__all__ = ["first"]

_KEY = "accel/failure/"
_READ = "accel/failures_read"
_PATIENCE_S = {True: 2.0, False: 10.0}
"""How long the others are waited for, where this machine has a failure of its own, and where it has not."""
_LINGER_S = 5.0
"""How long the machine that holds the store stays for the others to read."""
_PERIOD_S = 0.05


def first(store: Any, mine: Failure, *, machine: int, machines: int) -> Failure:
    """The first failure of all machines, as far as they say in time.

    Args:
        store: What the machines share.
        mine: The first failure of this machine.
        machine: Its number.
        machines: How many there are.
    """
    if machines == 1:
        return mine
    found = [mine]
    # A store that has gone may keep its callers waiting; it is not waited for.
    asking = threading.Thread(
        target=_ask, args=(store, mine, found, machine, machines), name="failures", daemon=True
    )
    asking.start()
    asking.join(_PATIENCE_S[mine.cause == Cause.OWN] + _LINGER_S)
    return failures.first(list(found))


def _ask(store: Any, mine: Failure, found: list[Failure], machine: int, machines: int) -> None:
    others = {f"{_KEY}{other}" for other in range(machines)} - {f"{_KEY}{machine}"}
    try:
        store.set(f"{_KEY}{machine}", _written(mine))
        late = time.monotonic() + _PATIENCE_S[mine.cause == Cause.OWN]
        while others and time.monotonic() < late:
            there = {key for key in others if store.check([key])}
            found += [_read(store.get(key)) for key in there]
            others -= there
            time.sleep(_PERIOD_S)
        read = store.add(_READ, 1)
        late = time.monotonic() + _LINGER_S
        while read < machines and machine == 0 and time.monotonic() < late:
            time.sleep(_PERIOD_S)
            read = store.add(_READ, 0)
    except RuntimeError:  # the machine that holds the store has gone
        return


def _written(failure: Failure) -> str:
    """A failure without the places in the code, which mean something on its own machine only."""
    chain = [(link.kind, link.said[:2000]) for link in failure.chain]
    return json.dumps({**dataclasses.asdict(failure), "chain": chain, "crash": ()})


def _read(text: bytes) -> Failure:
    said = json.loads(text)
    chain = tuple(Link(kind, words) for kind, words in said.pop("chain"))
    return Failure(**{**said, "chain": chain, "crash": ()})
