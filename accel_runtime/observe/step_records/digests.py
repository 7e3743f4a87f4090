"""Digests and summaries of tensors, hashes of samples, and states of random number generators.

torch is used only once the recorded script has imported it.
"""

from __future__ import annotations

import dataclasses
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import xxhash

from accel_runtime.observe.step_records.record import SKETCH_SIZE, Batch, Summary

__all__ = [
    "copy_values",
    "digest_generators",
    "digest_tensor",
    "list_batches",
    "list_indices",
    "list_tensors",
    "read_tensors",
    "summarize",
]

_BLOCK = 1 << 16
"""Signs of a sketch, which repeat with another sign for each block."""
_CHUNK = 16 * _BLOCK
"""Elements that are converted to float64 at once, which a cache holds."""
_MAX_BLOCKS = 1 << 16
"""Blocks with a sign of their own: 4 billion elements."""
_MAX_DEPTH = 4
"""Levels of a batch that are searched for samples."""
_MAX_ROWS = 65536
"""Samples of a batch with a hash of their own."""


def read_tensors(
    tensors: Sequence[Any], find: Callable[[str], Summary | None]
) -> list[tuple[str, Summary | None] | None]:
    """Return digest and summary of each tensor; None for one that cannot be read, as some of subclasses.

    Small tensors of a device are copied to the host together.

    Args:
        tensors: The tensors.
        find: Returns the summary of a digest if it is known.
    """
    every = [_read_values(tensor) for tensor in tensors]
    _move_small([values for values in every if values is not None])
    known: dict[str, Summary | None] = {}
    found: list[tuple[str, Summary | None] | None] = []
    for values in every:
        if values is None:
            found.append(None)
            continue
        digest = values.digest()
        if digest not in known:
            known[digest] = find(digest) or values.summarize()
        found.append((digest, known[digest]))
    return found


def digest_tensor(tensor: Any) -> str:
    """Return a digest of dtype, shape and bytes of the part of a tensor that this rank has."""
    return _Values(tensor).digest()


def summarize(tensor: Any) -> Summary | None:
    """Return the numbers that describe a tensor; None if it has no floating-point numbers."""
    (found,) = read_tensors([tensor], lambda _: None)
    return found and found[1]


class _Values:
    """The values of a tensor that this rank has."""

    def __init__(self, tensor: Any) -> None:
        values = _get_values(tensor)
        self.dtype, self.shape = tensor.dtype, tuple(values.shape)
        self.is_floating_point: bool = values.is_floating_point()
        self.flat = values.reshape(-1).contiguous()
        self.on_host: Any = self.flat if values.device.type == "cpu" else None
        """The values in the memory of the host, once they were copied."""

    def digest(self) -> str:
        """Return the digest."""
        if self.on_host is None:
            self.on_host = self.flat.cpu()
        checksum = xxhash.xxh3_128(f"{self.dtype} {self.shape}".encode())
        checksum.update(self.on_host.view(_torch().uint8).numpy())
        return checksum.hexdigest()

    def summarize(self) -> Summary | None:
        """Return the summary; None for values that are no floating-point numbers."""
        if not self.is_floating_point:
            return None
        is_small = self.on_host is not None and 0 < self.flat.numel() <= _BLOCK
        return _summarize_small(self) if is_small else _summarize_large(self)

    def build_summary(self, square: float, largest: float, counts: tuple[int, int], sketch: Any) -> Summary:
        """Return a summary; the counts are those of zeros and of elements that are not finite."""
        size = max(self.flat.numel(), 1)
        shares = (counts[0] / size, counts[1] / size)
        dtype = str(self.dtype).removeprefix("torch.")
        return Summary(dtype, self.shape, float(square) ** 0.5, float(largest), *shares, tuple(sketch))


def _read_values(tensor: Any) -> _Values | None:
    try:
        values = _Values(tensor)
        if values.on_host is not None:
            values.on_host.view(_torch().uint8)
    except (RuntimeError, TypeError, NotImplementedError):  # of a subclass, quantized, nested
        return None
    return values


def _move_small(every: Sequence[_Values]) -> None:
    """Copy small tensors of a device to the host, those of a format in one transfer."""
    groups: dict[tuple[Any, Any], list[_Values]] = {}
    for one in every:
        if one.on_host is None and one.flat.numel() <= _BLOCK:
            groups.setdefault((one.flat.device, one.flat.dtype), []).append(one)
    for group in groups.values():
        if len(group) > 1:
            sizes = [one.flat.numel() for one in group]
            for one, flat in zip(
                group, _torch().cat([one.flat for one in group]).cpu().split(sizes), strict=True
            ):
                one.on_host = flat


def _summarize_small(one: _Values) -> Summary:
    """Return the summary of a tensor in the memory of the host that has no more than a block; numpy's calls take less time."""
    np = sys.modules["numpy"]
    values = one.on_host.double().numpy()
    non_finite = 0
    with np.errstate(all="ignore"):
        square = values @ values
        if not math.isfinite(square):
            finite = np.isfinite(values)
            non_finite = int(len(values) - np.count_nonzero(finite))
            values = np.where(finite, values, 0.0)
            square = values @ values
    # Elements that are not finite were counted as zeros.
    zeros = int(len(values) - np.count_nonzero(values)) - non_finite
    signs, block_signs = (_build_signs("cpu", size).numpy() for size in (_BLOCK, _MAX_BLOCKS))
    rows = np.zeros((-(-len(values) // SKETCH_SIZE), SKETCH_SIZE))
    np.multiply(values, signs[: len(values)], out=rows.reshape(-1)[: len(values)])
    sketch = np.full(len(rows), block_signs[0]) @ rows
    return one.build_summary(square, np.abs(values).max(), (zeros, non_finite), sketch.tolist())


def _summarize_large(one: _Values) -> Summary:
    """Return the summary of a tensor of any size, computed on its device."""
    torch, flat = _torch(), one.flat
    if flat.device.type == "mps":  # has no float64
        flat = flat.cpu()
    signs, block_signs = _build_signs(flat.device, _BLOCK), _build_signs(flat.device, _MAX_BLOCKS)
    total = torch.zeros(4 + SKETCH_SIZE, dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK].double()
        square = torch.dot(chunk, chunk)
        if not square.isfinite():
            finite = torch.isfinite(chunk)
            total[3] += chunk.numel() - finite.sum()
            chunk = torch.where(finite, chunk, 0.0)
            square = torch.dot(chunk, chunk)
        total[0] += square
        least, largest = torch.aminmax(chunk)
        total[1] = torch.maximum(total[1], torch.maximum(-least, largest))
        total[2] += chunk.numel() - torch.count_nonzero(chunk)
        first, count = start // _BLOCK % _MAX_BLOCKS, chunk.numel() // _BLOCK
        blocks = chunk[: count * _BLOCK].reshape(count, _BLOCK)
        # The sum of the blocks with their signs comes first: it reads the values once.
        summed = block_signs[first : first + count] @ blocks
        rest = chunk[count * _BLOCK :]
        if rest.numel():
            summed[: rest.numel()] += block_signs[first + count] * rest
        total[4:] += (signs * summed).reshape(-1, SKETCH_SIZE).sum(0)
    square, largest, zeros, non_finite, *sketch = total.tolist()
    # Elements that are not finite were counted as zeros.
    return one.build_summary(square, largest, (int(zeros - non_finite), int(non_finite)), sketch)


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
    if _is_array(value):
        if rows := _hash_rows(value):
            columns[name if value.shape else f"{name}()"] = rows
        return
    value = _list_fields(value)
    if depth > _MAX_DEPTH or not isinstance(value, (Mapping, list, tuple)):
        return
    if not isinstance(value, Mapping) and value and all(isinstance(one, (str, bytes)) for one in value):
        columns[name] = tuple(_hash(repr(one).encode("utf-8", "backslashreplace")) for one in value)
        return
    for key, one in value.items() if isinstance(value, Mapping) else enumerate(value):
        _add_columns(columns, f"{name}.{key}", one, depth + 1)
    if not isinstance(value, Mapping) and value and all(_is_array(one) and one.shape for one in value):
        # Lists of samples of different sizes are batches too.
        samples = [_hash_rows(one) for one in value]
        if all(samples):
            columns[f"{name}[]"] = tuple(_hash("".join(one).encode("ascii")) for one in samples)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _hash_rows(value: Any) -> tuple[str, ...]:
    """Return a hash of each row of a tensor or an array; none of activations and parameters, which are computed and no samples."""
    torch = _torch()
    try:
        tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
        if tensor.grad_fn is not None or isinstance(tensor, torch.nn.Parameter):
            return ()
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
    return tuple(map(_hash, rows))


def _hash(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(value)


def _torch() -> Any:
    return sys.modules["torch"]
