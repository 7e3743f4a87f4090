"""What tensor parallelism divides of a model, by the plan the model has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["Division", "division_of", "obstacle", "plan_of"]

_HEADS = ("num_attention_heads", "num_key_value_heads", "num_kv_heads", "num_heads", "n_heads", "n_head")
_DIMS: Mapping[str, int | None] = {
    "colwise": 0,
    "colwise_rep": 0,
    "colwise_gather_output": 0,
    "rowwise": 1,
    "embedding_rowwise": 0,
    "embedding_colwise": 1,
    "sequence_parallel": None,
    "replicate": None,
    "replicated": None,
}
"""The dimension of a weight that each style divides."""
_GATHERED = ("colwise_rep", "colwise_gather_output", "embedding_colwise")


@dataclass(frozen=True)
class Division:
    """What a plan does to a model."""

    dims: Mapping[str, int]
    """The dimension that is divided, by the name of the parameter."""
    gathered: tuple[str, ...]
    """Modules whose outputs are put together again."""
    heads: Mapping[str, int]
    """How many heads there are of each kind; no head is divided."""
    shapes: Mapping[str, tuple[int, ...]]
    """The shapes of what is divided."""


def plan_of(model: nn.Module) -> dict[str, str]:
    """The model's own plan: patterns of module names, and a style for each; empty where it has none."""
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {}
    return (
        {str(pattern): str(style) for pattern, style in dict(plan).items()}
        if isinstance(plan, Mapping)
        else {}
    )


def division_of(model: nn.Module, plan: Mapping[str, str]) -> Division | str:
    """What a plan divides, or why that cannot be said."""
    if not plan:
        return f"{type(model).__name__} has no tensor parallel plan (tp_plan)"
    dims: dict[str, int] = {}
    gathered = []
    for name, module in model.named_modules():
        style = next((style for pattern, style in plan.items() if _matches(pattern, name)), None)
        if style is None:
            continue
        if style not in _DIMS:
            return f"the plan has {name} as {style}, which is none of {', '.join(_DIMS)}"
        dims |= {f"{name}.{own}": dim for own, dim in _own(module, style)}
        gathered += [name] if style in _GATHERED else []
    if not dims:
        return f"no module of {type(model).__name__} is named in its tensor parallel plan"
    shapes = {
        name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False) if name in dims
    }
    return Division(dims, tuple(gathered), dict(_heads(model)), shapes)


def obstacle(division: Division, tp: int) -> str:
    """Why so many processes cannot divide the layers; empty where they can."""
    for kind, count in division.heads.items():
        if count % tp:
            return f"{kind}={count} is not divisible by {tp}"
    for name, dim in division.dims.items():
        if division.shapes[name][dim] % tp:
            return f"{name} has the shape {list(division.shapes[name])}, and {division.shapes[name][dim]} is not divisible by {tp}"
    return ""


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch("[^.]*".join(map(re.escape, pattern.split("*"))), name) is not None


def _own(module: nn.Module, style: str) -> Iterator[tuple[str, int]]:
    """The parameters of a module that a style divides: a bias goes with the outputs, and only with them."""
    dim = _DIMS[style]
    if isinstance(module, nn.Embedding) and style in {"rowwise", "colwise"}:
        dim = 1 - (dim or 0)
    for name, parameter in module.named_parameters(recurse=False):
        if dim is not None and parameter.ndim > dim:
            yield name, dim


def _heads(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Heads as the modules or their configurations count them."""
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):
            for kind in _HEADS:
                count: Any = getattr(owner, kind, None)
                if isinstance(count, int) and count > 1:
                    yield kind, count
