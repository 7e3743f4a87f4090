"""Several processes that divide models among them: `fully_shard`, tensor parallel, and both."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from accel_runtime.backends.averaging import Averaging, in_parts
from accel_runtime.backends.base import Backend
from accel_runtime.backends.distributed import Distributed
from accel_runtime.description import GroupFacts
from accel_runtime.env import MixedPrecision, Settings
from accel_runtime.kinds import DistributedType
from accel_runtime.parallel import undivided
from accel_runtime.parallel.boxes import local
from accel_runtime.parallel.buffers import FirstRanks, Untraced
from accel_runtime.parallel.dividing import Dividing
from accel_runtime.parallel.gathering import at_rest, refuse_sharded_saves
from accel_runtime.parallel.mesh import Mesh, Sizes
from accel_runtime.parallel.report import groups_of
from accel_runtime.parallel.starting import take_over
from accel_runtime.parallel.states import divide_loaded
from accel_runtime.parallel.syncing import Syncing
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
        self._dividing = Dividing(self.mesh, settings, device)
        self._divided: WeakKeyDictionary[nn.Module, Syncing] = WeakKeyDictionary()

    @override
    def set_sharding(self, settings: Settings) -> None:
        self._dividing = Dividing(self.mesh, settings, self.device)

    @property
    @override
    def kind(self) -> DistributedType:
        return DistributedType.FSDP if self.mesh.sizes.shards else super().kind

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
        divided = self._dividing.apply(model)
        whole = Averaging(divided.whole, self._average, self.agreement)
        refuse_sharded_saves(model)
        self._divided[model] = syncing = Syncing(divided.gathered, whole)
        if any(True for _ in model.buffers()):
            shared = FirstRanks(model, self.broadcast)
            buffers = Untraced(lambda: syncing.wanted, lambda _: shared.take_over())
            model.register_forward_pre_hook(buffers.before)
            model.register_forward_hook(buffers.after)
        return model

    @torch.no_grad()
    def _average(self, gradients: Sequence[torch.Tensor]) -> None:
        mesh = self.mesh.shard
        for part in in_parts([local(gradient) for gradient in gradients]):
            flat = torch.cat([gradient.reshape(-1) for gradient in part]) / mesh.size()
            for dimension in range(mesh.ndim):
                dist.all_reduce(flat, group=mesh.get_group(dimension))
            sizes = [gradient.numel() for gradient in part]
            for gradient, mean in zip(part, torch.split(flat, sizes), strict=True):
                gradient.copy_(mean.view_as(gradient))

    @override
    def settle(self) -> None:
        # After a forward pass without a backward pass, gathered parameters stand where the sharded ones belong.
        at_rest(self._divided)

    @override
    def original(self, model: nn.Module) -> nn.Module:
        return model

    @override
    def wrapping(self, model: nn.Module) -> str:
        told = ["fully_shard"] if isinstance(model, FSDPModule) else []
        told += ["tensor parallel"] if self.mesh.tp is not None else []
        return f"{' and '.join(told) or 'none'} ({self.mesh.sizes.told})"

    @override
    def groups(self, model: nn.Module, computes_in: torch.dtype | None) -> tuple[GroupFacts, ...]:
        return groups_of(model, computes_in)

    @override
    def watch_over(self, optimizer: torch.optim.Optimizer) -> None:
        divide_loaded(optimizer)

    @override
    def before_first_step(self, models: Sequence[nn.Module]) -> None:
        if self.mesh.tp is not None:
            undivided.check(models, self.mesh.tp)

    @override
    def replica(self, model: nn.Module) -> dict[str, Any]:
        return {}

    @override
    def restore_replica(self, model: nn.Module, state: dict[str, Any]) -> None:
        return None

    @override
    def joined(self, models: list[Any]) -> AbstractContextManager[Any]:
        return Backend.joined(self, models)

    @override
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return self._syncing(model, wanted=False)

    @override
    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        return self._syncing(model, wanted=True)

    def _syncing(self, model: nn.Module, *, wanted: bool) -> AbstractContextManager[None]:
        known = self._divided.get(model)
        return nullcontext() if known is None else known.set(wanted=wanted)
