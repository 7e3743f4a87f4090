"""Several processes that divide models among them: `fully_shard`, tensor parallel, and both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from accel_runtime.backends.distributed import Distributed
from accel_runtime.env import MixedPrecision, Settings
from accel_runtime.kinds import DistributedType
from accel_runtime.parallel.mesh import Mesh, Sizes
from accel_runtime.parallel.precision import policy_of
from accel_runtime.parallel.sharding import Sharding
from accel_runtime.parallel.starting import take_over
from accel_runtime.parallel.states import divide_loaded
from accel_runtime.parallel.tensor import divide, plan_of
from accel_runtime.parallel.wrapping import units_of
from accel_runtime.precision import FORMATS
from accel_runtime.topology import Topology

__all__ = ["Sharded"]


class Sharded(Distributed):
    """The backend of processes that each have a part of every model.

    Args:
        topology: Where this process stands.
        device: What it computes on.
        settings: How models are divided, and what `Distributed` takes from them.
        options: Arguments for `init_process_group`; they win over `settings`.

    Raises:
        SettingsError: The division does not fit the number of processes.
    """

    divides = True

    def __init__(
        self, topology: Topology, device: torch.device, settings: Settings, options: dict[str, Any]
    ) -> None:
        sizes = Sizes.of(settings.parallel, topology.world_size)
        super().__init__(topology, device, settings, options)
        self.mesh: Mesh = Mesh(sizes, device, topology)
        """The processes, as meshes."""
        self.data = self.mesh.data
        self._parallel, self._fully_shard = settings.parallel, settings.fully_shard
        # torch can set it, and has no way to ask.
        self._syncs: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
        self._computes_in = FORMATS[settings.mixed_precision].dtype

    @property
    @override
    def kind(self) -> DistributedType:
        return DistributedType.FSDP

    @override
    def check(self, replication: dict[str, Any], mixed_precision: MixedPrecision) -> None:
        if replication:
            raise ValueError(
                f"DistributedDataParallelKwargs({', '.join(replication)}) is for models that every process has whole, and "
                f"here they are divided ({self.mesh.sizes.told}): leave it out"
            )

    @override
    def place(self, model: nn.Module) -> nn.Module:
        # Part by part, as it is divided: all of it may not fit on the device.
        return model

    @override
    def replicate(self, model: nn.Module, options: dict[str, Any]) -> nn.Module:
        if isinstance(model, FSDPModule):
            return model
        take_over(model, self)
        units = units_of(model, self._fully_shard.wrap) if self._parallel.shards else []
        if self.mesh.tp is not None:
            divide(model, self.mesh.tp, plan_of(model, self._parallel.tp_plan))
        if self.mesh.sizes.averages:
            policy = policy_of(self._fully_shard, self._computes_in)
            Sharding(self.mesh.shard, self._fully_shard, policy).apply(model, units)
        elif all(not tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            model.to(self.device)
        return model

    @override
    def original(self, model: nn.Module) -> nn.Module:
        return model

    @override
    def wrapping(self, model: nn.Module) -> str:
        told = ["fully_shard"] if isinstance(model, FSDPModule) else []
        told += ["tensor parallel"] if self.mesh.tp is not None else []
        return f"{' and '.join(told) or 'none'} ({self.mesh.sizes.told})"

    @override
    def watch_over(self, optimizer: torch.optim.Optimizer) -> None:
        divide_loaded(optimizer)

    @override
    def replica(self, model: nn.Module) -> dict[str, Any]:
        return {}

    @override
    def restore_replica(self, model: nn.Module, state: dict[str, Any]) -> None:
        return None

    @override
    def joined(self, models: list[Any]) -> NoReturn:
        raise RuntimeError(
            "join_uneven_inputs() lets some ranks compute while others have nothing left, and here every rank has a part of "
            "the model that all need. Leave it out where loaders are prepared: those give every rank as many batches."
        )

    @override
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return self._syncing(model, wanted=False)

    @override
    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        return self._syncing(model, wanted=True)

    @contextmanager
    def _syncing(self, model: nn.Module, *, wanted: bool) -> Iterator[None]:
        """Inside, backward passes combine gradients, or keep them to this rank."""
        before = self._syncs.get(model, True)
        self._set_syncing(model, wanted=wanted)
        try:
            yield
        finally:
            self._set_syncing(model, wanted=before)

    def _set_syncing(self, model: nn.Module, *, wanted: bool) -> None:
        self._syncs[model] = wanted
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(wanted, recurse=False)
