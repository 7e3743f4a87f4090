"""The beginning of every collective: all ranks say in one small exchange what they are about to do, and see that it is the same."""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch

from accel_runtime.exchange.callsite import CallSite, call_site
from accel_runtime.exchange.raw import memory
from accel_runtime.exchange.structure import Spec, described
from accel_runtime.heartbeat import heartbeat

__all__ = [
    "ROOM",
    "SLOT",
    "Agreement",
    "Call",
    "Met",
    "MismatchError",
    "RankLostError",
    "SilenceError",
    "StallError",
    "Wire",
    "Write",
    "filled",
    "here",
]

SLOT = 4096
"""Bytes that every rank sends at the beginning of a collective: docs/design/agreement.md has the measurements."""
_HEAD = 32
_SAID = struct.Struct("=4q")
_LOG = logging.getLogger("accel_runtime.exchange")
ROOM = SLOT - _HEAD
"""Bytes of data that travel with the agreement itself."""


class MismatchError(RuntimeError):
    """The ranks called different collectives, or with data that do not fit; the message lists them."""


class StallError(RuntimeError):
    """Some rank did not come to a collective in time; the message names it."""


class RankLostError(StallError):
    """Some rank ended, or cannot be reached any more; the message names it."""


class SilenceError(RuntimeError):
    """What a wire raises: the others cannot be reached any more.

    Args:
        news: Where each rank waits that could still say so.
        timed_out: Whether somebody waited as long as one may; else a connection was lost.
    """

    def __init__(self, news: Mapping[int, str], *, timed_out: bool) -> None:
        super().__init__("the other ranks cannot be reached any more")
        self.news = news
        self.timed_out = timed_out


class Wire(Protocol):
    """How bytes on the CPU get from rank to rank."""

    def swap(self, slot: memoryview, where: Callable[[], str]) -> bytearray:
        """Every rank's slot.

        Args:
            slot: `SLOT` bytes.
            where: Says what this rank is doing, for the others to hear if it fails.

        Returns:
            `world_size * SLOT` bytes in rank order, new memory.

        Raises:
            SilenceError: Somebody did not come in time, or is gone.
        """

    def transfer(
        self,
        outgoing: Mapping[int, torch.Tensor],
        incoming: Mapping[int, torch.Tensor],
        where: Callable[[], str],
    ) -> None:
        """Send bytes to some ranks, receive from some; sizes must be agreed.

        Args:
            outgoing: What each rank gets of this one, `[n]` bytes, contiguous.
            incoming: Room for what this one gets of each rank, `[n]` bytes, contiguous.
            where: As for `swap`.

        Raises:
            SilenceError: Somebody is gone.
        """


class Call(NamedTuple):
    """What has to be equal on all ranks."""

    operation: str
    site: CallSite
    structure: tuple[Any, ...] = ()
    """Containers, keys and specs, as `structure.survey` gives them."""
    free: str = ""
    """What of a shape may differ: `first` the first dimension, `sizes` all of them, nothing."""
    anywhere: bool = False
    """Whether ranks may call it from different lines without a warning."""

    def __str__(self) -> str:
        return f"{self.operation} at {self.site}"


class Met(NamedTuple):
    """What the ranks brought to a collective they agree on."""

    same: bool
    """Whether nothing differs, shapes included."""
    sizes: list[int]
    """How many bytes each rank had for the others."""
    slots: bytearray
    """Every rank's slot."""
    large: Sequence[torch.Tensor] | torch.Tensor = ()
    """Every rank's bytes, where one had too many for its slot; empty for those whose bytes fit."""

    def view(self, rank: int) -> memoryview:
        """The bytes of one rank."""
        size = self.sizes[rank]
        if size > ROOM:
            return memory(self.large[rank])
        start = rank * SLOT + _HEAD
        return memoryview(self.slots)[start : start + size]

    @property
    def blobs(self) -> Sequence[torch.Tensor] | torch.Tensor:
        """Every rank's bytes in rank order; `[world_size, n]` where all have the same number."""
        size, count = self.sizes[0], len(self.sizes)
        alike = self.sizes.count(size) == count
        if alike and size > ROOM:
            return self.large
        slots = torch.frombuffer(self.slots, dtype=torch.uint8).view(count, SLOT)
        if alike:
            return slots[:, _HEAD : _HEAD + size]
        return [
            self.large[rank] if size > ROOM else slots[rank, _HEAD : _HEAD + size]
            for rank, size in enumerate(self.sizes)
        ]


Write = Callable[[memoryview], object]
"""Fills the bytes it is given."""


class Agreement:
    """The exchanges of this rank with the others, one after the other.

    Args:
        wire: Carries them.
        rank: Of this process.
        size: How many there are.
    """

    def __init__(self, wire: Wire, rank: int, size: int) -> None:
        self._wire, self.rank, self.size = wire, rank, size
        self._slot = memoryview(bytearray(SLOT))
        self._head = self._slot[:_HEAD].cast("q")
        self._last: Call | None = None
        self._told: set[tuple[int, ...]] = set()
        """Lines of all ranks that were called as one collective, and of which a warning was given."""
        self._beat = heartbeat()

    def exchange(
        self, call: Call, size: int = 0, write: Write | None = None, *, failure: str | None = None
    ) -> Met:
        """Come to an agreement with all ranks, and give them some bytes.

        Args:
            call: What this rank is about to do.
            size: How many bytes it has for the others; may differ.
            write: Puts them where they travel.
            failure: Why this rank cannot take part; all ranks raise then.

        Raises:
            MismatchError: The ranks do different things. Raised on every rank, and all can go on.
            StallError: A rank did not come in time, or is gone.
        """
        strict, loose, line = _digests(call) if failure is None else (-1, -1, 0)
        self._head[0], self._head[1], self._head[2], self._head[3] = strict, loose, size, line
        inline = size <= ROOM
        if write and inline and size:
            write(self._slot[_HEAD : _HEAD + size])
        if self._beat is not None:
            self._beat.enter(call.operation, call.site)
        slots = self._swap(call)
        if self._beat is not None:
            self._beat.leave()
        heads = [_SAID.unpack_from(slots, rank * SLOT) for rank in range(self.size)]
        self._check(heads, call, failure)
        self._last = call
        sizes = [head[2] for head in heads]
        large = self._large(sizes, write, call) if max(sizes) > ROOM else ()
        return Met(_equal(heads, 0), sizes, slots, large)

    def _check(self, heads: Sequence[Sequence[int]], call: Call, failure: str | None) -> None:
        agreed = _equal(heads, 0) or _equal(heads, 1)
        if agreed and failure is None and heads[0][0] != -1:
            lines = tuple(head[3] for head in heads)
            if lines.count(lines[0]) != len(lines) and lines not in self._told:
                self._told.add(lines)
                self._warn_of_lines(call)
            return
        data = f" of {described(call.structure)}" if call.structure else ""
        mine = f"{call}{data}" + (f": {failure}" if failure else "")
        texts = self._texts(mine)
        calls = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
        raise MismatchError(f"the ranks do not agree on this collective; each called:\n{calls}")

    def _warn_of_lines(self, call: Call) -> None:
        """Warn that ranks make one call from different lines; all ranks call this together."""
        calls = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(self._texts(str(call))))
        if self.rank == 0:
            _LOG.warning(
                "The ranks called one collective from different lines of the script. Their data fit, but may be of different "
                "steps or metrics: call it from one line, after the branch.\n%s",
                calls,
            )

    def _texts(self, mine: str) -> list[str]:
        data = mine.encode()
        met = self.exchange(Call("describing", _NOWHERE), len(data), filled(data))
        return [str(met.view(rank), "utf-8") for rank in range(self.size)]

    def _large(
        self, sizes: Sequence[int], write: Write | None, call: Call
    ) -> Sequence[torch.Tensor] | torch.Tensor:
        own = torch.empty(sizes[self.rank] if sizes[self.rank] > ROOM else 0, dtype=torch.uint8, device="cpu")
        if write and len(own):
            write(memory(own))
        return self.share(own, [size if size > ROOM else 0 for size in sizes], call)

    def share(
        self, own: torch.Tensor, sizes: Sequence[int], call: Call
    ) -> Sequence[torch.Tensor] | torch.Tensor:
        """Every rank's bytes, of sizes all have agreed on; `[world_size, n]` where they are equal.

        Args:
            own: `[n]` bytes of this rank.
            sizes: How many each rank has.
            call: What for.
        """
        equal = all(size == sizes[0] for size in sizes)
        rooms: Sequence[torch.Tensor] | torch.Tensor = (
            torch.empty(self.size, sizes[0], dtype=torch.uint8, device="cpu")
            if equal
            else [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
        )
        rooms[self.rank].copy_(own)
        others = [rank for rank in range(self.size) if rank != self.rank]
        self._transfer(dict.fromkeys(others, own), {rank: rooms[rank] for rank in others}, call)
        return rooms

    def deal(self, own: Sequence[torch.Tensor], room: torch.Tensor, source: int, call: Call) -> None:
        """Bytes of the rank `source` to every other, to each its own.

        Args:
            own: On `source`, `[n]` bytes for each rank; elsewhere unused.
            room: Elsewhere, where the bytes go.
            source: Who deals.
            call: What for.
        """
        if self.rank != source:
            self._transfer({}, {source: room}, call)
        else:
            self._transfer({rank: data for rank, data in enumerate(own) if rank != source}, {}, call)

    def _swap(self, call: Call) -> bytearray:
        try:
            return self._wire.swap(self._slot, call.__str__)
        except SilenceError as error:
            raise self._stalled(error, call) from None

    def _transfer(
        self, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor], call: Call
    ) -> None:
        try:
            self._wire.transfer(outgoing, incoming, call.__str__)
        except SilenceError as error:
            raise self._stalled(error, call) from None

    def _stalled(self, error: SilenceError, call: Call) -> StallError:
        last = f"it was last in {self._last}" if self._last else "it has been in no collective yet"
        missing = [rank for rank in range(self.size) if rank not in error.news]
        lines = "\n".join(
            f"  rank {rank}: "
            + (f"waits in {error.news[rank]}" if rank in error.news else f"is missing; {last}")
            for rank in range(self.size)
        )
        who = f"rank {', '.join(map(str, missing))}" if missing else "a rank"
        if error.timed_out:
            return StallError(f"{who} did not come to {call} in time:\n{lines}")
        return RankLostError(f"{who} ended, or lost its connection, and {call} cannot complete:\n{lines}")


def filled(data: bytes | memoryview) -> Write:
    """What writes these bytes."""

    def write(room: memoryview) -> None:
        room[:] = data

    return write


_NOWHERE = CallSite("", 0, "")


def _equal(heads: Sequence[Sequence[int]], column: int) -> bool:
    first = heads[0][column]
    return all(head[column] == first for head in heads)


@lru_cache(maxsize=1024)
def _digests(call: Call) -> tuple[int, int, int]:
    """Of all that must be equal, of the same without what of the shapes is free, and of the line."""
    loose = tuple(
        item.freed(call.free) if isinstance(item, Spec) and call.free else item for item in call.structure
    )
    strict, free = (_digest(f"{call.operation}\n{some}") for some in (call.structure, loose))
    return strict, free, 0 if call.anywhere else _digest(str(call.site))


def _digest(text: str) -> int:
    # One bit less, so that -1 is nobody's.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def here(operation: str, structure: tuple[Any, ...] = (), *, free: str = "", anywhere: bool = False) -> Call:
    """The call that is under way, from the line of the user's code it came from."""
    return Call(operation, call_site(), structure, free, anywhere)
