"""Whether a model came out of `prepare` as it was asked for: what is to be is noted before, and compared after."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from accel_runtime.description import class_of
from accel_runtime.parallel import activations
from accel_runtime.parallel.report import state_of

__all__ = ["Expected", "Wanted", "expected", "verify"]

_TOLD = 5


@dataclass(frozen=True)
class Expected:
    """What a parameter is to be."""

    dtype: torch.dtype
    shape: torch.Size
    learns: bool
    shared: bool
    """Whether it is sharded over the mesh."""


@dataclass(frozen=True)
class Wanted:
    """What a model is to become."""

    parameters: Mapping[str, Expected]
    """All of them by name."""
    mesh: DeviceMesh | None
    """`[shards]`, or `[copies, shards]`; None where nothing is sharded."""
    policies: Mapping[str, MixedPrecisionPolicy]
    """By the names of the modules that are gathered by themselves; '' is the model."""
    offload: bool = False
    """Whether shards stay in host memory."""
    again: tuple[str, ...] = ()
    """Modules whose activations are computed again."""
    layers: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Modules that have a part in tensor parallel, and which of their parameters it divides."""


def expected(model: nn.Module, ignored: Collection[nn.Parameter], *, shards: bool) -> dict[str, Expected]:
    """What each parameter of a model is to be once it is divided.

    Args:
        model: As the script made it.
        ignored: The parameters that stay whole.
        shards: Whether the others are sharded.
    """
    return {
        name: Expected(p.dtype, p.shape, p.requires_grad, shared=shards and p not in ignored)
        for name, p in model.named_parameters(remove_duplicate=False)
    }


def verify(model: nn.Module, wanted: Wanted) -> None:
    """Compare a divided model with what was asked for.

    Raises:
        RuntimeError: Something is not as it was asked for; the message names the first few.
    """
    wrong = [
        *_parameters(model, wanted),
        *_policies(model, wanted),
        *_again(model, wanted.again),
        *_layers(model, wanted.layers),
    ]
    if wrong:
        more = f"; and {len(wrong) - _TOLD} more" if len(wrong) > _TOLD else ""
        raise RuntimeError(
            f"{class_of(model)} is not divided as it was asked for: {'; '.join(wrong[:_TOLD])}{more}. "
            "Has the script changed the model, or sharded a part of it by itself? Leave that to prepare()"
        )


def _parameters(model: nn.Module, wanted: Wanted) -> Iterator[str]:
    found = dict(model.named_parameters(remove_duplicate=False))
    for name in sorted(found.keys() ^ wanted.parameters.keys()):
        yield f"{name} is {'new' if name in found else 'gone'}"
    for name, parameter in found.items():
        if name in wanted.parameters:
            wrong = _unlike(parameter, wanted.parameters[name], wanted)
            yield from (f"{name} {what}" for what in wrong)


def _unlike(parameter: nn.Parameter, asked: Expected, wanted: Wanted) -> Iterator[str]:
    if parameter.dtype != asked.dtype:
        yield f"is in {_name(parameter.dtype)}, not in {_name(asked.dtype)}"
    if parameter.shape != asked.shape:
        yield f"has the shape {tuple(parameter.shape)}, not {tuple(asked.shape)}"
    if parameter.requires_grad != asked.learns:
        yield "learns" if parameter.requires_grad else "does not learn"
    on = _place(parameter, wanted.mesh) if wanted.mesh is not None else None
    if asked.shared and on is not None:
        yield on
    if not asked.shared and wanted.mesh is not None and on is None:
        yield "is sharded, and was to stay whole"
    if asked.shared and wanted.offload and isinstance(parameter, DTensor):
        where = parameter.to_local().device.type
        if where not in {"cpu", "meta"}:
            yield f"is on {where}, not in host memory"


def _place(parameter: torch.Tensor, mesh: DeviceMesh) -> str | None:
    """What keeps a parameter from being sharded over the mesh; None where it is."""
    if not isinstance(parameter, DTensor):
        return "is whole, and was to be sharded"
    names = parameter.device_mesh.mesh_dim_names or ()
    for at, name in enumerate(mesh.mesh_dim_names or ()):
        if name not in names or parameter.device_mesh.size(names.index(name)) != mesh.size(at):
            return f"is on {parameter.device_mesh}, and was to be divided over {name} of {mesh.size(at)}"
        placement = parameter.placements[names.index(name)]
        if placement.is_partial() or placement.is_replicate() != (name == "dp_replicate"):
            return f"is {placement} on {name}"
    return None


def _policies(model: nn.Module, wanted: Wanted) -> Iterator[str]:
    modules = dict(model.named_modules())
    for name, policy in wanted.policies.items():
        module, told = modules[name], name or "the model"
        if not isinstance(module, FSDPModule):
            yield f"{told} is not gathered by itself"
            continue
        state = state_of(module)
        if state._mp_policy != policy:  # noqa: SLF001
            yield f"{told} has {state._mp_policy}, not {policy}"  # noqa: SLF001
        group = state._fsdp_param_group  # noqa: SLF001
        if group is not None and isinstance(group.offload_policy, CPUOffloadPolicy) is not wanted.offload:
            yield f"{told} is {'not ' if wanted.offload else ''}offloaded to host memory"
    others = {n for n, module in modules.items() if isinstance(module, FSDPModule)} - wanted.policies.keys()
    yield from (f"{name or 'the model'} is gathered by itself, and was not to be" for name in sorted(others))


def _again(model: nn.Module, names: Collection[str]) -> Iterator[str]:
    for name in names:
        if not activations.is_checkpointed(model.get_submodule(name)):
            yield f"{name} keeps its activations"


def _layers(model: nn.Module, layers: Mapping[str, frozenset[str]]) -> Iterator[str]:
    for name, divided in layers.items():
        own = dict(model.get_submodule(name).named_parameters(recurse=False))
        for part in sorted(divided & own.keys()):
            parameter = own[part]
            names = (parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()
            if "tp" not in names or _replicated(parameter, names.index("tp")):
                yield f"{name}.{part} is not divided over tp"


def _replicated(parameter: torch.Tensor, dimension: int) -> bool:
    return isinstance(parameter, DTensor) and parameter.placements[dimension].is_replicate()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
