"""The backend of processes that shard models: `fully_shard`, tensor parallelism, or both."""

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

from accel_runtime.backends.ddp import GradientAveraging, operate_flat
from accel_runtime.backends.distributed import DistributedBackend
from accel_runtime.env import MixedPrecision, Settings
from accel_runtime.options import DistributedType
from accel_runtime.parallel.apply import (
    BufferBroadcast,
    ModelSharder,
    UntracedBufferBroadcast,
    broadcast_parameters,
    list_parameter_groups,
    shard_loaded_state,
)
from accel_runtime.parallel.dtensor import (
    GroupFacts,
    MeshSizes,
    ProcessMesh,
    local_shard,
    refuse_sharded_saves,
    reshard_models,
)
from accel_runtime.parallel.fully_shard import GradientSync
from accel_runtime.parallel.tensor_parallel import check_replicated_gradients
from accel_runtime.topology import Topology

__all__ = ["FSDPBackend"]


class FSDPBackend(DistributedBackend):
    """The backend of processes that shard every model.

    Args:
        topology: Rank and world size of this process.
        device: The device of this process.
        settings: The sharding, and the settings of `DistributedBackend`.
        options: Arguments for `init_process_group`, which override `settings`.
    """

    shards_models = True

    def __init__(
        self, topology: Topology, device: torch.device, settings: Settings, options: dict[str, Any]
    ) -> None:
        sizes = MeshSizes.of(settings.parallel, topology.world_size)
        super().__init__(topology, device, settings, options)
        self.mesh: ProcessMesh = ProcessMesh(sizes, device, topology)
        """The device mesh."""
        self.data_rank = self.mesh.data_rank
        self._sharder = ModelSharder(self.mesh, settings, device)
        self._gradient_syncs: WeakKeyDictionary[nn.Module, GradientSync] = WeakKeyDictionary()

    @override
    def set_sharding(self, settings: Settings) -> None:
        self._sharder = ModelSharder(self.mesh, settings, self.device)

    @property
    @override
    def distributed_type(self) -> DistributedType:
        return DistributedType.FSDP if self.mesh.sizes.shards else super().distributed_type

    @override
    def check_options(self, ddp_options: dict[str, Any], mixed_precision: MixedPrecision) -> None:
        if ddp_options:
            raise ValueError(
                f"DistributedDataParallelKwargs({', '.join(ddp_options)}) is not supported for sharded models "
                f"({self.mesh.sizes.description}). Remove it."
            )

    @override
    def move_model(self, model: nn.Module) -> nn.Module:
        # The sharder moves it shard by shard, since the full model may not fit on the device.
        return model

    @override
    def wrap_model(self, model: nn.Module, ddp_options: dict[str, Any]) -> nn.Module:
        if isinstance(model, FSDPModule):
            return model
        broadcast_parameters(model, self)
        sharded = self._sharder.apply(model)
        averaging = GradientAveraging(sharded.replicated, self._average, self.handshake)
        refuse_sharded_saves(model)
        self._gradient_syncs[model] = sync = GradientSync(sharded.gathered, averaging)
        if any(True for _ in model.buffers()):
            broadcast = BufferBroadcast(model, self.broadcast)
            buffers = UntracedBufferBroadcast(lambda: sync.wanted, lambda _: broadcast.broadcast_buffers())
            model.register_forward_pre_hook(buffers.before)
            model.register_forward_hook(buffers.after)
        return model

    def _average(self, gradients: Sequence[torch.Tensor]) -> None:
        mesh = self.mesh.shard

        def average(flat: torch.Tensor) -> torch.Tensor:
            flat /= mesh.size()
            for dimension in range(mesh.ndim):
                dist.all_reduce(flat, group=mesh.get_group(dimension))
            return flat

        operate_flat([local_shard(gradient) for gradient in gradients], average)

    @override
    def synchronize(self) -> None:
        # After a forward pass without a backward pass, parameters of the root module are still gathered.
        reshard_models(self._gradient_syncs)

    @override
    def describe_wrapper(self, model: nn.Module) -> str:
        names = ["fully_shard"] if isinstance(model, FSDPModule) else []
        names += ["tensor parallel"] if self.mesh.tp is not None else []
        return f"{' and '.join(names) or 'none'} ({self.mesh.sizes.description})"

    @override
    def list_parameter_groups(
        self, model: nn.Module, autocast_dtype: torch.dtype | None
    ) -> tuple[GroupFacts, ...]:
        return list_parameter_groups(model, autocast_dtype)

    @override
    def register_load_state_hook(self, optimizer: torch.optim.Optimizer) -> None:
        shard_loaded_state(optimizer)

    @override
    def check_gradients(self, models: Sequence[nn.Module]) -> None:
        if self.mesh.tp is not None:
            check_replicated_gradients(models, self.mesh.tp)

    @override
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return self._set_sync(model, wanted=False)

    @override
    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        return self._set_sync(model, wanted=True)

    def _set_sync(self, model: nn.Module, *, wanted: bool) -> AbstractContextManager[None]:
        sync = self._gradient_syncs.get(model)
        return nullcontext() if sync is None else sync.set(wanted=wanted)
