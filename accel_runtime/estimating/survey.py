"""All layouts for a number of devices, what each takes, and which of them to take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from accel_runtime.estimating.arithmetic import (
    Activations,
    Formats,
    Layout,
    Measured,
    Parameter,
    Usage,
    local,
    splits,
    usage,
    variants,
)
from accel_runtime.estimating.dividing import Division, division_of, obstacle
from accel_runtime.estimating.errors import EstimateError
from accel_runtime.estimating.factory import Made
from accel_runtime.estimating.measuring import Batch, Forward, activations
from accel_runtime.estimating.optimizing import optimizer_of, state_bytes
from accel_runtime.parallel.activations import chosen
from accel_runtime.parallel.wrapping import Units, units_of

__all__ = ["Estimate", "Survey", "survey"]

_COMPUTED: Mapping[str, torch.dtype | None] = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Estimate:
    """A layout and what it takes."""

    layout: Layout
    usage: Usage


@dataclass(frozen=True)
class Survey:
    """A model, and what training it takes in every layout."""

    made: Made
    units: Units
    estimates: list[Estimate]
    """Those for every number of devices that divides the one asked for."""
    left_out: dict[int, str]
    """Why there is no layout with this `tp`."""
    optimizer: str
    """Its class."""


def survey(made: Made, *, devices: int, mixed_precision: str, wrap: str, optimizer: str | None) -> Survey:
    """Estimate every layout.

    Args:
        made: The model, and what measures more than it.
        devices: How many there are; layouts of every number that divides it are estimated.
        mixed_precision: What is computed in.
        wrap: What is gathered as a whole, as `FullyShard.wrap` has it.
        optimizer: One by name; None is the factory's, else AdamW.

    Raises:
        EstimateError: Something cannot be measured.
    """
    try:
        units = units_of(made.model, wrap)
    except ValueError as error:
        raise EstimateError(str(error).replace("fully_shard.wrap", "--wrap")) from None
    measure = _Measure(made, units, _COMPUTED[mixed_precision], optimizer)
    left_out: dict[int, str] = {}
    estimates = []
    for count in (n for n in range(1, devices + 1) if devices % n == 0):
        for split in splits(count):
            if split[2] not in left_out and (why := measure.obstacle(split[2])):
                left_out[split[2]] = why
            if split[2] not in left_out:
                # Without a wrapped module there is nothing to compute again, and accel refuses to.
                possible = (one for one in variants(split) if units or not one.activation_checkpointing)
                estimates += [Estimate(layout, measure.usage(layout)) for layout in possible]
    return Survey(made, units, estimates, left_out, measure.optimizer)


class _Measure:
    """Measures what layouts need, each thing once."""

    def __init__(self, made: Made, units: Units, computed: torch.dtype | None, optimizer: str | None) -> None:
        self._made, self._units, self._computed = made, units, computed
        self._named = dict(made.model.named_parameters())
        self._division = division_of(made.model)
        self._parameters = _parameters(self._named, units, self._division)
        self._half = any(p.requires_grad and p.dtype in _HALVES for p in self._named.values())
        self._optimizer = optimizer_of(made.model, optimizer or made.optimizer or "adamw")
        self._buffers = sum(b.untyped_storage().nbytes() for b in _once(made.model))
        self._state = cache(self._measure_state)
        self._activations: Callable[[int, bool], Activations | None] = cache(self._measure_activations)

    @property
    def optimizer(self) -> str:
        """The optimizer's class."""
        return type(self._optimizer).__name__

    def obstacle(self, tp: int) -> str:
        """Why layers cannot be divided among so many; empty where they can."""
        if tp == 1:
            return ""
        if isinstance(self._division, str):
            return self._division
        if why := obstacle(self._made.model, self._division, tp):
            return why
        try:
            self._activations(tp, False)
        except EstimateError as error:
            return f"with its layers divided {error}"
        return ""

    def usage(self, layout: Layout) -> Usage:
        """What a layout takes."""
        size = self._computed.itemsize if self._computed else None
        formats = Formats(size, 4 if size or self._half else None)
        state = self._state(tuple(local(p, layout) for p in self._parameters))
        kept = self._activations(layout.tp, layout.sharded and self._computed is not None)
        return usage(self._parameters, layout, formats, Measured(state, self._buffers, kept))

    def _measure_state(self, shapes: tuple[tuple[int, ...], ...]) -> int:
        return state_bytes(self._optimizer, dict(zip(self._named.values(), shapes, strict=True)))

    def _measure_activations(self, tp: int, gathered: bool) -> Activations | None:
        if self._made.inputs is None:
            return None
        division = self._division if isinstance(self._division, Division) and tp > 1 else None
        forward = Forward(self._computed, self._computed if gathered else None, tp, division)
        batch = Batch(self._made.inputs, self._made.loss)
        return activations(self._made.model, [module for _, module in chosen(self._units)], batch, forward)


def _parameters(named: Mapping[str, nn.Parameter], units: Units, division: Division | str) -> list[Parameter]:
    """What arithmetic knows of parameters; of modules inside others, the inner one gathers its own."""
    homes: dict[int, int] = {}
    for index, (_, module) in enumerate(units):
        for parameter in module.parameters():
            homes.setdefault(id(parameter), index)
    dims = division.dims if isinstance(division, Division) else {}
    return [
        Parameter(
            name,
            tuple(p.shape),
            p.element_size(),
            p.requires_grad,
            p.is_floating_point(),
            homes.get(id(p)),
            dims.get(name),
        )
        for name, p in named.items()
    ]


def _once(model: nn.Module) -> list[torch.Tensor]:
    return list({id(b): b for b in model.buffers()}.values())
