"""Hooks in torch that record the progress of any script: optimizer steps, backward passes, batches of its loaders.

Standard library only. A script that never imports torch pays nothing.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from accel_runtime.environment.import_hooks import call_after_import
from accel_runtime.environment.throughput import TOKENS_KEY, count_elements, count_samples

__all__ = ["watch_progress"]


def watch_progress() -> None:
    """Record the progress of this process once it has imported torch."""
    call_after_import("torch", _install)


def _install(torch: ModuleType) -> None:
    # A fork server restores all modules of torch at once: only torch itself is imported.
    _watch_steps(torch)
    _watch_backward(torch)
    call_after_import("torch.utils.data.dataloader", lambda module: _watch_loaders(torch, module))


def _find_heartbeat() -> Any:
    from accel_runtime.environment.heartbeat import Heartbeat, heartbeat  # noqa: PLC0415 - once needed: 0.1 s

    progress = heartbeat()
    return progress if isinstance(progress, Heartbeat) else None


class _OwnProcess:
    """True in the process and the thread of the script: not in its workers, nor in threads that load ahead."""

    def __init__(self) -> None:
        self._pid, self._thread = os.getpid(), threading.get_ident()

    def __bool__(self) -> bool:
        return threading.get_ident() == self._thread and os.getpid() == self._pid


# Steps


def _watch_steps(torch: Any) -> None:
    pid, is_compiling = os.getpid(), torch.compiler.is_compiling

    def count(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        # A step that torch.compile runs is not counted: this function would break its graph.
        if is_compiling() or os.getpid() != pid:
            return
        from accel_runtime.environment.heartbeat import heartbeat  # noqa: PLC0415 - at the first step: 0.1 s

        progress = heartbeat()
        if progress is not None:
            progress.observe_step(optimizer)

    # torch.optim hides the name of its module.
    sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(count)


# Backward passes


def _watch_backward(torch: Any) -> None:
    """Record backward passes, and the moment at which the gradients of this rank are complete.

    The callbacks of a pass run in the order in which they are queued. That of DDP, which waits for the other ranks, is queued by its
    last gradient, so that one which the loss queues runs before it (torch 2.9 to 2.13, `Engine::queue_callback`).
    """
    run_backward, is_own = torch.autograd.backward, _OwnProcess()
    engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 - as DDP and FSDP use it
    averages = os.environ.get("WORLD_SIZE", "1") != "1"

    @wraps(run_backward)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        progress = _find_heartbeat() if is_own else None
        if progress is None:
            run_backward(tensors, *args, **kwargs)
            return
        is_first = progress.observe_backward(averages)
        handle = _call_when_complete(engine, tensors, progress.complete_gradients) if averages else None
        try:
            run_backward(tensors, *args, **kwargs)
        finally:
            if handle is not None:
                handle.remove()
            if is_first:
                progress.end_backward()

    _exclude_from_compilation(torch, backward)
    torch.autograd.backward = backward


def _call_when_complete(engine: Any, loss: Any, call: Callable[[], None]) -> Any:
    """Register a function for the end of the backward pass of a loss; return the handle of the hook, or None."""
    grad_fn = getattr(loss, "grad_fn", None)
    if grad_fn is None:
        return None
    return grad_fn.register_prehook(lambda _gradients: engine.queue_callback(call))


def _exclude_from_compilation(torch: Any, function: Any) -> None:
    """Let torch.compile leave a function alone, without importing torch._dynamo (torch 2.9 to 2.13)."""
    function._torchdynamo_disable = True  # noqa: SLF001
    frames = torch._C._dynamo.eval_frame  # noqa: SLF001
    action, strategy = frames._FrameAction, frames._FrameExecStrategy  # noqa: SLF001
    frames.set_code_exec_strategy(function.__code__, strategy(action.SKIP, action.DEFAULT))


# Batches


def _watch_loaders(torch: ModuleType, module: Any) -> None:
    """Record the batches of torch's loaders, and the time in which the script waits for them."""
    is_own, world_size = _OwnProcess(), int(os.environ.get("WORLD_SIZE", "1"))
    counts = _EpochCounts()
    base = module._BaseDataLoaderIter  # noqa: SLF001 - the class of all its iterators (torch 2.9 to 2.13)
    load = base.__next__

    @wraps(load)
    def load_and_count(self: Any) -> Any:
        progress = _find_heartbeat() if is_own else None
        if progress is None or not progress.observe_request():
            return load(self)
        epoch = counts.get_epoch(self)
        try:
            batch = load(self)
        except StopIteration:
            progress.end_epoch(epoch)
            raise
        progress.observe_batch(epoch)
        samples, tokens = count_samples(batch), count_elements(batch, TOKENS_KEY)
        progress.add_samples(epoch, world_size * samples, world_size * tokens)
        return batch

    _exclude_from_compilation(torch, load_and_count)
    base.__next__ = load_and_count


class _EpochCounts:
    """The epochs of loaders: the number of an iterator is that of the iterators of its loader before."""

    def __init__(self) -> None:
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._epochs: WeakKeyDictionary[Any, tuple[Any, int]] = WeakKeyDictionary()

    def get_epoch(self, iterator: Any) -> Any:
        """Return the epoch of an iterator; persistent workers use one iterator for all epochs."""
        from accel_runtime.environment.heartbeat import LoaderEpoch  # noqa: PLC0415 - imported at the first batch

        returned = iterator._num_yielded  # noqa: SLF001
        epoch, before = self._epochs.get(iterator, (None, 0))
        if epoch is None or returned < before or (returned == 0 and before):
            dataset = iterator._dataset  # noqa: SLF001
            number = self._count(dataset)
            try:
                length = len(iterator)
            except (TypeError, NotImplementedError):
                length = 0
            epoch = LoaderEpoch(number, 0, length)
        self._epochs[iterator] = epoch, returned + 1
        return epoch

    def _count(self, dataset: Any) -> int:
        try:
            number = self._numbers.get(dataset, -1) + 1
            self._numbers[dataset] = number
        except TypeError:  # a list, which no weak reference can have
            return 0
        return number
