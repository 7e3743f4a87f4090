"""Child process of `accel estimate`: prints one line of JSON, a `result` or an `error`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from accel_runtime.checkpoint.filesystem import parse_size
from accel_runtime.estimate.activations import DTYPES, Estimate, EstimateResult, estimate_layouts
from accel_runtime.estimate.model import (
    BatchSizes,
    EstimateError,
    ModelSpec,
    build_from_configuration,
    call_factory,
    find_factory,
    is_configuration,
)

__all__ = ["answer_request"]


def answer_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return all layouts, which of them fit, and the recommended ones, for the options of `accel estimate`."""
    options = dict(request)
    memory = _parse_memory(options["memory"])
    spec = _build_model(options)
    choices = {name: options[name] for name in ("devices", "mixed_precision", "wrap", "optimizer")}
    result = estimate_layouts(spec, **choices)
    usable = None if memory is None else memory * (100 - options["headroom"]) // 100
    return (
        _describe_model(result, options)
        | {"memory": memory, "usable": usable}
        | _select_layouts(result, options["devices"], usable)
    )


def _parse_memory(text: str | None) -> int | None:
    try:
        return None if text is None else parse_size(text, "--memory")
    except ValueError as error:
        raise EstimateError(str(error)) from None


def _build_model(options: Mapping[str, Any]) -> ModelSpec:
    target, sizes = options["target"], BatchSizes(options["batch_size"], options["seq_length"])
    spec = (
        build_from_configuration(target, sizes)
        if is_configuration(target)
        else call_factory(find_factory(target), target, sizes)
    )
    if options["dtype"]:
        spec.model.to(DTYPES[options["dtype"]])
    spec.model.train()
    return spec if options["activations"] else replace(spec, inputs=None)


def _describe_model(result: EstimateResult, options: Mapping[str, Any]) -> dict[str, Any]:
    parameters = list(result.spec.model.parameters())
    return {
        "model": type(result.spec.model).__name__,
        "parameters": sum(p.numel() for p in parameters),
        "trained": sum(p.numel() for p in parameters if p.requires_grad),
        "optimizer": result.optimizer,
        "mixed_precision": options["mixed_precision"],
        "wrap": options["wrap"],
        "wrapped": [name for name, _ in result.units],
        "inputs": _format_shapes(result.spec.inputs),
        "left_out": [{"tp": tp, "why": why} for tp, why in result.left_out.items()],
        "devices": options["devices"],
    }


def _select_layouts(result: EstimateResult, devices: int, usable: int | None) -> dict[str, Any]:
    """Return all layouts, and the indices of those to show and to recommend."""

    def fits(each: Estimate) -> bool:
        return usable is None or each.usage.total <= usable

    def places(selected: Iterable[Estimate]) -> list[int]:
        return [result.estimates.index(each) for each in selected]

    on_all_devices = [each for each in result.estimates if each.layout.devices == devices]
    fitting = [each for each in result.estimates if fits(each)]
    fewest = min((each.layout.devices for each in fitting), default=0)
    leanest = min(on_all_devices, key=lambda each: each.usage.total)
    splits: dict[tuple[int, int], list[Estimate]] = {}
    for each in on_all_devices:
        splits.setdefault((each.layout.dp_shard, each.layout.tp), []).append(each)
    shown_estimates = [
        _least_divided(filter(fits, estimates)) or [min(estimates, key=lambda each: each.usage.total)]
        for estimates in splits.values()
    ]
    return {
        "layouts": [_describe_layout(each, fits=fits(each)) for each in result.estimates],
        "shown": places(each for estimates in shown_estimates for each in estimates),
        "best": next(iter(places(_least_divided(each for each in on_all_devices if fits(each)))), None),
        "fewest": next(
            iter(places(_least_divided(each for each in fitting if each.layout.devices == fewest))), None
        ),
        "leanest": places([leanest])[0],
    }


def _least_divided(estimates: Iterable[Estimate]) -> list[Estimate]:
    """Return the layout with the smallest division, if there is one."""
    return sorted(estimates, key=lambda each: each.layout.division)[:1]


def _describe_layout(estimate: Estimate, *, fits: bool) -> dict[str, Any]:
    sizes = {**asdict(estimate.usage), "total": estimate.usage.total}
    return {**asdict(estimate.layout), "devices": estimate.layout.devices, "bytes": sizes, "fits": fits}


def _format_shapes(inputs: Any) -> list[str]:
    """Format the shapes of a batch."""
    if inputs is None:
        return []
    leaves = torch.utils._pytree.tree_leaves_with_path(inputs)  # noqa: SLF001
    named = [
        ("".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path), leaf)
        for path, leaf in leaves
    ]
    return [f"{name} {list(leaf.shape)}".strip() for name, leaf in named if isinstance(leaf, torch.Tensor)]


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
