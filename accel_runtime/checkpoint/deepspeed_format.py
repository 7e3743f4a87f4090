"""Fit a checkpoint of DeepSpeed to the models and optimizers of a run, and read its tensors into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from typing_extensions import Self

from accel_runtime.checkpoint.serialization import serialize
from accel_runtime.checkpoint.state_items import ModelItem, OptimizerItem, StateItem, tensor_name_of
from accel_runtime.export.save_model import add_aliases
from accel_runtime.foundation.module_names import match_names
from accel_runtime.foundation.precision import name_dtype
from accel_runtime.storage.deepspeed_manifest import open_deepspeed_checkpoint
from accel_runtime.storage.manifest import Manifest, TensorEntry
from accel_runtime.storage.state_tree import KEY

__all__ = ["EngineStates"]

_HALF = ("bfloat16", "float16")


class EngineStates:
    """States of engines of DeepSpeed in a folder, as items of a run; a context manager, since its files are open.

    Args:
        folder: The folder of DeepSpeed, or of Accelerate with such folders in it.
        items: The items of the run.
        without: Names of items that are read from other files.
    """

    def __init__(self, folder: Path, items: Sequence[StateItem], without: Sequence[str] = ()) -> None:
        self.missing: list[str] = []
        """What the files do not contain, with its item."""

        def adapt(manifest: Manifest) -> Manifest:
            self.missing = _list_missing(manifest)
            return _fit_manifest(_remove_items(manifest, without), items)

        self._snapshot = open_deepspeed_checkpoint(folder, adapt)

    @property
    def manifest(self) -> Manifest:
        """The manifest, with the names of the run."""
        return self._snapshot.checkpoint.manifest

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._snapshot.close()

    def find_mismatches(self, item: StateItem) -> list[str]:
        """Return a sentence for each reason that the state of an item does not fit, before tensors are read."""
        encoded = self.manifest.values[item.name]
        entries = {name: self.manifest.tensors[name] for name in self.manifest.tensors_of(item.name)}
        if isinstance(item, ModelItem):
            entries |= self._find_converted(encoded, entries, item.tree())
        return item.find_mismatches(encoded, entries)

    def _find_converted(
        self, encoded: Any, entries: Mapping[str, TensorEntry], state: Any
    ) -> dict[str, TensorEntry]:
        """Return the weights that are converted without loss, or as DeepSpeed does, with the dtype of the model.

        DeepSpeed has frozen parameters in the number format of mixed precision only, and the others in float32.
        """
        precision, converted = self.manifest.run.get("precision", ""), {}
        for key, node in encoded.items():
            entry, live = entries.get(tensor_name_of(node)), state.get(key)
            if entry is None or not isinstance(live, torch.Tensor):
                continue
            dtype = name_dtype(live.dtype)
            widened = entry.dtype in _HALF and dtype == "float32"
            if widened or (entry.dtype == "float32" and dtype == precision):
                converted[tensor_name_of(node)] = replace(entry, dtype=dtype)
        return converted

    def read(self, items: Sequence[StateItem], rank: int, world_size: int) -> dict[str, Any]:
        """Return the states of items, with tensors read into the live ones that an item names."""
        from accel_runtime.checkpoint.load import StateReader  # noqa: PLC0415 - slow to import

        stored = [item for item in items if item.name in self.manifest.values]
        reader = StateReader(self._snapshot, stored, rank, world_size)
        reader.check()
        return reader.read()


def _list_missing(manifest: Manifest) -> list[str]:
    """Return the optimizers whose groups have no options, as DeepSpeed saves them with `elastic_checkpoint`."""
    return [
        f"{name}: with elastic_checkpoint, DeepSpeed does not save learning rates and other options of groups"
        for name, value in manifest.values.items()
        if any(set(group) == {"params"} for group in value.get("groups", ()))
    ]


def _remove_items(manifest: Manifest, names: Sequence[str]) -> Manifest:
    return replace(
        manifest, values={name: value for name, value in manifest.values.items() if name not in names}
    )


def _fit_manifest(manifest: Manifest, items: Sequence[StateItem]) -> Manifest:
    """Return the manifest with the names of the run, and with options of optimizers that DeepSpeed does not save."""
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

    Frozen parameters, which DeepSpeed leaves out, are added to the group that they are in here.
    """
    if "format" in saved:
        saved = _name_parameters(saved, live)
        if "format" in saved:
            return saved
    groups = [
        group | {"params": [names.get(name, name) for name in group["params"]]} for group in saved["groups"]
    ]
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


def _name_parameters(saved: Any, live: Sequence[Any]) -> Any:
    """Return a state of stage 0, in torch's format, by the names of the run, if the groups have as many parameters."""
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
