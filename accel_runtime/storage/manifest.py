"""Manifests of checkpoints: items, tensors, files and checksums, and their verification. Imports no torch."""

from __future__ import annotations

import gc
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import IO, Annotated, Any

import xxhash

from accel_runtime.environment.locations import StoreURL, is_url
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.schema import (
    ITEM_BYTES,
    MAX_BYTES,
    Checksum,
    Count,
    FieldError,
    Shape,
    ValueRule,
    Word,
    describe,
    is_inside,
    parse_strict_json,
    read_value,
    shorten,
)
from accel_runtime.storage.state_tree import list_tensor_names

__all__ = [
    "BLOCK_BYTES",
    "NAME",
    "SIBLING",
    "UNFINISHED",
    "Checkpoint",
    "Chunk",
    "FileEntry",
    "Manifest",
    "TensorEntry",
    "checkpoint_name",
    "hash_bytes",
    "hash_file",
    "item_of_tensor",
    "parse_number",
    "rank_tensor_name",
]

NAME = "checkpoint.json"
"""File name of the manifest."""
UNFINISHED = ".unfinished"
"""File that marks a directory as incomplete."""
VERSION = 1
"""Version of the format: of this file, of the states of items, and of the names of files.

It is increased if an older reader would misread a checkpoint; fields that it may ignore need no new version.
"""
BLOCK_BYTES = 1 << 22
"""Bytes of a block of a chunk, which has a checksum of its own."""
_NUMBERED = re.compile(r"checkpoint_(\d+)")
SIBLING = re.compile(r"\.(.+)\.(saving|replaced|removing)(?:-([0-9a-f]+))?")
"""Names of directories on the way to or from a checkpoint's name: the name, the state, and the save."""
_TEXT = re.compile(r'\{"checksum":"([0-9a-f]{16})",\n"checkpoint":(\{.*\})\}\n', re.DOTALL)


_NAME_AND_RANK = re.compile(r"(?s)[^#]+(#\d{1,7})?")
_FileName = Annotated[
    str,
    ValueRule(
        "the name of a file inside a checkpoint",
        lambda name: is_inside(name) and name not in {NAME, UNFINISHED},
    ),
]
_TensorName = Annotated[
    str,
    ValueRule("the name of a tensor", lambda name: "/" in name and _NAME_AND_RANK.fullmatch(name)),
]
_Dtype = Annotated[str, ValueRule("the name of a dtype", re.compile(r"[a-z][a-z0-9_]{0,40}").fullmatch)]
_Time = Annotated[
    str,
    ValueRule(
        "a time such as 2026-11-21T15:00:00Z",
        re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII).fullmatch,
    ),
]
_HeaderChecksum = Annotated[str, ValueRule("16 hexadecimal digits", re.compile("([0-9a-f]{16})?").fullmatch)]
_WorldSize = Annotated[int, ValueRule("from 1 to 2**20", lambda size: 1 <= size <= 1 << 20)]
_MAX_SPLIT = 6
"""Dimensions along which the chunks of a tensor may be split; a mesh of processes has fewer."""
_MAX_BESIDE = 256
"""Other chunks of a node that a chunk may have beside it, on average."""


@dataclass(frozen=True)
class Chunk:
    """A contiguous part of a file with a part of a tensor."""

    file: str
    """Relative to the checkpoint."""
    start: Count
    """Offset in the file, in bytes."""
    bytes: Count
    """Length; elements are in row-major order, little endian."""
    checksum: Checksum
    """Checksum of these bytes; see `hash_bytes`."""
    offsets: Shape
    """Offset in the tensor, by dimension."""
    sizes: Shape
    """Size, by dimension."""
    blocks: tuple[Checksum, ...] = ()
    """Checksums of each `BLOCK_BYTES` of a larger chunk, by which a part of it is verified; empty for a smaller one."""

    def check(self) -> None:
        """Raise `FieldError` if the number of blocks is wrong."""
        if self.blocks and len(self.blocks) != -(-self.bytes // BLOCK_BYTES):
            raise FieldError(f"has {len(self.blocks)} checksums for {self.bytes} bytes", ("blocks",))


@dataclass(frozen=True)
class TensorEntry:
    """A tensor; each element is in exactly one chunk, or in at most one in a node's part of a checkpoint."""

    dtype: _Dtype
    """Name of the torch dtype, such as `float32`."""
    shape: Shape
    chunks: tuple[Chunk, ...]

    @property
    def bytes(self) -> int:
        """Size of all chunks."""
        return sum(chunk.bytes for chunk in self.chunks)

    def check(self) -> None:
        """Raise `FieldError` if a chunk does not fit dtype and shape."""
        itemsize = ITEM_BYTES.get(self.dtype)
        for index, chunk in enumerate(self.chunks):
            dimensions = len(chunk.offsets), len(chunk.sizes)
            inside = dimensions == (len(self.shape),) * 2 and all(
                start + size <= end
                for start, size, end in zip(chunk.offsets, chunk.sizes, self.shape, strict=True)
            )
            if not inside:
                raise FieldError(f"is not inside the shape {describe_shape(self.shape)}", ("chunks", index))
            count = math.prod(chunk.sizes)
            if itemsize is None and count:  # a dtype of a newer torch
                itemsize = chunk.bytes // count
            if chunk.bytes != count * (itemsize or 0):
                raise FieldError(
                    f"is {self.dtype} of shape {describe_shape(chunk.sizes)}, and has {chunk.bytes} bytes",
                    ("chunks", index),
                )

    @property
    def is_complete(self) -> bool:
        """Return whether the chunks cover the tensor exactly once."""
        return _is_covered(self.shape, [(chunk.offsets, chunk.sizes) for chunk in self.chunks])

    def check_coverage(self, *, is_node_part: bool) -> None:
        """Raise `FieldError` if the chunks do not cover the tensor exactly once; chunks of a part must not overlap."""
        if is_node_part:
            if _have_overlap([chunk for chunk in self.chunks if chunk.bytes]):
                raise FieldError("cover elements twice", ("chunks",))
        elif not self.is_complete:
            raise FieldError("do not cover the tensor exactly once", ("chunks",))


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint."""

    bytes: Count
    checksum: Checksum
    """Checksum of the file; see `hash_bytes`."""
    header: Count = 0
    """Bytes before the first chunk of a data file."""
    header_checksum: _HeaderChecksum = ""
    """Checksum of the header."""

    def check(self) -> None:
        """Raise `FieldError` if the header is larger than the file."""
        if self.header > self.bytes:
            raise FieldError(f"is {self.header}, and the file has {self.bytes} bytes", ("header",))


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint.

    Tensors are named `item/path`; a tensor that is specific to rank 2 is named `item/path#2`. On the disks of several nodes,
    each node has a manifest of its part, with the same `save`.
    """

    save: Word
    """Unique name of the save, also in the header of every data file."""
    saved_at: _Time
    """Time in UTC: `2026-11-21T15:00:00Z`."""
    world_size: _WorldSize
    """Number of processes that wrote the checkpoint."""
    step: Count
    """Number of optimizer steps before the save."""
    versions: Mapping[str, Word]
    """Versions of accel and torch."""
    values: Mapping[str, Any]
    """Serialized state of each item that is equal on all ranks."""
    values_by_rank: Mapping[str, list[Any]] = field(default_factory=dict, metadata={"required": True})
    """Serialized states of each other item, one for each rank."""
    tensors: Mapping[_TensorName, TensorEntry] = field(default_factory=dict, metadata={"required": True})
    files: Mapping[_FileName, FileEntry] = field(default_factory=dict, metadata={"required": True})
    """All files except the manifest, including those of hooks."""
    class_names: Mapping[str, Word] = field(default_factory=dict)
    """Class name of each item that restores an object of the script."""
    run: Mapping[str, Word] = field(default_factory=dict)
    """Identity of the run: `launch`, `slurm_job`, `sky_task`; `lineage` is equal in the checkpoints of runs that continue each other."""
    origin: Word = ""
    """Format that the checkpoint was imported from, which has no random states and loaders; empty if accel saved it."""
    ranks: tuple[Count, ...] = ()
    """Ranks whose state this part has, if the checkpoint is on the disks of several nodes; empty in a full checkpoint.

    A part has the tensors that are equal on all ranks, and the shards, tensors and values of these ranks. `values_by_rank` has
    null for the others.
    """

    @property
    def is_node_part(self) -> bool:
        """Return whether this is the part of one node, and other nodes have the rest."""
        return bool(self.ranks)

    def is_rank_specific(self, item: str) -> bool:
        """Return whether the states of an item differ between ranks."""
        return item in self.values_by_rank or any("#" in name for name in self.tensors_of(item))

    def find_incomplete(self, item: str) -> str | None:
        """Return a tensor of an item of which this part does not have every element; None if there is none."""
        if not self.is_node_part:
            return None
        return next((name for name in self.tensors_of(item) if not self.tensors[name].is_complete), None)

    @property
    def items(self) -> list[str]:
        """Names of all items."""
        return sorted({*self.values, *self.values_by_rank})

    @property
    def bytes(self) -> int:
        """Size of all files except the manifest."""
        return sum(file.bytes for file in self.files.values())

    def tensors_of(self, item: str) -> Sequence[str]:
        """Return the names of the tensors of an item."""
        return self._names_by_item.get(item, ())

    @cached_property
    def _names_by_item(self) -> Mapping[str, list[str]]:
        names: dict[str, list[str]] = {}
        for name in self.tensors:
            names.setdefault(item_of_tensor(name), []).append(name)
        return names

    def check(self) -> None:
        """Raise `FieldError` if chunks are not inside their files, or states refer to tensors that are missing."""
        self._check_ranks()
        self._check_coverage()
        self._check_chunks()
        for item, states in self.values_by_rank.items():
            if item in self.values:
                raise FieldError("is in 'values' too", ("values_by_rank", item))
            if len(states) != self.world_size:
                raise FieldError(
                    f"has {len(states)} states, and {self.world_size} processes wrote the checkpoint",
                    ("values_by_rank", item),
                )
        ranks = self._list_tensor_ranks()
        saved_ranks = set(self.ranks or range(self.world_size))
        for item, state in self.values.items():
            self._check_state(
                state, item, ("values", item), lambda shared: saved_ranks <= ranks.get(shared, set())
            )
        for item, states in self.values_by_rank.items():
            for number, state in enumerate(states):
                if number not in saved_ranks:
                    continue

                def has_rank(shared: str, number: int = number) -> bool:
                    return number in ranks.get(shared, ())

                self._check_state(state, item, ("values_by_rank", item, number), has_rank)

    def _check_ranks(self) -> None:
        """Raise `FieldError` if the ranks of a part are not in order, or not those of some nodes of several."""
        if self.ranks and not (
            list(self.ranks) == sorted(set(self.ranks))
            and self.ranks[-1] < self.world_size
            and len(self.ranks) < self.world_size
        ):
            raise FieldError(
                f"is {shorten(str(list(self.ranks)))}, and should be some ranks in order", ("ranks",)
            )

    def _check_coverage(self) -> None:
        """Raise `FieldError` if chunks do not cover their tensor; those of a part may leave out elements."""
        for name, entry in self.tensors.items():
            try:
                entry.check_coverage(is_node_part=self.is_node_part)
            except FieldError as error:
                raise error.inside("tensors", name) from None

    def _list_tensor_ranks(self) -> Mapping[str, set[int]]:
        """Return the ranks of each rank-specific tensor; raise `FieldError` for a rank that there was not."""
        ranks: dict[str, set[int]] = {}
        for name in self.tensors:
            shared, _, rank = name.partition("#")
            if rank:
                ranks.setdefault(shared, set()).add(int(rank))
                if int(rank) >= self.world_size:
                    raise FieldError(
                        f"is of rank {rank}, and {self.world_size} processes wrote the checkpoint",
                        ("tensors", name),
                    )
        return ranks

    def _check_chunks(self) -> None:
        """Raise `FieldError` if chunks are not inside the data of their files, or overlap."""
        ranges: dict[str, list[tuple[int, int, str]]] = {}
        for name, entry in self.tensors.items():
            for index, chunk in enumerate(entry.chunks):
                keys = ("tensors", name, "chunks", index)
                if chunk.file not in self.files:
                    raise FieldError(
                        f"is {describe(chunk.file)}, and should be a file of the checkpoint", (*keys, "file")
                    )
                file, end = self.files[chunk.file], chunk.start + chunk.bytes
                if not file.header <= chunk.start <= end <= file.bytes:
                    raise FieldError(
                        f"is from {chunk.start} to {end}, and the data of its file from {file.header} to {file.bytes}",
                        keys,
                    )
                if chunk.bytes:
                    ranges.setdefault(chunk.file, []).append((chunk.start, end, name))
        for file_name, parts in ranges.items():
            for (_, end, first), (start, _, second) in pairwise(sorted(parts)):
                if start < end:
                    raise FieldError(
                        f"has {describe(first)} and {describe(second)} in the same bytes",
                        ("files", file_name),
                    )

    def _check_state(
        self, state: Any, item: str, keys: tuple[str | int, ...], has_ranks: Callable[[str], bool]
    ) -> None:
        """Raise `FieldError` if a state is not valid, or a rank does not have a tensor of it."""
        try:
            names = list_tensor_names(state)
        except FieldError as error:
            raise error.inside(*keys) from None
        for name in names:
            if item_of_tensor(name) != item or not (name in self.tensors or has_ranks(name)):
                raise FieldError(f"refers to {describe(name)}, which is not a tensor of it", keys)

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
                yield "the file", self.get_file_chunk(name)

    def get_file_chunk(self, name: str) -> Chunk:
        """Return a file as one chunk, by which it is read and verified."""
        file = self.files[name]
        return Chunk(name, 0, file.bytes, file.checksum, (), ())

    def text(self) -> str:
        """Return the text of the manifest file, which begins with its own checksum."""
        content = {"version": VERSION} | asdict(self)
        if not self.is_node_part:
            del content["ranks"]
        for chunk in (chunk for tensor in content["tensors"].values() for chunk in tensor["chunks"]):
            if not chunk["blocks"]:
                del chunk["blocks"]
        body = json.dumps(content, separators=(",", ":"))
        if len(body) > MAX_BYTES:
            raise CheckpointError(
                f"Cannot save: the values that are not tensors have {len(body)} bytes, and a checkpoint can have {MAX_BYTES}. "
                "Convert large lists to tensors."
            )
        return f'{{"checksum":"{hash_bytes(body.encode())}",\n"checkpoint":{body}}}\n'

    @classmethod
    def parse(cls, text: str, path: Path | str) -> Manifest:
        """Parse the text of the manifest at `path`; raise `CheckpointError` if it is damaged or too new."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise CheckpointError(f"{path} is damaged: it is not a checkpoint manifest")
        expected, checksum = match[1], hash_bytes(match[2].encode(errors="replace"))
        if checksum != expected:
            raise CheckpointError(f"{path} is damaged: its checksum is {checksum} and should be {expected}")
        with _pause_garbage_collection():
            return cls._parse_body(match[2], path)

    @classmethod
    def _parse_body(cls, text: str, path: Path | str) -> Manifest:
        try:
            body = parse_strict_json(text)
            version = body.get("version")
        except (ValueError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
        if type(version) is not int or version != VERSION:
            raise CheckpointError(
                f"{path} cannot be used: its format has version {describe(version)}, and this accel reads version {VERSION}. It was "
                f"written by accel {_read_version(body)}. Install that version to load it."
            )
        try:
            manifest: Manifest = read_value(cls, body)
        except FieldError as error:
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


def describe_shape(sizes: Sequence[int]) -> str:
    """Return a shape for a message."""
    return shorten(str(list(sizes)))


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Create many objects without cycles in half the time: each generation of them would be searched for cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _read_version(body: dict[str, Any]) -> str:
    versions = body.get("versions")
    return shorten(str(versions.get("accel"))) if isinstance(versions, dict) else "of another version"


def _have_overlap(chunks: Sequence[Chunk]) -> bool:
    """Return whether two chunks of a tensor have an element in common; none is empty.

    Only chunks that share a position of the dimension with the most offsets are compared: few in any layout of shards.
    """
    if len(chunks) < 2 or not chunks[0].sizes:  # noqa: PLR2004
        return len(chunks) > 1
    along = max(range(len(chunks[0].sizes)), key=lambda each: len({chunk.offsets[each] for chunk in chunks}))
    compared, beside = 0, list[Chunk]()
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[along]):
        start = chunk.offsets[along]
        beside = [other for other in beside if start < other.offsets[along] + other.sizes[along]]
        if any(_overlap(chunk, other) for other in beside):
            return True
        beside.append(chunk)
        compared += len(beside)
        if compared > _MAX_BESIDE * len(chunks):
            raise FieldError(f"have on average more than {_MAX_BESIDE} others beside them", ("chunks",))
    return False


def _overlap(first: Chunk, second: Chunk) -> bool:
    """Return whether two chunks of a tensor have an element in common."""
    return all(
        start < other + length and other < start + size
        for start, size, other, length in zip(
            first.offsets, first.sizes, second.offsets, second.sizes, strict=True
        )
    )


def _is_covered(shape: Sequence[int], regions: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Return whether every element is in exactly one region; all regions are inside the shape.

    The mixed difference of the number of regions over an element is zero except at their corners, where it is 1 or -1.
    Regions cover a tensor exactly once if these differences add up to those of the tensor, so that the time is linear.
    """
    filled = [region for region in regions if math.prod(region[1])]
    if sum(math.prod(sizes) for _, sizes in filled) != math.prod(shape):
        return False
    if len(filled) == 1:
        return True
    split = [
        dimension
        for dimension, size in enumerate(shape)
        if any(sizes[dimension] != size for _, sizes in filled)
    ]
    if len(split) > _MAX_SPLIT:
        raise FieldError(f"are split along {len(split)} dimensions, more than {_MAX_SPLIT}", ("chunks",))
    corners: Counter[tuple[int, ...]] = Counter()

    def add(offsets: Sequence[int], sizes: Sequence[int], sign: int) -> None:
        signed: list[tuple[tuple[int, ...], int]] = [((), sign)]
        for each in split:
            start, end = offsets[each], offsets[each] + sizes[each]
            signed = [
                *(((*corner, start), factor) for corner, factor in signed),
                *(((*corner, end), -factor) for corner, factor in signed),
            ]
        for corner, factor in signed:
            corners[corner] += factor

    for offsets, sizes in filled:
        add(offsets, sizes, 1)
    if math.prod(shape):
        add((0,) * len(shape), shape, -1)
    return not any(corners.values())


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """A complete checkpoint."""

    key: str
    """Its URL in an object store; in a file system the path of its directory, which a crash may have left beside its name."""
    manifest: Manifest

    @property
    def path(self) -> Path | StoreURL:
        """Directory of the checkpoint, or its URL in an object store; both have `name`, `parent` and `/`."""
        return StoreURL(self.key) if is_url(self.key) else Path(self.key)

    @property
    def number(self) -> int | None:
        """N of `checkpoint_N`; None for other names."""
        return parse_number(checkpoint_name(Path(self.key)))

    def locate(self, name: str) -> str:
        """Return the location of a file of the checkpoint, for messages."""
        return f"{self.key}/{name}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.key!r}, step={self.manifest.step})"


def checkpoint_name(path: Path) -> str:
    """Return the name of a checkpoint, also for a scratch directory of it."""
    match = SIBLING.fullmatch(path.name)
    return match[1] if match else path.name


def parse_number(name: str) -> int | None:
    """Return N of `checkpoint_N`; None for other names."""
    match = _NUMBERED.fullmatch(name)
    return int(match[1]) if match else None
