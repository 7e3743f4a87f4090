"""A model's weights for elsewhere: safetensors in the layout of the Hugging Face Hub, compared with the live model.

Everything is written beside its name, and compared, before the first file gets its name; the index gets it last, and
only then are files of an earlier export removed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from accel_runtime.checkpoint import datafile
from accel_runtime.checkpoint.dtypes import NAMES
from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.files import Disk, write_text
from accel_runtime.checkpoint.layout import file_name
from accel_runtime.exporting.ties import aliases
from accel_runtime.parallel.boxes import local

__all__ = ["CHECKSUMS", "INDEX", "SINGLE", "Export", "Writing", "export"]

SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"
CHECKSUMS = "xxh3_64"
"""The key in the index under which every shard's checksum stands: shards of two exports do not pass for one."""
_RESERVED = "__metadata__"
_UNFINISHED = ".unfinished-"
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_OURS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?")


@dataclass(frozen=True)
class Export:
    """The files of an export, before they are written."""

    shards: Mapping[str, Mapping[str, torch.Tensor]]
    """For every file, the tensors in it."""
    ties: Mapping[str, str]
    """Names that are left out, and under which name each tensor is kept."""

    @classmethod
    def planned(cls, state: Mapping[str, object], limit: int, tied: Iterable[str] = ()) -> Export:
        """Share a state out to files.

        Args:
            state: Tensors by name, sharded ones among them.
            limit: Bytes of tensors in a file, at most; a tensor that is larger has a file of its own.
            tied: Names of tied weights that are left out rather than others.

        Raises:
            CheckpointError: Something in it is no tensor, or none that the format can hold; the message names all.
        """
        tensors = _checked(state)
        ties = aliases(tensors, tied)
        groups = _groups({name: tensor for name, tensor in tensors.items() if name not in ties}, limit)
        count = len(groups)
        names = [file_name("model", number, count) for number in range(1, count + 1)]
        return cls(dict(zip(names, groups, strict=True)), ties)

    @property
    def about(self) -> dict[str, str]:
        """What stands in the header of every file: safetensors' own way to tell of tied weights."""
        return {**self.ties, "format": "pt"}

    def index(self, checksums: Mapping[str, str]) -> str:
        """The index, as text."""
        total = sum(tensor.nbytes for tensors in self.shards.values() for tensor in tensors.values())
        places = {name: file for file, tensors in self.shards.items() for name in tensors}
        about = {"total_size": total, CHECKSUMS: dict(checksums)}
        return json.dumps({"metadata": about, "weight_map": dict(sorted(places.items()))}, indent=2) + "\n"


class Writing:
    """The files of an export, one after the other: written beside their names, compared, and renamed at the end.

    Args:
        found: What they hold.
        folder: Where; it is made if need be.
        writer: The rank, so that several writers of one directory keep apart until they rename.
        disk: Does it.
    """

    def __init__(self, found: Export, folder: Path, *, writer: int = 0, disk: Disk | None = None) -> None:
        self._found, self._folder, self._writer, self._disk = found, folder, writer, disk or Disk()
        self._names = [*found.shards, *([INDEX] if len(found.shards) > 1 else [])]
        self._checksums: dict[str, str] = {}

    def begin(self) -> None:
        """Make the directory.

        Raises:
            CheckpointError: It cannot be made.
        """
        with self._told():
            self._disk.make(self._folder)

    def file(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a file, open it again, and compare every byte with what it was made of.

        Args:
            name: One of the export's.
            tensors: What it holds, whole.

        Raises:
            CheckpointError: It cannot be written, or is not what it was made of.
        """
        with self._told():
            _unlink(self._beside(name), self._disk)
            parts = [
                datafile.Part(key, tensor.dtype, tuple(tensor.shape), None, partial(_here, tensor))
                for key, tensor in tensors.items()
            ]
            written = datafile.write(self._beside(name), parts, self._found.about, self._disk)
            self._checksums[name] = written.file.checksum
            _compare(self._beside(name), tensors, self._folder / name)

    def commit(self) -> None:
        """Give all files their names, the index last, and remove those of an earlier export.

        Raises:
            CheckpointError: That failed.
        """
        with self._told():
            if INDEX in self._names:
                _unlink(self._beside(INDEX), self._disk)
                write_text(self._beside(INDEX), self._found.index(self._checksums), self._disk)
            for name in self._names:
                self._disk.rename(self._beside(name), self._folder / name)
                self._disk.sync_directory(self._folder)
            _clear(self._folder, set(self._names), self._writer, self._disk)

    def forget(self) -> None:
        """Remove what has not got its name."""
        for name in self._names:
            with suppress(OSError):
                self._beside(name).unlink()

    def _beside(self, name: str) -> Path:
        return self._folder / f".{name}{_UNFINISHED}{self._writer}"

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"the model could not be written to {self._folder}: {error}") from error


def export(found: Export, folder: Path, *, writer: int = 0, disk: Disk | None = None) -> None:
    """Write the files of an export, and remove those of an earlier one.

    Args:
        found: What they hold.
        folder: Where; it is made if need be.
        writer: The rank, so that several writers of one directory keep apart until they rename.
        disk: Does it.

    Raises:
        CheckpointError: They cannot be written, or are not what the model is. An export that was there is untouched,
            unless it is the renaming itself that failed.
    """
    writing = Writing(found, folder, writer=writer, disk=disk)
    try:
        writing.begin()
        for name, tensors in found.shards.items():
            writing.file(name, tensors)
        writing.commit()
    finally:
        writing.forget()


def _checked(state: Mapping[str, object]) -> dict[str, torch.Tensor]:
    wrong = {name: reason for name, value in state.items() if (reason := _unfit(value))}
    if _RESERVED in state:
        wrong[_RESERVED] = "a name that the format has for its own use"
    if wrong:
        lines = "".join(f"\n  {name}: {reason}" for name, reason in wrong.items())
        raise CheckpointError(
            f"these parts of the model cannot be written as safetensors:{lines}\n"
            "accelerator.save(accelerator.get_state_dict(model), 'model.pt') writes what torch can"
        )
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _unfit(value: object) -> str | None:
    """Why the format cannot hold a value."""
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}, and no tensor"
    value = local(value) if hasattr(value, "device_mesh") else value
    if type(value) not in {torch.Tensor, torch.nn.Parameter}:
        return f"a {type(value).__name__}, whose numbers lie elsewhere"
    if value.is_meta:
        return "a tensor on the meta device, which has no values"
    if value.layout is not torch.strided or value.is_quantized:
        return f"a {'quantized' if value.is_quantized else value.layout} tensor"
    if str(value.dtype).removeprefix("torch.") not in NAMES:
        return f"a tensor of {value.dtype}, for which the format has no name"
    return None


def _groups(tensors: Mapping[str, torch.Tensor], limit: int) -> list[dict[str, torch.Tensor]]:
    groups: list[dict[str, torch.Tensor]] = [{}]
    alone: list[dict[str, torch.Tensor]] = []
    room = limit
    for name, tensor in tensors.items():
        if tensor.nbytes > limit:
            alone.append({name: tensor})
            continue
        if tensor.nbytes > room:
            groups.append({})
            room = limit
        groups[-1][name] = tensor
        room -= tensor.nbytes
    return [group for group in groups if group] + alone or [{}]


def _unlink(path: Path, disk: Disk) -> None:
    """Remove what an export that was killed has left."""
    with suppress(FileNotFoundError):
        disk.remove(path)


def _compare(path: Path, tensors: Mapping[str, torch.Tensor], final: Path) -> None:
    """Open a file again, and compare every byte with the live model."""
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            different = [
                name
                for name in tensors
                if name not in names or not _same(file.get_tensor(name), tensors[name])
            ]
            different += sorted(names - tensors.keys())
    except SafetensorError as error:
        raise CheckpointError(f"{final} was written, and cannot be read again: {error}") from error
    if different:
        raise CheckpointError(
            f"{final} was written and read again, and {', '.join(different)} is not what the model holds: the disk, "
            "the memory or another thread has changed it. The files that were there are untouched"
        )


def _same(written: torch.Tensor, live: torch.Tensor) -> bool:
    if written.dtype != live.dtype or written.shape != live.shape:
        return False
    # As whole numbers of the same size: nan is not equal to itself, and 0 is to -0.
    words = _WORDS[live.dtype.itemsize]
    return written.view(words).equal(_here(live).view(words))


def _here(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU, its memory in the order of its elements."""
    return tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()


def _clear(folder: Path, names: set[str], writer: int, disk: Disk) -> None:
    """Remove what other exports left: what reads this one would take it for a part of it."""
    for path in sorted(folder.iterdir()):
        name = path.name.removesuffix(f"{_UNFINISHED}{writer}")
        known = name if name == path.name else name.removeprefix(".")
        if path.name not in names and _OURS.fullmatch(known) and path.is_file():
            disk.remove(path)
    disk.sync_directory(folder)
