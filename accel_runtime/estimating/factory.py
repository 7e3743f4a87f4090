"""The model a person names: their factory is found, and called on the meta device."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import re
import symtable
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from accel_runtime.env import nearest
from accel_runtime.estimating.errors import EstimateError, raised

__all__ = ["Made", "Sizes", "called", "found", "real", "resized"]

Function = Callable[..., Any]
_DYNAMIC = re.compile(
    r"\b(globals|vars|locals|exec|setattr|__dict__|__getattr__|global)\b|\bimport\s*\(?\s*\*"
)
"""Words of a source that may define names where none is written."""


@dataclass(frozen=True)
class Sizes:
    """How large a batch is on each device; None is as the factory has it."""

    batch_size: int | None = None
    seq_length: int | None = None

    @property
    def given(self) -> dict[str, int]:
        """Those that were said."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Made:
    """What a factory returns: a model, and what it takes to measure more than that; the names are those of its keys."""

    model: nn.Module
    inputs: Any = None
    """A tensor, a tuple of arguments, or a mapping of arguments by name: a batch as one device gets it."""
    optimizer: torch.optim.Optimizer | Function | None = None
    """One over the model's parameters, or what makes one of them."""
    loss: Function | None = None
    """Makes a loss of what the model returns."""


def found(target: str) -> Function:
    """The factory that is named.

    Args:
        target: `MODULE:FACTORY` or `path/to/file.py:FACTORY`.

    Raises:
        EstimateError: There is no such module, file or name in it, or it cannot be called; importing it failed.
    """
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise EstimateError(
            f"{target!r} is neither MODULE:FACTORY, nor path/to/file.py:FACTORY, nor a folder with the config.json of a "
            "transformers model, nor that file"
        )
    _refuse_missing_name(where, name.partition(".")[0])
    module = _module(where)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise EstimateError(_missing(value, where, part))
        value = getattr(value, part)
    if isinstance(value, nn.Module):
        raise EstimateError(
            f"{target} is a model already, with memory of its own; name a function that makes one"
        )
    if not callable(value):
        raise EstimateError(
            f"{target} is of {type(value).__name__}; a factory is a function that returns a model"
        )
    factory: Function = value
    return factory


def called(factory: Function, target: str, sizes: Sizes) -> Made:
    """What a factory makes on the meta device.

    It is told `batch_size` and `seq_length` where it has parameters of these names; otherwise its inputs are brought to
    the batch size.

    Raises:
        EstimateError: It takes other arguments, raises, or returns something else.
    """
    told, left = _arguments(factory, target, sizes)
    try:
        with torch.device("meta"):
            returned = factory(**told)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a factory is anybody's code
        hint = ""
        if isinstance(error, NotImplementedError) and "meta" in str(error):
            hint = ". Factories are called on the meta device: leave out what needs numbers, or moves to a device"
        raise EstimateError(f"{target} failed: {raised(error)}{hint}") from None
    made = _read(returned, target)
    if allocated := real(made.model):
        raise EstimateError(
            f"{target} returned a model whose {allocated} has memory of its own. A factory is called on the meta device, "
            "where nothing is allocated: leave out device= and .to(), and load no weights"
        )
    return Made(made.model, resized(made.inputs, target, left), made.optimizer, made.loss)


def real(model: nn.Module) -> str:
    """The first parameter with memory of its own, and its device; empty where there is none."""
    return next((f"{name} on {p.device}" for name, p in model.named_parameters() if not p.is_meta), "")


def resized(inputs: Any, target: str, sizes: Mapping[str, int]) -> Any:
    """Inputs whose first dimension is the batch size.

    Raises:
        EstimateError: Something else is to be changed, or there is nothing to change.
    """
    if "seq_length" in sizes:
        raise EstimateError(
            f"--seq-length is for factories with a parameter seq_length, and {target} has none: which dimension it is cannot "
            "be known"
        )
    if "batch_size" not in sizes:
        return inputs
    if inputs is None:
        raise EstimateError(f"--batch-size needs inputs, and {target} returns none: return (model, inputs)")

    def with_rows(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.ndim == 0:
            return value
        return torch.empty((sizes["batch_size"], *value.shape[1:]), dtype=value.dtype, device="meta")

    return tree_map(with_rows, inputs)


def _refuse_missing_name(where: str, name: str) -> None:
    """Refuse a name that the source does not define, before the source runs, which may be a whole training.

    Raises:
        EstimateError: No top-level statement can define the name.
    """
    try:
        source = _find_source(where).read_text(encoding="utf-8")
        names = symtable.symtable(source, where, "exec").get_symbols()
    except (OSError, ValueError, SyntaxError, ImportError, AttributeError):
        return  # importing it says what is wrong
    defined = {symbol.get_name(): symbol for symbol in names if symbol.is_assigned() or symbol.is_imported()}
    if name in defined or _DYNAMIC.search(source):
        return
    own = [other for other, symbol in defined.items() if symbol.is_namespace() and not other.startswith("_")]
    raise EstimateError(_format_missing(where, name, own, own))


def _find_source(where: str) -> Path:
    if _is_file(where):
        return Path(where)
    # The finder of files, which runs nothing: a package that holds the module would be imported otherwise.
    spec = None if "." in where else importlib.machinery.PathFinder.find_spec(where)
    if spec is None or spec.origin is None:
        raise ImportError(where)
    return Path(spec.origin)


def _is_file(where: str) -> bool:
    return Path(where).suffix == ".py" or "/" in where


def _module(where: str) -> ModuleType:
    path = Path(where)
    is_file = _is_file(where)
    try:
        return _file(path) if is_file else importlib.import_module(where)
    except EstimateError:
        raise
    except ModuleNotFoundError as error:
        if not is_file and error.name and f"{where}.".startswith(f"{error.name}."):
            raise EstimateError(
                f"there is no module {error.name} here ({Path.cwd()}) nor among the installed ones; a file is named as "
                "path/to/file.py:FACTORY"
            ) from None
        raise EstimateError(f"{where} cannot be imported: {raised(error)}") from None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
        raise EstimateError(f"{where} cannot be imported: {raised(error)}") from None


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise EstimateError(f"{path} is no file")
    # Beside it lie the modules it imports, as for a script.
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise EstimateError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _missing(owner: Any, where: str, name: str) -> str:
    offered = [
        other for other in dir(owner) if not other.startswith("_") and callable(getattr(owner, other, None))
    ]
    home = owner.__name__ if isinstance(owner, ModuleType) else None
    # What a module imports is in it too, and no factory of its own.
    own = [other for other in offered if home in {None, getattr(getattr(owner, other), "__module__", None)}]
    return _format_missing(where, name, offered, own)


def _format_missing(where: str, name: str, offered: list[str], own: list[str]) -> str:
    meant = nearest(name, offered)
    hint = f"did you mean {meant}?" if meant else f"it has {', '.join(sorted(own)) or 'no function'}"
    return f"{where} has no {name}; {hint}"


def _arguments(factory: Function, target: str, sizes: Sizes) -> tuple[dict[str, int], dict[str, int]]:
    """What the factory is told, and what it has no parameter for."""
    known = inspect.signature(factory).parameters
    for name, parameter in known.items():
        needed = parameter.default is parameter.empty and parameter.kind not in {
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        }
        if needed and name not in sizes.given:
            own = f"--{name.replace('_', '-')} says it" if name in vars(sizes) else "give it a default"
            raise EstimateError(
                f"{target} needs its argument {name}: {own}. A factory is called with nothing but batch_size and seq_length"
            )
    told = {name: value for name, value in sizes.given.items() if name in known}
    return told, {name: value for name, value in sizes.given.items() if name not in known}


def _read(returned: Any, target: str) -> Made:
    names = [f.name for f in fields(Made)]
    if isinstance(returned, nn.Module):
        return Made(returned)
    if isinstance(returned, Mapping):
        for name in returned:
            if name not in names:
                meant = nearest(str(name), names)
                raise EstimateError(
                    f"{target} returned a dict with {name!r}{f'; did you mean {meant}?' if meant else ''}; it may have "
                    f"{', '.join(names)}"
                )
        parts = dict(returned)
    elif isinstance(returned, tuple) and 1 <= len(returned) <= len(names):
        parts = dict(zip(names, returned, strict=False))
    else:
        parts = {}
    made = Made(parts.pop("model", None), **parts)
    _check(made, returned, target)
    return made


def _check(made: Made, returned: Any, target: str) -> None:
    model: Any = made.model
    if not isinstance(model, nn.Module):
        came = (
            f"{type(returned).__name__} without one"
            if isinstance(returned, (tuple, Mapping))
            else type(returned).__name__
        )
        raise EstimateError(
            f"{target} returned {came}; a factory returns a torch.nn.Module, or a tuple or dict of model, inputs, optimizer "
            "and loss, of which all but the model may be left out"
        )
    optimizes = isinstance(made.optimizer, torch.optim.Optimizer) or callable(made.optimizer)
    if made.optimizer is not None and not optimizes:
        raise EstimateError(
            f"{target} returned {type(made.optimizer).__name__} as optimizer; it is a torch.optim.Optimizer over the model's "
            "parameters, or a function that makes one of them"
        )
    if made.loss is not None and not callable(made.loss):
        raise EstimateError(
            f"{target} returned {type(made.loss).__name__} as loss; it is a function of the model's output"
        )
