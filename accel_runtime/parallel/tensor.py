"""Tensor parallel: which module does what, whether that comes out even, and the division itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from accel_runtime.parallel import even
from accel_runtime.parallel.styles import style_of

__all__ = ["Division", "divide", "plan_of"]


@dataclass(frozen=True)
class Division:
    """What one module does under tensor parallel."""

    name: str
    """The module, from the model on."""
    style: ParallelStyle
    """What torch does to it."""
    word: str
    """What the plan calls this."""


def plan_of(model: nn.Module, asked: tuple[tuple[str, str], ...] = ()) -> tuple[Division, ...]:
    """What every module that is named does; nothing is changed yet.

    Args:
        model: As the script made it.
        asked: Patterns and words of the profile; where it has none, the model's own plan counts: its `tp_plan`, as
            models of transformers have one, or such an attribute of a module in it.

    Raises:
        ValueError: There is no plan; or it names a module that is not there, one module twice, or a style that is
            none.
    """
    if asked:
        return _resolved(model, asked, "tp_plan", strict=True)
    entries = tuple(_own(model))
    if not entries:
        raise ValueError(
            f"parallel.tp is more than 1, and {type(model).__name__} has no tensor parallel plan of its own (tp_plan): give "
            "one in the profile, as parallel.tp_plan: {layers.*.up: colwise, layers.*.down: rowwise}"
        )
    return _resolved(model, entries, f"the plan of {type(model).__name__}", strict=False)


def divide(model: nn.Module, mesh: DeviceMesh, plan: tuple[Division, ...]) -> None:
    """Divide the modules among the processes of `mesh`, in place; what the plan does not name stays whole.

    Parameters that were one stay one. The processes of `mesh` draw the same random numbers from here on, so that
    dropout on what they all have is the same dropout.

    Args:
        model: Has the same values on every process of `mesh`.
        mesh: One dimension: the processes that divide layers.
        plan: From `plan_of`.

    Raises:
        ValueError: The number of processes does not divide what it would have to; tied parameters would come apart;
            or the model is divided already.
    """
    even.check(model, mesh.size(), {division.name: division.style for division in plan})
    tied, learns = _tied(model), {n: p.requires_grad for n, p in model.named_parameters()}
    for division in plan:
        # All have the same values, so that nothing has to travel.
        parallelize_module(model.get_submodule(division.name), mesh, division.style, src_data_rank=None)
    for first, *others in tied:
        for name in others:
            _put(model, name, model.get_parameter(first))
    for name, parameter in model.named_parameters():
        # torch's SequenceParallel makes parameters anew, and all of them learn.
        parameter.requires_grad_(learns[name])
        if isinstance(parameter, DTensor) and learns[name]:
            parameter.register_hook(partial(_laid_out_as, parameter.placements))  # type: ignore[no-untyped-call]
    _draw_alike(mesh)


def _own(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The entries of the outermost plans in a model."""
    above: list[str] = []
    for name, module in model.named_modules():
        plan = None if any(name.startswith(before) for before in above) else _plan_in(module)
        if plan:
            before = f"{name}." if name else ""
            above.append(before)
            yield from ((before + pattern, style) for pattern, style in plan.items())


def _plan_in(module: nn.Module) -> Mapping[str, Any] | None:
    config = getattr(module, "config", None)
    plans = (getattr(module, name, None) for name in ("tp_plan", "_tp_plan"))
    found = (*plans, getattr(config, "base_model_tp_plan", None))
    return next((plan for plan in found if plan and isinstance(plan, Mapping)), None)


def _resolved(
    model: nn.Module, entries: tuple[tuple[str, Any], ...], where: str, *, strict: bool
) -> tuple[Division, ...]:
    """The entries by module; `strict`, each has to match one."""
    modules, found = dict(model.named_modules()), dict[str, Division]()
    for pattern, style in entries:
        names = [name for name in modules if name and _matches(pattern, name)]
        if strict and not names:
            raise ValueError(
                f"{where}: {pattern} matches no module of {type(model).__name__}{_near(pattern, modules)}"
            )
        for name in names:
            if name in found:
                raise ValueError(f"{where}: {name} is named twice, by {found[name].word} and by {style}")
            found[name] = _division(name, modules, style, where)
    if not found:
        raise ValueError(f"{where} names no module that {type(model).__name__} has")
    return tuple(found.values())


def _division(name: str, modules: Mapping[str, nn.Module], style: Any, where: str) -> Division:
    above = modules.get(name.rpartition(".")[0])
    if type(above) is nn.MultiheadAttention:
        raise ValueError(
            f"{where}: {name} is computed by nn.MultiheadAttention itself, which cannot be divided"
        )
    word = type(style).__name__ if isinstance(style, ParallelStyle) else str(style)
    try:
        return Division(name, style if word != style else style_of(word, modules[name]), word)
    except ValueError as error:
        raise ValueError(f"{where}: {name}: {error}") from None


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]*"), name) is not None


def _near(pattern: str, modules: Mapping[str, nn.Module]) -> str:
    leaf = pattern.rpartition(".")[2]
    like = sorted(
        {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in modules if name.rpartition(".")[2] == leaf}
    )
    return f"; did you mean {' or '.join(like[:3])}?" if like else ""


def _tied(model: nn.Module) -> list[list[str]]:
    """The names of every parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [several for several in names.values() if len(several) > 1]


def _laid_out_as(placements: tuple[Placement, ...], gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as its parameter lies; a sum that processes have in parts is added up."""
    assert isinstance(gradient, DTensor)
    return gradient.redistribute(placements=placements)


def _put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    where, _, own = name.rpartition(".")
    model.get_submodule(where).register_parameter(own, parameter)


def _draw_alike(mesh: DeviceMesh) -> None:
    """Give the processes of a mesh the random number generators of the first."""
    others = () if mesh.device_type == "cpu" else (torch.get_device_module(mesh.device_type),)
    for generator in (torch, *others):
        state = generator.get_rng_state().to(mesh.device_type)
        dist.broadcast(state, group=mesh.get_group(), group_src=0)
        generator.set_rng_state(state.cpu())
