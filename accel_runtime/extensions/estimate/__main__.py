"""Child process of `accel estimate`: build a model on the meta device, and print its layouts as one line of JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import torch

from accel_runtime.extensions.estimate.factory import call_factory, find_factory
from accel_runtime.extensions.estimate.memory import (
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
    list_splits,
    list_variants,
    local_shape,
    measure_activations,
    measure_state,
    read_plan,
)
from accel_runtime.extensions.estimate.pretrained import build_from_configuration, is_configuration
from accel_runtime.extensions.estimate.zero import ZeroUsage, compute_zero
from accel_runtime.foundation.torch_internals import tree_leaves_with_path
from accel_runtime.parallel.fsdp_units import Units, find_units, innermost_units
from accel_runtime.parallel.tensor_parallel import check_divisibility
from accel_runtime.storage.file_system import parse_size

__all__ = ["answer_request", "estimate_layouts"]


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
