"""Read folders of torch.distributed.checkpoint (DCP) without running code in them: where each value is.

A folder has `.metadata`, a pickle of torch's class `Metadata`, and files `__R_N.distcp`, in which each value is a file of
`torch.save` from an offset on. The metadata lists the names of all values and, if a nested state dict was saved, the keys that
lead to each (torch/distributed/checkpoint/metadata.py and filesystem.py, 2.9 to 2.13).
"""

from __future__ import annotations

import math
import os
import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from accel_runtime.extensions.foreign_checkpoints.folders import METADATA, is_dcp_folder
from accel_runtime.extensions.foreign_checkpoints.torch_file import EmbeddedFile, Unknown
from accel_runtime.storage.errors import CheckpointError, RequestError, format_names
from accel_runtime.storage.file_system import FileSystem
from accel_runtime.storage.manifest import NAME
from accel_runtime.storage.schema import ITEM_BYTES, is_inside

__all__ = ["DcpFolder", "DcpTensor", "DcpValue", "Key", "read_dcp_folder"]

_SUFFIX = ".distcp"
_PREFIX = "torch.distributed.checkpoint."
_OLD_TENSORS = "torch.distributed._shard.sharded_tensor.metadata."
_ADMITTED = frozenset(
    {
        *(
            f"{_PREFIX}metadata.{name}"
            for name in (
                "Metadata",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "TensorProperties",
                "MetadataIndex",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        f"{_PREFIX}filesystem._StorageInfo",
        # torch before 2.3.
        f"{_OLD_TENSORS}TensorProperties",
        f"{_OLD_TENSORS}MEM_FORMAT_ENCODING",
        "torch.serialization._get_layout",
        *(
            f"{module}.{name}"
            for module in ("pathlib", "pathlib._local")
            for name in ("PosixPath", "WindowsPath")
        ),
    }
)
"""Classes of the metadata; none is imported, and no other is admitted."""
_SPLIT_NAMES = frozenset({"app", "model", "optimizer", "optim", "state", "state_dict", "module"})
"""First parts of names that were keys, in a folder whose metadata has no keys."""

Key = str | int


@dataclass(frozen=True)
class DcpTensor:
    """A tensor in chunks."""

    name: str
    dtype: str
    """Name of the torch dtype."""
    shape: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...], EmbeddedFile], ...]
    """Offsets and sizes by dimension, and location of each."""


@dataclass(frozen=True)
class DcpValue:
    """A value that is not a tensor."""

    name: str
    location: EmbeddedFile


@dataclass(frozen=True)
class DcpFolder:
    """Contents of a folder."""

    path: Path
    version: str
    """Version of the metadata."""
    entries: Mapping[tuple[Key, ...], DcpTensor | DcpValue]
    """Values by the keys that lead to them in the state dict."""


def read_dcp_folder(folder: Path) -> DcpFolder:
    """Read what a folder contains, except the values.

    Raises:
        CheckpointError: The folder is not complete, damaged, of another format, or its metadata has classes of others.
    """
    folder = folder.absolute()
    metadata = _read_metadata(folder)
    try:
        locations = _read_locations(folder, metadata)
        keys = metadata["planner_data"] if isinstance(metadata.get("planner_data"), dict) else {}
        entries = {}
        for name, stored in metadata["state_dict_metadata"].items():
            entries[_read_keys(name, keys.get(name))] = _read_entry(name, stored, locations)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{folder / METADATA} cannot be read: it is not that of torch.distributed.checkpoint, or is damaged "
            f"({type(error).__name__}: {error})"
        ) from error
    _require_files(folder, locations)
    return DcpFolder(folder, str(metadata.get("version") or "1.0.0"), entries)


def _read_metadata(folder: Path) -> Mapping[str, Any]:
    """Return the attributes of the object in the metadata."""
    path = folder / METADATA
    if not is_dcp_folder(folder):
        names = FileSystem().list_names(folder)
        if NAME in names:
            raise RequestError(f"{folder} is a checkpoint of accel, which load_state() and resume() load.")
        if any(name.endswith(_SUFFIX) for name in names):
            raise CheckpointError(
                f"{folder} is not complete: it has no .metadata, which is written last. The save was interrupted: use another folder."
            )
        raise RequestError(
            f"{folder} is not a checkpoint of torch.distributed.checkpoint: it has no .metadata. Give the folder that dcp.save wrote."
        )
    try:
        with os.fdopen(FileSystem().open_file(path, None, path.name), "rb") as file:
            text = file.read()
        _check_pickle(text)
        metadata = _MetadataUnpickler(path, text).load()
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read: it is damaged ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(metadata, Unknown) or metadata.name != f"{_PREFIX}metadata.Metadata":
        raise CheckpointError(
            f"{path} cannot be read: it is not the metadata of torch.distributed.checkpoint"
        )
    return metadata.fields


def _check_pickle(text: bytes) -> None:
    """Raise `ValueError` if a pickle is cut, or a damaged index or length in it would need memory out of proportion to its size."""
    for count, (operation, argument, _) in enumerate(pickletools.genops(text)):
        if operation.name in {"PUT", "BINPUT", "LONG_BINPUT"} and int(argument or 0) > count:
            raise ValueError(f"index {argument} of {count}")


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the objects of the metadata from stand-ins, and refuses every other class."""

    def __init__(self, path: Path, text: bytes) -> None:
        super().__init__(BytesIO(text), encoding="utf-8")
        self._path = path
        self._stand_ins: dict[str, Any] = {
            "torch.Size": tuple,
            "collections.OrderedDict": OrderedDict,
            "builtins.set": set,
        }

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in of a class."""
        full = f"{module}.{name}"
        if full in _ADMITTED and full not in self._stand_ins:
            self._stand_ins[full] = type(name, (Unknown,), {"name": full, "__slots__": ()})
        if module == "torch" and name in ITEM_BYTES:
            return name
        if full not in self._stand_ins:
            raise CheckpointError(
                f"{self._path} was not read: it names {full}, which is not part of the format and may run code. Use a folder that "
                "torch.distributed.checkpoint wrote."
            )
        return self._stand_ins[full]

    def persistent_load(self, pid: Any) -> Any:
        """Refuse references to tensors, which the metadata does not have."""
        raise ValueError(f"a reference {type(pid).__name__}")


def _read_locations(
    folder: Path, metadata: Mapping[str, Any]
) -> dict[tuple[str, tuple[int, ...] | None], EmbeddedFile]:
    """Return the location of each value, and of each chunk by its offset."""
    locations = {}
    for index, stored in metadata["storage_data"].items():
        where, info = index.fields, stored.fields
        file, start, length = info["relative_path"], info["offset"], info["length"]
        if not is_inside(file) or min(start, length) < 0:
            raise ValueError(f"a value in {file!r}")
        if info.get("transform_descriptors"):
            raise CheckpointError(
                f"{folder / file} cannot be read: its values are transformed ({', '.join(map(str, info['transform_descriptors']))}). "
                "Save without extensions of the writer."
            )
        offset = where.get("offset")
        locations[where["fqn"], None if offset is None else _read_sizes(offset)] = EmbeddedFile(
            folder / file, start, length
        )
    return locations


def _read_sizes(sizes: Any) -> tuple[int, ...]:
    numbers = tuple(sizes)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"the sizes {numbers}")
    return numbers


def _read_keys(name: Any, keys: Any) -> tuple[Key, ...]:
    """Return the keys that lead to a value: those of the metadata, else the parts of its name."""
    if type(name) is not str:
        raise TypeError(f"the name {name!r}")
    if keys is None:
        parts: list[Key] = []
        first, dot, rest = name.partition(".")
        while dot and first in _SPLIT_NAMES and "state" not in parts:
            parts.append(first)
            name = rest
            first, dot, rest = name.partition(".")
        return (*parts, name)
    if not keys or any(type(key) not in {str, int} for key in keys):
        raise TypeError(f"the keys {keys!r}")
    return tuple(keys)


def _read_entry(
    name: str, stored: Any, locations: Mapping[tuple[str, tuple[int, ...] | None], EmbeddedFile]
) -> DcpTensor | DcpValue:
    if stored.name.endswith(".BytesStorageMetadata"):
        return DcpValue(name, locations[name, None])
    if not stored.name.endswith(".TensorStorageMetadata"):
        raise TypeError(f"{name} is a {stored.name}")
    fields = stored.fields
    dtype = _read_dtype(name, fields["properties"])
    chunks = {}
    for chunk in fields["chunks"]:
        offsets, sizes = _read_sizes(chunk.fields["offsets"]), _read_sizes(chunk.fields["sizes"])
        if math.prod(sizes) or offsets not in chunks:
            chunks[offsets] = (offsets, sizes, locations[name, offsets])
    return DcpTensor(name, dtype, _read_sizes(fields["size"]), tuple(chunks.values()))


def _read_dtype(name: str, properties: Unknown) -> str:
    state = properties.state
    # A tuple in all versions; a dict if the class has no state of its own.
    dtype = state["dtype"] if isinstance(state, dict) else state[0]
    if dtype not in ITEM_BYTES:
        raise TypeError(f"{name} is of the dtype {dtype!r}")
    return str(dtype)


def _require_files(folder: Path, locations: Mapping[Any, EmbeddedFile]) -> None:
    """Raise `CheckpointError` if a file is missing, or shorter than its values."""
    ends: dict[Path, int] = {}
    for location in locations.values():
        ends[location.file] = max(ends.get(location.file, 0), location.start + location.length)
    sizes = {file: file.stat().st_size if file.is_file() else None for file in ends}
    cure = "Copy all files of the folder, from every node that wrote it."
    if missing := [file.name for file, size in sizes.items() if size is None]:
        verb = "is" if len(missing) == 1 else "are"
        raise CheckpointError(
            f"{folder} is not complete: {format_names(sorted(missing))} {verb} missing. {cure}"
        )
    for file, end in ends.items():
        if (size := sizes[file]) is not None and size < end:
            raise CheckpointError(f"{folder} is not complete: {file.name} has {size} bytes of {end}. {cure}")
