"""Records of a hang from the ranks of all nodes, exchanged through the store of the run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import DistError

from accel_cli.runner.bootstrap import BootstrapStore, NodeInfo
from accel_cli.runner.collectives import Collective, GroupTrace

__all__ = ["HangExchange", "HangRecord"]

_WAIT_S, _POLL_S = 6.0, 0.1
"""Seconds until nodes that do not answer are left out: another node looks for requests once a second, and asks its ranks for three."""
_CHECK_S = 1.0
_MAX_COLLECTIVES = 32
"""The newest collectives of a group that are sent to other nodes."""


@dataclass(frozen=True)
class HangRecord:
    """The collectives of ranks, and their lines."""

    traces: Mapping[int, Mapping[str, GroupTrace]] = field(default_factory=dict)
    """The records of the ranks, by rank and group."""
    locations: Mapping[int, str] = field(default_factory=dict)
    """The line of the script at which each rank is, if it is known."""
    activity: Mapping[str, str] = field(default_factory=dict)
    """What other nodes do that may be work, by their host."""

    def merge(self, other: HangRecord) -> HangRecord:
        """Return the records of both."""
        return HangRecord(
            {**self.traces, **other.traces},
            {**self.locations, **other.locations},
            {**self.activity, **other.activity},
        )

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON data, with the newest collectives only."""
        traces = {
            rank: {
                name: {
                    "ranks": trace.ranks,
                    "collectives": [
                        (number, each.name, each.sizes, each.is_completed)
                        for number, each in sorted(trace.collectives.items())[-_MAX_COLLECTIVES:]
                    ],
                }
                for name, trace in groups.items()
            }
            for rank, groups in self.traces.items()
        }
        return {"traces": traces, "locations": dict(self.locations)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], host: str) -> HangRecord:
        """Return the record that `to_json` wrote on a node."""
        traces = {
            int(rank): {
                name: GroupTrace(
                    tuple(trace["ranks"]),
                    {
                        number: Collective(call, tuple(map(tuple, sizes)), is_completed)
                        for number, call, sizes, is_completed in trace["collectives"]
                    },
                )
                for name, trace in groups.items()
            }
            for rank, groups in data["traces"].items()
        }
        locations = {int(rank): f"{place} on {host}" for rank, place in data["locations"].items()}
        return cls(
            traces, locations, {host: f"{activity} on {host}"} if (activity := data.get("activity")) else {}
        )


class HangExchange:
    """Shares the records of a hang among the nodes of a round: one that finds a hang asks the others.

    Args:
        bootstrap: The store of the run.
        number: The round.
        nodes: All nodes of the round; none if this is the only one.
        read: Returns the record of the ranks of this node.
        describe_activity: Describes what the ranks of this node do that may be work; empty if they seem to hang.
    """

    def __init__(
        self,
        bootstrap: BootstrapStore,
        number: int,
        nodes: Sequence[NodeInfo],
        read: Callable[[], HangRecord],
        describe_activity: Callable[[], str],
    ) -> None:
        self._bootstrap, self._read, self._describe_activity = bootstrap, read, describe_activity
        self._prefix = f"round/{number}/hang"
        self._others = {node.id: node.host for node in nodes if node.id != bootstrap.node.id}
        self._answered = 0
        self._next_check = time.monotonic() + _CHECK_S

    def answer(self) -> None:
        """Publish the record of this node if another one has asked for it since the last call, at most once a second."""
        now = time.monotonic()
        if not self._others or now < self._next_check:
            return
        self._next_check = now + _CHECK_S
        asked = self._count(0)
        if asked > self._answered:
            self._publish(self._read(), asked)

    def collect(self, own: HangRecord) -> HangRecord:
        """Return the records of all nodes, with that of this node; a node that does not answer in time has none."""
        records = own
        with suppress(DistError):  # the store is lost
            if self._others:
                asked = self._count(1)
                self._publish(own, asked)
                for answer in self._wait_for_answers(own, asked):
                    records = records.merge(answer)
        return records

    def _wait_for_answers(self, own: HangRecord, asked: int) -> Iterator[HangRecord]:
        waiting = dict(self._others)
        deadline = time.monotonic() + _WAIT_S
        while waiting and time.monotonic() < deadline:
            for node, host in list(waiting.items()):
                text = self._bootstrap.get_value(f"{self._prefix}/{node}")
                answer = json.loads(text) if text else {"asked": 0}
                if answer["asked"] >= asked:
                    del waiting[node]
                    yield HangRecord.from_json(answer, host)
            if (newest := self._count(0)) > self._answered:
                # Another node that has found the same hang waits for this one.
                self._publish(own, newest)
            time.sleep(_POLL_S)
        for host in waiting.values():
            yield HangRecord(activity={host: f"the launcher on {host} does not answer"})

    def _publish(self, record: HangRecord, asked: int) -> None:
        self._answered = asked
        text = json.dumps({"asked": asked, "activity": self._describe_activity(), **record.to_json()})
        self._bootstrap.set_value(f"{self._prefix}/{self._bootstrap.node.id}", text)

    def _count(self, amount: int) -> int:
        return int(self._bootstrap.store.add(self._bootstrap.get_key(f"{self._prefix}/asked"), amount))
