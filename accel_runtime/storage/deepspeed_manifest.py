"""Checkpoints of DeepSpeed as snapshots: a manifest says where each part of each tensor is in its files. Imports no torch.

A reader takes the parts that it needs, as those of a checkpoint of accel, so that memory does not grow with the model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from accel_runtime.storage.deepspeed_folder import (
    Engine,
    TensorParts,
    find_engine_folders,
    read_engine,
)
from accel_runtime.storage.directory import open_folder
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.file_store import FileSnapshot
from accel_runtime.storage.file_system import FileSystem
from accel_runtime.storage.manifest import Checkpoint, Chunk, FileEntry, Manifest, TensorEntry
from accel_runtime.storage.schema import ITEM_BYTES
from accel_runtime.storage.state_tree import KEY
from accel_runtime.storage.torch_file import StoredTensor, TensorRange, Unknown, iterate_boxes

__all__ = ["open_deepspeed_checkpoint"]

_MAX_VALUES = 1 << 20
"""Most values of a state that are not tensors."""


def open_deepspeed_checkpoint(
    folder: Path, adapt: Callable[[Manifest], Manifest] = lambda manifest: manifest
) -> FileSnapshot:
    """Open a checkpoint of DeepSpeed for reading, with a manifest that is built from its files.

    The items are `model`, `optimizer`, `scheduler` and `scaler`, numbered if there are several engines. Weights are the float32
    ones where DeepSpeed has them, and optimizer state is by the name of the parameter, `model.layer.weight`. The checkpoint has
    no checksums, and those of its parts are empty. `adapt` changes the manifest before the checkpoint is opened.

    Raises:
        CheckpointError: Files are missing, damaged, or of a feature that is not supported.
    """
    try:
        folders = find_engine_folders(folder)
        builder = _ManifestBuilder(folder.absolute())
        engines = [read_engine(path.absolute()) for path in folders]
        for index, engine in enumerate(engines):
            builder.add_engine(engine, f"_{index}" if index else "")
        modified = (folders[0] / engines[0].model_file).stat().st_mtime
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise CheckpointError(
            f"{folder} cannot be read as a checkpoint of DeepSpeed: {type(error).__name__}: {error}"
        ) from error
    manifest = adapt(builder.build(engines[0], modified))
    return FileSnapshot(Checkpoint(os.fspath(folder.absolute()), manifest), open_folder(folder, FileSystem()))


@dataclass
class _ManifestBuilder:
    """Collects the items and tensors of a checkpoint."""

    root: Path
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    count: int = 0

    def add_engine(self, engine: Engine, suffix: str) -> None:
        """Add the items of an engine; `suffix` is `_1` for the second."""
        model = {name: self._encode(value, f"model{suffix}", name) for name, value in engine.weights.items()}
        self.values[f"model{suffix}"] = model | {alias: model[name] for alias, name in engine.ties.items()}
        if engine.optimizer is not None:
            state = engine.optimizer
            if "groups" in state:
                prefix = f"model{suffix}."
                state = {
                    **state,
                    "groups": [
                        {**group, "params": [prefix + name for name in group["params"]]}
                        for group in state["groups"]
                    ],
                    "state": {prefix + name: each for name, each in state["state"].items()},
                }
            else:
                state = {"format": "torch", "state_dict": state}
            self.values[f"optimizer{suffix}"] = self._encode(state, f"optimizer{suffix}", "")
        scheduler = engine.common.get("lr_scheduler")
        # DeepSpeed's own schedulers have other states than those of torch.
        if isinstance(scheduler, dict) and "last_epoch" in scheduler:
            self.values[f"scheduler{suffix}"] = self._encode(scheduler, f"scheduler{suffix}", "")
        if engine.scaler is not None:
            self.values["scaler"] = engine.scaler

    def build(self, engine: Engine, modified: float) -> Manifest:
        """Return the manifest."""
        saved_at = datetime.fromtimestamp(modified, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        version = str(engine.common.get("ds_version") or "of an unknown version")
        return Manifest(
            "",
            saved_at,
            engine.world_size,
            engine.steps,
            {"deepspeed": version},
            self.values,
            {},
            self.tensors,
            self.files,
            run={"precision": engine.precision} if engine.precision else {},
        )

    def _encode(self, value: Any, item: str, path: str) -> Any:
        """Return a value as JSON, and add its tensors."""
        self.count += 1
        if self.count > _MAX_VALUES:
            raise CheckpointError(f"{self.root} has more than {_MAX_VALUES} values that are not tensors")
        if isinstance(value, StoredTensor):
            value = TensorParts(value.shape, (value.all(),))
        if isinstance(value, TensorParts):
            # Each occurrence is a tensor of its own, also if several share their bytes.
            name = f"{item}/{path}".replace("#", "%23")
            self.tensors[name] = self._build_entry(value, name)
            return {KEY: "tensor", "name": name}
        if isinstance(value, dict):
            if all(type(key) is str and key != KEY for key in value):
                return {
                    key: self._encode(each, item, f"{path}.{key}" if path else key)
                    for key, each in value.items()
                }
            pairs = [[key, self._encode(each, item, f"{path}.{key}")] for key, each in value.items()]
            return {KEY: "dict", "items": pairs}
        if isinstance(value, (list, tuple)):
            items = [self._encode(each, item, f"{path}.{index}") for index, each in enumerate(value)]
            return items if isinstance(value, list) else {KEY: "tuple", "items": items}
        if value is None or type(value) in {bool, int, str}:
            return value
        if type(value) is float:
            is_finite = value - value == 0
            return value if is_finite else {KEY: "float", "value": repr(value)}
        kind = value.name if isinstance(value, Unknown) else type(value).__name__
        raise CheckpointError(
            f"{item} of {self.root} has a {kind} in {path or 'its state'}, which accel cannot read"
        )

    def _build_entry(self, parts: TensorParts, name: str) -> TensorEntry:
        dtypes = {each.tensor.dtype for each in parts.ranges if each.count}
        if len(dtypes) > 1:
            raise CheckpointError(
                f"{name} of {self.root} has parts of different dtypes: {', '.join(sorted(dtypes))}"
            )
        dtype = next(iter(dtypes), parts.ranges[0].tensor.dtype if parts.ranges else "float32")
        chunks = []
        for start, part in _iterate_offsets(parts.ranges):
            tensor = part.tensor
            if not tensor.is_contiguous:
                raise CheckpointError(
                    f"{name} in {tensor.file} is not contiguous, and cannot be read in parts"
                )
            file = self._add_file(tensor.file)
            size = ITEM_BYTES[dtype]
            for offset, offsets, sizes in iterate_boxes(parts.shape, start, part.count):
                begin = tensor.start + (part.start + offset - start) * size
                chunks.append(Chunk(file, begin, math.prod(sizes) * size, "", offsets, sizes))
        return TensorEntry(dtype, parts.shape, tuple(chunks))

    def _add_file(self, path: Path) -> str:
        name = path.relative_to(self.root).as_posix()
        if name not in self.files:
            self.files[name] = FileEntry(path.stat().st_size, "")
        return name


def _iterate_offsets(ranges: Sequence[TensorRange]) -> Iterator[tuple[int, TensorRange]]:
    """Yield ranges with their offset in the tensor that they form."""
    offset = 0
    for each in ranges:
        if each.count:
            yield offset, each
        offset += each.count
