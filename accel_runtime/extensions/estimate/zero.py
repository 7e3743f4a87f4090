"""Memory of parameters, gradients and optimizer state under the stages of DeepSpeed's ZeRO; needs no deepspeed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from accel_runtime.extensions.estimate.memory import measure_state

__all__ = ["ZeroUsage", "compute_zero"]

_FP32 = 4
_ALIGNMENT = 2
"""Elements per rank to which DeepSpeed pads a group of parameters in stages 1 and 2."""
_STAGE_OF_GRADIENTS, _STAGE_OF_PARAMETERS = 2, 3
"""Stages from which gradients and parameters are sharded too."""
_PERSISTENT = 100_000
"""Elements up to which stage 3 also keeps a full copy of a parameter, by default."""


@dataclass(frozen=True)
class ZeroUsage:
    """Bytes of one rank in a stage, on its device unless they are offloaded."""

    stage: int
    offload: str
    """What is kept in the memory of the CPU: `no`, `optimizer`, or `all`, which is parameters too."""
    parameters: int
    gradients: int
    optimizer: int
    """Master weights in fp32, and the state of the optimizer."""
    cpu: int
    """Bytes in the memory of the CPU."""


def compute_zero(
    optimizer: torch.optim.Optimizer, model: nn.Module, devices: int, *, half: bool
) -> list[ZeroUsage]:
    """Return the memory of each stage, with and without offload.

    Args:
        optimizer: An optimizer over the trained parameters of the model.
        model: The model; parameters may be on the meta device.
        devices: The number of ranks.
        half: If true, the prepared model has parameters of 16 bits.
    """
    groups = [[p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
    parameters = list(model.parameters())
    rows = []
    for stage in (1, 2, 3):
        sizes = [_count_shard(group, devices, stage) for group in groups]
        master = sum(sizes) * _FP32
        state = _measure(optimizer, groups, sizes)
        weights = _count_weights(parameters, devices, stage, half=half)
        gradients = (
            sum(sizes) * _FP32 if stage >= _STAGE_OF_GRADIENTS else _sum_bytes(chain(*groups), half=half)
        )
        rows.append(ZeroUsage(stage, "no", weights, gradients, master + state, 0))
        offloaded = gradients if stage >= _STAGE_OF_GRADIENTS else 0
        rows.append(
            ZeroUsage(stage, "optimizer", weights, gradients - offloaded, 0, master + state + offloaded)
        )
        if stage == _STAGE_OF_PARAMETERS:
            persistent = weights - _count_weights(parameters, devices, stage, half=half, persists=False)
            cpu = master + state + offloaded + weights - persistent
            rows.append(ZeroUsage(stage, "all", persistent, 0, 0, cpu))
    return rows


def _count_shard(group: Sequence[nn.Parameter], devices: int, stage: int) -> int:
    """Return the number of elements of a group whose state one rank has."""
    if stage == _STAGE_OF_PARAMETERS:
        return sum(math.ceil(p.numel() / devices) for p in group)
    return math.ceil(sum(p.numel() for p in group) / (_ALIGNMENT * devices)) * _ALIGNMENT


def _count_weights(
    parameters: Iterable[nn.Parameter], devices: int, stage: int, *, half: bool, persists: bool = True
) -> int:
    """Return the bytes of the model's parameters between steps."""
    if stage < _STAGE_OF_PARAMETERS:
        return _sum_bytes(parameters, half=half)
    return sum(
        (math.ceil(p.numel() / devices) + (p.numel() if persists and p.numel() <= _PERSISTENT else 0))
        * _read_itemsize(p, half=half)
        for p in parameters
    )


def _sum_bytes(parameters: Iterable[nn.Parameter], *, half: bool) -> int:
    return sum(p.numel() * _read_itemsize(p, half=half) for p in parameters)


def _read_itemsize(parameter: nn.Parameter, *, half: bool) -> int:
    return 2 if half and parameter.is_floating_point() else parameter.element_size()


def _measure(
    optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[nn.Parameter]], sizes: Sequence[int]
) -> int:
    """Return the bytes of the state for one flat tensor a group, in fp32."""
    before = [group["params"] for group in optimizer.param_groups]
    flats = [nn.Parameter(torch.empty(size, device="meta")) for size in sizes]
    state = dict(optimizer.state)
    try:
        optimizer.state.clear()
        for group, flat, trained in zip(optimizer.param_groups, flats, groups, strict=True):
            group["params"] = [flat] if trained else []
        shapes: Mapping[nn.Parameter, tuple[int, ...]] = {}
        return measure_state(optimizer, shapes)
    finally:
        for group, params in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params
        optimizer.state.update(state)
