"""Tensor parallelism: the plan, its checks, and its application."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from typing_extensions import override

from accel_runtime.environment.settings import find_nearest
from accel_runtime.foundation.torch_internals import is_compiled
from accel_runtime.parallel.dtensor import is_sharded_by_tp, local_shard
from accel_runtime.parallel.fsdp_units import matches_pattern
from accel_runtime.storage.errors import format_names

__all__ = [
    "STYLE_NAMES",
    "apply_tensor_parallel",
    "check_divisibility",
    "check_replicated_gradients",
    "has_sharded_output",
    "plan_tensor_parallel",
    "sharded_dimensions",
]


Plan = Mapping[str, ParallelStyle]
"""The parallel style of each module in a plan, by its qualified name."""


def plan_tensor_parallel(model: nn.Module, tp_plan: tuple[tuple[str, str], ...] = ()) -> Plan:
    """Return the style of each module in the plan; nothing is changed yet.

    Args:
        model: The model of the script.
        tp_plan: Patterns and styles of the profile; if empty, the model's own plan is used: its `tp_plan`, as in transformers,
            or such an attribute of a module in it.

    Raises:
        ValueError: There is no plan, or it has an unknown module, one module twice, or an unknown style.
    """
    if tp_plan:
        return _resolve_entries(model, tp_plan, "tp_plan", strict=True)
    entries = tuple(_find_own_plans(model))
    if not entries:
        raise ValueError(
            f"parallel.tp needs a plan: {type(model).__name__} has no tp_plan of its own. Set one in the profile, for example "
            "parallel.tp_plan: {layers.*.up: colwise, layers.*.down: rowwise}."
        )
    return _resolve_entries(model, entries, f"the plan of {type(model).__name__}", strict=False)


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    """Shard the modules of a plan over `mesh` in place; other modules are replicated.

    Tied parameters stay tied. All ranks of `mesh` share the random state from here on, so dropout on replicated activations
    is equal.

    Args:
        model: A model with equal values on all ranks of `mesh`.
        mesh: The tensor parallel ranks.
        plan: The result of `plan_tensor_parallel`.
    """
    check_divisibility(model, mesh.size(), plan)
    _refuse_compiled_embeddings(model, plan)
    tied_names, requires_grad = _find_tied(model), {n: p.requires_grad for n, p in model.named_parameters()}
    for name, style in plan.items():
        # src_data_rank=None, since all ranks have the same values.
        parallelize_module(model.get_submodule(name), mesh, style, src_data_rank=None)
    for first, *others in tied_names:
        for name in others:
            path, _, attribute = name.rpartition(".")
            model.get_submodule(path).register_parameter(attribute, model.get_parameter(first))
    for name, parameter in model.named_parameters():
        # torch's SequenceParallel replaces parameters by trainable ones.
        parameter.requires_grad_(requires_grad[name])
        if isinstance(parameter, DTensor) and requires_grad[name]:
            parameter.register_hook(partial(_redistribute, parameter.placements))  # type: ignore[no-untyped-call]
    _share_rng_state(mesh)


def _refuse_compiled_embeddings(model: nn.Module, plan: Plan) -> None:
    """Raise ValueError if an embedding whose rows are sharded is compiled: torch keeps its mask from one tracing to the next."""
    for name, style in plan.items():
        module = model.get_submodule(name)
        if not isinstance(module, nn.Embedding) or sharded_dimensions(module, style).get("weight") != 0:
            continue
        parts = name.split(".")
        around = [model.get_submodule(".".join(parts[:length])) for length in range(len(parts) + 1)]
        if any(map(is_compiled, around)):
            raise ValueError(
                f"Cannot compile {type(model).__name__}: torch cannot trace {name}, whose rows tensor parallelism shards "
                "(embedding_rowwise). Set its style to embedding_colwise in parallel.tp_plan, or remove it from the plan."
            )


def _find_own_plans(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the entries of the outermost plans in a model that name a module below them.

    A wrapper, such as a PeftModel, has the attributes of the model that it wraps, and other names of modules.
    """
    modules = dict(model.named_modules())
    prefixes: list[str] = []
    entries: list[tuple[str, Any]] = []
    unmatched: list[tuple[str, Any]] = []
    for name, module in modules.items():
        plan = None if any(name.startswith(prefix) for prefix in prefixes) else _plan_in(module)
        if not plan:
            continue
        prefix = f"{name}." if name else ""
        own = [(prefix + pattern, style) for pattern, style in plan.items()]
        if any(matches_pattern(pattern, other) for pattern, _ in own for other in modules):
            prefixes.append(prefix)
            entries += own
        else:
            unmatched += own
    return entries or unmatched


def _plan_in(module: nn.Module) -> Mapping[str, Any] | None:
    config = getattr(module, "config", None)
    plans = (getattr(module, name, None) for name in ("tp_plan", "_tp_plan"))
    candidates = (*plans, getattr(config, "base_model_tp_plan", None))
    return next((plan for plan in candidates if plan and isinstance(plan, Mapping)), None)


def _resolve_entries(
    model: nn.Module, entries: tuple[tuple[str, Any], ...], source: str, *, strict: bool
) -> Plan:
    """Return the entries by module; with `strict`, each must match one."""
    modules = dict(model.named_modules())
    wrappers = _wrapper_prefixes(model) if strict else [""]
    plan: dict[str, ParallelStyle] = {}
    given: dict[str, Any] = {}
    for pattern, style in entries:
        matches = (
            [name for name in modules if name and matches_pattern(prefix + pattern, name)]
            for prefix in wrappers
        )
        names = next(filter(None, matches), [])
        if strict and not names:
            raise ValueError(
                f"{source}: {pattern} matches no module of {type(model).__name__}{_suggest(pattern, modules)}"
            )
        for name in names:
            if type(modules.get(name.rpartition(".")[0])) is nn.MultiheadAttention:
                raise ValueError(
                    f"{source}: {name} cannot be sharded: nn.MultiheadAttention computes it itself"
                )
            try:
                styles = _layer_styles(name, modules[name], style)
            except ValueError as error:
                raise ValueError(f"{source}: {name}: {error}") from None
            for layer, layer_style in styles.items():
                if layer in plan:
                    raise ValueError(f"{source}: {layer} is named twice, by {given[layer]} and by {style}")
                given[layer], plan[layer] = style, layer_style
    if not plan:
        raise ValueError(f"{source} names no module that {type(model).__name__} has")
    return plan


def _wrapper_prefixes(model: nn.Module) -> list[str]:
    """Return the prefixes of the names below wrappers: modules with parameters in one child only."""
    prefixes = [""]
    while not any(True for _ in model.parameters(recurse=False)):
        children = [item for item in model.named_children() if any(True for _ in item[1].parameters())]
        if len(children) != 1:
            break
        name, model = children[0]
        prefixes.append(f"{prefixes[-1]}{name}.")
    return prefixes


_LORA_PART = re.compile(r"\.(base_layer|original_module|(lora_A|lora_B|modules_to_save)\.[^.]+)$")
"""The end of the name of a layer that peft has put into one of its own."""


def _layer_styles(name: str, module: nn.Module, style: Any) -> dict[str, ParallelStyle]:
    """Return the style of a module by its name, or those of the layers that peft has put into it.

    With B(A(x)), the product of the input and two matrices, B has the outputs of the layer, and A its inputs: B is sharded like
    a layer with sharded outputs, A like one with sharded inputs, and the other one is replicated.
    """
    base, copies = getattr(module, "base_layer", None), getattr(module, "modules_to_save", None)
    original = getattr(module, "original_module", None)
    if isinstance(original, nn.Module) and isinstance(copies, nn.ModuleDict):
        layers = {f"{name}.original_module": original}
        layers |= {f"{name}.modules_to_save.{adapter}": layer for adapter, layer in copies.items()}
        return {layer: _to_style(style, module) for layer, module in layers.items()}
    if not isinstance(base, nn.Module):
        return {name: _to_style(style, module)}
    parsed = _to_style(style, base)
    if isinstance(parsed, _Replicated):
        return {name: parsed}
    adapters = [getattr(module, part, None) for part in ("lora_A", "lora_B")]
    if any(not isinstance(adapter, nn.ModuleDict) for adapter in adapters):
        raise ValueError(
            f"{type(module).__module__}.{type(module).__name__} is an adapter that cannot be sharded. Use LoRA, or remove the module "
            "from the plan."
        )
    if getattr(module, "lora_variant", None) or getattr(module, "lora_magnitude_vector", None):
        raise ValueError(
            "a variant of LoRA, such as DoRA, computes with full weights and cannot be sharded. Use LoRA without variants, or "
            "remove the module from the plan."
        )
    styles = {f"{name}.base_layer": parsed}
    if isinstance(base, nn.Embedding):
        # The matrices are parameters of the layer, which are added to a full output.
        is_supported = not has_sharded_output(parsed)
    else:
        is_colwise = isinstance(parsed, ColwiseParallel)
        outer_layouts = getattr(parsed, "input_layouts" if is_colwise else "output_layouts", None)
        is_supported = outer_layouts == (Replicate(),)
        part = "lora_B" if is_colwise else "lora_A"
        styles |= {f"{name}.{part}.{adapter}": copy(parsed) for adapter in adapters[is_colwise] or ()}
    if not is_supported:
        raise ValueError(
            f"{style} cannot be applied to a layer with LoRA. Use colwise, rowwise or their variants, or remove the module from the "
            "plan."
        )
    return styles


def _to_style(style: Any, module: nn.Module) -> ParallelStyle:
    return style if isinstance(style, ParallelStyle) else parse_style(str(style), module)


def _suggest(pattern: str, modules: Mapping[str, nn.Module]) -> str:
    leaf = pattern.rpartition(".")[2]
    similar = sorted(
        {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in modules if name.rpartition(".")[2] == leaf}
    )
    return f"; did you mean {' or '.join(similar[:3])}?" if similar else ""


def _find_tied(model: nn.Module) -> list[list[str]]:
    """Return the names of every parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [several for several in names.values() if len(several) > 1]


def _redistribute(placements: tuple[Placement, ...], gradient: torch.Tensor) -> torch.Tensor:
    """Redistribute a gradient like its parameter, and reduce partial sums."""
    assert isinstance(gradient, DTensor)
    return gradient.redistribute(placements=placements)


def _share_rng_state(mesh: DeviceMesh) -> None:
    """Broadcast the random state of the first rank of a mesh."""
    others = () if mesh.device_type == "cpu" else (torch.get_device_module(mesh.device_type),)
    for generator in (torch, *others):
        state = generator.get_rng_state().to(mesh.device_type)
        dist.broadcast(state, group=mesh.get_group(), group_src=0)
        generator.set_rng_state(state.cpu())


class _Replicated(ParallelStyle):
    """Replicate the module."""

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module


class _Sequential(ParallelStyle):
    """Apply several styles in order."""

    def __init__(self, styles: Sequence[ParallelStyle]) -> None:
        self._styles = tuple(styles)

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for style in self._styles:
            parallelize_module(module, device_mesh, style, src_data_rank=self.src_data_rank)
        return module


def _sequence_parallel() -> ParallelStyle:
    # Without the wrappers, torch's style expects a sharded sequence, and sums gradients that are complete.
    sharded, replicated = Shard(1), Replicate()
    return _Sequential(
        [
            PrepareModuleInput(input_layouts=(replicated,), desired_input_layouts=(sharded,)),
            SequenceParallel(),
            PrepareModuleOutput(output_layouts=(sharded,), desired_output_layouts=(replicated,)),
        ]
    )


_colwise_gathered = partial(ColwiseParallel, output_layouts=Replicate())
_rowwise_replicated_input = partial(RowwiseParallel, input_layouts=Replicate())
STYLE_NAMES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": _colwise_gathered,
    "colwise_rep": _colwise_gathered,
    "embedding_colwise": _colwise_gathered,
    "embedding_rowwise": _rowwise_replicated_input,
    "replicate": _Replicated,
    # Between colwise and rowwise, the input is sharded by heads; any dimension but the last works for a norm.
    "replicated_with_grad_allreduce": partial(SequenceParallel, sequence_dim=0, use_local_output=True),
    "rowwise": RowwiseParallel,
    "rowwise_rep": _rowwise_replicated_input,
    "rowwise_split_input": _rowwise_replicated_input,
    "sequence_parallel": _sequence_parallel,
}
"""The styles of a plan, named as in transformers."""

_CLASSES = {
    "ColwiseParallel": "colwise",
    "RowwiseParallel": "rowwise",
    "SequenceParallel": "sequence_parallel",
}
_UNSUPPORTED = (
    "all_reduce", "gather", "local", "local_colwise", "local_packed_rowwise", "local_params", "local_rowwise",
    "mla_kv_a_proj", "moe_identity_expert", "moe_tp_experts", "packed_colwise", "packed_rowwise",
)  # fmt: skip


def parse_style(word: str, module: nn.Module) -> ParallelStyle:
    """Return the parallel style of a name; raise ValueError if the module does not support it."""
    word = _CLASSES.get(word, word)
    if word in _UNSUPPORTED:
        raise ValueError(
            f"{word!r} is a style of transformers for experts or fused weights. Set tp_plan in the profile without it."
        )
    if word not in STYLE_NAMES:
        suggestion = find_nearest(word, [*STYLE_NAMES, *_CLASSES])
        hint = f"did you mean {suggestion}?" if suggestion else f"styles are {', '.join(STYLE_NAMES)}"
        raise ValueError(f"unknown style {word!r}; {hint}")
    if word.startswith("embedding_") and not isinstance(module, nn.Embedding):
        raise ValueError(f"{word} needs an nn.Embedding, but the module is a {type(module).__name__}")
    if "wise" in word and not isinstance(module, (nn.Linear, nn.Embedding)):
        raise ValueError(
            f"{word} needs an nn.Linear or nn.Embedding, but the module is a {type(module).__name__}"
        )
    # Indices, the input of an embedding, are never sharded.
    return STYLE_NAMES[
        "embedding_rowwise" if word == "rowwise" and isinstance(module, nn.Embedding) else word
    ]()


def sharded_dimensions(module: nn.Module, style: ParallelStyle) -> dict[str, int]:
    """Return the parameters of a module that a style shards, with the dimension of each."""
    if isinstance(style, ColwiseParallel):
        dimension = 1 if isinstance(module, nn.Embedding) else 0
        return {name: dimension for name, _ in module.named_parameters(recurse=False)}
    if isinstance(style, RowwiseParallel):
        return {"weight": 0 if isinstance(module, nn.Embedding) else 1}
    return {}


def has_sharded_output(style: ParallelStyle) -> bool:
    """Return whether the output of the module is sharded."""
    return isinstance(style, ColwiseParallel) and style.output_layouts != (Replicate(),)


_HEADS = (
    "n_head", "n_heads", "nhead", "num_attention_heads", "num_heads",
    "n_kv_heads", "num_key_value_heads", "num_kv_heads",
)  # fmt: skip
"""Attributes for the number of heads in configurations and modules."""


def check_divisibility(model: nn.Module, tp: int, styles: Plan) -> None:
    """Raise ValueError if `tp` does not divide a dimension or a number of heads, or tied parameters differ in sharding."""
    sharded = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    if sharded:
        raise ValueError(
            f"{sharded[0]} is already sharded. Create or load the model without a plan: `prepare` shards it."
        )
    for name, style in styles.items():
        module = model.get_submodule(name)
        for parameter, dimension in sharded_dimensions(module, style).items():
            length = module.get_parameter(parameter).shape[dimension]
            if length % tp:
                cure = (
                    f", or pad it to {length + tp - length % tp}" if isinstance(module, nn.Embedding) else ""
                )
                raise ValueError(
                    f"parallel.tp={tp} does not divide dimension {dimension} of {name}.{parameter}, which is {length}. Choose a "
                    f"tp that does{cure}, or remove {name} from the plan."
                )
    for owner, attribute, heads in _head_counts(model, styles):
        if heads % tp:
            divisors = ", ".join(str(divisor) for divisor in range(1, heads + 1) if heads % divisor == 0)
            raise ValueError(
                f"parallel.tp={tp} does not divide {attribute}={heads} of {owner}; tp may be {divisors}"
            )
    _check_tied(model, styles)


def _head_counts(model: nn.Module, styles: Plan) -> Iterator[tuple[str, str, int]]:
    """Yield the owner, the attribute and the number of heads of sharded attention."""
    sharded = (_LORA_PART.sub("", name) for name, style in styles.items() if has_sharded_output(style))
    parents = {name.rpartition(".")[0] for name in sharded}
    holders: dict[str, Any] = {
        parent or type(model).__name__: model.get_submodule(parent) for parent in sorted(parents)
    }
    if any("att" in parent.lower() for parent in parents):
        config = getattr(model, "config", None)
        holders["model.config"] = getattr(config, "text_config", config)
    for owner, holder in holders.items():
        for attribute in _HEADS:
            count = getattr(holder, attribute, None)
            if isinstance(count, int):
                yield owner, attribute, count


def _check_tied(model: nn.Module, styles: Plan) -> None:
    first: dict[int, tuple[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, attribute = name.rpartition(".")
        style = styles.get(path)
        if style is None or isinstance(style, _Replicated):
            layout = "whole"
        else:
            dimension = sharded_dimensions(model.get_submodule(path), style).get(attribute)
            layout = "copied" if dimension is None else f"divided along dimension {dimension}"
        first_name, first_layout = first.setdefault(id(parameter), (name, layout))
        if layout != first_layout:
            raise ValueError(
                f"{first_name} and {name} are one parameter, and the plan has the first {first_layout} and the second {layout}: set "
                "matching styles for both modules (embedding: embedding_rowwise and head: colwise_rep), or for none"
            )


_TOLERANCE = 1e-2
"""The largest relative difference of norms of the same gradient; rounding is far below, sharded heads far above."""


@torch.no_grad()
def check_replicated_gradients(models: Iterable[nn.Module], tp: DeviceMesh) -> None:
    """Raise ValueError if gradients of replicated parameters differ between tensor parallel ranks; collective.

    A module between `colwise` and `rowwise` sees a shard of the activations. If the plan does not list it, its parameters get
    different gradients on each rank, without any other symptom.
    """
    replicated = {
        name: parameter
        for model in models
        for name, parameter in model.named_parameters()
        # `fully_shard` shards equally on all ranks of a group.
        if parameter.requires_grad and not is_sharded_by_tp(parameter)
    }
    if not replicated:
        return
    norms = torch.stack([_gradient_norm(parameter.grad) for parameter in replicated.values()])
    largest, least = norms.to(tp.device_type), norms.to(tp.device_type, copy=True)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=tp.get_group())
    dist.all_reduce(least, dist.ReduceOp.MIN, group=tp.get_group())
    differing = (largest - least > _TOLERANCE * largest).tolist()
    if names := [name for name, differs in zip(replicated, differing, strict=True) if differs]:
        raise ValueError(
            f"tensor parallel: the gradients of {format_names(names)} differ between tensor parallel ranks, so the parameters "
            "would diverge. Such a module is between colwise and rowwise, and sees a shard of the activations. Set it to "
            "replicated_with_grad_allreduce in parallel.tp_plan."
        )


def _gradient_norm(gradient: torch.Tensor | None) -> torch.Tensor:
    """Return the norm of this rank's gradient shard; 0 without a gradient, or after an overflow."""
    if gradient is None:
        return torch.zeros((), dtype=torch.float32)
    norm: torch.Tensor = torch.linalg.vector_norm(local_shard(gradient).float())
    return norm.nan_to_num(0.0, 0.0, 0.0).cpu()
