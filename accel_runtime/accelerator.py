"""The facade a script talks to: short methods that hand over to the rooms behind them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accel_runtime import collectives, tree
from accel_runtime.accumulation import Accumulation
from accel_runtime.backends import connect
from accel_runtime.backends.base import Reduction
from accel_runtime.data.loader import Batches, LoaderOptions, PreparedLoader
from accel_runtime.env import MixedPrecision, Settings
from accel_runtime.memory import release_memory
from accel_runtime.optimizer import PreparedOptimizer
from accel_runtime.options import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    chosen,
)
from accel_runtime.precision import FORMATS, AutocastForward, Precision
from accel_runtime.rng import RNG_TYPES
from accel_runtime.scheduler import PreparedScheduler
from accel_runtime.state import AcceleratorState, GradientState
from accel_runtime.topology import Topology
from accel_runtime.triggers import Triggers
from accel_runtime.uneven import UnevenInputs

__all__ = ["Accelerator"]


class Accelerator(Triggers, UnevenInputs):
    """What a training loop needs to run on any number of processes.

    Args:
        device_placement: Whether `prepare` moves models, and loaders their batches, to the device.
        split_batches: Whether a loader's batch size is the global one, to be split among the processes.
        mixed_precision: `no`, `bf16` or `fp16`; None takes what the launcher said, else `no`.
        gradient_accumulation_steps: Micro-batches whose gradients make one optimizer step.
        cpu: Compute on the CPU, whatever else is there.
        rng_types: Generators each rank takes over from the first at every epoch: `torch`, `cuda`, `xpu`.
            Loaders share their order always, so `generator` is accepted and asks nothing more.
        step_scheduler_with_optimizer: False leaves prepared schedulers entirely to the script.
        kwargs_handlers: At most one of each kind in `accel_runtime.options`.
        fp16: The early spelling of `mixed_precision="fp16"` (True) or `"no"` (False).

    Raises:
        ValueError: Options that contradict each other, or an environment variable we cannot use.
        RuntimeError: The device asked for is not there.
    """

    def __init__(  # noqa: PLR0913 - the signature scripts know
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        *,
        mixed_precision: MixedPrecision | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        rng_types: Iterable[str] | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[KwargsHandler] | None = None,
        fp16: bool | None = None,
    ) -> None:
        settings = Settings.from_env(os.environ)
        wanted = _precision(mixed_precision, fp16=fp16) or settings.mixed_precision
        self.settings = replace(settings, mixed_precision=wanted, device="cpu" if cpu else settings.device)
        """What the launcher and the arguments came to."""
        options = chosen(kwargs_handlers, InitProcessGroupKwargs)
        self._connected(connect(self.settings, Topology.here(), options))
        self._precision = Precision(
            wanted,
            self._backend.device,
            chosen(kwargs_handlers, AutocastKwargs),
            chosen(kwargs_handlers, GradScalerKwargs),
        )
        self._replication = chosen(kwargs_handlers, DistributedDataParallelKwargs)
        self._accumulation = Accumulation(gradient_accumulation_steps)
        self._loading = LoaderOptions(split_batches, device_placement, _rng_types(rng_types))
        self._step_with_optimizer = step_scheduler_with_optimizer
        self._batches = Batches()
        self._models: list[nn.Module] = []
        self._optimizers: list[PreparedOptimizer] = []
        self._loaders: list[PreparedLoader] = []

    # What is in force ------------------------------------------------------------------

    @property
    def mixed_precision(self) -> MixedPrecision:
        """The number format in force."""
        return self.settings.mixed_precision

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of fp16; None in other formats."""
        return self._precision.scaler

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is the global one."""
        return self._loading.split_batches

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches whose gradients make one optimizer step."""
        return self._accumulation.steps

    @property
    def sync_gradients(self) -> bool:
        """Whether the backward pass in hand completes an accumulation window."""
        return self._accumulation.synced

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any prepared optimizer was left out for overflowed fp16 gradients."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes, each with an accelerator of its own."""
        return self.use_distributed and self.device.index is not None

    @property
    def native_amp(self) -> bool:
        """Whether torch's autocast is at work."""
        return self.mixed_precision != "no"

    @property
    def state(self) -> AcceleratorState:
        """The process and the number format, as one object to read or to print."""
        return AcceleratorState(self, self.mixed_precision)

    @property
    def gradient_state(self) -> GradientState:
        """Accumulation and the batch in hand, as one object to read."""
        return GradientState(self._accumulation, lambda: self._batches.current)

    # Preparing -------------------------------------------------------------------------

    def prepare(self, *objects: Any) -> Any:
        """Make models, optimizers, loaders and schedulers fit for the run.

        Args:
            *objects: In any order, also nested in lists, tuples and dicts. Anything else, and what is
                prepared already, comes back as it is.

        Returns:
            The same objects prepared, in the same order; a single one on its own.

        Raises:
            ValueError: A loader that cannot be shared out exactly.
        """
        # Schedulers come second: they need to know their optimizer's prepared form.
        first = tree.map_leaves(self._prepare_one, objects)
        done = tree.map_leaves(self._prepare_scheduler, first)
        return done[0] if len(objects) == 1 else done

    def _prepare_one(self, item: Any) -> Any:
        if isinstance(item, nn.Module):
            return self.prepare_model(item)
        if isinstance(item, torch.optim.Optimizer):
            return self.prepare_optimizer(item)
        return self.prepare_data_loader(item) if isinstance(item, DataLoader) else item

    def _prepare_scheduler(self, item: Any) -> Any:
        return self.prepare_scheduler(item) if isinstance(item, LRScheduler) else item

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Move a model to the device, make it compute in the chosen format and average its gradients."""
        if any(model is known for known in self._models):
            return model
        if self._loading.place:
            model = model.to(self.device)
        self._precision.wrap(model)
        prepared = self._backend.replicate(model, self._replication)
        self._models.append(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> PreparedOptimizer:
        """Make an optimizer wait for complete windows and use the loss scaler."""
        if isinstance(optimizer, PreparedOptimizer):
            return optimizer
        prepared = PreparedOptimizer(optimizer, self._accumulation, self._precision.scaler)
        self._optimizers.append(prepared)
        return prepared

    def prepare_data_loader(self, loader: DataLoader[Any]) -> PreparedLoader:
        """Make a loader give this process its slice of every global batch.

        Raises:
            ValueError: The loader cannot be shared out exactly.
        """
        if isinstance(loader, PreparedLoader):
            return loader
        prepared = PreparedLoader(loader, self._backend, self._batches, self._loading)
        self._loaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: LRScheduler) -> PreparedScheduler:
        """Make a scheduler advance with the samples all processes see."""
        if isinstance(scheduler, PreparedScheduler):
            return scheduler
        own = [o for o in self._optimizers if scheduler.optimizer in (o, o.optimizer)]
        return PreparedScheduler(
            scheduler,
            own or self._optimizers,
            self._accumulation,
            strides=1 if self.split_batches else self.num_processes,
            with_optimizer=self._step_with_optimizer,
        )

    # In the loop -----------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """`loss.backward(**options)`: divided by the accumulation steps, scaled in fp16."""
        steps = self._accumulation.steps
        self._precision.backward(loss if steps == 1 else loss / steps, **options)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """One micro-batch: gradients synchronise, and optimizers step, where a window is complete.

        Args:
            *models: The prepared models at work; none means all.
        """
        share = self._batches.current
        with ExitStack() as stack:
            if not self._accumulation.advance(last=share is not None and share.last):
                for model in models or self._models:
                    stack.enter_context(self._backend.no_sync(model))
            yield

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, backward passes of `model` keep their gradients to this process."""
        return self._backend.no_sync(model)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which operations outside a prepared model run in the chosen format."""
        return self._precision.autocast()

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients so that their norm is at most `max_norm`; fp16 gradients are unscaled first.

        Returns:
            The norm before, a scalar.
        """
        self.unscale_gradients()
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Clamp gradients to `[-clip_value, clip_value]`; fp16 gradients are unscaled first."""
        self.unscale_gradients()
        nn.utils.clip_grad_value_(parameters, clip_value)

    def unscale_gradients(self) -> None:
        """Divide the fp16 scale out of the gradients of every prepared optimizer."""
        for optimizer in self._optimizers:
            optimizer.unscale()

    # Between processes -----------------------------------------------------------------

    def gather(self, data: Any) -> Any:
        """Every process's tensors, concatenated along the first dimension; see `collectives.gather`."""
        return collectives.gather(data, self._backend)

    def gather_for_metrics(self, data: Any) -> Any:
        """What the processes computed for the step in hand: every sample once, in the dataset's order.

        Args:
            data: Tensors of one row a sample, also nested; or lists of objects, one a sample.

        Raises:
            ValueError: A tensor whose rows have nothing to do with the batch.
            MismatchError: The processes' data differ in structure, shape or dtype.
        """
        share = self._batches.current
        valid, size = (share.valid, share.size) if share else ((0,) * self.num_processes, 0)
        return collectives.gather_valid(data, valid, size, self._backend)

    def reduce(self, data: Any, reduction: Reduction = "sum") -> Any:
        """Every process's tensors combined element by element; see `collectives.reduce`."""
        return collectives.reduce(data, reduction, self._backend)

    # Letting go ------------------------------------------------------------------------

    def free_memory(self, *objects: Any) -> list[Any]:
        """Forget everything prepared and give memory back; for between two trainings.

        Args:
            *objects: Assign the result to their names: `model, loader = accelerator.free_memory(model, loader)`.

        Returns:
            As many None as there are objects.
        """
        self._models.clear()
        self._optimizers.clear()
        self._loaders.clear()
        self._accumulation.reset()
        return release_memory(*objects)

    clear = free_memory

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        """Itself: there is one group of processes, and what holds an accelerator may be copied."""
        return self

    # Keeping results -------------------------------------------------------------------

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True) -> nn.Module:
        """The script's own module, whose parameter names are those it had.

        Args:
            model: A prepared model, or any module.
            keep_fp32_wrapper: False also takes autocast off its forward pass.
        """
        original = self._backend.original(model)
        forward = original.__dict__.get("forward")
        if not keep_fp32_wrapper and isinstance(forward, AutocastForward):
            original.forward = forward.forward
        return original

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """A model's whole state on every process, in the dtypes and on the devices it has.

        Args:
            model: A prepared model, or any module.
            unwrap: Use the names of the script's own module, instead of those of what `prepare` made of it.
        """
        state: dict[str, Any] = (self.unwrap_model(model) if unwrap else model).state_dict()
        return state

    def save(self, obj: Any, f: str | os.PathLike[str] | BinaryIO, safe_serialization: bool = False) -> None:
        """Write an object once, from the main process; a file appears whole or not at all.

        Args:
            obj: What `torch.save` can write; tensors by name with `safe_serialization`.
            f: A path, or an open binary file.
            safe_serialization: Write safetensors; `f` must then be a path.
        """
        if not self.is_main_process:
            return
        if not isinstance(f, (str, os.PathLike)):
            torch.save(obj, f)
            return
        path = Path(f).resolve()
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            # safetensors would leave a file that only its owner can read.
            scratch.touch()
            mode = scratch.stat().st_mode
            save_file(obj, scratch) if safe_serialization else torch.save(obj, scratch)
            scratch.chmod(mode)
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)


def _precision(mixed_precision: str | None, *, fp16: bool | None) -> MixedPrecision | None:
    early: MixedPrecision | None = None if fp16 is None else "fp16" if fp16 else "no"
    if mixed_precision is None:
        return early
    if early not in {None, mixed_precision}:
        raise ValueError(
            f"fp16={fp16} and mixed_precision={mixed_precision!r} contradict each other; give one"
        )
    for known in FORMATS:
        if mixed_precision == known:
            return known
    raise ValueError(f"mixed_precision must be one of {', '.join(FORMATS)}; it is {mixed_precision!r}")


def _rng_types(wanted: Iterable[str] | None) -> tuple[str, ...]:
    kinds = tuple(wanted or ())
    for kind in kinds:
        if kind not in RNG_TYPES:
            raise ValueError(f"rng_types may hold {', '.join(RNG_TYPES)}; it holds {kind!r}")
    return kinds
