"""Build the manifest of a checkpoint that another program wrote, from the places of its tensors. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_runtime.extensions.foreign_checkpoints.deepspeed_folder import TensorParts
from accel_runtime.extensions.foreign_checkpoints.torch_file import (
    StoredTensor,
    TensorRange,
    Unknown,
    iterate_regions,
)
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.manifest import Chunk, FileEntry, TensorEntry
from accel_runtime.storage.schema import ITEM_BYTES
from accel_runtime.storage.state_tree import KEY

__all__ = ["ManifestBuilder"]

_MAX_VALUES = 1 << 20
"""Most values of a state that are not tensors."""


@dataclass
class ManifestBuilder:
    """Collects the items and tensors of a checkpoint; `root` is the directory of its files."""

    root: Path
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    count: int = 0

    def encode(self, value: Any, item: str, path: str) -> Any:
        """Return a value as JSON, and add its tensors.

        Args:
            value: Numbers, text and tensors; lists, tuples and dicts of them. A tensor is in ranges of a file, or an entry.
            item: Name of the item of the checkpoint.
            path: Path of the value in it.
        """
        self.count += 1
        if self.count > _MAX_VALUES:
            raise CheckpointError(f"{self.root} has more than {_MAX_VALUES} values that are not tensors")
        if isinstance(value, StoredTensor):
            value = TensorParts(value.shape, (value.all(),))
        if isinstance(value, TensorParts):
            value = self._build_entry(value, f"{item}/{path}")
        if isinstance(value, TensorEntry):
            # Each occurrence is a tensor of its own, also if several share their bytes.
            name = f"{item}/{path}".replace("#", "%23")
            self.tensors[name] = value
            return {KEY: "tensor", "name": name}
        if isinstance(value, dict):
            if all(type(key) is str and key != KEY for key in value):
                return {
                    key: self.encode(each, item, f"{path}.{key}" if path else key)
                    for key, each in value.items()
                }
            pairs = [[key, self.encode(each, item, f"{path}.{key}")] for key, each in value.items()]
            return {KEY: "dict", "items": pairs}
        if isinstance(value, (list, tuple)):
            items = [self.encode(each, item, f"{path}.{index}") for index, each in enumerate(value)]
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
            file = self.add_file(tensor.file)
            size = ITEM_BYTES[dtype]
            for offset, offsets, sizes in iterate_regions(parts.shape, start, part.count):
                begin = tensor.start + (part.start + offset - start) * size
                chunks.append(Chunk(file, begin, math.prod(sizes) * size, "", offsets, sizes))
        return TensorEntry(dtype, parts.shape, tuple(chunks))

    def add_file(self, path: Path) -> str:
        """Add a file, if it is not there yet, and return its name."""
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
