"""Which modules of a model are gathered as a whole: named, counted, or what the model says itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from accel_runtime.env import nearest

__all__ = ["Units", "units_of"]

Units = list[tuple[str, nn.Module]]
"""Modules with their names, those inside others first."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def units_of(model: nn.Module, wrap: str) -> Units:
    """The modules whose parameters are gathered together, without the model itself.

    A module that has a parameter in common with one outside of it is left out, for such a parameter has one home: its
    parameters are gathered with the rest of the model.

    Args:
        model: The script's model.
        wrap: As `FullyShard.wrap` has it.

    Raises:
        ValueError: A class is not in the model, or is a mere list of modules.
    """
    if wrap == "none":
        return []
    if wrap.isdigit():
        chosen = list(_large(model, int(wrap)))
    elif wrap == "auto":
        chosen = _of_its_own(model)
    else:
        chosen = _named(model, [name.strip() for name in wrap.split(",") if name.strip()])
    chosen = [module for module in chosen if module is not model and _at_home(model, module)]
    ids = {id(module) for module in chosen}
    return [(name, module) for name, module in _inside_out(model) if id(module) in ids]


def _named(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    known = {type(module).__name__ for module in model.modules()}
    for name in names:
        if name not in known:
            meant = nearest(name, sorted(known))
            raise ValueError(
                f"fully_shard.wrap names {name}, and no module of {type(model).__name__} is of that class"
                f"{f'; did you mean {meant}?' if meant else ': ' + ', '.join(sorted(known))}"
            )
    found = [module for module in model.modules() if type(module).__name__ in names]
    lists = [type(module).__name__ for module in found if isinstance(module, _CONTAINERS)]
    if lists:
        raise ValueError(
            f"fully_shard.wrap names {lists[0]}, which has no forward pass to gather parameters for; name the class of the "
            "modules in it"
        )
    return found


def _of_its_own(model: nn.Module) -> list[nn.Module]:
    """What the model says must not be split; else what its lists of modules hold."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    if found:
        return found
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    held = [module for some in lists for module in some if not isinstance(module, _CONTAINERS)]
    return [module for module in held if any(True for _ in module.parameters())]


def _large(model: nn.Module, least: int) -> Iterator[nn.Module]:
    """From the inside out, modules with so many parameters that are in no module chosen before."""
    taken: set[nn.Parameter] = set()
    for _, module in _inside_out(model):
        own = set(module.parameters()) - taken
        if not isinstance(module, _CONTAINERS) and sum(parameter.numel() for parameter in own) >= least:
            taken |= own
            yield module


def _inside_out(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return sorted(model.named_modules(), key=lambda named: -named[0].count(".") - bool(named[0]))


def _at_home(model: nn.Module, module: nn.Module) -> bool:
    """Whether all of a module's parameters are its own, and no other part of the model has them."""
    inside = {id(some) for some in module.modules()}
    own = {id(parameter) for parameter in module.parameters()}
    return not any(
        id(parameter) in own
        for other in model.modules()
        if id(other) not in inside
        for parameter in other.parameters(recurse=False)
    )
