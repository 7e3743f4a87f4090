"""Folders of torch.distributed.checkpoint as snapshots: models and optimizers are found in them.

A state dict has any keys. A model is a dict of tensors, and an optimizer a dict with `state` and `param_groups`, by the names of
parameters or by indices, nested or flattened as torch's `get_optimizer_state_dict` does. A reader takes the parts of tensors
that it needs, as those of a checkpoint of accel.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from accel_runtime.extensions.foreign_checkpoints.dcp_folder import (
    DcpFolder,
    DcpTensor,
    DcpValue,
    Key,
    read_dcp_folder,
)
from accel_runtime.extensions.foreign_checkpoints.folders import METADATA, DcpSelection
from accel_runtime.extensions.foreign_checkpoints.manifest_builder import ManifestBuilder
from accel_runtime.storage.errors import CheckpointError, RequestError, format_names
from accel_runtime.storage.file_system import FileSystem
from accel_runtime.storage.manifest import Chunk, Manifest, TensorEntry
from accel_runtime.storage.schema import ITEM_BYTES, FieldError
from accel_runtime.storage.store import Snapshot

__all__ = ["FORMAT", "find_fsdp_folders", "open_dcp_checkpoint"]

FORMAT = "torch.distributed.checkpoint"
"""Name of the format, in manifests."""
_OF_ACCELERATE = re.compile(r"(pytorch_model_fsdp|optimizer)_(\d+)")
_MODEL = re.compile(r"model(?:_(\d+))?")
_EXTRA = "_extra_state"
"""Name of what a module returns as its extra state."""
_STATE, _GROUPS = "state", "param_groups"


@dataclass(frozen=True)
class _Contents:
    """Models and optimizers of a folder."""

    models: Mapping[str, Mapping[Key, Any]] = field(default_factory=dict)
    """Trees by the name of their item."""
    optimizers: Mapping[str, Mapping[Key, Any]] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    """Keys of values that are neither."""
    version: str = ""
    """Version of the metadata."""


def find_fsdp_folders(folder: Path) -> dict[str, Path]:
    """Return the folders of models and optimizers of FSDP in a checkpoint of Accelerate, by the name of their item."""
    found = {}
    for name in FileSystem().list_names(folder):
        if (match := _OF_ACCELERATE.fullmatch(name)) and (folder / name / METADATA).is_file():
            kind = "optimizer" if match[1] == "optimizer" else "model"
            found[kind if match[2] == "0" else f"{kind}_{match[2]}"] = folder / name
    return found


def open_dcp_checkpoint(
    folder: Path,
    selection: DcpSelection | None = None,
    adapt: Callable[[Manifest], Manifest] = lambda manifest: manifest,
) -> tuple[Snapshot, list[str]]:
    """Open a folder of DCP for reading, with a manifest that is built from its metadata, or one of Accelerate with such in it.

    The items are `model` and `optimizer`, numbered if there are several, and `step_counts`. Optimizer state is by the name of
    the parameter, `model.layer.weight`, if the folder has names. The checkpoint has no checksums. `adapt` changes the manifest before
    the checkpoint is opened.

    Returns:
        The checkpoint, and the keys of what is not part of it.

    Raises:
        RequestError: There is no model in it, or it is not known which is meant.
        CheckpointError: Files are missing, damaged, or of another format.
    """
    folder = folder.absolute()
    parts = find_fsdp_folders(folder)
    try:
        if parts:
            contents = _read_parts({item: read_dcp_folder(path) for item, path in parts.items()})
            first = next(iter(parts.values()))
        else:
            contents, first = _find_contents(read_dcp_folder(folder), selection or DcpSelection()), folder
        builder = _DcpManifest(folder, version=contents.version)
        for item, tree in contents.models.items():
            builder.add_model(item, tree)
        for item, tree in contents.optimizers.items():
            builder.add_optimizer(item, tree, contents.models)
        manifest = builder.build((first / METADATA).stat().st_mtime)
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder} cannot be read: {error.strerror}") from error
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder} cannot be read as a checkpoint of {FORMAT}: {type(error).__name__}: {error}"
        ) from error
    return builder.open(adapt(manifest)), list(contents.others)


# Structure -------------------------------------------------------------------------------


def _build_tree(folder: DcpFolder) -> dict[Key, Any]:
    """Return the nested state dict; lists are dicts by index."""
    tree: dict[Key, Any] = {}
    for keys, entry in folder.entries.items():
        node = tree
        for key in keys[:-1]:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise TypeError(f"{'.'.join(map(str, keys))} is inside of a value")
        node[keys[-1]] = entry
    return tree


def _iterate_dicts(
    tree: Mapping[Key, Any], path: tuple[Key, ...] = ()
) -> Iterator[tuple[tuple[Key, ...], Any]]:
    """Yield all dicts by their keys, without those inside of optimizers."""
    yield path, tree
    if not _is_optimizer(tree):
        for key, value in tree.items():
            if isinstance(value, dict):
                yield from _iterate_dicts(value, (*path, key))


def _is_optimizer(tree: Mapping[Key, Any]) -> bool:
    return any(key == _GROUPS or (type(key) is str and key.startswith(f"{_GROUPS}.")) for key in tree)


def _read_parts(folders: Mapping[str, DcpFolder]) -> _Contents:
    """Return the contents of a checkpoint of Accelerate: a model or an optimizer in each folder."""
    models: dict[str, Mapping[Key, Any]] = {}
    optimizers: dict[str, Mapping[Key, Any]] = {}
    for item, folder in sorted(folders.items()):
        tree = _build_tree(folder)
        key = "model" if item.startswith("model") else "optimizer"
        if not isinstance(tree.get(key), dict):
            raise CheckpointError(
                f"{folder.path} has no {key}; it has {format_names([str(name) for name in tree])}"
            )
        (models if key == "model" else optimizers)[item] = tree[key]
    return _Contents(models, optimizers, version=next(iter(folders.values())).version)


def _find_contents(folder: DcpFolder, selection: DcpSelection) -> _Contents:
    """Return the selected models and optimizers; those that are not selected are found by their structure."""
    dicts = {".".join(map(str, path)): tree for path, tree in _iterate_dicts(_build_tree(folder))}
    for kind, names in (("--model", selection.models), ("--optimizer", selection.optimizers)):
        for name in names:
            if name not in dicts:
                known = [each or "''" for each in dicts]
                raise RequestError(
                    f"{folder.path} has nothing at {kind} {name!r}. Give one of {format_names(known, 10)}."
                )
    optimizers = selection.optimizers or tuple(name for name, tree in dicts.items() if _is_optimizer(tree))
    candidates = {
        name: tree
        for name, tree in dicts.items()
        if not _is_optimizer(tree) and any(isinstance(value, DcpTensor) for value in tree.values())
    }
    models = selection.models or _find_models(folder.path, candidates, [dicts[name] for name in optimizers])
    used = [name.split(".")[0] for name in (*models, *optimizers)]
    others = [
        str(key)
        for key, value in dicts[""].items()
        if str(key) not in used and not ("" in models and isinstance(value, DcpTensor))
    ]
    return _Contents(
        {_number("model", index): dicts[name] for index, name in enumerate(models)},
        {_number("optimizer", index): dicts[name] for index, name in enumerate(optimizers)},
        tuple(others),
        folder.version,
    )


def _number(kind: str, index: int) -> str:
    return f"{kind}_{index}" if index else kind


def _find_models(
    path: Path, candidates: Mapping[str, Mapping[Key, Any]], optimizers: Sequence[Mapping[Key, Any]]
) -> tuple[str, ...]:
    """Return the keys of models: those named so, else the dict with the parameters of an optimizer, else the only one."""
    numbered = {
        (int(match[1] or 0), name): name
        for name in candidates
        if (match := _MODEL.fullmatch(name.rpartition(".")[2]))
    }
    if numbered:
        return tuple(numbered[key] for key in sorted(numbered))
    found = [
        name
        for name, tree in candidates.items()
        if any(
            set(names) <= tree.keys() for optimizer in optimizers if (names := _list_names(optimizer, tree))
        )
    ]
    if not found and "" in candidates:
        found = [""]
    if not found:
        found = list(candidates)
    if len(found) == 1:
        return tuple(found)
    if not found:
        raise RequestError(f"{path} has no model: none of its dicts has tensors.")
    raise RequestError(
        f"{path} has several models: {format_names([name or repr('') for name in found], 10)}. Select one with --model."
    )


def _list_names(optimizer: Mapping[Key, Any], model: Mapping[Key, Any]) -> list[str]:
    """Return the names of the parameters in the state of an optimizer; empty if it has none, or indices."""
    if isinstance(optimizer.get(_STATE), dict):
        return [name for name in optimizer[_STATE] if type(name) is str]
    split = (_split_name(key, model) for key in optimizer if type(key) is str)
    return list(dict.fromkeys(name for kind, name, _ in split if kind == _STATE))


def _split_name(key: str, model: Mapping[Key, Any]) -> tuple[str, str, str]:
    """Split `state.layer.weight.exp_avg` of a flattened state into its kind, parameter and key."""
    kind, _, rest = key.partition(".")
    name, _, last = rest.rpartition(".")
    shorter = name
    while shorter and shorter not in model:
        shorter = shorter.rpartition(".")[0]
    return (kind, shorter, rest[len(shorter) + 1 :]) if shorter else (kind, name, last)


# Manifest --------------------------------------------------------------------------------


@dataclass
class _DcpManifest(ManifestBuilder):
    """The manifest of a folder of DCP."""

    version: str = ""
    """Version of the metadata."""
    steps: list[int] = field(default_factory=list)
    """Number of steps of each optimizer, the largest in its state; 0 if it counts none."""

    def add_model(self, item: str, tree: Mapping[Key, Any]) -> None:
        """Add a model: its tensors, and extra states of modules."""
        # In a folder of torchtitan, other states are beside the weights.
        state = {
            str(name): value
            for name, value in tree.items()
            if isinstance(value, DcpTensor) or str(name).rpartition(".")[2] == _EXTRA
        }
        self.values[item] = {
            name: self.encode(self._read(value), item, name) for name, value in state.items()
        }

    def add_optimizer(
        self, item: str, tree: Mapping[Key, Any], models: Mapping[str, Mapping[Key, Any]]
    ) -> None:
        """Add an optimizer, by the names of parameters in accel or by indices."""
        is_nested = _GROUPS in tree
        groups, state = self._read_nested(tree) if is_nested else self._read_flat(tree, models)
        counts = [self._read_steps(each.get("step")) for each in state.values() if isinstance(each, dict)]
        self.steps.append(max(counts, default=0))
        if any(type(name) is not str for group in groups for name in group["params"]):
            # The keys of dicts are text in the metadata.
            by_index = {int(index): each for index, each in state.items()}
            state_dict = {_STATE: by_index, _GROUPS: groups}
            self.values[item] = self.encode({"format": "torch", "state_dict": state_dict}, item, "")
            return
        names = [name for group in groups for name in group["params"]]
        prefix = _find_prefix(item, names, models)
        named: dict[str, Any] = {
            "groups": [{**group, "params": [prefix + name for name in group["params"]]} for group in groups],
            "state": {prefix + name: each for name, each in state.items()},
            "other": {},
            "extra": {},
        }
        if not is_nested:
            named["by_parameter"] = True
        self.values[item] = self.encode(named, item, "")

    def _read_nested(self, tree: Mapping[Key, Any]) -> tuple[list[Any], dict[Any, Any]]:
        groups = self._read(tree[_GROUPS])
        if not isinstance(groups, list) or any("params" not in group for group in groups):
            raise ValueError("param_groups is not a list of groups")
        stored = tree.get(_STATE, {})
        # By index, it is a dict and no list.
        state = (
            self._read(stored)
            if isinstance(stored, DcpValue)
            else {n: self._read(each) for n, each in stored.items()}
        )
        return groups, state

    def _read_flat(
        self, tree: Mapping[Key, Any], models: Mapping[str, Mapping[Key, Any]]
    ) -> tuple[list[Any], dict[Any, Any]]:
        """Return groups of parameters with equal options, in the order of their first parameter."""
        known = {name: None for model in models.values() for name in model}
        options: dict[str, dict[str, Any]] = {}
        state: dict[str, dict[str, Any]] = {}
        for key, value in tree.items():
            kind, name, last = _split_name(str(key), known)
            (state if kind == _STATE else options).setdefault(name, {})[last] = self._read(value)
        groups: dict[tuple[str, tuple[str, ...]], dict[str, Any]] = {}
        for name, each in options.items():
            text = json.dumps(ManifestBuilder(self.root).encode(each, "", ""), sort_keys=True)
            numbers = tuple(
                str(self._read_values(value)) for value in each.values() if isinstance(value, TensorEntry)
            )
            groups.setdefault((text, numbers), {**each, "params": []})["params"].append(name)
        return list(groups.values()), state

    def _read(self, value: Any) -> Any:
        """Return the value at a node of the state dict, with an entry for each tensor."""
        if isinstance(value, DcpTensor):
            return self._locate(value)
        if isinstance(value, DcpValue):
            return value.location.read()
        if list(value) == list(range(len(value))) and value:
            return [self._read(each) for each in value.values()]
        return {key: self._read(each) for key, each in value.items()}

    def _locate(self, tensor: DcpTensor) -> TensorEntry:
        dtype, size, chunks = getattr(torch, tensor.dtype), ITEM_BYTES[tensor.dtype], []
        for offsets, sizes, location in tensor.chunks:
            if count := math.prod(sizes):
                name = f"{self.add_file(location.file)}:{location.start}"
                self.sources[name] = partial(location.read_tensor, dtype, sizes)
                chunks.append(Chunk(name, 0, count * size, "", offsets, sizes))
        entry = TensorEntry(tensor.dtype, tensor.shape, tuple(chunks))
        try:
            entry.check()
        except FieldError as error:
            raise CheckpointError(
                f"{self.root} is not complete: the chunks of {tensor.name} {error}"
            ) from error
        return entry

    def _read_steps(self, value: Any) -> int:
        """Return the number of steps in the state of a parameter; 0 if there is none."""
        if isinstance(value, TensorEntry):
            value = self._read_values(value) if math.prod(value.shape) == 1 else None
        return max(0, int(value)) if type(value) in {int, float} and math.isfinite(value) else 0

    def _read_values(self, entry: TensorEntry) -> Any:
        """Return the values of a tensor, a number or a list; those of the first chunk."""
        return self.sources[entry.chunks[0].file]().tolist() if entry.chunks else []

    def build(self, modified: float) -> Manifest:
        """Return the manifest."""
        saved_at = datetime.fromtimestamp(modified, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        counts = {"step_counts": {"steps": self.steps}} if self.steps else {}
        values = self.values | counts
        step = max(self.steps, default=0)
        versions = {FORMAT: self.version}
        return Manifest("", saved_at, 1, step, versions, values, {}, self.tensors, self.files, origin=FORMAT)


def _find_prefix(item: str, names: Sequence[str], models: Mapping[str, Mapping[Key, Any]]) -> str:
    """Return the prefix of names in accel, which begin with that of the model; empty if they do already."""
    fits = [model for model, tree in models.items() if set(names) <= tree.keys()]
    if names and not fits and all(name.startswith(tuple(f"{model}." for model in models)) for name in names):
        return ""
    same_number = item.replace("optimizer", "model")
    if same_number in (fits or models):
        return f"{same_number}."
    return f"{next(iter(fits or models), 'model')}."
