"""What the hosts of a training job print, read from CloudWatch Logs: every line once, each behind its host's name."""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError
from typing_extensions import override

from accel_cli.jobs.base import Job, Log
from accel_cli.launchers.sagemaker.aws import code

if TYPE_CHECKING:
    from accel_cli.launchers.sagemaker.aws import Account

__all__ = ["GROUP", "CloudWatchLog"]

GROUP = "/aws/sagemaker/TrainingJobs"
"""Where all training jobs of an account print to; it is there from the account's first line on."""
_LAST = re.compile(r"accel: (\S+) ended with exit code \d+")
"""The last line of a host."""
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


@dataclass
class _Stream:
    """What one host prints in one attempt, and how far that was read."""

    name: str
    host: str
    began: int
    token: str | None = None
    """Where the next page is."""
    time: int = 0
    """When the last line came that was read."""
    same: int = 0
    """How many of the lines that were read came at that time."""
    skip: int = 0
    """How many lines that come next were read before."""
    ended: bool = False
    """Whether its last line was read."""


_Line = tuple[int, bytes]
"""When it came, and what is shown."""


class CloudWatchLog(Log):
    """The streams of one job: those there are, and those that come while it is read."""

    def __init__(self, account: Account, name: str, *, coloured: bool = False) -> None:
        self._account, self._name, self._coloured = account, name, coloured
        self._streams: dict[str, _Stream] = {}
        self._colours: dict[str, int] = {}
        self._fetched: list[list[_Line]] = []

    @override
    def read(self) -> bytes:
        with self._account.speaking(f"read the log of job {self._name}"):
            self._find()
            for stream in self._streams.values():
                # Kept before the next question: a network that drops then loses nothing.
                self._fetched.append(self._next(stream))
        fetched, self._fetched = self._fetched, []
        return b"".join(line for _, line in heapq.merge(*fetched, key=itemgetter(0)))

    @override
    def whole(self, job: Job) -> bool:
        newest = {stream.host: stream for stream in sorted(self._streams.values(), key=lambda one: one.began)}
        return sum(stream.ended for stream in newest.values()) >= job.hosts

    def _find(self) -> None:
        """Note the streams that are there now; a host has one, and another for every restart."""
        pages = self._client.get_paginator("describe_log_streams")
        try:
            for page in pages.paginate(logGroupName=GROUP, logStreamNamePrefix=f"{self._name}/"):
                for said in page["logStreams"]:
                    self._note(said["logStreamName"])
        except ClientError as error:
            if code(error) != "ResourceNotFoundException":
                raise

    def _note(self, stream: str) -> None:
        if stream in self._streams:
            return
        host, _, began = stream.removeprefix(f"{self._name}/").rpartition("-")
        host = host or began
        self._streams[stream] = _Stream(stream, host, int(began) if began.isdigit() else 0)
        self._colours.setdefault(host, _COLOURS[len(self._colours) % len(_COLOURS)])

    def _next(self, stream: _Stream) -> list[_Line]:
        """The next page of a stream that has lines; none if there are none yet."""
        while True:
            before = stream.token
            events = self._page(stream)
            if events or stream.token == before:
                return [(event["timestamp"], self._shown(stream.host, event["message"])) for event in events]

    def _page(self, stream: _Stream) -> list[dict[str, Any]]:
        """A page, which may be empty and yet not be the last."""
        where: dict[str, Any] = {"nextToken": stream.token} if stream.token else {"startTime": stream.time}
        try:
            said = self._client.get_log_events(
                logGroupName=GROUP, logStreamName=stream.name, startFromHead=True, **where
            )
        except ClientError as error:
            if code(error) != "InvalidParameterException" or stream.token is None:
                raise
            # A token holds for a day: the lines of the last moment that was read come again.
            stream.token, stream.skip = None, stream.same
            return self._page(stream)
        stream.token = said["nextForwardToken"]
        fresh = said["events"][stream.skip :]
        stream.skip = max(0, stream.skip - len(said["events"]))
        self._mark(stream, fresh)
        return list(fresh)

    @staticmethod
    def _mark(stream: _Stream, events: list[dict[str, Any]]) -> None:
        """Remember how far a stream was read."""
        if not events:
            return
        last = events[-1]
        same = sum(
            1 for _ in itertools.takewhile(lambda e: e["timestamp"] == last["timestamp"], reversed(events))
        )
        stream.same = same + (stream.same if same == len(events) and stream.time == last["timestamp"] else 0)
        stream.time = last["timestamp"]
        found = _LAST.fullmatch(last["message"].strip())
        stream.ended = found is not None and found[1] == stream.host

    def _shown(self, host: str, message: str) -> bytes:
        head = f"{host} | "
        if self._coloured:
            head = f"\x1b[{self._colours[host]}m{host} |\x1b[0m "
        return "".join(f"{head}{line}\n" for line in _lines(message)).encode(errors="replace")

    @property
    def _client(self) -> Any:
        return self._account.client("logs")


def _lines(message: str) -> Iterator[str]:
    # Not splitlines: a carriage return is how a progress bar moves.
    yield from message.removesuffix("\n").split("\n")
