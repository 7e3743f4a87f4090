"""Gradient accumulation, and checks that gradients are averaged over the processes and computed from different data."""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.foundation import nested
from accel_runtime.foundation.module_names import named_parameters
from accel_runtime.foundation.options import GradientAccumulationPlugin
from accel_runtime.foundation.torch_internals import TORCH, version_of
from accel_runtime.observe.call_sites import call_site
from accel_runtime.parallel.strategy import Strategy
from accel_runtime.storage.errors import format_names
from accel_runtime.storage.schema import Count

__all__ = ["Accumulation", "AveragingCheck", "CycleState", "FirstInput", "MicroBatch"]

_Counts = tuple[int, int, int, int, bool, bool, bool]


@dataclass(frozen=True)
class CycleState:
    """State of an accumulation cycle, as checkpoints hold it."""

    micro_batches: Count
    """Number of micro-batches of the cycle so far."""
    step: Count
    """Number of micro-batches since the end of an epoch."""
    synced: bool
    """True if the newest micro-batch completes the cycle."""
    is_new: bool
    """True until the first backward pass of the cycle."""
    weighted: bool
    """True if the newest loss had a weight."""


class Accumulation:
    """Count of the micro-batches in an accumulation cycle, and whether their losses have weights.

    Others read its attributes, which are plain since each step reads them; only its methods assign them.

    Args:
        plugin: Length and end of a cycle; a number is the micro-batches of a cycle.

    Raises:
        ValueError: A cycle of less than one micro-batch.
    """

    def __init__(self, plugin: GradientAccumulationPlugin | int) -> None:
        if not isinstance(plugin, GradientAccumulationPlugin):
            plugin = GradientAccumulationPlugin(plugin)
        self.plugin = plugin
        """Options of the script; an assigned field takes effect from the next micro-batch on."""
        self.synced = True
        """True if the current backward pass completes a cycle, so that the optimizer steps after it."""
        self.is_new_cycle = True
        """True until the first backward pass of the current cycle."""
        self.weighted = False
        """True if the newest loss had a weight."""
        self.num_backward = 0
        """Number of backward passes so far."""
        self.is_first = True
        """True if the current micro-batch is the first of its cycle."""
        self.num_cycles = 0
        """Number of micro-batches so far that completed a cycle."""
        self.num_open = 0
        """Number of `accumulate` contexts that are open."""
        self.is_controlled = False
        """True once the script has used `accumulate` or `no_sync`, or set if gradients are synchronized."""
        self._no_sync_depth = 0
        """Number of calls of `suspend_sync` that have not ended."""
        self._check: Callable[[], None] | None = None
        """Called before the next backward pass."""
        self._backward_before = 0
        self._step = self._count = 0
        self._models: frozenset[int] = frozenset()
        self._mixed_models = False

    @property
    def step(self) -> int:
        """Return the number of micro-batches since the end of an epoch."""
        return self._step

    @property
    def count(self) -> int:
        """Return the number of micro-batches so far in the current cycle."""
        return self._count

    @property
    def models(self) -> frozenset[int]:
        """Return the identities of the models of the newest micro-batch."""
        return self._models

    @property
    def has_mixed_models(self) -> bool:
        """Return whether a cycle had micro-batches with different models."""
        return self._mixed_models

    def set_step(self, step: int) -> None:
        """Continue as after `step` micro-batches; raise ValueError if there is no such number."""
        if type(step) is not int or step < 0:
            raise ValueError(f"Invalid step {step!r}: expected a whole number of at least 0.")
        self._step, self._count = step, step % self.steps

    @property
    def steps(self) -> int:
        """Return the number of micro-batches in a cycle."""
        return self.plugin.num_steps

    def set_steps(self, steps: int) -> None:
        """Set the number of micro-batches in a cycle, also in the script's plugin; raise ValueError if it is below 1."""
        self.plugin.num_steps = steps

    def set_synced(self, synced: bool) -> None:
        """Override whether the current backward pass completes a cycle, until the next micro-batch."""
        self.synced, self.is_controlled = synced, True

    @property
    def syncs_gradients(self) -> bool:
        """Return whether the current backward pass completes the gradients of a cycle."""
        return self.synced and not self._no_sync_depth

    @property
    def averages_gradients(self) -> bool:
        """Return whether the current backward pass averages gradients over the ranks, whether or not a cycle is complete."""
        return (self.synced or self.plugin.sync_each_batch) and not self._no_sync_depth

    @property
    def has_backward(self) -> bool:
        """Return whether there was a backward pass in the current micro-batch."""
        return self.num_backward != self._backward_before

    def describe(self, processes: int, *, split_batches: bool) -> str:
        """Return what the gradients of an optimizer step average, over `processes` processes.

        With `split_batches`, processes split the script's batches, so a sum differs from that of one process.
        """
        if self.weighted:
            text = f"the mean over all items of {self.steps} micro-batch(es), as backward(weight=...) counts them"
        else:
            loss = f"each loss divided by {self.steps}" if self.steps > 1 else "losses as they are"
            text = f"{self.steps} micro-batch(es) an optimizer step, {loss} (unless backward() is given a weight)"
        if processes == 1:
            return text
        sums = f": a loss that is a sum over the batch gives 1/{processes} of the gradient of one process"
        return f"{text}; averaged over {processes} processes{sums if split_batches else ''}"

    def advance(self, *, is_last: bool) -> bool:
        """Start the next micro-batch, and return whether it completes a cycle.

        The last one of an epoch does, unless the plugin disables it.
        """
        self.is_first = self._count == 0
        self.is_new_cycle = self.is_new_cycle or self.is_first
        self._backward_before = self.num_backward
        self._count += 1
        ends_cycle = is_last and self.plugin.sync_with_dataloader
        self._step = 0 if ends_cycle else self._step + 1
        self.synced = ends_cycle or self._count >= self.plugin.num_steps
        if self.synced:
            self._count = 0
            self.num_cycles += 1
        return self.synced

    def record_models(self, models: Iterable[Any]) -> bool:
        """Record the models of a micro-batch; return True the first time that they differ within a cycle."""
        previous, self._models = self._models, frozenset(map(id, models))
        is_mixed = self._count > 0 and bool(previous) and previous != self._models
        is_first = is_mixed and not self._mixed_models
        self._mixed_models = self._mixed_models or is_mixed
        return is_first

    def reset(self) -> None:
        """Start a new cycle."""
        self._step = self._count = 0

    def begin_plain_backward(self) -> bool:
        """Record a backward pass whose loss is used as it is; return False, and record none, if a cycle has several.

        Each step of every training loop without accumulation calls it.
        """
        if self.plugin.num_steps == 1 and (self.is_new_cycle or not self.weighted):
            self.is_new_cycle = self.weighted = False
            self.num_backward += 1
            return True
        return False

    def begin_backward(self, *, weighted: bool) -> None:
        """Record a backward pass; raise ValueError if only some losses of its cycle have weights."""
        if self._check is not None:
            check, self._check = self._check, None
            check()
        if not self.is_new_cycle and self.weighted is not weighted:
            raise ValueError(
                "backward() was called with a weight and without one for the same optimizer step: the mean of such losses is "
                "not defined. Pass a weight to every backward() of an accumulation cycle, or to none."
            )
        self.weighted = weighted
        self.is_new_cycle = False
        self.num_backward += 1

    def end_cycle(self) -> None:
        """Record that the gradients of the cycle were applied or cleared: the next backward pass begins another one."""
        self.is_new_cycle = True

    def suspend_sync(self) -> None:
        """Complete no cycle, and average no gradients, until `resume_sync`; calls may be nested."""
        self._no_sync_depth += 1
        self.is_controlled = True

    def resume_sync(self) -> None:
        """End the innermost `suspend_sync`."""
        self._no_sync_depth -= 1

    @contextmanager
    def check_before_backward(self, check: Callable[[], None]) -> Iterator[None]:
        """Call a function before the first backward pass inside the context."""
        self._check = check
        try:
            yield
        finally:
            self._check = None

    def capture_cycle(self) -> CycleState:
        """Return the state of the current cycle, the same on all ranks."""
        return CycleState(self._count, self._step, self.synced, self.is_new_cycle, self.weighted)

    def restore_cycle(self, state: CycleState) -> None:
        """Continue in the cycle of a saved state; the length of cycles does not change."""
        self._count, self._step = state.micro_batches, state.step
        self.synced, self.is_new_cycle, self.weighted = state.synced, state.is_new, state.weighted
        self._models = frozenset()

    def open(self) -> _Counts:
        """Record an `accumulate` context that begins; return the counts before it, for `close`."""
        self.num_open += 1
        self.is_controlled = True
        flags = self.synced, self.is_new_cycle, self.is_first
        return self.num_backward, self._step, self._count, self.num_cycles, *flags

    def close(self, counts: _Counts | None = None) -> None:
        """Record an `accumulate` context that ends; if it failed, restore the counts before it.

        They stay after a backward pass, whose gradients cannot be removed.
        """
        self.num_open -= 1
        if counts is not None and self.num_backward == counts[0]:
            _, self._step, self._count, self.num_cycles, *flags = counts
            self.synced, self.is_new_cycle, self.is_first = flags


class MicroBatch(AbstractContextManager[None]):
    """Context of one micro-batch: gradients stay local unless it completes a cycle.

    A micro-batch that fails before its backward pass is not counted.
    """

    def __init__(
        self,
        accumulation: Accumulation,
        *,
        is_last: bool,
        no_sync: Callable[[Any], AbstractContextManager[None]],
        models: Iterable[Any],
    ) -> None:
        self._accumulation = accumulation
        self._is_last = is_last
        self._no_sync = no_sync
        self._models = models
        self._contexts = ExitStack()

    @override
    def __enter__(self) -> None:
        self._counts = self._accumulation.open()
        if self._accumulation.advance(is_last=self._is_last) or self._accumulation.plugin.sync_each_batch:
            return
        for model in self._models:
            self._contexts.enter_context(self._no_sync(model))

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._accumulation.close(None if kind is None else self._counts)
        self._contexts.close()


_GRADIENTS_LOG = logging.getLogger("accel_runtime.training.gradients")
_MAX_NAMES = 5
"""Number of parameters that a warning names."""

_Version = tuple[int, int] | None
"""Identity of a gradient and its version, which changes in place."""


class AveragingCheck:
    """Warn once per model and optimizer with gradients that are not averaged over the processes.

    docs/design/replicated-models.md has the reasons.

    Args:
        strategy: The strategy of the run; the first rank writes the warnings.
        accumulation: Counts accumulation cycles.
        prepared: All prepared models; updated by the caller.
    """

    def __init__(self, strategy: Strategy, accumulation: Accumulation, prepared: Sequence[nn.Module]) -> None:
        self._strategy, self._backend = strategy, strategy.backend
        self._accumulation = accumulation
        self._prepared = prepared
        self._expects_model = strategy.backend.topology.world_size > 1
        self._averaged: dict[nn.Module, set[nn.Parameter]] = {}
        self._models: list[_Model] = []

    def add(self, prepared: nn.Module, *, averages: bool) -> None:
        """Add a prepared model; `averages` if gradients of parameters that now require one are averaged."""
        original = self._strategy.unwrap_model(prepared)
        # A model that was unwrapped and prepared again.
        self._models = [model for model in self._models if model.original is not original]
        trainable = [p for p in original.parameters() if p.requires_grad and averages]
        self._averaged[original] = set(trainable)
        if isinstance(prepared, DistributedDataParallel) and trainable:
            passes = ForwardPasses()
            prepared.register_forward_pre_hook(passes)
            self._models.append(_Model(prepared, original, passes))
            self._separate_models()

    def _separate_models(self) -> None:
        """Let each model be recognized by parameters of its own: others get gradients in the passes of another model too."""
        averaged = [self._averaged[model.original] for model in self._models]
        counts = Counter(parameter for parameters in averaged for parameter in parameters)
        for model, parameters in zip(self._models, averaged, strict=True):
            own = {parameter for parameter in parameters if counts[parameter] == 1}
            model.watch([parameter for parameter in model.original.parameters() if parameter in own])

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters whose gradients are averaged, with their names in their models."""
        for model, averaged in self._averaged.items():
            yield from ((name, p) for name, p in model.named_parameters() if p in averaged)

    def clear(self) -> None:
        """Remove all models."""
        self._averaged.clear()
        self._models.clear()

    def begin_backward(self) -> None:
        """Record the gradients before a backward pass."""
        accumulation = self._accumulation
        if self._expects_model:
            self._expects_model = False
            if not self._prepared and self._backend.topology.rank == 0:
                _GRADIENTS_LOG.warning(
                    "Gradients are not averaged over the %d processes in backward() at %s: no model is prepared, so each process "
                    "trains weights of its own. Give the model to prepare(), also one in a DistributedDataParallel of your own.",
                    self._backend.topology.world_size,
                    call_site(),
                )
        if self._models and accumulation.syncs_gradients:
            for model in self._models:
                model.begin_backward()

    def end_backward(self) -> None:
        """Warn if a model received gradients without a forward pass after which DDP averages them."""
        accumulation = self._accumulation
        if self._models and accumulation.syncs_gradients:
            for model in self._models:
                if model.end_backward() and self._backend.topology.rank == 0:
                    _GRADIENTS_LOG.warning(
                        "Gradients of %s are not averaged over the %d processes in backward() at %s: no forward pass of the "
                        "prepared model belongs to them. Call the model that prepare() returned, once for each backward(): "
                        "unwrap_model(model)(...) and methods of the model bypass it. Call a method that training needs in "
                        "forward().",
                        type(model.original).__name__,
                        self._backend.topology.world_size,
                        call_site(),
                    )
                if (repeated := model.take_repeated_gradients()) and self._backend.topology.rank == 0:
                    _GRADIENTS_LOG.warning(
                        "Gradients of %s are averaged over the %d processes in part only, in backward() at %s: DDP averages the first "
                        "gradient of a parameter, and %s received several, as activation checkpointing with use_reentrant=True does for "
                        "layers that are used twice. Pass use_reentrant=False to torch.utils.checkpoint.checkpoint.",
                        type(model.original).__name__,
                        self._backend.topology.world_size,
                        call_site(),
                        format_names(repeated, _MAX_NAMES),
                    )

    def expect_averaging(self, prepared: nn.Module) -> None:
        """Record that the next backward pass averages the gradients of a model, whatever its forward pass was."""
        for model in self._models:
            if model.original is self._strategy.unwrap_model(prepared):
                model.passes.averaging = True

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Warn if an optimizer is about to apply gradients that are not averaged; return whether it does."""
        names = {p: name for model in self._averaged for name, p in named_parameters(model)}
        averaged = set[nn.Parameter]().union(*self._averaged.values())
        local = [
            (names.get(parameter, name), parameter)
            for name, parameter in _named_parameters(optimizer)
            if parameter.grad is not None and parameter not in averaged
        ]
        if not local:
            return False
        if self._backend.topology.rank == 0:
            text = ", ".join(f"{name} {list(parameter.shape)}" for name, parameter in local[:_MAX_NAMES])
            _GRADIENTS_LOG.warning(
                "%s trains %d parameters whose gradients are not averaged over the %d processes, so each process gets "
                "weights of its own: %s%s. %s.",
                type(optimizer).__name__,
                len(local),
                self._backend.topology.world_size,
                text,
                ", ..." if len(local) > _MAX_NAMES else "",
                "Their model is prepared for evaluation, or they required no gradient at prepare(): set requires_grad before "
                "prepare()"
                if all(parameter in names for _, parameter in local)
                else "They belong to no prepared model: give their model to prepare(), or average their gradients with "
                "accelerator.reduce(parameter.grad, 'mean')",
            )
        return True


class ForwardPasses:
    """Hook before the forward passes of a model in DDP."""

    averaging = False
    """True if DDP averages the gradients of the next backward pass that reaches the model."""

    def __call__(self, model: Any, _: Any) -> None:
        """Record a forward pass, on the same condition as DDP."""
        if torch.is_grad_enabled() and model.require_backward_grad_sync:
            self.averaging = True


class _Model:
    """Model in DDP."""

    def __init__(self, prepared: Any, original: nn.Module, passes: ForwardPasses) -> None:
        self._prepared = prepared
        self.original = original
        self.passes = passes
        self._parameters: Sequence[nn.Parameter] = ()
        self._before: _Version = None
        self._all_before: Sequence[_Version] = ()
        self._unexpected = 0
        self._warned = False
        self._num_averaged = 0
        self._has_repeats = False
        self._counts: _GradientCounts | None = None

    def watch(self, parameters: Sequence[nn.Parameter]) -> None:
        """Recognize the model by the gradients of these parameters; it is not checked without any."""
        self._parameters = parameters

    def begin_backward(self) -> None:
        """Record the first gradient, or all of them if the model is not expected to receive any."""
        self.take_repeated_gradients()  # of a pass that failed
        if not self._parameters:
            return
        if self.passes.averaging:
            self._before = _version_of(self._parameters[0])
            self._num_averaged += 1
            # Counted in the passes 1, 2, 4, 8, ... only. A static graph is averaged after the last gradient of each parameter.
            if not (
                self._num_averaged & (self._num_averaged - 1)
                or self._has_repeats
                or self._prepared.static_graph
            ):
                self._counts = _GradientCounts(self._parameters)
            return
        if not self._prepared.require_backward_grad_sync:  # the script uses DDP's own no_sync
            return
        self._unexpected += 1
        # Checked at the counts 1, 2, 4, 8, ... only, as a model that is not trained yet gets here in every pass.
        if not (self._warned or self._unexpected & (self._unexpected - 1)):
            self._all_before = [_version_of(parameter) for parameter in self._parameters]

    def end_backward(self) -> bool:
        """Return whether gradients have arrived without an average over the processes."""
        if not self._parameters:
            return False
        if self.passes.averaging:
            # DDP completes all gradients or none, so the first one is enough.
            self.passes.averaging = _version_of(self._parameters[0]) == self._before
            return False
        before, self._all_before = self._all_before, ()
        self._warned = self._warned or any(
            _version_of(parameter) != old for parameter, old in zip(self._parameters, before, strict=False)
        )
        return bool(before) and self._warned

    def take_repeated_gradients(self) -> list[str]:
        """Return the names of the parameters that received several gradients in the backward pass, if they were counted."""
        counts, self._counts = self._counts, None
        if counts is None:
            return []
        counts.remove()
        repeated = [name for name, p in named_parameters(self.original) if counts.by_parameter[p] > 1]
        self._has_repeats = bool(repeated)
        return repeated


class _GradientCounts:
    """Counts the gradients that each parameter receives until `remove` is called."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.by_parameter = Counter[torch.Tensor]()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._count)  # type: ignore[no-untyped-call]
            for parameter in parameters
            if parameter.requires_grad  # the script may freeze some after prepare()
        ]

    def _count(self, parameter: torch.Tensor) -> None:
        self.by_parameter[parameter] += 1

    def remove(self) -> None:
        """Count no more."""
        for handle in self._handles:
            handle.remove()


def _version_of(parameter: nn.Parameter) -> _Version:
    """Return a value that changes whenever a gradient is written or replaced."""
    grad = parameter.grad
    return None if grad is None else (id(grad), version_of(grad))


def _named_parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    for number, group in enumerate(optimizer.param_groups):
        unnamed = (f"parameter {index} of group {number}" for index in range(len(group["params"])))
        yield from zip(group.get("param_names") or unnamed, group["params"], strict=True)


_DATA_LOG = logging.getLogger("accel_runtime.data")
_KEY = "accel/first input"
_MAX_ELEMENTS = 1 << 16
"""Maximum number of elements of a tensor that are compared."""


class FirstInput:
    """Compare the first training batch of a model in DDP between the first two ranks, unless a loader in use shards the data.

    Rank 1 stores a fingerprint at its first forward pass, and rank 0 reads it at its second: by then DDP has
    synchronized with rank 1, and no rank has to wait.
    """

    def __init__(self, backend: Backend, divides_data: Callable[[], bool]) -> None:
        self._backend = backend
        self._divides_data = divides_data
        self._recorded: tuple[str, str, str] | None = None
        self._handle: RemovableHandle | None = None

    def watch(self, model: nn.Module) -> None:
        """Check the forward passes of a model in DDP until its input is compared."""
        if self._backend.topology.rank in {0, 1}:
            self._handle = model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, model: Any, args: Any, kwargs: Any) -> None:
        """Record or compare the input of a forward pass."""
        # torch.compile cannot trace this hook.
        if torch.compiler.is_compiling() or not (
            torch.is_grad_enabled() and model.require_backward_grad_sync
        ):
            return
        if self._recorded is not None:
            if not self._divides_data():  # the first pass may have been a trial before the loop
                self._compare(*self._recorded)
        elif not self._divides_data() and (fingerprint := _fingerprint((args, kwargs))):
            key = f"{_KEY}/{self._backend.increment_store_key(_KEY)}"
            if self._backend.topology.rank == 0:
                self._recorded = (key, fingerprint, str(call_site(TORCH)))
                return
            self._backend.set_store_key(key, fingerprint)
        if self._handle is not None:
            self._handle.remove()

    def _compare(self, key: str, fingerprint: str, site: str) -> None:
        if self._backend.get_store_key(key) != fingerprint:
            return
        _DATA_LOG.warning(
            "Ranks 0 and 1 train on the same batch, at %s: no prepared DataLoader is in use, and the inputs of the model are equal. "
            "Give the DataLoader to prepare() and use the one that it returns, or let each process take data of its own, by accelerator.process_index, "
            "split_between_processes() or a generator with another seed on each process.",
            site,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model belongs to no run.
        return partial, (_do_nothing,)


def _fingerprint(data: Any) -> str:
    """Return a checksum of the tensors of a batch; empty without tensors."""
    tensors = [
        leaf
        for leaf in nested.leaves(data)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]
    checksum = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, -(-len(flat) // _MAX_ELEMENTS))].cpu().contiguous()
        checksum = zlib.crc32(sample.view(torch.uint8).numpy().tobytes(), checksum)
    return f"{[list(tensor.shape) for tensor in tensors]} {checksum}" if tensors else ""


def _do_nothing(*_: Any) -> None:
    return None
