"""Preparation of models, optimizers, loaders and schedulers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar, cast
from weakref import WeakSet, ref

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel_runtime.accelerator.description import LoaderFacts, describe_division, describe_run, loader_facts
from accel_runtime.accelerator.run import Run
from accel_runtime.checks.consistency import check_consistent, collect_option_facts
from accel_runtime.data.loader import LoaderOptions, PreparedLoader
from accel_runtime.data.prepare import check_loader_configuration, prepare_loader
from accel_runtime.environment.settings import flatten_settings
from accel_runtime.foundation import nested
from accel_runtime.foundation.options import AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs
from accel_runtime.monitoring.logging import MultiProcessAdapter
from accel_runtime.observe.call_sites import call_site
from accel_runtime.observe.heartbeat import heartbeat
from accel_runtime.parallel.big_modeling import describe_dispatch, list_meta_tensors, refuse_meta_model
from accel_runtime.parallel.node_loading import NodeLoading, PendingValues
from accel_runtime.parallel.strategy import ModelRequest, Placeholder
from accel_runtime.storage.errors import format_names
from accel_runtime.training.compile import compile_in_place
from accel_runtime.training.optimizer import PreparedOptimizer
from accel_runtime.training.scheduler import PreparedScheduler

__all__ = ["Preparation"]

_T = TypeVar("_T")
_Model = TypeVar("_Model", bound=nn.Module)
_LOG = MultiProcessAdapter(logging.getLogger(__name__))


class Preparation:
    """Prepare the objects of a script for the devices, precision and processes of a run.

    Args:
        run: The run.
        loading: Has the values of models that other ranks have loaded.
        on_optimizer: Called with each prepared optimizer.
        on_prepared: Called after `prepare` if there is an optimizer; may raise before the first step.
    """

    def __init__(
        self,
        run: Run,
        loading: NodeLoading,
        on_optimizer: Callable[[PreparedOptimizer], None],
        on_prepared: Callable[[], None],
    ) -> None:
        self._run, self._loading = run, loading
        self._on_optimizer, self._on_prepared = on_optimizer, on_prepared
        self._compared: WeakSet[Any] = WeakSet()
        """Objects that have been compared over the ranks."""
        self._described: tuple[list[ref[Any]], list[ref[Any]], list[LoaderFacts]] = [], [], []
        """The models, the other objects, and the facts of the loaders in the description that the launcher has."""

    def prepare(self, objects: Sequence[Any], device_placement: Sequence[bool | None] | None) -> Any:
        """Return the prepared objects; see `Accelerator.prepare`."""
        placements = [None] * len(objects) if device_placement is None else list(device_placement)
        if len(placements) != len(objects):
            raise ValueError(
                f"Invalid device_placement: it has {len(placements)} entries for {len(objects)} objects. Pass one for each."
            )
        self._run.options.read_plugin(self._run.strategy)
        objects = self._replace_placeholders(objects)
        self._check_consistent(
            [leaf for item in objects for leaf in nested.leaves(item, objects=False)],
            self._run.options.loader_options,
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
        loaders = [each for each in self._run.prepared.loaders if each.source_batch_size is not None]
        steps = self._run.accumulation.steps
        self._run.strategy.check_batch_sizes(
            [each.local_batch_size for each in loaders], [each.total_batch_size * steps for each in loaders]
        )
        prepared = [
            nested.map_leaves(lambda leaf: results.get(id(leaf), leaf), item, objects=False)
            for item in objects
        ]
        for leaf in nested.leaves(prepared, objects=False):
            if not isinstance(leaf, _KINDS) and (reason := explain_unprepared(leaf)):
                _LOG.warning_once(
                    "prepare() at %s returns the %s as it is: %s", call_site(), type(leaf).__name__, reason
                )
        if self._run.prepared.optimizers:
            self._on_prepared()
        self._record_description()
        return prepared[0] if len(objects) == 1 else tuple(prepared)

    def _replace_placeholders(self, objects: Sequence[Any]) -> list[Any]:
        """Return the objects with those that the configuration of the strategy describes in place of placeholders."""
        leaves = [leaf for item in objects for leaf in nested.leaves(item, objects=False)]
        placeholders = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Placeholder)}.values())
        if not placeholders:
            return list(objects)
        built = self._run.strategy.resolve_placeholders(placeholders, self._count_strides())
        by_id = {id(placeholder): each for placeholder, each in zip(placeholders, built, strict=True)}
        return [
            nested.map_leaves(lambda leaf: by_id.get(id(leaf), leaf), item, objects=False) for item in objects
        ]

    def _record_description(self) -> None:
        """Write the description for the launcher, on the main process.

        It takes as long as a few iterations over all parameters, and replaces a file, so a loader that is prepared for each
        evaluation does not cause it: not after the first step, nor before it in place of another like it.
        """
        run, progress = self._run, heartbeat()
        if run.recorder is None or progress is None:
            return
        models = [ref(model) for model in run.prepared.models]
        if progress.steps and models == self._described[0]:
            return
        others = [ref(each) for each in (*run.prepared.optimizers, *run.prepared.schedulers)]
        # A dataset whose length raises an error must not end the script here.
        with suppress(Exception):
            data_rank, steps = run.backend.data_rank, run.accumulation.steps
            described = (
                models,
                others,
                [loader_facts(each, data_rank, steps) for each in run.prepared.loaders],
            )
            if described != self._described:
                self._described = described
                description = describe_run(run)
                run.recorder.write_description(str(description), description.as_dict())

    def _check_consistent(self, objects: Sequence[Any], options: LoaderOptions) -> None:
        """Compare objects over the ranks, except for those that are prepared or compared already."""
        if self._run.backend.topology.world_size == 1:
            return
        prepared = (PreparedLoader, PreparedOptimizer, PreparedScheduler)
        new = [
            item
            for item in objects
            if isinstance(item, _KINDS)
            and not isinstance(item, prepared)
            and item not in self._compared
            and not any(item is model for model in self._run.prepared.models)
        ]
        if not new:
            return
        self._compared.update(new)
        plugin = self._run.accumulation.plugin
        settings = {
            "mixed_precision": self._run.options.settings.mixed_precision,
            "gradient_accumulation_steps": self._run.accumulation.steps,
            "global_batch_size": self._run.accumulation.global_batch_size,
            "sync_each_batch": plugin.sync_each_batch,
            "sync_with_dataloader": plugin.sync_with_dataloader,
            "adjust_scheduler": plugin.adjust_scheduler,
            "step_scheduler_with_optimizer": self._run.options.step_with_optimizer,
            "rng_types": self._run.options.rng_types,
        }
        settings |= {
            name: value
            for name, value in flatten_settings(self._run.options.settings)
            if name.startswith(("parallel", "fully_"))
        }
        kinds = (DistributedDataParallelKwargs, AutocastKwargs, GradScalerKwargs)
        handlers = [self._run.options.handlers.get(kind) or kind() for kind in kinds]
        check_consistent(new, self._run.backend, options, settings | collect_option_facts(handlers))

    def prepare_model(self, model: _Model, device_placement: bool | None, *, is_trained: bool) -> _Model:
        """Return a prepared model; see `Accelerator.prepare_model`."""
        request = self._build_request(model, device_placement, is_trained=is_trained)
        return cast("_Model", self._prepare_together([request])[id(model)])

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None
    ) -> PreparedOptimizer:
        """Return a prepared optimizer; see `Accelerator.prepare_optimizer`."""
        results = self._prepare_together(optimizers=[(optimizer, device_placement)])
        return cast("PreparedOptimizer", results.get(id(optimizer), optimizer))

    def prepare_scheduler(self, scheduler: LRScheduler) -> PreparedScheduler:
        """Return a prepared scheduler; see `Accelerator.prepare_scheduler`."""
        results = self._prepare_together(schedulers=[scheduler])
        return cast("PreparedScheduler", results.get(id(scheduler), scheduler))

    def prepare_data_loader(
        self,
        data_loader: DataLoader[_T],
        device_placement: bool | None,
        data: Literal["global", "sharded"] = "global",
    ) -> PreparedLoader[_T]:
        """Return a prepared loader; see `Accelerator.prepare_data_loader`."""
        if data not in {"global", "sharded"}:
            raise ValueError(f"Invalid data={data!r}: expected global or sharded.")
        if isinstance(data_loader, PreparedLoader):
            return data_loader
        _check_type(data_loader)
        check_loader_configuration(self._run.options.loaders)
        options = replace(
            self._run.options.loader_options,
            put_on_device=self._run.options.device_placement
            if device_placement is None
            else device_placement,
            presharded=data == "sharded",
        )
        self._check_consistent([data_loader], options)
        recorded = self._run.loops.records_batches
        prepared = prepare_loader(data_loader, self._run.backend, self._run.loops, options)
        if self._run.loops.records_batches and not recorded:
            for model in self._run.prepared.models:
                self._run.strategy.observe_inputs(model, self._run.loops.model_inputs)
        self._run.prepared.add_loader(prepared)
        return prepared

    def _build_request(
        self, model: nn.Module, device_placement: bool | None, *, is_trained: bool = True
    ) -> ModelRequest:
        return ModelRequest(
            model,
            is_placed=self._run.options.device_placement if device_placement is None else device_placement,
            is_trained=is_trained,
            set_forward=self._set_forward,
            ddp_options=self._run.options.ddp_options,
        )

    def _set_forward(self, model: nn.Module) -> None:
        self._run.precision.wrap(model)
        dynamo = self._run.options.dynamo
        if dynamo.name != "no" and self._run.backend.grid.size("tensor") > 1:
            # torch 2.13 recurses without end in graphs of sharded layers whose lengths are symbols, as after a second length.
            if dynamo.dynamic:
                raise ValueError(
                    "Cannot compile a tensor parallel model with dynamic=True: torch cannot trace its layers with lengths that "
                    "change. Leave dynamic out, and each length is compiled by itself."
                )
            dynamo = replace(dynamo, dynamic=False)
        compile_in_place(self._run.strategy.unwrap_model(model), dynamo)

    def _prepare_together(
        self,
        requests: Sequence[ModelRequest] = (),
        optimizers: Sequence[tuple[torch.optim.Optimizer, bool | None]] = (),
        schedulers: Sequence[LRScheduler] = (),
    ) -> dict[int, Any]:
        """Return the prepared objects by the id of the script's; those that are prepared already are their own."""
        if self._loading.is_active:
            raise ValueError(
                "prepare() failed: accelerator.loading() is not left yet, and some ranks create models without values in it. Call prepare() "
                "after the block."
            )
        results: dict[int, Any] = {}
        new_requests, pending = [], []
        for request in requests:
            if any(request.model is prepared for prepared in self._run.prepared.models):
                results[id(request.model)] = request.model
            else:
                new_request, values = self._check_model(request)
                new_requests.append(new_request)
                pending.append(values)
        new_optimizers = [
            (o, placement) for o, placement in optimizers if not isinstance(o, PreparedOptimizer)
        ]
        new_schedulers = [s for s in schedulers if not isinstance(s, PreparedScheduler)]
        models = self._run.strategy.prepare(new_requests, [o for o, _ in new_optimizers], new_schedulers)
        for model, values in zip(models, pending, strict=True):
            if values is not None:
                values.fill_shards(model)
        for request, model in zip(new_requests, models, strict=True):
            self._add_model(model, is_trained=request.is_trained)
            results[id(request.model)] = model
        for optimizer, placement in new_optimizers:
            results[id(optimizer)] = self._add_optimizer(optimizer, placement)
        for scheduler in new_schedulers:
            results[id(scheduler)] = self._add_scheduler(scheduler)
        if self._run.strategy.shards_models and (new_requests or new_optimizers):
            # Before a forward pass, which replaces parameters by gathered ones. Others are grouped when a loss has a weight.
            self._run.gradients.find_groups()
        self._run.checks.watch_prepared(has_new=bool(new_requests or new_optimizers or new_schedulers))
        return results

    def _check_model(self, request: ModelRequest) -> tuple[ModelRequest, PendingValues | None]:
        """Raise an error if a model cannot be prepared, copy tensors that cannot be sent, and return the request for it.

        The values of its shards are returned too, if some ranks only have them.
        """
        self._run.options.read_plugin(self._run.strategy)
        self._run.strategy.check_tensors(request.model)
        if request.is_trained:
            self._check_consistent([request.model], self._run.options.loader_options)
            self._run.precision.check(request.model.parameters())
        pending = self._loading.take(request.model, is_placed=request.is_placed)
        if dispatch := describe_dispatch(request.model):
            self._refuse_dispatch(request, dispatch)
            return replace(request, is_placed=False), pending
        if not self._run.strategy.shards_models:
            refuse_meta_model(request.model)
        elif self._run.options.fsdp_plugin is not None:
            self._run.options.fsdp_plugin.freeze("models are sharded by it", "Set it before prepare()")
        if self._run.backend.topology.world_size > 1:
            _make_contiguous(request.model)
        return request, pending

    def _refuse_dispatch(self, request: ModelRequest, dispatch: str) -> None:
        """Raise ValueError if a model that is dispatched to several devices cannot be prepared here."""
        size = self._run.backend.topology.world_size
        if size > 1 or self._run.strategy.shards_models:
            where = f"on {size} processes" if size > 1 else "to shard it"
            raise ValueError(
                f"Cannot prepare a model {where}: it is {dispatch}, and each process needs it on its own device. Load it "
                "with device_map={'': accelerator.device} or without a device_map, or start one process."
            )
        trained = [name for name, parameter in request.model.named_parameters() if parameter.requires_grad]
        offloaded = sorted({*trained} & {*list_meta_tensors(request.model)}) if request.is_trained else []
        if offloaded:
            raise ValueError(
                f"Cannot train {format_names(offloaded)}: offloaded weights are read again in each forward pass. Freeze them, or "
                "load the model with a device_map that offloads nothing."
            )

    def _add_model(self, prepared: nn.Module, *, is_trained: bool) -> None:
        """Register a prepared model; one that was unwrapped and prepared again replaces its earlier wrapper."""
        if self._run.loops.records_batches:
            self._run.strategy.observe_inputs(prepared, self._run.loops.model_inputs)
        self._run.checks.add_model(prepared, is_trained=is_trained)
        size = self._run.accumulation.global_batch_size
        if size is not None and is_trained and (text := describe_division([prepared])):
            _LOG.warning_once("With global_batch_size=%d, training is %s.", size, text)
        unwrap = self._run.strategy.unwrap_model
        same = [
            i for i, earlier in enumerate(self._run.prepared.models) if unwrap(earlier) is unwrap(prepared)
        ]
        if same:
            self._run.prepared.models[same[0]] = prepared
        else:
            self._run.prepared.models.append(prepared)

    def _add_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None
    ) -> PreparedOptimizer:
        self._run.precision.check(p for group in optimizer.param_groups for p in group["params"])
        prepared = PreparedOptimizer(
            optimizer,
            self._run.accumulation,
            self._run.precision.scaler,
            self._run.strategy,
            partial(self._check_first_step, optimizer),
            self._run.build_gather("the loss of LBFGS"),
        )
        if self._run.options.device_placement if device_placement is None else device_placement:
            self._run.strategy.place_state(optimizer)
        self._run.prepared.optimizers.append(prepared)
        self._on_optimizer(prepared)
        return prepared

    def _check_first_step(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        """Raise if ranks would train different weights; return a context that observes the first step."""
        self._run.strategy.check_step(optimizer, self._run.prepared.models)
        return self._run.checks.observe_first_step(optimizer)

    def _count_strides(self) -> int:
        """Return the number of scheduler steps per training step: schedules count batches of one process."""
        is_counted = self._run.accumulation.global_batch_size is not None
        is_global = self._run.options.loaders.split_batches or is_counted
        return 1 if is_global else self._run.backend.data_rank.world_size

    def _add_scheduler(self, scheduler: LRScheduler) -> PreparedScheduler:
        stepped = [o for o in self._run.prepared.optimizers if scheduler.optimizer in (o, o.optimizer)]
        prepared = PreparedScheduler(
            scheduler,
            stepped or self._run.prepared.optimizers,
            self._run.accumulation,
            strides=1 if getattr(scheduler, "counts_optimizer_steps", False) else self._count_strides(),
            with_optimizer=self._run.options.step_with_optimizer,
            gather=self._run.build_gather("the metric of ReduceLROnPlateau"),
        )
        self._run.prepared.schedulers.append(prepared)
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
        # Only along a dimension of size 0 or 1 can the stride of a contiguous tensor be any number.
        is_unusual = (
            tensor.is_contiguous()
            and any(size <= 1 for size in tensor.shape)
            and tensor.stride() != torch.empty(tensor.shape, device="meta").stride()
        )
        if is_unusual or (id(tensor) in buffers and _has_repeats(tensor)):
            tensor.data = tensor.detach().clone(memory_format=torch.contiguous_format)


def _has_repeats(tensor: torch.Tensor) -> bool:
    """Return whether elements of a strided tensor share memory, as after `expand`."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def explain_unprepared(item: Any) -> str | None:
    """Return why an object of another type is not prepared, and what to do, if it looks as if it should be."""
    if isinstance(item, torch.amp.GradScaler):
        return "accel scales losses itself. Remove it, and pass Accelerator(mixed_precision='fp16')."
    if callable(getattr(item, "step", None)):
        if hasattr(item, "param_groups"):
            return (
                "it is not a torch.optim.Optimizer, so it steps in every micro-batch and without the loss scaler. Derive its "
                "class from torch.optim.Optimizer."
            )
        if any(hasattr(item, name) for name in ("get_last_lr", "get_lr", "_get_lr", "step_update")):
            return (
                "it is not a torch.optim.lr_scheduler.LRScheduler, so it advances whenever the script steps it. Step it only if "
                "accelerator.sync_gradients is True, or derive its class from LRScheduler."
            )
    if not _is_data(item):
        return None
    cure = "Put it into a torch.utils.data.IterableDataset, and pass DataLoader(dataset, batch_size=None)."
    if isinstance(item, IterableDataset):
        cure = (
            "Pass DataLoader(dataset, batch_size=...), with batch_size=None if it yields batches. If each process reads its own "
            'part, as with webdataset.split_by_node, pass that to prepare_data_loader(loader, data="sharded").'
        )
    elif callable(getattr(item, "__getitem__", None)) and callable(getattr(item, "__len__", None)):
        cure = "Pass DataLoader(dataset, batch_size=...)."
    return f"it is not a torch.utils.data.DataLoader, so each process reads it by itself and nothing is moved to the device. {cure}"


def _is_data(item: Any) -> bool:
    """Return whether an object that is not a container or tensor is a dataset or is used like a loader."""
    if isinstance(item, (Dataset, Iterator)):
        return True
    is_iterable = callable(getattr(item, "__iter__", None)) and not isinstance(item, (torch.Tensor, type))
    names = ("batch_size", "dataset", "batch_sampler")
    return is_iterable and (
        any(hasattr(item, name) for name in names)
        or type(item).__module__.partition(".")[0] in {"datasets", "torchdata"}
    )
