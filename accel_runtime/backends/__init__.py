"""Choose the backend: the device, and how this process connects to the others."""

from __future__ import annotations

from typing import Any

import torch

from accel_runtime.backends.base import Backend
from accel_runtime.backends.distributed import DistributedBackend
from accel_runtime.backends.single import Single
from accel_runtime.env import Settings, check_layout
from accel_runtime.topology import Topology

__all__ = ["Backend", "connect", "read_topology", "seed_device"]


def connect(settings: Settings, topology: Topology, options: dict[str, Any] | None = None) -> Backend:
    """Select the device of this process and connect it to the other ranks.

    Args:
        settings: The settings of the launcher.
        topology: Rank and world size of this process.
        options: Arguments for `init_process_group`, which override `settings`.

    Raises:
        RuntimeError: The device is not available, or ranks share it over a backend that cannot.
        ValueError: The sharding does not fit the processes or the device.
    """
    check_layout(settings.parallel, settings.fully_shard, topology.world_size)
    if settings.spmd and settings.device != "xla":
        raise RuntimeError(
            f"SPMD (ACCEL_SPMD=1) needs XLA devices, but the device is {settings.device}. Set ACCEL_DEVICE=xla, as "
            "launcher.kind: xla with spmd: true does, or unset ACCEL_SPMD."
        )
    if settings.device == "xla":
        if not settings.parallel.plain:
            raise ValueError(
                "parallel: and fully_shard: are not supported on XLA devices: they shard models over torch.distributed. Remove them, "
                "or set launcher.spmd: true to shard a model over the XLA devices of a machine."
            )
        from accel_runtime.backends.xla import backend as xla  # noqa: PLC0415 - loading it costs seconds, and needs torch_xla

        return xla.connect(settings, topology, options or {})
    backend = (options or {}).get("backend") or settings.process_group_backend
    device = _select_device(settings.device, topology, backend)
    if not settings.parallel.plain:
        from accel_runtime.backends.fsdp import FSDPBackend  # noqa: PLC0415 - most runs go without it, and it loads slowly

        return FSDPBackend(topology, device, settings, options or {})
    if topology.launched:
        return DistributedBackend(topology, device, settings, options or {})
    return Single(topology, device)


def read_topology(settings: Settings, topology: Topology) -> Topology:
    """Return rank and world size of this process; torch_xla replicas read them from their device."""
    if settings.device != "xla" or settings.spmd:
        return topology
    from accel_runtime.backends.xla import backend as xla  # noqa: PLC0415

    return xla.read_topology(topology)


def seed_device(settings: Settings, seed: int) -> None:
    """Seed the generator of a device that `torch.manual_seed` does not seed."""
    if settings.device == "xla":
        from accel_runtime.backends.xla import backend as xla  # noqa: PLC0415

        xla.seed_device(settings, seed)


def _select_device(requested: str, topology: Topology, backend: str) -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = (accelerator.type if accelerator else "cpu") if requested == "auto" else requested
    if kind == "cpu":
        return torch.device("cpu")
    if accelerator is None or accelerator.type != kind:
        raise RuntimeError(
            f"Device {kind!r} is not available: torch {torch.__version__} finds "
            f"{accelerator.type if accelerator else 'no accelerator'}. Set device: auto or cpu, or install a torch build for it."
        )
    if not topology.launched:
        # A script without a launcher may have chosen its device by torch.cuda.set_device().
        return torch.device(kind, torch.accelerator.current_device_index())
    count = torch.accelerator.device_count()
    # Two ranks of NCCL cannot use one GPU; over gloo they can. A CUDA device has a UUID, which ranks compare once they are
    # connected: each may see other GPUs than the others.
    if topology.local_world_size > count and backend != "gloo" and kind != "cuda":
        raise RuntimeError(
            f"{topology.local_world_size} processes on this machine, but it has {count} {kind} device(s). "
            "Start at most one process a device, share devices with process_group_backend: gloo, or set device: cpu."
        )
    index = topology.local_rank % count
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)
