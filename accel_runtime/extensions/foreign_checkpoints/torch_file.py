"""Read files of `torch.save` without running code in them: a tensor is its location in the file. Imports no torch.

A pickle names functions and classes that rebuild its objects. Here each name leads to a stand-in: those of tensors return where
their bytes are, a few others build numbers and containers, and all others keep what they are given (`Unknown`). So a file is
read whatever else is in it, such as the arguments of a script, and no data is read before it is needed.
"""

from __future__ import annotations

import math
import os
import pickle
import pickletools
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader, BytesIO, RawIOBase
from pathlib import Path
from typing import Any

from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.file_system import FileSystem
from accel_runtime.storage.schema import ITEM_BYTES

__all__ = ["StoredTensor", "TensorRange", "Unknown", "check_pickle", "iterate_regions", "read_torch_file"]


@dataclass(frozen=True)
class TensorRange:
    """Consecutive elements of a tensor in a file."""

    tensor: StoredTensor
    start: int
    """Offset in the tensor, in elements."""
    count: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, before it is read."""

    file: Path
    start: int
    """Offset in the file, in bytes."""
    dtype: str
    """Name of the torch dtype."""
    shape: tuple[int, ...]
    is_contiguous: bool = True
    """Whether the elements are in row-major order without gaps."""
    strides: tuple[int, ...] = ()
    """Distance of elements by dimension, if they are in another order; empty if they have gaps too."""

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def all(self) -> TensorRange:
        """Return the range of all elements."""
        return TensorRange(self, 0, self.count)

    def reshape(self, shape: Sequence[int]) -> StoredTensor:
        """Return the tensor in another shape of as many elements."""
        return replace(self, shape=tuple(shape))


class Unknown:
    """Arguments and attributes of an object whose class is not imported."""

    name = ""
    """Module and name of its class or function."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: object, value: object) -> None:
        """Ignore an entry of a subclass of dict."""

    def append(self, item: object) -> None:
        """Ignore an entry of a subclass of list."""

    def extend(self, items: object) -> None:
        """Ignore entries of a subclass of list."""

    def add(self, item: object) -> None:
        """Ignore an entry of a subclass of set."""

    @property
    def fields(self) -> Mapping[str, Any]:
        """The attributes of the object."""
        return self.state if isinstance(self.state, dict) else {}


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


def read_torch_file(path: Path, start: int = 0, length: int | None = None) -> Any:
    """Return the content of a file of `torch.save`, with a `StoredTensor` for each tensor.

    Args:
        path: The file.
        start: Offset at which the content begins, in a file with several.
        length: Its number of bytes; None if it ends with the file.

    Raises:
        CheckpointError: The file is missing, damaged, or not in torch's format.
    """
    try:
        with os.fdopen(FileSystem().open_file(path, None, path.name), "rb") as opened:
            size = os.fstat(opened.fileno()).st_size - start if length is None else length
            file = opened if length is None else BufferedReader(_FilePart(opened.fileno(), start, length))
            with zipfile.ZipFile(file) as archive:
                entries = {
                    entry.filename.partition("/")[2]: entry
                    for entry in archive.infolist()
                    if entry.compress_type == zipfile.ZIP_STORED and entry.file_size <= size
                }
                order = archive.read(entries["byteorder"]) if "byteorder" in entries else b"little"
                text = archive.read(entries["data.pkl"])
            storages = {
                name.removeprefix("data/"): _Storage(start + _find_data(file, entry), entry.file_size)
                for name, entry in entries.items()
                if name.startswith("data/")
            }
            check_pickle(text)
            content = _Unpickler(path, text, storages).load()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read: it was not written by torch.save, or is damaged ({type(error).__name__}: {error})"
        ) from error
    if order != b"little":
        raise CheckpointError(f"{path} cannot be read: its numbers are big endian")
    return content


def check_pickle(text: bytes) -> None:
    """Raise `ValueError` if a pickle is cut, or a damaged index or length in it would need memory out of proportion to its size."""
    for count, (operation, argument, _) in enumerate(pickletools.genops(text)):
        if operation.name in {"PUT", "BINPUT", "LONG_BINPUT"} and int(argument or 0) > count:
            raise ValueError(f"index {argument} of {count}")


class _FilePart(RawIOBase):
    """A part of an open file, as a file of its own."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        super().__init__()
        self._descriptor, self._start, self._length, self._offset = descriptor, start, length, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the offset of the next read."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._offset, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"offset {base + offset}")
        self._offset = base + offset
        return self._offset

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes; return their number, 0 at the end of the part."""
        view = memoryview(buffer)[: max(0, self._length - self._offset)]
        count = os.preadv(self._descriptor, [view], self._start + self._offset) if view else 0
        self._offset += count
        return count


@dataclass(frozen=True)
class _Storage:
    start: int
    bytes: int


@dataclass(frozen=True)
class _TypedStorage:
    storage: _Storage
    dtype: str


class _Dtype(str):
    """Name of a dtype, as text; also the class of a storage."""

    __slots__ = ()


def _find_data(file: Any, entry: zipfile.ZipInfo) -> int:
    """Return the offset of the bytes of an entry: its local header has a length of its own."""
    file.seek(entry.header_offset)
    header = file.read(30)
    if header[:4] != b"PK\3\4":
        raise ValueError(f"{entry.filename} has no header")
    name, extra = struct.unpack("<2H", header[26:30])
    return int(entry.header_offset + len(header) + name + extra)


class _Unpickler(pickle.Unpickler):
    """Builds the objects of a pickle from stand-ins only."""

    def __init__(self, path: Path, text: bytes, storages: Mapping[str, _Storage]) -> None:
        super().__init__(BytesIO(text), encoding="utf-8")
        self._path, self._storages = path, storages
        # Of this object, so that a pickle that changes attributes of what it uses changes nothing else.
        self._stand_ins: dict[str, Any] = {
            "collections.OrderedDict": OrderedDict,
            "builtins.set": set,
            "builtins.frozenset": frozenset,
            "builtins.complex": complex,
            "torch.Size": tuple,
            "_codecs.encode": _Function(_encode),
            "torch._utils._rebuild_tensor_v2": _Function(self._build_tensor),
            "torch._utils._rebuild_tensor_v3": _Function(self._build_tensor_v3),
            "torch._utils._rebuild_parameter": _Function(_keep_first),
            "torch._utils._rebuild_parameter_with_state": _Function(_keep_first),
            "torch._tensor._rebuild_from_type_v2": _Function(_call_first),
            "numpy.dtype": _Function(_build_numpy_dtype),
            "numpy._core.multiarray.scalar": _Function(_build_number),
            "numpy.core.multiarray.scalar": _Function(_build_number),
        }

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in of a class or function."""
        # torch writes names of Python 2.
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if module in {"torch", "torch.storage"} and name in _STORAGES:
            return _Dtype(_STORAGES[name])
        if module == "torch" and name in ITEM_BYTES:
            return _Dtype(name)
        if full not in self._stand_ins:
            # Enumerations of DeepSpeed are built from their number.
            self._stand_ins[full] = (
                int if name == "ZeroStageEnum" else type(name, (Unknown,), {"name": full, "__slots__": ()})
            )
        return self._stand_ins[full]

    def persistent_load(self, pid: Any) -> _TypedStorage:
        """Return the storage of a tensor."""
        kind, dtype, key, _location, _count = pid
        if kind != "storage" or not isinstance(dtype, _Dtype):
            raise ValueError(f"a storage of {dtype!r}")
        return _TypedStorage(self._storages[key], str(dtype))

    def _build_tensor(
        self, storage: _TypedStorage, offset: int, shape: Sequence[int], stride: Sequence[int], *_: object
    ) -> StoredTensor:
        return self._locate(storage.storage, storage.dtype, offset, tuple(shape), tuple(stride))

    def _build_tensor_v3(
        self,
        storage: _TypedStorage,
        offset: int,
        shape: Sequence[int],
        stride: Sequence[int],
        _requires_grad: object,
        _hooks: object,
        dtype: str,
        *_: object,
    ) -> StoredTensor:
        return self._locate(storage.storage, str(dtype), offset, tuple(shape), tuple(stride))

    def _locate(
        self, storage: _Storage, dtype: str, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> StoredTensor:
        if any(type(number) is not int or number < 0 for number in (offset, *shape, *stride)):
            raise ValueError(f"a tensor of shape {shape}")
        size, count, is_contiguous = ITEM_BYTES[dtype], 1, True
        for length, step in zip(reversed(shape), reversed(stride), strict=True):
            is_contiguous &= length <= 1 or step == count
            count *= length
        is_contiguous |= not count
        is_dense = is_contiguous or _is_dense(shape, stride)
        if is_dense and count and (offset + count) * size > storage.bytes:
            raise ValueError(f"a tensor of shape {shape} in {storage.bytes} bytes")
        strides = stride if is_dense and not is_contiguous else ()
        return StoredTensor(self._path, storage.start + offset * size, dtype, shape, is_contiguous, strides)


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether the dimensions are only in another order, as those of a transposed or channels-last tensor."""
    count = 1
    for step, length in sorted(
        (step, length) for length, step in zip(shape, strides, strict=True) if length > 1
    ):
        if step != count:
            return False
        count *= length
    return True


class _Function:
    """A function that pickles may call, and whose attributes they cannot change."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        return self._call(*arguments)


def _keep_first(value: Any, *_: object) -> Any:
    return value


def _call_first(function: Any, _kind: object, arguments: Any, _state: object) -> Any:
    """Build a tensor that has attributes of its own, without them."""
    return function(*arguments)


def _encode(text: str, encoding: str = "latin1", *_: object) -> bytes:
    return text.encode(encoding if encoding == "latin1" else "utf-8")


def _build_numpy_dtype(code: str, *_: object) -> Unknown:
    return Unknown(code)


def _build_number(dtype: Unknown, data: bytes) -> Any:
    return struct.unpack("<" + _NUMPY_CODES[dtype.arguments[0]], data)[0]


_NUMPY_CODES = {"f8": "d", "f4": "f", "i8": "q", "i4": "i", "b1": "?"}
_STORAGES = {
    "UntypedStorage": "uint8",
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
"""Classes of storages, and the dtypes of their tensors."""
