"""Replicas of torch_xla: TPU cores, or its CPU device; the one file of the runtime that imports it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from typing_extensions import override

from accel_runtime import tree
from accel_runtime.backends.averaging import Averaging
from accel_runtime.backends.base import Backend, Reduction
from accel_runtime.backends.feeding import Belt, fed
from accel_runtime.backends.hosts import Hosts
from accel_runtime.backends.meshing import Meshed, along, devices
from accel_runtime.backends.moving import moved
from accel_runtime.backends.rows import Rows
from accel_runtime.backends.single import Single
from accel_runtime.backends.watching import Counts, Watch
from accel_runtime.data.source import Loop
from accel_runtime.env import Settings
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

__all__ = ["Mesh", "Replicas", "connect"]

_REDUCE = {"sum": xm.REDUCE_SUM, "mean": xm.REDUCE_SUM, "max": xm.REDUCE_MAX, "min": xm.REDUCE_MIN}
_AT_ONCE = 64 * 1024 * 1024
"""Bytes of parameters that travel together when replicas begin."""
_VARIABLES = ("PJRT_", "XLA_", "TPU_", "LIBTPU_", "CPU_NUM_DEVICES")
"""How names of variables begin that torch_xla and its devices read."""
_CHANGE_NUMBERS = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16", "XLA_USE_F16", "XLA_DOWNCAST_FP16")
_LOOPBACK = "127.0.0.1"
# A replica may be a thread of a process that has others, and what it has joined belongs to it.
_HERE = threading.local()


def connect(settings: Settings, topology: Topology) -> Backend:
    """Take up this replica's device and join the others.

    Args:
        settings: What the launcher said.
        topology: What the environment says of this process's place; torch_xla knows better, but both must agree.

    Raises:
        RuntimeError: They do not. Or all devices are to be one (SPMD), and cannot.
        ValueError: A variable asks torch_xla to compute in another number format than the script says.
    """
    for name in _CHANGE_NUMBERS:
        if os.environ.get(name, "0") not in {"", "0"}:
            raise ValueError(
                f"{name}={os.environ[name]} makes every float32 of the run a half, also in the optimizer, and nothing shows "
                "it. Unset it, and use mixed_precision: bf16."
            )
    if settings.spmd:
        return Mesh(devices(topology, xr, torch_xla._XLAC._xla_get_spmd_config_is_locked))  # noqa: SLF001
    if xr.is_spmd():
        raise RuntimeError(
            "torch_xla computes on all devices as on one (XLA_USE_SPMD=1 is set, or the script has called use_spmd()), "
            "but accel was not told: set launcher.spmd: true (ACCEL_SPMD=1), or leave SPMD off."
        )
    device = torch_xla.device()
    if not hasattr(_HERE, "seeded"):
        # `torch.manual_seed` seeds other devices when they are first used, and does not know this one.
        xm.set_rng_state(torch.initial_seed())
        _HERE.seeded = True
    place = Topology(
        xr.global_ordinal(), xr.world_size(), xr.local_ordinal(), xr.local_device_count(), launched=True
    )
    if topology.world_size not in {1, place.world_size}:
        raise RuntimeError(
            f"WORLD_SIZE={topology.world_size} says that there are {topology.world_size} processes, but torch_xla sees "
            f"{place.world_size} replica(s): every process would take itself for rank 0. Leave starting to torch_xla: "
            "accel launch with launcher.kind: xla."
        )
    if place.world_size == 1:
        return Lone(Topology(), device)
    return Replicas(place, device, _hosts(place, timedelta(seconds=settings.process_group_timeout)))


def _hosts(place: Topology, timeout: timedelta) -> Hosts:
    """This replica's host side, made once: what it counts goes on with a second backend."""
    if not hasattr(_HERE, "hosts"):
        address = xr.get_master_ip() if xr.device_type() == "TPU" else _LOOPBACK
        _HERE.hosts = Hosts(place, _share, address, timeout)
    hosts: Hosts = _HERE.hosts
    return hosts


def _share(text: str) -> str:
    first: bytes = xm.rendezvous("accel", text.encode())[0]
    return first.decode()


class _Lazy(Backend):
    """What is the same with one replica and with several: operations are recorded, and run when a step is cut off."""

    static_shapes = True

    @property
    @override
    def random(self) -> Any:
        return _Random

    @override
    def settle(self) -> None:
        _settled(wait=True)

    @override
    def hosted(self, state: Any) -> Any:
        own = [leaf for leaf in tree.leaves(state) if _is_lazy(leaf)]
        known = {torch_xla._XLAC._xla_get_tensor_id(leaf): leaf.detach() for leaf in own}  # noqa: SLF001
        arrived = torch_xla._XLAC._xla_get_cpu_tensors(list(known.values()))  # noqa: SLF001
        here = dict(zip(known, arrived, strict=True))
        return tree.map_leaves(
            lambda leaf: here[torch_xla._XLAC._xla_get_tensor_id(leaf)] if _is_lazy(leaf) else leaf,  # noqa: SLF001
            state,
        )

    @override
    def place(self, model: nn.Module) -> nn.Module:
        return moved(model, self.device)

    @override
    def walked(
        self, walk: Callable[[Loop], Iterator[Any]], loop: Loop, *, place: bool, loaded_beside: bool
    ) -> Iterator[Any]:
        ahead = place and loaded_beside
        return self._watched(_steady(fed(walk, loop, self._belt)) if ahead else self._cut(walk(loop)))

    def _watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches; the first replica looks at what a step costs, and what it says holds for all."""
        if self.topology.rank:
            yield from batches
            return
        self._watch.begin()
        try:
            for batch in batches:
                self._watch.handed(batch)
                yield batch
        finally:
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

    _wrapper = SpmdFullyShardedDataParallel

    def __init__(self, parts: int) -> None:
        super().__init__(Topology(), torch_xla.device())
        self._mesh = xs.Mesh(list(range(parts)), (parts,), ("fsdp",))
        self._rows = Rows(parts, self._sharding, lambda tensor: self._cut_along(tensor, 0))

    def _sharding(self, rank: int) -> Any:
        return xs.ShardingSpec(self._mesh, along(0, rank))

    @override
    def _is_cut(self, tensor: torch.Tensor) -> bool:
        return bool(torch_xla._XLAC._get_xla_sharding_spec(tensor))  # noqa: SLF001

    @override
    def _cut_along(self, tensor: torch.Tensor, dimension: int) -> None:
        if tensor.device == self.device and not self._is_cut(tensor):
            xs.mark_sharding(tensor, self._mesh, along(dimension, tensor.dim()))

    @override
    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        sent: torch.Tensor = xm.send_cpu_data_to_device(tensor, self.device, self._rows)[0]
        return sent

    @override
    def _belt(self) -> Belt:
        return Belt(lambda batches: self._carrier(batches, input_sharding=self._rows), self.device)

    @override
    def _wrap(self, model: nn.Module) -> nn.Module:
        # Which outputs have a row for every sample is seen beside the input, where the wrapper does not look.
        unit: nn.Module = SpmdFullyShardedDataParallel(model, mesh=self._mesh, shard_output=lambda *_: None)
        return unit


class Replicas(_Lazy):
    """Several replicas, threads of a process or processes: as torch_xla has started them.

    Args:
        topology: Where this replica stands.
        device: What it computes on.
        hosts: Its host side.
    """

    def __init__(self, topology: Topology, device: torch.device, hosts: Hosts) -> None:
        super().__init__(topology, device, hosts.wire)
        self.threads = xr.process_count() < topology.world_size
        self._hosts = hosts
        self._averaging: WeakKeyDictionary[nn.Module, Averaging] = _averagings()

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
        wide = tensor.float() if tensor.dtype in {torch.bfloat16, torch.float16} else tensor
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

    @override
    def apart(self) -> Callable[[Any], list[Any]]:
        return self._hosts.apart()

    @property
    @override
    def name(self) -> str | None:
        return "xla"

    @override
    def post(self, key: str, text: str) -> None:
        self._hosts.store.set(key, text)

    @override
    def posted(self, key: str) -> str | None:
        store = self._hosts.store
        return store.get(key).decode() if store.check([key]) else None

    @override
    def turn(self, key: str) -> int:
        return int(self._hosts.store.add(f"{key}/turns/{self.topology.rank}", 1))

    @override
    def replicate(self, model: nn.Module, options: dict[str, Any]) -> nn.Module:
        if model in self._averaging or not any(p.requires_grad for p in model.parameters()):
            return model
        self._begin_alike([*model.parameters(), *model.buffers()])
        self._averaging[model] = Averaging(model, self._average)
        return model

    def _begin_alike(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give every replica the first one's values."""
        for some in _in_parts([tensor.detach() for tensor in tensors]):
            flat = self._first(torch.cat([tensor.reshape(-1) for tensor in some]), 0)
            for tensor, part in zip(some, torch.split(flat, [t.numel() for t in some]), strict=True):
                tensor.copy_(part.view(tensor.shape))
            _settled()

    def _average(self, gradients: Sequence[torch.Tensor]) -> None:
        xm.all_reduce(xm.REDUCE_SUM, list(gradients), scale=1 / self.topology.world_size)

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


class _Random:
    """A device's random numbers, as torch's modules of devices have them: the state is a seed, which draws change."""

    @staticmethod
    def get_rng_state(_device: torch.device) -> torch.Tensor:
        return torch.frombuffer(bytearray(xm.get_rng_state().to_bytes(8, "little")), dtype=torch.uint8)

    @staticmethod
    def set_rng_state(state: torch.Tensor, _device: torch.device) -> None:
        xm.set_rng_state(int.from_bytes(bytes(state.tolist()), "little"))

    @staticmethod
    def manual_seed(seed: int) -> None:
        xm.set_rng_state(seed)


def _is_lazy(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "xla"


def _in_parts(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors of one dtype each, `_AT_ONCE` bytes together at most unless one is larger."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        part: list[torch.Tensor] = []
        for tensor in (some for some in tensors if some.dtype == dtype):
            if part and sum(some.nbytes for some in part) + tensor.nbytes > _AT_ONCE:
                yield part
                part = []
            part.append(tensor)
        yield part


def _averagings() -> WeakKeyDictionary[nn.Module, Averaging]:
    """The models of this replica that average: those of all its backends."""
    if not hasattr(_HERE, "averagings"):
        _HERE.averagings = WeakKeyDictionary()
    found: WeakKeyDictionary[nn.Module, Averaging] = _HERE.averagings
    return found
