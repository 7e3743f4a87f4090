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
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from accel_runtime.environment.import_hooks import call_after_import, call_after_torch_import
from accel_runtime.observe.throughput import TOKENS_KEY, count_elements, count_samples

if TYPE_CHECKING:
    from accel_runtime.observe.flops import StepFlops
    from accel_runtime.observe.heartbeat import Heartbeat, LoaderEpoch

__all__ = ["watch_progress"]


def watch_progress() -> None:
    """Record the progress of this process once it has imported torch."""
    call_after_torch_import(_install)


def _install(torch: ModuleType) -> None:
    # A fork server restores all modules of torch at once: only torch itself is imported.
    _watch_steps(torch)
    _watch_backward(torch)
    call_after_import("torch.utils.data.dataloader", lambda module: _watch_loaders(torch, module))


class _Reporter:
    """Finds the heartbeat of this process, for calls in the thread of the script: not in workers, nor in threads that load ahead."""

    def __init__(self) -> None:
        self._pid, self._thread = os.getpid(), threading.get_ident()
        self._heartbeat: Heartbeat | None = None
        self._is_known = False

    def find(self) -> Heartbeat | None:
        """Return the heartbeat of this process; None without one, in a child process and in another thread."""
        if threading.get_ident() != self._thread or os.getpid() != self._pid:
            return None
        if not self._is_known:
            from accel_runtime.observe.heartbeat import Heartbeat, heartbeat  # noqa: PLC0415 - at first use: 0.1 s

            progress, self._is_known = heartbeat(), True
            self._heartbeat = progress if isinstance(progress, Heartbeat) else None
        return self._heartbeat


# Steps


def _watch_steps(torch: Any) -> None:
    # torch.optim hides the name of its module.
    sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(_StepHook(torch))


class _StepHook:
    """Counts a step of an optimizer after it."""

    def __init__(self, torch: Any) -> None:
        self._torch, self._pid, self._is_compiling = torch, os.getpid(), torch.compiler.is_compiling
        self._flops: StepFlops | None = None
        self._progress: Any = None

    def __call__(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        # A step that torch.compile runs is not counted: this function would break its graph.
        if self._is_compiling() or os.getpid() != self._pid:
            return
        if self._progress is None:
            self._begin()
        if self._progress is not None:
            self._progress.observe_step(optimizer)
            if self._flops is not None:
                self._flops.check_step(self._progress)

    def _begin(self) -> None:
        """Create the heartbeat at the first step: the imports take 0.1 s."""
        from accel_runtime.environment.layouts import read_switch  # noqa: PLC0415
        from accel_runtime.environment.settings import variable_name  # noqa: PLC0415
        from accel_runtime.observe.heartbeat import heartbeat  # noqa: PLC0415

        self._progress = heartbeat()
        variable = variable_name("measure_flops")
        if read_switch(variable, os.environ.get(variable, "")):
            from accel_runtime.observe.flops import StepFlops  # noqa: PLC0415

            self._flops = StepFlops(self._torch)


# Backward passes


def _watch_backward(torch: Any) -> None:
    """Record backward passes, and the moment at which the gradients of this rank are complete.

    The callbacks of a pass run in the order in which they are queued. That of DDP, which waits for the other ranks, is queued by its
    last gradient, so that one which the loss queues runs before it (torch 2.9 to 2.13, `Engine::queue_callback`).
    """
    run_backward, reporter = torch.autograd.backward, _Reporter()
    engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 - as DDP and FSDP use it
    averages = os.environ.get("WORLD_SIZE", "1") != "1"

    @wraps(run_backward)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        progress = reporter.find()
        if progress is None:
            run_backward(tensors, *args, **kwargs)
            return
        if not progress.observe_backward(averages):
            run_backward(tensors, *args, **kwargs)
            return
        handle = _call_when_complete(engine, tensors, progress.complete_gradients) if averages else None
        try:
            run_backward(tensors, *args, **kwargs)
        finally:
            if handle is not None:
                handle.remove()
            progress.observe_backward_end()

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
    reporter, world_size = _Reporter(), int(os.environ.get("WORLD_SIZE", "1"))
    counts = _EpochCounts()
    base = module._BaseDataLoaderIter  # noqa: SLF001 - the class of all its iterators (torch 2.9 to 2.13)
    load = base.__next__

    @wraps(load)
    def load_and_count(self: Any) -> Any:
        progress = reporter.find()
        if progress is None or not progress.observe_request():
            return load(self)
        epoch = counts.get_epoch(self)
        try:
            batch = load(self)
        except StopIteration:
            progress.end_epoch(epoch)
            raise
        epoch.returned += 1
        progress.observe_batch(epoch)
        samples, tokens = count_samples(batch), count_elements(batch, TOKENS_KEY)
        progress.add_samples(epoch, world_size * samples, world_size * tokens)
        return batch

    _exclude_from_compilation(torch, load_and_count)
    base.__next__ = load_and_count


class _EpochCounts:
    """The epochs of loaders: the number of a loop is that of the loops over its data set before."""

    def __init__(self) -> None:
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._epochs: WeakKeyDictionary[Any, LoaderEpoch] = WeakKeyDictionary()

    def get_epoch(self, iterator: Any) -> LoaderEpoch:
        """Return the epoch of an iterator; persistent workers use one iterator for all epochs."""
        epoch = self._epochs.get(iterator)
        if epoch is None or (iterator._num_yielded == 0 and epoch.returned):  # noqa: SLF001
            epoch = self._epochs[iterator] = self._begin_epoch(iterator)
        return epoch

    def _begin_epoch(self, iterator: Any) -> LoaderEpoch:
        from accel_runtime.observe.heartbeat import LoaderEpoch  # noqa: PLC0415 - as above

        dataset = iterator._dataset  # noqa: SLF001
        try:
            length = len(iterator)
        except (TypeError, NotImplementedError):
            length = 0
        try:
            number = self._numbers[dataset] = self._numbers.get(dataset, -1) + 1
        except TypeError:  # a list, which no weak reference can have
            number = 0
        return LoaderEpoch(number, 0, length)
