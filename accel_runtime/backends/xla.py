"""Replicas of torch_xla: TPU cores, or its CPU device; the one file of the runtime that imports it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from accel_runtime.backends import refusing
from accel_runtime.backends.averaging import Averaging, Buffers, in_parts
from accel_runtime.backends.base import Backend, Reduction
from accel_runtime.backends.feeding import Belt, fed, stepper
from accel_runtime.backends.hosts import ByHosts, Hosts, Kept
from accel_runtime.backends.meshing import Machinery, Meshed, devices
from accel_runtime.backends.moving import hosted, moved
from accel_runtime.backends.seed import Seed
from accel_runtime.backends.single import Single
from accel_runtime.backends.watching import Counts, Watch
from accel_runtime.data.source import Loop
from accel_runtime.env import MixedPrecision, Settings
from accel_runtime.heartbeat import keep_still
from accel_runtime.kinds import DistributedType
from accel_runtime.topology import Topology

try:
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as met
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
_VARIABLES = ("PJRT_", "XLA_", "TPU_", "LIBTPU_", "CPU_NUM_DEVICES")
"""How names of variables begin that torch_xla and its devices read."""
_LOOPBACK = "127.0.0.1"
_HERE = Kept()


def connect(settings: Settings, topology: Topology, options: dict[str, Any]) -> Backend:
    """Take up this replica's device and join the others.

    Args:
        settings: What the launcher said.
        topology: What the environment says of this process's place; torch_xla knows better, but both must agree.
        options: Fields of `InitProcessGroupKwargs`.

    Raises:
        ValueError: An option that cannot be honoured, or a variable that asks for another number format.
        RuntimeError: They do not. Or all devices are to be one (SPMD), and cannot.
    """
    refusing.check_numbers(os.environ)
    timeout = refusing.patience(settings, options)
    parts = _parts(settings, topology)
    place = standing(topology)
    if not _HERE.seeded:
        # `torch.manual_seed` seeds other devices when they are first used, and does not know this one.
        _seeded(torch.initial_seed())
    if parts:
        return Mesh(parts)
    if place.world_size == 1:
        return Lone(place, torch_xla.device())
    refusing.check_meeting(xr.device_type(), place.world_size, torch_xla._XLAC._xla_step_marker)  # noqa: SLF001
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
    refusing.check_world(topology, world)
    if world == 1:
        return Topology()
    return Topology(xr.global_ordinal(), world, xr.local_ordinal(), xr.local_device_count(), launched=True)


def seed_device(settings: Settings, seed: int) -> None:
    """Seed the generator of this replica's device, which is taken up for it."""
    _parts(settings, Topology())
    _seeded(seed)


def _seeded(seed: int) -> None:
    xm.set_rng_state(seed)
    _HERE.seeded = True


def _parts(settings: Settings, topology: Topology) -> int:
    return devices(settings, topology, xr, torch_xla._XLAC._xla_get_spmd_config_is_locked)  # noqa: SLF001


def _hosts(place: Topology, timeout: timedelta) -> Hosts:
    """This replica's host side, made once: what it counts goes on with a second backend."""
    if _HERE.hosts is None:
        address = xr.get_master_ip() if xr.device_type() == "TPU" else _LOOPBACK
        _HERE.hosts = Hosts(place, _share, address, timeout)
    return _HERE.hosts


def _share(text: str) -> str:
    with torch.device("cpu"):  # a script may have set another default, and replicas would not record the same
        first: bytes = xm.rendezvous("accel", text.encode())[0]
    return first.decode()


class _Lazy(Backend):
    """What is the same with one replica and with several: operations are recorded, and run when a step is cut off."""

    static_shapes = one_program = True
    _handed = 0

    @override
    def check(self, replication: dict[str, Any], mixed_precision: MixedPrecision) -> None:
        refusing.check_format(mixed_precision)
        refusing.check_hooks(replication)

    @override
    def after_step(self) -> Callable[[], None]:
        return stepper(lambda: self._handed, _settled)

    @property
    @override
    def random(self) -> Any:
        return Seed(xm.get_rng_state, _seeded)

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
            return self._watched(_steady(fed(walk, loop, self._belt)))
        return self._watched(self._cut(walk(loop)))

    def _watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches, counted; the first replica looks at what a step costs, and what it says holds for all."""
        first = not self.topology.rank
        if first:
            self._watch.begin()
        try:
            for batch in batches:
                self._handed += 1
                if first:
                    self._watch.handed(batch)
                yield batch
        finally:
            if first:
                self._watch.end()

    @cached_property
    def _watch(self) -> Watch:
        return Watch(_counts, self.device)

    @override
    def wrapping(self, model: nn.Module) -> str:
        return "none"

    @property
    @override
    def facts(self) -> dict[str, str]:
        counts = _counts()
        variables = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_VARIABLES)}
        return {
            "torch_xla": f"{torch_xla.__version__} with torch {torch.__version__}, {xr.device_type()} device",
            "variables": " ".join(f"{name}={value}" for name, value in variables.items()),
            "graphs": f"{counts.compiled} compiled, {counts.fetched} values fetched by this process so far",
        }

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


class Mesh(Meshed, _Lazy, Single):
    """All devices of a machine as one (SPMD): collectives are identities, and XLA's own connect the devices.

    Args:
        parts: How many devices there are.
    """

    def __init__(self, parts: int) -> None:
        super().__init__(Topology(), torch_xla.device())
        self._spread(Machinery(xs, xm, torch_xla._XLAC, SpmdFullyShardedDataParallel), parts)  # noqa: SLF001

    @override
    def _belt(self) -> Belt:
        return Belt(lambda batches: self._carrier(batches, input_sharding=self._rows), self.device)


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
        mine = torch.tensor([self.topology.rank == source], device="cpu").to(self.device)
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
        averaging = Averaging(model.named_parameters(), self._average, self.agreement)
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
    def wrapping(self, model: nn.Module) -> str:
        return "none (gradients are averaged in the graph)" if model in self._averaging else "none"

    @override
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return self._averaging[model].held() if model in self._averaging else nullcontext()

    @override
    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        return self._averaging[model].released() if model in self._averaging else nullcontext()

    @override
    def leave(self) -> None:
        return None


def _counts() -> Counts:
    """What torch_xla has done in this process so far."""
    fetches = met.metric_data("TransferFromDeviceTime")
    return Counts(met.counter_value("UncachedCompile") or 0, fetches[0] if fetches else 0)


def _settled(*, wait: bool = False) -> None:
    """Send off what was recorded: a number that differs between replicas is then data of the graph of a collective.

    Recorded, a scalar of 0 or 1 is a constant, and replicas with different constants do not run the same program.

    Random numbers go on where they were: torch_xla would begin others each time, and a run that is resumed, or gathers
    more often, would draw from others.
    """
    with _numbers_kept():
        torch_xla.sync(wait=wait)


@contextmanager
def _numbers_kept() -> Iterator[None]:
    seed = xm.get_rng_state()
    yield
    xm.set_rng_state(seed)


def _steady(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches of torch_xla's loader, which sends off what was recorded whenever it is asked for one."""
    nothing = object()
    while True:
        with _numbers_kept():
            batch = next(batches, nothing)
        if batch is nothing:
            return
        yield batch
