"""Why processes start again, and how often they may: one count for all machines, and one reason."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from accel_cli.agent.meeting import Meeting

__all__ = ["Budget", "Reason"]


@dataclass(frozen=True, order=True)
class Reason:
    """Why a round ended, as one machine saw it; of several machines' reasons the least is the cause."""

    follows: bool
    """Whether it looks like the consequence of another machine's."""
    time: float
    text: str = field(compare=False)


class Budget:
    """The restarts of a run, counted in the store that all machines share.

    torch counts on each machine for itself, and leaves out what it calls changes of membership: after one failure the
    machine that had it has one restart fewer than the others, so that one of them gives up while another goes on.
    """

    def __init__(self, meeting: Meeting, most: int) -> None:
        self._store = meeting.store
        self._key = meeting.key
        self.most = most

    @property
    def spent(self) -> int:
        """Restarts used so far by the whole run."""
        return int(self._store.add(self._key("spent"), 0))

    @property
    def left(self) -> int:
        """Restarts that remain."""
        return max(0, self.most - self.spent)

    def spend(self, number: int, reason: Reason) -> None:
        """Say why a round ends; the first machine to say it for this round uses one restart."""
        place = self._store.add(self._key(f"round/{number}/reasons"), 1)
        self._store.set(self._key(f"round/{number}/reason/{place}"), json.dumps(asdict(reason)))
        if place == 1:
            self._store.add(self._key("spent"), 1)

    def reason(self, number: int) -> Reason | None:
        """Why a round ended, as all machines see it; None where no process failed."""
        count = self._store.add(self._key(f"round/{number}/reasons"), 0)
        keys = [self._key(f"round/{number}/reason/{place}") for place in range(1, count + 1)]
        said = [Reason(**json.loads(self._store.get(key))) for key in keys]
        return min(said, default=None)

    def end(self, text: str) -> None:
        """Leave the reason for which the run is over."""
        self._store.set(self._key("ended"), text)

    def ended(self) -> str | None:
        """Why the run is over, if another machine ended it."""
        key = self._key("ended")
        return self._store.get(key).decode() if self._store.check([key]) else None
