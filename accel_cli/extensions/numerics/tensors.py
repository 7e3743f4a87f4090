"""The tensors of recorded steps, which some records keep: how exactly two of them differ."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

__all__ = ["TensorFile", "compare_values"]

_TYPES = {
    "F64": ("float64", "<f8"),
    "F32": ("float32", "<f4"),
    "F16": ("float16", "<f2"),
    "BF16": ("bfloat16", "<u2"),
    "I64": ("int64", "<i8"),
    "I32": ("int32", "<i4"),
    "U8": ("uint8", "u1"),
    "BOOL": ("bool", "?"),
}
"""By their names in a file of safetensors: those of torch, and of numpy, which has no bfloat16."""


class TensorFile:
    """A file of safetensors, which is read without torch; one that is missing or damaged has no tensors."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _header(self) -> tuple[int, dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size)) if size <= self._path.stat().st_size else {}
                return 8 + size, header
        except (OSError, ValueError):
            return 0, {}

    def read(self, key: str, digest: str) -> np.ndarray[Any, Any] | None:
        """Return the values of a tensor as float64; None if the file does not have that tensor."""
        start, header = self._header
        entry = header.get(key)
        if entry is None or entry["dtype"] not in _TYPES:
            return None
        name, kind = _TYPES[entry["dtype"]]
        begin, end = entry["data_offsets"]
        with self._path.open("rb") as file:
            file.seek(start + begin)
            data = file.read(end - begin)
        # A module that is called twice in a step has one name.
        checksum = xxhash.xxh3_128(bytes(f"torch.{name} {tuple(entry['shape'])}", "ascii"))
        checksum.update(data)
        if checksum.hexdigest() != digest:
            return None
        values = np.frombuffer(data, kind)
        if name == "bfloat16":
            values = (values.astype("<u4") << 16).view("<f4")
        return values.astype("f8").reshape(entry["shape"])


def compare_values(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> tuple[float, str]:
    """Return the norm of the difference of two tensors relative to the larger one, and which elements differ."""
    is_equal = (first == second) | (np.isnan(first) & np.isnan(second))
    finite = np.isfinite(first) & np.isfinite(second)
    distances = np.where(finite, np.abs(np.where(finite, first, 0) - np.where(finite, second, 0)), 0.0)
    distances[~finite & ~is_equal] = np.inf
    size = max(float(np.linalg.norm(np.where(finite, each, 0))) for each in (first, second))
    relative = float(np.linalg.norm(distances)) / size if size else float(distances.any())
    index = np.unravel_index(int(np.argmax(distances)), distances.shape)
    place = f" at [{', '.join(map(str, map(int, index)))}]" if index else ""
    count = int(np.count_nonzero(~is_equal))
    return relative, (
        f"{count} of {first.size} elements differ, most{place}: {first[index]:.9g} and {second[index]:.9g}"
    )
