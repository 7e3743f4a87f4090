"""Checkpoints on disk: manifests of items, tensors, files and checksums, and their verification. Imports no torch."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import IO, Any

import xxhash

from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.filesystem import parallel_map

__all__ = [
    "BLOCK",
    "NAME",
    "SIBLING",
    "UNFINISHED",
    "Checkpoint",
    "Chunk",
    "FileEntry",
    "Manifest",
    "TensorEntry",
    "checkpoint_name",
    "find_damage",
    "hash_bytes",
    "hash_file",
    "item_of_tensor",
    "parse_number",
    "rank_tensor_name",
    "read_blocks",
    "read_checkpoint",
    "read_manifest",
    "select_rank_files",
    "verify_all_files",
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
_NUMBERED = re.compile(r"checkpoint_(\d+)")
SIBLING = re.compile(r"\.(.+)\.(saving|replaced|removing)(?:-([0-9a-f]+))?")
"""Names of directories on the way to or from a checkpoint's name: the name, the state, and the save."""
_STORED_KEYS = {"values_by_rank": "own", "class_names": "about"}
"""Keys in the file of fields with another name."""
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
    values_by_rank: Mapping[str, list[Any]] = field(default_factory=dict)
    """Serialized states of each other item, one for each rank."""
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    """All files except the manifest, including those of hooks."""
    class_names: Mapping[str, str] = field(default_factory=dict)
    """Class name of each item that restores an object of the script."""
    run: Mapping[str, str] = field(default_factory=dict)
    """Identity of the run: `launch`, `slurm_job`."""

    @property
    def items(self) -> list[str]:
        """Names of all items."""
        return sorted({*self.values, *self.values_by_rank})

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
        stored = {_STORED_KEYS.get(name, name): value for name, value in asdict(self).items()}
        body = json.dumps({"format": FORMAT, "sections": SECTIONS} | stored, separators=(",", ":"))
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
                    "values_by_rank": body["own"],
                    "class_names": body.get("about", {}),
                    "tensors": {
                        name: TensorEntry(
                            entry["dtype"], tuple(entry["shape"]), tuple(map(_parse_chunk, entry["chunks"]))
                        )
                        for name, entry in body["tensors"].items()
                    },
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
    for key in ("sections", "values", "own", "about", "versions", "run"):
        if not isinstance(value := body.get(key, {}), dict):
            raise CheckpointError(f"{path} cannot be used: {key} is {type(value).__name__}, not an object")
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


def _parse_chunk(chunk: Mapping[str, Any]) -> Chunk:
    box = {"offsets": tuple(chunk["offsets"]), "sizes": tuple(chunk["sizes"])}
    return Chunk(**_select_fields(Chunk, chunk) | box)


def _check_layout(manifest: Manifest) -> None:
    """Raise `ValueError` or `TypeError` if a path leads out of the directory or chunks do not cover their tensor exactly."""
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


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """A checkpoint on disk."""

    path: Path
    manifest: Manifest

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, step={self.manifest.step})"

    @property
    def number(self) -> int | None:
        """N of `checkpoint_N`; None for other names."""
        return parse_number(checkpoint_name(self.path))


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in a directory; raise `CheckpointError` if its manifest or the size of a file is wrong."""
    manifest = read_manifest(folder)
    for name, file in manifest.files.items():
        try:
            status = (folder / name).stat()
        except OSError as error:
            raise CheckpointError(
                f"{folder / name} is missing from the checkpoint: {error.strerror}"
            ) from error
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{folder / name} is damaged: it is not a regular file")
        if status.st_size != file.bytes:
            raise CheckpointError(
                f"{folder / name} is damaged: it has {status.st_size} bytes and should have {file.bytes}"
            )
    return Checkpoint(folder, manifest)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest in a directory; other files are not checked."""
    path = folder / NAME
    try:
        return Manifest.parse(_read_text(path), path)
    except (FileNotFoundError, NotADirectoryError):
        missing = f"it has no {NAME}" if folder.is_dir() else "it is a file, and a checkpoint is a directory"
        reason = missing if folder.exists() else "it does not exist"
        raise CheckpointError(f"{folder} is not a checkpoint: {reason}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is damaged: it is not text") from error


def _read_text(path: Path) -> str:
    """Return the text of an ordinary file, without blocking on a named pipe."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise CheckpointError(f"{path} is damaged: it is not a regular file")
        return opened.read().decode()


def checkpoint_name(path: Path) -> str:
    """Return the name of a checkpoint, also for a scratch directory of it."""
    match = SIBLING.fullmatch(path.name)
    return match[1] if match else path.name


def parse_number(name: str) -> int | None:
    """Return N of `checkpoint_N`; None for other names."""
    match = _NUMBERED.fullmatch(name)
    return int(match[1]) if match else None


BLOCK = 1 << 22
"""Bytes that are read and hashed at a time."""
Progress = Callable[[int], None]
"""Receives numbers of bytes that were read."""


def find_damage(
    checkpoint: Checkpoint, chunks: Iterable[tuple[str, Chunk]], progress: Progress = lambda _: None
) -> list[str]:
    """Return a sentence for each damaged chunk, with file and tensor; `progress` receives byte counts."""
    files: dict[str, list[tuple[str, Chunk]]] = {}
    for name, chunk in chunks:
        files.setdefault(chunk.file, []).append((name, chunk))
    problems = parallel_map(lambda file: _find_file_damage(checkpoint, *file, progress), files.items())
    return [sentence for sentences in problems for sentence in sentences]


def select_rank_files(
    checkpoint: Checkpoint, items: Iterable[str], rank: int, world_size: int
) -> list[tuple[str, Chunk]]:
    """Return the named chunks of items that this rank verifies; all ranks get about the same number of bytes."""
    chunks = checkpoint.manifest.parts(items)
    loads = [0] * world_size
    selected = []
    for name, chunk in sorted(
        chunks, key=lambda part: (-part[1].bytes, part[0], part[1].file, part[1].start)
    ):
        least = loads.index(min(loads))
        loads[least] += chunk.bytes
        if least == rank:
            selected.append((name, chunk))
    return selected


def verify_all_files(checkpoint: Checkpoint, progress: Progress = lambda _: None) -> list[str]:
    """Return a sentence for each damaged tensor and file; `progress` receives byte counts, from several threads."""
    return find_damage(checkpoint, checkpoint.manifest.parts(checkpoint.manifest.items), progress)


def read_blocks(file: int, start: int, length: int, buffer: memoryview) -> Iterator[memoryview]:
    """Yield the bytes of a range of a file in the given buffer; fewer if the file ends before."""
    while length:
        filled = 0
        # A network file system may return less than requested, and elements must not be cut.
        while filled < min(length, len(buffer)):
            count = os.preadv(file, [buffer[filled:length]], start + filled)
            if not count:
                break
            filled += count
        if not filled:
            return
        yield buffer[:filled]
        start, length = start + filled, length - filled


def _find_file_damage(
    checkpoint: Checkpoint, name: str, chunks: Sequence[tuple[str, Chunk]], progress: Progress
) -> list[str]:
    path, buffer = checkpoint.path / name, memoryview(bytearray(BLOCK))
    try:
        with path.open("rb", buffering=0) as opened:
            return [
                _describe_damage(checkpoint, path, tensor)
                for tensor, chunk in sorted(chunks, key=lambda part: part[1].start)
                if _hash_range(opened.fileno(), chunk, buffer, progress) != chunk.checksum
            ]
    except OSError as error:
        return [f"{path} cannot be read: {error.strerror}"]


def _hash_range(file: int, chunk: Chunk, buffer: memoryview, progress: Progress) -> str:
    checksum = xxhash.xxh3_64()
    for block in read_blocks(file, chunk.start, chunk.bytes, buffer):
        checksum.update(block)
        progress(len(block))
    return checksum.hexdigest()


def _describe_damage(checkpoint: Checkpoint, path: Path, tensor: str) -> str:
    """Describe a damaged tensor, and whether its file belongs to another save."""
    try:
        with path.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            save = json.loads(opened.read(min(length, 1 << 26)))["__metadata__"]["save"]
    except (OSError, ValueError, KeyError, TypeError):
        save = checkpoint.manifest.save
    hint = "" if save == checkpoint.manifest.save else "; the file is of another save"
    return f"{path} is damaged: {tensor} does not have its checksum{hint}"
