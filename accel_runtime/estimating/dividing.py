"""What tensor parallelism divides of a model, by the model's own plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

from accel_runtime.parallel import even
from accel_runtime.parallel.styles import divided_dimensions, gives_a_part
from accel_runtime.parallel.tensor import plan_of

__all__ = ["Division", "division_of", "obstacle"]


@dataclass(frozen=True)
class Division:
    """What a plan does to a model."""

    dims: Mapping[str, int]
    """The dimension that is divided, by the name of the parameter; one that has several is here under each."""
    gathered: tuple[str, ...]
    """Modules whose outputs are put together again."""
    styles: Mapping[str, ParallelStyle]
    """What torch does to each module."""


def division_of(model: nn.Module) -> Division | str:
    """What the model's plan divides, or why that cannot be said."""
    try:
        plan = {division.name: division.style for division in plan_of(model)}
    except ValueError as error:
        return str(error).removeprefix("parallel.tp is more than 1, and ")
    dims = {
        f"{name}.{own}": dim
        for name, style in plan.items()
        for own, dim in divided_dimensions(model.get_submodule(name), style).items()
    }
    whole = [
        name for name, style in plan.items() if isinstance(style, ColwiseParallel) and not gives_a_part(style)
    ]
    return Division(dims, tuple(whole), plan)


def obstacle(model: nn.Module, division: Division, tp: int) -> str:
    """Why so many processes cannot divide the layers; empty where they can."""
    try:
        even.check(model, tp, division.styles)
    except ValueError as error:
        return str(error)
    return ""
