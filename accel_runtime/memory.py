"""Giving memory back, and finding the batch size that fits."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from accel_runtime.backends.base import Backend
from accel_runtime.current import current_backend
from accel_runtime.turns import word_of

__all__ = ["clear_device_cache", "find_executable_batch_size", "is_out_of_memory", "release_memory"]

_SAID = (
    "out of memory",
    "can't allocate memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""What devices say that have a plain RuntimeError for it."""
_FINE, _FULL, _BROKEN = "fine", "full", "broken"


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give the memory that torch keeps for later back to the device.

    Args:
        garbage_collection: Collect what Python can first.
    """
    if garbage_collection:
        gc.collect()
    # Not is_available(): it starts CUDA, and a process that is forked later could not use CUDA any more.
    if torch.accelerator.device_count():
        torch.accelerator.memory.empty_cache()


def release_memory(*objects: Any) -> list[Any]:
    """Collect garbage and give cached device memory back.

    Args:
        *objects: Assign the result to their names: `a, b = release_memory(a, b)`.

    Returns:
        As many None as there are objects.
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the memory of a device, or of the machine, did not suffice."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """A decorator: the function gets a batch size as its first argument, a smaller one for each time memory ran out.

    With several processes all of them have to call it; if memory ran out on one, all go on with the next
    size. What they had to say to each other travels through the store, in no collective. A size that was
    found is kept for the next call.

    Args:
        function: `function(batch_size, *args, **options)`; None to give the other arguments first.
        starting_batch_size: The first size to try.
        reduce_batch_size_fn: Returns the next size, a smaller one each time; None takes nine tenths,
            rounded down.

    Raises:
        TypeError: A batch size was given where the function is called; the decorator does that.
        RuntimeError: No size is left to try; or memory ran out here while another process failed with
            another exception.
        ValueError: A size that is no positive whole number, or a next one that is not smaller.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    if starting_batch_size < 1:
        raise ValueError(f"starting_batch_size must be at least 1; it is {starting_batch_size}")
    search = _Search(function, starting_batch_size, reduce_batch_size_fn)

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        return search.run(*args, **options)

    return run


class _Search:
    """One function and the size it has come to."""

    def __init__(self, function: Callable[..., Any], size: int, next_size: Callable[[], int] | None) -> None:
        self._function = function
        self._size = size
        self._next_size = next_size

    def run(self, *args: Any, **options: Any) -> Any:
        self._check(args, options)
        backend = current_backend()
        clear_device_cache(garbage_collection=True)
        while True:
            full: str | None = None
            key = f"accel/batch size/{backend.turn('accel/batch size')}"
            try:
                result = self._function(self._size, *args, **options)
            except Exception as error:
                if not is_out_of_memory(error):
                    backend.post(
                        f"{key}/{backend.topology.rank}", f"{_BROKEN}:{type(error).__name__}: {error}"
                    )
                    raise
                # Only the text: the traceback would keep the tensors that filled the memory.
                full = str(error).partition("\n")[0]
            who = self._vote(backend, key, full)
            if not who:
                return result
            result = None
            clear_device_cache(garbage_collection=True)
            self._shrink(backend, who)

    def _vote(self, backend: Backend, key: str, full: str | None) -> list[int]:
        """The ranks whose memory ran out."""
        topology = backend.topology
        backend.post(f"{key}/{topology.rank}", _FINE if full is None else _FULL)
        here = "" if full is None else f"; here memory ran out: {full}"
        what = f"find_executable_batch_size, batch size {self._size}{here}"
        words = {rank: word_of(backend, rank, f"{key}/{rank}", what) for rank in range(topology.world_size)}
        broken = {rank: word for rank, word in words.items() if word.startswith(_BROKEN)}
        if full is not None and broken:
            told = "; ".join(
                f"rank {rank}: {word.removeprefix(f'{_BROKEN}:')}" for rank, word in broken.items()
            )
            raise RuntimeError(
                f"out of memory with batch size {self._size} ({full}), and no smaller one can be tried, since "
                f"not every process gave up because of it: {told}"
            )
        return [] if broken else [rank for rank, word in words.items() if word == _FULL]

    def _shrink(self, backend: Backend, who: list[int]) -> None:
        before = self._size
        size = self._next_size() if self._next_size else before * 9 // 10
        if not isinstance(size, int) or size >= before:
            raise ValueError(f"the batch size after {before} must be a smaller whole number; it is {size!r}")
        if size < 1:
            raise RuntimeError(
                f"No executable batch size found: memory ran out with {before}, and {size} is none"
            )
        self._size = size
        if backend.topology.local_rank == 0:
            where = f" on rank {', '.join(map(str, who))}" if backend.topology.world_size > 1 else ""
            _say(f"out of memory{where} with batch size {before}; trying {size}")

    def _check(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        try:
            inspect.signature(self._function).bind(self._size, *args, **options)
        except TypeError as error:
            name = getattr(self._function, "__name__", "the function")
            raise TypeError(
                f"{error}. {name} gets the batch size as its first argument from find_executable_batch_size: "
                "leave it out of the call"
            ) from None


def _say(text: str) -> None:
    print(f"find_executable_batch_size: {text}", file=sys.stderr, flush=True)  # noqa: T201
