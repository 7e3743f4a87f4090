"""Digests and summaries of tensors, hashes of samples, and states of random number generators.

torch is used only once the recorded script has imported it.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import xxhash

from accel_runtime.extensions.numerics.record import SKETCH_SIZE, Batch, Summary

__all__ = [
    "copy_values",
    "digest_generators",
    "digest_tensor",
    "list_batches",
    "list_indices",
    "list_tensors",
    "summarize",
]

_BLOCK = 1 << 16
"""Signs of a sketch, which repeat with another sign for each block."""
_CHUNK = 64 * _BLOCK
"""Elements that are converted to float64 at once."""
_MAX_BLOCKS = 1 << 16
"""Blocks with a sign of their own: 4 billion elements."""
_MAX_DEPTH = 4
"""Levels of a batch that are searched for samples."""
_MAX_ROWS = 65536
"""Samples of a batch with a hash of their own."""


def digest_tensor(tensor: Any) -> str:
    """Return a digest of dtype, shape and bytes of the part of a tensor that this rank has."""
    values = _get_values(tensor)
    data = values.reshape(-1).contiguous().cpu().view(_torch().uint8).numpy()
    checksum = xxhash.xxh3_128(f"{tensor.dtype} {tuple(values.shape)}".encode())
    checksum.update(data)
    return checksum.hexdigest()


def summarize(tensor: Any) -> Summary | None:
    """Return the numbers that describe a tensor; None if it has no floating-point numbers."""
    torch = _torch()
    values = _get_values(tensor)
    if not values.is_floating_point():
        return None
    flat = values.reshape(-1)
    if flat.device.type == "mps":  # has no float64
        flat = flat.cpu()
    signs, block_signs = _build_signs(flat.device, _BLOCK), _build_signs(flat.device, _MAX_BLOCKS)
    total = torch.zeros(4 + SKETCH_SIZE, dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK].double()
        finite = torch.isfinite(chunk)
        total[3] += chunk.numel() - finite.sum()
        chunk = torch.where(finite, chunk, 0.0)
        total[0] += chunk.square().sum()
        total[1] = torch.maximum(total[1], chunk.abs().max())
        total[2] += chunk.numel() - torch.count_nonzero(chunk)
        width = min(_BLOCK, -(-chunk.numel() // SKETCH_SIZE) * SKETCH_SIZE)
        blocks = torch.nn.functional.pad(chunk, (0, -chunk.numel() % width)).reshape(-1, width)
        sums = (blocks * signs[:width]).reshape(len(blocks), -1, SKETCH_SIZE).sum(1)
        first = start // _BLOCK % _MAX_BLOCKS
        total[4:] += block_signs[first : first + len(blocks)] @ sums
    square, largest, zeros, non_finite, *sketch = total.tolist()
    size = max(flat.numel(), 1)
    # Elements that are not finite were counted as zeros.
    shares = ((zeros - non_finite) / size, non_finite / size)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Summary(dtype, tuple(values.shape), square**0.5, largest, *shares, tuple(sketch))


@lru_cache(maxsize=8)
def _build_signs(device: Any, size: int) -> Any:
    """Return signs that are the same in each run, and on each device."""
    torch = _torch()
    values = torch.frombuffer(bytearray(random.Random(size).randbytes(size)), dtype=torch.uint8)  # noqa: S311 - signs
    return (2.0 * (values & 1).double() - 1.0).to(device)


def _get_values(tensor: Any) -> Any:
    tensor = tensor.detach()
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    tensor = tensor.to_dense() if tensor.layout != _torch().strided else tensor
    tensor = tensor.resolve_conj().resolve_neg() if tensor.is_complex() else tensor
    return _torch().view_as_real(tensor) if tensor.is_complex() else tensor


def list_tensors(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of an output of a module, with their positions in it."""
    if isinstance(value, _torch().Tensor):
        yield name, value
        return
    value = _list_fields(value)
    if depth <= _MAX_DEPTH and isinstance(value, (Mapping, list, tuple)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, one in items:
            yield from list_tensors(one, f"{name}.{key}", depth + 1)


def copy_values(tensor: Any) -> Any:
    """Return a copy of the part of a tensor that this rank has, in the memory of the host."""
    return _get_values(tensor).to("cpu", copy=True).contiguous()


def _list_fields(value: Any) -> Any:
    """Return the fields of a dataclass by name; other values as they are."""
    if not dataclasses.is_dataclass(value) or isinstance(value, (type, Mapping)):
        return value
    return {one.name: getattr(value, one.name, None) for one in dataclasses.fields(value)}


def digest_generators() -> dict[str, str]:
    """Return digests of the states of the generators of Python, numpy and torch, by name."""
    torch = _torch()
    states = {"python": repr(random.getstate()).encode("utf-8")}
    if "numpy.random" in sys.modules:
        kind, keys, *position = sys.modules["numpy.random"].get_state()
        states["numpy"] = f"{kind} {position}".encode() + keys.tobytes()
    states["torch"] = torch.get_rng_state().numpy().tobytes()
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return {name: xxhash.xxh3_64_hexdigest(state) for name, state in states.items()}


# Samples


def list_batches(source: str, batch: Any, indices: tuple[str, ...] = ()) -> tuple[Batch, ...]:
    """Return the identities of the samples of a batch: indices if they are known, and hashes for each tensor, array or list."""
    columns: dict[str, tuple[str, ...]] = {"index": indices} if indices else {}
    _add_columns(columns, "", batch, 0)
    return tuple(Batch(source, name, rows) for name, rows in columns.items())


def list_indices(index: Any) -> tuple[str, ...]:
    """Return the indices of a batch as texts; none of a dataset without indices."""
    index = getattr(index, "indices", index)  # a message to workers of a prepared loader
    indices = list(index) if isinstance(index, (list, tuple)) else [index]
    return () if any(one is None for one in indices) else tuple(map(str, indices))


def _add_columns(columns: dict[str, tuple[str, ...]], name: str, value: Any, depth: int) -> None:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        if rows := _hash_rows(value):
            columns[name] = rows
        return
    value = _list_fields(value)
    if depth > _MAX_DEPTH or not isinstance(value, (Mapping, list, tuple)):
        return
    if not isinstance(value, Mapping) and value and all(isinstance(one, (str, bytes)) for one in value):
        columns[name] = tuple(_hash(repr(one).encode("utf-8", "backslashreplace")) for one in value)
        return
    for key, one in value.items() if isinstance(value, Mapping) else enumerate(value):
        _add_columns(columns, f"{name}.{key}", one, depth + 1)


def _hash_rows(value: Any) -> tuple[str, ...]:
    """Return a hash of each row of a tensor or an array."""
    torch = _torch()
    try:
        tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
        values = _get_values(tensor).cpu().contiguous()
        count = values.shape[0] if values.dim() and values.shape[0] <= _MAX_ROWS else 1
        if not values.numel():
            return ()
        rows = values.reshape(count, -1).view(torch.uint8).numpy()
    except (
        RuntimeError,
        TypeError,
        ValueError,
        NotImplementedError,
    ):  # on the meta device, of a subclass, of objects
        return ()
    return tuple(_hash(row.tobytes()) for row in rows)


def _hash(value: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(value)


def _torch() -> Any:
    return sys.modules["torch"]
