"""Functions that release device memory, and the search for an executable batch size."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

import torch

from accel_runtime.backends import current_backend
from accel_runtime.backends.base import Backend
from accel_runtime.collectives.handshake import StallError
from accel_runtime.foundation.keywords import check_keywords_of

__all__ = ["clear_device_cache", "find_executable_batch_size", "is_out_of_memory", "release_memory"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""Parts of the messages of devices that raise a plain RuntimeError when out of memory."""
_FINE, _FULL, _BROKEN = "fine", "full", "broken"


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Release device memory that torch caches.

    Args:
        garbage_collection: If true, collect garbage first.
    """
    if garbage_collection:
        gc.collect()
    # Not is_available(): it starts CUDA, and a process that is forked later could not use CUDA any more.
    if torch.accelerator.device_count():
        torch.accelerator.memory.empty_cache()


def release_memory(*objects: Any) -> list[Any]:
    """Collect garbage and release cached device memory.

    Args:
        *objects: Objects to release; assign the result to their names: `a, b = release_memory(a, b)`.

    Returns:
        A list with one None per object.
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception was raised because a device or the host is out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _OUT_OF_MEMORY)


@overload
def find_executable_batch_size(
    function: Callable[Concatenate[int, _P], _R],
    starting_batch_size: int = ...,
    reduce_batch_size_fn: Callable[[], int] | None = ...,
) -> Callable[_P, _R]: ...
@overload
def find_executable_batch_size(
    function: None = ...,
    starting_batch_size: int = ...,
    reduce_batch_size_fn: Callable[[], int] | None = ...,
) -> Callable[[Callable[Concatenate[int, _P], _R]], Callable[_P, _R]]: ...
@check_keywords_of
def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Decorate a function of a batch size, and retry it with smaller sizes when out of memory.

    The function gets the batch size as its first argument. With several processes all of them must call it; if one is
    out of memory, all continue with the next size. They exchange this through the store, without a collective. The size
    is kept for the next call.

    Args:
        function: `function(batch_size, *args, **options)`; None to pass the other arguments first.
        starting_batch_size: The first size to try.
        reduce_batch_size_fn: Returns the next size, a smaller one each time; None takes nine tenths, rounded down.

    Raises:
        TypeError: The call passed a batch size, which the decorator does.
        RuntimeError: No size is left to try; or this process was out of memory while another one failed with another
            exception, or waits for this one in a collective, which it cannot leave.
        ValueError: A size that is not a positive whole number, or a next one that is not smaller.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    if starting_batch_size < 1:
        raise ValueError(f"Invalid starting_batch_size={starting_batch_size}: expected at least 1.")
    search = _Search(function, starting_batch_size, reduce_batch_size_fn)

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        return search.run(*args, **options)

    return run


class _Search:
    """Function and the batch size that the search has reached."""

    def __init__(self, function: Callable[..., Any], size: int, next_size: Callable[[], int] | None) -> None:
        self._function = function
        self._size = size
        self._next_size = next_size

    def run(self, *args: Any, **options: Any) -> Any:
        self._check_arguments(args, options)
        backend = current_backend()
        clear_device_cache(garbage_collection=True)
        while True:
            error_text: str | None = None
            key = f"accel/batch size/{backend.increment_store_key('accel/batch size')}"
            try:
                result = self._function(self._size, *args, **options)
            except Exception as error:
                if not is_out_of_memory(error):
                    backend.set_store_key(
                        f"{key}/{backend.topology.rank}", f"{_BROKEN}:{type(error).__name__}: {error}"
                    )
                    raise
                # Only the text: the traceback would keep the tensors that filled the memory.
                error_text = str(error).partition("\n")[0]
            ranks = self._exchange_outcomes(backend, key, error_text)
            if not ranks:
                return result
            result = None
            clear_device_cache(garbage_collection=True)
            self._reduce_size(backend, ranks)

    def _exchange_outcomes(self, backend: Backend, key: str, error_text: str | None) -> list[int]:
        """Return the ranks that are out of memory."""
        topology = backend.topology
        backend.set_store_key(f"{key}/{topology.rank}", _FINE if error_text is None else _FULL)
        local = "" if error_text is None else f"; this rank is out of memory: {error_text}"
        operation = f"find_executable_batch_size, batch size {self._size}{local}"
        try:
            outcomes = {
                rank: backend.wait_for_store_key(
                    rank, f"{key}/{rank}", operation, detect_deadlock=error_text is not None
                )
                for rank in range(topology.world_size)
            }
        except StallError as stall:
            raise RuntimeError(
                f"Out of memory with batch size {self._size} on rank {topology.rank} ({error_text}). No smaller size can be tried, "
                f"since another rank waits for this one: {stall}. Choose a starting_batch_size that fits on all ranks."
            ) from None
        broken = {rank: outcome for rank, outcome in outcomes.items() if outcome.startswith(_BROKEN)}
        if error_text is not None and broken:
            failures = "; ".join(
                f"rank {rank}: {outcome.removeprefix(f'{_BROKEN}:')}" for rank, outcome in broken.items()
            )
            raise RuntimeError(
                f"Out of memory with batch size {self._size} ({error_text}). No smaller size was tried, because other ranks failed "
                f"for another reason. Fix that error first: {failures}"
            )
        return [] if broken else [rank for rank, outcome in outcomes.items() if outcome == _FULL]

    def _reduce_size(self, backend: Backend, ranks: list[int]) -> None:
        previous = self._size
        size = self._next_size() if self._next_size else previous * 9 // 10
        if not isinstance(size, int) or size >= previous:
            raise ValueError(
                f"Invalid batch size {size!r} after {previous}: reduce_batch_size_fn must return a smaller whole number."
            )
        if size < 1:
            raise RuntimeError(
                f"No executable batch size found: out of memory with {previous}, and the next size is {size}."
            )
        self._size = size
        if backend.topology.local_rank == 0:
            suffix = f" on rank {', '.join(map(str, ranks))}" if backend.topology.world_size > 1 else ""
            text = f"out of memory{suffix} with batch size {previous}; trying {size}"
            print(f"find_executable_batch_size: {text}", file=sys.stderr, flush=True)  # noqa: T201

    def _check_arguments(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        try:
            inspect.signature(self._function).bind(self._size, *args, **options)
        except TypeError as error:
            name = getattr(self._function, "__name__", "the function")
            raise TypeError(
                f"{error}. find_executable_batch_size passes the batch size to {name} as its first argument. Leave it out of the "
                "call."
            ) from None
