"""What became of a divided model: what its parameters are in, are computed and averaged in, and who has which part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement

from accel_runtime.description import GroupFacts, class_of
from accel_runtime.parallel import activations
from accel_runtime.parallel.precision import own_parameters
from accel_runtime.parallel.wrapping import Units

__all__ = ["groups_of", "layout_of", "sharded_units", "state_of"]


def groups_of(model: nn.Module, computes_in: torch.dtype | None) -> tuple[GroupFacts, ...]:
    """The parameters of a model by what is gathered together; modules that are alike are one entry.

    Args:
        model: Divided by `fully_shard`, by tensor parallel, or by both.
        computes_in: What autocast computes in, if it does.
    """
    joined: dict[GroupFacts, GroupFacts] = {}
    for found in _groups(model, computes_in):
        key = replace(found, modules=(), bytes_here=0)
        before = joined.get(key)
        if before is None:
            joined[key] = found
        else:
            joined[key] = replace(
                before,
                modules=before.modules + found.modules,
                bytes_here=before.bytes_here + found.bytes_here,
            )
    return tuple(joined.values())


def sharded_units(model: nn.Module) -> Units:
    """The modules that `fully_shard` gathers by themselves, the model itself among them under the name ''."""
    modules: Units = list(model.named_modules())
    return [(name, module) for name, module in modules if isinstance(module, FSDPModule)]


def state_of(module: object) -> Any:
    """What torch keeps of a module that `fully_shard` gathers: it has no public way to ask for its policies."""
    assert isinstance(module, FSDPModule)
    return module._get_fsdp_state()  # noqa: SLF001


def layout_of(parameter: torch.Tensor) -> str:
    """Who has which part of a parameter, in words."""
    if not isinstance(parameter, DTensor):
        return "whole on every rank"
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or tuple(f"dimension {at} of the mesh" for at in range(mesh.ndim))
    told = [
        _along(name, mesh.size(at), parameter.placements[at])
        for at, name in sorted(enumerate(names), key=lambda named: named[1] == "dp_replicate")
    ]
    return ", ".join(filter(None, told)) or "whole on every rank"


def _groups(model: nn.Module, computes_in: torch.dtype | None) -> Iterator[GroupFacts]:
    units = sharded_units(model)
    for name, module in units or [("", model)]:
        policy = state_of(module)._mp_policy if units else None  # noqa: SLF001
        alike: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        for _, parameter in own_parameters(module, units):
            key = (
                parameter.dtype,
                parameter.requires_grad,
                layout_of(parameter),
                isinstance(parameter, DTensor),
            )
            alike.setdefault(key, []).append(parameter)
        for (dtype, learns, layout, divided), members in alike.items():
            gathered = policy if divided else None
            param = getattr(gathered, "param_dtype", None)
            yield GroupFacts(
                modules=(name,),
                kind=class_of(module),
                parameters=len(members),
                elements=sum(member.numel() for member in members),
                dtype=_name(dtype),
                gradients=_name(dtype) if learns else "",
                computes_in=_name(param or computes_in or dtype),
                reduces_in=_name(getattr(gathered, "reduce_dtype", None) or param or dtype)
                if learns and units
                else "",
                layout=layout,
                bytes_here=sum(map(_bytes, members)),
                computed_again=activations.is_checkpointed(module),
            )


def _along(name: str, size: int, placement: Placement) -> str:
    over = f"over {size} rank{'s' if size > 1 else ''} of {name}"
    if placement.is_replicate() and name == "dp_replicate":
        return f"{size} copies" if size > 1 else ""
    if placement.is_replicate():
        return f"the same {over}"
    if placement.is_partial():
        return f"to be added up {over}"
    dimension = getattr(placement, "dim", 0)
    along = "" if name == "dp_shard" and dimension == 0 else f" along dimension {dimension}"
    return f"divided {over}{along}"


def _bytes(parameter: torch.Tensor) -> int:
    part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return part.numel() * part.element_size()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
