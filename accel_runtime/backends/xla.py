"""Replicas of torch_xla: TPU cores, or its CPU device; the one file of the runtime that imports it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from accel_runtime import tree
from accel_runtime.backends.averaging import Averaging, Buffers, in_parts
from accel_runtime.backends.base import Backend, Reduction
from accel_runtime.backends.feeding import Belt, fed, stepper
from accel_runtime.backends.hosts import ByHosts, Hosts, Kept
from accel_runtime.backends.meshing import devices, wrapped
from accel_runtime.backends.moving import hosted, moved
from accel_runtime.backends.refusing import check_format, check_hooks, check_spmd, check_world, patience
from accel_runtime.backends.rows import Rows
from accel_runtime.backends.seed import Seed
from accel_runtime.backends.single import Single
from accel_runtime.data.source import Loop
from accel_runtime.env import MixedPrecision, Settings
from accel_runtime.heartbeat import keep_still
from accel_runtime.kinds import DistributedType
from accel_runtime.topology import Topology

try:
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr
    from torch_xla.distributed.parallel_loader import ParallelLoader
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel
except ImportError as error:
    raise RuntimeError(
        f"torch_xla cannot be loaded beside torch {torch.__version__}: {error}. The two are released in pairs, in an "
        'environment of their own: pip install "accel[xla]" installs torch_xla 2.9.0 with torch 2.9.0.'
    ) from error

__all__ = ["Mesh", "Replicas", "connect", "seed_device", "standing"]

_REDUCE = {"sum": xm.REDUCE_SUM, "mean": xm.REDUCE_SUM, "max": xm.REDUCE_MAX, "min": xm.REDUCE_MIN}
_NARROW = {torch.bfloat16, torch.float16}
"""What the CPU device cannot add up, and adds up badly anywhere."""
_LOOPBACK = "127.0.0.1"
_HERE = Kept()


def connect(settings: Settings, topology: Topology, options: dict[str, Any]) -> Backend:
    """Take up this replica's device and join the others.

    Args:
        settings: What the launcher said.
        topology: What the environment says of this process's place; torch_xla knows better, but both must agree.
        options: Fields of `InitProcessGroupKwargs`.

    Raises:
        ValueError: An option that cannot be honoured.
        RuntimeError: They do not. Or all devices are to be one (SPMD), and cannot.
    """
    if settings.spmd:
        return Mesh(devices(topology, xr, torch_xla._XLAC._xla_get_spmd_config_is_locked))  # noqa: SLF001
    check_spmd(xr.is_spmd())
    place = standing(topology)
    if not _HERE.seeded:
        # `torch.manual_seed` seeds other devices when they are first used, and does not know this one.
        seed_device(torch.initial_seed())
    timeout = patience(settings, options)
    if place.world_size == 1:
        return Lone(place, torch_xla.device())
    if xr.local_ordinal() % xr.addressable_device_count():
        keep_still()  # a process has one heart, and its first replica's is watched
    return Replicas(place, torch_xla.device(), _hosts(place, timeout))


def standing(topology: Topology) -> Topology:
    """Where this replica stands, as torch_xla has it.

    Args:
        topology: What the environment says of it.

    Raises:
        RuntimeError: The two disagree.
    """
    torch_xla.device()
    world = xr.world_size()
    check_world(topology, world)
    if world == 1:
        return Topology()
    return Topology(xr.global_ordinal(), world, xr.local_ordinal(), xr.local_device_count(), launched=True)


def seed_device(seed: int) -> None:
    """Seed the generator of this replica's device."""
    xm.set_rng_state(seed)
    _HERE.seeded = True


def _hosts(place: Topology, timeout: timedelta) -> Hosts:
    """This replica's host side, made once: what it counts goes on with a second backend."""
    if _HERE.hosts is None:
        address = xr.get_master_ip() if xr.device_type() == "TPU" else _LOOPBACK
        _HERE.hosts = Hosts(place, _share, address, timeout)
    return _HERE.hosts


def _share(text: str) -> str:
    first: bytes = xm.rendezvous("accel", text.encode())[0]
    return first.decode()


class _Lazy(Backend):
    """What is the same with one replica and with several: operations are recorded, and run when a step is cut off."""

    static_shapes = True
    _handed = 0

    @override
    def check(self, replication: dict[str, Any], mixed_precision: MixedPrecision) -> None:
        check_format(mixed_precision)
        check_hooks(replication)

    @override
    def after_step(self) -> Callable[[], None]:
        return stepper(lambda: self._handed, _settled)

    @property
    @override
    def random(self) -> Any:
        return Seed(xm.get_rng_state, seed_device)

    @override
    def settle(self) -> None:
        _settled(wait=True)

    @override
    def hosted(self, state: Any) -> Any:
        return hosted(state, torch_xla._XLAC._xla_get_tensor_id, torch_xla._XLAC._xla_get_cpu_tensors)  # noqa: SLF001

    @override
    def place(self, model: nn.Module) -> nn.Module:
        return moved(model, self.device)

    @override
    def walked(
        self, walk: Callable[[Loop], Iterator[Any]], loop: Loop, *, place: bool, loaded_beside: bool
    ) -> Iterator[Any]:
        if place and loaded_beside:
            return self._counted(fed(walk, loop, self._belt))
        return self._cut(self._counted(walk(loop)))

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._handed += 1
            yield batch

    def _cut(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches, with what was computed on each sent off to the device before the next is loaded."""
        for batch in batches:
            yield batch
            _settled()

    def _belt(self) -> Belt:
        """What carries batches to the device in the background."""
        return Belt(self._carrier, self.device)

    def _carrier(self, batches: Any, **options: Any) -> Any:
        """torch_xla's loader, one batch ahead."""
        return ParallelLoader(
            batches, [self.device], loader_prefetch_size=1, device_prefetch_size=1, **options
        )

    @property
    @override
    def kind(self) -> DistributedType:
        return DistributedType.XLA


class Lone(_Lazy, Single):
    """One replica: collectives are identities."""


class Mesh(_Lazy, Single):
    """All devices of a machine as one (SPMD): data are cut over them, models fully sharded, and XLA does the talking.

    There is one process, so collectives are identities: a tensor is the whole of what the devices hold.

    Args:
        parts: How many there are.
    """

    def __init__(self, parts: int) -> None:
        super().__init__(Topology(), torch_xla.device())
        self._mesh = xs.Mesh(list(range(parts)), (parts,), ("fsdp",))
        self._rows = Rows(parts, lambda rank: xs.ShardingSpec(self._mesh, _first(rank)), self._mark)

    @property
    @override
    def hardware(self) -> str:
        return f"{self.device}: {self._rows.parts} devices as one (SPMD)"

    @property
    @override
    def parts(self) -> int:
        return self._rows.parts

    def _mark(self, tensor: torch.Tensor) -> None:
        if tensor.device == self.device and not torch_xla._XLAC._get_xla_sharding_spec(tensor):  # noqa: SLF001
            xs.mark_sharding(tensor, self._mesh, _first(tensor.dim()))

    @override
    def walked(
        self, walk: Callable[[Loop], Iterator[Any]], loop: Loop, *, place: bool, loaded_beside: bool
    ) -> Iterator[Any]:
        if place and not loaded_beside:
            return super().walked(self._sending(walk), loop, place=place, loaded_beside=loaded_beside)
        return super().walked(walk, loop, place=place, loaded_beside=loaded_beside)

    def _sending(self, walk: Callable[[Loop], Iterator[Any]]) -> Callable[[Loop], Iterator[Any]]:
        """A walk whose batches are cut over the devices when they are asked for."""
        return lambda loop: (tree.map_tensors(self._sent, batch) for batch in walk(loop))

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        sent: torch.Tensor = xm.send_cpu_data_to_device(tensor, self.device, self._rows)[0]
        return sent

    @override
    def _belt(self) -> Belt:
        return Belt(lambda batches: self._carrier(batches, input_sharding=self._rows), self.device)

    @override
    def replicate(self, model: nn.Module, options: dict[str, Any]) -> nn.Module:
        learns = any(parameter.requires_grad for parameter in model.parameters())
        if isinstance(model, SpmdFullyShardedDataParallel) or not learns:
            return model
        check_hooks(options)
        prepared = wrapped(self.place(model), self._unit)
        prepared.register_forward_hook(self._rows.passed, with_kwargs=True)
        return prepared

    def _unit(self, model: nn.Module) -> nn.Module:
        # Which outputs have a row for every sample is seen beside the input, where the wrapper does not look.
        return SpmdFullyShardedDataParallel(model, mesh=self._mesh, shard_output=lambda *_: None)  # type: ignore[no-any-return]

    @override
    def original(self, model: nn.Module) -> nn.Module:
        if not isinstance(model, SpmdFullyShardedDataParallel):
            return model
        own: nn.Module = model.module
        return own


class Replicas(_Lazy, ByHosts):
    """Several replicas, threads of a process or processes: as torch_xla has started them.

    Args:
        topology: Where this replica stands.
        device: What it computes on.
        hosts: Its host side.
    """

    def __init__(self, topology: Topology, device: torch.device, hosts: Hosts) -> None:
        super().__init__(topology, device, hosts)
        self.threads = xr.process_count() < topology.world_size
        self._averaging = _HERE.averaging

    @override
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return self._hosts.all_gather(tensor)
        if not tensor.numel():
            return tensor.new_empty((self.topology.world_size, *tensor.shape))
        _settled()
        # Pinned, it would be a sum over zeros in which every replica has its own graph.
        gathered: torch.Tensor = xm.all_gather(tensor.unsqueeze(0), dim=0, pin_layout=False)
        _settled()
        return gathered

    @override
    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return self._hosts.all_reduce(tensor, reduction)
        _settled()
        total = self._reduced(tensor, reduction)
        _settled()
        return total

    def _reduced(self, tensor: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        """As `all_reduce`, as a part of the graph that is being recorded."""
        if tensor.is_complex():
            return torch.view_as_complex(self._reduced(torch.view_as_real(tensor), reduction))
        wide = tensor.float() if tensor.dtype in _NARROW else tensor
        # One dimension: a scalar of 0 or 1 would become a constant of the graph, another one on every replica.
        total: torch.Tensor = xm.all_reduce(_REDUCE[reduction], wide.reshape(-1).clone()).view(tensor.shape)
        # A factor given to all_reduce is cut to a whole number for whole numbers.
        total = total / self.topology.world_size if reduction == "mean" else total
        return total.to(tensor.dtype) if wide is not tensor else total

    @override
    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        total = self._reduced(tensor, "sum")
        return lambda: tensor.copy_(total)

    @override
    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return self._hosts.broadcast(tensor, source)
        _settled()
        with torch.no_grad():
            tensor.copy_(self._first(tensor, source))
        _settled()
        return tensor

    def _first(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """The tensor of one replica: the sum with zeros of the others, whatever they hold."""
        mine = torch.tensor([self.topology.rank == source]).to(self.device)
        whole = (
            tensor.to(torch.int32)
            if tensor.dtype in {torch.bool, torch.uint8, torch.int8, torch.int16}
            else tensor
        )
        own = torch.where(mine, whole.detach().reshape(-1), torch.zeros_like(whole).reshape(-1))
        return self._reduced(own, "sum").view(tensor.shape).to(tensor.dtype)

    @override
    def barrier(self) -> None:
        _settled(wait=True)
        super().barrier()

    @property
    @override
    def name(self) -> str | None:
        return "xla"

    @override
    def replicate(self, model: nn.Module, options: dict[str, Any]) -> nn.Module:
        if model in self._averaging or not any(p.requires_grad for p in model.parameters()):
            return model
        self._begin_alike([*model.parameters(), *model.buffers()])
        averaging = Averaging(model, self._average, self.agreement)
        self._averaging[model] = averaging
        if options.get("broadcast_buffers", True):
            buffers = Buffers(lambda: averaging.averages, self._alike)
            model.register_forward_pre_hook(buffers.before)
            model.register_forward_hook(buffers.after)
        return model

    def _begin_alike(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give every replica the first one's values, in programs of their own."""
        for some in in_parts(tensors):
            self._alike(some)
            _settled()

    @torch.no_grad()
    def _alike(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give every replica the first one's values."""
        for some in in_parts([tensor.detach() for tensor in tensors]):
            flat = self._first(torch.cat([tensor.reshape(-1) for tensor in some]), 0)
            for tensor, part in zip(some, torch.split(flat, [t.numel() for t in some]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def _average(self, gradients: Sequence[torch.Tensor]) -> None:
        # A tensor that was changed in place, as a gradient that accumulates, is made anew from what it was before when
        # it is used next: what torch_xla reduces in place is lost then. So copies are reduced.
        means = [g.float() if g.dtype in _NARROW else g.clone() for g in gradients]
        xm.all_reduce(xm.REDUCE_SUM, means, scale=1 / self.topology.world_size)
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean)

    @override
    def original(self, model: nn.Module) -> nn.Module:
        return model

    @override
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return self._averaging[model].held() if model in self._averaging else nullcontext()

    @override
    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        return self._averaging[model].released() if model in self._averaging else nullcontext()

    @override
    def leave(self) -> None:
        return None


def _first(rank: int) -> tuple[str | None, ...]:
    """Cut along the first of so many dimensions."""
    return ("fsdp", *[None] * (rank - 1))


def _settled(*, wait: bool = False) -> None:
    """Send off what was recorded: a number that differs between replicas is then data of the graph of a collective.

    Recorded, a scalar of 0 or 1 is a constant, and replicas with different constants do not run the same program.

    Random numbers go on where they were: torch_xla would begin others each time, and a run that is resumed, or gathers
    more often, would draw from others.
    """
    seed = xm.get_rng_state()
    torch_xla.sync(wait=wait)
    xm.set_rng_state(seed)
