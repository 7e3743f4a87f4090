"""Several processes that divide models among them: `fully_shard`, tensor parallel, and both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from typing_extensions import override

from accel_runtime.backends.averaging import Averaging, Buffers, in_parts
from accel_runtime.backends.distributed import Distributed
from accel_runtime.description import GroupFacts
from accel_runtime.env import MixedPrecision, Settings
from accel_runtime.kinds import DistributedType
from accel_runtime.parallel import activations
from accel_runtime.parallel.buffers import FirstRanks
from accel_runtime.parallel.gathering import at_rest
from accel_runtime.parallel.mesh import Mesh, Sizes
from accel_runtime.parallel.precision import policy_of
from accel_runtime.parallel.report import groups_of
from accel_runtime.parallel.sharding import Sharding, ignored
from accel_runtime.parallel.starting import take_over
from accel_runtime.parallel.states import divide_loaded
from accel_runtime.parallel.styles import divided_dimensions
from accel_runtime.parallel.tensor import divide, plan_of
from accel_runtime.parallel.verifying import Wanted, expected, verify
from accel_runtime.parallel.wrapping import Units, units_of
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
        # The models divided here, and whether their backward passes combine gradients: torch does not tell.
        self._syncs: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
        self._averaging: WeakKeyDictionary[nn.Module, Averaging] = WeakKeyDictionary()
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
        asked, averages = self._fully_shard, self.mesh.sizes.averages
        units = units_of(model, asked.wrap)
        whole = ignored(model, asked.ignore) if averages else set()
        parameters = expected(model, whole, shards=averages)
        plan = plan_of(model, self._parallel.tp_plan) if self.mesh.tp is not None else ()
        if asked.activation_checkpointing:
            activations.apply(model, units)
        if self.mesh.tp is not None:
            divide(model, self.mesh.tp, plan)
        policies = self._shard(model, units) if averages else {}
        self._rest(model)
        wanted = Wanted(
            parameters,
            self.mesh.shard if averages else None,
            policies,
            offload=averages and asked.cpu_offload,
            again=tuple(name for name, _ in activations.chosen(units))
            if asked.activation_checkpointing
            else (),
            layers={
                part.name: frozenset(divided_dimensions(model.get_submodule(part.name), part.style))
                for part in plan
            },
        )
        verify(model, wanted)
        return model

    def _rest(self, model: nn.Module) -> None:
        """What is left to do for a model that is divided."""
        if not self.mesh.sizes.averages and all(
            not tensor.is_meta for tensor in (*model.parameters(), *model.buffers())
        ):
            model.to(self.device)
        self._syncs[model] = True
        if any(True for _ in model.buffers()):
            shared = FirstRanks(model, self.broadcast)
            buffers = Buffers(lambda: self._syncs.get(model, True), lambda _: shared.take_over())
            model.register_forward_pre_hook(buffers.before)
            model.register_forward_hook(buffers.after)

    def _shard(self, model: nn.Module, units: Units) -> dict[str, MixedPrecisionPolicy]:
        """Shard a model; the policies of the modules that are gathered by themselves."""
        asked = self._fully_shard
        whole = ignored(model, asked.ignore)
        policy = policy_of(asked, self._computes_in, model.parameters())
        policies = Sharding(self.mesh.shard, asked, policy, frozenset(whole)).apply(model, units)
        for parameter in whole:
            # torch leaves them where they are, and their gradients alone.
            if not parameter.is_meta:
                parameter.data = parameter.data.to(self.device)
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter in whole]
        self._averaging[model] = Averaging(named, self._average, self.agreement)
        return policies

    @torch.no_grad()
    def _average(self, gradients: Sequence[torch.Tensor]) -> None:
        mesh = self.mesh.shard
        for part in in_parts(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in part]) / mesh.size()
            for dimension in range(mesh.ndim):
                dist.all_reduce(flat, group=mesh.get_group(dimension))
            sizes = [gradient.numel() for gradient in part]
            for gradient, mean in zip(part, torch.split(flat, sizes), strict=True):
                gradient.copy_(mean.view_as(gradient))

    @override
    def settle(self) -> None:
        # After a forward pass without a backward pass, gathered parameters stand where the sharded ones belong.
        at_rest(self._syncs)

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
            with self._averaging_now(model, wanted=wanted):
                yield
        finally:
            self._set_syncing(model, wanted=before)

    def _averaging_now(self, model: nn.Module, *, wanted: bool) -> AbstractContextManager[None]:
        averaging = self._averaging.get(model)
        if averaging is None:
            return nullcontext()
        return averaging.released() if wanted else averaging.held()

    def _set_syncing(self, model: nn.Module, *, wanted: bool) -> None:
        self._syncs[model] = wanted
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(wanted, recurse=False)
