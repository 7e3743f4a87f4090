"""What a run may ask of `torch.distributed`, and replicas of torch_xla do not have: refused by name, or honoured."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from types import BuiltinFunctionType
from typing import Any

from accel_runtime.env import ROUNDING, MixedPrecision, Settings
from accel_runtime.options import DDPCommunicationHookType
from accel_runtime.topology import Topology

__all__ = [
    "check_format",
    "check_hooks",
    "check_meeting",
    "check_numbers",
    "check_spmd",
    "check_world",
    "patience",
]


def patience(settings: Settings, options: dict[str, Any]) -> timedelta:
    """How long replicas wait for each other.

    Args:
        settings: What the launcher said.
        options: Fields of `InitProcessGroupKwargs`; they win.

    Raises:
        ValueError: Something else is asked of a process group.
    """
    if settings.process_group_backend in {"nccl", "smddp"}:
        raise ValueError(
            f"process_group_backend {settings.process_group_backend} is for CUDA, and the device is xla: set it to auto"
        )
    for name in ("backend", "init_method"):
        if options.get(name) not in {None, "xla", "xla://"}:
            raise ValueError(
                f"{name}={options[name]!r} is for a process group of torch.distributed, and replicas of torch_xla meet "
                "by themselves: leave it out of InitProcessGroupKwargs"
            )
    return options.get("timeout") or timedelta(seconds=settings.process_group_timeout)


def check_format(mixed_precision: MixedPrecision) -> None:
    """Refuse the number format that needs a loss scaler.

    Raises:
        ValueError: It is fp16.
    """
    if mixed_precision == "fp16":
        raise ValueError(
            "mixed_precision fp16 needs a loss scaler, and torch_xla has none: use bf16, which needs none and which "
            "TPUs compute in"
        )


def check_numbers(environ: Mapping[str, str]) -> None:
    """Refuse the variables under which torch_xla computes in halves whatever the script says.

    Raises:
        ValueError: One is set.
    """
    for name in ROUNDING:
        if environ.get(name, "0") not in {"", "0"}:
            raise ValueError(
                f"{name}={environ[name]} makes every float32 of the run a half, also in the optimizer, and nothing shows "
                "it. Unset it, and use mixed_precision: bf16."
            )


def check_hooks(replication: dict[str, Any]) -> None:
    """Refuse what changes how DDP sends gradients, where there is no DDP. What changes no number has nothing to do.

    Args:
        replication: Fields of `DistributedDataParallelKwargs`.

    Raises:
        ValueError: There is a communication hook.
    """
    hook = replication.get("comm_hook", DDPCommunicationHookType.NO)
    if hook is not DDPCommunicationHookType.NO:
        raise ValueError(
            f"comm_hook={hook.value!r} changes how DDP sends gradients, and on the device xla they travel inside the "
            "compiled program: leave comm_hook out of DistributedDataParallelKwargs"
        )


def check_world(topology: Topology, world: int) -> None:
    """Refuse a world that torch_xla does not see.

    Args:
        topology: What the environment says.
        world: How many replicas torch_xla sees.

    Raises:
        RuntimeError: The environment says of several, and of another number.
    """
    if topology.world_size not in {1, world}:
        raise RuntimeError(
            f"WORLD_SIZE={topology.world_size} says that there are {topology.world_size} processes, but torch_xla sees "
            f"{world} replica(s): every process would take itself for rank 0. Leave starting to torch_xla: "
            "accel launch with launcher.kind: xla."
        )


def check_meeting(kind: str, world: int, send: object) -> None:
    """Refuse replicas that cannot meet: those of the CPU device, as it comes, end the process at their first collective.

    Args:
        kind: Of the device, as torch_xla has it.
        world: How many replicas there are.
        send: torch_xla's function that sends graphs off; what lets replicas meet has taken its place.

    Raises:
        RuntimeError: They cannot.
    """
    if kind == "CPU" and world > 1 and isinstance(send, BuiltinFunctionType):
        raise RuntimeError(
            f"torch_xla's CPU device has no collectives between its replicas, of which there are {world} "
            "(CPU_NUM_DEVICES): the first one would end the process after ten seconds (pytorch/xla issue 5005). Try a "
            "script with one replica, or with launcher.spmd: true on all devices."
        )


def check_spmd(on: bool) -> None:
    """Refuse SPMD that nobody told us of.

    Raises:
        RuntimeError: It is on.
    """
    if on:
        raise RuntimeError(
            "torch_xla computes on all devices as on one (XLA_USE_SPMD=1 is set, or the script has called use_spmd()), "
            "but accel was not told: set launcher.spmd: true (ACCEL_SPMD=1), or leave SPMD off."
        )
