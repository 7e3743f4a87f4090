"""Run by `accel estimate` as a child process: answers on one line of JSON, a `result`, or an `error`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from accel_runtime.checkpoint.sizes import size_of
from accel_runtime.estimating.errors import EstimateError
from accel_runtime.estimating.factory import Made, Sizes, called, found
from accel_runtime.estimating.pretrained import is_configuration, made_of
from accel_runtime.estimating.survey import Estimate, Survey, survey

__all__ = ["answer"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked for: every layout, whether it fits, and which to take.

    Args:
        request: The options of `accel estimate` by name, and its `target`.

    Raises:
        EstimateError: Nothing can be estimated.
    """
    asked = dict(request)
    memory = _memory(asked["memory"])
    made = _made(asked)
    wishes = {name: asked[name] for name in ("devices", "mixed_precision", "wrap", "optimizer")}
    surveyed = survey(made, **wishes)
    usable = None if memory is None else memory * (100 - asked["headroom"]) // 100
    return (
        _described(surveyed, asked)
        | {"memory": memory, "usable": usable}
        | _judged(surveyed, asked["devices"], usable)
    )


def _memory(text: str | None) -> int | None:
    try:
        return None if text is None else size_of(text, "--memory")
    except ValueError as error:
        raise EstimateError(str(error)) from None


def _made(asked: Mapping[str, Any]) -> Made:
    target, sizes = asked["target"], Sizes(asked["batch_size"], asked["seq_length"])
    made = made_of(target, sizes) if is_configuration(target) else called(found(target), target, sizes)
    if asked["dtype"]:
        made.model.to(_DTYPES[asked["dtype"]])
    made.model.train()
    return made if asked["activations"] else replace(made, inputs=None)


def _described(surveyed: Survey, asked: Mapping[str, Any]) -> dict[str, Any]:
    parameters = list(surveyed.made.model.parameters())
    return {
        "model": type(surveyed.made.model).__name__,
        "parameters": sum(p.numel() for p in parameters),
        "trained": sum(p.numel() for p in parameters if p.requires_grad),
        "optimizer": surveyed.optimizer,
        "mixed_precision": asked["mixed_precision"],
        "wrap": asked["wrap"],
        "wrapped": [name for name, _ in surveyed.units],
        "inputs": _shapes(surveyed.made.inputs),
        "left_out": [{"tp": tp, "why": why} for tp, why in surveyed.left_out.items()],
        "devices": asked["devices"],
    }


def _judged(surveyed: Survey, devices: int, usable: int | None) -> dict[str, Any]:
    """Every layout, and by their places in that list: those worth a look, and those to take."""

    def fits(one: Estimate) -> bool:
        return usable is None or one.usage.total <= usable

    def places(chosen: Iterable[Estimate]) -> list[int]:
        return [surveyed.estimates.index(one) for one in chosen]

    there = [one for one in surveyed.estimates if one.layout.devices == devices]
    fitting = [one for one in surveyed.estimates if fits(one)]
    fewest = min((one.layout.devices for one in fitting), default=0)
    leanest = min(there, key=lambda one: one.usage.total)
    splits: dict[tuple[int, int], list[Estimate]] = {}
    for one in there:
        splits.setdefault((one.layout.dp_shard, one.layout.tp), []).append(one)
    shown = [
        _least(filter(fits, some)) or [min(some, key=lambda one: one.usage.total)] for some in splits.values()
    ]
    return {
        "layouts": [_layout(one, fits=fits(one)) for one in surveyed.estimates],
        "shown": places(one for some in shown for one in some),
        "best": next(iter(places(_least(one for one in there if fits(one)))), None),
        "fewest": next(iter(places(_least(one for one in fitting if one.layout.devices == fewest))), None),
        "leanest": places([leanest])[0],
    }


def _least(estimates: Iterable[Estimate]) -> list[Estimate]:
    """The least divided, if there is one."""
    return sorted(estimates, key=lambda one: one.layout.division)[:1]


def _layout(one: Estimate, *, fits: bool) -> dict[str, Any]:
    sizes = {**asdict(one.usage), "total": one.usage.total}
    return {**asdict(one.layout), "devices": one.layout.devices, "bytes": sizes, "fits": fits}


def _shapes(inputs: Any) -> list[str]:
    """The tensors of a batch, for people."""
    if inputs is None:
        return []
    leaves = torch.utils._pytree.tree_leaves_with_path(inputs)  # noqa: SLF001
    named = [
        ("".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path), leaf)
        for path, leaf in leaves
    ]
    return [f"{name} {list(leaf.shape)}".strip() for name, leaf in named if isinstance(leaf, torch.Tensor)]


def _run(text: str) -> int:
    # What factories print is for people; the answer has the pipe for itself.
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        said: dict[str, Any] = {"result": answer(json.loads(text))}
    except EstimateError as error:
        said = {"error": str(error)}
    with pipe:
        pipe.write(json.dumps(said))
    return 0 if "result" in said else 2


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1]))
