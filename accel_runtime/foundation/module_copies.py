"""Copies of a model that share its parameters, buffers and settings, and run their own modules."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from accel_runtime.foundation.nested import rebuild
from accel_runtime.foundation.torch_internals import is_compiled, is_fsdp_module, uncompile_call

__all__ = ["copy_modules"]


def copy_modules(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return a copy of each module of a model, by the module.

    Attributes, hooks and methods that an instance has of its own, such as a patched `forward`, refer to the copies where they
    refer to modules of the model: in lists and dicts, bound methods, partial functions, closures, and objects that are methods.

    Raises:
        ValueError: A module is sharded or scripted, so that a copy of its attributes would not work; or a method of an instance runs
            a module through a global variable.
    """
    copies: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        is_scripted = isinstance(module, torch.jit.ScriptModule)
        if is_scripted or is_fsdp_module(module):
            raise ValueError(
                f"Cannot copy {type(model).__name__}: {type(module).__name__} in it is {'scripted' if is_scripted else 'sharded'}. "
                "Copy the model before that."
            )
        copies[module] = object.__new__(type(module))
    for module, copied in copies.items():
        for name, value in vars(module).items():
            is_method = callable(getattr(type(module), name, None))
            vars(copied)[name] = _rebind_method(value, copies) if is_method else _rebind(value, copies, {})
        if is_compiled(copied):
            uncompile_call(copied)  # it calls the module that was compiled
    return copies


def _rebind(value: Any, copies: Mapping[nn.Module, nn.Module], known: dict[int, Any]) -> Any:
    """Return a value with copies in place of the modules that it refers to; without any, the value itself."""
    if isinstance(value, nn.Module):
        return copies.get(value, value)
    if id(value) in known:
        return known[id(value)]
    known[id(value)] = value  # for one that contains itself
    parts = _list_parts(value)
    rebound = [_rebind(part, copies, known) for part in parts]
    if any(new is not part for new, part in zip(rebound, parts, strict=True)):
        known[id(value)] = _rebuild(value, rebound)
    return known[id(value)]


def _list_parts(value: Any) -> list[Any]:
    match value:
        case Mapping():
            return list(value.values())
        case list() | tuple() | deque():
            return list(value)
        case MethodType():
            return [value.__self__]
        case partial():
            return [value.func, value.args, value.keywords]
        case FunctionType() if value.__closure__:
            return [None if cell == CellType() else cell.cell_contents for cell in value.__closure__]
    return []


def _rebuild(value: Any, parts: list[Any]) -> Any:
    match value:
        case Mapping():
            return rebuild(value, dict(zip(value, parts, strict=True)))
        case MethodType():
            return MethodType(value.__func__, *parts)
        case partial():
            return type(value)(parts[0], *parts[1], **parts[2])
        case FunctionType():
            return _rebuild_function(value, parts)
    return rebuild(value, parts)


def _rebuild_function(function: FunctionType, contents: list[Any]) -> FunctionType:
    """Return a function with other contents of its closure; variables that stay are those of the function."""
    cells = tuple(
        cell if new is None or new is cell.cell_contents else CellType(new)
        for cell, new in zip(function.__closure__ or (), contents, strict=True)
    )
    rebuilt = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
    )
    rebuilt.__kwdefaults__ = function.__kwdefaults__
    vars(rebuilt).update(vars(function))
    return rebuilt


def _rebind_method(method: Any, copies: Mapping[nn.Module, nn.Module]) -> Any:
    """Return a method of an instance for its copy, also one of another object, which may hold the method that it replaces."""
    if isinstance(method, MethodType) and not isinstance(method.__self__, nn.Module):
        owner = _rebind_object(method.__self__, copies)
        return method if owner is method.__self__ else MethodType(method.__func__, owner)
    if isinstance(method, FunctionType):
        _check_globals(method, copies)
    if isinstance(method, (MethodType, FunctionType, partial, nn.Module, type)):
        return _rebind(method, copies, {})
    return _rebind_object(method, copies)


def _rebind_object(owner: Any, copies: Mapping[nn.Module, nn.Module]) -> Any:
    changed = {}
    for name, value in getattr(owner, "__dict__", {}).items():
        is_called = callable(value) and not isinstance(value, MethodType)
        new = _rebind_method(value, copies) if is_called else _rebind(value, copies, {})
        if new is not value:
            changed[name] = new
    if not changed:
        return owner
    copied = copy.copy(owner)
    vars(copied).update(changed)
    return copied


def _check_globals(method: FunctionType, copies: Mapping[nn.Module, nn.Module]) -> None:
    """Raise ValueError if a method of an instance runs a module through a variable of the script, which a copy cannot replace."""
    for name in method.__code__.co_names:
        value = method.__globals__.get(name)
        module = value if isinstance(value, nn.Module) else getattr(value, "__self__", None)
        if isinstance(module, nn.Module) and module in copies:
            raise ValueError(
                f"Cannot copy {type(module).__name__}: {method.__name__}() at {method.__code__.co_filename}:"
                f"{method.__code__.co_firstlineno} replaces a method of the model, and runs the original through the global variable "
                f"{name!r}. Give it the model as an argument: model.forward = types.MethodType(function, model)."
            )
