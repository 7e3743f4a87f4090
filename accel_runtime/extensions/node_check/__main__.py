"""The node check of one rank: `__main__.py quick|full HOST PORT PREFIX LOG_FOLDER`, with the variables of the rank.

Run by path in a process of its own, which can be killed if a device or a collective hangs. It publishes facts in the store at
HOST:PORT below PREFIX, and prints nothing.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):  # noqa: PTH100, PTH120
    # Python sets it for a script.
    del sys.path[0]
# isort: split
import socket
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch

from accel_runtime.environment.settings import Settings
from accel_runtime.environment.topology import Topology
from accel_runtime.extensions.node_check.facts import CheckLimits, FactsBoard, LinkFacts, get_poll_interval
from accel_runtime.extensions.node_check.machine import measure_node
from accel_runtime.extensions.node_check.measurements import (
    LinkRank,
    build_rounds,
    measure_device,
    measure_link,
)
from accel_runtime.extensions.node_check.reachability import Listener, PeerAddress, find_address, reach_peers
from accel_runtime.extensions.node_check.verdict import find_broken_pairs
from accel_runtime.foundation.torch_internals import PrefixStore, TCPStore

__all__ = ["Check", "main"]

_STORE_S = 60.0
_LOOPBACK = "127.0.0.1"
"""Address of a single node, which nobody else needs to reach."""


@dataclass(frozen=True)
class Check:
    """One rank of a check."""

    board: FactsBoard
    store: Any
    """The store for process groups."""
    limits: CheckLimits
    rank: int
    world_size: int
    node: int
    num_nodes: int
    is_first: bool
    """True for the first rank of its node."""
    device: torch.device
    backend: str
    log_folder: str
    environ: dict[str, str]

    def run(self) -> None:
        """Measure the device, the machine, the connections and the links, and publish each."""
        address = find_address(self.environ) if self.num_nodes > 1 else _LOOPBACK
        with closing(Listener(self.node, address)) as listener:
            peers, members = self._meet(address, listener.port)
            self.board.publish_device(measure_device(self.rank, self.node, self.device, self.limits))
            self.board.count(f"computed/{self.node}", 1)
            if self.is_first:
                facts = reach_peers(self.node, peers)
                log_folder = self.log_folder or None
                has_gpu = self.device.type == "cuda"
                self.board.publish_node(
                    measure_node(self.node, log_folder, os.getcwd(), facts, has_gpu=has_gpu)  # noqa: PTH109
                )
            nodes, broken = self._choose_links(members)
            if self.node in nodes:
                self._measure_links(nodes, broken, members)
        self.board.publish_end(self.node)

    def _meet(self, address: str, port: int) -> tuple[list[PeerAddress], dict[int, list[int]]]:
        """Wait for the other ranks, and return the nodes that have started, and their ranks; the same for all."""
        board = self.board
        own = PeerAddress(self.node, socket.gethostname(), address, port)
        board.put(f"rank/{self.rank}", {"node": self.node, "address": asdict(own) if self.is_first else None})
        board.count(f"started/{self.node}", 1)
        board.count("started", 1)
        self._wait("started", self.world_size, self.limits.start_s)
        members, addresses = board.agree("members", self._list_members, leads=self.rank == 0)
        return [PeerAddress(**each) for each in addresses], {int(node): of for node, of in members}

    def _list_members(self) -> tuple[list[Any], list[Any]]:
        """Return the nodes whose ranks have all started, with their ranks, and the addresses of these nodes."""
        entries = {rank: self.board.get(f"rank/{rank}") for rank in range(self.world_size)}
        ranks: dict[int, list[int]] = {}
        for rank, entry in entries.items():
            if entry:
                ranks.setdefault(entry["node"], []).append(rank)
        members = {node: of for node, of in ranks.items() if self.board.get(f"size/{node}") == len(of)}
        addresses = [entry["address"] for entry in entries.values() if entry and entry["address"]]
        return sorted(members.items()), [each for each in addresses if each["node"] in members]

    def _wait(self, name: str, count: int, limit: float) -> None:
        """Wait until a counter has reached a number; once it has reached most of it, only `straggler_s` seconds more."""
        end = time.monotonic() + limit
        straggler_end = None
        while (reached := self.board.count(name)) < count and time.monotonic() < end:
            if straggler_end is None and reached >= (count + 1) // 2:
                straggler_end = time.monotonic() + self.limits.straggler_s
                end = min(end, straggler_end)
            time.sleep(get_poll_interval(self.world_size))

    def _choose_links(self, members: dict[int, list[int]]) -> tuple[list[int], set[tuple[int, int]]]:
        """Wait for the facts of all nodes, and return those that can be measured, and their broken pairs; the same for all."""
        if self.is_first:
            self.board.count("checked", 1)
        self._wait("checked", len(members), self.limits.straggler_s)
        leads = self.is_first and self.node == min(members, default=0)
        nodes, broken = self.board.agree("chosen", lambda: self._list_links(members), leads=leads)
        return nodes, {(first, second) for first, second in broken}

    def _list_links(self, members: dict[int, list[int]]) -> tuple[list[int], list[Any]]:
        """Return the nodes that can be measured, and their broken pairs."""
        facts = self.board.read(self.num_nodes, self.world_size, 0.0)
        # A device that fails would fail its partners too.
        failed = {device.node for device in facts.devices if device.error and device.tflops is None}
        nodes = [
            node for node in members if node in facts.nodes and node not in failed | facts.failures.keys()
        ]
        return nodes, sorted(find_broken_pairs(facts))

    def _measure_links(
        self, nodes: list[int], broken: set[tuple[int, int]], members: dict[int, list[int]]
    ) -> None:
        """Measure the links of this node to its partners, and those of all nodes together."""
        pairs = [
            pair for each in build_rounds(nodes, self.limits.rounds) for pair in each if self.node in pair
        ]
        groups: list[tuple[int, ...]] = [pair for pair in pairs if tuple(sorted(pair)) not in broken]
        if not broken and (len(nodes) == 1 or len(nodes) == self.num_nodes > 2):  # noqa: PLR2004 - a pair is measured
            groups.append(tuple(nodes))
        links = [self._measure_link(group, members) for group in groups]
        if self.is_first:
            self.board.publish_links(self.node, [link for link in links if link])

    def _measure_link(self, nodes: tuple[int, ...], members: dict[int, list[int]]) -> LinkFacts | None:
        """Return the link of some nodes; None for a single rank."""
        ranks = tuple(sorted(rank for node in nodes for rank in members[node]))
        if len(ranks) == 1:
            return None
        store = PrefixStore(
            "link/" + ("-".join(map(str, nodes)) if len(nodes) < self.num_nodes else "all"), self.store
        )
        return measure_link(nodes, LinkRank(store, ranks, self.rank, self.device, self.backend), self.limits)


def main(arguments: list[str], environ: dict[str, str]) -> None:
    """Run the check of this rank."""
    extent, host, port, prefix, log_folder = arguments
    topology, settings = Topology.from_env(environ), Settings.from_env(environ)
    # A time-out raises an error, instead of ending the process.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    has_gpu = settings.device in {"auto", "cuda"} and torch.cuda.is_available()
    # Ranks may share a GPU, as for the Accelerator.
    number = topology.local_rank % max(1, torch.cuda.device_count())
    device = torch.device("cuda", number) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    chosen = settings.process_group_backend
    backend = chosen if chosen in {"gloo", "nccl"} else "nccl" if has_gpu else "gloo"
    timeout = timedelta(seconds=_STORE_S)
    store: Any = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    node = int(environ.get("GROUP_RANK", "0"))
    Check(
        board=FactsBoard(store, prefix),
        store=PrefixStore(prefix, store),
        limits=CheckLimits.of(quick=extent == "quick"),
        rank=topology.rank,
        world_size=topology.world_size,
        node=node,
        num_nodes=int(environ.get("GROUP_WORLD_SIZE", "1")),
        is_first=topology.local_rank == 0,
        device=device,
        backend=backend,
        log_folder=log_folder,
        environ=environ,
    ).run()


if __name__ == "__main__":
    main(sys.argv[1:], dict(os.environ))
    # Threads of gloo may still release tensors, which fails while the interpreter ends.
    os._exit(0)
