"""Serialize any object for other ranks of the same job, with tensors outside of the pickle.

The bytes come from ranks over an authenticated connection, never from a file.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from accel_runtime.collectives.handshake import PAYLOAD, CollectiveCall, Handshake, call_at_site
from accel_runtime.collectives.transport import memory_of

__all__ = [
    "all_gather_objects",
    "deserialize_object",
    "scatter_objects",
    "serialize_object",
]

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
                data[start:end] = memory_of(part)
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
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided or obj.is_quantized:
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
    """Return the object written into these bytes; its tensors share their memory."""
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


def scatter_objects(operation: str, items: Sequence[Any] | None, handshake: Handshake) -> Any:
    """Return this rank's object out of the first rank's list of one object per rank.

    Raises:
        MismatchError: The list has another length, or as for `all_gather_objects`. Raised on every rank.
    """
    call = call_at_site(operation, anywhere=True)
    if handshake.rank:
        result = handshake.exchange(call)
        return _receive_object(result.view(0), handshake, call)
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
            each.write(memory_of(buffer))
        handshake.scatter_bytes(buffers, buffers[0], 0, call)
    return items[0]


def _receive_object(payload: memoryview, handshake: Handshake, call: CollectiveCall) -> Any:
    sizes = struct.unpack_from(f"<{handshake.size}q", payload)
    size, start = sizes[handshake.rank], _offsets(sizes)[handshake.rank]
    if len(payload) > 8 * handshake.size:
        return deserialize_object(payload[start : start + size])
    buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
    handshake.scatter_bytes((), buffer, 0, call)
    return deserialize_object(memory_of(buffer))


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Return the offset of each object behind the table of their sizes, and the end of the last."""
    bounds = [_align(8 * len(sizes))]
    for size in sizes:
        bounds.append(_align(bounds[-1] + size))
    return bounds


_EMPTY = SerializedObject(0, b"", [])


def _try_serialize(item: Any) -> tuple[SerializedObject, str | None]:
    """Return a serialized object, or an empty one and why serialization failed."""
    try:
        return serialize_object(item), None
    except Exception as error:  # noqa: BLE001 - any error must reach the other ranks
        return _EMPTY, f"{type(error).__name__}: {error}"
