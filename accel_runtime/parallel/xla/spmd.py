"""SPMD: shard batches by rows and models by parameters over the devices of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.backends.xla.host import check_spmd
from accel_runtime.environment.settings import Settings
from accel_runtime.environment.topology import Topology
from accel_runtime.foundation import nested
from accel_runtime.foundation.steps import EpochIterator

__all__ = ["RowSharding", "SPMDFunctions", "SPMDPreparation", "partition_spec", "start_spmd"]


class RowSharding:
    """Shard tensors along their first dimension if it is divisible; replicate others.

    Used as an `input_sharding` of torch_xla, which supports tensors of one rank only.

    Args:
        num_devices: The number of devices.
        sharding: Returns torch_xla's sharding along the first of so many dimensions.
        mark: Shards a tensor on the devices, unless it is sharded.
    """

    minibatch = False
    """False for torch_xla, since a single host has all rows."""

    def __init__(
        self, num_devices: int, sharding: Callable[[int], Any], mark: Callable[[torch.Tensor], None]
    ) -> None:
        self.num_devices = num_devices
        self._sharding, self._mark = sharding, mark

    def __deepcopy__(self, memo: dict[int, Any]) -> RowSharding:
        """Return itself: a copy of a model that has it as a hook uses the same devices."""
        return self

    def is_divisible(self, tensor: torch.Tensor) -> bool:
        """Return whether the first dimension is divisible by the number of devices."""
        return tensor.dim() > 0 and len(tensor) > 0 and len(tensor) % self.num_devices == 0

    def xla_spec(self, tensor: torch.Tensor) -> Any:
        """Return how torch_xla sends the tensor; None replicates it."""
        return self._sharding(tensor.dim()).xla_spec(tensor) if self.is_divisible(tensor) else None

    def shard_outputs(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Shard outputs that have the rows of the input; a forward hook."""
        rows = {len(tensor) for tensor in _tensors((args, kwargs)) if self.is_divisible(tensor)}
        for tensor in _tensors(output):
            if tensor.dim() > 0 and len(tensor) in rows:
                self._mark(tensor)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in inputs or outputs of a model, also in dataclasses."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for field in fields(tree):
            yield from _tensors(getattr(tree, field.name, None))


_AXIS = "fsdp"
"""The dimension of the mesh; FSDPv2 requires this name."""
_SHARDED = "{devices="
"""The beginning of the sharding spec of a sharded tensor."""


@dataclass(frozen=True)
class SPMDFunctions:
    """The parts of torch_xla for SPMD."""

    spmd: Any
    """`torch_xla.distributed.spmd`."""
    model: Any
    """`torch_xla.core.xla_model`."""
    core: Any
    """`torch_xla._XLAC`, which has the functions for sharding specs (torch_xla 2.9)."""
    wrapper: type[nn.Module]
    """The FSDPv2 wrapper."""


class SPMDPreparation(Backend):
    """Prepare loaders, models and optimizers for a mesh of devices.

    Batches are sharded by rows, models are wrapped in torch_xla's FSDPv2 as one unit, and optimizer states are sharded like
    their parameters. Tensors have their global shape.
    """

    def _init_spmd(self, functions: SPMDFunctions, num_devices: int) -> None:
        """Initialize the mesh."""
        self._functions = functions
        self.num_batch_shards = num_devices
        self._mesh = functions.spmd.Mesh(list(range(num_devices)), (num_devices,), (_AXIS,))
        self._row_sharding = RowSharding(
            num_devices, self._sharding, lambda tensor: self._shard_along(tensor, 0)
        )

    @override
    def describe_device(self) -> dict[str, str]:
        return {"mesh": f"{self.num_batch_shards} devices compute as one (SPMD)"} | super().describe_device()

    @override
    def iterate_batches(
        self,
        batches_of: Callable[[EpochIterator], Iterator[Any]],
        epoch: EpochIterator,
        *,
        to_device: bool,
        loaded_by_workers: bool,
    ) -> Iterator[Any]:
        send = self._functions.model.send_cpu_data_to_device

        def send_tensor(tensor: torch.Tensor) -> torch.Tensor:
            on_device: torch.Tensor = send(tensor, self.device, self._row_sharding)[0]
            return on_device

        def send_batches(epoch: EpochIterator) -> Iterator[Any]:
            return (nested.map_tensors(send_tensor, batch) for batch in batches_of(epoch))

        sends = to_device and not loaded_by_workers
        return super().iterate_batches(
            send_batches if sends else batches_of,
            epoch,
            to_device=to_device,
            loaded_by_workers=loaded_by_workers,
        )

    @override
    def wrap_model(self, model: nn.Module, ddp_options: dict[str, Any]) -> nn.Module:
        learns = any(parameter.requires_grad for parameter in model.parameters())
        if isinstance(model, self._functions.wrapper) or not learns:
            return model
        prepared = _wrap_in_fsdp(self.move_model(model), self._wrap)
        prepared.register_forward_hook(self._row_sharding.shard_outputs, with_kwargs=True)
        return prepared

    def _wrap(self, model: nn.Module) -> nn.Module:
        # A forward hook shards outputs, since the wrapper does not see the rows of the input.
        return self._functions.wrapper(model, mesh=self._mesh, shard_output=lambda *_: None)

    @override
    def unwrap_model(self, model: nn.Module) -> nn.Module:
        return model.get_submodule("_orig_module") if isinstance(model, self._functions.wrapper) else model

    @override
    def describe_wrapper(self, model: nn.Module) -> str:
        return type(model).__name__ if isinstance(model, self._functions.wrapper) else "none"

    @override
    def state_to_host(self, state: Any) -> Any:
        # torch_xla would first gather every tensor on every device, where it may not fit.
        self.synchronize()
        assembled: dict[int, torch.Tensor] = {}

        def to_host(leaf: Any) -> Any:
            if not self._is_sharded(leaf):
                return leaf
            key = self._functions.core._xla_get_tensor_id(leaf)  # noqa: SLF001 - equal for tied tensors
            if key not in assembled:
                assembled[key] = self._assemble(leaf.detach())
            return assembled[key]

        return super().state_to_host(nested.map_leaves(to_host, state))

    def _assemble(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a sharded tensor on the CPU."""
        assembled = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        for shard in self._functions.spmd.XLAShardedTensor(tensor).local_shards:
            # Not `unpadded_data`, which indexes with a list, and torch warns about that.
            unpadded = tuple(slice(0, indices.stop - indices.start) for indices in shard.indices)
            assembled[tuple(shard.indices)] = shard.data[unpadded]
        return assembled

    def _is_sharded(self, leaf: Any) -> bool:
        on_device = isinstance(leaf, torch.Tensor) and leaf.device == self.device
        return on_device and self._sharding_spec(leaf).startswith(_SHARDED)

    def _sharding_spec(self, tensor: torch.Tensor) -> str:
        """Return the sharding spec of a tensor; empty if it has none."""
        return str(self._functions.core._get_xla_sharding_spec(tensor))  # noqa: SLF001

    def _shard_along(self, tensor: torch.Tensor, dimension: int) -> None:
        """Shard a tensor on the devices, unless it has a sharding spec."""
        if tensor.device == self.device and not self._sharding_spec(tensor):
            self._functions.spmd.mark_sharding(tensor, self._mesh, partition_spec(dimension, tensor.dim()))

    def _sharding(self, rank: int) -> Any:
        return self._functions.spmd.ShardingSpec(self._mesh, partition_spec(0, rank))

    @override
    def register_load_state_hook(self, optimizer: torch.optim.Optimizer) -> None:
        # Replicated until the next step, a state would need the memory that sharding saves.
        optimizer.register_load_state_dict_post_hook(self._shard_loaded_state)

    def _shard_loaded_state(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            if self._is_sharded(parameter):
                for value in state.values():
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                        # FSDPv2 shards a parameter along its largest dimension.
                        self._shard_along(value, parameter.shape.index(max(parameter.shape)))


def partition_spec(dimension: int, rank: int) -> tuple[str | None, ...]:
    """Return torch_xla's spec for `rank` dimensions that are sharded along one."""
    return tuple(_AXIS if index == dimension else None for index in range(rank))


def start_spmd(
    settings: Settings, topology: Topology, runtime: Any, is_initialized: Callable[[], bool]
) -> int:
    """Enable SPMD if the settings request it, and return the number of devices, else 0."""
    if not settings.spmd:
        check_spmd(runtime.is_spmd())
        return 0
    if topology.world_size != 1:
        raise RuntimeError(
            f"WORLD_SIZE={topology.world_size}, but SPMD (launcher.spmd: true, ACCEL_SPMD=1) is one process on all devices. Start "
            "the script once."
        )
    if not runtime.is_spmd():
        if is_initialized():  # use_spmd() would warn, and replicate all tensors
            raise RuntimeError(
                "SPMD (launcher.spmd: true, ACCEL_SPMD=1) cannot be enabled: torch_xla has already initialized its devices. Create "
                "the Accelerator before using an XLA device, and start the script as one process, not with "
                "torch_xla.launch."
            )
        runtime.use_spmd()
    try:
        num_hosts, num_devices = runtime.process_count(), runtime.global_runtime_device_count()
    except (RuntimeError, OSError) as error:
        raise RuntimeError(
            f"SPMD found no {runtime.device_type()} device: {error}. Set PJRT_DEVICE to a device of this machine."
        ) from error
    if num_hosts > 1:
        raise RuntimeError(
            f"SPMD supports one machine, but torch_xla finds {num_hosts}. Remove launcher.spmd, so that every device is a "
            "replica."
        )
    return int(num_devices)


def _wrap_in_fsdp(model: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Wrap a model on the device in FSDPv2 without changing the model."""
    forward = vars(model).get("forward")
    # The wrapper expects a method, and ignores a forward pass that is another callable, such as autocast's.
    model.forward = MethodType(_unused_forward, model)
    try:
        prepared = wrap(model)
    finally:
        del model.forward
        if forward is not None:
            model.forward = forward
    # Its backward hook separates the gradients of nested units. On a full model it runs before there are any, and
    # makes outputs views, which scripts cannot change in place.
    model._backward_hooks.popitem()  # noqa: SLF001
    model._is_full_backward_hook = True if model._backward_hooks else None  # noqa: SLF001
    return prepared


def _unused_forward(*_: Any) -> None:
    raise AssertionError("The model ran a forward pass while it was wrapped.")
