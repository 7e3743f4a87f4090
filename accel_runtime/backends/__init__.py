"""The one choice of machinery: which hardware, and how this process talks to the others."""

from __future__ import annotations

from typing import Any

import torch

from accel_runtime.backends.base import Backend
from accel_runtime.backends.distributed import Distributed
from accel_runtime.backends.single import Single
from accel_runtime.env import Settings, check_layout
from accel_runtime.topology import Topology

__all__ = ["Backend", "connect", "seed_device", "standing"]


def connect(settings: Settings, topology: Topology, options: dict[str, Any] | None = None) -> Backend:
    """Take up this process's device and join the others.

    Args:
        settings: What the launcher said.
        topology: Where this process stands.
        options: Arguments for `init_process_group` that win over `settings`.

    Raises:
        RuntimeError: The device asked for is not there, or there are fewer than processes on this machine.
        ValueError: Models are to be divided in a way that does not fit the processes, or the device.
    """
    check_layout(settings.parallel, settings.fully_shard, topology.world_size)
    if settings.spmd and settings.device != "xla":
        raise RuntimeError(
            f"SPMD (ACCEL_SPMD=1) is a way to use XLA devices, and the device is {settings.device}: set "
            "ACCEL_DEVICE=xla (launcher.kind: xla does, with spmd: true), or leave ACCEL_SPMD out."
        )
    if settings.device == "xla":
        if not settings.parallel.plain:
            raise ValueError(
                "parallel: and fully_shard: divide models over torch.distributed, which XLA devices do not use: leave them out. "
                "launcher.spmd: true shards a model over the XLA devices of a machine."
            )
        from accel_runtime.backends import xla  # noqa: PLC0415 - loading it costs seconds, and needs torch_xla

        return xla.connect(settings, topology, options or {})
    backend = (options or {}).get("backend") or settings.process_group_backend
    device = _device(settings.device, topology, backend)
    if not settings.parallel.plain:
        from accel_runtime.backends.sharded import Sharded  # noqa: PLC0415 - most runs go without it, and it loads slowly

        return Sharded(topology, device, settings, options or {})
    if topology.launched:
        return Distributed(topology, device, settings, options or {})
    return Single(topology, device)


def standing(settings: Settings, topology: Topology) -> Topology:
    """Where this process stands, whether or not it has joined the others.

    Args:
        settings: What the launcher said.
        topology: What the environment says; replicas of torch_xla are placed by their device.

    Raises:
        RuntimeError: Environment and device disagree.
    """
    if settings.device != "xla" or settings.spmd:
        return topology
    from accel_runtime.backends import xla  # noqa: PLC0415

    return xla.standing(topology)


def seed_device(settings: Settings, seed: int) -> None:
    """Seed the device's generator where `torch.manual_seed` does not reach it."""
    if settings.device == "xla":
        from accel_runtime.backends import xla  # noqa: PLC0415

        xla.seed_device(settings, seed)


def _device(wanted: str, topology: Topology, backend: str) -> torch.device:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = (found.type if found else "cpu") if wanted == "auto" else wanted
    if kind == "cpu":
        return torch.device("cpu")
    if found is None or found.type != kind:
        raise RuntimeError(
            f"device {kind!r} was asked for, but this torch ({torch.__version__}) finds "
            f"{found.type if found else 'no accelerator'}. Set device: auto or cpu, or install a build of torch for it."
        )
    count = torch.accelerator.device_count()
    # Two ranks of NCCL cannot use one GPU; over gloo they can.
    if topology.local_world_size > count and backend != "gloo":
        raise RuntimeError(
            f"{topology.local_world_size} processes on this machine, but it has {count} {kind} device(s). "
            "Start at most one process a device, share devices with process_group_backend: gloo, or set device: cpu."
        )
    index = topology.local_rank % count
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)
