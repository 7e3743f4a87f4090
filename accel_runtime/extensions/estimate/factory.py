"""Factories of models: find them in a module or a file, and call them on the meta device."""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import inspect
import re
import symtable
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from accel_runtime.environment.settings import find_nearest
from accel_runtime.extensions.estimate.memory import EstimateError, ModelSpec, describe_user_error
from accel_runtime.extensions.estimate.statements import select_statements
from accel_runtime.foundation.torch_internals import tree_map

__all__ = ["call_factory", "find_factory"]

Sizes = Mapping[str, int]
"""`batch_size` and `seq_length` on each device, as far as they are given."""
Function = Callable[..., Any]
_DYNAMIC = re.compile(
    r"\b(globals|vars|locals|exec|setattr|__dict__|__getattr__|global)\b|\bimport\s*\(?\s*\*"
)
"""Words in a source that may define names dynamically."""


def find_factory(target: str) -> Function:
    """Return the factory `MODULE:NAME` or `path/to/file.py:NAME`."""
    source, _, name = target.rpartition(":")
    if not source or not name:
        raise EstimateError(
            f"Invalid target {target!r}: expected MODULE:FACTORY, path/to/file.py:FACTORY, the config.json of a transformers "
            "model or its directory, or the id of a model of the Hub, such as Qwen/Qwen3-8B."
        )
    first = name.partition(".")[0]
    _check_name_exists(source, first)
    value: Any = _import_target(source, first)
    for part in name.split("."):
        if not hasattr(value, part):
            offered = [
                other
                for other in dir(value)
                if not other.startswith("_") and callable(getattr(value, other, None))
            ]
            if isinstance(value, ModuleType):  # without imported names
                module = value.__name__
                defined = [n for n in offered if getattr(getattr(value, n), "__module__", None) == module]
            else:
                defined = offered
            raise EstimateError(_format_missing(source, part, offered, defined))
        value = getattr(value, part)
    if isinstance(value, nn.Module):
        if all(parameter.is_meta for parameter in value.parameters()):
            return lambda: value
        raise EstimateError(f"{target} is a model with memory. Name a function that creates one.")
    if not callable(value):
        raise EstimateError(
            f"{target} is of type {type(value).__name__}, not a function. Name a function that returns a model."
        )
    factory: Function = value
    return factory


def _check_name_exists(target: str, name: str) -> None:
    """Raise `EstimateError` if a source does not define a name, before the source is run."""
    try:
        text = _find_source(target).read_text(encoding="utf-8")
        names = symtable.symtable(text, target, "exec").get_symbols()
    except (OSError, ValueError, SyntaxError, ImportError, AttributeError):
        return  # the import reports the error
    defined = {symbol.get_name(): symbol for symbol in names if symbol.is_assigned() or symbol.is_imported()}
    if name in defined or _DYNAMIC.search(text):
        return
    public = [
        other for other, symbol in defined.items() if symbol.is_namespace() and not other.startswith("_")
    ]
    raise EstimateError(_format_missing(target, name, public, public))


def _find_source(target: str) -> Path:
    if _is_file(target):
        return Path(target)
    # PathFinder runs no code; `importlib.util.find_spec` would import the parent package.
    spec = None if "." in target else importlib.machinery.PathFinder.find_spec(target)
    if spec is None or spec.origin is None:
        raise ImportError(target)
    return Path(spec.origin)


def _is_file(target: str) -> bool:
    return Path(target).suffix == ".py" or "/" in target


def _format_missing(target: str, name: str, offered: list[str], defined: list[str]) -> str:
    nearest = find_nearest(name, offered)
    hint = f"did you mean {nearest}?" if nearest else f"it has {', '.join(sorted(defined)) or 'no function'}"
    return f"{target} has no {name}; {hint}"


def _import_target(target: str, name: str) -> ModuleType:
    """Import a module; of a script, only the statements that a name depends on."""
    is_file = _is_file(target)
    try:
        path = _find_source(target)
    except ImportError:
        path = None
    try:
        if is_file:
            _check_file(Path(target))
            # Its directory is on the path, as for a script.
            sys.path.insert(0, str(Path(target).resolve().parent))
        is_script = path is not None and path.suffix == ".py" and path.name != "__init__.py"
        is_imported = hasattr(sys.modules.get(target), name)
        if path is None or not is_script or is_imported:
            return importlib.import_module(target)
        return _import_statements(path, name)
    except EstimateError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code
        missing = getattr(error, "name", "") if isinstance(error, ModuleNotFoundError) else ""
        if missing and not is_file and f"{target}.".startswith(f"{missing}."):
            raise EstimateError(
                f"Module {missing} not found in {Path.cwd()} or the installed packages. Name a file as "
                "path/to/file.py:FACTORY."
            ) from None
        raise EstimateError(f"{target} cannot be imported: {describe_user_error(error)}") from None


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise EstimateError(f"File not found: {path}")
    if path.suffix != ".py":
        raise EstimateError(f"Not a Python file: {path}")


def _import_statements(path: Path, name: str) -> ModuleType:
    """Execute the statements of a file that a name depends on; all, if none of them seems to define it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise EstimateError(f"Not a Python file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    source = importlib.util.decode_source(path.read_bytes())
    # For scripts that parse their arguments.
    sys.argv = [str(path)]
    statements = select_statements(source, name, str(path))
    if not any(name in each.bound or each.binds_unknown_names for each in statements):
        spec.loader.exec_module(module)
        return module
    for statement in statements:
        code = compile(ast.Module([statement.node], type_ignores=[]), str(path), "exec")
        # A model that is a variable has no memory either.
        with torch.device("meta") if statement.binds_variable(name) else nullcontext():
            exec(code, vars(module))  # noqa: S102 - the user's script
    return module


def call_factory(factory: Function, target: str, sizes: Sizes) -> ModelSpec:
    """Call a factory on the meta device.

    `batch_size` and `seq_length` are passed if it has such parameters; otherwise its inputs are resized to the batch size.
    """
    accepted = _list_parameters(factory, target, sizes)
    try:
        with torch.device("meta"):
            returned = factory(**{name: size for name, size in sizes.items() if name in accepted})
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code
        hint = ""
        if isinstance(error, NotImplementedError) and "meta" in str(error):
            hint = ". Factories are called on the meta device: do not use values or move to a device"
        raise EstimateError(f"{target} failed: {describe_user_error(error)}{hint}") from None
    spec = _parse_result(returned, target)
    for name, parameter in spec.model.named_parameters():
        if not parameter.is_meta:
            raise EstimateError(
                f"{target} returned a model whose {name} on {parameter.device} has memory. A factory is called on the meta device, "
                "where nothing is allocated: remove device= and .to(), and do not load weights."
            )
    if "seq_length" in sizes and "seq_length" not in accepted:
        raise EstimateError(
            f"--seq-length is for factories with a parameter seq_length, and {target} does not have one. Add the parameter."
        )
    if "batch_size" not in sizes or "batch_size" in accepted:
        return spec
    if spec.inputs is None:
        raise EstimateError(f"--batch-size needs inputs, and {target} returns none. Return (model, inputs).")

    def resize(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.ndim == 0:
            return value
        return torch.empty((sizes["batch_size"], *value.shape[1:]), dtype=value.dtype, device="meta")

    return replace(spec, inputs=tree_map(resize, spec.inputs))


def _list_parameters(factory: Function, target: str, sizes: Sizes) -> Iterable[str]:
    """Return the names of a factory's parameters; raise `EstimateError` if it needs another argument than `sizes`."""
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError as error:
        raise EstimateError(
            f"{target} cannot be called: its parameters are unknown ({error}). Name a Python function that returns a model."
        ) from None
    for name, parameter in parameters.items():
        is_variadic = parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}
        if parameter.default is parameter.empty and not is_variadic and name not in sizes:
            is_size = name in {"batch_size", "seq_length"}
            cure = f"Set --{name.replace('_', '-')}" if is_size else "Give it a default"
            raise EstimateError(
                f"{target} needs the argument {name}. {cure}: a factory is called with batch_size and seq_length only."
            )
    return parameters


def _parse_result(returned: Any, target: str) -> ModelSpec:
    names = [f.name for f in fields(ModelSpec)]
    parts: dict[str, Any] = {}
    if isinstance(returned, nn.Module):
        parts = {"model": returned}
    elif isinstance(returned, Mapping):
        parts = dict(returned)
        for name in parts.keys() - names:
            nearest = find_nearest(str(name), names)
            raise EstimateError(
                f"{target} returned a dict with {name!r}{f'; did you mean {nearest}?' if nearest else ''}; allowed keys are "
                f"{', '.join(names)}"
            )
    elif isinstance(returned, tuple) and 1 <= len(returned) <= len(names):
        parts = dict(zip(names, returned, strict=False))
    if not isinstance(parts.get("model"), nn.Module):
        without = " without one" if isinstance(returned, (tuple, Mapping)) else ""
        raise EstimateError(
            f"{target} returned {type(returned).__name__}{without}. Return a torch.nn.Module, or a tuple or dict of model and "
            "optional inputs, optimizer and loss."
        )
    spec = ModelSpec(**parts)
    if not (
        spec.optimizer is None
        or isinstance(spec.optimizer, torch.optim.Optimizer)
        or callable(spec.optimizer)
    ):
        raise EstimateError(
            f"{target} returned {type(spec.optimizer).__name__} as optimizer. Return a torch.optim.Optimizer over the model's "
            "parameters, or a function that creates one from them."
        )
    if spec.loss is not None and not callable(spec.loss):
        raise EstimateError(
            f"{target} returned {type(spec.loss).__name__} as loss. Return a function of the model's output."
        )
    return spec
