"""The meeting of a machine with itself: one machine needs a store for its processes, and nobody to wait for."""

from __future__ import annotations

from torch._C._distributed_c10d import Store
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from typing_extensions import override

from accel_cli.agent.meeting import Card, Meeting, listening, serve

__all__ = ["Alone"]


class Alone(RendezvousHandler):
    """Rank 0 of 1, at once; every attempt has a store of its own, so none meets the keys of the one before.

    torch's c10d rendezvous would first wait up to 0.3 s for the others, by design, and its store listens
    on every address of the machine.
    """

    def __init__(self, meeting: Meeting, run_id: str) -> None:
        self.meeting = meeting
        self.cards: tuple[Card, ...] = (meeting.card,)
        self.seen = self.cards
        self.round = 0
        self._run_id = run_id
        self._served: Store | None = None

    @property
    @override
    def use_agent_store(self) -> bool:
        return True

    @override
    def get_backend(self) -> str:
        return "alone"

    @override
    def get_run_id(self) -> str:
        return self._run_id

    @override
    def next_rendezvous(self) -> RendezvousInfo:
        address = self.meeting.address
        opened = listening(address)
        port = opened.getsockname()[1]
        self.round += 1
        # It goes with its attempt.
        self._served = serve(opened, address)
        return RendezvousInfo(self._served, 0, 1, RendezvousStoreInfo(address, port))

    def arrived(self) -> list[str]:
        """The machines that have come: this one."""
        return [self.meeting.card.name]

    def missing(self) -> list[str]:
        """Nobody is."""
        return []

    def lost(self) -> list[Card]:
        """Nobody can be."""
        return []

    spare = False
    """A machine by itself is needed."""

    def full(self) -> str:
        """No other machine has a round."""
        return ""

    def beats(self) -> dict[str, object]:
        """No other machine has a heartbeat."""
        return {}

    def departed(self, before: dict[str, object]) -> str:  # noqa: ARG002 - as of a machine among others
        """No other machine can leave."""
        return ""

    @override
    def is_closed(self) -> bool:
        return False

    @override
    def set_closed(self) -> None:
        """Nobody else would be told."""

    @override
    def num_nodes_waiting(self) -> int:
        return 0

    @override
    def shutdown(self) -> bool:
        return True
