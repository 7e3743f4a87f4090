"""SPMD: one process on all devices of a machine, over which batches are sharded by rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn

from accel_runtime.environment.settings import Settings
from accel_runtime.environment.topology import Topology
from accel_runtime.extensions.xla.host import check_spmd

__all__ = ["DeviceSharding", "RowSharding", "SPMDFunctions", "partition_spec", "start_spmd"]


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


class DeviceSharding:
    """Shard tensors over the devices of a mesh; a sharded tensor has its global shape.

    Args:
        functions: The parts of torch_xla.
        device: The device that represents all of them.
        num_devices: The number of devices.
    """

    def __init__(self, functions: SPMDFunctions, device: torch.device, num_devices: int) -> None:
        self._functions = functions
        self.device = device
        """The device that represents all of them."""
        self.num_devices = num_devices
        """The number of devices."""
        self.mesh = functions.spmd.Mesh(list(range(num_devices)), (num_devices,), (_AXIS,))
        """torch_xla's mesh."""
        self.rows = RowSharding(num_devices, self._sharding, lambda tensor: self.shard_along(tensor, 0))
        """Shards tensors by rows."""

    def send_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor of the host to the devices, sharded by rows."""
        on_device: torch.Tensor = self._functions.model.send_cpu_data_to_device(
            tensor, self.device, self.rows
        )[0]
        return on_device

    def identify(self, tensor: torch.Tensor) -> int:
        """Return a number that is equal for tensors that share an XLA tensor, such as tied ones."""
        return int(self._functions.core._xla_get_tensor_id(tensor))  # noqa: SLF001

    def assemble(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a sharded tensor on the CPU."""
        assembled = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        for shard in self._functions.spmd.XLAShardedTensor(tensor).local_shards:
            # Not `unpadded_data`, which indexes with a list, and torch warns about that.
            unpadded = tuple(slice(0, indices.stop - indices.start) for indices in shard.indices)
            assembled[tuple(shard.indices)] = shard.data[unpadded]
        return assembled

    def is_sharded(self, leaf: Any) -> bool:
        """Return whether an object is a sharded tensor on the devices."""
        on_device = isinstance(leaf, torch.Tensor) and leaf.device == self.device
        return on_device and self._sharding_spec(leaf).startswith(_SHARDED)

    def _sharding_spec(self, tensor: torch.Tensor) -> str:
        """Return the sharding spec of a tensor; empty if it has none."""
        return str(self._functions.core._get_xla_sharding_spec(tensor))  # noqa: SLF001

    def shard_along(self, tensor: torch.Tensor, dimension: int) -> None:
        """Shard a tensor on the devices, unless it has a sharding spec."""
        if tensor.device == self.device and not self._sharding_spec(tensor):
            self._functions.spmd.mark_sharding(tensor, self.mesh, partition_spec(dimension, tensor.dim()))

    def _sharding(self, rank: int) -> Any:
        return self._functions.spmd.ShardingSpec(self.mesh, partition_spec(0, rank))


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
