"""The half of the facade that a script meets before its loop: `prepare` and what it consists of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accel_runtime import tree
from accel_runtime.accumulation import Accumulation
from accel_runtime.averaging_check import AveragingCheck
from accel_runtime.compilation import compile_in_place
from accel_runtime.data.loader import LoaderOptions, PreparedLoader, skip_first_batches
from accel_runtime.data.loops import Feeding, Loops
from accel_runtime.data.preparing import prepare_loader
from accel_runtime.env import flat
from accel_runtime.facade.configuration import ConfigurationObjects
from accel_runtime.facade.consistency import check_consistent, collect_option_facts
from accel_runtime.first_input import FirstInput
from accel_runtime.gradients import Gradients
from accel_runtime.optimizer import PreparedOptimizer
from accel_runtime.parallel.materializing import guard, refuse
from accel_runtime.replaced import Replaced
from accel_runtime.scheduler import PreparedScheduler

__all__ = ["Preparing"]


class Preparing(ConfigurationObjects):
    """What `Accelerator` does to models, optimizers, loaders and schedulers."""

    _accumulation: Accumulation
    _averaging_check: AveragingCheck
    _compared: WeakSet[Any]
    _loops: Loops
    _loaders_prepared: int
    _gradients: Gradients
    _optimizers: list[PreparedOptimizer]
    _replaced: Replaced
    _reserve: Callable[[PreparedOptimizer], None]
    _step_with_optimizer: bool

    def prepare(self, *objects: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Make models, optimizers, loaders and schedulers fit for the run.

        Args:
            *objects: In any order, also nested in lists, tuples and dicts. Anything else, and what is
                prepared already, comes back as it is.
            device_placement: For every object, whether it is moved to the device; None is what the
                `Accelerator` was told.

        Returns:
            The same objects prepared, in the same order; a single one on its own.

        Raises:
            MismatchError: The ranks do not prepare the same: another dataset length, batch size, sampler, dtype, ...
            ValueError: A loader that cannot be shared out exactly; as many `device_placement` as there are no
                objects; parameters that the loss scaler cannot train.
        """
        places = [None] * len(objects) if device_placement is None else list(device_placement)
        if len(places) != len(objects):
            raise ValueError(f"device_placement has {len(places)} entries for {len(objects)} objects")
        self._compare([leaf for item in objects for leaf in tree.leaves(item)], self._loading)
        # An optimizer's state goes where the models went, and a scheduler knows its optimizer's prepared form.
        steps = (self._prepare_model, self._prepare_one, self._prepare_scheduler)
        done = list(objects)
        for step in steps:
            pairs = zip(done, places, strict=True)
            done = [tree.map_leaves(partial(step, place=place), item) for item, place in pairs]
        return done[0] if len(objects) == 1 else tuple(done)

    def _compare(self, objects: Sequence[Any], options: LoaderOptions) -> None:
        """Compare over the ranks those that are not prepared and have not been compared."""
        if self._backend.topology.world_size == 1:
            return
        prepared = (PreparedLoader, PreparedOptimizer, PreparedScheduler)
        kinds = (nn.Module, torch.optim.Optimizer, DataLoader, LRScheduler)
        new = [
            item
            for item in objects
            if isinstance(item, kinds)
            and not isinstance(item, prepared)
            and item not in self._compared
            and not any(item is model for model in self._models)
        ]
        self._compared.update(new)
        if new:
            plugin = self._accumulation.plugin
            settings = {
                "mixed_precision": self.settings.mixed_precision,
                "gradient_accumulation_steps": self._accumulation.steps,
                "sync_each_batch": plugin.sync_each_batch,
                "sync_with_dataloader": plugin.sync_with_dataloader,
                "adjust_scheduler": plugin.adjust_scheduler,
                "step_scheduler_with_optimizer": self._step_with_optimizer,
                "rng_types": self._rng_types,
                **{
                    name: value
                    for name, value in flat(self.settings)
                    if name.startswith(("parallel", "fully_"))
                },
            }
            check_consistent(
                new, self._backend, options, settings | collect_option_facts(self._options_of_torch())
            )

    def _prepare_model(self, item: Any, place: bool | None) -> Any:
        return self.prepare_model(item, place) if isinstance(item, nn.Module) else item

    def _prepare_one(self, item: Any, place: bool | None) -> Any:
        if isinstance(item, torch.optim.Optimizer):
            return self.prepare_optimizer(item, place)
        return self.prepare_data_loader(item, place) if isinstance(item, DataLoader) else item

    def _prepare_scheduler(self, item: Any, place: bool | None) -> Any:  # noqa: ARG002 - it is nowhere
        return self.prepare_scheduler(item) if isinstance(item, LRScheduler) else item

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Move a model to the device, make it compute in the chosen format and average its gradients.

        Args:
            model: The script's model.
            device_placement: Whether to move it; None is what the `Accelerator` was told.
            evaluation_mode: The model is never trained, so nothing averages its gradients.

        Raises:
            ValueError: Trainable float16 parameters together with the loss scaler of fp16; a model on the meta device
                that is not to be divided.
        """
        if any(model is known for known in self._models):
            return model
        if not evaluation_mode:
            self._compare([model], self._loading)
            self._precision.check(model.parameters())
        if not self._backend.divides:
            refuse(model)
        if self._backend.topology.world_size > 1:
            _make_contiguous(model)
        if self._places(device_placement):
            model = self._backend.place(model)
        self._precision.wrap(model)
        compile_in_place(self._backend.original(model), self._dynamo)
        prepared = model if evaluation_mode and not self._backend.divides else self._replicate(model)
        if self._backend.repeats:
            prepared.register_forward_pre_hook(Feeding(self._loops), with_kwargs=True)
        if self._backend.topology.world_size > 1 and not self._backend.divides:
            self._watch(prepared, averages=not evaluation_mode)
        self._models.append(prepared)
        self._gradients.find()
        return prepared

    def _watch(self, prepared: nn.Module, *, averages: bool) -> None:
        """Have warnings written of gradients that stay on their process, and of equal batches on all processes."""
        self._averaging_check.add(prepared, averages=averages)
        known = any(isinstance(model, DistributedDataParallel) for model in self._models)
        if isinstance(prepared, DistributedDataParallel) and not known:
            FirstInput(self._backend, lambda: bool(self._loaders_prepared)).watch(prepared)

    def _replicate(self, model: nn.Module) -> nn.Module:
        before = dict(model.named_parameters(remove_duplicate=False))
        prepared = self._backend.replicate(model, self._replication)
        if self._backend.divides:
            guard(prepared)
            self._replaced.note(before, prepared)
            for optimizer in self._optimizers:
                self._replaced.bring(optimizer.optimizer)
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """Make an optimizer wait for complete windows and use the loss scaler.

        Args:
            optimizer: The script's optimizer.
            device_placement: Whether the state it has goes where its parameters are; None is what the
                `Accelerator` was told.

        Raises:
            ValueError: Trainable float16 parameters together with the loss scaler of fp16.
        """
        if isinstance(optimizer, PreparedOptimizer):
            return optimizer
        self._replaced.bring(optimizer)
        self._precision.check(p for group in optimizer.param_groups for p in group["params"])
        prepared = PreparedOptimizer(
            optimizer,
            self._accumulation,
            self._precision.scaler,
            self._backend.after_step(),
            self._check_of(optimizer),
        )
        self._backend.watch_over(optimizer)
        if self._places(device_placement):
            prepared.place()
        self._optimizers.append(prepared)
        self._gradients.find()
        self._reserve(prepared)
        return prepared

    def _check_of(self, optimizer: torch.optim.Optimizer) -> Callable[[], bool] | None:
        """Return what checks the parameters of an optimizer before it steps, if gradients may stay on their process."""
        if self._backend.divides:
            return partial(self._check_owned, optimizer)
        if self._backend.topology.world_size == 1:
            return None
        return partial(self._averaging_check.check_optimizer, optimizer)

    def _check_owned(self, optimizer: torch.optim.Optimizer) -> bool:
        # An evaluation just before the step leaves gathered parameters in the places of the divided ones.
        self._backend.settle()
        self._replaced.check(optimizer, self._models)
        self._backend.before_first_step(self._models)
        return True

    def _places(self, wanted: bool | None) -> bool:
        return self._device_placement if wanted is None else wanted

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        *,
        data: Literal["global", "sharded"] = "global",
    ) -> PreparedLoader:
        """Make a loader give this process its slice of every global batch.

        Args:
            data_loader: The script's loader.
            device_placement: Whether its batches are moved to the device; None is what the `Accelerator` was told.
            data: `sharded` where the loader has the data of its own process only, as with a `DistributedSampler`: they
                are used as they are.

        Raises:
            ValueError: The loader cannot be shared out exactly.
        """
        if isinstance(data_loader, PreparedLoader):
            return data_loader
        self._check_loader_config()
        options = replace(self._loading, place=self._places(device_placement), data=data)
        self._compare([data_loader], options)
        prepared = prepare_loader(data_loader, self._backend, self._loops, options)
        self._loaders[self._loaders_prepared] = prepared
        self._loaders_prepared += 1
        return prepared

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """A loader that leaves out the first batches of every epoch; see `accel_runtime.skip_first_batches`.

        Args:
            dataloader: A prepared loader; or one that is not, over a dataset with indices.
            num_batches: How many, from the start of the epoch.

        Raises:
            ValueError: A negative number; or a stream that is not prepared yet.
        """
        return skip_first_batches(dataloader, num_batches)

    def prepare_scheduler(self, scheduler: LRScheduler) -> PreparedScheduler:
        """Make a scheduler advance with the samples all processes see."""
        if isinstance(scheduler, PreparedScheduler):
            return scheduler
        own = [o for o in self._optimizers if scheduler.optimizer in (o, o.optimizer)]
        prepared = PreparedScheduler(
            scheduler,
            own or self._optimizers,
            self._accumulation,
            strides=self._strides,
            with_optimizer=self._step_with_optimizer,
        )
        self._schedulers.append(prepared)
        return prepared


def _make_contiguous(model: nn.Module) -> None:
    """Give memory of their own to tensors whose strides torch cannot broadcast.

    These are buffers with repeated elements (`expand`), and tensors with a dimension of size 1 whose stride is that of another
    layout, such as the positional encodings of PyTorch's own examples, `unsqueeze(0).transpose(0, 1)`.
    """
    buffers = {id(buffer) for buffer in model.buffers()}
    for tensor in (*model.parameters(), *model.buffers()):
        if is_lazy(tensor) or tensor.layout is not torch.strided:
            continue
        strides = list(zip(tensor.shape, tensor.stride(), strict=True))
        repeats = id(tensor) in buffers and any(size > 1 and not stride for size, stride in strides)
        usual = torch.empty(tensor.shape, device="meta").stride()
        if repeats or (tensor.is_contiguous() and tensor.stride() != usual):
            tensor.data = tensor.detach().clone(memory_format=torch.contiguous_format)
