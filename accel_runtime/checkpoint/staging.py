"""Copies of tensors that stay as they are while the script trains on, in memory that is used again and again."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import torch

from accel_runtime.checkpoint.spread import spread

__all__ = ["Staging"]

_ALIGNED = 64
_PIECE = 1 << 25
"""Bytes that a thread copies at a time."""
_K = TypeVar("_K")


class Staging:
    """Memory of the host for the copies of one save.

    It is as large as the largest save was, and taken from the system once.

    Args:
        pinned: Whether tensors come from a device that copies faster into pinned memory, and by itself.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._reserving: threading.Thread | None = None
        self._unpin: Callable[[], object] = int

    @property
    def bytes(self) -> int:
        """How much it holds."""
        return self._memory.nbytes

    def reserve(self, size: int) -> None:
        """Begin to take so many bytes from the system, so that the first save finds them.

        New memory costs several times what copying into it does: the system clears every page when it is first used.
        """
        self._wait()
        self._reserving = threading.Thread(
            target=self._touch, args=(size,), name="accel-reserve", daemon=True
        )
        self._reserving.start()

    def copies(self, tensors: Mapping[_K, torch.Tensor]) -> dict[_K, torch.Tensor]:
        """Contiguous copies on the CPU; those of the call before are overwritten."""
        self._wait()
        starts, end = {}, 0
        for key, tensor in tensors.items():
            starts[key] = end
            end = -(-(end + tensor.nbytes) // _ALIGNED) * _ALIGNED
        self._reserve(end)
        rooms = {}
        for key, tensor in tensors.items():
            room = self._memory[starts[key] : starts[key] + tensor.nbytes]
            rooms[key] = room.view(tensor.dtype).view(tensor.shape)
        self._copy([(rooms[key], tensor.detach()) for key, tensor in tensors.items()])
        return rooms

    def _copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if self._pinned:
            for room, tensor in pairs:
                room.copy_(tensor, non_blocking=True)
            torch.accelerator.synchronize()
        elif torch.get_num_threads() > 1:
            for room, tensor in pairs:
                room.copy_(tensor)
        else:
            # One core does not use up the memory's bandwidth, and launchers give each process one thread.
            spread(
                lambda piece: piece[0].copy_(piece[1]), [piece for pair in pairs for piece in _pieces(*pair)]
            )

    def _wait(self) -> None:
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None

    def _touch(self, size: int) -> None:
        self._reserve(size)
        self._memory[:: mmap.PAGESIZE].zero_()

    def _reserve(self, size: int) -> None:
        if size <= self._memory.nbytes:
            return
        # The old memory goes before the new comes: together they would be more than the state.
        self._unpin()
        self._unpin, self._memory = int, torch.empty(0, dtype=torch.uint8)
        # Mapped by itself it goes back to the system whole, and shared (the default): workers that are forked
        # meanwhile would have every page copied once more otherwise.
        self._memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        if self._pinned and _pin(self._memory):
            finalizer = weakref.finalize(self, _unpin, self._memory)
            finalizer.atexit = False  # the process ends, and CUDA may have ended before
            self._unpin = finalizer


def _pin(memory: torch.Tensor) -> bool:
    """Pin mapped memory; return False if the system refuses, which makes copies slower and not wrong.

    torch's own pinned memory is rounded up to a power of two, and is not given back to the system.
    """
    portable = 1
    if not int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, portable)):  # type: ignore[no-untyped-call]
        return True
    # The next kernel would report the error as its own: this one does.
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return False


def _unpin(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]


def _pieces(room: torch.Tensor, tensor: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A copy as several small ones, where it is a large one."""
    if tensor.nbytes <= _PIECE or not tensor.is_contiguous():
        return [(room, tensor)]
    count = _PIECE // tensor.itemsize
    to, come = room.view(-1), tensor.view(-1)
    return [(to[i : i + count], come[i : i + count]) for i in range(0, len(to), count)]
