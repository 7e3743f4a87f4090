"""The half of the facade that says what is in force."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accel_runtime.accumulation import Accumulation
from accel_runtime.data.loops import Loops
from accel_runtime.description import (
    Description,
    ModelFacts,
    ProcessFacts,
    loader_facts,
    model_facts,
    scheduler_facts,
)
from accel_runtime.env import MixedPrecision
from accel_runtime.facade.configuration import ConfigurationObjects
from accel_runtime.optimizer import PreparedOptimizer
from accel_runtime.project import ProjectConfiguration
from accel_runtime.scheduler import PreparedScheduler
from accel_runtime.state import AcceleratorState, GradientState

__all__ = ["InForce"]


class InForce(ConfigurationObjects):
    """What a script can ask an `Accelerator`."""

    _accumulation: Accumulation
    _loops: Loops
    _number: int
    _optimizers: list[PreparedOptimizer]
    project_configuration: ProjectConfiguration
    _schedulers: list[PreparedScheduler]
    _state: AcceleratorState
    _step_with_optimizer: bool

    deepspeed_plugin = None
    """None: there is no DeepSpeed here."""

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are divided among the processes by torch's `fully_shard`."""
        return self.settings.parallel.shards

    is_composable_parallelism_enabled = is_fsdp2

    @property
    def torch_device_mesh(self) -> Any:
        """The processes as a mesh with the dimensions that are more than one; None where models are whole."""
        return self._backend.mesh.whole if self._backend.mesh is not None else None

    @property
    def tensor_parallel_rank(self) -> int:
        """The place of this process among those that divide layers, from 0."""
        return self.process_index % self.settings.parallel.tp

    @property
    def context_parallel_rank(self) -> int:
        """The place of this process among those that divide sequences, from 0."""
        parallel = self.settings.parallel
        return self.process_index // parallel.tp % parallel.cp

    @property
    def data_parallel_shard_rank(self) -> int:
        """The place of this process among those that divide parameters, from 0."""
        mesh = self._backend.mesh
        return 0 if mesh is None else self._backend.data.rank % mesh.sizes.dp_shard

    @property
    def mixed_precision(self) -> MixedPrecision:
        """The number format in force."""
        return self.settings.mixed_precision

    @property
    def use_fp16(self) -> bool:
        """Whether the number format is fp16, as early scripts ask it."""
        return self.mixed_precision == "fp16"

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of fp16; None in other formats."""
        return self._precision.scaler

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is the global one."""
        return self._loader_config.split_batches

    @property
    def even_batches(self) -> bool:
        """Whether the end of an epoch is filled up; what is set holds for loaders prepared from then on."""
        return self._loader_config.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self._loader_config.even_batches = even_batches

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches whose gradients make one optimizer step."""
        return self._accumulation.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._accumulation.steps = steps

    @property
    def sync_gradients(self) -> bool:
        """Whether the backward pass in hand completes an accumulation window."""
        return self._accumulation.synced

    @sync_gradients.setter
    def sync_gradients(self, synced: bool) -> None:
        self._accumulation.synced = synced

    @property
    def step(self) -> int:
        """The number of micro-batches of `accumulate` since the end of an epoch; the next one counts from a value that is set."""
        return self._accumulation.step

    @step.setter
    def step(self, step: int) -> None:
        self._accumulation.step = step

    @property
    def should_save_model(self) -> bool:
        """Return True if this process writes a model: the first of all; with `save_on_each_node` the first of each machine."""
        each = self.project_configuration.save_on_each_node
        return bool(self.is_local_main_process if each else self.is_main_process)

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
        return self._state

    @property
    def gradient_state(self) -> GradientState:
        """Accumulation and the batch in hand, as one object to read."""
        return GradientState.of(self._number, self._accumulation, self._loops)

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the first process reads for all."""
        return self._loader_config.dispatch_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether shuffled orders are drawn from a seed and the epoch's number alone."""
        return self._loader_config.use_seedable_sampler

    @property
    def device_placement(self) -> bool:
        """Whether `prepare` moves models, and loaders their batches, to the device."""
        return self._device_placement

    @property
    def rng_types(self) -> list[str]:
        """The generators each rank takes over from the first at every epoch."""
        return list(self._rng_types)

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether prepared schedulers advance with their optimizers; else they are left to the script."""
        return self._step_with_optimizer

    @property
    def non_blocking(self) -> bool:
        """Whether copies to the device overlap with the computation."""
        return self._loader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether a script asked for loaders with a state; all have one."""
        return self._loader_config.use_stateful_dataloader

    def describe(self) -> Description:
        """What this run will do: processes, precision, models, loaders, and where the options come from.

        Printed, it is a text; `rich.print` shows a panel; `as_dict()` gives data.
        """
        topology = self._backend.topology
        return Description(
            processes=ProcessFacts(
                world_size=topology.world_size,
                rank=topology.rank,
                local_world_size=topology.local_world_size,
                device=str(self.device),
                process_group=self._backend.name or "",
            ),
            precision=self._precision.described,
            accumulation_steps=self._accumulation.steps,
            gradients=self._accumulation.describe(
                self._backend.data.world_size,
                split_batches=self._loader_config.split_batches and not self._accumulation.weighted,
            ),
            models=tuple(map(self._model_facts, self._models)),
            optimizers=tuple(type(optimizer.optimizer).__name__ for optimizer in self._optimizers),
            schedulers=tuple(map(scheduler_facts, self._schedulers)),
            loaders=tuple(
                loader_facts(loader, self._backend.data, self._accumulation.steps)
                for loader in list(self._loaders.values())
            ),
            options=self._origins,
            device=self._backend.facts,
        )

    def _model_facts(self, model: nn.Module) -> ModelFacts:
        hook = self._replication.get("comm_hook")
        return model_facts(
            self._backend.original(model),
            self._precision.format.dtype,
            getattr(hook, "value", None),
            self._backend.wrapping(model),
            self._backend.groups(model, self._precision.format.dtype),
        )
