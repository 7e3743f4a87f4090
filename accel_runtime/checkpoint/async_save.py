"""Write checkpoints in a background thread; its errors are raised in the script."""

from __future__ import annotations

import atexit
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch

from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.filesystem import parallel_map

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
        self._target = Path()

    def start(
        self,
        work: Callable[[], object],
        target: Path,
        progress: Callable[[], str],
        optimizers: Iterable[torch.optim.Optimizer],
    ) -> None:
        """Run `work` in the background; a step of one of the optimizers raises an error of it."""
        assert self._thread is None
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
            self._print(f"waiting for {self._target} to be written: {self._progress()}")
            thread.join(_NEXT_MESSAGE_S)
        if time.monotonic() - start > _FIRST_MESSAGE_S and self._error is None:
            self._print(f"{self._target} is written")
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
            self._error = error

    def _print(self, text: str) -> None:
        if self._prints_progress:
            print(f"accel: {text}", file=sys.stderr, flush=True)  # noqa: T201 - the user waits for it

    def wait_at_exit(self) -> None:
        """Wait at exit; end the process with exit code 1 if the save failed."""
        try:
            self.wait()
        except CheckpointError as error:
            print(f"accel: {error}", file=sys.stderr, flush=True)  # noqa: T201 - too late to raise
            sys.stdout.flush()
            # An exception at this point would leave the exit code 0.
            os._exit(1)


_ALIGNED = 64
_PIECE_BYTES = 1 << 25
"""Bytes that a thread copies at a time."""
_K = TypeVar("_K")


class StagingBuffers:
    """Host memory for the copies of one save, as large as the largest save so far.

    `pinned` memory is used for devices that copy into it faster and asynchronously.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._reservation: threading.Thread | None = None
        self._unpin: Callable[[], object] = int

    @property
    def bytes(self) -> int:
        """Size of the memory."""
        return self._memory.nbytes

    def reserve(self, size: int) -> None:
        """Allocate memory in the background for the first save.

        New memory costs several times as much as the copy: the system clears every page on first use.
        """
        self._wait()
        self._reservation = threading.Thread(
            target=self._allocate_pages, args=(size,), name="accel-reserve", daemon=True
        )
        self._reservation.start()

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
        self._copy([(copies[key], tensor.detach()) for key, tensor in tensors.items()])
        return copies

    def _copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
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

    def _wait(self) -> None:
        if self._reservation is not None:
            self._reservation.join()
            self._reservation = None

    def _allocate_pages(self, size: int) -> None:
        self._reserve(size)
        self._memory[:: mmap.PAGESIZE].zero_()

    def _reserve(self, size: int) -> None:
        if size <= self._memory.nbytes:
            return
        # Free the old memory first: both together would exceed the state.
        self._unpin()
        self._unpin, self._memory = int, torch.empty(0, dtype=torch.uint8)
        # A mapping of its own is returned to the system completely. It is shared (the default), so that pages are not
        # copied for workers forked in the meantime.
        self._memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        if self._pinned and _pin(self._memory):
            finalizer = weakref.finalize(self, _unpin, self._memory)
            finalizer.atexit = False  # the process ends, and CUDA may have ended before
            self._unpin = finalizer


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
