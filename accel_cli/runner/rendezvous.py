"""Why processes start again, and how often they may: one count for all machines, and one reason."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)
from typing_extensions import Self, override

from accel_cli import console
from accel_cli.errors import UsageError
from accel_cli.runner.bootstrap import BootstrapStore, NodeInfo, open_listener, serve_store

__all__ = [
    "SHARED_STORE_OFF",
    "SILENT",
    "NodeRendezvous",
    "RendezvousProgress",
    "RestartBudget",
    "RestartReason",
    "SingleNodeRendezvous",
    "format_arrivals",
]


@dataclass(frozen=True, order=True)
class RestartReason:
    """Why a round ended, as one machine saw it; of several machines' reasons the least is the cause."""

    follows: bool
    """Whether it looks like the consequence of another machine's."""
    time: float
    text: str = field(compare=False)


class RestartBudget:
    """The restarts of a run, counted in the store that all machines share.

    torch counts on each machine for itself, and leaves out what it calls changes of membership: after one failure the
    machine that had it has one restart fewer than the others, so that one of them gives up while another goes on.
    """

    def __init__(self, meeting: BootstrapStore, most: int) -> None:
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

    def spend(self, number: int, reason: RestartReason) -> None:
        """Say why a round ends; the first machine to say it for this round uses one restart."""
        place = self._store.add(self._key(f"round/{number}/reasons"), 1)
        self._store.set(self._key(f"round/{number}/reason/{place}"), json.dumps(asdict(reason)))
        if place == 1:
            self._store.add(self._key("spent"), 1)

    def reason(self, number: int) -> RestartReason | None:
        """Why a round ended, as all machines see it; None where no process failed."""
        count = self._store.add(self._key(f"round/{number}/reasons"), 0)
        keys = [self._key(f"round/{number}/reason/{place}") for place in range(1, count + 1)]
        said = [RestartReason(**json.loads(self._store.get(key))) for key in keys]
        return min(said, default=None)

    def end(self, text: str) -> None:
        """Leave the reason for which the run is over."""
        self._store.set(self._key("ended"), text)

    def ended(self) -> str | None:
        """Why the run is over, if another machine ended it."""
        key = self._key("ended")
        return self._store.get(key).decode() if self._store.check([key]) else None


SILENT = "has not been heard of: its launcher ended, the machine is down, or the link is cut"

SHARED_STORE_OFF = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""What keeps torch from giving a restart the store of the attempt before (torch 2.13; pytorch#167288)."""
_BEATS = 6
"""Heartbeats within the time after which a silent machine counts as lost."""
_LOOK_S = 0.25
"""A restart takes several looks of each machine at the shared state; torch looks once a second."""
_ABSENT_S = 3.0
"""A machine on its way into the next round is in no list for a moment."""


class NodeRendezvous(DynamicRendezvousHandler):
    """The rendezvous of one machine: each round gives the processes a store of its own.

    torch would keep one store for all rounds, so that a restart meets the dead attempt's keys; or, told not to,
    choose a free port that another program can take before a process listens there. Here the agent of the first
    machine listens before it tells the port, and the store goes with its round.
    """

    meeting: BootstrapStore
    cards: tuple[NodeInfo, ...] = ()
    """The machines of this round, in the order of their ranks."""
    seen: tuple[NodeInfo, ...] = ()
    """The most machines that were there at a time while the next round was awaited."""

    @classmethod
    def of(cls, meeting: BootstrapStore, said: dict[str, Any]) -> NodeRendezvous:
        """The handler of a run, as its plan says."""
        os.environ[SHARED_STORE_OFF] = "1"
        low, high = meeting.wanted
        handler: NodeRendezvous = cls.from_backend(
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

    def lost(self) -> list[NodeInfo]:
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
        cards = [NodeInfo.read(said) for said in shown.multi_get([f"card/{n}" for n in range(machines)])]
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
            opened = open_listener(address)
            port = opened.getsockname()[1]
            self._served = serve_store(opened, address)
            shown.set("master", json.dumps([address, port]))
        address, port = json.loads(shown.get("master"))
        return RendezvousStoreInfo(address, port)


class SingleNodeRendezvous(RendezvousHandler):
    """Rank 0 of 1, at once; every attempt has a store of its own, so none meets the keys of the one before.

    torch's c10d rendezvous would first wait up to 0.3 s for the others, by design, and its store listens
    on every address of the machine.
    """

    def __init__(self, meeting: BootstrapStore, run_id: str) -> None:
        self.meeting = meeting
        self.cards: tuple[NodeInfo, ...] = (meeting.card,)
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
        opened = open_listener(address)
        port = opened.getsockname()[1]
        self.round += 1
        # It goes with its attempt.
        self._served = serve_store(opened, address)
        return RendezvousInfo(self._served, 0, 1, RendezvousStoreInfo(address, port))

    def arrived(self) -> list[str]:
        """The machines that have come: this one."""
        return [self.meeting.card.name]

    def missing(self) -> list[str]:
        """Nobody is."""
        return []

    def lost(self) -> list[NodeInfo]:
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


_PIPED_S = 10.0
"""Seconds between two lines where nobody watches a terminal."""


def format_arrivals(
    arrived: Sequence[str], wanted: tuple[int, int], left: float, missing: Sequence[str] = ()
) -> str:
    """One line: the machines that are here, how many are not, and the seconds left.

    Args:
        arrived: Names of the machines that are here.
        wanted: The fewest and the most machines.
        left: Seconds until waiting ends.
        missing: What is known of those that are not here.
    """
    low, high = wanted
    count = str(high) if low == high else f"{low} to {high}"
    lacking = low - len(arrived)
    here = f"{len(arrived)} of {count} machines here ({', '.join(arrived) or 'none'})"
    if lacking <= 0:
        return f"{here}; starting{'' if low == high else ' in a moment, unless more come'}"
    who = f": {', '.join(missing)}" if missing else ""
    return f"waiting: {here}, {lacking} missing{who}; {max(0, round(left))} s left"


class RendezvousProgress:
    """Says a line again and again while something lasts: in place on a terminal, else every ten seconds.

    Args:
        said: What is said now.
        quiet: Seconds before anything is said: machines that are started together meet within them.
    """

    def __init__(self, said: Callable[[], str], *, quiet: float = 2.0) -> None:
        self._said = said
        self._quiet = quiet
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="waiting", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        if self._over.wait(self._quiet):
            return
        if sys.stderr.isatty():
            self._in_place()
        else:
            self._line_by_line()

    def _in_place(self) -> None:
        while not self._over.wait(0.5):
            sys.stderr.write(f"\r\x1b[Kaccel: {self._said()}")
            sys.stderr.flush()
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()

    def _line_by_line(self) -> None:
        last, spoken = "", 0.0
        while not self._over.wait(0.5):
            said = self._said()
            # Without the seconds left: who is here is news at once.
            news = said.rpartition(";")[0]
            if news != last or time.monotonic() - spoken > _PIPED_S:
                console.note(said)
                last, spoken = news, time.monotonic()
