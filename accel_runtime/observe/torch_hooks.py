"""Hooks in torch that record the progress of any script: optimizer steps, batches of its loaders, and parts of measured steps.

Standard library only. A script that never imports torch pays nothing.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from functools import lru_cache, wraps
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from accel_runtime.observe.import_hooks import call_after_import, call_after_torch_import
from accel_runtime.observe.throughput import TOKENS_KEY, count_elements, count_samples

if TYPE_CHECKING:
    from accel_runtime.observe.progress import MeasuredProgress, StepPart, TorchEpoch

__all__ = ["TorchHooks", "observe", "watch_progress"]

_ACCEL = f"{Path(__file__).parents[1]}{os.sep}"
"""Folder of the package, with the frames of prepared loaders."""
_COLLECTIVES = (
    "_allgather", "_reduce_scatter", "all_gather", "all_to_all", "allgather", "allreduce", "alltoall", "barrier", "broadcast",
    "gather", "monitored_barrier", "recv", "reduce", "scatter", "send",
)  # fmt: skip
"""Beginnings of the names of methods of a process group that communicate (torch 2.9 to 2.13)."""


def watch_progress(create: Callable[[], object]) -> None:
    """Record the progress of this process once it has imported torch.

    Args:
        create: Creates the heartbeat, which calls `observe`, at the first step of an optimizer or loop over a loader.
    """
    _get_hooks().watch(create)


def observe(progress: MeasuredProgress) -> TorchHooks:
    """Let the hooks in torch record the progress of this process, and return them."""
    hooks = _get_hooks()
    hooks.watch(None)
    hooks.begin(progress)
    return hooks


@lru_cache(maxsize=1)
def _get_hooks() -> TorchHooks:
    return TorchHooks()


class TorchHooks:
    """Hooks in torch: those that count are always there, those by which parts of a step are measured only for that step.

    They record what the thread does that steps optimizers, not others that load ahead, nor processes that the script forks.
    """

    def __init__(self) -> None:
        self.progress: MeasuredProgress | None = None
        self._create: Callable[[], object] | None = None
        self._is_watching = False
        self._thread = threading.get_ident()
        self.is_compiling: Callable[[], bool] = bool
        """Function that returns True while torch.compile traces."""
        self._step_hook: Any = None
        self._world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._epochs = _TorchEpochs(self, self._world_size)
        self._counting: list[Any] = []
        """The hooks that count: objects with `remove`."""
        self._parts: list[_Replacement] = []
        """Functions of torch that are replaced while parts of a step are measured."""
        self._has_collectives = False
        os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """Record nothing from now on: in a process that the script has forked, or while the interpreter exits."""
        self.progress = self._create = None
        self._set_step_hook(self._begin_at_step)
        self._epochs.forget()

    def watch(self, create: Callable[[], object] | None) -> None:
        """Install the hooks that count, once torch is imported."""
        self._create = create
        if not self._is_watching:
            self._is_watching = True
            call_after_torch_import(self._install)

    def begin(self, progress: MeasuredProgress) -> None:
        """Record the progress of this process."""
        self.follow_thread()
        self.progress, self._create = progress, None
        self._set_step_hook(progress.count_step)

    def find(self) -> MeasuredProgress | None:
        """Return the heartbeat of this process; None without one, and in other threads."""
        if threading.get_ident() != self._thread:
            return None
        if self._create is not None:
            create, self._create = self._create, None
            create()
        return self.progress

    def follow_thread(self) -> None:
        """Measure the parts of steps in the current thread."""
        self._thread = threading.get_ident()

    def is_followed_thread(self) -> bool:
        """Return whether the current thread is the one in which parts of steps are measured."""
        return threading.get_ident() == self._thread

    def _install(self, torch: ModuleType) -> None:
        # A fork server restores all modules of torch at once: only torch itself is imported. torch.optim hides the name of its module.
        self.is_compiling = torch.compiler.is_dynamo_compiling  # one call, where is_compiling makes two
        register = sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook
        self._step_hook = register(self._begin_at_step if self.progress is None else self.progress.count_step)
        self._counting.append(self._step_hook)
        self._parts.append(_replace_backward(self, torch, waits=self._world_size > 1))
        call_after_import("torch.utils.data.dataloader", self._watch_loaders)

    def _watch_loaders(self, module: ModuleType) -> None:
        self._counting.append(self._epochs.install(sys.modules["torch"], module))

    def close(self) -> None:
        """Remove all hooks."""
        self.remove()
        for hook in self._counting:
            hook.remove()

    def _set_step_hook(self, call: Callable[..., None]) -> None:
        """Replace the function after each step of an optimizer, also while torch calls it (torch 2.9 to 2.13)."""
        if self._step_hook is not None:
            hooks = self._step_hook.hooks_dict_ref()
            if self._step_hook.id in hooks:
                hooks[self._step_hook.id] = call

    def _begin_at_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Create the heartbeat after the first step."""
        # A step that torch.compile runs is not counted: this function would break its graph.
        if self._create is None or self.is_compiling():
            return
        self.follow_thread()
        progress = self.find()
        if progress is not None:
            progress.count_step(optimizer)

    # Parts of a step

    def measure_parts(self) -> None:
        """Replace the functions of torch in which parts of a step begin and end."""
        if not self._has_collectives and "torch.distributed.distributed_c10d" in sys.modules:
            self._has_collectives = True
            self._parts += _replace_collectives(self, sys.modules["torch.distributed.distributed_c10d"])
        self._epochs.measure()
        for replacement in self._parts:
            replacement.install()

    def remove(self) -> None:
        """Restore the functions of torch."""
        self._epochs.end_measuring()
        for replacement in self._parts:
            replacement.remove()

    def find_part(self) -> StepPart:
        """Return the part of a step that the followed thread is in, by its stack."""
        from accel_runtime.observe.progress import StepPart  # noqa: PLC0415 - as above

        frame = sys._current_frames().get(self._thread)  # noqa: SLF001
        while frame is not None:
            if frame.f_code in self._epochs.codes:
                return StepPart.DATA
            if frame.f_globals.get("__name__") == "torch.autograd" and frame.f_code.co_name == "backward":
                return StepPart.BACKWARD
            if frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d":
                return StepPart.WAIT
            frame = frame.f_back
        return StepPart.REST


class _Replacement:
    """A function of torch that is replaced for some time.

    Args:
        owner: The module or class that has it.
        name: Its name.
        build: Returns the other function, which calls the one that this object has as `original`.
    """

    def __init__(
        self, torch: ModuleType, owner: Any, name: str, build: Callable[[_Replacement], Callable[..., Any]]
    ) -> None:
        self.original: Callable[..., Any] = vars(owner)[name]
        self._owner, self._name, self._is_installed = owner, name, False
        self._function = wraps(self.original)(build(self))
        _exclude_from_compilation(torch, self._function)

    def install(self) -> None:
        """Replace the function."""
        if not self._is_installed:
            self._is_installed = True
            self.original = vars(self._owner)[self._name]
            setattr(self._owner, self._name, self._function)

    def remove(self) -> None:
        """Restore the function, unless something else has wrapped the other one meanwhile, which then stays in use."""
        if vars(self._owner)[self._name] is self._function:
            setattr(self._owner, self._name, self.original)
            self._is_installed = False


def _exclude_from_compilation(torch: Any, function: Any) -> None:
    """Let torch.compile leave a function alone, without importing torch._dynamo (torch 2.9 to 2.13)."""
    function._torchdynamo_disable = True  # noqa: SLF001
    frames = torch._C._dynamo.eval_frame  # noqa: SLF001
    action, strategy = frames._FrameAction, frames._FrameExecStrategy  # noqa: SLF001
    frames.set_code_exec_strategy(function.__code__, strategy(action.SKIP, action.DEFAULT))


def _replace_backward(hooks: TorchHooks, torch: Any, *, waits: bool) -> _Replacement:
    """Record backward passes, and if they may wait for other ranks, the moment at which the gradients of this one are complete.

    The callbacks of a pass run in the order in which they are queued. That of DDP, which waits for the other ranks, is queued by its
    last gradient, so that one which the loss queues runs before it (torch 2.9 to 2.13, `Engine::queue_callback`).
    """
    engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 - as DDP and FSDP use it

    def build(replacement: _Replacement) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            progress = hooks.find()
            if progress is None or not progress.begin_backward():
                replacement.original(tensors, *args, **kwargs)
                return
            handle = _call_when_complete(engine, tensors, progress.complete_gradients) if waits else None
            try:
                replacement.original(tensors, *args, **kwargs)
            finally:
                if handle is not None:
                    handle.remove()
                progress.end_backward()

        return backward

    return _Replacement(torch, torch.autograd, "backward", build)


def _call_when_complete(engine: Any, loss: Any, call: Callable[[], None]) -> Any:
    """Register a function for the end of the backward pass of a loss; return the handle of the hook, or None."""
    grad_fn = getattr(loss, "grad_fn", None)
    if grad_fn is None:
        return None
    return grad_fn.register_prehook(lambda _gradients: engine.queue_callback(call))


def _replace_collectives(hooks: TorchHooks, c10d: Any) -> list[_Replacement]:
    """Record the time in calls of torch.distributed as waiting, those of functions that the script has imported included."""

    def build(replacement: _Replacement) -> Callable[..., Any]:
        def wait(*args: Any, **kwargs: Any) -> Any:
            progress = hooks.find()
            if progress is None:
                return replacement.original(*args, **kwargs)
            progress.begin_wait()
            try:
                return replacement.original(*args, **kwargs)
            finally:
                progress.end_wait()

        return wait

    torch = sys.modules["torch"]
    names = [name for name in vars(c10d.ProcessGroup) if name.startswith(_COLLECTIVES)]
    replaced = [(c10d.ProcessGroup, name) for name in names] + [(c10d.Work, "wait")]
    # DDP averages buffers by it before a forward pass.
    replaced.append((sys.modules["torch.distributed"], "_broadcast_coalesced"))
    return [_Replacement(torch, owner, name, build) for owner, name in replaced]


class _TorchEpochs:
    """Epochs of torch's loaders, whose iterators count their batches.

    Samples are computed from the batch size. Only if batches have tokens, or no fixed size, each one is looked at.

    Args:
        hooks: The hooks.
        world_size: The number of ranks, each of which loads as many samples.
    """

    def __init__(self, hooks: TorchHooks, world_size: int) -> None:
        self._hooks, self._world_size = hooks, world_size
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """Number of loops over each data set."""
        self._running: dict[int, tuple[ref[Any], TorchEpoch]] = {}
        """The running epochs by the id of the iterator."""
        self._examined: set[int] = set()
        """The ids of the iterators whose batches are looked at."""
        self._next: _Replacement | None = None
        self._is_measuring, self._depth = False, 0
        self._base: type = object
        self.codes: set[CodeType] = set()
        """Functions in which the script waits for a batch."""

    def install(self, torch: ModuleType, module: Any) -> _Replacement:
        """Record loops over loaders from now on; return the function that is replaced for it."""
        self._base = module._BaseDataLoaderIter  # noqa: SLF001 - the class of all its iterators (torch 2.9 to 2.13)
        self.codes.add(self._base.__next__.__code__)  # type: ignore[attr-defined]
        self._next = _Replacement(torch, self._base, "__next__", self._build_next)

        def build(replacement: _Replacement) -> Callable[..., Any]:
            def iterate(loader: Any) -> Any:
                progress = self._hooks.find()
                if progress is not None:
                    self._end_epoch(id(loader._iterator))  # noqa: SLF001 - persistent workers have one iterator for all
                iterator = replacement.original(loader)
                if (
                    progress is not None
                    and isinstance(iterator, self._base)
                    and not _is_of_prepared(sys._getframe(1))  # noqa: SLF001
                ):
                    self._begin_epoch(progress, iterator)
                return iterator

            return iterate

        replacement = _Replacement(torch, module.DataLoader, "__iter__", build)
        replacement.install()
        return replacement

    def forget(self) -> None:
        """Forget the running epochs, whose iterators may be deleted when the interpreter has no modules any more."""
        self._running.clear()
        self._examined.clear()

    def measure(self) -> None:
        """Record the waits for batches from now on."""
        self._is_measuring = True
        if self._next is not None:
            self._next.install()

    def end_measuring(self) -> None:
        """Record the waits for batches no more."""
        self._is_measuring = False
        self._remove_unused()

    def _remove_unused(self) -> None:
        if self._next is not None and not (self._is_measuring or self._examined):
            self._next.remove()

    def _begin_epoch(self, progress: MeasuredProgress, iterator: Any) -> None:
        from accel_runtime.observe.progress import TorchEpoch  # noqa: PLC0415 - at first use: 0.1 s

        key, state = id(iterator), vars(iterator)
        length = _find_length(iterator)
        epoch = TorchEpoch(self._count_loop(state["_dataset"]), 0, length, state)
        progress.begin_epoch(epoch)
        self._running[key] = ref(iterator, lambda _: self._end_epoch(key)), epoch
        self._examined.add(key)  # until its first batch
        if self._next is not None:
            self._next.install()

    def _count_loop(self, dataset: Any) -> int:
        """Return the number of loops over a data set before."""
        try:
            number = self._numbers[dataset] = self._numbers.get(dataset, -1) + 1
        except TypeError:  # a list, which no weak reference can have
            return 0
        return number

    def _end_epoch(self, key: int) -> None:
        """End the epoch of an iterator that is deleted, or begins again; without one, do nothing."""
        _, epoch = self._running.pop(key, (None, None))
        self._examined.discard(key)
        self._remove_unused()
        if epoch is not None and self._hooks.progress is not None:
            self._hooks.progress.end_epoch(epoch, is_finished=epoch.is_finished())
            epoch.release()

    def _build_next(self, replacement: _Replacement) -> Callable[..., Any]:
        from accel_runtime.observe.progress import StepPart  # noqa: PLC0415 - as above

        def load(iterator: Any) -> Any:
            progress = self._hooks.find()
            if progress is None:  # a thread that loads ahead
                self._end_epoch(id(iterator))
            if progress is None or self._depth:  # a data set may have a loader of its own
                return replacement.original(iterator)
            progress.begin_part(StepPart.DATA)
            self._depth += 1
            try:
                batch = replacement.original(iterator)
            except StopIteration:
                progress.begin_part(StepPart.REST)
                raise
            finally:
                self._depth -= 1
            progress.begin_part(StepPart.FORWARD)
            if id(iterator) in self._examined:
                self._examine(id(iterator), iterator, batch)
            return batch

        return load

    def _examine(self, key: int, iterator: Any, batch: Any) -> None:
        """Count the samples and tokens of a batch, or from now on by the number of batches if all have as many."""
        _, epoch = self._running[key]
        samples, tokens = count_samples(batch), count_elements(batch, TOKENS_KEY)
        epoch.samples += self._world_size * samples
        epoch.tokens += self._world_size * tokens
        most = _find_num_samples(iterator)
        if not tokens and most is not None and samples in {most[0], most[1]}:
            epoch.count_by_batches(self._world_size * most[0], self._world_size * most[1])
            self._examined.discard(key)
            self._remove_unused()


def _is_of_prepared(frame: FrameType | None) -> bool:
    """Return whether a loop over a loader is one of accel, for a prepared loader, which counts itself."""
    while (
        frame is not None and frame.f_code.co_name == "__iter__"
    ):  # of a class of loaders that the script has
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_ACCEL)


def _find_length(iterator: Any) -> int:
    try:
        return len(iterator)
    except (TypeError, NotImplementedError):
        return 0


def _find_num_samples(iterator: Any) -> tuple[int, int] | None:
    """Return the samples in a full batch, and in all; None if batches have no fixed size, or their number is unknown."""
    batches = iterator._index_sampler  # noqa: SLF001 - torch 2.9 to 2.13
    size = getattr(batches, "batch_size", None)
    if type(batches).__module__ != "torch.utils.data.sampler" or not isinstance(size, int):
        return None
    try:
        samples, length = len(batches.sampler), len(batches)
    except (TypeError, NotImplementedError, AttributeError):
        return None
    return size, min(samples, length * size)
