"""Any object as bytes for another rank of the same job, its tensors beside the pickle and not in it.

The bytes come from our own peers over a connection of ours, never from a file.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from accel_runtime.exchange.agreement import ROOM, Agreement, Call, here
from accel_runtime.exchange.raw import memory

__all__ = ["Parcel", "deal_objects", "share_objects", "unwrapped", "wrapped"]

_ALIGNED = 64


class Parcel(NamedTuple):
    """An object on its way."""

    size: int
    """Bytes it takes."""
    head: bytes
    """The pickle, after the lengths of all parts."""
    parts: list[torch.Tensor]
    """The buffers that stay outside of it, as bytes or of their own dtype."""

    def write(self, data: memoryview) -> None:
        """Write it into `size` bytes."""
        data[: len(self.head)] = self.head
        start = _up(len(self.head))
        for part in self.parts:
            end = start + part.nbytes
            if part.nbytes <= ROOM and _lies_plain(part):
                # A small copy costs torch several times what it is worth.
                data[start:end] = memory(part)
            else:
                room = torch.frombuffer(data[start:end], dtype=part.dtype)
                room.view(part.shape).copy_(part)
            start = _up(end)


class _Pickler(pickle.Pickler):
    """Leaves tensors, and the buffers of other arrays, outside of the pickle."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._keep)
        self.parts: list[torch.Tensor] = []
        self._waiting: dict[int, torch.Tensor] = {}

    @override
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided or obj.is_quantized:
            return NotImplemented
        place = pickle.PickleBuffer(bytearray())
        self._waiting[id(place)] = obj.detach()
        return _tensor, (place, obj.dtype, tuple(obj.shape), obj.device.type)

    def _keep(self, buffer: pickle.PickleBuffer) -> None:
        tensor = self._waiting.pop(id(buffer), None)
        if tensor is None:
            data = buffer.raw()
            tensor = (
                torch.frombuffer(bytearray(data), dtype=torch.uint8)
                if len(data)
                else torch.empty(0, device="cpu")
            )
        self.parts.append(tensor)


def wrapped(item: Any) -> Parcel:
    """An object, ready to be written.

    Raises:
        Exception: Whatever it raises when it is pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(item)
    text = file.getvalue()
    sizes = [part.nbytes for part in pickler.parts]
    head = struct.pack(f"<{len(sizes) + 2}q", len(sizes), len(text), *sizes) + text
    end = len(head)
    for size in sizes:
        end = _up(end) + size
    return Parcel(end, head, pickler.parts)


def unwrapped(data: memoryview) -> Any:
    """The object that was written into these bytes; its tensors live in them."""
    count, length = struct.unpack_from("<2q", data)
    sizes = struct.unpack_from(f"<{count}q", data, 16)
    start = 16 + 8 * count
    end, buffers = start + length, []
    for size in sizes:
        begin = _up(end)
        end = begin + size
        buffers.append(data[begin:end])
    return pickle.Unpickler(io.BytesIO(data[start : start + length]), buffers=buffers).load()  # noqa: S301


def _lies_plain(part: torch.Tensor) -> bool:
    """Whether its memory is its value."""
    return part.is_cpu and part.is_contiguous() and not part.is_conj() and not part.is_neg()


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], device: str) -> torch.Tensor:
    data = memoryview(buffer)
    # A buffer of nothing is refused.
    numbers = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
    return numbers.view(shape).to(device)


def _up(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def share_objects(
    operation: str, item: Any, agreement: Agreement, *, compare_lines: bool = False
) -> list[Any]:
    """Every rank's object, in rank order; tensors arrive on the device type they came from.

    Args:
        operation: The name of the exchange; ranks with different names do not exchange anything.
        item: This rank's object.
        agreement: Carries it.
        compare_lines: Compare the lines of the script too, for a collective that the script itself calls.

    Raises:
        MismatchError: The ranks do different things, or an object cannot be pickled. Raised on every rank.
    """
    call = here(operation, anywhere=not compare_lines)
    parcel, failure = _tried(item)
    met = agreement.exchange(call, parcel.size, parcel.write, failure=failure)
    return [unwrapped(met.view(rank)) for rank in range(agreement.size)]


def deal_objects(operation: str, items: Sequence[Any] | None, agreement: Agreement) -> Any:
    """Of the first rank's objects, one for every rank, this rank's own.

    Args:
        operation: As for `share_objects`.
        items: On the first rank, one for every rank; elsewhere unused.
        agreement: Carries them.

    Raises:
        MismatchError: As for `share_objects`, or there is not one object a rank. Raised on every rank.
    """
    call = here(operation, anywhere=True)
    if agreement.rank:
        met = agreement.exchange(call)
        return _dealt(met.view(0), agreement, call)
    parcels, failure = [], None
    if items is None or len(items) != agreement.size:
        failure = (
            f"one object a rank is needed, {agreement.size}; there are {0 if items is None else len(items)}"
        )
    else:
        tried = [_tried(item) for item in items[1:]]
        parcels = [_EMPTY, *(parcel for parcel, _ in tried)]
        failure = next((text for _, text in tried if text), None)
    sizes = [parcel.size for parcel in parcels]
    bounds = _bounds(sizes)
    inline = bounds[-1] <= ROOM

    def write(room: memoryview) -> None:
        struct.pack_into(f"<{len(sizes)}q", room, 0, *sizes)
        for parcel, start in zip(parcels[1:], bounds[1:] if inline else (), strict=False):
            parcel.write(room[start : start + parcel.size])

    agreement.exchange(call, bounds[-1] if inline else 8 * len(sizes), write, failure=failure)
    assert items is not None
    if not inline:
        rooms = [torch.empty(parcel.size, dtype=torch.uint8, device="cpu") for parcel in parcels]
        for parcel, room in zip(parcels, rooms, strict=True):
            parcel.write(memory(room))
        agreement.deal(rooms, rooms[0], 0, call)
    return items[0]


def _dealt(blob: memoryview, agreement: Agreement, call: Call) -> Any:
    sizes = struct.unpack_from(f"<{agreement.size}q", blob)
    size, start = sizes[agreement.rank], _bounds(sizes)[agreement.rank]
    if len(blob) > 8 * agreement.size:
        return unwrapped(blob[start : start + size])
    room = torch.empty(size, dtype=torch.uint8, device="cpu")
    agreement.deal((), room, 0, call)
    return unwrapped(memory(room))


def _bounds(sizes: Sequence[int]) -> list[int]:
    """Where each parcel starts behind the table of their sizes, and where the last ends."""
    bounds = [_up(8 * len(sizes))]
    for size in sizes:
        bounds.append(_up(bounds[-1] + size))
    return bounds


_EMPTY = Parcel(0, b"", [])


def _tried(item: Any) -> tuple[Parcel, str | None]:
    """An object wrapped, or why it cannot be."""
    try:
        return wrapped(item), None
    except Exception as error:  # noqa: BLE001 - the others wait: they are told, whatever it is
        return _EMPTY, f"{type(error).__name__}: {error}"
