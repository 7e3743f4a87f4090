"""Names of parameters, buffers and modules in the script, without the attributes in which wrappers hold a module.

`torch.compile`, activation checkpointing and data parallelism put a module into another one, at any time and any depth.
Checkpoints, exports and messages use these names, so that they do not depend on it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from accel_runtime.foundation.torch_internals import (
    COMPILED_ATTRIBUTE,
    WRAPPER_ATTRIBUTES,
    find_wrapped_module,
    set_state_versions,
    state_versions,
)

__all__ = [
    "is_wrapped",
    "load_state_dict",
    "match_names",
    "named_parameters",
    "script_names",
    "state_dict",
    "uncompiled_module",
    "unwrap_module",
]


def unwrap_module(module: nn.Module) -> nn.Module:
    """Return the module inside of all wrappers around it."""
    while (wrapped := find_wrapped_module(module)) is not None:
        module = wrapped[1]
    return module


def uncompiled_module(model: nn.Module) -> nn.Module:
    """Return the module inside the result of the script's `torch.compile(model)`, or the module itself."""
    wrapped = find_wrapped_module(model)
    return model if wrapped is None or wrapped[0] != COMPILED_ATTRIBUTE else wrapped[1]


def is_wrapped(model: nn.Module) -> bool:
    """Return whether a model or a module in it is in a wrapper."""
    return any(find_wrapped_module(module) is not None for module in model.modules())


def script_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the names in the script of parameters, buffers, modules or entries of the state dict, by their names in the model.

    Only the attributes of wrappers are left out: a module of the script may have an attribute of that name.
    """
    if not is_wrapped(model):
        return {name: name for name in names}
    return {name: ".".join(_strip(model, name.split("."))[0]) for name in names}


def _strip(module: nn.Module, parts: Sequence[str]) -> tuple[list[str], bool]:
    """Return the parts of a name without attributes of wrappers, and whether the module has something of that name."""
    if (wrapped := find_wrapped_module(module)) is not None:
        attribute, inner = wrapped
        below = _strip(inner, parts[1:]) if parts and parts[0] == attribute else None
        if below is not None and below[1]:
            return below
        # Some wrappers leave out the attribute in their own state dict.
        beside = _strip(inner, parts)
        return beside if below is None or beside[1] else below
    if not parts:
        return [], True
    first, *rest = parts
    child = module._modules.get(first)  # noqa: SLF001 - `getattr` of a wrapper searches its module too
    if child is not None:
        below = _strip(child, rest)
        return [first, *below[0]], below[1]
    return list(parts), not rest


def named_parameters(
    model: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a model with their names in the script."""
    named = list(model.named_parameters(remove_duplicate=remove_duplicate))
    names = script_names(model, [name for name, _ in named])
    for name, parameter in named:
        yield names[name], parameter


def state_dict(model: nn.Module, **options: Any) -> dict[str, Any]:
    """Return the state dict of a model with the names of the script; options are those of `nn.Module.state_dict`."""
    state: dict[str, Any] = model.state_dict(**options)
    names = script_names(model, state)
    return state if all(name == own for own, name in names.items()) else _rename(state, names, model)


def load_state_dict(
    model: nn.Module, state: Mapping[str, Any], *, strict: bool = True, assign: bool = False
) -> Any:
    """Load a state with the names of the script, or of a model with other wrappers."""
    own_names = {name: own for own, name in script_names(model, model.state_dict()).items()}
    names = {name: own_names.get(found, found) for name, found in match_names(state, own_names).items()}
    if any(name != own for name, own in names.items()):
        state = _rename(state, names, model, to_script=False)
    return model.load_state_dict(state, strict=strict, assign=assign)


def match_names(names: Iterable[str], known: Collection[str]) -> dict[str, str]:
    """Return the known name of each name: itself, or the one that differs by attributes of wrappers only.

    Files of other programs contain such attributes. A name without a match is returned as it is.
    """
    by_bare_name: dict[str, list[str]] = {}
    for name in known:
        by_bare_name.setdefault(_remove_attributes(name), []).append(name)
    names = list(names)
    present = set(names)
    matches = {}
    for name in names:
        similar = [] if name in known else by_bare_name.get(_remove_attributes(name), [])
        matches[name] = similar[0] if len(similar) == 1 and similar[0] not in present else name
    return matches


def _remove_attributes(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPER_ATTRIBUTES)


def _rename(
    state: Mapping[str, Any], names: Mapping[str, str], model: nn.Module, *, to_script: bool = True
) -> dict[str, Any]:
    """Return a state dict with other names, and the versions of its modules under theirs."""
    renamed = OrderedDict((names[name], value) for name, value in state.items())
    versions = state_versions(state)
    if versions is not None:
        # The last of several modules with one name is the innermost, which is not a wrapper.
        modules = script_names(model, [name for name, _ in model.named_modules(remove_duplicate=False)])
        if to_script:
            paths = {name: path for path, name in modules.items() if path in versions}
            found = {name: versions[path] for name, path in paths.items()}
        else:
            saved = {_remove_attributes(name): version for name, version in versions.items()}
            found = {
                path: versions[name] if name in versions else saved[_remove_attributes(name)]
                for path, name in modules.items()
                if name in versions or _remove_attributes(name) in saved
            }
        set_state_versions(renamed, found)
    return renamed
