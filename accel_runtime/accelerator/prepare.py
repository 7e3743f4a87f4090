"""`prepare` and its parts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accel_runtime.accelerator.checkpointing import CheckpointMethods
from accel_runtime.accelerator.consistency import check_consistent, collect_option_facts
from accel_runtime.accelerator.unprepared import explain_unprepared
from accel_runtime.collectives.calls import collective
from accel_runtime.data.active_loops import ModelInputHook
from accel_runtime.data.loader import LoaderOptions, PreparedLoader, skip_first_batches
from accel_runtime.data.prepare import check_loader_configuration, prepare_loader
from accel_runtime.environment.settings import flatten_settings
from accel_runtime.foundation import nested
from accel_runtime.foundation.heartbeat import call_site
from accel_runtime.foundation.options import AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs
from accel_runtime.monitoring.logging import MultiProcessAdapter
from accel_runtime.parallel.big_modeling import refuse_meta_model
from accel_runtime.parallel.strategy import ModelRequest
from accel_runtime.training.accumulation import FirstInput
from accel_runtime.training.forward import compile_in_place
from accel_runtime.training.optimizer import PreparedOptimizer
from accel_runtime.training.scheduler import PreparedScheduler

__all__ = ["PrepareMethods"]

_LOG = MultiProcessAdapter(logging.getLogger(__name__))


class PrepareMethods(CheckpointMethods):
    """Methods of `Accelerator` that prepare models, optimizers, loaders and schedulers."""

    _checked: WeakSet[Any]
    _described_models = 0
    """Number of models in the description that the launcher has."""

    @collective("objects", "device_placement")
    def prepare(self, *objects: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers for the devices, precision and processes of the run.

        Args:
            *objects: In any order, also nested in lists, tuples and dicts. Other objects, and objects that are
                prepared already, are returned unchanged. A warning names others that are used like one of the four.
            device_placement: For every object, whether it is moved to the device; None means the option of the
                `Accelerator`.

        Returns:
            The prepared objects in the same order; for one object, the object itself.

        Raises:
            MismatchError: If the ranks prepare different objects: another dataset length, batch size, sampler, dtype, ...
            ValueError: If a loader cannot be sharded exactly, `len(device_placement) != len(objects)`, or the loss scaler
                cannot train the parameters.
        """
        placements = [None] * len(objects) if device_placement is None else list(device_placement)
        if len(placements) != len(objects):
            raise ValueError(
                f"Invalid device_placement: it has {len(placements)} entries for {len(objects)} objects. Pass one for each."
            )
        self._read_fsdp_plugin()
        self._check_consistent(
            [leaf for item in objects for leaf in nested.leaves(item, objects=False)], self._loader_options
        )
        leaves = {
            id(leaf): (leaf, placement)
            for item, placement in zip(objects, placements, strict=True)
            for leaf in nested.leaves(item, objects=False)
            if isinstance(leaf, _KINDS)
        }
        results = self._prepare_together(
            [
                self._build_request(leaf, placement)
                for leaf, placement in leaves.values()
                if isinstance(leaf, nn.Module)
            ],
            [
                (leaf, placement)
                for leaf, placement in leaves.values()
                if isinstance(leaf, torch.optim.Optimizer)
            ],
            [leaf for leaf, _ in leaves.values() if isinstance(leaf, LRScheduler)],
        )
        for key, (leaf, placement) in leaves.items():
            if isinstance(leaf, DataLoader):
                results[key] = self.prepare_data_loader(leaf, placement)
        prepared = [
            nested.map_leaves(lambda leaf: results.get(id(leaf), leaf), item, objects=False)
            for item in objects
        ]
        for leaf in nested.leaves(prepared, objects=False):
            if not isinstance(leaf, _KINDS) and (reason := explain_unprepared(leaf)):
                _LOG.warning_once(
                    "prepare() at %s returns the %s as it is: %s", call_site(), type(leaf).__name__, reason
                )
        if self._optimizers:
            self._check_shared_directory()
        if self._backend.topology.rank == 0:
            self._bypass_check.watch()
        self._record_description()
        return prepared[0] if len(objects) == 1 else tuple(prepared)

    def _record_description(self) -> None:
        """Write the description for the launcher, on the main process.

        It takes as long as a few iterations over all parameters, so a loader that is prepared for each evaluation does not
        cause it.
        """
        if self._recorder is None or self._progress is None:
            return
        if not self._progress.steps or len(self._models) != self._described_models:
            self._described_models = len(self._models)
            # A dataset whose length raises an error must not end the script here.
            with suppress(Exception):
                description = self.describe()
                self._recorder.write_description(str(description), description.as_dict())

    def _check_consistent(self, objects: Sequence[Any], options: LoaderOptions) -> None:
        """Compare objects over the ranks, except for those that are prepared or compared already."""
        if self._backend.topology.world_size == 1:
            return
        prepared = (PreparedLoader, PreparedOptimizer, PreparedScheduler)
        new = [
            item
            for item in objects
            if isinstance(item, _KINDS)
            and not isinstance(item, prepared)
            and item not in self._checked
            and not any(item is model for model in self._models)
        ]
        if not new:
            return
        self._checked.update(new)
        plugin = self._accumulation.plugin
        settings = {
            "mixed_precision": self.settings.mixed_precision,
            "gradient_accumulation_steps": self._accumulation.steps,
            "sync_each_batch": plugin.sync_each_batch,
            "sync_with_dataloader": plugin.sync_with_dataloader,
            "adjust_scheduler": plugin.adjust_scheduler,
            "step_scheduler_with_optimizer": self._step_with_optimizer,
            "rng_types": self._rng_types,
        }
        settings |= {
            name: value
            for name, value in flatten_settings(self.settings)
            if name.startswith(("parallel", "fully_"))
        }
        handlers = (
            self.ddp_handler or DistributedDataParallelKwargs(),
            self.autocast_handler or AutocastKwargs(),
            self.scaler_handler or GradScalerKwargs(),
        )
        check_consistent(new, self._backend, options, settings | collect_option_facts(handlers))

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Move a model to the device, wrap its forward pass in autocast, and average its gradients over the processes.

        Args:
            model: The model of the script.
            device_placement: Move the model; None means the option of the `Accelerator`.
            evaluation_mode: Do not average gradients, because the model is never trained.

        Raises:
            ValueError: If fp16 loss scaling is used with trainable float16 parameters, or a model on the meta device is
                not sharded.
        """
        request = self._build_request(model, device_placement, is_trained=not evaluation_mode)
        return cast("nn.Module", self._prepare_together([request])[id(model)])

    def _build_request(
        self, model: nn.Module, device_placement: bool | None, *, is_trained: bool = True
    ) -> ModelRequest:
        return ModelRequest(
            model,
            is_placed=self._device_placement if device_placement is None else device_placement,
            is_trained=is_trained,
            set_forward=self._set_forward,
            ddp_options=self._ddp_options,
        )

    def _set_forward(self, model: nn.Module) -> None:
        self._precision.wrap(model)
        compile_in_place(self._strategy.unwrap_model(model), self._dynamo)

    def _prepare_together(
        self,
        requests: Sequence[ModelRequest] = (),
        optimizers: Sequence[tuple[torch.optim.Optimizer, bool | None]] = (),
        schedulers: Sequence[LRScheduler] = (),
    ) -> dict[int, Any]:
        """Return the prepared objects by the id of the script's; those that are prepared already are their own."""
        results: dict[int, Any] = {}
        new_requests = []
        for request in requests:
            if any(request.model is prepared for prepared in self._models):
                results[id(request.model)] = request.model
            else:
                self._check_model(request)
                new_requests.append(request)
        new_optimizers = [
            (o, placement) for o, placement in optimizers if not isinstance(o, PreparedOptimizer)
        ]
        new_schedulers = [s for s in schedulers if not isinstance(s, PreparedScheduler)]
        models = self._strategy.prepare(new_requests, [o for o, _ in new_optimizers], new_schedulers)
        for request, model in zip(new_requests, models, strict=True):
            self._add_model(model, averages=request.is_trained)
            results[id(request.model)] = model
        for optimizer, placement in new_optimizers:
            results[id(optimizer)] = self._add_optimizer(optimizer, placement)
        for scheduler in new_schedulers:
            results[id(scheduler)] = self._add_scheduler(scheduler)
        return results

    def _check_model(self, request: ModelRequest) -> None:
        """Raise an error if a model cannot be prepared, and copy tensors that cannot be sent."""
        self._read_fsdp_plugin()
        if request.is_trained:
            self._check_consistent([request.model], self._loader_options)
            self._precision.check(request.model.parameters())
        if not self._strategy.shards_models:
            refuse_meta_model(request.model)
        elif self._fsdp_plugin is not None:
            self._fsdp_plugin.freeze("models are sharded by it", "Set it before prepare()")
        if self._backend.topology.world_size > 1:
            _make_contiguous(request.model)

    def _add_model(self, prepared: nn.Module, *, averages: bool) -> None:
        """Register a prepared model; one that was unwrapped and prepared again replaces its earlier wrapper."""
        if self._backend.pads_batches:
            prepared.register_forward_pre_hook(ModelInputHook(self._loops), with_kwargs=True)
        if self._backend.topology.world_size > 1 and not self._strategy.shards_models:
            # They warn if gradients are not averaged, or all processes have the same batches.
            self._averaging_check.add(prepared, averages=averages)
            first = not any(isinstance(model, DistributedDataParallel) for model in self._models)
            if first and isinstance(prepared, DistributedDataParallel):
                FirstInput(self._backend, lambda: self._loops.have_begun).watch(prepared)
        unwrap = self._strategy.unwrap_model
        same = [i for i, earlier in enumerate(self._models) if unwrap(earlier) is unwrap(prepared)]
        if same:
            self._models[same[0]] = prepared
        else:
            self._models.append(prepared)
        self._gradients.find_groups()

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """Wrap an optimizer so that it steps at the end of accumulation cycles and uses the loss scaler.

        Args:
            optimizer: The optimizer of the script.
            device_placement: Move existing state to the devices of the parameters; None means the option of the
                `Accelerator`.

        Raises:
            ValueError: If fp16 loss scaling is used with trainable float16 parameters.
        """
        results = self._prepare_together(optimizers=[(optimizer, device_placement)])
        return cast("PreparedOptimizer", results.get(id(optimizer), optimizer))

    def _add_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None
    ) -> PreparedOptimizer:
        self._precision.check(p for group in optimizer.param_groups for p in group["params"])
        prepared = PreparedOptimizer(
            optimizer,
            self._accumulation,
            self._precision.scaler,
            self._strategy,
            self._build_step_check(optimizer),
            self._build_gather("the loss of LBFGS"),
        )
        if self._device_placement if device_placement is None else device_placement:
            prepared.place()
        self._optimizers.append(prepared)
        self._gradients.find_groups()
        self._reserve_staging(prepared)
        return prepared

    def _build_gather(self, subject: str) -> Callable[[Any], list[Any]] | None:
        """Return a function that gathers an object of each rank; None on one process."""
        backend = self._backend
        return (
            partial(backend.all_gather_objects, subject=subject) if backend.topology.world_size > 1 else None
        )

    def _build_step_check(self, optimizer: torch.optim.Optimizer) -> Callable[[], bool] | None:
        """Return the check of an optimizer before its first step; None on one process."""
        if self._strategy.shards_models:
            return partial(self._check_sharded, optimizer)
        if self._backend.topology.world_size == 1:
            return None
        return partial(self._averaging_check.check_optimizer, optimizer)

    def _check_sharded(self, optimizer: torch.optim.Optimizer) -> bool:
        self._strategy.check_step(optimizer, self._models)
        return True

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        *,
        data: Literal["global", "sharded"] = "global",
    ) -> PreparedLoader:
        """Shard a loader: each process gets its slice of every global batch.

        Args:
            data_loader: The loader of the script.
            device_placement: Move batches to the device; None means the option of the `Accelerator`.
            data: `sharded` if the loader contains the data of its own process only, for example with a
                `DistributedSampler`; its batches are not sharded again.

        Raises:
            TypeError: If it is not a `DataLoader`.
            ValueError: If the loader cannot be sharded exactly, or `data` has another value.
        """
        if data not in {"global", "sharded"}:
            raise ValueError(f"Invalid data={data!r}: expected global or sharded.")
        if isinstance(data_loader, PreparedLoader):
            return data_loader
        _check_type(data_loader)
        check_loader_configuration(self._loader_config)
        options = replace(
            self._loader_options,
            put_on_device=self._device_placement if device_placement is None else device_placement,
            presharded=data == "sharded",
        )
        self._check_consistent([data_loader], options)
        prepared = prepare_loader(data_loader, self._backend, self._loops, options)
        self._loaders[self._loaders_prepared] = prepared
        self._loaders_prepared += 1
        return prepared

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """Return a loader that skips the first batches of every epoch; see `accel_runtime.skip_first_batches`.

        Args:
            dataloader: A prepared loader; or an unprepared one over a map-style dataset.
            num_batches: The number of batches to skip.

        Raises:
            ValueError: If the number is negative, or the loader of an iterable dataset is not prepared.
        """
        return skip_first_batches(dataloader, num_batches)

    def prepare_scheduler(self, scheduler: LRScheduler) -> PreparedScheduler:
        """Wrap a scheduler so that it advances by the samples of all processes, at optimizer steps only."""
        results = self._prepare_together(schedulers=[scheduler])
        return cast("PreparedScheduler", results.get(id(scheduler), scheduler))

    def _add_scheduler(self, scheduler: LRScheduler) -> PreparedScheduler:
        stepped = [o for o in self._optimizers if scheduler.optimizer in (o, o.optimizer)]
        prepared = PreparedScheduler(
            scheduler,
            stepped or self._optimizers,
            self._accumulation,
            strides=self._strides,
            with_optimizer=self._step_with_optimizer,
            gather=self._build_gather("the metric of ReduceLROnPlateau"),
        )
        self._schedulers.append(prepared)
        return prepared


_KINDS = (nn.Module, torch.optim.Optimizer, DataLoader, LRScheduler)
"""The types of the objects that `prepare` prepares."""


def _check_type(data_loader: object) -> None:
    if not isinstance(data_loader, DataLoader):
        reason = explain_unprepared(data_loader) or "it is not a torch.utils.data.DataLoader. Pass one."
        raise TypeError(f"Cannot prepare the {type(data_loader).__name__}: {reason}")


def _make_contiguous(model: nn.Module) -> None:
    """Copy tensors whose strides torch cannot broadcast.

    These are buffers with repeated elements (`expand`), and tensors with a dimension of size 1 and the stride of another
    layout, such as the positional encodings of PyTorch's examples, `unsqueeze(0).transpose(0, 1)`.
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
