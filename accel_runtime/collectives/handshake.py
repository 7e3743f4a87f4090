"""The handshake before every collective, in which all ranks compare what they are about to do, and objects sent with it.

Pickled bytes come from ranks over an authenticated connection, never from a file.
"""

from __future__ import annotations

import hashlib
import io
import logging
import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from accel_runtime.collectives.signatures import add_arguments
from accel_runtime.collectives.transport import SLOT, ConnectionLostError, Transport
from accel_runtime.environment.text import decode_text, encode_text
from accel_runtime.foundation.nested import TensorSpec, describe_structure, find_special_kind
from accel_runtime.foundation.tensor_bytes import tensor_bytes
from accel_runtime.observe.call_sites import CallSite, call_site
from accel_runtime.observe.heartbeat import heartbeat

__all__ = [
    "PAYLOAD",
    "SUMMARY_WORLD_SIZE",
    "CollectiveCall",
    "Handshake",
    "MismatchError",
    "ObjectGroup",
    "RankLostError",
    "StallError",
    "Write",
    "all_gather_objects",
    "build_writer",
    "call_at_site",
    "deserialize_object",
    "scatter_objects",
    "serialize_object",
]


_HEAD = 32
_HEAD_STRUCT = struct.Struct("=4q")
_LOG = logging.getLogger("accel_runtime.collectives")
SUMMARY_WORLD_SIZE = 32
"""Above this world size ranks compare a summary of 64 bytes before slots; docs/design/handshake.md has the measurements."""
PAYLOAD = SLOT - _HEAD
"""Bytes of data that fit into the handshake itself."""


class MismatchError(RuntimeError):
    """The ranks called different collectives, or with incompatible data; the message lists the calls."""


class StallError(RuntimeError):
    """A rank did not join a collective in time; the message names it."""


class RankLostError(StallError):
    """A rank ended or lost its connection; the message names it."""


class CollectiveCall(NamedTuple):
    """A collective call; must be equal on all ranks."""

    operation: str
    site: CallSite
    structure: tuple[Any, ...] = ()
    """Containers, keys and specs, as in `NestedData.structure`."""
    free: str = ""
    """Dimensions that may differ: `first`, all `sizes`, or none."""
    anywhere: bool = False
    """Allow ranks to call from different lines without a warning."""

    def __str__(self) -> str:
        return f"{self.operation} at {self.site}"


class HandshakeResult(NamedTuple):
    """The data of all ranks in a handshake."""

    identical: bool
    """True if nothing differs, shapes included."""
    sizes: list[int]
    """The number of bytes of each rank."""
    slots: bytearray
    """The slots of all ranks."""
    large: Sequence[torch.Tensor] | torch.Tensor = ()
    """The bytes of each rank if some do not fit into a slot; empty for ranks whose bytes fit."""

    def view(self, rank: int) -> memoryview:
        """Return the bytes of one rank."""
        size = self.sizes[rank]
        if size > PAYLOAD:
            return tensor_bytes(self.large[rank])
        start = rank * SLOT + _HEAD
        return memoryview(self.slots)[start : start + size]

    @property
    def payloads(self) -> Sequence[torch.Tensor] | torch.Tensor:
        """The bytes of all ranks by rank; `[world_size, n]` if all sizes are equal."""
        size, count = self.sizes[0], len(self.sizes)
        if not self.slots:
            return torch.empty(count, 0, dtype=torch.uint8, device="cpu")
        equal_sizes = self.sizes.count(size) == count
        if equal_sizes and size > PAYLOAD:
            return self.large
        slots = torch.frombuffer(self.slots, dtype=torch.uint8).view(count, SLOT)
        if equal_sizes:
            return slots[:, _HEAD : _HEAD + size]
        return [
            self.large[rank] if size > PAYLOAD else slots[rank, _HEAD : _HEAD + size]
            for rank, size in enumerate(self.sizes)
        ]


Write = Callable[[memoryview], object]
"""Fill the buffer it is given."""


class Handshake:
    """Run the handshakes of this rank, one after the other.

    Args:
        transport: Moves the bytes.
        rank: The rank of this process.
        size: The number of ranks.
        is_counted: If true, they count as progress of this process; those of another thread must not.
    """

    def __init__(self, transport: Transport, rank: int, size: int, *, is_counted: bool = True) -> None:
        self._transport, self.rank, self.size = transport, rank, size
        self._slot = memoryview(bytearray(SLOT))
        self._head = self._slot[:_HEAD].cast("q")
        self._last: CollectiveCall | None = None
        self._warned: set[tuple[int, ...]] = set()
        """Lines of all ranks that were called as one collective, and of which a warning was given."""
        self._heartbeat = heartbeat() if is_counted else None

    def exchange(  # noqa: PLR0913 - the last five have defaults
        self,
        call: CollectiveCall,
        size: int = 0,
        write: Write | None = None,
        *,
        failure: str | None = None,
        only_if_different: bool = False,
        to_first: bool = False,
    ) -> HandshakeResult:
        """Compare a call with all ranks and send them some bytes.

        Args:
            call: What this rank is about to do.
            size: The number of bytes of this rank; may differ between ranks.
            write: Fills the buffer for them.
            failure: Why this rank cannot take part; all ranks raise then.
            only_if_different: Send the bytes only if the calls differ in what may differ. In a small world they are sent
                anyway.
            to_first: Send bytes that do not fit into the handshake to the first rank only; the others have none of them.

        Raises:
            MismatchError: The calls differ. Raised on every rank, which all stay in step.
            StallError: A rank did not join in time or ended.
        """
        strict, loose, line = _digests(call) if failure is None else (-1, -1, 0)
        self._head[0], self._head[1], self._head[2], self._head[3] = strict, loose, size, line
        if self._heartbeat is not None:
            self._heartbeat.enter(call.operation, call.site)
        if self.size > SUMMARY_WORLD_SIZE and self._is_identical(call, 0 if only_if_different else size):
            if self._heartbeat is not None:
                self._heartbeat.exit()
            self._last = call
            return HandshakeResult(True, [0] * self.size, bytearray())
        inline = size <= PAYLOAD
        if write and inline and size:
            write(self._slot[_HEAD : _HEAD + size])
        try:
            slots = self._transport.all_gather_slots(self._slot)
        except BaseException as error:  # noqa: BLE001 - raised again, or replaced by a StallError
            raise self._fail(error, call) from None
        if self._heartbeat is not None:
            self._heartbeat.exit()
        heads = [_HEAD_STRUCT.unpack_from(slots, rank * SLOT) for rank in range(self.size)]
        self._check(heads, call, failure)
        self._last = call
        sizes = [head[2] for head in heads]
        large: Sequence[torch.Tensor] | torch.Tensor = ()
        if max(sizes) > PAYLOAD:
            own = torch.empty(0 if inline else size, dtype=torch.uint8, device="cpu")
            if write and not inline:
                write(tensor_bytes(own))
            transfer = self._gather_bytes if to_first else self.all_gather_bytes
            large = transfer(own, [each if each > PAYLOAD else 0 for each in sizes], call)
        return HandshakeResult(_all_equal(heads, 0), sizes, slots, large)

    def _is_identical(self, call: CollectiveCall, size: int) -> bool:
        """Return whether all ranks make this call from one line, and no rank has bytes for the others.

        Sends 64 bytes a round, whatever the world size. All ranks get the same answer.
        """
        own = (self._head[0], self._head[1], size, self._head[3])
        try:
            values = self._transport.all_reduce_min((*own, *(-value for value in own)))
        except BaseException as error:  # noqa: BLE001 - raised again, or replaced by a StallError
            raise self._fail(error, call) from None
        lowest, highest = values[:4], tuple(-value for value in values[4:])
        strict, line = 0, 3
        return lowest[strict] == highest[strict] != -1 and lowest[line] == highest[line] and highest[2] == 0

    def _check(self, heads: Sequence[Sequence[int]], call: CollectiveCall, failure: str | None) -> None:
        matches = _all_equal(heads, 0) or _all_equal(heads, 1)
        if matches and failure is None and heads[0][0] != -1:
            lines = tuple(head[3] for head in heads)
            if lines.count(lines[0]) != len(lines) and lines not in self._warned:
                self._warned.add(lines)
                self._warn_about_lines(call)
            return
        data = f" of {describe_structure(call.structure)}" if call.structure else ""
        calls = self._gather_text(f"{call}{data}" + (f": {failure}" if failure else ""), call)
        raise MismatchError(f"the ranks do not agree on this collective; each called:\n{calls}")

    def _warn_about_lines(self, call: CollectiveCall) -> None:
        """Warn that ranks make one call from different lines; collective."""
        calls = self._gather_text(str(call), call)
        if self.rank == 0:
            _LOG.warning(
                "The ranks called one collective from different lines of the script. Their data fit, but may be of different "
                "steps or metrics: call it from one line, after the branch.\n%s",
                calls,
            )

    def _gather_text(self, text: str, call: CollectiveCall) -> str:
        """Return a line for each rank with the text about its call; collective."""
        data = encode_text(text)
        report = CollectiveCall("comparison of calls", call.site, anywhere=True)
        result = self.exchange(report, len(data), build_writer(data))
        # Messages about a rank that ends later have its own call.
        self._last = call
        return "\n".join(
            f"  rank {rank}: {decode_text(bytes(result.view(rank)))}" for rank in range(self.size)
        )

    def all_gather_bytes(
        self, own: torch.Tensor, sizes: Sequence[int], call: CollectiveCall
    ) -> Sequence[torch.Tensor] | torch.Tensor:
        """Return the bytes of all ranks, of sizes that every rank knows; `[world_size, n]` if they are equal."""
        equal = all(size == sizes[0] for size in sizes)
        buffers: Sequence[torch.Tensor] | torch.Tensor = (
            torch.empty(self.size, sizes[0], dtype=torch.uint8, device="cpu")
            if equal
            else [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
        )
        buffers[self.rank].copy_(own)
        others = [rank for rank in range(self.size) if rank != self.rank]
        self._transfer(dict.fromkeys(others, own), {rank: buffers[rank] for rank in others}, call)
        return buffers

    def _gather_bytes(
        self, own: torch.Tensor, sizes: Sequence[int], call: CollectiveCall
    ) -> Sequence[torch.Tensor]:
        """Return the bytes of all ranks on the first one; nothing on the others."""
        if self.rank:
            self._transfer({0: own}, {}, call)
            return ()
        buffers = [own, *(torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes[1:])]
        self._transfer({}, dict(enumerate(buffers[1:], 1)), call)
        return buffers

    def scatter_bytes(
        self, own: Sequence[torch.Tensor], buffer: torch.Tensor, source: int, call: CollectiveCall
    ) -> None:
        """Send from rank `source` to each rank its own bytes.

        Args:
            own: On `source`, `[n]` bytes for each rank; unused on other ranks.
            buffer: On other ranks, the buffer to fill.
            source: The sending rank.
            call: The collective call that this is a part of.
        """
        if self.rank != source:
            self._transfer({}, {source: buffer}, call)
        else:
            self._transfer({rank: data for rank, data in enumerate(own) if rank != source}, {}, call)

    def _transfer(
        self, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor], call: CollectiveCall
    ) -> None:
        try:
            self._transport.transfer(outgoing, incoming)
        except BaseException as error:  # noqa: BLE001 - raised again, or replaced by a StallError
            raise self._fail(error, call) from None

    def _fail(self, error: BaseException, call: CollectiveCall) -> BaseException:
        """Return the error to raise for one that interrupted an exchange."""
        stall, error = error, self._transport.fail(error, str(call))
        if isinstance(stall, StallError):  # found during a wait: these ranks cannot join
            return stall
        if not isinstance(error, ConnectionLostError):
            return error
        last = f"it was last in {self._last}" if self._last else "it has been in no collective yet"
        missing = [rank for rank in range(self.size) if rank not in error.waiting]
        lines = "\n".join(
            f"  rank {rank}: "
            + (f"waits in {error.waiting[rank]}" if rank in error.waiting else f"is missing; {last}")
            for rank in range(self.size)
        )
        subject = f"rank {', '.join(map(str, missing))}" if missing else "a rank"
        if error.timed_out:
            return StallError(f"{subject} did not come to {call} in time:\n{lines}")
        return RankLostError(f"{subject} ended, or lost its connection, and {call} cannot complete:\n{lines}")


def build_writer(data: bytes | memoryview) -> Write:
    """Return a function that copies these bytes into a buffer."""

    def write(buffer: memoryview) -> None:
        buffer[:] = data

    return write


def _all_equal(heads: Sequence[Sequence[int]], column: int) -> bool:
    first = heads[0][column]
    return all(head[column] == first for head in heads)


@lru_cache(maxsize=1024)
def _digests(call: CollectiveCall) -> tuple[int, int, int]:
    """Return digests of all that must be equal, of the same without free dimensions, and of the line."""
    loose = tuple(
        item.with_free_dimensions(call.free) if isinstance(item, TensorSpec) and call.free else item
        for item in call.structure
    )
    strict, free = (_digest(f"{call.operation}\n{structure}") for structure in (call.structure, loose))
    return strict, free, 0 if call.anywhere else _digest(str(call.site))


def _digest(text: str) -> int:
    # One bit less, so that -1 marks a failure only.
    return int.from_bytes(hashlib.blake2b(encode_text(text), digest_size=8).digest(), "little") >> 1


def call_at_site(
    operation: str,
    structure: tuple[Any, ...] = (),
    *,
    free: str = "",
    anywhere: bool = False,
    libraries: tuple[str, ...] = (),
) -> CollectiveCall:
    """Describe the current call, with the line of the user's code that it comes from.

    The arguments of the public function that makes it are added; every call that is compared is built here. Lines of `libraries`
    are left out.
    """
    return CollectiveCall(add_arguments(operation), call_site(*libraries), structure, free, anywhere)


_ALIGNMENT = 64


class SerializedObject(NamedTuple):
    """A pickled object and its buffers."""

    size: int
    """The number of bytes of all."""
    head: bytes
    """The sizes of all buffers and the pickle."""
    buffers: list[torch.Tensor]
    """The buffers outside of the pickle, as bytes or with their own dtype."""

    def write(self, data: memoryview) -> None:
        """Write the object into `size` bytes."""
        data[: len(self.head)] = self.head
        start = _align(len(self.head))
        for part in self.buffers:
            end = start + part.nbytes
            is_plain = part.is_cpu and part.is_contiguous() and not part.is_conj() and not part.is_neg()
            if is_plain and part.nbytes <= PAYLOAD:
                # For small tensors a torch copy is several times slower.
                data[start:end] = tensor_bytes(part)
            else:
                buffer = torch.frombuffer(data[start:end], dtype=part.dtype)
                buffer.view(part.shape).copy_(part)
            start = _align(end)


class _Pickler(pickle.Pickler):
    """Keep tensors, and the buffers of other arrays, outside of the pickle."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._keep)
        self.buffers: list[torch.Tensor] = []
        self._tensors: dict[int, torch.Tensor] = {}

    @override
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.is_meta or find_special_kind(obj) is not None:
            return NotImplemented
        buffer = pickle.PickleBuffer(bytearray())
        self._tensors[id(buffer)] = obj.detach()
        return _rebuild_tensor, (buffer, obj.dtype, tuple(obj.shape), obj.device.type)

    def _keep(self, buffer: pickle.PickleBuffer) -> None:
        tensor = self._tensors.pop(id(buffer), None)
        if tensor is None:
            data = buffer.raw()
            tensor = (
                torch.frombuffer(bytearray(data), dtype=torch.uint8)
                if len(data)
                else torch.empty(0, device="cpu")
            )
        self.buffers.append(tensor)


def serialize_object(item: Any) -> SerializedObject:
    """Pickle an object."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(item)
    text = file.getvalue()
    sizes = [part.nbytes for part in pickler.buffers]
    head = struct.pack(f"<{len(sizes) + 2}q", len(sizes), len(text), *sizes) + text
    end = len(head)
    for size in sizes:
        end = _align(end) + size
    return SerializedObject(end, head, pickler.buffers)


def deserialize_object(data: memoryview) -> Any:
    """Return the object written into these bytes; its tensors share their memory. No bytes are None."""
    if not data:
        return None
    count, length = struct.unpack_from("<2q", data)
    sizes = struct.unpack_from(f"<{count}q", data, 16)
    start = 16 + 8 * count
    end, buffers = start + length, []
    for size in sizes:
        begin = _align(end)
        end = begin + size
        buffers.append(data[begin:end])
    return pickle.Unpickler(io.BytesIO(data[start : start + length]), buffers=buffers).load()  # noqa: S301


def _rebuild_tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], device: str) -> torch.Tensor:
    data = memoryview(buffer)
    # torch.frombuffer refuses an empty buffer.
    numbers = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
    return numbers.view(shape).to(device)


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def all_gather_objects(
    operation: str, item: Any, handshake: Handshake, *, compare_lines: bool = False
) -> list[Any]:
    """Return the objects of all ranks, by rank; tensors keep their device type.

    Args:
        operation: The name of the call, equal on all ranks.
        item: The object of this rank.
        handshake: Connects the ranks.
        compare_lines: Warn if ranks call from different lines of the script.

    Raises:
        MismatchError: The calls differ, or an object cannot be pickled. Raised on every rank.
    """
    call = call_at_site(operation, anywhere=not compare_lines)
    serialized, failure = _try_serialize(item)
    result = handshake.exchange(call, serialized.size, serialized.write, failure=failure)
    return [deserialize_object(result.view(rank)) for rank in range(handshake.size)]


@dataclass(frozen=True)
class ObjectGroup:
    """All ranks, as far as they exchange objects in one operation: each makes the same calls."""

    operation: str
    """Name of the operation, equal on all ranks."""
    handshake: Handshake | None = None
    """Connects the ranks; None for one process without others."""

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return 0 if self.handshake is None else self.handshake.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self.handshake is None else self.handshake.size

    def all_gather(self, item: Any) -> list[Any]:
        """Return the objects of all ranks, by rank."""
        return [item] if self.handshake is None else all_gather_objects(self.operation, item, self.handshake)

    def gather(self, item: Any) -> list[Any]:
        """Return the objects of all ranks on the first one, and an empty list on the others."""
        if self.handshake is None:
            return [item]
        call = call_at_site(self.operation, anywhere=True)
        serialized, failure = _try_serialize(item)
        result = self.handshake.exchange(
            call, serialized.size, serialized.write, failure=failure, to_first=True
        )
        return [] if self.rank else [deserialize_object(result.view(rank)) for rank in range(self.size)]

    def broadcast(self, item: Any) -> Any:
        """Return the object of the first rank, in an exchange in which the others send None."""
        return self.all_gather(None if self.rank else item)[0]


def scatter_objects(operation: str, items: Sequence[Any] | None, handshake: Handshake) -> Any:
    """Return this rank's object out of the first rank's list of one object per rank.

    Raises:
        MismatchError: The list has another length, or as for `all_gather_objects`. Raised on every rank.
    """
    call = call_at_site(operation, anywhere=True)
    if handshake.rank:
        payload = handshake.exchange(call).view(0)
        table = struct.unpack_from(f"<{handshake.size}q", payload)
        size, start = table[handshake.rank], _offsets(table)[handshake.rank]
        if len(payload) > 8 * handshake.size:
            return deserialize_object(payload[start : start + size])
        received = torch.empty(size, dtype=torch.uint8, device="cpu")
        handshake.scatter_bytes((), received, 0, call)
        return deserialize_object(tensor_bytes(received))
    serialized, failure = [], None
    if items is None or len(items) != handshake.size:
        failure = f"expected one object per rank ({handshake.size}), got {0 if items is None else len(items)}"
    else:
        results = [_try_serialize(item) for item in items[1:]]
        serialized = [_EMPTY, *(each for each, _ in results)]
        failure = next((text for _, text in results if text), None)
    sizes = [each.size for each in serialized]
    bounds = _offsets(sizes)
    inline = bounds[-1] <= PAYLOAD

    def write(buffer: memoryview) -> None:
        struct.pack_into(f"<{len(sizes)}q", buffer, 0, *sizes)
        for each, start in zip(serialized[1:], bounds[1:] if inline else (), strict=False):
            each.write(buffer[start : start + each.size])

    handshake.exchange(call, bounds[-1] if inline else 8 * len(sizes), write, failure=failure)
    assert items is not None
    if not inline:
        buffers = [torch.empty(each.size, dtype=torch.uint8, device="cpu") for each in serialized]
        for each, buffer in zip(serialized, buffers, strict=True):
            each.write(tensor_bytes(buffer))
        handshake.scatter_bytes(buffers, buffers[0], 0, call)
    return items[0]


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Return the offset of each object behind the table of their sizes, and the end of the last."""
    bounds = [_align(8 * len(sizes))]
    for size in sizes:
        bounds.append(_align(bounds[-1] + size))
    return bounds


_EMPTY = SerializedObject(0, b"", [])


def _try_serialize(item: Any) -> tuple[SerializedObject, str | None]:
    """Return a serialized object, or an empty one and why serialization failed. None has no bytes."""
    if item is None:
        return _EMPTY, None
    try:
        return serialize_object(item), None
    except Exception as error:  # noqa: BLE001 - any error must reach the other ranks
        return _EMPTY, f"{type(error).__name__}: {error}"
