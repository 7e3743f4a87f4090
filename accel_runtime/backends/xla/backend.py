"""Backends for XLA devices through torch_xla: one replica, several replicas, and SPMD."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from typing_extensions import override

from accel_runtime.backends.base import Backend, Reduction
from accel_runtime.backends.batch_copies import prefetch_batches
from accel_runtime.backends.distributed import StoreBackend
from accel_runtime.backends.single import Single
from accel_runtime.backends.xla.host import (
    CompileCounts,
    DevicePrefetcher,
    HostGroup,
    RecompilationMonitor,
    build_step_hook,
    check_cpu_world,
    check_ddp_options,
    check_environment,
    check_format,
    check_world,
    read_timeout,
)
from accel_runtime.environment.installation import format_new_environment
from accel_runtime.environment.settings import MixedPrecision, Settings
from accel_runtime.environment.text import decode_text, encode_text
from accel_runtime.environment.topology import Topology
from accel_runtime.foundation import nested
from accel_runtime.foundation.heartbeat import disable_heartbeat
from accel_runtime.foundation.options import DistributedType
from accel_runtime.foundation.steps import EpochIterator
from accel_runtime.parallel.averaging import BufferAveraging, GradientAveraging, operate_flat, split_by_size
from accel_runtime.parallel.xla.spmd import SPMDFunctions, SPMDPreparation, start_spmd

__all__ = [
    "SPMDBackend",
    "XLABackend",
    "connect",
    "move_model",
    "read_topology",
    "seed_device",
]

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Tensor attributes with hooks of the script, which `swap_tensors` moves with the memory."""


@torch.no_grad()
def move_model(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to the device in place.

    `module.to` replaces parameters if a device has its own tensor type: tied weights are separated, and an optimizer made
    before keeps the old ones. A swapped parameter stays the object that the other layer, the optimizer and the script hold.

    Raises:
        RuntimeError: A graph or a weak reference holds the memory of a parameter.
    """
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.device == device:
            continue
        grad, tensor.grad = tensor.grad, None
        hooks = {name: getattr(tensor, name) for name in _HOOKS}
        moved = tensor.detach().to(device)
        if isinstance(tensor, nn.Parameter):
            moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
        try:
            torch.utils.swap_tensors(tensor, moved)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise RuntimeError(
                f"Cannot move {name} to {device}: its memory is referenced elsewhere ({error}). Call prepare() before the first "
                "forward pass."
            ) from error
        tensor.grad = None if grad is None else grad.to(device)
        for kind, values in hooks.items():
            if values:
                setattr(tensor, kind, values)
    return model


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
        f"torch_xla cannot be loaded with torch {torch.__version__}: {error}. The two are released in pairs. Run in a new "
        f"environment: {format_new_environment('xla')}"
    ) from error


_REDUCE = {"sum": xm.REDUCE_SUM, "mean": xm.REDUCE_SUM, "max": xm.REDUCE_MAX, "min": xm.REDUCE_MIN}
_NARROW = {torch.bfloat16, torch.float16}
"""Dtypes that the CPU device cannot sum, and that are summed inaccurately on any."""
_VARIABLE_PREFIXES = ("PJRT_", "XLA_", "TPU_", "LIBTPU_", "CPU_NUM_DEVICES")
"""Prefixes of environment variables that torch_xla and its devices read."""
_LOOPBACK = "127.0.0.1"


class _ReplicaRecord(threading.local):
    """State of a replica between backends; a replica may be one of several threads of a process."""

    def __init__(self) -> None:
        self.host_group: HostGroup | None = None
        """Kept, so that its counters continue."""
        self.averaging: WeakKeyDictionary[nn.Module, GradientAveraging] = WeakKeyDictionary()
        """Models whose gradients are averaged."""
        self.seeded = False
        """True once the device has been seeded."""


_REPLICA = _ReplicaRecord()


def connect(settings: Settings, topology: Topology, options: dict[str, Any]) -> Backend:
    """Select the device of this replica and connect it to the others.

    Args:
        settings: The settings of the launcher.
        topology: Rank and world size in the environment, which must agree with torch_xla.
        options: Fields of `InitProcessGroupKwargs`.

    Raises:
        ValueError: An option is not supported, or a variable requests another precision.
        RuntimeError: Environment and torch_xla disagree, or SPMD is not possible.
    """
    check_environment(os.environ)
    timeout = read_timeout(settings, options)
    num_devices = _start_spmd(settings, topology)
    replica = read_topology(topology)
    if not _REPLICA.seeded:
        # `torch.manual_seed` does not seed this device.
        _seed(torch.initial_seed())
    if num_devices:
        return SPMDBackend(num_devices)
    if replica.world_size == 1:
        return SingleXLABackend(replica, torch_xla.device())
    check_cpu_world(xr.device_type(), replica.world_size, torch_xla._XLAC._xla_step_marker)  # noqa: SLF001
    if xr.local_ordinal() % xr.addressable_device_count():
        disable_heartbeat()  # one heartbeat per process: use the first replica's
    return XLABackend(replica, torch_xla.device(), _host_group(replica, timeout))


def read_topology(topology: Topology) -> Topology:
    """Return rank and world size of this replica; raise RuntimeError if the environment and torch_xla disagree."""
    torch_xla.device()
    world = xr.world_size()
    check_world(topology, world)
    if world == 1:
        return Topology()
    return Topology(xr.global_ordinal(), world, xr.local_ordinal(), xr.local_device_count(), launched=True)


def seed_device(settings: Settings, seed: int) -> None:
    """Seed the generator of this replica's device, which is initialized for it."""
    _start_spmd(settings, Topology())
    _seed(seed)


def _seed(seed: int) -> None:
    xm.set_rng_state(seed)
    _REPLICA.seeded = True


def _start_spmd(settings: Settings, topology: Topology) -> int:
    return start_spmd(settings, topology, xr, torch_xla._XLAC._xla_get_spmd_config_is_locked)  # noqa: SLF001


def _host_group(topology: Topology, timeout: timedelta) -> HostGroup:
    """Return the host group of this replica, shared by all backends so that its counters continue."""
    if _REPLICA.host_group is None:
        address = xr.get_master_ip() if xr.device_type() == "TPU" else _LOOPBACK
        _REPLICA.host_group = HostGroup(topology, _broadcast_text, address, timeout)
    return _REPLICA.host_group


def _broadcast_text(text: str) -> str:
    with torch.device(
        "cpu"
    ):  # with another default device of the script, replicas would record different graphs
        first: bytes = xm.rendezvous("accel", encode_text(text))[0]
    return decode_text(first)


class _DeviceRandom:
    """The random state of a device with the functions of torch's device modules; the state is a seed."""

    manual_seed = staticmethod(_seed)

    @staticmethod
    def get_rng_state(_device: torch.device) -> torch.Tensor:
        """Return the seed as eight bytes."""
        return torch.frombuffer(bytearray(xm.get_rng_state().to_bytes(8, "little")), dtype=torch.uint8)

    @staticmethod
    def set_rng_state(state: torch.Tensor, _device: torch.device) -> None:
        """Set the seed from eight bytes."""
        _seed(int.from_bytes(bytes(state.tolist()), "little"))


class _LazyBackend(Backend):
    """Common parts of the XLA backends: operations are recorded, and executed when the graph is cut."""

    static_shapes = True
    _num_batches = 0
    _loader_options: Mapping[str, Any] = MappingProxyType({})
    """Arguments for torch_xla's parallel loader."""

    @override
    def check_options(self, ddp_options: dict[str, Any], mixed_precision: MixedPrecision) -> None:
        check_format(mixed_precision)
        check_ddp_options(ddp_options)

    @override
    def build_step_hook(self) -> Callable[[], None]:
        return build_step_hook(lambda: self._num_batches, _execute_graph)

    @property
    @override
    def copy_stream(self) -> None:
        return None  # torch_xla's loader copies

    @property
    @override
    def device_rng(self) -> Any:
        return _DeviceRandom

    @override
    def synchronize(self) -> None:
        _execute_graph(wait=True)

    @override
    def state_to_host(self, state: Any) -> Any:
        identity = torch_xla._XLAC._xla_get_tensor_id  # noqa: SLF001 - equal for tensors that share an XLA tensor
        fetch = torch_xla._XLAC._xla_get_cpu_tensors  # noqa: SLF001

        def is_lazy(leaf: Any) -> bool:
            return isinstance(leaf, torch.Tensor) and leaf.device.type == "xla"

        by_identity = {identity(leaf): leaf.detach() for leaf in nested.leaves(state) if is_lazy(leaf)}
        on_host = dict(zip(by_identity, fetch(list(by_identity.values())), strict=True))
        return nested.map_leaves(lambda leaf: on_host[identity(leaf)] if is_lazy(leaf) else leaf, state)

    @override
    def move_model(self, model: nn.Module) -> nn.Module:
        return move_model(model, self.device)

    @override
    def iterate_batches(
        self,
        batches_of: Callable[[EpochIterator], Iterator[Any]],
        epoch: EpochIterator,
        *,
        to_device: bool,
        loaded_by_workers: bool,
    ) -> Iterator[Any]:
        if to_device and loaded_by_workers:
            return self._monitor_batches(
                _with_seed_kept(prefetch_batches(batches_of, epoch, self._build_prefetcher))
            )
        return self._monitor_batches(_execute_each(batches_of(epoch)))

    def _monitor_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Count the batches; the first replica monitors recompilation for all."""
        first = not self.topology.rank
        if first:
            self._recompilation.begin()
        try:
            for batch in batches:
                self._num_batches += 1
                if first:
                    self._recompilation.start_step(batch)
                yield batch
        finally:
            if first:
                self._recompilation.end()

    @cached_property
    def _recompilation(self) -> RecompilationMonitor:
        return RecompilationMonitor(_read_counters, self.device)

    @override
    def describe_wrapper(self, model: nn.Module) -> str:
        return "none"

    @override
    def describe_device(self) -> dict[str, str]:
        counts = _read_counters()
        variables = {
            name: os.environ[name] for name in sorted(os.environ) if name.startswith(_VARIABLE_PREFIXES)
        }
        return {
            "torch_xla": f"{torch_xla.__version__} with torch {torch.__version__}, {xr.device_type()} device",
            "variables": " ".join(f"{name}={value}" for name, value in variables.items()),
            "graphs": f"{counts.compiled} compiled, {counts.fetched} values fetched by this process so far",
        }

    def _build_prefetcher(self) -> DevicePrefetcher:
        """Return the prefetcher of batches through torch_xla's parallel loader, one batch ahead."""
        options = {"loader_prefetch_size": 1, "device_prefetch_size": 1, **self._loader_options}
        return DevicePrefetcher(
            lambda batches: ParallelLoader(batches, [self.device], **options), self.device
        )

    @property
    @override
    def distributed_type(self) -> DistributedType:
        return DistributedType.XLA


class SingleXLABackend(_LazyBackend, Single):
    """The backend of a single replica."""


class SPMDBackend(SPMDPreparation, _LazyBackend, Single):
    """The backend of one process on all devices of a machine (SPMD); XLA inserts the collectives."""

    def __init__(self, num_devices: int) -> None:
        super().__init__(Topology(), torch_xla.device())
        self._init_spmd(SPMDFunctions(xs, xm, torch_xla._XLAC, SpmdFullyShardedDataParallel), num_devices)  # noqa: SLF001
        self._loader_options = {"input_sharding": self._row_sharding}


class XLABackend(_LazyBackend, StoreBackend):
    """The backend of several replicas, which torch_xla started as threads or processes."""

    def __init__(self, topology: Topology, device: torch.device, host_group: HostGroup) -> None:
        super().__init__(topology, device, host_group.transport)
        self._host_group = host_group
        # Replicas of one process are its threads.
        self.ranks_share_generators = xr.process_count() < topology.world_size
        self._averaging = _REPLICA.averaging

    @override
    def open_object_channel(self) -> Callable[[Any], list[Any]]:
        return self._host_group.open_object_channel()

    @property
    @override
    def _store(self) -> Any:
        return self._host_group.store

    @override
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return self._host_group.all_gather(tensor)
        if not tensor.numel():
            return tensor.new_empty((self.topology.world_size, *tensor.shape))
        _execute_graph()
        # With pin_layout it is a sum over zeros, in which every replica has its own graph.
        gathered: torch.Tensor = xm.all_gather(tensor.unsqueeze(0), dim=0, pin_layout=False)
        _execute_graph()
        return gathered

    @override
    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return self._host_group.all_reduce(tensor, reduction)
        _execute_graph()
        total = self._record_all_reduce(tensor, reduction)
        _execute_graph()
        return total

    def _record_all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        """Record an all-reduce as a part of the current graph."""
        if tensor.is_complex():
            return torch.view_as_complex(self._record_all_reduce(torch.view_as_real(tensor), reduction))
        wide = tensor.float() if tensor.dtype in _NARROW else tensor
        # One dimension, since a scalar of 0 or 1 becomes a constant of the graph, which may differ between replicas.
        total: torch.Tensor = xm.all_reduce(_REDUCE[reduction], wide.reshape(-1).clone()).view(tensor.shape)
        # all_reduce truncates its scale for integers.
        total = total / self.topology.world_size if reduction == "mean" else total
        return total.to(tensor.dtype) if wide is not tensor else total

    @override
    def all_reduce_async(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        total = self._record_all_reduce(tensor, "sum")
        return lambda: tensor.copy_(total)

    @override
    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return self._host_group.broadcast(tensor, source)
        _execute_graph()
        with torch.no_grad():
            tensor.copy_(self._broadcast_values(tensor, source))
        _execute_graph()
        return tensor

    def _broadcast_values(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Return the tensor of one replica, as the sum with zeros of the others."""
        is_source = torch.tensor([self.topology.rank == source], device="cpu").to(self.device)
        widened = (
            tensor.to(torch.int32)
            if tensor.dtype in {torch.bool, torch.uint8, torch.int8, torch.int16}
            else tensor
        )
        masked = torch.where(is_source, widened.detach().reshape(-1), torch.zeros_like(widened).reshape(-1))
        return self._record_all_reduce(masked, "sum").view(tensor.shape).to(tensor.dtype)

    @override
    def barrier(self) -> None:
        _execute_graph(wait=True)
        super().barrier()

    @property
    @override
    def collective_backend(self) -> str | None:
        return "xla"

    @override
    def wrap_model(self, model: nn.Module, ddp_options: dict[str, Any]) -> nn.Module:
        if model in self._averaging or not any(p.requires_grad for p in model.parameters()):
            return model
        for group in split_by_size([*model.parameters(), *model.buffers()]):
            self._broadcast_tensors(group)
            _execute_graph()
        averaging = GradientAveraging(model.named_parameters(), self._average, self.handshake)
        self._averaging[model] = averaging
        if ddp_options.get("broadcast_buffers", True):
            buffers = BufferAveraging(lambda: averaging.is_active, self._broadcast_tensors)
            model.register_forward_pre_hook(buffers.before)
            model.register_forward_hook(buffers.after)
        return model

    def _broadcast_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcast tensors from the first replica."""
        operate_flat([tensor.detach() for tensor in tensors], lambda flat: self._broadcast_values(flat, 0))

    def _average(self, gradients: Sequence[torch.Tensor]) -> None:
        # Copies, since torch_xla loses the result of a reduction in place of a tensor that was itself changed in place,
        # such as an accumulated gradient: its next use is computed from the values before.
        means = [g.float() if g.dtype in _NARROW else g.clone() for g in gradients]
        xm.all_reduce(xm.REDUCE_SUM, means, scale=1 / self.topology.world_size)
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean)

    @override
    def describe_wrapper(self, model: nn.Module) -> str:
        return "none (gradients are averaged in the graph)" if model in self._averaging else "none"

    @override
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return self._set_sync(model, wanted=False)

    @override
    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        return self._set_sync(model, wanted=True)

    def _set_sync(self, model: nn.Module, *, wanted: bool) -> AbstractContextManager[None]:
        averaging = self._averaging.get(model)
        return nullcontext() if averaging is None else averaging.set_sync(wanted=wanted)


def _read_counters() -> CompileCounts:
    """Return the counters of torch_xla in this process."""
    fetches = met.metric_data("TransferFromDeviceTime")
    return CompileCounts(met.counter_value("UncachedCompile") or 0, fetches[0] if fetches else 0)


def _execute_each(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches, and execute the graph of each before the next is loaded."""
    for batch in batches:
        yield batch
        _execute_graph()


def _execute_graph(*, wait: bool = False) -> None:
    """Execute the recorded graph, so that numbers that differ between replicas are inputs of the next graph.

    A recorded scalar of 0 or 1 is a constant, and replicas with different constants do not run the same program. The seed is
    restored, since torch_xla would change it, and a run that resumes or gathers more often would draw other numbers.
    """
    with _keep_seed():
        torch_xla.sync(wait=wait)


@contextmanager
def _keep_seed() -> Iterator[None]:
    seed = xm.get_rng_state()
    yield
    xm.set_rng_state(seed)


def _with_seed_kept(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches of torch_xla's loader without its changes of the seed."""
    end = object()
    while True:
        with _keep_seed():
            batch = next(batches, end)
        if batch is end:
            return
        yield batch
