"""Rendezvous of the nodes of a run: rank order, lost and spare nodes, and the restart budget."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    _RendezvousExitOp,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from typing_extensions import override

from accel_cli.errors import UsageError
from accel_cli.planning.plan import AgentSettings
from accel_cli.runner.bootstrap import BootstrapStore, NodeInfo, open_listener, serve_store

__all__ = [
    "SHARED_STORE_OFF",
    "NodeRendezvous",
    "RestartBudget",
    "RestartReason",
    "SingleNodeRendezvous",
    "count_machines",
    "format_arrivals",
]


@dataclass(frozen=True, order=True)
class RestartReason:
    """Reason for a restart as one node saw it; of the reasons of several nodes, the least is the cause."""

    is_consequence: bool
    """True if the failure looks like the consequence of one on another node."""
    time: float
    text: str = field(compare=False)
    is_stall: bool = field(default=False, compare=False)
    """True if no process has failed, and none has made progress."""


class RestartBudget:
    """The restarts of a run, counted in the store that all nodes share.

    torch counts them on each node, without changes of membership: after one failure the node that had it has one restart
    fewer than the others, so that it gives up while the others restart.
    """

    def __init__(self, bootstrap: BootstrapStore, max_restarts: int) -> None:
        self._bootstrap = bootstrap
        self._store = bootstrap.store
        self.max_restarts = max_restarts

    @property
    def used(self) -> int:
        """The number of restarts of the run so far."""
        return self._add("spent", 0)

    @property
    def remaining(self) -> int:
        """The number of restarts that remain."""
        return max(0, self.max_restarts - self.used)

    def use(self, number: int, reason: RestartReason) -> None:
        """Publish the reason why a round ends; the first node to do so for this round uses one restart."""
        index = self._add(f"round/{number}/reasons", 1)
        self._bootstrap.set_value(f"round/{number}/reason/{index}", json.dumps(asdict(reason)))
        if index == 1:
            self._add("spent", 1)

    def get_reason(self, number: int) -> RestartReason | None:
        """Return the reason why a round ended, the same on all nodes; None if no process failed."""
        count = self._add(f"round/{number}/reasons", 0)
        keys = [self._bootstrap.get_key(f"round/{number}/reason/{index}") for index in range(1, count + 1)]
        reasons = [RestartReason(**json.loads(self._store.get(key))) for key in keys]
        return min(reasons, default=None)

    def _add(self, name: str, amount: int) -> int:
        return int(self._store.add(self._bootstrap.get_key(name), amount))


SHARED_STORE_OFF = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Stops torch from reusing the store of the attempt before in a restart (torch 2.13; pytorch#167288)."""
_HEARTBEATS = 6
"""The number of heartbeats within `lost_after` seconds."""
_POLL_S = 0.25
"""Seconds between two reads of the shared state, which a restart needs several times; torch has 1 s."""
_ABSENT_S = 3.0
"""Seconds that a node may be missing from the state, since it is in no list while it changes rounds."""


class NodeRendezvous(DynamicRendezvousHandler):
    """Rendezvous of several nodes with a separate store for each round.

    torch keeps one store for all rounds, so that a restart finds the keys of the attempt before; or else it chooses a free
    port that another program can take before a process listens there. Here the agent of the first node serves it.
    """

    bootstrap: BootstrapStore
    nodes: tuple[NodeInfo, ...] = ()
    """The nodes of this round, in the order of their ranks."""
    arrived: tuple[NodeInfo, ...] = ()
    """The largest set of nodes that was present while this node waited for the round."""
    _is_static: bool
    _takes_spares: bool
    """True if a node that is not needed may be needed later."""
    _round_store: TCPStore | None = None
    _has_succeeded: bool = False
    _absent_since: float | None = None

    @classmethod
    def create(cls, bootstrap: BootstrapStore, settings: AgentSettings) -> NodeRendezvous:
        """Create the handler of a run from its plan's settings of the elastic agent."""
        os.environ[SHARED_STORE_OFF] = "1"
        handler: NodeRendezvous = cls.from_backend(
            settings.run_id,
            bootstrap.store,
            C10dRendezvousBackend(bootstrap.store, settings.run_id),
            bootstrap.min_nodes,
            bootstrap.max_nodes,
            # Instead of the address and process id, which two containers may share.
            bootstrap.node.id,
            RendezvousTimeout(
                join=timedelta(seconds=settings.rdzv_timeout),
                last_call=timedelta(seconds=settings.last_call_timeout),
            ),
            keep_alive_interval=max(1, settings.lost_after // _HEARTBEATS),
            keep_alive_max_attempt=_HEARTBEATS,
        )
        setattr(handler._state_holder, "_cache_duration", _POLL_S)  # noqa: B010 - torch 2.9 to 2.13 has no argument for it
        setattr(dynamic_rendezvous, "_delay", handler._delay)  # noqa: B010
        handler.bootstrap = bootstrap
        handler._is_static = settings.static
        handler._takes_spares = settings.max_restarts > 0 or bool(settings.node_check)
        return handler

    @property
    @override
    def use_agent_store(self) -> bool:
        return True

    @property
    def round(self) -> int:
        """The number of this round: the same on all nodes, higher after each restart or change of membership."""
        return int(self._state_holder.state.round)

    @property
    def is_spare(self) -> bool:
        """Return True if the round is complete without this node."""
        return self._this_node in self._state_holder.state.redundancy_list

    @override
    def next_rendezvous(self) -> RendezvousInfo:
        self.arrived = ()
        info = super().next_rendezvous()
        self._absent_since = None
        self._has_succeeded = False
        store = PrefixStore("accel", info.store)
        rank = self._assign_rank(store, info.rank, info.world_size)
        return RendezvousInfo(info.store, rank, info.world_size, self._open_round_store(store, rank))

    def _assign_rank(self, store: Store, rank: int, num_nodes: int) -> int:
        """Return the rank of this node: in the order of the nodes' own ranks if they have some, else as torch chose."""
        store.set(f"node/{rank}", self.bootstrap.node.to_json())
        texts = store.multi_get([f"node/{other}" for other in range(num_nodes)])
        nodes = [NodeInfo.from_json(text) for text in texts]
        node_ranks = [num_nodes if node.node_rank is None else node.node_rank for node in nodes]
        order = sorted(range(num_nodes), key=lambda n: (node_ranks[n], n))
        self.nodes = tuple(nodes[n] for n in order)
        if self._is_static and sorted(node_ranks) != list(range(num_nodes)):
            listing = ", ".join(f"{node.node_rank} on {node.name}" for node in self.nodes)
            raise UsageError(
                f"invalid --node-rank: expected 0 to {num_nodes - 1}, each on one machine, got {listing}"
            )
        return order.index(rank)

    def _open_round_store(self, store: Store, rank: int) -> RendezvousStoreInfo:
        """Serve the store of this round on the first node, and return its address on all nodes."""
        if rank == 0:
            # It listens before the port is published, so that no other program can take the port.
            self._round_store = served = serve_store(open_listener(self.bootstrap.address))
            store.set("master", json.dumps([served.host, served.port]))
        return RendezvousStoreInfo(*json.loads(store.get("master")))

    def publish_success(self, number: int, speeds: str) -> bool:
        """Publish once that the processes of this node have succeeded in a round; return True if those of all nodes have.

        Args:
            number: The round.
            speeds: The speeds of the ranks of this node, for all nodes.
        """
        if not self._has_succeeded:
            self.bootstrap.set_value(f"round/{number}/speeds/{self.bootstrap.node.id}", speeds)
        amount, self._has_succeeded = int(not self._has_succeeded), True
        count = self.bootstrap.store.add(self.bootstrap.get_key(f"round/{number}/succeeded"), amount)
        return int(count) >= len(self.nodes)

    def read_speeds(self, number: int) -> list[str | None]:
        """Return the speeds that each node has published once all have succeeded in a round."""
        return [self.bootstrap.get_value(f"round/{number}/speeds/{node.id}") for node in self.nodes]

    def _delay(self, seconds: float | tuple[float, float]) -> None:
        """Wait between two reads of the shared state, instead of torch; raise UsageError if this node can never take part."""
        if self.is_spare and not self._takes_spares and not self.bootstrap.is_host:
            raise UsageError(
                f"{self.bootstrap.node.name} cannot join: the run already has all {self.bootstrap.max_nodes} machines "
                f"({self.format_participants()}). Raise --nnodes on all machines, or use another --rdzv-id and "
                "--rdzv-endpoint for another run."
            )
        time.sleep(random.uniform(*seconds) if isinstance(seconds, tuple) else min(seconds, _POLL_S))  # noqa: S311

    def leave_round(self) -> None:
        """Leave the round, so that the others can meet without this node."""
        self._stop_heartbeats()
        self._op_executor.run(_RendezvousExitOp(), self._get_deadline(self._settings.timeout.join))

    def count_spares(self) -> int:
        """Return the number of nodes that wait for a place in the next round."""
        if self._is_static:  # each has a place of its own
            return 0
        self.is_closed()  # reads the shared state
        state = self._state_holder.state
        return len(state.redundancy_list | state.wait_list)

    def has_ended(self) -> bool:
        """Return True if the run has ended, or if no node takes part in it."""
        if self.is_closed() or self.bootstrap.get_value("ended"):
            return True
        state = self._state_holder.state
        return not (state.participants or state.wait_list or state.redundancy_list)

    def list_arrived(self) -> list[str]:
        """Return the names of the nodes that have joined this round."""
        state = self._state_holder.state
        # The waiting thread replaces the state, and never changes it.
        is_in_round = not state.complete or self._this_node in state.participants
        entries = sorted(state.participants if is_in_round else state.wait_list)
        nodes = [node for entry in entries if (node := self.bootstrap.get_node(entry.addr))]
        if len(nodes) > len(self.arrived):
            self.arrived = tuple(nodes)
        return [node.name for node in nodes]

    def list_missing(self) -> list[str]:
        """Return the ranks of missing nodes; empty if the ranks are not fixed by --node-rank or a scheduler."""
        low, high = self.bootstrap.min_nodes, self.bootstrap.max_nodes
        if low != high or self.bootstrap.node.node_rank is None:
            return []
        present = {node.node_rank for node in self.arrived}
        return [f"node_rank {rank}" for rank in range(high) if rank not in present]

    def format_missing_nodes(self) -> str:
        """Return the message for a rendezvous that did not complete in time."""
        bootstrap, arrived = self.bootstrap, self.arrived or (self.bootstrap.node,)
        names = ", ".join(node.name for node in arrived)
        missing = ", ".join(self.list_missing())
        return (
            f"{len(arrived)} of {count_machines(bootstrap.min_nodes)} joined ({names}) within rdzv_timeout; "
            f"{bootstrap.min_nodes - len(arrived)} missing{': ' + missing if missing else ''}. Start the same command there, "
            f"with the same --rdzv-endpoint {bootstrap.endpoint} and --rdzv-id."
        )

    def format_participants(self) -> str:
        """Return the names of the nodes of the complete round."""
        entries = sorted(self._state_holder.state.participants)
        return ", ".join(node.name for entry in entries if (node := self.bootstrap.get_node(entry.addr)))

    def describe_lost(self) -> str:
        """Return the nodes of this round that do not respond any more, with the reason; empty without such nodes."""
        with self._heartbeat_lock:
            state = self._state_holder.state
            alive = {entry.addr for entry in state.participants}
            is_changing = bool(state.wait_list) or state.closed or not state.complete
        absent = [node for node in self.nodes if node.id not in alive]
        if is_changing or not absent:
            self._absent_since = None
            return ""
        self._absent_since = self._absent_since or time.monotonic()
        return self._format_lost(absent) if time.monotonic() - self._absent_since > _ABSENT_S else ""

    def describe_left(self, before: Sequence[NodeInfo]) -> str:
        """Return the nodes of the round before that are not in this one, with the reason; empty without such nodes."""
        present = {node.id for node in self.nodes}
        return self._format_lost([node for node in before if node.id not in present])

    def _format_lost(self, nodes: Sequence[NodeInfo]) -> str:
        reasons = {node.name: self.bootstrap.get_departure(node) for node in nodes}
        no_response = "does not respond: its launcher exited, the machine is down, or the network failed"
        return "; ".join(
            f"{name}: {why}" if why else f"{name} {no_response}" for name, why in reasons.items()
        )

    def read_heartbeats(self) -> dict[str, object]:
        """Return the newest heartbeat of each node of this round, by its id."""
        self.is_closed()  # reads the shared state
        state = self._state_holder.state
        return {entry.addr: state.last_heartbeats.get(entry) for entry in state.participants}

    def describe_departed(self, before: Mapping[str, object]) -> str:
        """Return the nodes that have left this round, or whose heartbeat is that of `before`; empty without such nodes."""
        heartbeats, own = self.read_heartbeats(), self.bootstrap.node
        silent = {node for node in self.nodes if heartbeats.get(node.id) in {None, before.get(node.id)}}
        return self._format_lost(
            [node for node in self.nodes if node in silent - {own} or self.bootstrap.get_departure(node)]
        )


class SingleNodeRendezvous(StaticTCPRendezvous):
    """Rendezvous of one node, complete at once, with a separate store on loopback for each attempt.

    torch's c10d rendezvous waits up to 0.3 s for other nodes, and its store listens on all interfaces.
    """

    def __init__(self, bootstrap: BootstrapStore, run_id: str) -> None:
        super().__init__(bootstrap.address, 0, rank=0, world_size=1, run_id=run_id, timeout=0)
        self.bootstrap = bootstrap
        self.round = 0

    @override
    def next_rendezvous(self) -> RendezvousInfo:
        self.round += 1
        self._store = store = serve_store(open_listener(self.master_addr))
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(store.host, store.port))


def format_arrivals(
    arrived: Sequence[str], min_nodes: int, max_nodes: int, remaining_s: float, missing: Sequence[str] = ()
) -> str:
    """Return a line with the nodes that have joined, the number and ranks of missing ones, and the seconds left."""
    names = ", ".join(arrived) or "none"
    num_missing = min_nodes - len(arrived)
    if min_nodes == max_nodes:
        joined = f"{len(arrived)} of {count_machines(max_nodes)} joined ({names})"
    else:
        joined = f"{count_machines(len(arrived))} joined ({names}) for a run of {min_nodes} to {max_nodes}"
    if num_missing <= 0:
        return f"{joined}; starting{' soon, unless more join' if len(arrived) < max_nodes else ''}"
    ranks = f": {', '.join(missing)}" if missing else ""
    return f"waiting: {joined}, {num_missing} missing{ranks}; {max(0, round(remaining_s))} s left"


def count_machines(number: int) -> str:
    """Return a number of machines as text."""
    return f"{number} machine{'' if number == 1 else 's'}"
