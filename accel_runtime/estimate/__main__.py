"""Child process of `accel estimate`: build a model on the meta device, and print its layouts as one line of JSON."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import os
import re
import symtable
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from accel_runtime.environment.installation import format_install
from accel_runtime.environment.settings import find_nearest
from accel_runtime.estimate.memory import (
    DTYPES,
    Activations,
    Estimate,
    EstimateError,
    Formats,
    ModelSpec,
    ParallelLayout,
    Parameter,
    Shape,
    TensorParallelPlan,
    Usage,
    build_optimizer,
    compute_usage,
    describe_user_error,
    list_splits,
    list_variants,
    local_shape,
    measure_activations,
    measure_state,
    read_plan,
)
from accel_runtime.estimate.zero import ZeroUsage, compute_zero
from accel_runtime.foundation.torch_internals import tree_leaves_with_path, tree_map
from accel_runtime.parallel.fsdp_units import Units, find_units, innermost_units
from accel_runtime.parallel.tensor_parallel import check_divisibility
from accel_runtime.storage.file_system import parse_size

__all__ = [
    "answer_request",
    "build_from_configuration",
    "call_factory",
    "estimate_layouts",
    "find_factory",
    "is_configuration",
]

Sizes = Mapping[str, int]
"""`batch_size` and `seq_length` on each device, as far as they are given."""


def answer_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return all layouts, which of them fit, and the recommended ones, for the options of `accel estimate`."""
    target, devices = request["target"], request["devices"]
    try:
        memory = None if request["memory"] is None else parse_size(request["memory"], "--memory")
    except ValueError as error:
        raise EstimateError(str(error)) from None
    usable = None if memory is None else memory * (100 - request["headroom"]) // 100
    sizes = {name: request[name] for name in ("batch_size", "seq_length") if request[name] is not None}
    if is_configuration(target):
        spec = build_from_configuration(target, sizes)
    else:
        spec = call_factory(find_factory(target), target, sizes)
    if request["dtype"]:
        spec.model.to(DTYPES[request["dtype"]])
    spec.model.train()
    if not request["activations"]:
        spec = replace(spec, inputs=None)
    choices = {name: request[name] for name in ("devices", "mixed_precision", "wrap", "optimizer")}
    result = estimate_layouts(spec, **choices)
    parameters = list(spec.model.parameters())
    return {
        "model": type(spec.model).__name__,
        "parameters": sum(p.numel() for p in parameters),
        "trained": sum(p.numel() for p in parameters if p.requires_grad),
        "optimizer": result.optimizer,
        "mixed_precision": request["mixed_precision"],
        "wrap": request["wrap"],
        "wrapped": [name for name, _ in result.units],
        "inputs": _format_shapes(spec.inputs),
        "left_out": [{"tp": tp, "why": why} for tp, why in result.left_out.items()],
        "zero": [asdict(each) for each in result.zero],
        "devices": devices,
        "memory": memory,
        "usable": usable,
    } | _select_layouts(result, devices, usable)


def _select_layouts(result: EstimateResult, devices: int, usable: int | None) -> dict[str, Any]:
    """Return all layouts, and the indices of those to show and to recommend."""
    estimates = result.estimates

    def fits(index: int) -> bool:
        return usable is None or estimates[index].usage.total <= usable

    def total(index: int) -> int:
        return estimates[index].usage.total

    def least_divided(indices: Iterable[int]) -> int | None:
        return min(filter(fits, indices), key=lambda index: estimates[index].layout.division, default=None)

    on_all_devices = [index for index, each in enumerate(estimates) if each.layout.devices == devices]
    fewest = min((each.layout.devices for index, each in enumerate(estimates) if fits(index)), default=0)
    splits: dict[tuple[int, int], list[int]] = {}
    for index in on_all_devices:
        layout = estimates[index].layout
        splits.setdefault((layout.dp_shard, layout.tp), []).append(index)
    shown = []
    for indices in splits.values():
        best = least_divided(indices)
        shown.append(min(indices, key=total) if best is None else best)
    return {
        "layouts": [_describe_estimate(each, fits=fits(index)) for index, each in enumerate(estimates)],
        "shown": shown,
        "best": least_divided(on_all_devices),
        "fewest": least_divided(
            index for index, each in enumerate(estimates) if each.layout.devices == fewest
        ),
        "leanest": min(on_all_devices, key=total),
    }


def _describe_estimate(estimate: Estimate, *, fits: bool) -> dict[str, Any]:
    sizes = {**asdict(estimate.usage), "total": estimate.usage.total}
    return {**asdict(estimate.layout), "devices": estimate.layout.devices, "bytes": sizes, "fits": fits}


@dataclass(frozen=True)
class EstimateResult:
    """Memory usage of a model in every layout."""

    units: Units
    estimates: list[Estimate]
    """Layouts for every number of devices that divides the requested one."""
    left_out: dict[int, str]
    """Reasons for impossible values of `tp`."""
    optimizer: str
    """Class name of the optimizer."""
    zero: list[ZeroUsage]
    """Memory under the stages of ZeRO."""


def estimate_layouts(
    spec: ModelSpec, *, devices: int, mixed_precision: str, wrap: str, optimizer: str | None
) -> EstimateResult:
    """Estimate every layout on every number of devices that divides `devices`.

    `wrap` is as in `FullyShard.wrap`; `optimizer` is a name, or None for that of the factory, else AdamW.
    """
    try:
        units = find_units(spec.model, wrap)
    except ValueError as error:
        raise EstimateError(str(error).replace("fully_shard.wrap", "--wrap")) from None
    model = _MeasuredModel(spec, units, DTYPES.get(mixed_precision), optimizer)
    left_out: dict[int, str] = {}
    estimates = []
    for count in (n for n in range(1, devices + 1) if devices % n == 0):
        for split in list_splits(count):
            tp = split[2]
            if tp not in left_out and (reason := model.find_obstacle(tp)):
                left_out[tp] = reason
            if tp not in left_out:
                # Activation checkpointing needs wrapped modules.
                estimates += [
                    Estimate(layout, model.compute_usage(layout))
                    for layout in list_variants(split)
                    if units or not layout.activation_checkpointing
                ]
    zero = compute_zero(model.optimizer, spec.model, devices, half=mixed_precision != "no")
    return EstimateResult(units, estimates, left_out, type(model.optimizer).__name__, zero)


class _MeasuredModel:
    """A model whose optimizer state and activations are measured once for all layouts that share them."""

    def __init__(
        self, spec: ModelSpec, units: Units, compute_dtype: torch.dtype | None, optimizer: str | None
    ) -> None:
        self._spec, self._units, self._compute_dtype = spec, units, compute_dtype
        self._plan = read_plan(spec.model)
        self._named = dict(spec.model.named_parameters())
        self._parameters = self._describe_parameters()
        half = {p for p in self._named.values() if p.dtype in {torch.bfloat16, torch.float16}}
        self._trains_half = any(p.requires_grad for p in half)
        self.optimizer = build_optimizer(spec.model, optimizer or spec.optimizer or "adamw")
        self._buffers = sum(buffer.untyped_storage().nbytes() for buffer in spec.model.buffers())
        self._state = cache(self._measure_state)
        self._activations: Callable[[int, bool], Activations | None] = cache(self._measure_activations)

    def _describe_parameters(self) -> list[Parameter]:
        """Return the parameters for the arithmetic; an inner module gathers its own parameters."""
        unit_of: dict[int, int] = {}
        for index, (_, module) in enumerate(self._units):
            for parameter in module.parameters():
                unit_of.setdefault(id(parameter), index)
        dims = self._plan.dims if isinstance(self._plan, TensorParallelPlan) else {}
        return [
            Parameter(
                tuple(p.shape),
                p.element_size(),
                p.requires_grad,
                p.is_floating_point(),
                unit_of.get(id(p)),
                dims.get(name),
            )
            for name, p in self._named.items()
        ]

    def find_obstacle(self, tp: int) -> str:
        """Return the reason that `tp` devices cannot shard the layers, or an empty string."""
        if tp == 1:
            return ""
        if isinstance(self._plan, str):
            return self._plan
        try:
            check_divisibility(self._spec.model, tp, self._plan.styles)
            self._activations(tp, False)
        except ValueError as error:
            return str(error)
        except EstimateError as error:
            return f"with sharded layers {error}"
        return ""

    def compute_usage(self, layout: ParallelLayout) -> Usage:
        """Return the memory usage of a layout."""
        size = self._compute_dtype.itemsize if self._compute_dtype else None
        return compute_usage(
            self._parameters,
            layout,
            Formats(size, 4 if size or self._trains_half else None),
            optimizer=self._state(tuple(local_shape(p, layout) for p in self._parameters)),
            buffers=self._buffers,
            activations=self._activations(layout.tp, layout.sharded and self._compute_dtype is not None),
        )

    def _measure_state(self, shapes: tuple[Shape, ...]) -> int:
        return measure_state(self.optimizer, dict(zip(self._named.values(), shapes, strict=True)))

    def _measure_activations(self, tp: int, gathered: bool) -> Activations | None:
        if self._spec.inputs is None:
            return None
        return measure_activations(
            self._spec,
            [module for _, module in innermost_units(self._units)],
            autocast=self._compute_dtype,
            gathered=self._compute_dtype if gathered else None,
            tp=tp,
            plan=self._plan if isinstance(self._plan, TensorParallelPlan) and tp > 1 else None,
        )


def _format_shapes(inputs: Any) -> list[str]:
    """Format the shapes of a batch."""
    leaves = [
        ("".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path), leaf)
        for path, leaf in tree_leaves_with_path(inputs)
    ]
    return [f"{name} {list(leaf.shape)}".strip() for name, leaf in leaves if isinstance(leaf, torch.Tensor)]


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
            f"Invalid target {target!r}: expected MODULE:FACTORY, path/to/file.py:FACTORY, or the config.json of a "
            "transformers model or its directory."
        )
    _check_name_exists(source, name.partition(".")[0])
    value: Any = _import_target(source)
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


def _import_target(target: str) -> ModuleType:
    is_file = _is_file(target)
    try:
        return _import_file(Path(target)) if is_file else importlib.import_module(target)
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


def build_from_configuration(target: str, sizes: Sizes) -> ModelSpec:
    """Build the model of a `config.json` of transformers on the meta device, and a batch for it.

    The defaults are one sample, and the longest sequence up to 2048 tokens.
    """
    path = Path(target)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise EstimateError(f"File not found: {file}. A transformers model is described by its config.json.")
    if importlib.util.find_spec("transformers") is None:
        raise EstimateError(
            f"{file} is a configuration of transformers, which is not installed. Run: {format_install('transformers')}"
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
    with torch.device("meta"):
        return ModelSpec(model, _build_batch(model, config, sizes))


def _find_class(transformers: Any, config: Any) -> Any:
    """Return the class that the configuration names, else the usual one for training."""
    for name in config.architectures or ():
        model_class: Any = getattr(transformers, name, None)
        if isinstance(model_class, type) and hasattr(model_class, "_from_config"):
            return model_class._from_config  # noqa: SLF001 - the only way from a configuration to the class itself
    is_causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return (transformers.AutoModelForCausalLM if is_causal else transformers.AutoModel).from_config


def _build_batch(model: Any, config: Any, sizes: Sizes) -> dict[str, torch.Tensor] | None:
    """Return a batch, with labels if the model computes a loss; None for unknown kinds of input."""
    rows, class_name = sizes.get("batch_size", 1), type(model).__name__
    if "seq_length" in sizes and model.main_input_name != "input_ids":
        raise EstimateError(
            f"--seq-length has no effect on {class_name}: its input {model.main_input_name} has no tokens. Leave it out."
        )
    labels: tuple[int, ...] = (rows,)
    if model.main_input_name == "input_ids":
        text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
        longest = getattr(text_config, "max_position_embeddings", None) or _MAX_LENGTH
        length = sizes.get("seq_length", min(longest, _MAX_LENGTH))
        batch = {"input_ids": torch.empty(rows, length, dtype=torch.long)}
        if class_name.endswith(_PER_TOKEN):
            labels = (rows, length)
    elif model.main_input_name == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        size = config.image_size
        batch = {"pixel_values": torch.empty(rows, getattr(config, "num_channels", 3), size, size)}
    elif "batch_size" in sizes:
        raise EstimateError(
            f"--batch-size has no effect on {class_name}: no batch is known for its input {model.main_input_name}. Leave it "
            "out, or write a factory that returns (model, inputs)."
        )
    else:
        return None
    if class_name.endswith((*_PER_TOKEN, *_PER_SAMPLE)):
        batch["labels"] = torch.empty(labels, dtype=torch.long)
    return batch


def _run(text: str) -> int:
    # Output of factories goes to stderr, the answer to the pipe.
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        answer: dict[str, Any] = {"result": answer_request(json.loads(text))}
    except EstimateError as error:
        answer = {"error": str(error)}
    with pipe:
        pipe.write(json.dumps(answer))
    return 0 if "result" in answer else 2


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1]))
