"""`prepare` and its parts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
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
from torch.utils.weak import WeakTensorKeyDictionary

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
from accel_runtime.foundation.nested import has_dtensor
from accel_runtime.foundation.options import AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs
from accel_runtime.monitoring.logging import MultiProcessAdapter
from accel_runtime.parallel.big_modeling import refuse_forward_on_meta, refuse_meta_model
from accel_runtime.parallel.dtensor import shard_like
from accel_runtime.training.accumulation import FirstInput
from accel_runtime.training.forward import compile_in_place
from accel_runtime.training.optimizer import PreparedOptimizer
from accel_runtime.training.scheduler import PreparedScheduler

__all__ = ["ParameterMap", "PrepareMethods", "named_parameters"]

_LOG = MultiProcessAdapter(logging.getLogger(__name__))


class ParameterMap:
    """Map from the parameters that the script created to the sharded parameters that are trained."""

    def __init__(self) -> None:
        # Weak references: the map must not keep full parameters in memory that no optimizer uses.
        self._sharded: MutableMapping[torch.Tensor, nn.Parameter] = WeakTensorKeyDictionary()

    def add(self, originals: Mapping[str, nn.Parameter], model: nn.Module) -> None:
        """Add the parameters of a sharded model, given the original parameters by name."""
        sharded = named_parameters(model)
        for name, original in originals.items():
            if sharded[name] is not original:
                self._sharded[original] = sharded[name]

    def find_current(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the sharded parameter that replaced a parameter of the script, or the parameter itself."""
        return self._sharded.get(parameter, parameter)

    def check(self, optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> None:
        """Raise ValueError if an optimizer has parameters of no prepared model."""
        prepared = {parameter for model in models for parameter in model.parameters()}
        missing = [
            p
            for group in optimizer.param_groups
            for p in group["params"]
            if p.requires_grad and p not in prepared
        ]
        if missing:
            raise ValueError(
                f"{type(optimizer).__name__} cannot step: {len(missing)} of its parameters, the first of shape "
                f"{list(missing[0].shape)}, are in no prepared model, so their gradients are not averaged over the processes. "
                "Pass the model to prepare(); if it was prepared before, create the optimizer from model.parameters()."
            )

    def replace_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the parameters of an optimizer by the sharded ones, and shard its state."""
        for group in optimizer.param_groups:
            parameters: list[torch.Tensor] = group["params"]
            for original in parameters:
                if original in self._sharded and original in optimizer.state:
                    sharded = self._sharded[original]
                    optimizer.state[sharded] = {
                        key: shard_like(value, sharded, key)
                        if isinstance(value, torch.Tensor) and value.shape == original.shape
                        else value
                        for key, value in optimizer.state.pop(original).items()
                    }
            # In place: some optimizers keep the list itself.
            parameters[:] = [self.find_current(parameter) for parameter in parameters]
            if has_dtensor(parameters):
                _refuse_optimizer(optimizer, group)
            if len({hasattr(parameter, "device_mesh") for parameter in parameters}) <= 1:
                continue
            # Step parameters one by one: torch's foreach loops refuse a mix of sharded and replicated parameters.
            for name in ("fused", "foreach"):
                if group.get(name):
                    raise ValueError(
                        f"Cannot prepare the optimizer with {name}=True: a parameter group contains both sharded and replicated "
                        f"parameters, which torch cannot step together. Remove {name}, or use one group for each kind."
                    )
            if "foreach" in group:
                group["foreach"] = False


_UNSHARDABLE = (
    torch.optim.Adafactor,
    torch.optim.LBFGS,
    torch.optim.Rprop,
    torch.optim.SparseAdam,
)
"""Optimizers that torch 2.13 cannot step with sharded parameters."""


def _refuse_optimizer(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
    """Raise ValueError if torch cannot step a group of sharded parameters."""
    name = type(optimizer).__name__
    # Those of transformers and other libraries have the name too.
    if isinstance(optimizer, _UNSHARDABLE) or name == torch.optim.Adafactor.__name__:
        raise ValueError(
            f"{name} cannot train a sharded model: torch has no step for sharded parameters. Use another optimizer, such as AdamW, "
            "or train without sharding (remove dp_shard)."
        )
    if group.get("fused") and isinstance(optimizer, (torch.optim.SGD, torch.optim.Adagrad)):
        raise ValueError(
            f"{name}(fused=True) cannot train a sharded model: torch has no fused step for sharded parameters. Remove fused."
        )


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by name, with all names of tied parameters."""
    return dict(model.named_parameters(remove_duplicate=False))


class PrepareMethods(CheckpointMethods):
    """Methods of `Accelerator` that prepare models, optimizers, loaders and schedulers."""

    _checked: WeakSet[Any]
    _described_models = 0
    """Number of models in the description that the launcher has."""
    _parameter_map: ParameterMap

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
        prepared = list(objects)

        def prepare_kind(kind: type[Any], method: Callable[..., Any], *, is_placed: bool = True) -> None:
            for index, placement in enumerate(placements):
                call = partial(method, device_placement=placement) if is_placed else method
                prepared[index] = nested.map_leaves(
                    lambda leaf: call(leaf) if isinstance(leaf, kind) else leaf,  # noqa: B023 - called at once
                    prepared[index],
                    objects=False,
                )

        # Models first: the state of an optimizer is moved to their devices. A scheduler needs the prepared optimizer.
        prepare_kind(nn.Module, self.prepare_model)
        prepare_kind(torch.optim.Optimizer, self.prepare_optimizer)
        prepare_kind(DataLoader, self.prepare_data_loader)
        prepare_kind(LRScheduler, self.prepare_scheduler, is_placed=False)
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
        if any(model is prepared for prepared in self._models):
            return model
        self._read_fsdp_plugin()
        if not evaluation_mode:
            self._check_consistent([model], self._loader_options)
            self._precision.check(model.parameters())
        if not self._backend.shards_models:
            refuse_meta_model(model)
        if self._backend.topology.world_size > 1:
            _make_contiguous(model)
        if self._should_place(device_placement):
            model = self._backend.move_model(model)
        self._precision.wrap(model)
        compile_in_place(self._backend.unwrap_model(model), self._dynamo)
        prepared = (
            model if evaluation_mode and not self._backend.shards_models else self._replicate_or_shard(model)
        )
        if self._backend.pads_batches:
            prepared.register_forward_pre_hook(ModelInputHook(self._loops), with_kwargs=True)
        if self._backend.topology.world_size > 1 and not self._backend.shards_models:
            # They warn if gradients are not averaged, or all processes have the same batches.
            self._averaging_check.add(prepared, averages=not evaluation_mode)
            first = not any(isinstance(model, DistributedDataParallel) for model in self._models)
            if first and isinstance(prepared, DistributedDataParallel):
                FirstInput(self._backend, lambda: self._loops.have_begun).watch(prepared)
        self._add_model(prepared)
        self._gradients.find_groups()
        return prepared

    def _add_model(self, prepared: nn.Module) -> None:
        """Add a prepared model; one that was unwrapped and prepared again replaces its earlier wrapper."""
        unwrap = self._backend.unwrap_model
        for index, earlier in enumerate(self._models):
            if unwrap(earlier) is unwrap(prepared):
                self._models[index] = prepared
                return
        self._models.append(prepared)

    def _replicate_or_shard(self, model: nn.Module) -> nn.Module:
        originals = named_parameters(model)
        prepared = self._backend.wrap_model(model, self._ddp_options)
        if self._backend.shards_models:
            if self._fsdp_plugin is not None:
                self._fsdp_plugin.freeze("models are sharded by it", "Set it before prepare()")
            refuse_forward_on_meta(prepared)
            self._parameter_map.add(originals, prepared)
            for optimizer in self._optimizers:
                self._parameter_map.replace_parameters(optimizer.optimizer)
        return prepared

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
        if isinstance(optimizer, PreparedOptimizer):
            return optimizer
        self._parameter_map.replace_parameters(optimizer)
        self._precision.check(p for group in optimizer.param_groups for p in group["params"])
        prepared = PreparedOptimizer(
            optimizer,
            self._accumulation,
            self._precision.scaler,
            self._backend.build_step_hook(),
            self._build_step_check(optimizer),
            self._build_gather("the loss of LBFGS"),
        )
        self._backend.register_load_state_hook(optimizer)
        if self._should_place(device_placement):
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
        if self._backend.shards_models:
            return partial(self._check_sharded, optimizer)
        if self._backend.topology.world_size == 1:
            return None
        return partial(self._averaging_check.check_optimizer, optimizer)

    def _check_sharded(self, optimizer: torch.optim.Optimizer) -> bool:
        # After an evaluation just before the step, modules still hold gathered parameters.
        self._backend.synchronize()
        self._parameter_map.check(optimizer, self._models)
        self._backend.check_gradients(self._models)
        return True

    def _should_place(self, device_placement: bool | None) -> bool:
        return self._device_placement if device_placement is None else device_placement

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
            put_on_device=self._should_place(device_placement),
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
        if isinstance(scheduler, PreparedScheduler):
            return scheduler
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
