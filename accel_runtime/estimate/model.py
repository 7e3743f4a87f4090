"""Find the factory or configuration of a model, and build it on the meta device."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import re
import symtable
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from accel_runtime.env import find_nearest

__all__ = [
    "BatchSizes",
    "EstimateError",
    "ModelSpec",
    "build_from_configuration",
    "call_factory",
    "describe_user_error",
    "find_factory",
    "is_configuration",
]

Function = Callable[..., Any]
_DYNAMIC = re.compile(
    r"\b(globals|vars|locals|exec|setattr|__dict__|__getattr__|global)\b|\bimport\s*\(?\s*\*"
)
"""Words in a source that may define names dynamically."""


@dataclass(frozen=True)
class BatchSizes:
    """Batch size and sequence length on each device; None uses those of the factory."""

    batch_size: int | None = None
    seq_length: int | None = None

    @property
    def as_arguments(self) -> dict[str, int]:
        """Sizes that were set."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class ModelSpec:
    """Result of a factory; the field names are its dict keys."""

    model: nn.Module
    inputs: Any = None
    """Batch of one device: a tensor, a tuple of arguments, or a mapping of keyword arguments."""
    optimizer: torch.optim.Optimizer | Function | None = None
    """Optimizer over the parameters of the model, or a function that creates one."""
    loss: Function | None = None
    """Function from the model's output to a loss."""


def find_factory(target: str) -> Function:
    """Return the factory `MODULE:NAME` or `path/to/file.py:NAME`."""
    source, _, name = target.rpartition(":")
    if not source or not name:
        raise EstimateError(
            f"Invalid target {target!r}: expected MODULE:FACTORY, path/to/file.py:FACTORY, or the config.json of a "
            "transformers model or its directory."
        )
    _check_name_exists(source, name.partition(".")[0])
    module = _import_target(source)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise EstimateError(_describe_missing(value, source, part))
        value = getattr(value, part)
    if isinstance(value, nn.Module):
        raise EstimateError(f"{target} is a model with memory. Name a function that creates one.")
    if not callable(value):
        raise EstimateError(
            f"{target} is of type {type(value).__name__}, not a function. Name a function that returns a model."
        )
    factory: Function = value
    return factory


def call_factory(factory: Function, target: str, sizes: BatchSizes) -> ModelSpec:
    """Call a factory on the meta device.

    `batch_size` and `seq_length` are passed if it has such parameters; otherwise its inputs are resized to the batch
    size.
    """
    arguments, other_sizes = _select_arguments(factory, target, sizes)
    try:
        with torch.device("meta"):
            returned = factory(**arguments)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code
        hint = ""
        if isinstance(error, NotImplementedError) and "meta" in str(error):
            hint = ". Factories are called on the meta device: do not use values or move to a device"
        raise EstimateError(f"{target} failed: {describe_user_error(error)}{hint}") from None
    spec = _parse_result(returned, target)
    if allocated := find_real_parameter(spec.model):
        raise EstimateError(
            f"{target} returned a model whose {allocated} has memory. A factory is called on the meta device, where nothing "
            "is allocated: remove device= and .to(), and do not load weights."
        )
    return ModelSpec(spec.model, resize_inputs(spec.inputs, target, other_sizes), spec.optimizer, spec.loss)


def find_real_parameter(model: nn.Module) -> str:
    """Return name and device of the first parameter with memory; or an empty string."""
    return next((f"{name} on {p.device}" for name, p in model.named_parameters() if not p.is_meta), "")


def resize_inputs(inputs: Any, target: str, sizes: Mapping[str, int]) -> Any:
    """Return inputs with the batch size as their first dimension."""
    if "seq_length" in sizes:
        raise EstimateError(
            f"--seq-length is for factories with a parameter seq_length, and {target} does not have one. Add the parameter."
        )
    if "batch_size" not in sizes:
        return inputs
    if inputs is None:
        raise EstimateError(f"--batch-size needs inputs, and {target} returns none. Return (model, inputs).")

    def with_rows(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.ndim == 0:
            return value
        return torch.empty((sizes["batch_size"], *value.shape[1:]), dtype=value.dtype, device="meta")

    return tree_map(with_rows, inputs)


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


def _import_target(target: str) -> ModuleType:
    path = Path(target)
    is_file = _is_file(target)
    try:
        return _import_file(path) if is_file else importlib.import_module(target)
    except EstimateError:
        raise
    except ModuleNotFoundError as error:
        if not is_file and error.name and f"{target}.".startswith(f"{error.name}."):
            raise EstimateError(
                f"Module {error.name} not found in {Path.cwd()} or the installed packages. Name a file as "
                "path/to/file.py:FACTORY."
            ) from None
        raise EstimateError(f"{target} cannot be imported: {describe_user_error(error)}") from None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code
        raise EstimateError(f"{target} cannot be imported: {describe_user_error(error)}") from None


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise EstimateError(f"File not found: {path}")
    # Its directory is on the path, as for a script.
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise EstimateError(f"Not a Python file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _describe_missing(owner: Any, target: str, name: str) -> str:
    offered = [
        other for other in dir(owner) if not other.startswith("_") and callable(getattr(owner, other, None))
    ]
    module = owner.__name__ if isinstance(owner, ModuleType) else None
    # Without imported names.
    defined = [
        other for other in offered if module in {None, getattr(getattr(owner, other), "__module__", None)}
    ]
    return _format_missing(target, name, offered, defined)


def _format_missing(target: str, name: str, offered: list[str], defined: list[str]) -> str:
    nearest = find_nearest(name, offered)
    hint = f"did you mean {nearest}?" if nearest else f"it has {', '.join(sorted(defined)) or 'no function'}"
    return f"{target} has no {name}; {hint}"


def _select_arguments(
    factory: Function, target: str, sizes: BatchSizes
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the sizes that a factory accepts, and the others."""
    parameters = inspect.signature(factory).parameters
    for name, parameter in parameters.items():
        needed = parameter.default is parameter.empty and parameter.kind not in {
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        }
        if needed and name not in sizes.as_arguments:
            cure = f"Set --{name.replace('_', '-')}" if name in vars(sizes) else "Give it a default"
            raise EstimateError(
                f"{target} needs the argument {name}. {cure}: a factory is called with batch_size and seq_length only."
            )
    accepted = {name: value for name, value in sizes.as_arguments.items() if name in parameters}
    return accepted, {name: value for name, value in sizes.as_arguments.items() if name not in parameters}


def _parse_result(returned: Any, target: str) -> ModelSpec:
    names = [f.name for f in fields(ModelSpec)]
    if isinstance(returned, nn.Module):
        return ModelSpec(returned)
    if isinstance(returned, Mapping):
        for name in returned:
            if name not in names:
                nearest = find_nearest(str(name), names)
                raise EstimateError(
                    f"{target} returned a dict with {name!r}{f'; did you mean {nearest}?' if nearest else ''}; allowed keys are "
                    f"{', '.join(names)}"
                )
        parts = dict(returned)
    elif isinstance(returned, tuple) and 1 <= len(returned) <= len(names):
        parts = dict(zip(names, returned, strict=False))
    else:
        parts = {}
    spec = ModelSpec(parts.pop("model", None), **parts)
    _check_spec(spec, returned, target)
    return spec


def _check_spec(spec: ModelSpec, returned: Any, target: str) -> None:
    model: Any = spec.model
    if not isinstance(model, nn.Module):
        description = (
            f"{type(returned).__name__} without one"
            if isinstance(returned, (tuple, Mapping))
            else type(returned).__name__
        )
        raise EstimateError(
            f"{target} returned {description}. Return a torch.nn.Module, or a tuple or dict of model and optional inputs, "
            "optimizer and loss."
        )
    optimizes = isinstance(spec.optimizer, torch.optim.Optimizer) or callable(spec.optimizer)
    if spec.optimizer is not None and not optimizes:
        raise EstimateError(
            f"{target} returned {type(spec.optimizer).__name__} as optimizer. Return a torch.optim.Optimizer over the model's "
            "parameters, or a function that creates one from them."
        )
    if spec.loss is not None and not callable(spec.loss):
        raise EstimateError(
            f"{target} returned {type(spec.loss).__name__} as loss. Return a function of the model's output."
        )


_DEFAULT_BATCH = 1
_MAX_LENGTH = 2048
"""Default limit of the sequence length."""
_PER_TOKEN = (
    "CausalLM",
    "MaskedLM",
    "ConditionalGeneration",
    "LMHeadModel",
    "TokenClassification",
    "PreTraining",
)
_PER_SAMPLE = ("SequenceClassification", "ImageClassification", "MultipleChoice")


def is_configuration(target: str) -> bool:
    """Return whether a target is a configuration on disk and not a factory."""
    path = Path(target)
    return path.is_dir() or path.suffix == ".json"


def build_from_configuration(target: str, sizes: BatchSizes) -> ModelSpec:
    """Build the model of a `config.json` of transformers on the meta device, and a batch for it.

    The defaults are one sample, and the longest sequence up to 2048 tokens.
    """
    path = Path(target)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise EstimateError(f"File not found: {file}. A transformers model is described by its config.json.")
    if importlib.util.find_spec("transformers") is None:
        raise EstimateError(
            f"{file} is a configuration of transformers, which is not installed. Run: python -m pip install transformers"
        )
    transformers: Any = importlib.import_module("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(file), local_files_only=True, trust_remote_code=False
        )
        with torch.device("meta"):
            model = _find_class(transformers, config)(config)
    except Exception as error:  # noqa: BLE001 - transformers raises many types
        raise EstimateError(
            f"{file}: transformers could not build the model: {describe_user_error(error)}"
        ) from None
    return ModelSpec(model, _build_batch(model, config, sizes))


def _find_class(transformers: Any, config: Any) -> Any:
    """Return the class that the configuration names, else the usual one for training."""
    for name in config.architectures or ():
        model_class: Any = getattr(transformers, name, None)
        if isinstance(model_class, type) and hasattr(model_class, "_from_config"):
            return model_class._from_config  # noqa: SLF001 - the only way from a configuration to the class itself
    causal_models = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return (
        transformers.AutoModelForCausalLM if type(config) in causal_models else transformers.AutoModel
    ).from_config


def _build_batch(model: Any, config: Any, sizes: BatchSizes) -> dict[str, torch.Tensor] | None:
    """Return a batch, with labels if the model computes a loss; None for unknown kinds of input."""
    batch_size, class_name = sizes.batch_size or _DEFAULT_BATCH, type(model).__name__
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if model.main_input_name == "input_ids":
        longest = getattr(text_config, "max_position_embeddings", None) or _MAX_LENGTH
        length = sizes.seq_length or min(longest, _MAX_LENGTH)
        batch = {"input_ids": _empty_integers(batch_size, length)}
        labels = (batch_size, length) if class_name.endswith(_PER_TOKEN) else (batch_size,)
    elif model.main_input_name == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        image_size = config.image_size
        batch = {
            "pixel_values": torch.empty(
                batch_size, getattr(config, "num_channels", 3), image_size, image_size, device="meta"
            )
        }
        labels = (batch_size,)
    else:
        return None
    if class_name.endswith((*_PER_TOKEN, *_PER_SAMPLE)):
        batch["labels"] = _empty_integers(*labels)
    return batch


def _empty_integers(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.long, device="meta")


_PACKAGE = str(Path(__file__).parent.parent)


class EstimateError(Exception):
    """A model cannot be estimated; the message tells why and what to do."""


def describe_user_error(error: BaseException) -> str:
    """Describe an exception of user code, with the last line that is not in a library."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", _PACKAGE))
    ]
    libraries = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
    user_frames = [frame for frame in frames if not frame.filename.startswith(libraries)] or frames
    location = f"{user_frames[-1].filename}:{user_frames[-1].lineno}: " if user_frames else ""
    message = str(error).strip().split("\n")[0]
    return f"{location}{type(error).__name__}{': ' if message else ''}{message}"
