"""Files of `torch.save`, read so that nothing in them runs.

torch reads them with `weights_only=True`: tensors and plain containers. Numbers and arrays of NumPy are taken too, and
NumPy has no part in it: what a file calls by NumPy's names are the stand-ins below, which take numbers and nothing else.
NumPy's own functions would be another matter: a dtype with fields, rebuilt from a file, makes pointers of its bytes.
"""

from __future__ import annotations

import os
import pickle
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from accel_runtime.checkpoint.errors import CheckpointError

__all__ = ["NeedsCodeError", "read_pickle"]

CONVERT = (
    "{} -c 'import sys, torch; from accel_runtime.exporting.converting import rewrite; "
    'rewrite(sys.argv[1], torch.load(sys.argv[1], map_location="cpu", weights_only=False))\' {}'
)
"""The command that a person runs who trusts a file; only there does code in it run."""
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
    """A file holds objects that only their own code can make; the message says what to do."""


def read_pickle(
    file: str | os.PathLike[str] | BinaryIO, map_location: Any = "cpu", *, mmap: bool = False
) -> Any:
    """What `torch.save` has written; numbers and arrays of NumPy become numbers and tensors.

    Args:
        file: A path, or an open binary file.
        map_location: Where tensors go, as for `torch.load`.
        mmap: Read tensors when they are used; for a path.

    Raises:
        NeedsCodeError: It holds something that is made by running code.
        CheckpointError: It is no such file, or damaged.
    """
    name = os.fspath(file) if isinstance(file, (str, os.PathLike)) else getattr(file, "name", "the open file")
    if isinstance(file, (str, os.PathLike)) and Path(file).exists() and not Path(file).is_file():
        raise CheckpointError(f"{name} is no ordinary file")
    try:
        with _stand_ins():
            return _plain(torch.load(file, map_location=map_location, weights_only=True, mmap=mmap or None))
    except FileNotFoundError:
        raise CheckpointError(f"{name} is not there") from None
    except pickle.UnpicklingError as error:
        raise _refusal(file, str(name), str(error)) from error
    except _StrangeArrayError as error:
        raise _needs_code(file, str(name), str(error)) from error
    except Exception as error:
        raise CheckpointError(f"{name} cannot be read: {type(error).__name__}: {error}") from error


def _refusal(file: object, name: str, said: str) -> CheckpointError:
    needed = re.search(r"GLOBAL ([\w.<>]+)", said) or re.search(r"<(?:class|function) '?([\w.]+)", said)
    if needed is None:
        return CheckpointError(f"{name} cannot be read: it is no file of torch.save, or damaged")
    return _needs_code(file, name, needed[1])


def _needs_code(file: object, name: str, what: str) -> NeedsCodeError:
    command = CONVERT.format(shlex.quote(sys.executable), shlex.quote(name))
    way = (
        f"this rewrites it as numbers, text and tensors:\n  {command}"
        if isinstance(file, (str, os.PathLike))
        else "torch.load(file, weights_only=False) reads it"
    )
    return NeedsCodeError(
        f"{name} is not read: it holds {what}, which only code that the file names can make. Where you know who wrote "
        f"it, {way}"
    )


# What a file may call by the names of NumPy -----------------------------------------------


class _StrangeArrayError(Exception):
    """An array of something else than numbers."""


class _Dtype:
    """`numpy.dtype`, of plain numbers."""

    def __init__(self, code: str, *_: object) -> None:
        if code not in _DTYPES:
            raise _StrangeArrayError(f"an array of NumPy's dtype {code!r}")
        self.dtype = _DTYPES[code]

    def __setstate__(self, state: Sequence[Any]) -> None:
        _version, order, *structure = state
        # An array of structures has names and fields here; `>` is the other byte order.
        if order not in {"<", "|"} or any(structure[:3]):
            raise _StrangeArrayError("an array of structures, or in another machine's byte order")

    def tensor(self, data: bytes, shape: Sequence[int]) -> torch.Tensor:
        """Numbers out of bytes."""
        if len(data) != prod(shape) * self.dtype.itemsize:
            raise ValueError(f"{len(data)} bytes for an array of shape {tuple(shape)}")
        flat = (
            torch.frombuffer(bytearray(data), dtype=self.dtype) if data else torch.empty(0, dtype=self.dtype)
        )
        return flat.reshape(tuple(shape))


class _Array:
    """`numpy.ndarray`, of plain numbers."""

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


def _no_bytes() -> bytes:
    """`bytes`, as the data of an array without elements are written."""
    return b""


_NAMES: Mapping[str, Callable[..., Any]] = {
    "builtins.bytes": _no_bytes,
    "numpy.ndarray": _Array,
    "numpy.dtype": _Dtype,
    # NumPy 2, and before.
    **dict.fromkeys(
        ("numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct"), _reconstruct
    ),
    **dict.fromkeys(("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar"), _scalar),
}
_STAND_INS: tuple[Any, ...] = tuple((stand_in, name) for name, stand_in in _NAMES.items())


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Inside, torch takes the stand-ins, beside what the script trusts; NumPy itself it does not."""
    trusted = torch.serialization.get_safe_globals()
    numpy = [one for one in trusted if _called(one) in _NAMES]
    if numpy:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals([one for one in trusted if one not in numpy])
    try:
        with torch.serialization.safe_globals(list(_STAND_INS)):
            yield
    finally:
        torch.serialization.add_safe_globals(numpy)


def _called(known: Any) -> str:
    return known[1] if isinstance(known, tuple) else f"{known.__module__}.{known.__qualname__}"


def _plain(item: Any) -> Any:
    """The same with tensors in place of stand-ins."""
    if isinstance(item, _Array):
        return item.tensor
    if type(item) in {list, tuple}:
        return type(item)(map(_plain, item))
    if isinstance(item, dict):
        for key, value in item.items():
            item[key] = _plain(value)
    return item
