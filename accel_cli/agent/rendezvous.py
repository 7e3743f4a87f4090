"""torch's c10d rendezvous, with what a restart, a known order of machines and a lost machine need."""

from __future__ import annotations

import json
import os
import random
import time
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)
from typing_extensions import override

from accel_cli.agent.meeting import Card, Meeting, listening, serve
from accel_cli.errors import UsageError

__all__ = ["SHARED_STORE_OFF", "SILENT", "Handler"]

SILENT = "has not been heard of: its launcher ended, the machine is down, or the link is cut"

SHARED_STORE_OFF = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""What keeps torch from giving a restart the store of the attempt before (torch 2.13; pytorch#167288)."""
_BEATS = 6
"""Heartbeats within the time after which a silent machine counts as lost."""
_LOOK_S = 0.25
"""A restart takes several looks of each machine at the shared state; torch looks once a second."""
_ABSENT_S = 3.0
"""A machine on its way into the next round is in no list for a moment."""


class Handler(DynamicRendezvousHandler):
    """The rendezvous of one machine: each round gives the processes a store of its own.

    torch would keep one store for all rounds, so that a restart meets the dead attempt's keys; or, told not to,
    choose a free port that another program can take before a process listens there. Here the agent of the first
    machine listens before it tells the port, and the store goes with its round.
    """

    meeting: Meeting
    cards: tuple[Card, ...] = ()
    """The machines of this round, in the order of their ranks."""
    seen: tuple[Card, ...] = ()
    """The most machines that were there at a time while the next round was awaited."""

    @classmethod
    def of(cls, meeting: Meeting, said: dict[str, Any]) -> Handler:
        """The handler of a run, as its plan says."""
        os.environ[SHARED_STORE_OFF] = "1"
        low, high = meeting.wanted
        handler: Handler = cls.from_backend(
            said["run_id"],
            meeting.store,
            C10dRendezvousBackend(meeting.store, said["run_id"]),
            low,
            high,
            # torch knows a machine by its address and process id, which two containers may share.
            meeting.card.id,
            RendezvousTimeout(
                join=timedelta(seconds=said["rdzv_timeout"]),
                last_call=timedelta(seconds=said["last_call_timeout"]),
            ),
            keep_alive_interval=max(1, said["lost_after"] // _BEATS),
            keep_alive_max_attempt=_BEATS,
        )
        setattr(handler._state_holder, "_cache_duration", _LOOK_S)  # noqa: B010 - torch has no argument for it
        setattr(dynamic_rendezvous, "_delay", handler._pause)  # noqa: B010
        handler.meeting = meeting
        handler.static = bool(said["static"])
        handler.max_restarts = said["max_restarts"]
        handler._absent_since = None
        return handler

    static: bool
    max_restarts: int
    _served: TCPStore | None = None
    _absent_since: float | None

    @property
    @override
    def use_agent_store(self) -> bool:
        return True

    @property
    def round(self) -> int:
        """The number of this round: the same on all machines, one more after each restart or change."""
        return int(self._state_holder.state.round)

    @override
    def next_rendezvous(self) -> RendezvousInfo:
        self.seen = ()
        info = super().next_rendezvous()
        self._absent_since = None
        rank = self._ordered(info.store, info.rank, info.world_size)
        return RendezvousInfo(info.store, rank, info.world_size, self._store_of_the_round(info.store, rank))

    def arrived(self) -> list[str]:
        """The machines that have come to this round, by name."""
        state = self._state_holder.state
        # The state is replaced, not changed, by the thread that waits.
        within = not state.complete or self._this_node in state.participants
        nodes = sorted(state.participants if within else state.wait_list)
        found = (self.meeting.card_of(node.addr) for node in nodes)
        here = [card for card in found if card]
        if len(here) > len(self.seen):
            self.seen = tuple(here)
        return [card.name for card in here]

    def missing(self) -> list[str]:
        """What is known of the machines that have not come: their numbers, where machines have numbers."""
        low, high = self.meeting.wanted
        if low != high or self.meeting.card.node_rank is None:
            return []
        here = {card.node_rank for card in self.seen}
        return [f"node_rank {n}" for n in range(high) if n not in here]

    def lost(self) -> list[Card]:
        """Machines of this round that are silent: ended, switched off, or behind a cut link."""
        with self._heartbeat_lock:
            state = self._state_holder.state
            alive = {node.addr for node in state.participants}
            moving = bool(state.wait_list) or state.closed or not state.complete
        gone = [card for card in self.cards if card.id not in alive]
        if moving or not gone:
            self._absent_since = None
            return []
        self._absent_since = self._absent_since or time.monotonic()
        return gone if time.monotonic() - self._absent_since > _ABSENT_S else []

    @property
    def spare(self) -> bool:
        """Whether the round is full without this machine."""
        return self._this_node in self._state_holder.state.redundancy_list

    def full(self) -> str:
        """The machines that have the round without this one."""
        nodes = sorted(self._state_holder.state.participants)
        return ", ".join(card.name for node in nodes if (card := self.meeting.card_of(node.addr)))

    def beats(self) -> dict[str, object]:
        """The newest heartbeat of each machine of this round, by the clock of that machine.

        Raises:
            RendezvousError: The store is lost.
        """
        self.is_closed()  # torch reads the shared state
        state = self._state_holder.state
        return {node.addr: state.last_heartbeats.get(node) for node in state.participants}

    def departed(self, before: dict[str, object]) -> str:
        """The machines that have left this round or fallen silent, and why; empty if none has.

        Args:
            before: What `beats` returned some seconds ago.

        Raises:
            RendezvousError: The store is lost.
        """
        now = self.beats()
        said = []
        for card in self.cards:
            if why := self.meeting.departure(card):
                said.append(f"{card.name}: {why}")
            elif card.id != self.meeting.card.id and now.get(card.id) in {None, before.get(card.id)}:
                said.append(f"{card.name} {SILENT}")
        return "; ".join(said)

    def _pause(self, seconds: float | tuple[float, float]) -> None:
        """Wait between two looks at the shared state, as short as the looks are.

        Raises:
            UsageError: The round is full, and this machine can never take part.
        """
        if self.spare and not self.max_restarts and not self.meeting.hosts:
            raise UsageError(
                f"{self.meeting.card.name} is one machine too many: the run has all {self.meeting.wanted[1]} already "
                f"({self.full()}). Raise --nnodes on all machines, or give another run another --rdzv-id and --rdzv-endpoint."
            )
        time.sleep(random.uniform(*seconds) if isinstance(seconds, tuple) else min(seconds, _LOOK_S))  # noqa: S311

    def _ordered(self, store: Store, rank: int, machines: int) -> int:
        """The rank of this machine: by the machines' own numbers where they have them, else torch's choice."""
        shown = PrefixStore("accel", store)
        shown.set(f"card/{rank}", self.meeting.card.text())
        cards = [Card.read(said) for said in shown.multi_get([f"card/{n}" for n in range(machines)])]
        order = sorted(
            range(machines),
            key=lambda n: (cards[n].node_rank if cards[n].node_rank is not None else machines, n),
        )
        self.cards = tuple(cards[n] for n in order)
        if self.static:
            self._check_numbers()
        return order.index(rank)

    def _check_numbers(self) -> None:
        numbers = [card.node_rank for card in self.cards]
        if numbers != list(range(len(numbers))):
            said = ", ".join(f"{card.name} is {card.node_rank}" for card in self.cards)
            raise UsageError(
                f"--node-rank has to number the machines from 0 to {len(numbers) - 1}, each once; here {said}"
            )

    def _store_of_the_round(self, store: Store, rank: int) -> RendezvousStoreInfo:
        shown = PrefixStore("accel", store)
        if rank == 0:
            address = self.meeting.address
            opened = listening(address)
            port = opened.getsockname()[1]
            self._served = serve(opened, address)
            shown.set("master", json.dumps([address, port]))
        address, port = json.loads(shown.get("master"))
        return RendezvousStoreInfo(address, port)
