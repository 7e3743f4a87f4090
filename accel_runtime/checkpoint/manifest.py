"""The manifest: what a checkpoint holds, where every byte of it lies and what it must hash to. Needs no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import xxhash

from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.form import Doubt, check

__all__ = ["NAME", "UNFINISHED", "Chunk", "File", "Manifest", "Stored", "checksum", "item_of", "own_name"]

NAME = "checkpoint.json"
"""The file without which a directory is no checkpoint."""
UNFINISHED = ".unfinished"
"""The file that is in a directory from the start until all the others are."""
FORMAT = 1
"""The version of what is around the sections: a JSON object with its checksum in front."""
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
"""The version of each section.

It rises where a reader of the version before would take something for what it is not. A field that such a reader may leave
out raises nothing: readers leave out what they do not know. This version of accel reads all versions up to these.
"""
_TEXT = re.compile(r'\{"checksum":"([0-9a-f]{16})",\n"checkpoint":(\{.*\})\}\n', re.DOTALL)


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor, in one place of one file."""

    file: str
    """Relative to the checkpoint."""
    start: int
    """Where it begins in the file, in bytes."""
    bytes: int
    """How long it is; elements in row-major order, little endian."""
    checksum: str
    """Of these bytes; see `checksum`."""
    offsets: tuple[int, ...]
    """Where the part begins in the tensor, for every dimension."""
    sizes: tuple[int, ...]
    """How long it is in every dimension."""


@dataclass(frozen=True)
class Stored:
    """A tensor, of which every element lies in exactly one chunk."""

    dtype: str
    """torch's name, as `float32`."""
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def bytes(self) -> int:
        """What all its chunks take."""
        return sum(chunk.bytes for chunk in self.chunks)


@dataclass(frozen=True)
class File:
    """A file of a checkpoint."""

    bytes: int
    checksum: str
    """Of the whole file; see `checksum`."""
    header: int = 0
    """Of a data file, how many bytes come before the first chunk."""
    header_checksum: str = ""
    """Of these bytes."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Tensors are named `item/path`. One that only rank 2 has, or has other values there, is named `item/path#2`.
    """

    save: str
    """A name that no other save has; it stands in every data file too."""
    saved_at: str
    """When, in UTC: `2026-11-21T15:00:00Z`."""
    world_size: int
    """How many processes wrote it."""
    step: int
    """Optimizer steps until then."""
    versions: Mapping[str, str]
    """Of accel and torch."""
    values: Mapping[str, Any]
    """For every item all ranks agree on, its state as `values.packed` gives it: references to tensors in it."""
    own: Mapping[str, list[Any]] = field(default_factory=dict)
    """The same for items that differ: one state a rank."""
    tensors: Mapping[str, Stored] = field(default_factory=dict)
    files: Mapping[str, File] = field(default_factory=dict)
    """Every file but this one, also those that hooks of the script wrote."""
    about: Mapping[str, str] = field(default_factory=dict)
    """For items that a class of the script stands behind, its name."""
    run: Mapping[str, str] = field(default_factory=dict)
    """What the run was called by those who started it: `launch`, `slurm_job`."""

    @property
    def items(self) -> list[str]:
        """The names of all items."""
        return sorted({*self.values, *self.own})

    @property
    def bytes(self) -> int:
        """What all files but the manifest take."""
        return sum(file.bytes for file in self.files.values())

    def tensors_of(self, item: str) -> Iterator[str]:
        """The names of an item's tensors."""
        return (name for name in self.tensors if item_of(name) == item)

    def parts(self, items: Iterable[str]) -> Iterator[tuple[str, Chunk]]:
        """What has to be read to know that these items, and the files of hooks, are as they were written.

        Chunks of tensors under the tensors' names; headers and other files as if they were such.
        """
        wanted, files = (
            set(items),
            {chunk.file for stored in self.tensors.values() for chunk in stored.chunks},
        )
        touched = self.files.keys() - files
        for name, stored in self.tensors.items():
            if item_of(name) in wanted:
                touched |= {chunk.file for chunk in stored.chunks}
                yield from ((name, chunk) for chunk in stored.chunks)
        for name in sorted(touched):
            file = self.files[name]
            if name in files:
                yield "its header", Chunk(name, 0, file.header, file.header_checksum, (), ())
            else:
                yield "the file", Chunk(name, 0, file.bytes, file.checksum, (), ())

    def text(self) -> str:
        """The manifest as the file's text, its own checksum in front."""
        told = {"format": FORMAT, "sections": SECTIONS} | asdict(self)
        body = json.dumps(told, separators=(",", ":"))
        return f'{{"checksum":"{checksum(body.encode())}",\n"checkpoint":{body}}}\n'

    @classmethod
    def parsed(cls, text: str, path: Path) -> Manifest:
        """The manifest this text says.

        Args:
            text: What `text` gave.
            path: Where it was found, for messages.

        Raises:
            CheckpointError: It is damaged, cannot be true, or is written by a newer accel.
        """
        matched = _TEXT.fullmatch(text)
        if matched is None:
            raise CheckpointError(f"{path} is damaged: it is no manifest of a checkpoint")
        told, found = matched[1], checksum(matched[2].encode(errors="replace"))
        if found != told:
            raise CheckpointError(f"{path} is damaged: its checksum is {found} and should be {told}")
        try:
            body = json.loads(matched[2])
            number, sections = body["format"], body.get("sections", {})
        except (ValueError, KeyError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: it is no manifest of a checkpoint") from error
        if type(number) is not int or number != FORMAT:
            raise CheckpointError(
                f"{path} has format {number}, and this version of accel reads format {FORMAT}: "
                f"it was written by accel {_writer(body)}"
            )
        _check_sections(sections, body, path)
        try:
            check(body, frozenset({NAME, UNFINISHED}))
        except Doubt as doubt:
            raise CheckpointError(f"{path} cannot be used: {doubt}") from doubt
        return cls._of(body)

    @classmethod
    def _of(cls, body: dict[str, Any]) -> Manifest:
        told = _known(cls, body)
        told["tensors"] = {name: _stored(stored) for name, stored in told.get("tensors", {}).items()}
        told["files"] = {name: File(**_known(File, file)) for name, file in told.get("files", {}).items()}
        return cls(**told)


def checksum(data: bytes | memoryview) -> str:
    """XXH3 of 64 bits, 16 hexadecimal digits, as `xxhsum -H3` prints it.

    An accident is noticed, a forgery is not: that would take a key.
    """
    return xxhash.xxh3_64_hexdigest(data)


def item_of(tensor: str) -> str:
    """The item a tensor belongs to."""
    return tensor.split("/", 1)[0]


def _check_sections(sections: Any, body: dict[str, Any], path: Path) -> None:
    """Refuse sections of a version that only a newer accel reads."""
    if not isinstance(sections, dict):
        raise CheckpointError(f"{path} cannot be used: sections is {type(sections).__name__}, not an object")
    for name, version in sections.items():
        if name in SECTIONS and (type(version) is not int or not 1 <= version <= SECTIONS[name]):
            raise CheckpointError(
                f"{path} has version {version} of {name}, and this version of accel reads versions up to {SECTIONS[name]}: "
                f"it was written by accel {_writer(body)}. Install that version to load it."
            )


def _known(kind: Any, told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a dataclass out of JSON that may have others."""
    names = {one.name for one in fields(kind)}
    return {name: value for name, value in told.items() if name in names}


def _writer(body: dict[str, Any]) -> str:
    versions = body.get("versions")
    return str(versions.get("accel")) if isinstance(versions, dict) else "of another version"


def own_name(tensor: str, rank: int) -> str:
    """What a tensor is called that differs from rank to rank."""
    return f"{tensor}#{rank}"


def _stored(stored: dict[str, Any]) -> Stored:
    chunks = tuple(
        Chunk(**_known(Chunk, chunk) | {"offsets": tuple(chunk["offsets"]), "sizes": tuple(chunk["sizes"])})
        for chunk in stored["chunks"]
    )
    return Stored(stored["dtype"], tuple(stored["shape"]), chunks)
