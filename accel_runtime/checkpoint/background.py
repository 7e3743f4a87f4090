"""Saves in the background: the thread that writes, and the host memory that it writes from."""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TypeVar

import torch

from accel_runtime.environment.text import print_note
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.store import parallel_map

__all__ = ["BackgroundWriter", "StagingBuffers"]

_FIRST_MESSAGE_S = 1.0
"""Seconds of waiting before a message is printed."""
_NEXT_MESSAGE_S = 10.0
"""Seconds between further messages."""


class BackgroundWriter:
    """Runs one save at a time in a thread; prints what it waits for if `prints_progress`."""

    def __init__(self, *, prints_progress: bool) -> None:
        self._prints_progress = prints_progress
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._progress: Callable[[], str] = str
        self._warn: Callable[[CheckpointError], None] | None = None
        self._target = ""

    def start(
        self,
        work: Callable[[], object],
        target: str,
        progress: Callable[[], str],
        optimizers: Iterable[torch.optim.Optimizer],
        warn: Callable[[CheckpointError], None] | None = None,
    ) -> None:
        """Run `work` in the background; a step of one of the optimizers raises an error of it, or `warn` gets it."""
        assert self._thread is None
        self._warn = warn
        self._target, self._progress = target, progress
        self._hooks = [optimizer.register_step_pre_hook(lambda *_: self.check()) for optimizer in optimizers]
        # A daemon: `wait_at_exit` waits for it with a message, the interpreter would wait silently.
        self._thread = threading.Thread(target=self._run, args=(work,), name="accel-checkpoint", daemon=True)
        self._thread.start()
        # Registered last, it runs first, while process groups still work.
        atexit.unregister(self.wait_at_exit)
        atexit.register(self.wait_at_exit)

    def check(self) -> None:
        """Raise the error of a save that has ended; return at once if it is still running."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the save and raise its error."""
        thread = self._thread
        if thread is None:
            return
        start = time.monotonic()
        thread.join(_FIRST_MESSAGE_S)
        while thread.is_alive():
            if self._prints_progress:
                print_note(f"waiting for {self._target} to be written: {self._progress()}")
            thread.join(_NEXT_MESSAGE_S)
        if self._prints_progress and time.monotonic() - start > _FIRST_MESSAGE_S and self._error is None:
            print_note(f"{self._target} is written")
        self._thread = None
        for hook in self._hooks:
            hook.remove()
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(f"{self._target} was not saved: {error}") from error

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised in the script's thread
            if self._warn is not None and isinstance(error, CheckpointError):
                self._warn(error)
            else:
                self._error = error

    def wait_at_exit(self) -> None:
        """Wait at exit; end the process with exit code 1 if the save failed."""
        try:
            self.wait()
        except CheckpointError as error:
            print_note(str(error))  # too late to raise
            sys.stdout.flush()
            # An exception at this point would leave the exit code 0.
            os._exit(1)


_ALIGNED = 64
_PIECE_BYTES = 1 << 25
"""Bytes that a thread copies or allocates at a time."""
_WIPE_ON_FORK, _POPULATE_WRITE = 18, 23
"""Advice of Linux 4.14 and 5.14 for mapped memory, without names in Python."""
_K = TypeVar("_K")


class StagingBuffers:
    """Host memory for the copies of one save, as large as the largest save so far.

    `pinned` memory is used for devices that copy into it faster and asynchronously.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._reservation: threading.Thread | None = None
        self._is_needed = threading.Event()
        self._unpin: Callable[[], object] = int

    @property
    def bytes(self) -> int:
        """Size of the memory."""
        return self._memory.nbytes

    def reserve(self, size: int) -> None:
        """Allocate memory in the background for the first save.

        New memory costs several times as much as the copy: the system clears every page on first use. A save that comes earlier
        allocates the rest while it copies.
        """

        def allocate_pages() -> None:
            self._reserve(size)
            for piece in torch.split(self._memory, _PIECE_BYTES):
                if is_needed.is_set():
                    break
                _allocate_pages(piece)

        self._wait()
        is_needed = self._is_needed = threading.Event()
        self._reservation = threading.Thread(target=allocate_pages, name="accel-reserve", daemon=True)
        self._reservation.start()
        atexit.register(self._wait)

    def copy_tensors(self, tensors: Mapping[_K, torch.Tensor]) -> dict[_K, torch.Tensor]:
        """Return contiguous copies on the CPU; those of the previous call are overwritten."""
        self._wait()
        starts, end = {}, 0
        for key, tensor in tensors.items():
            starts[key] = end
            end = -(-(end + tensor.nbytes) // _ALIGNED) * _ALIGNED
        self._reserve(end)
        copies = {}
        for key, tensor in tensors.items():
            memory = self._memory[starts[key] : starts[key] + tensor.nbytes]
            copies[key] = memory.view(tensor.dtype).view(tensor.shape)
        pairs = [(copies[key], tensor.detach()) for key, tensor in tensors.items()]
        if self._pinned:
            for target, tensor in pairs:
                target.copy_(tensor, non_blocking=True)
            torch.accelerator.synchronize()
        elif torch.get_num_threads() > 1:
            for target, tensor in pairs:
                target.copy_(tensor)
        else:
            # One core does not saturate the memory bandwidth, and launchers set one thread for each process.
            parallel_map(
                lambda piece: piece[0].copy_(piece[1]),
                [piece for pair in pairs for piece in _split_copy(*pair)],
            )
        return copies

    def _wait(self) -> None:
        """End a reservation, with the piece that is being allocated."""
        if self._reservation is not None:
            self._is_needed.set()
            self._reservation.join()
            self._reservation = None
            atexit.unregister(self._wait)

    def _reserve(self, size: int) -> None:
        if size <= self._memory.nbytes:
            return
        # Free the old memory first: both together would exceed the state.
        self._unpin()
        self._unpin, self._memory = int, torch.empty(0, dtype=torch.uint8)
        # A mapping of its own is returned to the system completely.
        self._memory = torch.frombuffer(_map_memory(size), dtype=torch.uint8)
        if self._pinned and _pin(self._memory):
            finalizer = weakref.finalize(self, _unpin, self._memory)
            finalizer.atexit = False  # the process ends, and CUDA may have ended before
            self._unpin = finalizer


def _map_memory(size: int) -> mmap.mmap:
    """Return new memory whose pages are not copied for processes forked in the meantime.

    Private pages that a fork leaves empty are allocated in half the time of shared ones.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(_WIPE_ON_FORK)
    except (AttributeError, OSError):  # another system
        return mmap.mmap(-1, size)
    return memory


def _allocate_pages(memory: torch.Tensor) -> None:
    """Allocate the pages of mapped memory."""
    advise = getattr(ctypes.CDLL(None), "madvise", None)  # unlike Python's, it releases the interpreter lock
    arguments = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), _POPULATE_WRITE
    if advise is None or advise(*arguments):
        memory[:: mmap.PAGESIZE].zero_()


def _pin(memory: torch.Tensor) -> bool:
    """Pin mapped memory; return False if the system refuses, which only makes copies slower.

    torch's own pinned memory is rounded up to a power of two and never returned to the system.
    """
    portable = 1
    if not int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, portable)):  # type: ignore[no-untyped-call]
        return True
    # Clear the error, which the next kernel would report otherwise.
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return False


def _unpin(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]


def _split_copy(target: torch.Tensor, tensor: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Split a copy into pieces for several threads."""
    if tensor.nbytes <= _PIECE_BYTES or not tensor.is_contiguous():
        return [(target, tensor)]
    count = _PIECE_BYTES // tensor.itemsize
    flat_target, flat_tensor = target.view(-1), tensor.view(-1)
    return [
        (flat_target[i : i + count], flat_tensor[i : i + count]) for i in range(0, len(flat_target), count)
    ]
