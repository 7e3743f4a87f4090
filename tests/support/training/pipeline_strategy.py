"""A pipeline as an extension: the section of its settings, and a strategy that owns both passes of a step.

The layers of an `nn.Sequential` are divided over the ranks, and a schedule of `torch.distributed.pipelining` runs them.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import ClassVar
from unittest import mock

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from accel_runtime.environment.engines import ENGINES, Engine
from accel_runtime.parallel import STRATEGIES
from accel_runtime.parallel.fully_shard import broadcast_parameters
from accel_runtime.parallel.strategy import GradientAccess, Strategy


@dataclass(frozen=True)
class Pipeline(Engine):
    """The section `pipeline:` of the settings."""

    name: ClassVar[str] = "pipeline"
    title: ClassVar[str] = "A pipeline"
    switch: ClassVar[str] = "parts"
    file: ClassVar[str] = "config"
    package: ClassVar[str] = "torch"

    parts: int = 0
    """Number of parts of a micro-batch."""
    config: str = ""

    @property
    def is_used(self):
        return bool(self.parts)

    def find_conflict(self, settings):  # noqa: ARG002
        return None

    def read_config(self):
        raise NotImplementedError


class StageGradients(GradientAccess):
    """Gradients of which each rank has those of its stage; norms and overflows are those of all stages."""

    def __init__(self, backend):
        self._backend = backend

    def compute_norm(self, parameters, norm_type):
        power = super().compute_norm(parameters, norm_type) ** norm_type
        return self._backend.all_reduce(power, "sum") ** (1 / norm_type)

    def clip_norm(self, parameters, max_norm, norm_type):
        parameters = list(parameters)
        norm = self.compute_norm(parameters, norm_type)
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def unscale(self, optimizer, unscale):
        found = super().unscale(optimizer, unscale)
        return {device: self._backend.all_reduce(count, "max") for device, count in found.items()}


class PipelineStrategy(Strategy):
    """Each rank trains a stage of the model, with parts of each micro-batch in turn."""

    shards_models = True
    combines_gradients = False

    def __init__(self, backend, parts):
        super().__init__(backend)
        self.gradients = StageGradients(backend)
        self._parts = parts
        self._stages = {}
        self._pass = self._scale = None
        self._losses = []

    @property
    def has_losses(self):
        return self.backend.topology.rank == self.backend.topology.world_size - 1

    def check_options(self, ddp_options, mixed_precision):  # noqa: ARG002
        if ddp_options:
            raise ValueError(f"DistributedDataParallelKwargs({', '.join(ddp_options)}) is not supported.")

    def prepare(self, models=(), optimizers=(), schedulers=()):  # noqa: ARG002
        prepared = [self._prepare_model(request) for request in models]
        own = {parameter for model in self._stages for parameter in model.parameters()}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if parameter in own]
        return prepared

    def _prepare_model(self, request):
        topology, layers = self.backend.topology, list(request.model.named_children())
        broadcast_parameters(request.model, self.backend)
        bounds = [len(layers) * rank // topology.world_size for rank in (topology.rank, topology.rank + 1)]
        model = nn.Sequential(OrderedDict(layers[slice(*bounds)])).to(self.backend.device)
        request.set_forward(model)
        stage = PipelineStage(model, topology.rank, topology.world_size, self.backend.device)
        # Gradients of earlier micro-batches of the script would be divided too by `scale_grads`.
        self._stages[model] = ScheduleGPipe(stage, self._parts, self._compute_loss, scale_grads=False)
        return model

    def _compute_loss(self, outputs, targets):
        loss = self._pass.loss_fn(outputs, targets)
        self._losses.append(loss.detach())
        return self._scale(loss / self._parts)

    def forward_backward(self, training_pass):
        """Run parts of the rows through the stages."""

        def run(scale):
            self._pass, self._scale, self._losses = training_pass, scale, []
            inputs = (training_pass.inputs,) if self.backend.topology.rank == 0 else ()
            self._stages[training_pass.model].step(*inputs, target=training_pass.targets)
            # The first call infers the shape of the loss before.
            return torch.stack(self._losses[-self._parts :]).mean() if self.has_losses else None

        return training_pass.run_backward(next(training_pass.model.parameters()).dtype, run)


def choose_strategy(backend, settings, _config=None):
    """Return the strategy of the settings."""
    return PipelineStrategy(backend, settings.engine.parts)


@contextmanager
def add_rows():
    """Add the rows of the pipeline to the tables of sections and of strategies."""
    with ExitStack() as stack:
        for table, entry in ((ENGINES, "Pipeline"), (STRATEGIES, "choose_strategy")):
            location = {"pipeline": f"{__name__}:{entry}"}
            stack.enter_context(mock.patch.dict(table._locations, location))
            stack.enter_context(mock.patch.object(table, "names", (*table.names, "pipeline")))
        yield
