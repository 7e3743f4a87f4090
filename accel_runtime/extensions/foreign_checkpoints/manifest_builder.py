"""A checkpoint of another program as a snapshot: its manifest, and a snapshot that reads the bytes of its tensors."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from accel_runtime.extensions.foreign_checkpoints.deepspeed_folder import TensorParts
from accel_runtime.extensions.foreign_checkpoints.torch_file import MappedFile, Unknown, is_plain_tensor
from accel_runtime.foundation.precision import name_dtype
from accel_runtime.foundation.tensor_bytes import tensor_bytes
from accel_runtime.storage.directory import open_folder
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.file_store import FileSnapshot
from accel_runtime.storage.file_system import FileSystem
from accel_runtime.storage.manifest import Checkpoint, Chunk, FileEntry, Manifest, TensorEntry
from accel_runtime.storage.state_tree import KEY

__all__ = ["ManifestBuilder", "iterate_regions"]

_MAX_VALUES = 1 << 20
"""Most values of a state that are not tensors."""


@dataclass
class ManifestBuilder:
    """Collects the items and tensors of a checkpoint; `root` is the directory of its files."""

    root: Path
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    sources: dict[str, Callable[[], torch.Tensor]] = field(default_factory=dict)
    """Functions that return a contiguous tensor, by the name that chunks have as that of their file."""
    mapped: dict[str, MappedFile] = field(default_factory=dict)
    """Files that are the memory of these tensors, by the same name."""
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
        if is_plain_tensor(value):
            value = TensorParts(tuple(value.shape), (value,))
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

    def _build_entry(self, tensor: TensorParts, name: str) -> TensorEntry:
        parts = [part.detach() for part in tensor.parts if part.numel()]
        dtypes = {name_dtype(part.dtype) for part in parts or tensor.parts}
        if len(dtypes) > 1:
            raise CheckpointError(
                f"{name} of {self.root} has parts of different dtypes: {', '.join(sorted(dtypes))}"
            )
        chunks, start = [], 0
        for index, part in enumerate(parts):
            if not part.is_contiguous():
                raise CheckpointError(f"{name} of {self.root} is not contiguous, and cannot be read in parts")
            file, size = f"{name}:{index}", part.element_size()
            self.sources[file] = partial(_get_first, part)
            if mapped := MappedFile.find(part):
                self.mapped[file] = mapped
            for offset, offsets, sizes in iterate_regions(tensor.shape, start, part.numel()):
                begin, length = (offset - start) * size, math.prod(sizes) * size
                chunks.append(Chunk(file, begin, length, "", offsets, sizes))
            start += part.numel()
        return TensorEntry(next(iter(dtypes), "float32"), tensor.shape, tuple(chunks))

    def add_file(self, path: Path) -> str:
        """Add a file, if it is not there yet, and return its name."""
        name = path.relative_to(self.root).as_posix()
        if name not in self.files:
            self.files[name] = FileEntry(path.stat().st_size, "")
        return name

    def open(self, manifest: Manifest) -> FileSnapshot:
        """Return the open checkpoint, with this manifest or one that was made from it."""
        folder = open_folder(self.root, FileSystem())
        return _TensorSnapshot(Checkpoint(os.fspath(self.root), manifest), folder, self.sources, self.mapped)


class _TensorSnapshot(FileSnapshot):
    """An open folder whose chunks are bytes of tensors, which torch reads."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        folder: int,
        sources: Mapping[str, Callable[[], torch.Tensor]],
        mapped: Mapping[str, MappedFile],
    ) -> None:
        super().__init__(checkpoint, folder)
        self._mapped = mapped
        self._sources, self._newest = sources, threading.local()

    def get_range(self, name: str, start: int, buffer: memoryview) -> int:
        """Read from a tensor, which is kept for the next read of this thread."""
        if getattr(self._newest, "name", None) != name:
            self._newest.tensor = None  # its memory is free before the next one is read
            self._newest.tensor, self._newest.name = self._sources[name](), name
        if name in self._mapped:
            self._mapped[name].check()
        part = tensor_bytes(self._newest.tensor)[start : start + len(buffer)]
        buffer[: len(part)] = part
        return len(part)


def _get_first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def iterate_regions(
    shape: Sequence[int], start: int, count: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Split consecutive elements of a row-major tensor into regions; yield offset in elements, offsets and sizes by dimension.

    The elements of each region are consecutive too.
    """
    if not shape:
        if count:
            yield start, (), ()
        return
    row = math.prod(shape[1:])
    end = start + count
    while start < end:
        index, inside = divmod(start, row)
        rows = (end - start) // row
        if inside or not rows:
            length = min(row - inside, end - start)
            for offset, offsets, sizes in iterate_regions(shape[1:], inside, length):
                yield index * row + offset, (index, *offsets), (1, *sizes)
            start += length
        else:
            yield start, (index, *(0 for _ in shape[1:])), (rows, *shape[1:])
            start += rows * row
