"""Read files of `torch.save` with torch, without running code in them or reading tensors before they are needed.

`torch.load` with `weights_only=True` refuses a file for one name that it does not admit, and the files of DeepSpeed name its own
classes, and those of scripts. Each such name gets a stand-in, which keeps what it is given (`Unknown`).
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accel_runtime.export.objects import check_archive, read_pickle, trusts_names
from accel_runtime.foundation.torch_internals import open_file_part
from accel_runtime.storage.errors import CheckpointError

__all__ = ["EmbeddedFile", "MappedFile", "Unknown", "is_plain_tensor", "read_torch_file"]


class Unknown:
    """Arguments and attributes of an object whose class is not imported."""

    name = ""
    """Module and name of its class or function."""
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def fields(self) -> Mapping[str, Any]:
        """The attributes of the object."""
        return self.state if isinstance(self.state, dict) else {}


@dataclass(frozen=True)
class MappedFile:
    """A file that is the memory of tensors: the process is killed if it reads one after the file was truncated."""

    path: Path
    size: int
    modified_ns: int

    @classmethod
    def read(cls, path: Path) -> MappedFile:
        """Return the present state of a file."""
        status = path.stat()
        return cls(path, status.st_size, status.st_mtime_ns)

    def mark(self, content: Any) -> None:
        """Make `find` return this file for the tensors in a content of dicts, lists and tuples, and for their views."""
        done: set[int] = set()
        opened = [content]
        while opened:
            item = opened.pop()
            if isinstance(item, torch.Tensor):
                if item.layout == torch.strided and item.device.type == "cpu":
                    # torch keeps this object as long as the memory.
                    vars(item.untyped_storage())[_MAPPED] = self
            elif isinstance(item, (dict, list, tuple)) and id(item) not in done:
                done.add(id(item))
                opened += item.values() if isinstance(item, dict) else item

    @staticmethod
    def find(tensor: torch.Tensor) -> MappedFile | None:
        """Return the file that is the memory of a tensor; None if it is in memory."""
        file: MappedFile | None = vars(tensor.untyped_storage()).get(_MAPPED)
        return file

    def check(self) -> None:
        """Raise `CheckpointError` if the file is no longer what it was."""
        now = MappedFile.read(self.path)
        if now != self:
            change = "truncated" if now.size < self.size else "changed"
            raise CheckpointError(f"{self.path} was {change} while it was read")


_MAPPED = "accel_mapped_file"
"""Attribute of the memory of tensors."""


def read_torch_file(path: Path) -> Any:
    """Return the content of a file of `torch.save`; the memory of its tensors is the file.

    Raises:
        CheckpointError: The file is missing, damaged, or not in torch's format.
    """
    # torch cannot map files in its format before 1.6.
    if not zipfile.is_zipfile(path):
        return read_pickle(path, replace=_build_stand_in)
    file = MappedFile.read(path)
    content = read_pickle(path, mmap=True, replace=_build_stand_in)
    file.mark(content)
    return content


@dataclass(frozen=True)
class EmbeddedFile:
    """A file of `torch.save` inside a file."""

    file: Path
    start: int
    """Offset in bytes."""
    length: int

    def read(self) -> Any:
        """Return the content."""
        with open_file_part(self.file, self.start, self.length) as part:
            return read_pickle(part, replace=_build_stand_in)

    def read_tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the content, a tensor, in row-major order; several threads may call it."""
        # torch would call a function that a script trusts. With stand-ins, threads wait for each other.
        tensor: Any = self.read() if trusts_names() else self._read_without_stand_ins()
        if not is_plain_tensor(tensor) or (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
            raise CheckpointError(
                f"{self.file} is damaged: at {self.start} it has no {dtype} tensor of shape {list(shape)}"
            )
        contiguous: torch.Tensor = tensor.detach().contiguous()
        return contiguous

    def _read_without_stand_ins(self) -> Any:
        try:
            with open_file_part(self.file, self.start, self.length) as part:
                check_archive(part)
                return torch.load(part, map_location="cpu", weights_only=True)
        except (CheckpointError, OSError):
            raise
        except Exception as error:
            raise CheckpointError(
                f"{self.file} cannot be read: it was not written by torch.save, or is damaged"
            ) from error


def is_plain_tensor(value: Any) -> bool:
    """Return whether a value is a tensor whose elements are in memory, one after another or with strides."""
    return (
        type(value) in {torch.Tensor, torch.nn.Parameter}
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
    )


def _build_stand_in(name: str) -> Any:
    """Return what is used for a name in a file."""
    if name in _CONTAINERS:
        return _CONTAINERS[name]
    # Enumerations of DeepSpeed are built from their number.
    last = name.rpartition(".")[2]
    return int if last == "ZeroStageEnum" else type(last, (Unknown,), {"name": name, "__slots__": ()})


def _build_list(items: Iterable[Any] = (), *_: object) -> list[Any]:
    return list(items)


def _build_dict(*_: object) -> dict[Any, Any]:
    return {}


_CONTAINERS: Mapping[str, Callable[..., Any]] = {
    "collections.deque": _build_list,
    "collections.defaultdict": _build_dict,
}
"""torch fills lists and dicts only, and no subclasses of them."""
