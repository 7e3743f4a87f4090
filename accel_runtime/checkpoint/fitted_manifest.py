"""Fit the manifest of a checkpoint that another program wrote to the models and optimizers of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from accel_runtime.checkpoint.serialization import serialize
from accel_runtime.checkpoint.state_items import ModelItem, OptimizerItem, StateItem
from accel_runtime.export.save_model import add_aliases
from accel_runtime.foundation.module_names import match_names
from accel_runtime.storage.manifest import Manifest
from accel_runtime.storage.state_tree import KEY

__all__ = ["fit_manifest"]


def fit_manifest(manifest: Manifest, items: Sequence[StateItem]) -> Manifest:
    """Return the manifest with the names of the run, and with options of optimizers that the other program does not save."""
    values, names = dict(manifest.values), dict[str, str]()
    for item in items:
        if isinstance(item, ModelItem) and item.name in values:
            state = item.tree()
            found = match_names(values[item.name], state)
            renamed = {found[name]: node for name, node in values[item.name].items()}
            names |= {f"{item.name}.{name}": f"{item.name}.{own}" for name, own in found.items()}
            values[item.name] = add_aliases(renamed, state)
    for item in items:
        if isinstance(item, OptimizerItem) and item.name in values:
            values[item.name] = _fit_optimizer(values[item.name], item.tree()["groups"], names)
    return replace(manifest, values=values)


def _fit_optimizer(saved: Any, live: Sequence[Any], names: Mapping[str, str]) -> Any:
    """Return the state of an optimizer with the names of the run.

    Frozen parameters, which other programs leave out, are added to the group that they are in here.
    """
    if "format" in saved:
        saved = _name_parameters(saved, live)
        if "format" in saved:
            return saved
    groups = [
        group | {"params": [names.get(name, name) for name in group["params"]]} for group in saved["groups"]
    ]
    if saved.get("by_parameter"):
        groups = _regroup(groups, live)
    trained = {name for group in groups for name in group["params"]}
    if len(groups) == len(live):
        known = set(names.values())
        for group, own in zip(groups, live, strict=True):
            group["params"] += [name for name in own["params"] if name not in trained and name in known]
    groups = [
        _encode_options(own) | group for group, own in zip(groups, live, strict=len(groups) == len(live))
    ] + groups[len(live) :]
    state = {names.get(name, name): each for name, each in saved["state"].items()}
    return {**saved, "groups": groups, "state": state}


def _regroup(saved: Sequence[Any], live: Sequence[Any]) -> list[Any]:
    """Return the groups of the run for options that are saved by parameter; the saved ones if the options differ in one."""
    group_of = {name: index for index, group in enumerate(saved) for name in group["params"]}
    groups = []
    for own in live:
        params = [name for name in own["params"] if name in group_of]
        indices = {group_of.pop(name) for name in params}
        if len(indices) > 1:
            return list(saved)
        groups.append({**(saved[indices.pop()] if indices else {}), "params": params})
    return list(saved) if group_of else groups


def _name_parameters(saved: Any, live: Sequence[Any]) -> Any:
    """Return a state in torch's format, by index, by the names of the run, if the groups have as many parameters."""
    groups, state = saved["state_dict"]["param_groups"], saved["state_dict"]["state"]
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in live]:
        return saved
    indices = [index for group in groups for index in group["params"]]
    order = dict(zip(indices, [name for group in live for name in group["params"]], strict=True))
    # A dict with numbers as keys.
    pairs = state["items"] if KEY in state else state.items()
    return {
        "groups": [{**group, "params": [order[index] for index in group["params"]]} for group in groups],
        "state": {order[index]: each for index, each in pairs},
        "other": {},
        "extra": {},
    }


def _encode_options(group: Any) -> Any:
    """Return the options of a group of parameters of the run as JSON."""
    options = {
        key: value for key, value in group.items() if key != "params" and not isinstance(value, torch.Tensor)
    }
    return serialize(options, "optimizer")[0]
