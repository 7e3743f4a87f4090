"""The manifest of a checkpoint: items, tensors, files and checksums. Imports no torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import IO, Any

import xxhash

from accel_runtime.checkpoint.errors import CheckpointError

__all__ = [
    "NAME",
    "UNFINISHED",
    "Chunk",
    "FileEntry",
    "Manifest",
    "TensorEntry",
    "hash_bytes",
    "hash_file",
    "item_of_tensor",
    "rank_tensor_name",
]

NAME = "checkpoint.json"
"""File name of the manifest."""
UNFINISHED = ".unfinished"
"""File that marks a directory as incomplete."""
FORMAT = 1
"""Version of the frame around the sections: a JSON object after its checksum."""
SECTIONS = {
    "layout": 1,  # `tensors` and `files`
    "values": 1,  # how the states of items are packed into JSON
    "model": 1,  # the state of an item of this kind, and so on
    "optimizer": 1,
    "scheduler": 1,
    "loader": 1,
    "registered": 1,
    "scaler": 1,
    "window": 1,
    "replicas": 1,
    "counters": 1,
    "random": 1,
}
"""Version of each section.

A version is increased if an older reader would misread the section; fields that it may ignore need no new version. This
version of accel reads all versions up to these.
"""
_TEXT = re.compile(r'\{"checksum":"([0-9a-f]{16})",\n"checkpoint":(\{.*\})\}\n', re.DOTALL)


@dataclass(frozen=True)
class Chunk:
    """A contiguous part of a file with a part of a tensor."""

    file: str
    """Relative to the checkpoint."""
    start: int
    """Offset in the file, in bytes."""
    bytes: int
    """Length; elements are in row-major order, little endian."""
    checksum: str
    """Checksum of these bytes; see `hash_bytes`."""
    offsets: tuple[int, ...]
    """Offset in the tensor, by dimension."""
    sizes: tuple[int, ...]
    """Size, by dimension."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor; each element is in exactly one chunk."""

    dtype: str
    """Name of the torch dtype, such as `float32`."""
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def bytes(self) -> int:
        """Size of all chunks."""
        return sum(chunk.bytes for chunk in self.chunks)


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint."""

    bytes: int
    checksum: str
    """Checksum of the file; see `hash_bytes`."""
    header: int = 0
    """Bytes before the first chunk of a data file."""
    header_checksum: str = ""
    """Checksum of the header."""


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint.

    Tensors are named `item/path`; a tensor that is specific to rank 2 is named `item/path#2`.
    """

    save: str
    """Unique name of the save, also in the header of every data file."""
    saved_at: str
    """Time in UTC: `2026-11-21T15:00:00Z`."""
    world_size: int
    """Number of processes that wrote the checkpoint."""
    step: int
    """Number of optimizer steps before the save."""
    versions: Mapping[str, str]
    """Versions of accel and torch."""
    values: Mapping[str, Any]
    """Serialized state of each item that is equal on all ranks."""
    own: Mapping[str, list[Any]] = field(default_factory=dict)
    """Serialized states of each other item, one for each rank."""
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    """All files except the manifest, including those of hooks."""
    about: Mapping[str, str] = field(default_factory=dict)
    """Class name of each item that restores an object of the script."""
    run: Mapping[str, str] = field(default_factory=dict)
    """Identity of the run: `launch`, `slurm_job`."""

    @property
    def items(self) -> list[str]:
        """Names of all items."""
        return sorted({*self.values, *self.own})

    @property
    def bytes(self) -> int:
        """Size of all files except the manifest."""
        return sum(file.bytes for file in self.files.values())

    def tensors_of(self, item: str) -> Iterator[str]:
        """Return the names of the tensors of an item."""
        return (name for name in self.tensors if item_of_tensor(name) == item)

    def parts(self, items: Iterable[str]) -> Iterator[tuple[str, Chunk]]:
        """Yield the chunks to verify for these items and for the files of hooks, by the names of their tensors.

        Headers and files of hooks are yielded as chunks too.
        """
        items = set(items)
        data_files = {chunk.file for entry in self.tensors.values() for chunk in entry.chunks}
        files = self.files.keys() - data_files
        for name, entry in self.tensors.items():
            if item_of_tensor(name) in items:
                files |= {chunk.file for chunk in entry.chunks}
                yield from ((name, chunk) for chunk in entry.chunks)
        for name in sorted(files):
            file = self.files[name]
            if name in data_files:
                yield "its header", Chunk(name, 0, file.header, file.header_checksum, (), ())
            else:
                yield "the file", Chunk(name, 0, file.bytes, file.checksum, (), ())

    def text(self) -> str:
        """Return the text of the manifest file, which begins with its own checksum."""
        body = json.dumps({"format": FORMAT, "sections": SECTIONS} | asdict(self), separators=(",", ":"))
        return f'{{"checksum":"{hash_bytes(body.encode())}",\n"checkpoint":{body}}}\n'

    @classmethod
    def parse(cls, text: str, path: Path) -> Manifest:
        """Parse the text of the manifest file `path`; raise `CheckpointError` if it is damaged or too new."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise CheckpointError(f"{path} is damaged: it is not a checkpoint manifest")
        expected, checksum = match[1], hash_bytes(match[2].encode(errors="replace"))
        if checksum != expected:
            raise CheckpointError(f"{path} is damaged: its checksum is {checksum} and should be {expected}")
        try:
            body = json.loads(match[2])
            number, sections = body["format"], body.get("sections", {})
        except (ValueError, KeyError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: it is not a checkpoint manifest") from error
        if type(number) is not int or number != FORMAT:
            raise CheckpointError(
                f"{path} has format {number}, and this version of accel reads format {FORMAT}: "
                f"it was written by accel {_read_version(body)}"
            )
        _check_sections(sections, body, path)
        try:
            manifest = cls(
                **_select_fields(cls, body)
                | {
                    "own": body["own"],
                    "tensors": {name: _parse_tensor(entry) for name, entry in body["tensors"].items()},
                    "files": {
                        name: FileEntry(**_select_fields(FileEntry, file))
                        for name, file in body["files"].items()
                    },
                }
            )
            _check_layout(manifest)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be used: {error}") from error
        return manifest


def hash_bytes(data: bytes | memoryview) -> str:
    """Return the 64-bit XXH3 of data as 16 hexadecimal digits, like `xxhsum -H3`; it detects accidents, not forgery."""
    return xxhash.xxh3_64_hexdigest(data)


def hash_file(file: IO[bytes]) -> str:
    """Return the checksum of an open file, read from its offset to the end."""
    checksum = xxhash.xxh3_64()
    while block := file.read(1 << 22):
        checksum.update(block)
    return checksum.hexdigest()


def item_of_tensor(tensor: str) -> str:
    """Return the item that a tensor belongs to."""
    return tensor.split("/", 1)[0]


def rank_tensor_name(tensor: str, rank: int) -> str:
    """Return the name of a tensor that differs from rank to rank."""
    return f"{tensor}#{rank}"


def _check_sections(sections: Any, body: dict[str, Any], path: Path) -> None:
    """Raise `CheckpointError` if only a newer accel can read a section."""
    if not isinstance(sections, dict):
        raise CheckpointError(f"{path} cannot be used: sections is {type(sections).__name__}, not an object")
    for name, version in sections.items():
        if name in SECTIONS and (type(version) is not int or not 1 <= version <= SECTIONS[name]):
            raise CheckpointError(
                f"{path} has version {version} of {name}, and this version of accel reads versions up to {SECTIONS[name]}: "
                f"it was written by accel {_read_version(body)}. Install that version to load it."
            )


def _read_version(body: dict[str, Any]) -> str:
    versions = body.get("versions")
    return str(versions.get("accel")) if isinstance(versions, dict) else "of another version"


def _select_fields(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a dataclass, without those that only a newer accel knows."""
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in values.items() if name in names}


def _parse_tensor(entry: Mapping[str, Any]) -> TensorEntry:
    chunks = tuple(
        Chunk(
            **_select_fields(Chunk, chunk)
            | {"offsets": tuple(chunk["offsets"]), "sizes": tuple(chunk["sizes"])}
        )
        for chunk in entry["chunks"]
    )
    return TensorEntry(entry["dtype"], tuple(entry["shape"]), chunks)


def _check_layout(manifest: Manifest) -> None:
    """Raise `ValueError` or `TypeError` if a path leads out of the directory or chunks do not cover their tensor exactly."""
    for name in ("values", "own", "about", "versions", "run"):
        if not isinstance(value := getattr(manifest, name), dict):
            raise TypeError(f"{name} is {type(value).__name__}, not an object")
    for name in manifest.files:
        path = PurePosixPath(name)
        inside = name and path.as_posix() == name and not path.is_absolute() and ".." not in path.parts
        if not inside or name in {".", NAME, UNFINISHED} or "\0" in name:
            raise ValueError(f"{name!r} is not the name of a file inside a checkpoint")
    for name, entry in manifest.tensors.items():
        for chunk in entry.chunks:
            if chunk.file not in manifest.files:
                raise ValueError(f"tensor {name} is in {chunk.file!r}, which is not a file of the checkpoint")
            if not 0 <= chunk.start <= chunk.start + chunk.bytes <= manifest.files[chunk.file].bytes:
                raise ValueError(f"tensor {name} exceeds {chunk.file}")
        if not _is_covered(entry.shape, [(chunk.offsets, chunk.sizes) for chunk in entry.chunks]):
            raise ValueError(f"the chunks of tensor {name} do not cover it exactly once")


def _is_covered(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Return whether every element is in exactly one box."""
    for offsets, sizes in boxes:
        if any(
            start < 0 or size < 0 or start + size > end
            for start, size, end in zip(offsets, sizes, shape, strict=True)
        ):
            return False
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape) or any(size < 0 for size in shape):
        return False
    filled = sorted((offsets, sizes) for offsets, sizes in boxes if math.prod(sizes))
    if not shape:
        return len(filled) == 1
    # The number of elements is right, so boxes cover the tensor if none overlap. Sorted by their first dimension, a
    # box can only overlap those that start before it ends.
    for index, (offsets, sizes) in enumerate(filled):
        for later_offsets, later_sizes in filled[index + 1 :]:
            if later_offsets[0] >= offsets[0] + sizes[0]:
                break
            if all(
                start < later_start + later_size and later_start < start + size
                for start, size, later_start, later_size in zip(
                    offsets, sizes, later_offsets, later_sizes, strict=True
                )
            ):
                return False
    return True
