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
from accel_runtime.data.loader import LoaderOptions, PreparedLoader
from accel_runtime.data.loops import Feeding, Loops
from accel_runtime.data.preparing import prepare_loader
from accel_runtime.env import MixedPrecision, Settings
from accel_runtime.flag import Flag
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
from accel_runtime.project import ProjectConfiguration
from accel_runtime.recording import Recording
from accel_runtime.rng import RNG_TYPES
from accel_runtime.scheduler import PreparedScheduler
from accel_runtime.topology import Topology

__all__ = ["Accelerator"]


class Accelerator(Recording):
    """What a training loop needs to run on any number of processes.

    Args:
        device_placement: Whether `prepare` moves models, and loaders their batches, to the device.
        split_batches: Whether a loader's batch size is the global one, to be split among the processes.
        mixed_precision: `no`, `bf16` or `fp16`; None takes what the launcher said, else `no`.
        gradient_accumulation_steps: Micro-batches whose gradients make one optimizer step.
        cpu: Compute on the CPU, whatever else is there.
        log_with: Trackers, by name, class or instance, one or a list; `all` is every one that is installed.
        project_dir: Where the project keeps its data.
        project_config: The same and more, as an object.
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
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        rng_types: Iterable[str] | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[KwargsHandler] | None = None,
        fp16: bool | None = None,
    ) -> None:
        settings = Settings.from_env(os.environ)
        wanted = _precision(mixed_precision, fp16=fp16) or settings.mixed_precision
        self.settings = replace(settings, mixed_precision=wanted, device="cpu" if cpu else settings.device)
        """What the launcher and the arguments came to."""
        self._backend = connect(
            self.settings, Topology.here(), chosen(kwargs_handlers, InitProcessGroupKwargs)
        )
        self._record(log_with, project_dir, project_config, kwargs_handlers)
        self._precision = Precision(
            wanted,
            self._backend.device,
            chosen(kwargs_handlers, AutocastKwargs),
            chosen(kwargs_handlers, GradScalerKwargs),
        )
        self._replication = chosen(kwargs_handlers, DistributedDataParallelKwargs)
        self._accumulation = Accumulation(gradient_accumulation_steps)
        self._loading = LoaderOptions(
            split_batches=split_batches, place=device_placement, rng_types=_rng_types(rng_types)
        )
        self._step_with_optimizer = step_scheduler_with_optimizer
        self._loops = Loops(self.process_index, self.num_processes)
        self._models: list[nn.Module] = []
        self._optimizers: list[PreparedOptimizer] = []

    # Where this process stands ---------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """What this process computes on."""
        return self._backend.device

    @property
    def num_processes(self) -> int:
        """How many processes run the script."""
        return self._backend.topology.world_size

    @property
    def process_index(self) -> int:
        """This process among all, from 0."""
        return self._backend.topology.rank

    @property
    def local_process_index(self) -> int:
        """This process among those of its machine, from 0."""
        return self._backend.topology.local_rank

    @property
    def is_main_process(self) -> Flag:
        """Whether this is the first process of all."""
        return Flag(self.process_index == 0)

    @property
    def is_local_main_process(self) -> Flag:
        """Whether this is the first process of its machine."""
        return Flag(self.local_process_index == 0)

    @property
    def is_last_process(self) -> Flag:
        """Whether this is the last process of all."""
        return Flag(self.process_index == self.num_processes - 1)

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
    def even_batches(self) -> bool:
        """Whether the end of an epoch is filled up; what is set holds for loaders prepared from then on."""
        return self._loading.even_batches

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self._loading = replace(self._loading, even_batches=even)

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
        if self.num_processes > 1:
            prepared.register_forward_pre_hook(Feeding(self._loops), with_kwargs=True)
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
        return prepare_loader(loader, self._backend, self._loops, self._loading)

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
        share = self._loops.current
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

    def gather_for_metrics(self, data: Any, use_gather_object: bool = False, *, batch: Any = None) -> Any:
        """What the processes computed for the step in hand: every sample once, in the dataset's order.

        Args:
            data: Tensors of a whole number of rows a sample, also nested; or lists of objects, one a sample.
            use_gather_object: Send tensors as objects too: for lists of tensors of different shapes, one a sample.
            batch: The batch the data were computed from, where several loops advance together (`zip`).

        Raises:
            ValueError: A tensor whose rows have nothing to do with the batch.
            MismatchError: The processes' data differ in structure, dtype or trailing shape.
        """
        steps = self._loops.steps_of(data, batch)
        return collectives.gather_valid(data, steps, self._backend, as_objects=use_gather_object)

    def reduce(self, tensor: Any, reduction: Reduction = "sum", scale: float = 1.0) -> Any:
        """Every process's tensors combined element by element; see `collectives.reduce`."""
        return collectives.reduce(tensor, reduction, self._backend, scale)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Tensors made as long as the longest of all processes; see `collectives.pad_across_processes`."""
        return collectives.pad_across_processes(tensor, self._backend, dim, pad_index, pad_first)

    def wait_for_everyone(self) -> None:
        """Wait until every process is here."""
        self._backend.barrier()

    def print(self, *values: Any, **options: Any) -> None:
        """`print`, once a machine."""
        if self.is_local_main_process:
            print(*values, **options)  # noqa: T201 - this is what it is for

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

    def save(self, obj: Any, f: str | os.PathLike[str] | BinaryIO, safe_serialization: bool = False) -> None:
        """Write an object once, from the main process; a file appears whole or not at all.

        With `ProjectConfiguration(save_on_each_node=True)` the first process of every machine writes it.

        Args:
            obj: What `torch.save` can write; tensors by name with `safe_serialization`.
            f: A path, or an open binary file.
            safe_serialization: Write safetensors; `f` must then be a path.
        """
        each = self.project_configuration.save_on_each_node
        if not (self.is_local_main_process if each else self.is_main_process):
            return
        if not isinstance(f, (str, os.PathLike)):
            torch.save(obj, f)
            return
        path = Path(f).resolve()
        scratch = path.with_name(f".{path.name}.{self.process_index}.{os.getpid()}")
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
