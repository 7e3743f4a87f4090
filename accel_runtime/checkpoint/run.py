"""A run's state, item by item, out of what an `Accelerator` has prepared."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from accel_runtime.accumulation import Accumulation
from accel_runtime.backends.base import Backend
from accel_runtime.checkpoint import random, window
from accel_runtime.checkpoint.items import Item, Loader, Stateful
from accel_runtime.checkpoint.live import is_sharded, name_of
from accel_runtime.checkpoint.manifest import Stored
from accel_runtime.checkpoint.models import Model
from accel_runtime.checkpoint.names import parameter_names
from accel_runtime.checkpoint.optimizers import Optimizer
from accel_runtime.data.loader import NextBatch, PreparedLoader
from accel_runtime.gradients import Gradients
from accel_runtime.optimizer import PreparedOptimizer
from accel_runtime.parallel.materializing import Memory
from accel_runtime.precision import Precision
from accel_runtime.scheduler import PreparedScheduler

__all__ = ["Run"]

_SAVED_BY = "saved_by"
"""The key of the random states for the rank that saved without the others."""
_SLACK = 1 << 22
"""Bytes for what is small, and for shares that are not quite even."""


@dataclass(frozen=True)
class Run:
    """What an `Accelerator` has prepared."""

    backend: Backend
    models: Sequence[nn.Module]
    optimizers: Sequence[PreparedOptimizer]
    schedulers: Sequence[PreparedScheduler]
    loaders: Sequence[PreparedLoader | None]
    """In the order in which they were prepared; None where the script has let one go."""
    precision: Precision
    accumulation: Accumulation
    gradients: Gradients
    registered: Sequence[Any]
    memory: Memory | None = None
    """Where models without memory get theirs when they are loaded."""
    alone: bool = False
    """Save what this process has by itself, without a collective and without states that have a part of every process."""

    @property
    def step(self) -> int:
        """Optimizer steps until now."""
        return max((optimizer.steps for optimizer in self.optimizers), default=0)

    @property
    def bytes(self) -> int:
        """About what this rank writes of models and optimizers."""
        state = [tensor for model in self.models for tensor in (*model.parameters(), *model.buffers())]
        for optimizer in self.optimizers:
            state += [
                value for own in optimizer.state.values() for value in own.values() if torch.is_tensor(value)
            ]
        return sum(_share(tensor, self.backend.topology.world_size) for tensor in state) + _SLACK

    def states(self) -> list[dict[str, Any]]:
        """The state of every model, under the names of the script's own module."""
        return [self.backend.original(model).state_dict() for model in self.models]

    def items(
        self,
        states: Mapping[int, dict[str, Any]] | None = None,
        *,
        without: Container[int] = (),
        strict: bool = True,
        position: NextBatch = "next_batch",
    ) -> list[Item]:
        """All items, in the order in which they are restored.

        Args:
            states: The states of models by their numbers, as hooks of the script have left them; None is that of all.
            without: The numbers of models that hooks have taken away.
            strict: False lets a model take what fits.
            position: Where loaders begin after they were loaded; see `PreparedLoader.load_state_dict`.
        """
        names = parameter_names(self.models, self.optimizers, self.backend.original)
        items: list[Item] = [Replicas(self.backend, () if self.alone else self.models)]
        items += [
            Model(
                _numbered("model", index),
                self.backend.original(model),
                None if states is None else states[index],
                strict=strict,
                memory=self.memory,
            )
            for index, model in enumerate(self.models)
            if index not in without and (states is None or index in states)
        ]
        items += [
            Optimizer(_numbered("optimizer", index), optimizer, names)
            for index, optimizer in enumerate(self.optimizers)
        ]
        stateful: list[tuple[str, Iterable[tuple[int, Any]]]] = [
            ("scheduler", enumerate(self.schedulers)),
            ("registered", enumerate(self.registered)),
        ]
        items += [Stateful(_numbered(kind, index), thing) for kind, some in stateful for index, thing in some]
        for index, loader in enumerate(self.loaders):
            left_out = self.alone and loader is not None and loader.own_data
            items.append(Loader(_numbered("loader", index), None if left_out else loader, position))
        if self.precision.scaler is not None:
            items.append(Stateful("scaler", self.precision.scaler))
        items += [
            Window(self.accumulation, self.gradients, self.backend.data.copies),
            Counters(self.optimizers),
        ]
        items.append(Random(self.backend, alone=self.alone))
        return items


class Replicas(Item):
    """What is remembered from step to step by what makes the ranks' models one."""

    def __init__(self, backend: Backend, models: Sequence[nn.Module]) -> None:
        super().__init__("replicas")
        self._backend, self._models = backend, models

    @override
    def tree(self) -> Any:
        return [self._backend.replica(model) for model in self._models]

    @override
    def restore(self, tree: Any) -> None:
        for model, state in zip(self._models, tree, strict=False):
            self._backend.restore_replica(model, state)


class Window(Item):
    """Gradients that are held half-way through an accumulation window, and where the count stands."""

    every_rank = True

    def __init__(self, accumulation: Accumulation, gradients: Gradients, copies: int) -> None:
        super().__init__("window")
        self._accumulation, self._gradients, self._copies = accumulation, gradients, copies

    @override
    def tree(self) -> Any:
        return window.captured(self._accumulation, self._gradients, self._copies)

    @override
    def targets(self, text: Any, tensors: Mapping[str, Stored]) -> dict[str, torch.Tensor]:
        parameters = {name: parameter for parameter, name in self._gradients.names().items()}
        found = {}
        for name in text.get("averaged", ()):
            stored, parameter = name_of(text["gradients"].get(name)), parameters.get(name)
            if stored in tensors and is_sharded(parameter) and parameter is not None:
                dtype = getattr(torch, tensors[stored].dtype)
                found[stored] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return found

    @override
    def restore(self, tree: Any) -> None:
        window.restored(tree, self._accumulation, self._gradients)

    @override
    def merged(self, trees: Sequence[Any], rank: int, world_size: int) -> Any:
        return window.merged(trees, world_size, self._copies)


class Random(Item):
    """The streams of random numbers of a process."""

    every_rank = True

    def __init__(self, backend: Backend, *, alone: bool = False) -> None:
        super().__init__("random")
        self._backend, self._alone = backend, alone

    @override
    def tree(self) -> Any:
        streams = random.captured(self._backend.device, self._module)
        return streams | ({_SAVED_BY: self._backend.topology.rank} if self._alone else {})

    @override
    def restore(self, tree: Any) -> None:
        random.restored(tree, self._backend.device, self._module)

    @property
    def _module(self) -> Any:
        """What has the device's generator; the CPU's is everybody's."""
        return None if self._backend.device.type == "cpu" else self._backend.random

    @override
    def merged(self, trees: Sequence[Any], rank: int, world_size: int) -> Any:
        # A rank that saved alone keeps its streams: those of the first rank define the order of the next epochs.
        if trees[0].get(_SAVED_BY) == self._backend.topology.rank:
            return trees[0]
        # Ranks that have the same part of every batch draw alike.
        place = self._backend.data
        streams = [{kind: state for kind, state in tree.items() if kind != _SAVED_BY} for tree in trees]
        return random.derived(streams, place.rank, place.world_size)


class Counters(Item):
    """How many steps the optimizers have made."""

    def __init__(self, optimizers: Sequence[PreparedOptimizer]) -> None:
        super().__init__("counters")
        self._optimizers = optimizers

    @override
    def tree(self) -> Any:
        return {"steps": [optimizer.steps for optimizer in self._optimizers]}

    @override
    def restore(self, tree: Any) -> None:
        for optimizer, steps in zip(self._optimizers, tree["steps"], strict=False):
            optimizer.steps = steps


def _share(tensor: torch.Tensor, world_size: int) -> int:
    local = getattr(tensor, "_local_tensor", None)
    return local.nbytes if local is not None else -(-tensor.nbytes // world_size)


def _numbered(kind: str, index: int) -> str:
    """`model`, `model_1`, `model_2`, ..."""
    return f"{kind}_{index}" if index else kind
