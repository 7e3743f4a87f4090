"""Save and load single files, for `accelerator.save` and `accelerator.load`, without running code in them.

torch reads tensors and plain containers with `weights_only=True`. Numbers and arrays of NumPy are read by the stand-ins
below, which accept numbers only. NumPy's own functions are not safe: a dtype with fields, rebuilt from a file, makes
pointers of its bytes.
"""

from __future__ import annotations

import enum
import os
import pickle
import re
import shlex
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from math import prod
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file

from accel_runtime.environment.locations import is_url
from accel_runtime.export.save_model import select_tensors
from accel_runtime.foundation import nested
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.file_system import FileSystem, open_atomically
from accel_runtime.storage.tensor_file import TensorPart, write_safetensors

__all__ = [
    "NeedsCodeError",
    "check_archive",
    "load",
    "read_pickle",
    "refuse_sharded",
    "rewrite_file",
    "trusts_names",
    "write_object",
]


def refuse_sharded(obj: Any) -> None:
    """Raise `ValueError` if an object contains a sharded tensor, since the other shards would be missing."""
    sharded = next((leaf for leaf in nested.leaves(obj) if hasattr(leaf, "device_mesh")), None)
    if sharded is not None:
        raise ValueError(
            f"save() cannot write a sharded tensor (shape {list(sharded.shape)}): it writes the data of one process. Use "
            "accelerator.save_model(model, directory) or accelerator.save(accelerator.get_state_dict(model), file) for "
            "weights, and accelerator.save_state(directory) for everything."
        )


def write_object(obj: Any, f: str | os.PathLike[str] | BinaryIO, *, safe_serialization: bool) -> None:
    """Write an object to a path, atomically, or to an open file.

    With `safe_serialization`, tensors by name are written to a path as safetensors.
    """
    if not isinstance(f, (str, os.PathLike)):
        torch.save(obj, f)
        return
    refuse_url(f, "save")
    with open_atomically(Path(f).resolve()) as scratch:
        if not safe_serialization:
            torch.save(obj, scratch)
            return
        tensors = select_tensors(obj, "Leave out safe_serialization, or remove them.")
        parts = [TensorPart.from_tensor(name, tensor) for name, tensor in tensors.items()]
        write_safetensors(partial(FileSystem().put, scratch), parts, {"format": "pt"})


def refuse_url(location: str | os.PathLike[str], name: str) -> None:
    """Raise `ValueError` if what is a file on disk has the location of an object store."""
    if is_url(location):
        raise ValueError(
            f"{name} cannot use {os.fspath(location)}: it reads and writes files on disk. Pass a path; save_state, load_state, "
            "save_model and load_model take URLs."
        )


def load(
    f: str | os.PathLike[str] | BinaryIO,
    map_location: Any = None,
    *,
    weights_only: bool = True,
    mmap: bool = False,
) -> Any:
    """Return what `save` has written, in either format; no code in the file is run.

    Args:
        f: A path, or an open binary file.
        map_location: Device for the tensors, or another argument of `torch.load`. None is the CPU, wherever the
            tensors were, so that a file from a GPU loads on every node.
        weights_only: Must be True.
        mmap: Read tensors when they are used. Tensors of a safetensors file always are.

    Raises:
        CheckpointError: The file does not exist, is damaged, or contains objects that need their own code; the
            message tells how to convert it.
        ValueError: `weights_only=False`, which would run code in the file.
        TypeError: A `map_location` for a safetensors file that is not one device.
    """
    if not weights_only:
        raise ValueError(
            "load supports weights_only=True only, so that no code in the file is run. If you trust the file, use "
            "torch.load(..., weights_only=False)."
        )
    if isinstance(f, (str, os.PathLike)):
        refuse_url(f, "load")
    device = "cpu" if map_location is None else map_location
    if not _is_safetensors(f):
        return read_pickle(f, device, mmap=mmap)
    if not isinstance(device, (str, int, torch.device)):
        raise TypeError(f"Invalid map_location {map_location!r} for a safetensors file: expected one device.")
    try:
        tensors = load_file(f) if isinstance(f, (str, os.PathLike)) else load_bytes(f.read())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{f} cannot be read: {error}") from error
    return {name: tensor.to(torch.device(device)) for name, tensor in tensors.items()}


def _is_safetensors(f: str | os.PathLike[str] | BinaryIO) -> bool:
    """Return whether a file is safetensors, by its name or its first bytes (a length and a brace)."""
    if isinstance(f, (str, os.PathLike)):
        path = Path(f)
        if path.suffix == ".safetensors" or not path.is_file():
            return path.suffix == ".safetensors"
        with path.open("rb") as file:
            return file.read(9)[8:] == b"{"
    position = f.tell()
    start = f.read(9)
    f.seek(position)
    return start[8:] == b"{"


_SCALARS: tuple[type[Any], ...] = (bool, int, float, complex, str, bytes)
_NUMPY_NUMBERS, _NUMPY_OBJECTS = frozenset("biufc"), frozenset("OSU")
"""Kinds of NumPy dtypes that are converted."""


def rewrite_file(path: str | os.PathLike[str], read: Any) -> None:
    """Replace a file of `torch.save` by one with the same content as numbers, text and tensors.

    `read` is the result of `torch.load`. The old file is kept until the new one is complete and readable.
    """
    converted = _to_plain(read, "it")
    with open_atomically(Path(path).resolve()) as scratch:
        torch.save(converted, scratch)
        read_pickle(scratch)


def _to_plain(item: Any, path: str) -> Any:
    if item is None or isinstance(item, (torch.Tensor, torch.dtype, torch.device)):
        return item
    if isinstance(item, (enum.Enum, PurePath)):
        return _to_plain(item.value if isinstance(item, enum.Enum) else str(item), path)
    for kind in _SCALARS:
        if isinstance(item, kind):
            return kind(item)
    if isinstance(item, Mapping):
        return {_to_plain(key, path): _to_plain(value, f"{path}[{key!r}]") for key, value in item.items()}
    if isinstance(item, (list, tuple, set, frozenset)):
        values = [_to_plain(value, f"{path}[{index}]") for index, value in enumerate(item)]
        return values if isinstance(item, list) else tuple(values) if isinstance(item, tuple) else set(values)
    return _convert_numpy(item, path)


def _convert_numpy(item: Any, path: str) -> Any:
    """Convert an array or number of NumPy."""
    kind = item.dtype.kind if type(item).__module__ == "numpy" and hasattr(item, "dtype") else "none"
    if kind in _NUMPY_NUMBERS:
        # In native byte order.
        return torch.from_numpy(item.astype(item.dtype.newbyteorder("="))) if item.shape else item.item()
    if kind in _NUMPY_OBJECTS:
        return _to_plain(item.tolist(), path)
    raise CheckpointError(
        f"{path} is a {type(item).__module__}.{type(item).__qualname__}: change the saved state to numbers, text and "
        "tensors, or remove this value before the file is rewritten."
    )


CONVERT = (
    "{} -c 'import sys, torch; from accel_runtime.export.objects import rewrite_file; "
    'rewrite_file(sys.argv[1], torch.load(sys.argv[1], map_location="cpu", weights_only=False))\' {}'
)
"""Command for users who trust a file; only this command runs code in it."""
_DTYPES = {
    "b1": torch.bool,
    "i1": torch.int8,
    "i2": torch.int16,
    "i4": torch.int32,
    "i8": torch.int64,
    "u1": torch.uint8,
    "u2": torch.uint16,
    "u4": torch.uint32,
    "u8": torch.uint64,
    "f2": torch.float16,
    "f4": torch.float32,
    "f8": torch.float64,
    "c8": torch.complex64,
    "c16": torch.complex128,
}


class NeedsCodeError(CheckpointError):
    """A file contains objects that only code named in it can build."""


def read_pickle(
    file: str | os.PathLike[str] | BinaryIO,
    map_location: Any = "cpu",
    *,
    mmap: bool = False,
    replace: Callable[[str], Any] | None = None,
) -> Any:
    """Return the content of a file of `torch.save`, with numbers and tensors for those of NumPy.

    With `replace`, no name that torch does not admit makes the file unreadable: the result of `replace` for this name is used in its
    place, also if a script trusts the name.
    """
    name = os.fspath(file) if isinstance(file, (str, os.PathLike)) else getattr(file, "name", "the open file")
    if isinstance(file, (str, os.PathLike)) and Path(file).exists() and not Path(file).is_file():
        raise CheckpointError(f"{name} is not a regular file")
    try:
        check_archive(file)
        with _stand_ins(file, replace):
            content = torch.load(file, map_location=map_location, weights_only=True, mmap=mmap or None)
        _count_values(content)
        return _replace_stand_ins(content, {})
    except FileNotFoundError:
        raise CheckpointError(f"File not found: {name}") from None
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise _build_error(file, str(name), str(error)) from error
    except _UnsupportedArrayError as error:
        raise _build_code_error(file, str(name), str(error)) from error
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{name} cannot be read: {type(error).__name__}: {reason}") from error


def _build_error(file: object, name: str, message: str) -> CheckpointError:
    match = re.search(r"GLOBAL ([\w.<>]+)", message) or re.search(r"<(?:class|function) '?([\w.]+)", message)
    if match is None:
        return CheckpointError(f"{name} cannot be read: it was not written by torch.save, or is damaged")
    return _build_code_error(file, name, match[1])


def _build_code_error(file: object, name: str, objects: str) -> NeedsCodeError:
    command = CONVERT.format(shlex.quote(sys.executable), shlex.quote(name))
    cure = (
        f"rewrite it as numbers, text and tensors:\n  {command}"
        if isinstance(file, (str, os.PathLike))
        else "use torch.load(file, weights_only=False)"
    )
    return NeedsCodeError(
        f"{name} was not read: it contains {objects}, which only code named in the file can build. If you trust the "
        f"file, {cure}"
    )


# Bounds ----------------------------------------------------------------------------------

_MAX_SHARED = 1 << 20
"""Values that containers may contain beyond those in the file, since they are in it once and referred to several times."""
_UNKNOWN = 0xFFFFFFFF


def check_archive(file: str | os.PathLike[str] | BinaryIO) -> None:
    """Raise `CheckpointError` if an archive of `torch.save` would be larger in memory than the file.

    torch stores its entries uncompressed; the directory of the archive is read as torch reads it.
    """
    with Path(file).open("rb") if isinstance(file, (str, os.PathLike)) else nullcontext(file) as opened:
        first = opened.tell()
        try:
            if opened.read(4) == b"PK\3\4":
                _check_entries(opened, first, str(getattr(opened, "name", "the open file")))
        finally:
            opened.seek(first)


def _check_entries(opened: BinaryIO, first: int, name: str) -> None:
    opened.seek(0, os.SEEK_END)
    end = opened.tell()  # torch's view of a part of a file returns another number from `seek`
    size = end - first
    refused = CheckpointError(f"{name} cannot be read: it was not written by torch.save, or is damaged")
    opened.seek(max(first, end - 42))
    tail = opened.read()
    if tail[20:24] != b"PK\5\6":
        raise refused
    count, length, start = struct.unpack("<H2I", tail[30:40])
    if tail[:4] == b"PK\6\7":
        (offset,) = struct.unpack("<Q", tail[8:16])
        opened.seek(first + min(offset, size))
        record = opened.read(56)
        if record[:4] != b"PK\6\6":
            raise refused
        count, length, start = struct.unpack("<3Q", record[32:])
    opened.seek(first + min(start, size))
    directory = memoryview(opened.read(min(length, size)))
    unpacked = 0
    for _ in range(count):
        if bytes(directory[:4]) != b"PK\1\2" or len(directory) < 46:  # noqa: PLR2004 - length of an entry
            raise refused
        method, stored, entry = struct.unpack("<H8x2I", directory[10:28])
        name_length, extra_length, comment_length = struct.unpack("<3H", directory[28:34])
        extra = directory[46 + name_length :][:extra_length]
        unpacked += _read_large_size(extra) if entry == _UNKNOWN else entry
        if method or stored != entry:
            raise CheckpointError(
                f"{name} cannot be read: its entries are compressed. Save it again with torch.save, which does not compress."
            )
        directory = directory[46 + name_length + extra_length + comment_length :]
    if unpacked > size:
        raise CheckpointError(
            f"{name} cannot be read: its entries have {unpacked} bytes, more than the file with {size}"
        )


def _read_large_size(extra: memoryview) -> int:
    """Return the uncompressed size of an entry from its field for large files."""
    while len(extra) >= 4:  # noqa: PLR2004 - header of a field
        kind, length = struct.unpack("<2H", extra[:4])
        if kind == 1 and length >= 8:  # noqa: PLR2004 - the size is first
            return int.from_bytes(extra[4:12], "little")
        extra = extra[4 + length :]
    return _UNKNOWN


def _count_values(content: Any) -> None:
    """Raise `CheckpointError` if a container contains so much more than the file that its copies would not fit in memory.

    A list in a pickle may contain the same list several times, which doubles its length with every level.
    """
    counts: dict[int, int] = {}
    kept: list[Any] = []
    opened: list[tuple[Any, bool]] = [(content, False)]
    while opened:
        item, done = opened.pop()
        if not isinstance(item, (list, tuple, dict, set, frozenset)) or (not done and id(item) in counts):
            continue
        children = list(item.values()) if isinstance(item, dict) else list(item)
        if done:
            counts[id(item)] = 1 + sum(counts.get(id(child), 1) for child in children)
        else:
            counts[id(item)] = 1  # one that contains itself is refused where it is used
            kept.append(item)
            opened += [(item, True), *((child, False) for child in children)]
    total, distinct = counts.get(id(content), 1), sum(map(len, kept))
    if total > _MAX_SHARED + 4 * distinct:
        raise ValueError(f"its lists and dicts contain {distinct} values, and {total} with repetitions")


# Stand-ins -----------------------------------------------------------------------------


class _UnsupportedArrayError(Exception):
    """An array that does not contain numbers."""


class _Dtype:
    """Stand-in for `numpy.dtype`, for numbers only."""

    def __init__(self, code: str, *_: object) -> None:
        if code not in _DTYPES:
            raise _UnsupportedArrayError(f"an array of NumPy's dtype {code!r}")
        self.dtype = _DTYPES[code]

    def __setstate__(self, state: Sequence[Any]) -> None:
        _version, order, *structure = state
        # Structured arrays have names and fields here; `>` is big endian.
        if order not in {"<", "|"} or any(structure[:3]):
            raise _UnsupportedArrayError("a structured or big-endian array")

    def tensor(self, data: bytes, shape: Sequence[int]) -> torch.Tensor:
        """Build a tensor from bytes."""
        if len(data) != prod(shape) * self.dtype.itemsize:
            raise ValueError(f"{len(data)} bytes for an array of shape {tuple(shape)}")
        flat = (
            torch.frombuffer(bytearray(data), dtype=self.dtype) if data else torch.empty(0, dtype=self.dtype)
        )
        return flat.reshape(tuple(shape))


class _Array:
    """Stand-in for `numpy.ndarray`, for numbers only."""

    def __setstate__(self, state: Sequence[Any]) -> None:
        _version, shape, dtype, by_column, data = state
        if not isinstance(dtype, _Dtype) or not isinstance(data, bytes):
            raise TypeError(f"an array of {type(dtype).__name__}; numbers only")
        self.tensor = dtype.tensor(data, shape[::-1]).permute(*range(len(shape))[::-1]) if by_column else None
        self.tensor = dtype.tensor(data, shape) if self.tensor is None else self.tensor.contiguous()


def _reconstruct(kind: object, *_: object) -> _Array:
    if kind is not _Array:
        raise TypeError(f"an array of type {kind!r}; numpy.ndarray only")
    return _Array()


def _scalar(dtype: object, data: object) -> bool | float | complex:
    if not isinstance(dtype, _Dtype) or not isinstance(data, bytes):
        raise TypeError(f"a number of {type(dtype).__name__}")
    number: bool | float | complex = dtype.tensor(data, ()).item()
    return number


def _empty_bytes() -> bytes:
    """Stand-in for `bytes`, which pickle calls for arrays without elements."""
    return b""


_STAND_INS_BY_NAME: Mapping[str, Callable[..., Any]] = {
    "builtins.bytes": _empty_bytes,
    "numpy.ndarray": _Array,
    "numpy.dtype": _Dtype,
    # NumPy 2, and before.
    **dict.fromkeys(
        ("numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct"), _reconstruct
    ),
    **dict.fromkeys(("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar"), _scalar),
}
_STAND_INS: tuple[Any, ...] = tuple((stand_in, name) for name, stand_in in _STAND_INS_BY_NAME.items())
_TRUST = threading.RLock()
"""Held while the names that torch trusts, which all threads share, are others than those of the script."""
_OF_TORCH = ("torch.distributed.", "torch.nested.", "torch._dynamo.")
"""Modules whose import makes torch trust names in them."""
_MAX_NAMES = 200
"""Most names in a file that get a stand-in; the time that torch needs grows with their square."""


def trusts_names() -> bool:
    """Return whether torch trusts names beyond those that it adds itself when it is imported."""
    with _TRUST:
        return any(
            isinstance(entry, tuple) or not _qualified_name(entry).startswith(_OF_TORCH)
            for entry in torch.serialization.get_safe_globals()
        )


@contextmanager
def _stand_ins(
    file: str | os.PathLike[str] | BinaryIO, replace: Callable[[str], Any] | None
) -> Iterator[None]:
    """Let torch use the stand-ins instead of trusted names of NumPy, and with `replace` instead of all names.

    One thread at a time.
    """
    with _TRUST:
        trusted = torch.serialization.get_safe_globals()
        replaced = [entry for entry in trusted if replace or _qualified_name(entry) in _STAND_INS_BY_NAME]
        if replaced:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals([entry for entry in trusted if entry not in replaced])
        try:
            with torch.serialization.safe_globals(list(_STAND_INS)):
                names = _list_names(file) if replace else ()
                with torch.serialization.safe_globals([(replace(name), name) for name in names if replace]):
                    yield
        finally:
            torch.serialization.add_safe_globals(replaced)


def _list_names(file: str | os.PathLike[str] | BinaryIO) -> list[str]:
    """Return the names in a file that torch does not admit; none of a file in the format of torch before 1.6.

    Raises:
        CheckpointError: There are more than 200.
    """
    with Path(file).open("rb") if isinstance(file, (str, os.PathLike)) else nullcontext(file) as opened:
        first = opened.tell()
        try:
            is_archive = opened.read(4) == b"PK\3\4"
            opened.seek(first)
            names = torch.serialization.get_unsafe_globals_in_checkpoint(opened) if is_archive else []
        finally:
            opened.seek(first)
        if len(names) > _MAX_NAMES:
            raise CheckpointError(
                f"{getattr(opened, 'name', 'the open file')} cannot be read: it names {len(names)} classes and functions, more than "
                f"{_MAX_NAMES}"
            )
        return names


def _qualified_name(entry: Any) -> str:
    return entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"


def _replace_stand_ins(item: Any, done: dict[int, tuple[Any, Any]]) -> Any:
    """Replace stand-ins by their tensors; `done` contains the containers so far by id, with their results."""
    if isinstance(item, _Array):
        return item.tensor
    if id(item) in done:
        return done[id(item)][1]
    if type(item) is tuple:
        result: Any = tuple(_replace_stand_ins(value, done) for value in item)
        done[id(item)] = item, result
        return result
    if type(item) is list:
        done[id(item)] = item, item
        item[:] = [_replace_stand_ins(value, done) for value in item]
    elif isinstance(item, dict):
        done[id(item)] = item, item
        for key, value in item.items():
            item[key] = _replace_stand_ins(value, done)
    return item
